"""Checks of the descriptions of stores and tables.

Threads: no state.
"""

from msgspec import structs

from shoal import _core
from shoal.base.sizes import memory_bytes
from shoal.table.spec import TableSpec


def make_budget(memory: int, slots: int) -> _core.Budget:
    """Make a memory budget of ``memory`` bytes, divided equally among ``slots`` slots."""
    return _core.Budget(slots, memory_bytes(memory))


def check_same(known: TableSpec, spec: TableSpec, read_from: str | None = None) -> None:
    """Raise ValueError if a table's description differs from a requested or saved one."""
    if known != spec:
        names = [one.name for one in structs.fields(TableSpec) if getattr(known, one.name) != getattr(spec, one.name)]
        if read_from is not None:
            there, here = (", ".join(f"{name} {getattr(one, name)!r}" for name in names) for one in (spec, known))
            raise ValueError(
                f"table {spec.name!r} has {there} in {read_from}, and {here} in this store: make it with the same "
                f"description, or under another name"
            )
        differ = [f"{name} {getattr(known, name)!r} instead of {getattr(spec, name)!r}" for name in names]
        raise ValueError(
            f"table {spec.name!r} exists with {', '.join(differ)}: choose another name, or that description"
        )
