"""Types of numbers by name: those of NumPy, and bfloat16 and others that it does not have."""

from typing import Any, TypeAlias

import numpy as np

Dtype: TypeAlias = str | type[Any] | np.dtype[Any]


def dtype_name(dtype: Dtype | None) -> str:
    """Return the name of a type: of NumPy's as NumPy has it, of any other what was given."""
    try:
        return "None" if dtype is None else np.dtype(dtype).name
    except TypeError:
        return str(dtype)
