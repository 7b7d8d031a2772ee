"""Makes tests/golden/predictions: small exports of every kind, and examples with the bits of their predictions.

    python tests/support/conformance.py tests/golden/predictions

docs/c-library.md describes the files, which readers in other languages are checked with. They change only if the format
of exports does: data files have random names.
"""

import json
import random
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from shoal.data import Reader
from shoal.models import Model, MulticlassRegression
from shoal.models.predictor import Predictor
from shoal.serve.bodies import JSON, examples
from shoal.serve.inputs import InputSpec
from shoal.serve.limits import Account, Budget, Limits
from shoal.serve.served import make_model

SLOTS = 16
WORDS = ["a.com", "b.com", "17", "17.0", "True", "0.50", "2024-05-01T12:00:00Z", "é"]


def bits(probabilities: np.ndarray) -> list[str]:
    """Return the bits of an example's probabilities."""
    return [struct.pack(">d", float(p)).hex() for p in np.atleast_1d(probabilities)]


def keyed(draw: random.Random, classes: int = 2) -> shoal.Batch:
    """Draw examples of keys and values."""
    lengths = [draw.randrange(6) for _ in range(300)]
    keys = [draw.choice([0, 2**64 - 1, draw.randrange(60)]) for _ in range(sum(lengths))]
    values = [draw.choice([1.0, 0.5, -2.25, 1e-3]) for _ in keys]
    labels = [draw.randrange(classes) for _ in lengths]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return shoal.Batch(
        np.array(labels, np.float32), indptr.astype(np.int64), np.array(keys, np.uint64), np.array(values, np.float32)
    )


def key_cases(model: Predictor, batch: shoal.Batch) -> Iterator[dict[str, Any]]:
    """Yield examples by keys."""
    predictions = model.probabilities(batch)
    for i in range(40):
        some = slice(int(batch.indptr[i]), int(batch.indptr[i + 1]))
        assert batch.values is not None
        yield {
            "keys": batch.keys[some].tolist(),
            "values": batch.values[some].tolist(),
            "bits": bits(predictions[i]),
        }


def line_cases(model: Model, data: Reader, path: Path) -> Iterator[dict[str, Any]]:
    """Yield examples that are lines of a file."""
    predictions = model.probabilities(data)
    for line, p in zip(path.read_text().splitlines()[:40], predictions, strict=False):
        yield {"line": line, "bits": bits(p)}


def texts(draw: random.Random) -> dict[str, str]:
    """Write files of text."""

    def pairs(field: str) -> str:
        return " ".join(
            f"{field and str(draw.randrange(3)) + ':'}{draw.randrange(40)}:{draw.choice(['1', '0.5', '-2e-1'])}"
            for _ in range(draw.randrange(5))
        )

    def criteo() -> str:
        numbers = [
            str(draw.randrange(-3, 10 ** draw.randrange(1, 15))) if draw.random() < 0.7 else "" for _ in range(13)
        ]
        return "\t".join([*numbers, *(f"{draw.randrange(40):08x}" if draw.random() < 0.8 else "" for _ in range(26))])

    vw = ["x", "y:2", "z:0.5"]
    return {
        "libsvm": "".join(f"{draw.randrange(2)} {pairs('')}\n" for _ in range(300)),
        "libffm": "".join(f"{draw.randrange(2)} {pairs('f')}\n" for _ in range(300)),
        "vw": "".join(
            f"{draw.choice([1, -1])} |u {' '.join(draw.choice(vw) for _ in range(3))} |site:2 {draw.choice('abc')}\n"
            for _ in range(300)
        ),
        "criteo": "".join(f"{draw.randrange(2)}\t{criteo()}\n" for _ in range(300)),
    }


def column_cases(model: Model, draw: random.Random) -> Iterator[dict[str, Any]]:
    """Yield examples by named columns."""
    spec = InputSpec(model)
    for _ in range(60):
        cells: dict[str, Any] = {
            "site": draw.choice([*WORDS, 17, 17.5, True, None, "NA"]),
            "user": draw.choice([*WORDS, 3, 1e22]),
            "price": draw.choice([0.5, 2, "-3e2", None, "NA"]),
            "seen": [draw.choice([*WORDS, None]) for _ in range(draw.randrange(3))],
            "dwell": [draw.choice([1, 2.5, None]) for _ in range(draw.randrange(3))],
        }
        asked = {name: cell for name, cell in cells.items() if draw.random() < 0.8}
        body = json.dumps({"instances": [asked]}).encode()
        with Account(Budget(Limits())) as account:
            batch = examples(body, JSON, spec, account)
        yield {"columns": asked, "bits": bits(model.probabilities(batch)[0])}


def csv_text(draw: random.Random) -> str:
    """Write rows with named columns."""
    rows = ["click,site,price,user,seen,dwell"]
    for _ in range(300):
        price = draw.choice(["", "0.5", "2", "-3e2"])
        seen = "|".join(draw.choice(WORDS) for _ in range(draw.randrange(3)))
        dwell = "|".join(draw.choice(["1", "2.5"]) for _ in range(draw.randrange(3)))
        rows.append(f"{draw.randrange(2)},{draw.choice(WORDS)},{price},{draw.choice(WORDS)},{seen},{dwell}")
    return "\n".join(rows) + "\n"


def make(to: Path) -> None:
    """Write the exports and the examples."""
    draw = random.Random(1)
    cases: list[dict[str, Any]] = []

    def keep(name: str, model: Model, found: Iterator[dict[str, Any]]) -> None:
        model.export(to / name)
        cases.extend({"export": name, **case} for case in found)

    rule = shoal.Adagrad(lr=0.3)
    binary, several = keyed(draw), keyed(draw, classes=3)
    made: dict[str, Callable[[shoal.Store], Model]] = {
        "lr": lambda store: shoal.LogisticRegression(rule, store=store),
        "lr-without-bias": lambda store: shoal.LogisticRegression(rule, store=store, bias=False),
        "lr-normalized": lambda store: shoal.LogisticRegression(rule, store=store, normalized=True),
        "lr-platt": lambda store: shoal.LogisticRegression(rule, store=store),
        "lr-isotonic": lambda store: shoal.LogisticRegression(rule, store=store),
        "fm": lambda store: shoal.FactorizationMachine(5, optimizer=rule, store=store),
        "fm-normalized": lambda store: shoal.FactorizationMachine(4, optimizer=rule, store=store, normalized=True),
        "multinomial": lambda store: MulticlassRegression(3, optimizer=rule, store=store),
        "ovr": lambda store: MulticlassRegression(3, optimizer=rule, store=store, loss="ovr"),
    }
    for name, kind in made.items():
        batch = several if name in ("multinomial", "ovr") else binary
        with shoal.local(slots=SLOTS) as store, kind(store) as model:
            for _ in range(5):
                model.partial_fit(batch)
            if name in ("lr-platt", "lr-isotonic"):
                model.calibrate(batch, "platt" if name == "lr-platt" else "isotonic")
            keep(name, model, key_cases(model, batch))
    for dtype in ("float16", "bfloat16", "int8"):
        with shoal.local(slots=SLOTS) as store, made["fm"](store) as model:
            model.partial_fit(binary)
            model.export(to / f"fm-{dtype}", dtype=dtype)
        with shoal.export.open(to / f"fm-{dtype}", threads=1) as export:  # whose weights are rounded
            rounded = make_model(export.now, 1).predictor
            cases.extend({"export": f"fm-{dtype}", **case} for case in key_cases(rounded, binary))
    with shoal.local(slots=SLOTS) as store, made["lr"](store) as model:
        model.partial_fit(binary)
        model.export(to / "delta" / "1", track=True)
        for number in (2, 3):
            model.partial_fit(keyed(draw))
            model.export(to / "delta" / str(number), since=to / "delta" / str(number - 1))
        cases.extend({"export": "delta", **case} for case in key_cases(model, binary))
    readers: dict[str, Callable[..., Reader]] = {
        "libsvm": shoal.read_libsvm,
        "libffm": shoal.read_libffm,
        "vw": shoal.read_vw,
        "criteo": shoal.read_criteo,
    }
    crossed = {"libffm": [(0, 1), (2, 2)], "vw": [("u", "site")], "criteo": [("I1", "C1"), ("C2", "C3")]}
    for name, text in texts(draw).items():
        path = to / f"{name}.txt"
        path.write_text(text)
        how = {"interactions": crossed[name]} if name in crossed else {}
        with shoal.local(slots=SLOTS) as store, made["lr"](store) as model:
            model.fit(readers[name](path, **how), progress=False)
            keep(name, model, line_cases(model, readers[name](path, **how), path))
        path.unlink()
    path = to / "columns.csv"
    path.write_text(csv_text(draw))
    with shoal.local(slots=SLOTS) as store, made["lr"](store) as model:
        model.fit(
            shoal.read_csv(
                path,
                label="click",
                categorical=["site", "user"],
                numeric=["price"],
                lists={"seen": "site"},
                vectors=["dwell"],
                interactions=[("site", "user"), ("price", "seen")],
            ),
            progress=False,
        )
        keep("columns", model, column_cases(model, draw))
    path.unlink()
    with (to / "conformance.jsonl").open("w") as file:
        file.writelines(json.dumps(case, ensure_ascii=False) + "\n" for case in cases)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True)
    make(target)
