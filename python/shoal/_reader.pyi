from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

FAULTS: Final[tuple[str, ...]]

class _Arrays(Protocol):
    @property
    def labels(self) -> NDArray[np.float32]: ...
    @property
    def weights(self) -> NDArray[np.float32] | None: ...
    @property
    def indptr(self) -> NDArray[np.int64]: ...
    @property
    def keys(self) -> NDArray[np.uint64]: ...
    @property
    def values(self) -> NDArray[np.float32] | None: ...
    @property
    def fields(self) -> NDArray[np.uint64] | None: ...
    @property
    def spans(self) -> NDArray[np.int64] | None: ...
    @property
    def row(self) -> int: ...

def hash_tokens(tokens: list[str] | list[bytes], field: int, keys: NDArray[np.uint64]) -> None: ...
def parse_libsvm(
    block: bytes | bytearray | memoryview, start: int, arrays: _Arrays, skip: bool
) -> tuple[int, int, int, int, int, int]: ...
def parse_libffm(
    block: bytes | bytearray | memoryview, start: int, arrays: _Arrays, skip: bool
) -> tuple[int, int, int, int, int, int]: ...
def parse_vw(
    block: bytes | bytearray | memoryview, start: int, arrays: _Arrays, skip: bool
) -> tuple[int, int, int, int, int, int]: ...
def parse_criteo(
    block: bytes | bytearray | memoryview,
    start: int,
    arrays: _Arrays,
    floors: NDArray[np.uint64],
    cells: NDArray[np.uint16],
    numbers: NDArray[np.uint64],
    skip: bool,
) -> tuple[int, int, int, int, int, int]: ...
