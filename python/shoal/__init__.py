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

from typing import TYPE_CHECKING

from shoal.base.lazy import lazy

if TYPE_CHECKING:
    from shoal import checkpoint as checkpoint
    from shoal import data as data
    from shoal import errors as errors
    from shoal import export as export
    from shoal import lineage as lineage
    from shoal import metrics as metrics
    from shoal import models as models
    from shoal import ray as ray
    from shoal import schedules as schedules
    from shoal import serve as serve
    from shoal import sketches as sketches
    from shoal import sklearn as sklearn
    from shoal import tools as tools
    from shoal import torch as torch
    from shoal import tracking as tracking
    from shoal.cluster.launch.local_cluster import launch as launch
    from shoal.cluster.worker.cache import Cache as Cache
    from shoal.cluster.worker.connect import connect as connect
    from shoal.cluster.worker.filters import Filters as Filters
    from shoal.consistency import ASP as ASP
    from shoal.consistency import BSP as BSP
    from shoal.consistency import SSP as SSP
    from shoal.data import Batch as Batch
    from shoal.data import hash_strings as hash_strings
    from shoal.data import read_arrow as read_arrow
    from shoal.data import read_criteo as read_criteo
    from shoal.data import read_csv as read_csv
    from shoal.data import read_kafka as read_kafka
    from shoal.data import read_libffm as read_libffm
    from shoal.data import read_libsvm as read_libsvm
    from shoal.data import read_parquet as read_parquet
    from shoal.data import read_vw as read_vw
    from shoal.errors import CorruptionError as CorruptionError
    from shoal.errors import DeadlineExceededError as DeadlineExceededError
    from shoal.errors import MemoryBudgetExceededError as MemoryBudgetExceededError
    from shoal.errors import NotConnectedError as NotConnectedError
    from shoal.errors import ServerLostError as ServerLostError
    from shoal.errors import ShoalError as ShoalError
    from shoal.lifecycle import AfterBloom as AfterBloom
    from shoal.lifecycle import AfterCount as AfterCount
    from shoal.lifecycle import DecayedScore as DecayedScore
    from shoal.lifecycle import MaxRows as MaxRows
    from shoal.lifecycle import MinNorm as MinNorm
    from shoal.lifecycle import TimeToLive as TimeToLive
    from shoal.lifecycle import WithProbability as WithProbability
    from shoal.models import FactorizationMachine as FactorizationMachine
    from shoal.models import LogisticRegression as LogisticRegression
    from shoal.optim import FTRL as FTRL
    from shoal.optim import SGD as SGD
    from shoal.optim import Adagrad as Adagrad
    from shoal.optim import Adam as Adam
    from shoal.optim import AdamW as AdamW
    from shoal.optim import Add as Add
    from shoal.optim import Constant as Constant
    from shoal.optim import GroupFTRL as GroupFTRL
    from shoal.optim import Momentum as Momentum
    from shoal.optim import Normal as Normal
    from shoal.optim import Proximal as Proximal
    from shoal.optim import RowWiseAdagrad as RowWiseAdagrad
    from shoal.optim import Uniform as Uniform
    from shoal.optim import Zeros as Zeros
    from shoal.store.base import Store as Store
    from shoal.store.local import local as local
    from shoal.table.future import Future as Future
    from shoal.table.table import Table as Table
    from shoal.table.tiered import Tiered as Tiered
    from shoal.tools.load import load as load
    from shoal.user_functions import by_source as by_source
    from shoal.user_optimizer import UserOptimizer as UserOptimizer

__version__ = "0.1.0"

_NAMES_OF = {
    "shoal.cluster.launch.local_cluster": "launch",
    "shoal.cluster.worker.cache": "Cache",
    "shoal.cluster.worker.connect": "connect",
    "shoal.cluster.worker.filters": "Filters",
    "shoal.consistency": "ASP BSP SSP",
    "shoal.data": "Batch hash_strings read_arrow read_criteo read_csv read_kafka read_libffm read_libsvm "
    "read_parquet read_vw",
    "shoal.errors": "CorruptionError DeadlineExceededError MemoryBudgetExceededError NotConnectedError ServerLostError "
    "ShoalError",
    "shoal.lifecycle": "AfterBloom AfterCount DecayedScore MaxRows MinNorm TimeToLive WithProbability",
    "shoal.models": "FactorizationMachine LogisticRegression",
    "shoal.optim": "FTRL SGD Adagrad Adam AdamW Add Constant GroupFTRL Momentum Normal Proximal RowWiseAdagrad Uniform "
    "Zeros",
    "shoal.store.base": "Store",
    "shoal.store.local": "local",
    "shoal.table.future": "Future",
    "shoal.table.table": "Table",
    "shoal.table.tiered": "Tiered",
    "shoal.tools.load": "load",
    "shoal.user_functions": "by_source",
    "shoal.user_optimizer": "UserOptimizer",
}
_MODULES = (
    "checkpoint data errors export lineage metrics models ray schedules serve sketches sklearn tools torch tracking"
)

__all__ = " ".join(_NAMES_OF.values()).split()

if not TYPE_CHECKING:  # a type checker would accept any attribute
    __getattr__ = lazy(__name__, {**_NAMES_OF, "": _MODULES})


def __dir__() -> list[str]:
    return [*__all__, *_MODULES.split(), "__version__"]
