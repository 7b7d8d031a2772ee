"""Streams: the rate of a topic of Kafka compared with a file of the same lines, and the age of what is served.

    python bench/bench_streams.py                    131,072 lines of libsvm with 3 features, 5 rounds in turns
    python bench/bench_streams.py --fresh 60         50,000 messages a second for 60 s, a delta each second

Brokers are those of librdkafka, in a process of their own: they keep 5 MiB of each partition in memory, and write no
disk. In turns each source is read without learning, and learned from; the models must be equal to the last bit.

``--fresh``: one process writes rows of csv, at an even rate, with the time at which each is written; one learns from
them and exports; one looks for a new version 20 times a second and opens it, as `shoal serve --watch` does. The age of
an event is the time from its writing until a version that has learned from it is open. There is one partition, whose
events are in order, so a version has all that are not later than the time that it names.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import shoal
from figures import check, spread
from shoal.models import PublishDelta

PARTITIONS, TURNS, BATCH_SIZE = 4, 4, 8192

BROKERS = """
import sys
from confluent_kafka import Producer
owner = Producer({"test.mock.num.brokers": 1, "log_level": 0})
print(",".join(f"{one.host}:{one.port}" for one in owner.list_topics(timeout=30).brokers.values()), flush=True)
sys.stdin.read()
"""

WRITER = """
import random, sys, time
from confluent_kafka import Producer
servers, rate, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
how = {"linger.ms": 5, "log_level": 0, "queue.buffering.max.messages": 1000000}
producer = Producer({"bootstrap.servers": servers, **how})
producer.list_topics("events", timeout=30)  # makes it
texts = [f"{random.randrange(2)},{random.randrange(100000)},{random.randrange(1000)}," for _ in range(100000)]
print("ready", flush=True)
begin, sent = time.time(), 0
while (now := time.time()) < begin + seconds:
    due = int((now - begin) * rate)
    for number in range(sent, due):
        producer.produce("events", texts[number % len(texts)] + f"{now:.3f}", partition=0)
    sent = max(sent, due)
    producer.poll(0)
    time.sleep(0.005)
producer.flush(30)
print(sent, flush=True)
"""

SERVER = """
import sys, time
from pathlib import Path
from shoal.serve.versions import ServedVersions
directory, ends = sys.argv[1], Path(sys.argv[2])
while not any(Path(directory).glob("*/manifest.json")) and not ends.exists():
    time.sleep(0.05)
with ServedVersions(directory) as served:
    while not ends.exists():
        print(time.time(), served.now.exported.model.get("event_time", 0), flush=True)
        while not ends.exists() and not served.reload():
            time.sleep(0.05)
"""


def piped(code: str, *words: object) -> subprocess.Popen[str]:
    """Start a process."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def rates(servers: str, rounds: int, folder: Path) -> None:
    """Print the rates of the file and of the topic."""
    from confluent_kafka import Producer

    draw = np.random.default_rng(1)
    lines = PARTITIONS * TURNS * BATCH_SIZE
    keys = np.sort(draw.integers(0, 1 << 20, (lines, 3)), axis=1)
    rows = zip(draw.integers(0, 2, lines), keys, strict=True)
    texts = [b"%d %d:1 %d:1 %d:1" % (label, *row) for label, row in rows]
    (folder / "lines").write_bytes(b"\n".join(texts) + b"\n")
    how = {"linger.ms": 5, "log_level": 0, "queue.buffering.max.messages": 1_000_000}
    producer = Producer({"bootstrap.servers": servers, **how})
    for number, text in enumerate(texts):  # a batch of each partition in turns, as they are read
        producer.produce("lines", text, partition=number // BATCH_SIZE % PARTITIONS)
        producer.poll(0)
    check(producer.flush(60) == 0, "the brokers have not taken all messages")
    found: dict[str, list[float]] = {}
    digests = set()
    for _ in range(rounds):
        for name in ("file", "topic"):
            for learns in (False, True):
                reader = shoal.read_libsvm(folder / "lines")
                if name == "topic":
                    reader = shoal.read_kafka(servers, "lines", until="end", max_delay=None)
                begin = time.perf_counter()
                if learns:
                    with shoal.LogisticRegression(shoal.FTRL(alpha=0.001), warm_up=False) as model:
                        model.fit(reader, progress=False)
                        seconds = time.perf_counter() - begin
                        digests.add((model.table.digest(), model.examples))
                else:
                    check(sum(map(len, reader)) == lines, "a line is missing")
                    seconds = time.perf_counter() - begin
                found.setdefault(f"{name}, {'learned from' if learns else 'read'}", []).append(lines / seconds)
    check(len(digests) == 1, f"the models differ: {digests}")
    for name, values in sorted(found.items()):
        print(f"{name:<20} {spread(values)} examples/s")


def fresh(servers: str, rate: int, seconds: float, folder: Path) -> None:
    """Print the ages of events when they are served."""
    exports, ends = folder / "exports", folder / "ends"
    exports.mkdir()
    schema = {"label": "click", "categorical": ["ad", "site"], "columns": ["click", "ad", "site", "at"]}
    reader = shoal.read_kafka(servers, "events", format="csv", schema=schema, event_time="at")
    served, writer = piped(SERVER, exports, ends), piped(WRITER, servers, rate, seconds)
    assert writer.stdout is not None
    check(writer.stdout.readline() == "ready\n", "there is no topic")
    last = time.monotonic() + seconds + 5

    class End(shoal.models.Callback):
        def stream_idle(self, progress: shoal.models.FitProgress) -> None:
            if time.monotonic() > last:
                raise KeyboardInterrupt

    examples = 0
    with shoal.LogisticRegression() as model:
        try:
            model.fit(reader, callbacks=[PublishDelta(exports, every=1.0), End()], progress=False)
        except KeyboardInterrupt:
            examples = model.examples
    time.sleep(1)
    ends.touch()
    sent = int(writer.communicate()[0])
    check(examples == sent, f"{examples} examples of {sent} messages")
    versions = [tuple(map(float, line.split())) for line in served.communicate()[0].splitlines()]
    ages, before = [], versions[0][1] / 1000
    for opened, newest in versions[1:]:
        ages.extend(opened - np.arange(before, newest / 1000, 0.001))
        before = newest / 1000
    p50, p99 = np.percentile(ages, [50, 99])
    print(f"{sent:,} events in {seconds:.0f} s, {len(versions)} versions")
    print(f"age: median {p50:.2f} s, p99 {p99:.2f} s, greatest {max(ages):.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fresh", type=float, help="seconds of the measurement of ages")
    parser.add_argument("--rate", type=int, default=50_000, help="messages a second")
    options = parser.parse_args()
    os.environ["PYTHONUNBUFFERED"] = "1"
    brokers = piped(BROKERS)
    assert brokers.stdout is not None
    addresses = brokers.stdout.readline().strip()
    with tempfile.TemporaryDirectory() as temporary:
        if options.fresh is None:
            rates(addresses, options.rounds, Path(temporary))
        else:
            fresh(addresses, options.rate, options.fresh, Path(temporary))
    brokers.communicate("")
