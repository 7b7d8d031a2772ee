"""Kill a training process at random moments, resume from its last checkpoint, and get the same bits.

    python examples/killed.py                             # draws a log, kills three times
    python examples/killed.py --kills 10 --checkpoint-every 50 --seed 1

A process trains by `shoal train lr --checkpoint-every N --resume` and is killed (SIGKILL, without any cleanup) a random
time after its first checkpoint, several times; the last process runs to its end. Its weights, optimizer state and
metrics are compared with those of a run that was not killed.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import shoal
from shoal.tools.planted import PlantedModel, write_log


def learned(directory: Path) -> list[object]:
    """Return everything that a model has learned, to the bit, and its metrics."""
    with shoal.LogisticRegression.load(directory) as model:
        rows = [(keys.tobytes(), model.table.state(keys)["z"].tobytes()) for keys, _ in model.table.items()]
        metrics = [(done.metrics, done.valid, done.features) for done in model.history.passes]
        return [rows, metrics, model.examples]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--checkpoint-every", type=int, default=7, metavar="N", help="batches between two checkpoints (%(default)s)"
    )
    parser.add_argument(
        "--examples", type=int, default=10_000, metavar="N", help="examples of the log (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, help="of the random moments (default: a new one each time)")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(10**6)
    moments = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        log, whole, killed = (Path(scratch, name) for name in ("log.tsv", "whole", "killed"))
        write_log(log, PlantedModel(seed=1), arguments.examples, 0)
        command = [sys.executable, "-m", "shoal", "train", "lr", "--data", str(log), "--format", "criteo", "--quiet"]
        command += ["--epochs", str(arguments.epochs), "--batch-size", "100", "--l1", "0.5", "--shuffle", "3"]
        command += ["--checkpoint-every", str(arguments.checkpoint_every), "--resume"]
        subprocess.run([*command, "--output", whole], check=True, stdout=subprocess.DEVNULL)
        for kill in range(arguments.kills):
            process = subprocess.Popen([*command, "--output", killed], stdout=subprocess.DEVNULL)
            while process.poll() is None and not (killed / "model.json").exists():
                time.sleep(0.01)
            time.sleep(moments.random() * (0.5 if kill == 0 else 2.0))  # later processes take a while to start
            if process.poll() is None:
                process.kill()
            print(f"kill {kill + 1}: {'killed' if process.wait() else 'it had ended'}, seed {seed}")
            if process.returncode == 0:
                break
        # The fit may have finished already, if the last kill came after the model was saved: this is a success too.
        subprocess.run([*command, "--output", killed], check=True, stdout=subprocess.DEVNULL)
        same = learned(whole) == learned(killed)
        print("the same bits" if same else "OTHER BITS")
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
