"""The prediction server: an exported model behind HTTP. ``docs/serving.md`` tells what it answers.

    store.py    a store that reads an export, so that models predict from it as they do from any other
    served.py   the model of the version in place, and the swap to a newer one
    bodies.py   JSON and Arrow to batches, and predictions back
    app.py      the routes, the metrics, the server

Needs starlette, uvicorn and prometheus-client (extra: serve); PyTorch for click models alone.
"""

from shoal.serve.app import make_app, serve
from shoal.serve.served import Served

__all__ = ["Served", "make_app", "serve"]
