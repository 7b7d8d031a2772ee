"""Mutated bodies for the prediction server: each is predicted from or refused, in bounded memory.

    python tests/support/serve_fuzz.py --seed 1 --count 100000

Bodies of every form are changed: bits flip, bytes and words take extreme values, pieces are cut out, and put in from
other bodies. What does not end as a batch or a RequestError ends the run: the last line names the seed and number of
the body, which ``--first`` repeats. A crash of the process is one, too: run it in a process of its own.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import struct
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

import shoal
from shoal.serve.bodies import ARROW, JSON, encode, examples
from shoal.serve.inputs import InputSpec
from shoal.serve.limits import Account, Budget, Limits, RequestError

LIMITS = Limits(body_bytes=1 << 20, decoded_bytes=32 << 20, in_flight_bytes=64 << 20)
WORDS = (0, 1, -1, 2, 8, 255, 1 << 15, (1 << 31) - 1, -(1 << 31), 1 << 31, 1 << 40, (1 << 62) - 1, -(1 << 63))


def stream(table, **options):
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue()


def seeds(named):
    """Bodies that are in order, with the models that they are for."""
    rows = [{"site": "a", "user": 3, "price": 0.5, "seen": ["a", None], "dwell": [0.5, None]}, {"site": None},
            {"price": 1, "seen": [], "dwell": [3]}] * 2  # fmt: skip
    schema = pa.schema({"site": pa.string(), "user": pa.int64(), "price": pa.float64(), "seen": pa.list_(pa.string()),
                        "dwell": pa.list_(pa.float64())})  # fmt: skip
    table = pa.Table.from_pylist(rows, schema)
    keys = pa.table({"keys": pa.array([[1, 2], [], [3]] * 2, pa.list_(pa.uint64())),
                     "values": pa.array([[1, 2], [], [3]] * 2, pa.large_list(pa.float32()))})  # fmt: skip
    coded = table.set_column(0, "site", table["site"].dictionary_encode())
    views = table.set_column(0, "site", table["site"].cast(pa.string_view()))
    fixed = pa.table({"keys": pa.array([[1, 2]] * 4, pa.list_(pa.uint16(), 2)), "more": pa.array([None] * 4)})
    coded_lists = table.set_column(3, "seen", table["seen"].cast(pa.list_(pa.dictionary(pa.int8(), pa.string()))))
    odd = pa.table({"site": pa.array([1, None], pa.timestamp("us")), "user": pa.array([True, None]), "price": [1, 2],
                    "seen": pa.array([[2.5], None], pa.list_(pa.float64())),
                    "dwell": pa.array([["1"], None], pa.list_(pa.dictionary(pa.int8(), pa.string())))})  # fmt: skip
    sized = table.set_column(0, "site", pa.array([b"a", None] * 3, pa.binary(1)))
    vectors = table.set_column(4, "dwell", pa.array([[1, None], None, [2, 3]] * 2, pa.list_(pa.int16(), 2)))
    for one in (table, coded, views, odd, coded_lists, sized, vectors):
        yield stream(one), ARROW, named
        yield stream(one, compression="lz4"), ARROW, named
    for one in (keys, fixed):
        yield stream(one), ARROW, named
        yield stream(one, compression="zstd"), ARROW, named
    yield (
        b'site,user,price,seen,dwell\na,3,0.5,a|b,1|2\r\n"b, ""c""",,NA,,\n\n"True",1.0,2,7|,"|3"\n',
        "text/csv",
        named,
    )
    yield json.dumps({"instances": [*rows, {"keys": [1, 2**64 - 1], "values": [0.5, 1]}]}).encode(), JSON, named


def mutate(rng, bodies, body):
    """Change a body in a few places."""
    out = bytearray(body)
    for _ in range(1 + rng.integers(4)):
        at = int(rng.integers(len(out) or 1))
        how = rng.integers(8)
        if how < 2 and out:
            out[at] ^= 1 << int(rng.integers(8))
        elif how == 2 and out:
            out[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF]))
        elif how < 6:
            code, size = [("<q", 8), ("<i", 4), ("<h", 2)][rng.integers(3)]
            at -= at % size
            word = int(rng.choice(WORDS)) & ((1 << 8 * size) - 1)
            if at + size <= len(out):
                out[at : at + size] = struct.pack(code.upper(), word)
        elif how == 6:
            del out[at : at + int(rng.integers(1, 64))]
        else:
            other = bodies[rng.integers(len(bodies))][0]
            begin = int(rng.integers(len(other)))
            out[at:at] = other[begin : begin + int(rng.integers(1, 200))]
    return out


def run(seed: int, count: int, first: int) -> int:
    """Try bodies: how many of them were predicted from."""
    how = {"label": "y", "categorical": None, "numeric": ["price"], "lists": {"seen": "site"}, "vectors": ["dwell"]}
    frame = pa.table({"y": [1, 0], "site": ["a", "b"], "user": [1, 2], "price": [0.5, 1], "seen": [["a"], ["b"]],
                      "dwell": [[0.5], [1, 2]]})  # fmt: skip
    criteo = "1\t" + "\t".join(["3"] * 13 + ["a"] * 26) + "\n"
    with shoal.LogisticRegression() as named, shoal.LogisticRegression() as lines:
        named.fit(shoal.read_arrow(frame, **how, interactions=[("site", "user"), ("seen", "seen")]), progress=False)
        lines.fit(shoal.read_criteo(io.BytesIO(criteo.encode() * 3), interactions=[("C1", "C2")]), progress=False)
        bodies = [*seeds(named), (criteo.encode() * 3, "text/plain", lines)]
        bodies.append((json.dumps({"instances": [criteo, {"I1": 5, "C1": "a"}]}).encode(), JSON, lines))
        specs = {id(model): InputSpec(model) for model in (named, lines)}
        answered = 0
        for body, kind, model in bodies:
            answered += predict(body, kind, model, specs[id(model)])
        assert answered == len(bodies), f"{answered} of {len(bodies)} bodies that are in order were answered"
        answered = 0
        for number in range(first, first + count):
            rng = np.random.default_rng([seed, number])
            body, kind, model = bodies[rng.integers(len(bodies))]
            changed = mutate(rng, bodies, body)
            try:
                answered += predict(changed, kind, model, specs[id(model)])
            except BaseException:
                print(f"body {number} of seed {seed}", file=sys.stderr, flush=True)
                raise
    return answered


def predict(body, kind, model, spec) -> int:
    """Whether a body was predicted from."""
    budget = Budget(LIMITS)
    try:
        with Account(budget) as account:
            account.body(len(body))
            batch = examples(body, kind, spec, account)
            encode(1, model.probabilities(batch), JSON)
            return 1
    except RequestError:
        return 0
    finally:
        assert budget.held == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    done = run(arguments.seed, arguments.count, arguments.first)
    # Not ru_maxrss, which begins with that of the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = int(status.partition("VmHWM:")[2].split()[0]) >> 10
    print(json.dumps({"bodies": arguments.count, "answered": done, "peak_mib": peak}))
