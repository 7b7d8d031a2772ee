"""Topic: the messages of a topic of Kafka. Needs confluent-kafka (extra: kafka), whose objects have no types here.

    partition --> messages, in order --> batch: as many as it has, or those of ``max_delay`` --> parsed as lines

A batch is of one partition, and its position the offset behind its last message. Nobody keeps offsets but the reader's
owner: partitions are assigned by hand, and nothing is committed to Kafka.

Threads: a consumer belongs to the thread that reads ahead.
"""

from __future__ import annotations

import csv
import functools
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Literal, Self
from urllib.parse import parse_qsl, urlsplit

import msgspec

from shoal.data.batch import Batch
from shoal.data.files import Live
from shoal.data.live import Arrivals, Arrived, Events, Part
from shoal.data.rebatch import BatchGroup, BatchGroups, Cursor
from shoal.data.settings import Settings
from shoal.data.source import WAIT_SECONDS
from shoal.errors import CorruptionError, ShoalError

_log = logging.getLogger(__name__)
_REPEATED_SECONDS = 60.0

Start = Literal["earliest", "latest"]
Until = Literal["end"]
# Batches of a partition that may wait for those of others, before no more of it is fetched.
_MOST_BATCHES = 4
_MILLISECONDS = 1e11  # from here on a time is in milliseconds: in seconds it would be in the year 5138
_MOST_MESSAGES = 10_000  # that are fetched at a time

# The times of events in values, in milliseconds since 1970; 0: none.
TimesOf = Callable[[Sequence[bytes]], list[int]]
# The values of messages: the batch, and how many malformed ones were left out.
ParseValues = Callable[[Sequence[bytes]], tuple[Batch, int]]


class Topic(Live):
    """A topic: a `File` of messages."""

    def __init__(
        self,
        servers: str,
        topic: str,
        *,
        start: Start = "earliest",
        until: Until | None = None,
        event_time: str | None = None,
        lateness: float = 60.0,
        timeout: float = 30.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not servers or not topic:
            raise ValueError(f"servers is {servers!r} and topic {topic!r}: pass 'host:9092' and a name")
        if start not in ("earliest", "latest"):
            raise ValueError(f"start is {start!r}: pass 'earliest' or 'latest'")
        if until not in ("end", None):
            raise ValueError(f"until is {until!r}: pass 'end', or None for no end")
        if not lateness >= 0:
            raise ValueError(f"lateness is {lateness}: pass a number of seconds, 0 or more")
        self.name = f"kafka topic {topic}"
        # event_time: The column of the time of an event; None: it is that of its message. times_of: Finds it in values.
        self.event_time = event_time
        self.times_of: TimesOf | None = None
        self._lateness = lateness
        self.ends = until is not None
        self._topic = topic
        self._start = start
        self._timeout = timeout
        self._options = {
            "group.id": f"shoal-{topic}",  # which the client requires; nothing is committed
            "fetch.wait.max.ms": 100,
            **(options or {}),
            "bootstrap.servers": servers,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "logger": _client_log(),
        }
        _confluent()

    @classmethod
    def of_url(cls, url: str) -> Self:
        """Return the topic of kafka://HOST:PORT,.../TOPIC?NAME=VALUE, of `shoal.read_kafka` or of the client."""
        found = urlsplit(url)
        given = dict(parse_qsl(found.query, keep_blank_values=True))
        how: dict[str, Any] = {name: given.pop(name) for name in ("start", "until", "event_time") if name in given}
        if "lateness" in given:
            how["lateness"] = float(given.pop("lateness"))
        if not found.netloc or not found.path.strip("/") or "@" in found.netloc:
            raise ValueError(f"{url} names no topic: pass kafka://HOST:PORT/TOPIC")
        return cls(found.netloc, found.path.strip("/"), options=given, **how)

    def parts(self, workers: int) -> list[Part]:
        """Find the partitions, whatever the number of workers, and where to begin and to end in each of them."""
        kafka = _confluent()
        with self._consumer() as consumer:
            partitions = self._partitions(consumer)
            found = []
            for number in partitions:
                partition = kafka.TopicPartition(self._topic, number)
                ask = functools.partial(consumer.get_watermark_offsets, partition, timeout=self._timeout)
                low, high = self._asked(ask)
                begin = Cursor(offset=low if self._start == "earliest" else high)
                found.append(Part(rank=number, num_splits=len(partitions), begin=begin, end=high if self.ends else -1))
        return found

    def _partitions(self, consumer: Any) -> list[int]:
        found = self._asked(lambda: consumer.list_topics(self._topic, timeout=self._timeout)).topics[self._topic]
        if found.error is not None:
            raise ShoalError(f"{self.name}: {found.error.str()}: create the topic, or check its name")
        return sorted(found.partitions)

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except _confluent().KafkaException as error:
            raise ShoalError(
                f"{self.name}: the brokers {self._options['bootstrap.servers']} do not answer ({error.args[0].str()}): "
                "check their address, and that they run"
            ) from error

    @contextmanager
    def _consumer(self) -> Iterator[Any]:
        try:
            consumer = _confluent().Consumer(self._options)
        except _confluent().KafkaException as error:
            raise ValueError(f"{self.name}: {error.args[0].str()}: check the options of the client") from error
        try:
            yield consumer
        finally:
            consumer.close()

    def arrivals(self, parts: Sequence[Part], settings: Settings, parse: ParseValues) -> Arrivals:
        """Yield the batches of partitions as they arrive; None if there is none.

        Parts that end are read in turns, whatever arrives first: the one with the fewest batches is next.
        """
        kafka = _confluent()
        waiting = [_Partition(part, settings, self._lateness) for part in parts]
        by_number = {part.rank: one for part, one in zip(parts, waiting, strict=True)}
        turn = max((part.blocks for part in parts), default=0)
        with self._consumer() as consumer:
            consumer.assign([kafka.TopicPartition(self._topic, part.rank, part.begin.offset) for part in parts])
            while left := [one for one in waiting if not one.is_over]:
                for message in consumer.consume(_MOST_MESSAGES, WAIT_SECONDS):
                    if message.error() is not None:
                        self._note(message, by_number)
                    else:
                        by_number[message.partition()].add(message)
                self._hold(consumer, left)
                has_any = False
                while True:
                    left = [one for one in waiting if not one.is_over]
                    ready = [one for one in left if one.is_ready()]
                    least = min(left if self.ends else ready, key=lambda one: one.turn, default=None)
                    if least is None or not least.is_ready():
                        break
                    has_any = True
                    turn += 1
                    least.turn = least.turn + 1 if self.ends else turn
                    batch, cursor, events = self._batch(least, parse)
                    yield Arrived(waiting.index(least), batch, cursor, events)
                if not has_any:
                    yield None

    def groups(self, settings: Settings, parse: ParseValues) -> BatchGroups:
        """Yield the batches of a split: of every so many-th partition, from its start on."""
        parts = self.parts(settings.num_splits)[settings.rank :: settings.num_splits]
        skipped = [0] * len(parts)
        for got in self.arrivals(parts, settings, parse):
            if got is not None:
                skipped[got.part] = got.cursor.skipped
            yield None if got is None else BatchGroup([(got.batch, got.cursor)], sum(skipped), 0.0)

    def _batch(self, partition: _Partition, parse: ParseValues) -> tuple[Batch, Cursor, Events]:
        first, values, end, times = partition.take()
        try:
            batch, skipped = parse(values)
            events = partition.note(times if self.times_of is None else self.times_of(values))
        except ValueError as error:
            raise ValueError(
                f"{self.name}, partition {partition.part.rank}, offset {first} or later: {error}"
            ) from None
        partition.skipped += skipped
        return batch, Cursor(0, end, 0, partition.skipped), events

    def _hold(self, consumer: Any, partitions: Sequence[_Partition]) -> None:
        """Fetch no more of partitions that have much that waits."""
        kafka = _confluent()
        for one in partitions:
            if one.is_full != one.is_held:
                one.is_held = one.is_full
                (consumer.pause if one.is_held else consumer.resume)([kafka.TopicPartition(self._topic, one.part.rank)])

    def _note(self, message: Any, by_number: Mapping[int, _Partition]) -> None:
        """Take what is no message: the end of a partition, or an error."""
        error, code = message.error(), _confluent().KafkaError
        if error.code() == code._PARTITION_EOF:
            by_number[message.partition()].at_end(message.offset())
        elif error.code() in (code._AUTO_OFFSET_RESET, code.OFFSET_OUT_OF_RANGE):
            raise CorruptionError(
                f"{self.name}, partition {message.partition()}: the messages from the position on are gone "
                f"({error.str()}): Kafka keeps them for too short a time, or the topic was made anew; begin another fit"
            )
        elif error.fatal() or error.code() in (code.UNKNOWN_TOPIC_OR_PART, code.TOPIC_AUTHORIZATION_FAILED):
            raise ShoalError(f"{self.name}: {error.str()}")
        else:
            _log.warning("%s: %s", self.name, error.str())


class _Partition:
    """The messages of a partition that no batch has yet."""

    def __init__(self, part: Part, settings: Settings, lateness: float) -> None:
        self.part = part
        self.turn = part.blocks
        self.is_held = False
        self.skipped = part.begin.skipped
        self._size = settings.batch_size
        self._delay = math.inf if settings.max_delay is None else settings.max_delay
        self._lateness = lateness * 1000
        self._values: list[bytes] = []
        self._offsets: list[int] = []  # of the messages behind them
        self._times: list[int] = []
        self._next = part.begin.offset
        self._since = math.inf
        self._newest = part.newest

    @property
    def _has_ended(self) -> bool:
        return 0 <= self.part.end <= self._next

    @property
    def is_over(self) -> bool:
        """Whether there is no batch any more."""
        return self._has_ended and not self._values

    @property
    def is_full(self) -> bool:
        """Whether as many batches wait as may."""
        return len(self._values) >= _MOST_BATCHES * self._size

    def is_ready(self) -> bool:
        """Whether there is a batch."""
        if len(self._values) >= self._size:
            return True
        return bool(self._values) and (self._has_ended or time.monotonic() - self._since >= self._delay)

    def add(self, message: Any) -> None:
        """Append a message."""
        offset = message.offset()
        if 0 <= self.part.end <= offset:
            self._next = self.part.end
            return
        self._next = offset + 1
        value = message.value()
        if value is None:
            return  # a tombstone
        if not self._values:
            self._since = time.monotonic()
        self._values.append(value)
        self._offsets.append(offset + 1)
        self._times.append(message.timestamp()[1])

    def at_end(self, offset: int) -> None:
        """Take that there is no message before an offset any more: the last ones may be marks of transactions."""
        self._next = max(self._next, offset)

    def take(self) -> tuple[int, list[bytes], int, list[int]]:
        """Return a batch: the offset that it begins at, its values, the offset behind it, its messages' times."""
        values, self._values = self._values[: self._size], self._values[self._size :]
        offsets, self._offsets = self._offsets[: self._size], self._offsets[self._size :]
        times, self._times = self._times[: self._size], self._times[self._size :]
        self._since = time.monotonic() if self._values else math.inf
        end = offsets[-1] if self._values or not self._has_ended else self._next
        return offsets[0] - 1, values, end, times

    def note(self, times: Sequence[int]) -> Events:
        """Take the times of the events of a batch."""
        late = 0
        for at in times:
            late += 0 < at < self._newest - self._lateness
            self._newest = max(self._newest, at)
        return Events(self._newest, late)


def json_times(column: str) -> TimesOf:
    """Return what finds the times of JSON objects."""
    event: Any = msgspec.defstruct("Event", [("at", float | str | None, None)], rename={"at": column})
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(event).decode
    return lambda values: [_milliseconds(decode(value).at) for value in values]


def csv_times(column: str, columns: Sequence[str], separator: str) -> TimesOf:
    """Return what finds the times of rows of csv."""
    index = columns.index(column)

    def times(values: Sequence[bytes]) -> list[int]:
        rows = csv.reader((value.decode() for value in values), delimiter=separator)
        return [_milliseconds(row[index] if index < len(row) else None) for row in rows]

    return times


def _milliseconds(at: float | str | None) -> int:
    """Return the milliseconds since 1970 of such a number of seconds or milliseconds, or of a text of ISO 8601."""
    if at is None or at == "":
        return 0
    try:
        number = float(at)
    except ValueError:
        return round(datetime.fromisoformat(str(at)).timestamp() * 1000)
    return round(number if abs(number) >= _MILLISECONDS else number * 1000)


def _client_log() -> logging.Logger:
    """Return what the client logs to: a line that is repeated, as at each attempt to connect, is there once."""
    log = _log.getChild("client")
    if not log.filters:
        log.addFilter(_Repeats())
    return log


class _Repeats(logging.Filter):
    """Drops a line that differs only in numbers and counts of repetitions from one of the last minute."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text = re.sub(r", \d+ identical error\(s\) suppressed|\d+", "", record.getMessage())
        now = record.created
        self._seen = {one: since for one, since in self._seen.items() if now - since < _REPEATED_SECONDS}
        return self._seen.setdefault(text, now) == now


def _confluent() -> Any:
    try:
        import confluent_kafka
    except ImportError:
        raise ImportError("reading from Kafka requires confluent-kafka: pip install 'shoal[kafka]'") from None
    return confluent_kafka
