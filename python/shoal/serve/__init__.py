"""The prediction server: an exported model behind HTTP. ``docs/serving.md`` defines what it answers.

    store.py         a store that reads an export, so that models predict from it as they do from any other
    served.py        the model of the version in place, and the swap to a newer one
    limits.py        what requests may take
    inputs.py        what a model takes, and the batch that examples become
    instances.py     JSON and lines of text to examples
    ipc.py           Arrow to examples
    bodies.py        bodies of requests to batches, and predictions back
    connections.py   how many connections there are, and how long they may keep silent
    app.py           the routes, the metrics, the server

Needs starlette, uvicorn and prometheus-client (extra: serve); PyTorch for click models alone.
"""

try:
    from shoal.serve.app import make_app, serve
except ModuleNotFoundError as error:
    raise ImportError(f"shoal.serve takes {error.name}: pip install 'shoal[serve]'") from error

from shoal.serve.limits import Limits
from shoal.serve.served import ServedModel

__all__ = ["Limits", "ServedModel", "make_app", "serve"]
