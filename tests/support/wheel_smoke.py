"""Imports shoal, trains, saves and loads, and prints digests of the weights: the same on each machine.

Prints the instruction sets that shoal uses here, too.

    python tests/support/wheel_smoke.py

tools/check_wheels.py runs it with the wheels for another architecture, under an emulator, and here.
"""

import hashlib
import json
import os
import platform
import tempfile
import time
from typing import Any


def digest(*arrays: Any) -> str:
    """Digest the bytes of arrays."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def main() -> None:
    """Run the smoke test."""
    started, cpu = time.perf_counter(), time.process_time()
    import numpy as np

    with_numpy, numpy_cpu = time.perf_counter(), time.process_time()
    import shoal
    from shoal import _core, _reader

    imported, imported_cpu = time.perf_counter(), time.process_time()
    assert _core.__file__.endswith(".so")
    assert _reader.__file__.endswith(".so")

    rng = np.random.default_rng(5)
    keys = rng.integers(0, 1 << 63, 3_000, dtype=np.uint64)
    weights = {}
    for optimizer in (shoal.FTRL(l1=0.01), shoal.Adagrad(), shoal.Adam(), shoal.SGD()):
        for dim in (1, 8):
            with shoal.local() as store:
                table = store.table("t", dim=dim, optimizer=optimizer)
                for _ in range(3):
                    batch = rng.choice(keys, 2_000)
                    table.push(batch, rng.random((len(batch), dim), dtype=np.float32) - np.float32(0.4))
                weights[f"{type(optimizer).__name__} {dim}"] = digest(table.pull(keys))

    with tempfile.TemporaryDirectory() as folder:
        examples = os.path.join(folder, "examples.txt")
        with open(examples, "w") as file:
            for _ in range(400):
                features = sorted(set(rng.integers(1, 300, 8).tolist()))
                label = int(sum(feature % 3 == 0 for feature in features) > 2)
                print(label, *(f"{feature}:1" for feature in features), file=file)
        with shoal.LogisticRegression(shoal.FTRL(alpha=0.1)) as model:
            model.fit(shoal.read_libsvm(examples), epochs=3, progress=False)
            scores = model.probabilities(shoal.read_libsvm(examples))
            margins = model.decision_function(shoal.read_libsvm(examples))
            auc = model.evaluate(shoal.read_libsvm(examples)).auc
            model.save(os.path.join(folder, "model"))
        with shoal.load(os.path.join(folder, "model")) as again:
            assert np.array_equal(again.probabilities(shoal.read_libsvm(examples)), scores)
    assert auc > 0.9, auc
    # Not the probabilities: the last bit of the C library's exp() depends on its version and the processor.
    weights["logistic regression"] = digest(margins)
    result = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "libraries": sorted({os.path.basename(_core.__file__), os.path.basename(_reader.__file__)}),
        "import_cpu_seconds": {"numpy": round(numpy_cpu - cpu, 3), "shoal": round(imported_cpu - numpy_cpu, 3)},
        "import_seconds": {"numpy": round(with_numpy - started, 3), "shoal": round(imported - with_numpy, 3)},
        "cpu_features": _core.build_info()["cpu_features"],
        "weights": weights,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
