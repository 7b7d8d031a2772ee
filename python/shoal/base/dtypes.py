"""Types of numbers by name: those of NumPy, and bfloat16 and others that it does not have.

NumPy is imported by the first name that is not one of tables: a scheduler needs none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Dtype: TypeAlias = "str | type[Any] | np.dtype[Any]"
_OF_TABLES = ("float32", "float16", "bfloat16", "int64")


def dtype_name(dtype: Dtype | None) -> str:
    """Return the name of a type: of NumPy's as NumPy has it, of any other what was given."""
    if isinstance(dtype, str) and dtype in _OF_TABLES:
        return dtype
    import numpy as np

    try:
        return "None" if dtype is None else np.dtype(dtype).name
    except TypeError:
        return str(dtype)
