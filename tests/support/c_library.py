"""shoal/predict.h by ctypes, for its tests."""

import ctypes
from pathlib import Path
from typing import Any, Self

import numpy as np

import shoal

PATH = Path(shoal.__file__).parent / "lib" / "libshoal_predict.so"
OK, INVALID, DAMAGED, UNREADABLE, NO_MEMORY, UNSUPPORTED = range(6)


class Error(ctypes.Structure):
    """shoal_error."""

    _fields_ = (("status", ctypes.c_int), ("example", ctypes.c_int64), ("message", ctypes.c_char * 488))


class Info(ctypes.Structure):
    """shoal_info."""

    _fields_ = (
        ("version", ctypes.c_uint64),
        ("kind", ctypes.c_char * 32),
        ("format", ctypes.c_char * 16),
        ("outputs", ctypes.c_size_t),
        ("takes_lines", ctypes.c_int),
        ("takes_columns", ctypes.c_int),
    )


class Cell(ctypes.Structure):
    """shoal_cell."""

    _fields_ = (
        ("column", ctypes.c_char_p),
        ("text", ctypes.c_char_p),
        ("size", ctypes.c_size_t),
        ("number", ctypes.c_double),
    )


class Options(ctypes.Structure):
    """shoal_options."""

    _fields_ = (("skip_checksums", ctypes.c_int), ("onnx_runtime", ctypes.c_char_p))


def library() -> Any:
    """Load the library."""
    found = ctypes.CDLL(str(PATH))
    found.shoal_key.restype = ctypes.c_uint64
    found.shoal_table_dim.restype = ctypes.c_size_t
    found.shoal_version.restype = ctypes.c_char_p
    return found


class PredictError(Exception):
    """A status other than SHOAL_OK."""

    def __init__(self, status: int, error: Error) -> None:
        super().__init__(error.message.decode())
        self.status = status
        self.example = error.example


def _address(array: np.ndarray | None) -> Any:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


class Predictor:
    """shoal_predictor; each call has an error of its own."""

    def __init__(self, directory: object, *, skip_checksums: bool = False, onnx_runtime: Path | None = None) -> None:
        self.lib = library()
        self.of = ctypes.c_void_p()
        options = Options(int(skip_checksums), None if onnx_runtime is None else str(onnx_runtime).encode())
        self._check(self.lib.shoal_open, str(directory).encode(), ctypes.byref(options), ctypes.byref(self.of))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        self.lib.shoal_close(self.of)

    def _check(self, call: Any, *words: Any) -> None:
        error = Error()
        status = call(*words, ctypes.byref(error))
        if status != OK:
            raise PredictError(status, error)

    @property
    def info(self) -> Info:
        """What shoal_describe says."""
        found = Info()
        self.lib.shoal_describe(self.of, ctypes.byref(found))
        return found

    def refresh(self) -> bool:
        """Look for a newer version."""
        is_new = ctypes.c_int()
        self._check(self.lib.shoal_refresh, self.of, ctypes.byref(is_new))
        return bool(is_new.value)

    def keys(self, offsets: np.ndarray, keys: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
        """Predict from keys."""
        count = len(offsets) - 1
        found = np.empty((count, self.info.outputs))
        arrays = (_address(offsets), _address(keys), _address(values), _address(found))
        self._check(self.lib.shoal_predict_keys, self.of, ctypes.c_size_t(count), *arrays)
        return found

    def _text(self, call: Any, text: bytes, room: int) -> np.ndarray:
        found, count = np.empty((room, self.info.outputs)), ctypes.c_size_t()
        words = (self.of, text, ctypes.c_size_t(len(text)), ctypes.c_size_t(room), _address(found), ctypes.byref(count))
        self._check(call, *words)
        return found[: count.value]

    def lines(self, text: bytes, room: int = 1000) -> np.ndarray:
        """Predict from lines of text."""
        return self._text(self.lib.shoal_predict_lines, text, room)

    def json(self, body: bytes, room: int = 1000) -> np.ndarray:
        """Predict from JSON."""
        return self._text(self.lib.shoal_predict_json, body, room)

    def columns(self, cells: dict[str, Any]) -> np.ndarray:
        """Predict one example from named columns: a list is a cell for each item."""
        made = []
        for name, cell in cells.items():
            for one in cell if isinstance(cell, list) else [cell]:
                if isinstance(one, bool):
                    one = "true" if one else "false"
                if one is None and not isinstance(cell, list):
                    continue
                if one is None or isinstance(one, str):
                    text = (one or "").encode()
                    made.append(Cell(name.encode(), text, len(text), 0.0))
                else:
                    made.append(Cell(name.encode(), None, 0, float(one)))
        found = np.empty((1, self.info.outputs))
        offsets = np.array([0, len(made)], np.int64)
        array = (Cell * max(1, len(made)))(*made)
        self._check(
            self.lib.shoal_predict_columns, self.of, ctypes.c_size_t(1), _address(offsets), array, _address(found)
        )
        return found[0]

    def pull(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Read rows."""
        dim = self.lib.shoal_table_dim(self.of, table.encode())
        rows = np.empty((len(keys), dim), np.float32)
        size = ctypes.c_size_t
        self._check(
            self.lib.shoal_pull, self.of, table.encode(), size(len(keys)), _address(keys), size(dim), _address(rows)
        )
        return rows
