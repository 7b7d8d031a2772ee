"""Descriptions of tables: as users give them, and as the engine takes them."""

from __future__ import annotations

from typing import Any

import shoal
from shoal import _core
from shoal.table.spec import TableRecord, TableSpec

_SGD = shoal.SGD(lr=1.0)


def table_spec(dim: int = 1, optimizer: shoal.optim.Optimizer = _SGD, **fields: Any) -> TableSpec:
    """A table "t" of float32 that starts with zeros, but for other ``fields``."""
    usual = {"name": "t", "init": shoal.Zeros(), "dtype": "float32", "seed": 0}
    return TableSpec(dim=dim, optimizer=optimizer, **(usual | fields))


def native(spec: TableSpec) -> _core.TableSpec:
    return TableRecord.of(spec).native()


def native_spec(dim: int = 1, optimizer: shoal.optim.Optimizer = _SGD, **fields: Any) -> _core.TableSpec:
    return native(table_spec(dim, optimizer, **fields))
