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
from shoal.compaction import compact
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
from shoal.dense import DenseTable
from shoal.errors import (
    ClosedError,
    CorruptionError,
    DeadlineExceeded,
    Fenced,
    MemoryBudgetExceeded,
    NotConnected,
    ProtocolError,
    SaveConflict,
    ServerLost,
    ShoalError,
    SnapshotLost,
    StorageError,
    WrongProcess,
)
from shoal.estimates import Estimate, Rates, estimate, measure_rates
from shoal.export import Export, ExportTable, open_export
from shoal.lifecycle import AfterBloom, AfterCount, DecayedScore, MaxRows, MinNorm, TimeToLive, WithProbability
from shoal.metrics import Metrics
from shoal.models import DBPG, FactorizationMachine, LogisticRegression, LogisticRegressionGrid
from shoal.opening import load
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
from shoal.reports import report
from shoal.rpc.filters import Filters
from shoal.store import LocalStore, Store, local
from shoal.table import Handle, KeyBatch, Table, TableSpec, TableStats, mix, unmix

if TYPE_CHECKING:
    from shoal import exchange as exchange
    from shoal import serve as serve
    from shoal import sklearn as sklearn
    from shoal import torch as torch

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
    "DeadlineExceeded",
    "DecayedScore",
    "DenseTable",
    "Estimate",
    "Export",
    "ExportTable",
    "FactorizationMachine",
    "FeatureNames",
    "Fenced",
    "Filters",
    "GroupFTRL",
    "Handle",
    "KeyBatch",
    "LocalStore",
    "LogisticRegression",
    "LogisticRegressionGrid",
    "MaxRows",
    "MemoryBudgetExceeded",
    "Metrics",
    "MinNorm",
    "Momentum",
    "Normal",
    "NotConnected",
    "ProtocolError",
    "Proximal",
    "Rates",
    "Reader",
    "RowWiseAdagrad",
    "SaveConflict",
    "ServerLost",
    "ShoalError",
    "SnapshotLost",
    "StorageError",
    "Store",
    "Table",
    "TableSpec",
    "TableStats",
    "TimeToLive",
    "Uniform",
    "WithProbability",
    "WrongProcess",
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
_MODULES = ("exchange", "serve", "sklearn", "torch")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        import importlib

        return importlib.import_module(f"shoal.{name}")
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
