"""The C library: the time of one example a call, from keys that are in no cache, and the memory of several processes.

    make bench                          builds build/release/bench/cpp/predict_bench
    python bench/bench_predict.py       1e7 keys, 39 features, float32 and float16
    python bench/bench_predict.py --processes 8 --keys 2e8      eight processes over one export of 4 GB: their memory

Weights are drawn for keys 0, 1, ...; the program draws the keys of each example from all of them and checks that every
call succeeds. The memory of a process is its private part (smaps_rollup) once it has predicted, without the mapped
files, which the processes share.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import shoal

PROGRAM = Path(__file__).parent.parent / "build" / "release" / "bench" / "cpp" / "predict_bench"
FEATURES = 39
BLOCK = 1 << 20


def export(folder: Path, keys: int, dtype: str) -> Path:
    """Export a logistic regression with so many keys."""
    rng = np.random.default_rng(1)
    with shoal.LogisticRegression(shoal.SGD(lr=1.0), warm_up=False) as model:
        for start in range(0, keys, BLOCK):
            some = np.arange(start, min(start + BLOCK, keys), dtype=np.uint64)
            model.table.push(some, rng.normal(0, 0.1, (len(some), 1)).astype(np.float32)).result()
        model.record.examples = 1
        model.export(folder / dtype, dtype=dtype)
    return folder / dtype


def main() -> None:
    """Measure and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=float, default=1e7)
    parser.add_argument("--examples", type=int, default=1_000)
    parser.add_argument("--dtype", nargs="+", default=["float32", "float16"])
    parser.add_argument("--processes", type=int, default=0, help="measure the memory of so many at once")
    options = parser.parse_args()
    keys = int(options.keys)
    with tempfile.TemporaryDirectory() as folder:
        for dtype in options.dtype:
            where = export(Path(folder), keys, dtype)
            size = sum(file.stat().st_size for file in where.iterdir())
            command = [str(PROGRAM), str(where), str(keys), str(FEATURES), str(options.examples)]
            if options.processes:
                command.append("wait")
                running = [
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                    for _ in range(options.processes)
                ]
                for one in running:
                    assert one.stdout is not None
                    print(f"{dtype}, {size / 2**20:.0f} MiB of files: {one.stdout.readline().strip()}")
                for one in running:
                    one.communicate("\n")
            else:
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                print(f"{dtype}, {size / 2**20:.0f} MiB of files: {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
