"""Names of features: the text that each key was made of.

A key of text is a hash. While a file is read, the names of its features can be collected:

    parse --> keys, fields, spans --> keys without a name --> their names --> TextMap: key -> "C14=68fd1e64"
              (arrays, per block)      (csrc/names)            (spelling.py)   (csrc/names)

The file of names: one line of checksummed JSON, which describes the rest, then its three arrays, little-endian.

    {"crc32c":<of the body>,"body":{"format":...,"version":2,"limit":...,"names":n,"bytes":b,"crc32c":<of the arrays>}}
    newlines, to a multiple of 8 bytes
    keys uint64[n], ascending | ends uint64[n], of each text | b bytes: the texts, one after the other

Files of version 1 are JSON as a whole, and are still read.

Threads: any number may read and add at a time.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.decoders import json_decoder
from shoal.base.machine import local_path
from shoal.data.spelling import Spell, Texts, decoded, encoded, paired
from shoal.errors import CorruptionError
from shoal.storage.checksummed_json import decode_checksummed, encode_checksummed, write_atomically

FORMAT = "shoal feature names"
VERSION = 2

_MOST = 2**32 - 1  # of csrc/names/text_map.h

Spelled = tuple[npt.NDArray[np.uint64], Texts] | None  # keys and their names


class _Description(msgspec.Struct, frozen=True, kw_only=True):
    format_name: str = msgspec.field(name="format", default=FORMAT)
    version: int = VERSION
    limit: int
    names: int
    bytes: int
    crc32c: str


class _Version1(msgspec.Struct, frozen=True, kw_only=True):
    format_name: str = msgspec.field(name="format")
    version: int
    limit: int
    names: dict[int, str]


_description = json_decoder(_Description)
_version1 = json_decoder(_Version1)


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
    A name takes about 32 bytes, and its text. The object can be pickled.

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
        self._most = min(limit, _MOST)
        self._texts = _core.TextMap()
        self._lock = threading.Lock()

    def __getitem__(self, key: int) -> str:
        text = self._text_of(key)
        if text is None:
            raise KeyError(key)
        return decoded(text)

    def __contains__(self, key: object) -> bool:
        return self._text_of(key) is not None

    def _text_of(self, key: object) -> bytes | None:
        try:
            number = operator.index(key)  # type: ignore[arg-type]
        except TypeError:
            return None
        with self._lock:
            return self._texts.get(number) if 0 <= number < 1 << 64 else None

    def __iter__(self) -> Iterator[int]:
        with self._lock:
            keys = self._texts.keys()
        return iter(keys.tolist())

    def __len__(self) -> int:
        return len(self._texts)

    def __repr__(self) -> str:
        return f"<FeatureNames of {len(self):,} features, at most {self._limit:,}>"

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            return _restored, (self._limit, *self._texts.sorted())

    @property
    def limit(self) -> int:
        """Names to keep at most."""
        return self._limit

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return len(self._texts) >= self._most

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
        TypeError
            A text is neither str nor bytes.
        """
        if len(keys) != len(texts):
            raise ValueError(f"{len(keys)} keys need as many texts, got {len(texts)}")
        for i, text in enumerate(texts):
            if not isinstance(text, str | bytes):
                raise TypeError(f"text {i} is a {type(text).__name__}: pass str or bytes")
        with self._lock:
            self._texts.add(np.ascontiguousarray(keys, np.uint64), *encoded(texts), self._most)

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
            Makes the names: see `shoal.data.spelling`.
        """
        self.add_spelled(self.spelled(keys, lambda some: spell(text, spans[some], fields[some])))

    def spelled(self, keys: npt.NDArray[np.uint64], names_of: Callable[[npt.NDArray[np.uint32]], Texts]) -> Spelled:
        """Spell the names of keys that have none yet, those at ``some`` positions by ``names_of(some)``.

        Several threads of a reader may do so at a time; `add_spelled` then adds the names in the order of the file.
        """
        if self.full:
            return None
        keys = np.ascontiguousarray(keys)
        with self._lock:
            missing = self._texts.missing(keys)
        return (keys[missing], names_of(missing)) if len(missing) else None

    def add_spelled(self, spelled: Spelled) -> None:
        """Add names that were spelled."""
        if spelled is not None:
            with self._lock:
                self._texts.add(spelled[0], *spelled[1], self._most)

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

        def names_of(some: npt.NDArray[np.uint32]) -> Texts:
            first, second = (keys[at[some]] for at in _core.interaction_parents(indptr, keys, fields, pairs))
            with self._lock:
                return paired(self._texts.texts_of(first), self._texts.texts_of(second))

        self.add_spelled(self.spelled(made, names_of))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the names to a file, completely or not at all; an existing file is replaced.

        Returns
        -------
        Path
            The file.
        """
        write_atomically(local_path(path), b"".join(self.to_parts()))
        return local_path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FeatureNames:
        """Read what `save` wrote.

        Raises
        ------
        CorruptionError
            The file is missing or was changed.
        """
        try:
            raw = local_path(path).read_bytes()
        except FileNotFoundError:
            raise CorruptionError(f"{os.fspath(path)} is missing: there are no names") from None
        return cls.from_bytes(raw, path)

    def to_parts(self) -> list[bytes | memoryview]:
        """Return the contents of the file that `save` writes, in parts."""
        with self._lock:
            keys, texts, ends = self._texts.sorted()
        arrays = [array.astype("<u8", copy=False).view(np.uint8).data for array in (keys, ends)] + [texts.data]
        checksum = functools.reduce(lambda before, array: _core.crc32c(array, before), arrays, 0)
        description = _Description(
            limit=min(self._limit, 2**63 - 1), names=len(keys), bytes=len(texts), crc32c=f"{checksum:08x}"
        )
        line = encode_checksummed(msgspec.json.encode(description))
        return [line.ljust(_begin_after(line), b"\n"), *arrays]

    @classmethod
    def from_bytes(cls, raw: bytes, address: str | os.PathLike[str]) -> FeatureNames:
        """Read the parts that `to_parts` returns; ``address`` names their file in errors.

        Raises
        ------
        CorruptionError
            The file was changed.
        """
        where = os.fspath(address)
        end = raw.find(b"\n")
        line = raw if end < 0 else raw[:end]
        body = decode_checksummed(line, where)
        try:
            if end < 0:
                return _of_version1(body, where)
            read = _description.decode(body)
        except msgspec.MsgspecError as error:
            raise CorruptionError(f"{where} cannot be read: {error}") from None
        if (read.format_name, read.version) != (FORMAT, VERSION):
            raise _not_readable(where)
        begin = _begin_after(line)
        arrays = memoryview(raw)[begin:]
        whole = len(arrays) == 16 * read.names + read.bytes and not raw[end:begin].strip(b"\n")
        if not whole or read.crc32c != f"{_core.crc32c(arrays):08x}":
            raise CorruptionError(f"{where} is damaged: its checksum does not match")
        keys = np.frombuffer(arrays, "<u8", read.names)
        ends = np.frombuffer(arrays, "<u8", read.names, 8 * read.names)
        try:
            return _restored(read.limit, keys, np.frombuffer(arrays, np.uint8, -1, 16 * read.names), ends)
        except ValueError as error:
            raise CorruptionError(f"{where} cannot be read: {error}") from None


def _begin_after(line: bytes) -> int:
    """Return where the arrays begin: aligned, and after a newline."""
    return (len(line) + 8) // 8 * 8


def _of_version1(body: bytes, where: str) -> FeatureNames:
    read = _version1.decode(body)
    if (read.format_name, read.version) != (FORMAT, 1):
        raise _not_readable(where)
    if any(not 0 <= key < 1 << 64 for key in read.names):
        raise CorruptionError(f"{where} cannot be read: a key does not have 64 bits")
    return _restored(read.limit, np.array(list(read.names), np.uint64), *encoded(list(read.names.values())))


def _not_readable(where: str) -> CorruptionError:
    return CorruptionError(
        f"{where} does not contain feature names of version 1 or {VERSION}: load it with a newer shoal"
    )


def _restored(
    limit: int, keys: npt.NDArray[np.uint64], texts: npt.NDArray[np.uint8], ends: npt.NDArray[np.uint64]
) -> FeatureNames:
    names = FeatureNames(limit)
    names._texts.add(keys, texts, ends, names._most)
    return names
