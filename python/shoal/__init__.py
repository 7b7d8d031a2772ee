"""shoal: a sparse parameter server that you can pip install.

A table holds rows by 64-bit key, and the optimizer that updates them; ``pull`` reads rows, ``push`` sends gradients.

Examples
--------
>>> import numpy as np
>>> import shoal
>>> with shoal.local() as store:
...     user = store.table("user", dim=4, optimizer=shoal.Adagrad(lr=0.1))
...     user.push(np.array([7, 2**64 - 1], np.uint64), np.ones((2, 4), np.float32)).result()
...     len(user)
2
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal import cluster as cluster
    from shoal import data as data
    from shoal import errors as errors
    from shoal import export as export
    from shoal import lifecycle as lifecycle
    from shoal import metrics as metrics
    from shoal import models as models
    from shoal import optim as optim
    from shoal import ray as ray
    from shoal import schedules as schedules
    from shoal import serve as serve
    from shoal import sketches as sketches
    from shoal import sklearn as sklearn
    from shoal import torch as torch
    from shoal.base.logs import configure_logging
    from shoal.cluster.launch.local_cluster import launch
    from shoal.cluster.worker.cache import Cache
    from shoal.cluster.worker.connect import connect
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
        ClusterChangedError,
        CorruptionError,
        DeadlineExceededError,
        DependencyError,
        FencedError,
        MemoryBudgetExceededError,
        NotConnectedError,
        ProtocolError,
        SaveConflictError,
        ServerLostError,
        ShoalError,
        SnapshotLostError,
        StorageError,
        UserCodeError,
        WorkerLostError,
        WorkersChangedError,
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
        Add,
        Constant,
        GroupFTRL,
        Momentum,
        Normal,
        Proximal,
        RowWiseAdagrad,
        Uniform,
        Zeros,
    )
    from shoal.sketches import CountMin
    from shoal.store.base import Store
    from shoal.store.local import LocalStore, local
    from shoal.table.arrays import mix, unmix
    from shoal.table.dense import DenseTable
    from shoal.table.future import Future
    from shoal.table.key_batch import KeyBatch
    from shoal.table.spec import TableSpec
    from shoal.table.stats import TableStats, TierStats
    from shoal.table.table import Table
    from shoal.table.tiered import Tiered
    from shoal.tools import convert as convert
    from shoal.tools.compact import compact
    from shoal.tools.load import load
    from shoal.tools.reports import report
    from shoal.tools.sizing import Estimate, Rates, TierEstimate, estimate, measure_rates
    from shoal.tracking import MLflow, TensorBoard
    from shoal.user_functions import by_source
    from shoal.user_optimizer import UserOptimizer

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
    "Add",
    "AfterBloom",
    "AfterCount",
    "Batch",
    "Cache",
    "ClosedError",
    "ClusterChangedError",
    "Constant",
    "CorruptionError",
    "CountMin",
    "DeadlineExceededError",
    "DecayedScore",
    "DenseTable",
    "DependencyError",
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
    "MLflow",
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
    "TensorBoard",
    "TierEstimate",
    "TierStats",
    "Tiered",
    "TimeToLive",
    "Uniform",
    "UserCodeError",
    "UserOptimizer",
    "WithProbability",
    "WorkerLostError",
    "WorkersChangedError",
    "WrongProcessError",
    "Zeros",
    "by_source",
    "compact",
    "configure_logging",
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


# Where each name is. Its module is imported when the name is first used: `import shoal` loads none of them.
_NAMES_OF = {
    "shoal.base.logs": "configure_logging",
    "shoal.cluster.launch.local_cluster": "launch",
    "shoal.cluster.worker.cache": "Cache",
    "shoal.cluster.worker.connect": "connect",
    "shoal.cluster.worker.filters": "Filters",
    "shoal.consistency": "ASP BSP SSP",
    "shoal.data": "Batch FeatureNames Reader hash_strings read_arrow read_criteo read_csv read_libffm read_libsvm "
    "read_parquet read_vw",
    "shoal.errors": "ClosedError ClusterChangedError CorruptionError DeadlineExceededError "
    "DependencyError FencedError MemoryBudgetExceededError NotConnectedError ProtocolError SaveConflictError "
    "ServerLostError ShoalError SnapshotLostError StorageError UserCodeError WorkerLostError WorkersChangedError "
    "WrongProcessError",
    "shoal.export": "Export ExportTable open_export",
    "shoal.lifecycle": "AfterBloom AfterCount DecayedScore MaxRows MinNorm TimeToLive WithProbability",
    "shoal.metrics": "Metrics",
    "shoal.models": "DBPG FactorizationMachine LogisticRegression LogisticRegressionGrid",
    "shoal.optim": "FTRL SGD Adagrad Adam AdamW Add Constant GroupFTRL Momentum Normal Proximal RowWiseAdagrad Uniform "
    "Zeros",
    "shoal.sketches": "CountMin",
    "shoal.store.base": "Store",
    "shoal.store.local": "LocalStore local",
    "shoal.table.arrays": "mix unmix",
    "shoal.table.dense": "DenseTable",
    "shoal.table.future": "Future",
    "shoal.table.key_batch": "KeyBatch",
    "shoal.table.spec": "TableSpec",
    "shoal.table.stats": "TableStats TierStats",
    "shoal.table.table": "Table",
    "shoal.table.tiered": "Tiered",
    "shoal.tools.compact": "compact",
    "shoal.tools.load": "load",
    "shoal.tools.reports": "report",
    "shoal.tools.sizing": "Estimate Rates TierEstimate estimate measure_rates",
    "shoal.tracking": "MLflow TensorBoard",
    "shoal.user_functions": "by_source",
    "shoal.user_optimizer": "UserOptimizer",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
_MODULES = {
    "convert": "shoal.tools.convert",
    "cluster": "shoal.cluster",
    "data": "shoal.data",
    "errors": "shoal.errors",
    "export": "shoal.export",
    "lifecycle": "shoal.lifecycle",
    "metrics": "shoal.metrics",
    "models": "shoal.models",
    "optim": "shoal.optim",
    "ray": "shoal.ray",
    "schedules": "shoal.schedules",
    "serve": "shoal.serve",
    "sketches": "shoal.sketches",
    "sklearn": "shoal.sklearn",
    "torch": "shoal.torch",
}


if not TYPE_CHECKING:  # a type checker would accept any attribute

    def __getattr__(name: str) -> Any:
        import importlib

        if name in _MODULE_OF:
            found = getattr(importlib.import_module(_MODULE_OF[name]), name)
        elif name in _MODULES:
            found = importlib.import_module(_MODULES[name])
        else:
            raise AttributeError(f"module 'shoal' has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
