"""Streams as a fit reads them: their parts, and the batches of several of them side by side; see live.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from msgspec import structs

from shoal.base.defaults import BATCH_SIZE
from shoal.base.prefetch import prefetch
from shoal.data.arrow import TableReader
from shoal.data.batch import Batch
from shoal.data.columns import Columns
from shoal.data.kafka import Start, Topic, Until, csv_times, json_times
from shoal.data.live import Arrivals, Arrived, Part
from shoal.data.names import FeatureNames
from shoal.data.reader import GROUPS_AHEAD, Reader
from shoal.data.readers import READERS
from shoal.data.rebatch import Cursor
from shoal.data.settings import OnError, Settings
from shoal.data.source import WAIT_SECONDS
from shoal.errors import ShoalError

MAX_DELAY = 0.5  # seconds


def read_kafka(
    servers: str,
    topic: str,
    *,
    format: str = "libsvm",
    schema: Mapping[str, Any] | None = None,
    start: Start = "earliest",
    until: Until | None = None,
    max_delay: float | None = MAX_DELAY,
    batch_size: int = BATCH_SIZE,
    on_error: OnError = "raise",
    names: FeatureNames | None = None,
    event_time: str | None = None,
    lateness: float = 60.0,
    options: Mapping[str, Any] | None = None,
) -> Reader:
    """Read the messages of a topic of Kafka, whose values are lines of text or JSON objects.

    Parameters
    ----------
    servers : str
        Brokers, as in ``"host:9092,other:9092"``.
    topic : str
    format : {"libsvm", "libffm", "vw", "criteo", "csv", "json"}
        What values are: one line of a text format (with columns, ``schema={"columns": [...]}`` names them), or a JSON
        object with the names of the columns.
    schema : mapping, optional
        The columns: the arguments of `shoal.read_csv`, of "json" those of `shoal.read_parquet`. `Reader.schema` of a
        reader and `schema` of a model are such mappings.
    start : {"earliest", "latest"}
        Where a fit begins that continues no other one.
    until : "end", optional
        Read up to the messages that are there when the fit begins. Default: never end.
    max_delay : float, optional
        Seconds after which a batch leaves as it is, from its first message on; None: a batch always has its size.
    batch_size, on_error, names
        As `shoal.read_libsvm`. ``on_error="skip"`` is for text.
    event_time : str, optional
        The column, of csv or "json", that says when an event was: seconds or milliseconds since 1970, or a text of ISO
        8601, which without an offset is of the local time. Default: the timestamps of the messages.
    lateness : float
        Seconds by which an event may be older than the latest one before it in its partition, and not count as late.
    options : mapping, optional
        Of librdkafka, such as ``security.protocol``; those that shoal needs cannot be changed.

    Returns
    -------
    Reader

    Raises
    ------
    ImportError
        confluent-kafka is not installed (extra ``kafka``), or as `shoal.read_parquet`.
    ValueError
        There is no such format, a parameter is out of range, or as the function of the format.
    ShoalError
        During a pass: the brokers do not answer, or there is no such topic.
    CorruptionError
        During a pass: Kafka has deleted messages that were not read.

    Notes
    -----
    A batch has messages of one partition. A fit gives each worker some partitions, and keeps their offsets with what it
    learns: `docs/streams.md`. An iteration reads all partitions, from ``start`` on.

    Examples
    --------
    >>> reader = read_kafka("localhost:9092", "clicks", format="json", schema={"label": "click"})  # doctest: +SKIP
    """
    source = Topic(servers, topic, start=start, until=until, event_time=event_time, lateness=lateness, options=options)
    reader = topic_reader(source, format, schema or {}, on_error=on_error, batch_size=batch_size, names=names)
    return reader.with_max_delay(max_delay)


def topic_reader(
    topic: Topic, format: str, schema: Mapping[str, Any], *, on_error: OnError = "raise", **how: Any
) -> Reader:
    """Make the reader of a topic; see `read_kafka`."""
    at = topic.event_time
    if at is not None and format not in ("csv", "json"):
        raise ValueError(f"event_time is {at!r}, and messages of {format} have no columns: leave it out")
    if at is not None and schema.get("categorical") is None:
        raise ValueError("name the categorical columns (--categorical): by default the time of an event is one of them")
    if format in READERS and format != "parquet":
        if format == "csv" and schema.get("columns") is None:
            raise ValueError("messages have no header: name their columns, schema={'columns': [...]} (--columns)")
        if at is not None:
            if at not in schema["columns"]:
                raise ValueError(f"event_time is {at!r}, which is none of the columns")
            topic.times_of = csv_times(at, schema["columns"], schema.get("sep", ","))
        return READERS[format](topic, **schema, on_error=on_error, **how)
    if format != "json":
        known = ", ".join(name for name in READERS if name != "parquet")
        raise ValueError(f"format is {format!r}: pass one of {known} and json")
    if on_error != "raise":
        raise ValueError("on_error='skip' (--on-error) is for lines of text, and messages are JSON: leave it out")
    if at is not None:
        topic.times_of = json_times(at)
    columns = dict(schema)
    na_values = columns.pop("na_values", ())
    if unknown := columns.keys() - set(Columns.__struct_fields__):
        raise ValueError(f"{unknown.pop()} does not apply to json: leave it out")
    return TableReader((topic,), "arrow", Columns(**{"label": None, **columns}), Settings(**how), na_values)


def no_examples(reader: Reader) -> Batch:
    """Return a batch of a reader without examples."""
    fields = np.empty(0, np.uint64) if reader._settings.fielded else None
    return Batch(np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(0, np.uint64), None, None, fields)


def is_live(data: object) -> bool:
    """Whether data is a stream."""
    return isinstance(data, Reader) and not data.repeatable


def file_sizes(data: object) -> tuple[int, ...]:
    """Return the bytes of each file of a reader; nothing of a stream, or where they are not known."""
    if not isinstance(data, Reader) or is_live(data):
        return ()
    try:
        sizes = [file.size() for file in data._files]
    except (OSError, ShoalError):  # which reading will raise
        return ()
    return () if None in sizes else tuple(size for size in sizes if size is not None)


def is_divided(data: object) -> bool:
    """Whether data is a stream of several parts."""
    return isinstance(data, Reader) and data._live is not None


def is_endless(data: object) -> bool:
    """Whether data is a stream that has no end, so far as is known."""
    return isinstance(data, Reader) and (live := data._live) is not None and not live.ends


def follows_files(data: object) -> bool:
    """Whether data is the files of a folder, whose positions include the names of those that were begun."""
    return isinstance(data, Reader) and data._live is not None and data._topic is None


def parts_of(reader: Reader, workers: int) -> list[Part]:
    """Return the parts of a stream, for that many workers, from where it begins."""
    live = reader._live
    return [Part()] if live is None else live.parts(workers)


def side_by_side(reader: Reader, parts: Sequence[Part]) -> Arrivals:
    """Yield the batches of parts of a stream as they arrive; None if there has been none for a while."""
    topic, settings = reader._topic, reader._settings
    remaining = settings.leaving_out()
    if topic is not None:
        with ExitStack() as stack:
            arrivals = prefetch(topic.arrivals(parts, settings, reader._parse_values), GROUPS_AHEAD, topic.name)
            stack.callback(arrivals.close)
            while True:
                try:
                    got = arrivals.get(WAIT_SECONDS)
                except StopIteration:
                    return
                yield None if got is None else got._replace(batch=remaining(got.batch))
    with ExitStack() as stack:
        copies = [_from(reader, part) for part in parts]
        passes = []
        for copy in copies:
            passes.append(prefetch(copy._batch_groups(), GROUPS_AHEAD, f"shoal reader {reader.path}"))
            stack.callback(passes[-1].close)
        left = list(range(len(parts)))
        reported = [len(part.files) for part in parts]
        while left:
            has_any = False
            for index in list(left):
                try:
                    group = passes[index].get(WAIT_SECONDS / len(left))
                except StopIteration:
                    left.remove(index)
                    continue
                for batch, cursor in () if group is None else group.batches:
                    has_any = True
                    begun = tuple(copies[index]._begun[reported[index] : cursor.file + 1])
                    reported[index] += len(begun)
                    yield Arrived(index, remaining(batch), cursor, files=begun)
                if group is not None:
                    reader._seen.skipped, reader._seen.fraction = group.skipped, group.fraction
            if not has_any:
                yield None


def _from(reader: Reader, part: Part) -> Reader:
    settings = reader._settings
    if part.num_splits > 1 or part.begin != Cursor():
        settings = structs.replace(settings, rank=part.rank, num_splits=part.num_splits, begin=part.begin)
    copy = reader._with(settings)
    copy._original = reader
    copy._begun = list(part.files)
    return copy
