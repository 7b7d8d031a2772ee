"""librdkafka's own mock brokers, in a process of their own: topics have four partitions, and lose them with it.

What they do not do: replicate, elect leaders, authenticate, write transactions. They keep 5 MiB of each partition.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

PARTITIONS = 4

_BROKERS = """
import sys
from confluent_kafka import Producer
owner = Producer({"test.mock.num.brokers": 1, "log_level": 0})
brokers = owner.list_topics(timeout=30).brokers.values()
print(",".join(f"{broker.host}:{broker.port}" for broker in brokers), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def brokers() -> Iterator[str]:
    """Run brokers; yields their addresses."""
    command = [sys.executable, "-c", _BROKERS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(30)


def produce(servers: str, topic: str, lines: Sequence[bytes | None], partition: int = 0) -> None:
    """Append messages to a partition; return when the brokers have them."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5, "log_level": 0})
    for line in lines:
        producer.produce(topic, line, partition=partition)
        producer.poll(0)
    assert producer.flush(30) == 0
