"""The data sets: files below SHOAL_DATA into training and test examples.

Every set is a `Split` of one `shoal.Batch` for training and one for testing: all programs learn from the same keys and
values. The search never uses the test part: `Split.parts` cuts the validation examples from the training part, at
random, or by time if the split itself is by time.
"""

from __future__ import annotations

import csv
import datetime
import io
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import shoal
from shoal import Batch
from shoal.models.preprocessing import joined, take

FEW = 10_000  # training examples, below which a fifth of them is too few for validation


def batches(examples: Batch, size: int) -> list[Batch]:
    """Cut into batches of the given size; the last one may be smaller."""
    rows = np.arange(len(examples))
    return [take(examples, rows[begin : begin + size]) for begin in range(0, len(rows), size)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """A data set, cut into what is learned from and what is measured on.

    Attributes
    ----------
    train, test : Batch
    in_time : bool
        Examples are in the order of time, and the test part comes last.
    """

    train: Batch
    test: Batch
    in_time: bool = False

    def parts(self) -> list[tuple[Batch, Batch]]:
        """Cut the training part into training and validation examples: a fifth of it.

        Once, the last fifth in time or a random one; if there are few examples, five times, each fifth in turn.
        """
        n = len(self.train)
        rows = np.arange(n) if self.in_time else _mixed(n, 2)
        ends = np.linspace(0, n, 6).round().astype(np.int64)
        fifths = range(5) if n < FEW and not self.in_time else [4]
        return [
            (
                take(self.train, np.concatenate([rows[: ends[i]], rows[ends[i + 1] :]])),
                take(self.train, rows[ends[i] : ends[i + 1]]),
            )
            for i in fifths
        ]


def _mixed(n: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(n)


def _of(reader: shoal.data.Reader) -> Batch:
    return joined(list(reader))


def _random_split(all_of_it: Batch, test: int) -> Split:
    rows = _mixed(len(all_of_it), 1)
    return Split(train=take(all_of_it, rows[:-test]), test=take(all_of_it, rows[-test:]))


def _libsvm(train: str, test: str) -> Callable[[Path], Split]:
    def load(folder: Path) -> Split:
        return Split(
            train=_of(shoal.read_libsvm(folder / "libsvm" / train)),
            test=_of(shoal.read_libsvm(folder / "libsvm" / test)),
        )

    return load


def _rcv1(folder: Path) -> Split:
    return Split(
        train=_of(shoal.read_vw(folder / "libsvm" / "rcv1_small.vw.dat.xz")),
        test=_of(shoal.read_vw(folder / "libsvm" / "rcv1_small_test.vw.data.xz")),
    )


def _movielens(folder: Path) -> Split:
    path = folder / "movielens_tags" / "movielenslatest_x1_test.csv.xz"
    return _random_split(_of(shoal.read_csv(path, label="label", categorical=["user_id", "item_id", "tag_id"])), 20_000)


def _flights(folder: Path) -> Batch:
    """Read the columns known before departure, and the pairs of columns that are informative together."""
    kept = ["month", "day", "carrier", "flight", "tailnum", "origin", "dest"]
    derived = io.StringIO(newline="")
    out = csv.writer(derived, lineterminator="\n")
    out.writerow(["late", "weekday", "hour", *kept])
    with lzma.open(folder / "flights_nyc2017" / "flights_nyc2017.csv.xz", "rt", newline="") as text:
        for row in csv.DictReader(text):
            weekday = datetime.date(int(row["year"]), int(row["month"]), int(row["day"])).weekday()
            late, hour = float(row["arr_delay"]) > 15, int(row["sched_dep_time"]) // 100
            out.writerow([int(late), weekday, hour, *(row[name] for name in kept)])
    reader = shoal.read_csv(
        io.BytesIO(derived.getvalue().encode()),
        label="late",
        categorical=["weekday", "hour", *kept],
        interactions=[("carrier", "flight"), ("origin", "dest"), ("origin", "hour")],
    )
    return _of(reader)


def _flights_random(folder: Path) -> Split:
    flights = _flights(folder)
    return _random_split(flights, len(flights) // 5)


def _flights_in_time(folder: Path) -> Split:
    flights = _flights(folder)
    rows = np.arange(len(flights))
    cut = len(rows) - len(rows) // 5
    return Split(train=take(flights, rows[:cut]), test=take(flights, rows[cut:]), in_time=True)


def _attribution(folder: Path) -> Split:
    def read(part: str) -> Batch:
        path = folder / "criteo_attribution" / f"small_{part}.parquet"
        return _of(shoal.read_parquet(path, label="click", categorical=["cat1", "cat4", "cat6", "cat8", "cat9"]))

    return Split(train=read("train"), test=read("valid"))


SETS: dict[str, Callable[[Path], Split]] = {
    "a9a": _libsvm("a9a.xz", "a9a.t.xz"),
    "ijcnn1": _libsvm("ijcnn1.trn.bz2", "ijcnn1.tst.bz2"),
    "reuters_moneyfx": _libsvm("reuters_moneyfx.trn.bz2", "reuters_moneyfx.tst.bz2"),
    "rcv1": _rcv1,
    "movielens_tags": _movielens,
    "flights_nyc2017": _flights_random,
    "flights_nyc2017_in_time": _flights_in_time,
    "criteo_attribution": _attribution,
}
