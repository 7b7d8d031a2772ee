"""shoal: a sparse parameter server that you can pip install.

Tables hold rows by 64-bit key, with the optimizer that moves them; ``pull`` reads rows, ``push`` sends gradients.

Examples
--------
>>> import numpy as np
>>> import shoal
>>> with shoal.local() as store:
...     user = store.table("user", dim=4, optimizer=shoal.Adagrad(lr=0.1))
...     user.push(np.array([7, 2**64 - 1], np.uint64), np.ones((2, 4), np.float32)).wait()
...     len(user)
2
"""

from typing import TYPE_CHECKING, Any

from shoal import schedules
from shoal.cluster import connect, launch
from shoal.cluster.worker.filters import Filters
from shoal.consistency import ASP, BSP, SSP
from shoal.data import (
    Batch,
    FeatureNames,
    Reader,
    hash_strings,
    read_arrow,
    read_criteo,
    read_csv,
    read_libffm,
    read_libsvm,
    read_parquet,
    read_vw,
)
from shoal.errors import (
    ClosedError,
    CorruptionError,
    DeadlineExceededError,
    FencedError,
    MemoryBudgetExceededError,
    NotConnectedError,
    ProtocolError,
    SaveConflictError,
    ServerLostError,
    ShoalError,
    SnapshotLostError,
    StorageError,
    WrongProcessError,
)
from shoal.export import Export, ExportTable, open_export
from shoal.lifecycle import AfterBloom, AfterCount, DecayedScore, MaxRows, MinNorm, TimeToLive, WithProbability
from shoal.metrics import Metrics
from shoal.models import DBPG, FactorizationMachine, LogisticRegression, LogisticRegressionGrid
from shoal.optim import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Constant,
    GroupFTRL,
    Momentum,
    Normal,
    Proximal,
    RowWiseAdagrad,
    Uniform,
    Zeros,
)
from shoal.store.base import Store
from shoal.store.local import LocalStore, local
from shoal.table.arrays import mix, unmix
from shoal.table.dense import DenseTable
from shoal.table.future import Future
from shoal.table.key_batch import KeyBatch
from shoal.table.spec import TableSpec
from shoal.table.stats import TableStats
from shoal.table.table import Table
from shoal.tools.compact import compact
from shoal.tools.load import load
from shoal.tools.reports import report
from shoal.tools.sizing import Estimate, Rates, estimate, measure_rates

if TYPE_CHECKING:
    from shoal import serve as serve
    from shoal import sklearn as sklearn
    from shoal import torch as torch
    from shoal.tools import convert as convert

__version__ = "0.1.0"

__all__ = [
    "ASP",
    "BSP",
    "DBPG",
    "FTRL",
    "SGD",
    "SSP",
    "Adagrad",
    "Adam",
    "AdamW",
    "AfterBloom",
    "AfterCount",
    "Batch",
    "ClosedError",
    "Constant",
    "CorruptionError",
    "DeadlineExceededError",
    "DecayedScore",
    "DenseTable",
    "Estimate",
    "Export",
    "ExportTable",
    "FactorizationMachine",
    "FeatureNames",
    "FencedError",
    "Filters",
    "Future",
    "GroupFTRL",
    "KeyBatch",
    "LocalStore",
    "LogisticRegression",
    "LogisticRegressionGrid",
    "MaxRows",
    "MemoryBudgetExceededError",
    "Metrics",
    "MinNorm",
    "Momentum",
    "Normal",
    "NotConnectedError",
    "ProtocolError",
    "Proximal",
    "Rates",
    "Reader",
    "RowWiseAdagrad",
    "SaveConflictError",
    "ServerLostError",
    "ShoalError",
    "SnapshotLostError",
    "StorageError",
    "Store",
    "Table",
    "TableSpec",
    "TableStats",
    "TimeToLive",
    "Uniform",
    "WithProbability",
    "WrongProcessError",
    "Zeros",
    "compact",
    "connect",
    "estimate",
    "hash_strings",
    "launch",
    "load",
    "local",
    "measure_rates",
    "mix",
    "open_export",
    "read_arrow",
    "read_criteo",
    "read_csv",
    "read_libffm",
    "read_libsvm",
    "read_parquet",
    "read_vw",
    "report",
    "schedules",
    "unmix",
]


# Imported when they are first used: most take an extra, and longer than all of shoal.
_MODULES = {
    "convert": "shoal.tools.convert",
    "serve": "shoal.serve",
    "sklearn": "shoal.sklearn",
    "torch": "shoal.torch",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        import importlib

        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
