from typing import Final

import numpy as np
from numpy.typing import NDArray

FAULTS: Final[tuple[str, ...]]

def hash_tokens(tokens: list[str] | list[bytes], field: int, keys: NDArray[np.uint64]) -> None: ...
def parse_libsvm(
    block: bytes | bytearray | memoryview,
    start: int,
    labels: NDArray[np.float32],
    indptr: NDArray[np.int64],
    keys: NDArray[np.uint64],
    values: NDArray[np.float32],
    row: int,
    skip: bool,
) -> tuple[int, int, int, int, int, int]: ...
def parse_criteo(
    block: bytes | bytearray | memoryview,
    start: int,
    labels: NDArray[np.float32],
    indptr: NDArray[np.int64],
    keys: NDArray[np.uint64],
    floors: NDArray[np.uint64],
    cells: NDArray[np.uint16],
    numbers: NDArray[np.uint64],
    row: int,
    skip: bool,
) -> tuple[int, int, int, int, int, int]: ...
