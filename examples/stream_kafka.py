"""Learn from a topic of Kafka while it is written, and stop and go on: each message is learned from once.

    python examples/stream_kafka.py                                # on brokers that it runs itself, of librdkafka
    python examples/stream_kafka.py --servers host:9092 --topic clicks --output clicks    # until Ctrl-C

Messages are JSON objects: {"click": 1, "ad": "17", "site": "a.com", "at": 1764400000.5}. The offsets of all partitions
are in the checkpoint, beside the weights that the messages before them have changed; the same command continues there.
Every second the model is exported to OUTPUT-served, for `shoal serve OUTPUT-served --watch 1`.
"""

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from shoal.models import Callback, Checkpointing, PublishDelta

SCHEMA = {"label": "click", "categorical": ["ad", "site"]}


class StopAt(Callback):
    """Stands for the person who presses Ctrl-C: when so many examples are learned from."""

    def __init__(self, examples: int) -> None:
        self.examples = examples

    def stream_idle(self, progress: shoal.models.FitProgress) -> None:
        """Send the signal, once nothing more arrives."""
        if progress.examples >= self.examples:
            self.examples = 1 << 62
            os.kill(os.getpid(), signal.SIGINT)


def learn(servers: str, topic: str, output: Path, callbacks: list[Callback]) -> int:
    """Learn until Ctrl-C; return how many examples the model has learned from, in this run and those before."""
    reader = shoal.read_kafka(servers, topic, format="json", schema=SCHEMA, event_time="at")
    served = PublishDelta(output.with_name(f"{output.name}-served"), every=1.0)
    with shoal.LogisticRegression(shoal.FTRL(alpha=0.1)) as model:
        try:
            checkpoint = Checkpointing(output, every=1000, resume=True)
            model.fit(reader, checkpoint=checkpoint, callbacks=[served, *callbacks], progress=False)
        except KeyboardInterrupt:
            print(f"stopped after {model.examples:,} examples")
        return model.examples


def write(producer: Any, topic: str, count: int, seed: int) -> None:
    """Append clicks to all partitions."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        ad, site = draw.integers(300), draw.integers(40)
        click = int(draw.random() < 1 / (1 + np.exp(2 - ad / 100 - site / 40)))
        value = {"click": click, "ad": str(ad), "site": f"site{site}", "at": time.time()}
        producer.produce(topic, json.dumps(value), partition=number % 4)
        producer.poll(0)
    producer.flush(30)


def show(folder: Path) -> None:
    """Run brokers, learn from a topic, stop, and go on with what has arrived meanwhile."""
    from confluent_kafka import Producer

    brokers = Producer({"test.mock.num.brokers": 1, "log_level": 0})  # they end with it
    servers = ",".join(f"{one.host}:{one.port}" for one in brokers.list_topics(timeout=30).brokers.values())
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    for attempt in (1, 2):
        write(producer, "clicks", 10_000, seed=attempt)
        assert learn(servers, "clicks", folder / "clicks", [StopAt(attempt * 10_000)]) == attempt * 10_000


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", help="brokers, as host:9092 (default: some that the example runs)")
    parser.add_argument("--topic", default="clicks")
    parser.add_argument("--output", type=Path, default=Path("clicks"))
    options = parser.parse_args()
    if options.servers:
        learn(options.servers, options.topic, options.output, [])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            show(Path(temporary))
