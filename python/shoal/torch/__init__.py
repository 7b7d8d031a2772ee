"""Shoal tables as the embedding layers of PyTorch models.

    keys --sort, each once--> pull --expand or pool--> float32 --model--> loss
    table <--push, one step-- sum per unique key <----- gradient <--backward--

    Embedding, EmbeddingBag   the modules; sparse.py is their base, ops.py their operators for torch.compile
    embedding_collections.py  several of them by feature, for KeyedJaggedTensors and the users of TorchRec
    features.py, inputs.py    what a model reads of an example, and a reader's batches as tensors of it
    model.py, models/         click models, which get their sparse parts from a factory; tables.py has factories
    click_model.py            a click model that learns from readers; config.py its TOML; grid.py several at once
    retrieval.py              vectors of users and items, and recall
    pipeline.py               reading, sorting and pulling ahead of the model
    dense.py                  the dense part on the servers
    recipe.py                 clipping, schedules, plateaus and averages of a dense part; losses.py: what it minimizes
    loader.py                 a reader's batches in the workers of a DataLoader

A module holds no weights: the rows and their optimizer belong to the table. A push is made by ``backward``, not by a
torch optimizer's ``step``. docs/torch.md describes the consequences.

The extra ``torch`` installs the dependencies of these modules; ``import shoal`` does not import them, but the first use
of ``shoal.torch`` does.

Examples
--------
>>> import torch
>>> store = shoal.local()
>>> user = shoal.torch.Embedding(store.table("user", dim=2, optimizer=shoal.SGD(lr=1.0)))
>>> user(torch.tensor([[7, 3], [7, 7]])).sum().backward()
>>> user(torch.tensor([7, 3, 5])).tolist()
[[-3.0, -3.0], [-1.0, -1.0], [0.0, 0.0]]
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("shoal.torch needs PyTorch 2.4 or later: pip install 'shoal[torch]'") from error

from shoal.config import Feature, Task
from shoal.models.features import Features
from shoal.torch import models, retrieval
from shoal.torch.bag import EmbeddingBag
from shoal.torch.click_model import ClickModel
from shoal.torch.config import load
from shoal.torch.dense import DenseParameters
from shoal.torch.embedding import Embedding
from shoal.torch.embedding_collections import EmbeddingBagCollection, EmbeddingCollection
from shoal.torch.grid import ClickModelGrid
from shoal.torch.inputs import Inputs, Items, inputs
from shoal.torch.loader import BatchDataset, BatchLoader
from shoal.torch.model import Model
from shoal.torch.pipeline import Pipeline
from shoal.torch.recipe import Recipe
from shoal.torch.sparse import SparseModule, accumulate, pull_together
from shoal.torch.tables import TableRule, tables

__all__ = [
    "BatchDataset",
    "BatchLoader",
    "ClickModel",
    "ClickModelGrid",
    "DenseParameters",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "Feature",
    "Features",
    "Inputs",
    "Items",
    "Model",
    "Pipeline",
    "Recipe",
    "SparseModule",
    "TableRule",
    "Task",
    "accumulate",
    "inputs",
    "load",
    "models",
    "pull_together",
    "retrieval",
    "tables",
]
