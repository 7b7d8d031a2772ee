"""The array arguments of table methods: their types, checks and conversions.

Threads: no state.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal import _core

Keys: TypeAlias = npt.NDArray[np.uint64] | npt.NDArray[np.int64]
Rows: TypeAlias = npt.NDArray[np.float32]
AnyRows: TypeAlias = npt.NDArray[Any]  # float32, or int64 of a table of integers
Counts: TypeAlias = npt.NDArray[np.uint32]


def as_keys(keys: npt.ArrayLike, what: str = "keys") -> npt.NDArray[np.uint64]:
    """View integer ``keys`` as contiguous uint64[n]; signed keys are reinterpreted bit for bit as int64."""
    array = np.asarray(keys)
    if array.dtype not in (np.uint64, np.int64):
        if array.size == 0 and not isinstance(keys, np.ndarray):
            array = array.astype(np.uint64)
        if array.dtype.kind not in "iu":
            raise TypeError(
                f"{what} must be integers, such as uint64 or int64, got {array.dtype}: convert them, e.g. with "
                f"np.asarray(x, np.uint64)"
            )
        array = array.astype(np.int64 if array.dtype.kind == "i" else np.uint64)
    if array.ndim != 1:
        raise ValueError(f"{what} must have one dimension, got shape {array.shape}: pass {what}.ravel()")
    return np.ascontiguousarray(array).view(np.uint64)


def as_floats(rows: AnyRows) -> Rows:
    """View rows as the engine has them: an int64 is two float32, whose bits are copied only."""
    return rows if rows.dtype == np.float32 else rows.view(np.float32)


def as_rows(
    values: npt.ArrayLike, shape: tuple[int, int], table: str, what: str, dtype: npt.DTypeLike = np.float32
) -> AnyRows:
    """View ``values`` as contiguous ``dtype``[n, dim]; at dim 1 also [n]."""
    array = np.asarray(values)
    n, dim = shape
    wanted = np.dtype(dtype)
    if array.dtype != wanted:
        raise TypeError(f"table {table!r} takes {what} as {wanted}, got {array.dtype}: pass {what}.astype(np.{wanted})")
    if array.shape != shape and not (dim == 1 and array.shape == (n,)):
        raise ValueError(
            f"table {table!r} has dim {dim}, got {what} {array.shape} for {n} keys: pass {wanted}[{n}, {dim}]"
        )
    return np.ascontiguousarray(array).reshape(shape)


def as_counts(counts: npt.ArrayLike, n: int) -> Counts:
    """View ``counts`` as contiguous uint32[n], each at least 1."""
    array = np.asarray(counts)
    if array.dtype.kind not in "iu" or array.shape != (n,):
        raise ValueError(f"counts must be uint32[{n}], one for each unique key, got {array.dtype}{list(array.shape)}")
    if n and not 1 <= array.min() <= array.max() < 2**32:
        raise ValueError(f"counts must be from 1 to 2**32 - 1, got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, np.uint32)


def as_out(out: AnyRows | None, shape: tuple[int, int], table: str, dtype: npt.DTypeLike = np.float32) -> AnyRows:
    """Return ``out``, or a new array if it is None."""
    if out is None:
        return np.empty(shape, dtype)
    wanted = np.dtype(dtype)
    if not isinstance(out, np.ndarray) or out.dtype != wanted:
        raise TypeError(f"out must be a {wanted} array, got {getattr(out, 'dtype', type(out).__name__)}")
    if out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(
            f"out must be a writeable, C-contiguous {wanted}[{shape[0]}, {shape[1]}] for table {table!r}, "
            f"got {out.shape}"
            f"{'' if out.flags.c_contiguous else ', not contiguous'}{'' if out.flags.writeable else ', read-only'}"
        )
    return out


def mix(keys: Keys) -> npt.NDArray[np.uint64]:
    """Hashes of keys: a fixed bijection of 64 bits, which defines the order of rows everywhere in shoal.

    Parameters
    ----------
    keys : uint64[n] or int64[n]

    Returns
    -------
    uint64[n]

    Examples
    --------
    >>> unmix(mix(np.array([7, 2**64 - 1], np.uint64))).tolist()
    [7, 18446744073709551615]
    """
    return _core.mix(as_keys(keys))


def unmix(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Keys of hashes: the inverse of :func:`mix`."""
    return _core.unmix(as_keys(hashes, "hashes"))
