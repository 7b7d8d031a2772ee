"""Names of features: what it costs to collect, save and load them.

    python bench/bench_names.py                      a million examples, 4.7 million names: two minutes, 3 GB of memory
    python bench/bench_names.py --examples 100000 --rounds 1
    python bench/bench_names.py --peer /path/to/other/.venv/bin/shoal      another installation takes turns

`shoal train lr` as a whole process on the log of bench_text_to_model.py, without names and with `--names`. Then, in
this process, a pass of the reader without names, one that names all features, and one that finds all of them named;
saving, and loading.

Checked: every row but the bias has a name, names that are loaded are those that were saved, and the tables of all
commands are equal.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import shoal
from bench_text_to_model import FIELDS, process, write
from figures import check, conditions, spread


def passed(path: Path, names: shoal.data.FeatureNames | None) -> None:
    """Read the whole file."""
    for _ in shoal.read_criteo(str(path), batch_size=16384, names=names):
        pass


def clocked(call: Callable[[], object]) -> float:
    """Return the CPU seconds of all threads."""
    begun = time.process_time()
    call()
    return time.process_time() - begun


def main() -> None:
    """Measure and print two Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", metavar="SHOAL", help="the command `shoal` of another installation")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-names-") as name:
        folder = Path(name)
        path = folder / "train.tsv"
        write(path, options.examples)
        own = str(Path(sys.executable).with_name("shoal"))
        commands = {"without names": [own], "with names": [own, "--names"]}
        if options.peer is not None:
            commands["peer, with names"] = [options.peer, "--names"]
        runs: dict[str, list[tuple[float, float, float]]] = {title: [] for title in commands}
        tables = set()
        for _ in range(options.rounds):
            for number, (title, (shell, *more)) in enumerate(commands.items()):
                target = folder / f"model-{number}"
                train = [shell, "train", "lr", "--data", str(path), "--output", str(target), "--overwrite", "--quiet"]
                runs[title].append(process([*train, "--format", "criteo", "--batch-size", "16384", *more]))
                (slots,) = target.glob("*/*.slots")
                tables.add(slots.read_bytes())
        check(len(tables) == 1, "the tables of two commands differ")
        print("| `shoal train lr` | CPU s | s by the clock | peak RSS, MB |\n|---|---|---|---|")
        for title, some in runs.items():
            clock, used, peak = zip(*some, strict=True)
            print(f"| {title} | {spread(used, 2)} | {spread(clock, 2)} | {spread(peak)} |")
        with shoal.load(str(folder / "model-1")) as model:
            rows = len(model.table)
        saved = folder / "names"
        costs: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            names = shoal.data.FeatureNames()
            for title, call in {
                "pass without names": lambda: passed(path, None),
                "pass that names all": lambda: passed(path, names),  # noqa: B023
                "pass with all named": lambda: passed(path, names),  # noqa: B023
                "save": lambda: names.save(saved),  # noqa: B023
                "load": lambda: shoal.data.FeatureNames.load(saved),
            }.items():
                costs.setdefault(title, []).append(clocked(call))
        check(len(names) == rows - 1, f"{rows} rows, and {len(names)} names")
        check(shoal.data.FeatureNames.load(saved).to_parts() == names.to_parts(), "loaded names differ")
        print("\n| | CPU s | ns a feature, or a name |\n|---|---|---|")
        for title, seconds in costs.items():
            count = options.examples * FIELDS if title.startswith("pass") else len(names)
            print(f"| {title} | {spread(seconds, 2)} | {spread([one / count * 1e9 for one in seconds], 1)} |")
        print(f"\n{len(names):,} names, a file of {saved.stat().st_size / 1e6:.0f} MB")
    print(conditions())


if __name__ == "__main__":
    main()
