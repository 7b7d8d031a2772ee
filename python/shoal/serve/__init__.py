"""The prediction server: an exported model behind HTTP and gRPC. ``docs/serving.md`` defines its answers.

    store.py         a store that reads an export, so that models predict from it as they do from any other
    reloadable.py    what is served until something newer replaces it
    served.py        the model of the current version, and the swap to a newer one
    versions.py      several versions of a model: policy, labels, split
    live.py          a model over the tables of a running cluster
    limits.py        memory and size limits of requests
    inputs.py        the inputs of a model, and examples as a batch
    ipc.py           Arrow to examples
    bodies.py        bodies of requests to batches, and predictions back
    protocols.py     bodies of other servers' protocols, and descriptions of models in them
    native.py        what the engine answers without Python
    app.py           the routes, and what answers them
    server.py        the server
    asgi.py          the same as an application of ASGI
    open_inference.py  messages of gRPC to requests, and back
    grpc_server.py   the same routes over gRPC

Needs PyTorch for click models, pyarrow for Arrow bodies (extra: serve), and grpcio for gRPC (extra: grpc).
"""

from shoal.serve.asgi import make_app
from shoal.serve.limits import Limits
from shoal.serve.live import LiveModel
from shoal.serve.served import ServedModel
from shoal.serve.server import serve
from shoal.serve.versions import ServedVersions, Settings

__all__ = ["Limits", "LiveModel", "ServedModel", "ServedVersions", "Settings", "make_app", "serve"]
