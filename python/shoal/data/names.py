"""Names of features: the text that each key was made of.

A key of text is a hash. While a file is read, the names of its features can be collected:

    parse --> keys, fields, spans --> keys that may be new --> dictionary: key -> "C14=68fd1e64"
              (arrays, per block)         (a table, below)         (Python, once a key)

Almost all features of a block are known already. A direct-mapped cache of known keys recognizes most of them without
touching a Python object; a key that is not in the cache is looked up in the dictionary.

Threads: any number may read and add at a time.
"""

from __future__ import annotations

import bisect
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.base.machine import local_path
from shoal.data.criteo import INTEGER_COLUMNS, buckets
from shoal.errors import CorruptionError
from shoal.storage.checksummed_json import read_checksummed, write_checksummed

FORMAT = "shoal feature names"
VERSION = 1

_FIRST_BITS = 16  # of the table of known keys
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: keys that follow each other spread evenly


class _File(msgspec.Struct, frozen=True, kw_only=True):
    format_name: str = msgspec.field(name="format", default=FORMAT)
    version: int = VERSION
    limit: int
    names: dict[int, str]


# Made here: msgspec crashes where several threads are the first to decode a type.
_file = msgspec.json.Decoder(_File)


class FeatureNames(Mapping[int, str]):
    """Names of features by their keys, in the order in which they were added.

    Parameters
    ----------
    limit : int
        Maximum number of names. Later features get none, at no cost.

    Raises
    ------
    ValueError
        ``limit`` is negative.

    Notes
    -----
    A name takes about 200 bytes. The object can be pickled.

    Examples
    --------
    >>> import numpy as np
    >>> names = FeatureNames()
    >>> names.add(np.array([7, 9, 7], np.uint64), ["carrier=AA", "origin=JFK", "late"])
    >>> names.get(7), names.get(8), len(names), names.full
    ('carrier=AA', None, 2, False)
    """

    def __init__(self, limit: int = 10_000_000) -> None:
        if limit < 0:
            raise ValueError(f"limit is {limit}: pass 0 or more")
        self._limit = limit
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()
        self._known = _table(_FIRST_BITS)

    def __getitem__(self, key: int) -> str:
        return self._names[key]

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __iter__(self) -> Iterator[int]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<FeatureNames of {len(self):,} features, at most {self._limit:,}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._limit, dict(self._names))

    @property
    def limit(self) -> int:
        """Names to keep at most."""
        return self._limit

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return len(self._names) >= self._limit

    def add(self, keys: npt.NDArray[np.uint64], texts: Sequence[str | bytes]) -> None:
        r"""Name keys; one that has a name keeps it.

        Parameters
        ----------
        keys : uint64[n]
        texts : sequence of str or bytes, length n
            Bytes are decoded as UTF-8; an invalid byte becomes ``\xff``.

        Raises
        ------
        ValueError
            There are not as many texts as keys.
        """
        if len(keys) != len(texts):
            raise ValueError(f"{len(keys)} keys need as many texts, got {len(texts)}")
        with self._lock:
            for key, text in zip(np.asarray(keys, np.uint64).tolist(), texts, strict=True):
                if self.full:
                    break
                self._names.setdefault(key, text if isinstance(text, str) else decoded(text))

    def note(
        self,
        text: memoryview | bytes,
        keys: npt.NDArray[np.uint64],
        fields: npt.NDArray[np.uint64],
        spans: npt.NDArray[np.int64],
        spell: Spell,
    ) -> None:
        """Name the features of a parsed block that have no name yet. Called by readers.

        Parameters
        ----------
        text : memoryview or bytes
            The block.
        keys, fields : uint64[n]
        spans : int64[n, 2]
            Of `shoal.data.rows.RowBuffer`.
        spell : callable
            Function that makes a name from a span.
        """

        def name(i: int) -> str:
            begin, end = spans[i].tolist()
            return spell(text, begin, end, int(fields[i]))

        self._note(keys, name)

    def note_pairs(
        self,
        indptr: npt.NDArray[np.int64],
        keys: npt.NDArray[np.uint64],
        fields: npt.NDArray[np.uint64],
        pairs: npt.NDArray[np.uint64],
        made_indptr: npt.NDArray[np.int64],
        made_keys: npt.NDArray[np.uint64],
    ) -> None:
        """Name the combined features that have no name yet: ``first * second``. Called by readers.

        Parameters
        ----------
        indptr : int64[rows + 1]
        keys, fields : uint64[nnz]
            Features that have been noted.
        pairs : uint64[2 p]
            Fields that interact, by twos.
        made_indptr, made_keys : int64[rows + 1], uint64
            What `shoal._core.interact` made of them: each row's own features, then those of two.
        """
        if self.full:
            return
        rows = np.repeat(np.arange(len(indptr) - 1), np.diff(made_indptr) - np.diff(indptr))
        # The n-th combined feature follows n others and the features of its row and of earlier rows.
        made = made_keys[np.arange(len(rows)) + indptr[rows + 1]]
        firsts = made_indptr - indptr
        of_row: dict[int, list[tuple[int, int]]] = {}

        def name(i: int) -> str:
            row = int(rows[i])
            if row not in of_row:
                begin, end = indptr[row], indptr[row + 1]
                of_row[row] = _made_of(keys[begin:end].tolist(), fields[begin:end].tolist(), pairs.tolist())
            first, second = of_row[row][i - int(firsts[row])]
            return f"{self._names.get(first, first)} * {self._names.get(second, second)}"

        self._note(made, name)

    def _note(self, keys: npt.NDArray[np.uint64], name: Callable[[int], str]) -> None:
        """Name the keys that have no name yet, the one at i by ``name(i)``."""
        if self.full:
            return
        known, shift = self._known
        at = (keys * _MULTIPLIER) >> shift
        candidates = np.flatnonzero(known[at] != keys)
        if not len(candidates):
            return
        unique, first = np.unique(keys[candidates], return_index=True)
        with self._lock:
            for key, i in zip(unique.tolist(), candidates[first].tolist(), strict=True):
                if key not in self._names:
                    if len(self._names) >= self._limit:
                        return
                    self._names[key] = name(i)
            known[at[candidates]] = keys[candidates]
            if 4 * len(self._names) > len(self._known[0]):
                self._known = _table((8 * len(self._names)).bit_length())

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the names to a file, completely or not at all; an existing file is replaced.

        Returns
        -------
        Path
            The file.
        """
        write_checksummed(local_path(path), self.to_json())
        return local_path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FeatureNames:
        """Read what `save` wrote.

        Raises
        ------
        CorruptionError
            The file is missing or was changed.
        """
        return cls.from_json(read_checksummed(local_path(path), missing="there are no names"), path)

    def to_json(self) -> bytes:
        """Return limit and names as the JSON that `save` writes with a checksum."""
        return msgspec.json.encode(_File(limit=self._limit, names=dict(sorted(self._names.items()))))

    @classmethod
    def from_json(cls, body: bytes, address: str | os.PathLike[str]) -> FeatureNames:
        """Read the result of `to_json`; ``address`` names its file in errors.

        Raises
        ------
        CorruptionError
            It is none.
        """
        try:
            read = _file.decode(body)
        except msgspec.MsgspecError as error:
            raise CorruptionError(f"{os.fspath(address)} cannot be read: {error}") from None
        if (read.format_name, read.version) != (FORMAT, VERSION):
            raise CorruptionError(
                f"{os.fspath(address)} does not contain feature names of version {VERSION}: load it with a newer shoal"
            )
        return _restored(read.limit, read.names)


def _restored(limit: int, named: dict[int, str]) -> FeatureNames:
    names = FeatureNames(limit)
    names._names.update(islice(named.items(), limit))
    return names


def _table(bits: int) -> tuple[npt.NDArray[np.uint64], np.uint64]:
    """Make a table of keys, and by how much their hashes are shifted to be indices of it."""
    known = np.zeros(1 << bits, np.uint64)
    known[0] = 1  # an empty cell holds a key of another cell: 0 belongs into cell 0 alone, and 1 into another
    return known, np.uint64(64 - bits)


def _made_of(keys: list[int], fields: list[int], pairs: list[int]) -> list[tuple[int, int]]:
    """Return the two features of each combined feature of a row, in the order of csrc/kernel/interactions.h."""
    of: dict[int, list[int]] = {}
    for key, field in zip(keys, fields, strict=True):
        of.setdefault(field, []).append(key)
    made: list[tuple[int, int]] = []
    for first, second in zip(pairs[::2], pairs[1::2], strict=True):
        if first == second:
            made += [(min(pair), max(pair)) for pair in combinations(of.get(first, ()), 2)]
        else:
            made += product(of.get(first, ()), of.get(second, ()))
    return made


def decoded(text: bytes | memoryview) -> str:
    """Decode bytes of a file as text, valid UTF-8 or not."""
    return bytes(text).decode("utf-8", "backslashreplace")


# ---- from a span to a name -------------------------------------------------------------------------------------------

Spell = Callable[[memoryview | bytes, int, int, int], str]  # of a block, the begin and the end of a span, and a field

_ENDS_NAME = re.compile(rb"[ \t\r:]")


def of_numbers(text: memoryview | bytes, begin: int, end: int, field: int) -> str:
    """Name a feature of libsvm or libffm: the numbers before its value, without zeros in front."""
    return ":".join(number.lstrip("0") or "0" for number in decoded(text[begin:end]).split(":"))


def of_vw(text: memoryview | bytes, begin: int, end: int, field: int) -> str:
    """Name a feature of Vowpal Wabbit's text: namespace^name, or the name alone in the nameless one."""
    reach = 128
    while b"|" not in (before := bytes(text[max(0, begin - reach) : begin])) and reach < begin:
        reach *= 2
    namespace = _ENDS_NAME.split(before.rpartition(b"|")[2], maxsplit=1)[0]
    name = decoded(text[begin:end])
    return f"{decoded(namespace)}^{name}" if namespace else name


def of_criteo(text: memoryview | bytes, begin: int, end: int, field: int) -> str:
    """Name a feature of Criteo's logs: its column, I1 to C26, and the category or the integers of its bucket."""
    if field > INTEGER_COLUMNS:
        return f"C{field - INTEGER_COLUMNS}={decoded(text[begin:end])}"
    digits = bytes(text[begin:end]).lstrip(b"+-0")
    number = int(digits or b"0")
    if number and text[begin] == ord("-"):
        return f"I{field}={-number}"
    floors = _floors()
    bucket = bisect.bisect_right(floors, number) - 1
    low, high = floors[bucket], min(floors[bucket + 1], 1 << 63) - 1
    return f"I{field}={low}" if low == high else f"I{field}={low}..{high}"


@functools.cache
def _floors() -> list[int]:
    return [int(floor) for floor in buckets().floors]
