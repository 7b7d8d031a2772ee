"""Readers: text per second of one core, compared with pyarrow's readers and scikit-learn's svmlight loader.

    pip install pyarrow scikit-learn                 (if a peer is missing, a message says that it is left out)
    python bench/bench_readers.py                    files of 100 MB in the directory for temporary files, 0.7 GB in all
    python bench/bench_readers.py --megabytes 20 --rounds 3 --threads 1 2 8

Draws Criteo-like examples (13 whole numbers, 26 categories of eight hexadecimal digits, some missing), writes them in
every format, plain and gzipped, and reads each file from beginning to end, in turns. shoal produces batches of 8192
examples as CSR arrays with hashed keys, with one and with two threads that parse; pyarrow produces columns of int64
and strings, a record batch at a time, on one thread; scikit-learn produces one sparse matrix. A rate is the file's
text (unzipped; that of the CSV file for Parquet) divided by the CPU time of all threads of the process, or by the
elapsed time: shoal reads ahead in a second thread. Each round checks the numbers of examples and features, and the sum
of the labels.
"""

import argparse
import gzip
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import shoal
from figures import check, spread
from shoal.tools.planted import PlantedModel, write_log

try:
    import pyarrow as pa
    from pyarrow import csv, parquet
except ImportError:
    pa = None
try:
    from sklearn.datasets import load_svmlight_file
except ImportError:
    load_svmlight_file = None

EXAMPLES = 50_000  # drawn; their text is repeated to fill a file
INTEGERS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]


class Count(NamedTuple):
    """The contents of a file as read in one pass."""

    examples: int
    features: int
    positives: int


class Text(NamedTuple):
    """A file and its contents."""

    path: Path
    bytes: int
    count: Count


class Figures(NamedTuple):
    """Megabytes a second, round by round."""

    by_cpu: list[float]
    by_wall: list[float]


def lines(cells: list[list[bytes]]) -> Iterator[tuple[str, bytes, int]]:
    """Write rows of Criteo's cells in every format: its name, the text, its features."""
    features = sum(1 for row in cells for cell in row[1:] if cell)
    yield "criteo", b"".join(b"\t".join(row) + b"\n" for row in cells), features
    head = b",".join(name.encode() for name in ["label", *INTEGERS, *CATEGORIES]) + b"\n"
    yield "csv", head + b"".join(b",".join(row) + b"\n" for row in cells), features
    svm, ffm, vw = [], [], []
    for row in cells:
        numbers = [(i, f"{np.log1p(max(0, int(cell))):.4f}") for i, cell in enumerate(row[1:14], 1) if cell]
        # A million ids for each column: scikit-learn requires ascending ids within a line.
        ids = [(i, i * 1_000_000 + int(cell, 16) % 1_000_000) for i, cell in enumerate(row[14:], 14) if cell]
        label = row[0].decode()
        svm.append(
            f"{label} {' '.join(f'{i}:{v}' for i, v in numbers)} {' '.join(f'{key}:1' for _, key in ids)}\n".encode()
        )
        ffm.append(
            f"{label} {' '.join(f'{i}:{i}:{v}' for i, v in numbers)} "
            f"{' '.join(f'{i}:{key}:1' for i, key in ids)}\n".encode()
        )
        names = " ".join(f"|C{i - 13} {cell.decode()}" for i, cell in enumerate(row[14:], 14) if cell)
        vw.append(f"{label} |I {' '.join(f'I{i}:{v}' for i, v in numbers)} {names}\n".encode())
    for name, text in (("libsvm", svm), ("libffm", ffm), ("vw", vw)):
        yield name, b"".join(text), features


def write(folder: Path, megabytes: int) -> dict[str, Text]:
    """Write every format, plain and gzipped; the name of a gzipped one ends in .gz."""
    drawn = folder / "drawn.tsv"
    write_log(drawn, PlantedModel(), EXAMPLES, 0)
    cells = [line.split(b"\t") for line in drawn.read_bytes().splitlines()]
    positives = sum(row[0] == b"1" for row in cells)
    files = {}
    for name, text, features in lines(cells):
        times = -(-megabytes * 1_000_000 // len(text))
        body = text.partition(b"\n")[2] if name == "csv" else text
        path = folder / f"log.{name}"
        with path.open("wb") as file:
            file.write(text)
            for _ in range(times - 1):
                file.write(body)
        count = Count(times * EXAMPLES, times * features, times * positives)
        files[name] = Text(path, path.stat().st_size, count)
        zipped = folder / f"log.{name}.gz"
        with path.open("rb") as plain, gzip.open(zipped, "wb", compresslevel=6) as file:
            shutil.copyfileobj(plain, file, 1 << 20)
        files[f"{name}.gz"] = Text(zipped, path.stat().st_size, count)
    if pa:
        whole = pa.Table.from_batches(columns_of(files["csv"].path, ",", None))
        path = folder / "log.parquet"
        parquet.write_table(whole, path)
        files["parquet"] = Text(path, files["csv"].bytes, files["csv"].count)
    return files


def read(reader: shoal.data.Reader) -> Count:
    """Make one pass with a reader of shoal."""
    examples = features = positives = 0
    for batch in reader:
        examples += len(batch.labels)
        features += len(batch.keys)
        positives += int(batch.labels.sum())
    return Count(examples, features, positives)


def columns_of(path: Path, delimiter: str, names: list[str] | None) -> Iterator[Any]:
    """Read columns with pyarrow: record batches."""
    types: dict[str, Any] = {name: pa.int64() for name in ["label", *INTEGERS]}
    types.update(dict.fromkeys(CATEGORIES, pa.string()))
    empty = {"strings_can_be_null": True, "null_values": [""]}
    return csv.open_csv(
        path,
        csv.ReadOptions(use_threads=False, column_names=names),
        csv.ParseOptions(delimiter=delimiter),
        csv.ConvertOptions(column_types=types, **empty),
    )


def read_columns(batches: Callable[[], Iterator[Any]]) -> Count:
    """Make one pass over record batches."""
    examples = features = positives = 0
    for batch in batches():
        examples += batch.num_rows
        features += sum(batch.num_rows - column.null_count for column in batch.columns[1:])
        positives += int(batch.column(0).to_numpy().sum())
    return Count(examples, features, positives)


def read_sklearn(path: Path) -> Count:
    """Load a matrix with scikit-learn."""
    matrix, labels = load_svmlight_file(str(path), dtype=np.float32)
    return Count(len(labels), matrix.nnz, int(labels.sum()))


def contenders(files: dict[str, Text], threads: list[int]) -> Iterator[tuple[str, str, Callable[[], Count]]]:
    """List the measurements: the file's name, the reader's name, a function that makes one pass."""
    columns = ["label", *INTEGERS, *CATEGORIES]
    for key, text in files.items():
        path, name = text.path, key.removesuffix(".gz")
        make = partial(getattr(shoal, f"read_{name}"), path)
        if name in ("csv", "parquet"):
            make = partial(make, label="label", categorical=CATEGORIES, numeric=INTEGERS)
        for count in threads if name != "parquet" else [1]:
            how = {} if name == "parquet" else {"reader_threads": count}
            yield key, shoal_of(name, count), partial(read, make(**how))
        if pa and key == "criteo":
            yield key, "pyarrow.csv", partial(read_columns, partial(columns_of, path, "\t", columns))
        if pa and key == "csv":
            yield key, "pyarrow.csv", partial(read_columns, partial(columns_of, path, ",", None))
        if key == "parquet":
            batches = partial(parquet.ParquetFile(path).iter_batches, use_threads=False)
            yield key, "pyarrow.parquet", partial(read_columns, batches)
        if load_svmlight_file and key == "libsvm":
            yield key, "scikit-learn", partial(read_sklearn, path)


def shoal_of(name: str, threads: int) -> str:
    """Name a reader of shoal."""
    return f"shoal.read_{name}" + (f", {threads} threads" if threads > 1 else "")


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="of each file, at least")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="that parse; peers are compared with the first"
    )
    options = parser.parse_args()
    for module, name in ((pa, "pyarrow"), (load_svmlight_file, "scikit-learn")):
        if module is None:
            print(f"{name} is not installed and is left out (pip install {name})")
    with tempfile.TemporaryDirectory(prefix="shoal-readers-") as folder:
        files = write(Path(folder), options.megabytes)
        found: dict[tuple[str, str], Figures] = {}
        for _ in range(options.rounds):
            for key, name, read_all in contenders(files, options.threads):
                text = files[key]
                wall, cpu = time.perf_counter(), time.process_time()
                count = read_all()
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                check(count == text.count, f"{name} read {count} of {key}, written were {text.count}")
                figures = found.setdefault((key, name), Figures([], []))
                figures.by_cpu.append(text.bytes / cpu / 1e6)
                figures.by_wall.append(text.bytes / wall / 1e6)
    print("| file | bytes a line | reader | MB/s of a core | MB/s by the clock | shoal / peer |\n|" + "---|" * 6)
    for (key, name), figures in found.items():
        form = key.removesuffix(".gz")
        ours = found[key, shoal_of(form, 1 if form == "parquet" else options.threads[0])]
        ratio = [a / b for a, b in zip(ours.by_cpu, figures.by_cpu, strict=True)]
        print(
            f"| {key} | {files[key].bytes / files[key].count.examples:.0f} | {name} | {spread(figures.by_cpu)} "
            f"| {spread(figures.by_wall)} | {'' if name.startswith('shoal') else spread(ratio, 1)} |"
        )


if __name__ == "__main__":
    main()
