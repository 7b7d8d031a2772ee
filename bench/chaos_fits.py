"""Kill, stop and start the workers of fits at random moments, and count how often each example was learned from.

    python bench/chaos_fits.py --fits 20
    python bench/chaos_fits.py --fits 300 --kinds lr,ctr --seed 7

Each fit has two servers and a scheduler of its own, by `shoal launch`. Its data is a text file whose every example has
a key of its own; the model, a logistic regression or a torch module, pushes 1 to the row of a key for each time that
it learns from its example, so the rows are the counts. A fit is drawn from: BSP, SSP(2) and ASP; a fixed number of
workers, where one that was killed is replaced or the others learn from what it had left, or two to four workers, of
which some come later and some leave (SIGTERM). One to three faults happen at random moments.

Under BSP each example of each pass must have been learned from exactly once, and be in the metrics of the pass; under
SSP and ASP at least once, and no more often in sum than the fit reports. The exit status is 1 if that does not hold, or
a fit fails or does not end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from shoal.consistency import parse_consistency
from shoal.errors import WorkersChangedError

EXAMPLES, BATCH, EPOCHS = 400, 4, 2
PAUSE = 0.015  # seconds a batch
MODES = ("bsp", "ssp:2", "asp")
SHAPES = ("replaced", "left", "changing")


class Counting(shoal.LogisticRegression):
    """Adds 1 to the row of a key for each example that has it."""

    def _backward(self, *arguments: Any) -> Any:
        return [np.full(gradient.shape, -1.0, np.float32) for gradient in super()._backward(*arguments)]


def model_of(kind: str, store: shoal.Store) -> Any:
    """Make the model of a worker: its first table has the counts."""
    rule = shoal.SGD(lr=1.0)
    if kind == "lr":
        return Counting(rule, store=store, bias=False, warm_up=False)
    import torch

    torch.set_num_threads(1)

    class One(torch.autograd.Function):
        """The identity, whose gradient is -1 whatever the loss is."""

        @staticmethod
        def forward(context: Any, rows: torch.Tensor) -> torch.Tensor:
            return rows.clone()

        @staticmethod
        def backward(context: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.full_like(grad, -1.0)

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = shoal.torch.Embedding(store.table("counts", dim=1, optimizer=rule))
            self.dense = torch.nn.Linear(1, 1)

        def forward(self, inputs: Any) -> Any:
            one: Any = One
            return self.dense(torch.tanh(one.apply(self.rows(inputs.keys[:, 0])))).squeeze(1)

    return shoal.torch.ClickModel(Module(), features=1, store=store, dense="servers")


def work(kind: str, mode: str, log: str, out: str, workers: str) -> None:
    """Fit as one worker, again when the number of workers changes; write what was found."""
    least, _, most = workers.partition(":")
    given: Any = (int(least), int(most)) if most else int(least)
    while True:
        try:
            with shoal.connect(workers=given, consistency=parse_consistency(mode), threads=1, timeout=60) as store:
                Path(out, f"{os.getpid()}.joined").touch()
                model = model_of(kind, store)
                share = shoal.read_libsvm(log, batch_size=BATCH).split(store.rank, store.num_workers)
                model.fit(share, epochs=EPOCHS, progress=False, callbacks=[Slow()])
                store.flush()
                counts = model.tables[0].pull(np.arange(EXAMPLES, dtype=np.uint64))[:, 0]
                passes = model.history.passes
                found = {
                    "counts": counts.tolist(),
                    "measured": [done.metrics.examples for done in passes],
                    "repeated": [done.repeated for done in passes],
                    "unmeasured": [done.unmeasured for done in passes],
                }
                Path(out, f"{os.getpid()}.json").write_text(json.dumps(found))
            return
        except WorkersChangedError as change:
            if change.leaves:
                return


class Slow(shoal.models.Callback):
    """Waits after each batch, so that a fit lasts long enough to be disturbed."""

    def batch_done(self, progress: Any) -> None:
        """Wait."""
        time.sleep(PAUSE)


class Fit:
    """One launched fit."""

    def __init__(self, number: int, kind: str, draw: random.Random, scratch: Path, log: Path) -> None:
        self.kind, self.mode, self.shape = kind, draw.choice(MODES), draw.choice(SHAPES)
        self.out = scratch / f"fit-{number}"
        self.out.mkdir()
        self._draw = draw
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self._workers = "2:4" if self.shape == "changing" else "3" if self.shape == "left" else "2"
        launch = [sys.executable, "-m", "shoal", "launch", "--servers", "2", "--workers", self._workers]
        launch += ["--scheduler", self._address]
        self._work = [sys.executable, __file__, "--work", kind, self.mode, str(log), str(self.out), self._workers]
        self._output = (self.out / "output.txt").open("w+")
        self._others: list[subprocess.Popen[bytes]] = []  # workers that the launched command does not start
        self.faults: list[str] = []
        if self.shape == "left":  # a launched command would end with the first of its workers that is killed
            launch[launch.index("--workers") + 1] = "1"
            self.process = self._started([*launch, "sleep", "3600"])
            for _ in range(int(self._workers)):
                self._start()
        else:
            self.process = self._started([*launch, "--worker-restarts", "9", *self._work])

    def _started(self, command: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, stdout=self._output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def _start(self) -> None:
        """Start a worker."""
        environment = os.environ | {"SHOAL_SCHEDULER": self._address, "SHOAL_WORKERS": self._workers}
        self._others.append(self._started(self._work, environment))

    def workers(self) -> list[int]:
        """Return the processes that work."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                is_worker = str(self.out).encode() in words and b"--work" in words and b"launch" not in words
                if is_worker and not any(word.endswith(b"guard.py") for word in words):
                    found.append(int(process.name))
        return found

    def disturb(self) -> None:
        """Do a fault."""
        what = self._draw.choice(("kill", "join", "leave") if self.shape == "changing" else ("kill",))
        if what == "join":
            if len(self._others) < 2:
                self._start()
                self.faults.append("join")
        elif what == "leave":
            if self._others and self._others[0].poll() is None:  # there are enough without it
                self._others[0].terminate()
                self.faults.append("leave")
        elif found := self.workers():
            inside = [one for one in found if (self.out / f"{one}.joined").exists()]
            if self.shape != "replaced" and (len(inside) < 2 or (self.shape == "left" and len(inside) < len(found))):
                return  # the job has not begun, or one worker is left
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._draw.choice(found), signal.SIGKILL)
                self.faults.append("kill")

    def end(self, limit: float) -> str:
        """Wait for the end; return what is wrong, or an empty text."""
        until = time.monotonic() + limit
        processes = self._others if self.shape == "left" else [self.process]
        try:
            statuses = [one.wait(max(0.1, until - time.monotonic())) for one in processes]
        except subprocess.TimeoutExpired:
            return f"it did not end in {limit:.0f} s"
        finally:
            if self.shape == "left":
                self.process.terminate()
            for one in [self.process, *self._others]:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.wait(5.0)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)
        found = [json.loads(path.read_text()) for path in self.out.glob("*.json")]
        if not found:
            return f"status {statuses}, and no worker has completed the fit"
        for one in found:
            counts, repeated = np.array(one["counts"]), sum(one["repeated"])
            more = counts.sum() - EPOCHS * EXAMPLES
            if counts.min() < EPOCHS:
                return f"{int((counts < EPOCHS).sum())} examples were learned from too seldom"
            if more > repeated or (self.mode == "bsp" and more):
                return f"{more:.0f} examples were learned from too often, and {repeated} are reported"
            if one["measured"] != [EXAMPLES] * EPOCHS:
                return f"the metrics are of {one['measured']} examples"
        self.unmeasured = max(sum(one["unmeasured"]) for one in found)
        self.repeated = max(sum(one["repeated"]) for one in found)
        return ""


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--kinds", default="lr", metavar="LIST", help="some of lr,ctr (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of all that is drawn")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="for a fit (%(default)s)")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    draw = random.Random(options.seed)
    print(f"seed {options.seed}, load {os.getloadavg()[0]:.1f}", flush=True)
    wrong, seconds, faults, repeated = 0, [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.libsvm")
        log.write_text("".join(f"{number % 2} {number}:1\n" for number in range(EXAMPLES)))
        for number in range(options.fits):
            begun = time.monotonic()
            fit = Fit(number, draw.choice(options.kinds.split(",")), draw, Path(folder), log)
            for _ in range(draw.randint(1, 3)):
                time.sleep(draw.uniform(0.3, 2.5 if fit.kind == "lr" else 6.0))
                if fit.process.poll() is None:
                    fit.disturb()
            why = fit.end(options.limit)
            seconds.append(time.monotonic() - begun)
            faults += len(fit.faults)
            if why:
                wrong += 1
                print(f"fit {number} ({fit.kind}, {fit.mode}, {fit.shape}, {fit.faults}): {why}", flush=True)
                print((fit.out / "output.txt").read_text()[-3000:], flush=True)
            else:
                repeated += fit.repeated
    print(f"{options.fits} fits, {faults} faults, {statistics.median(seconds):.1f} s each, {repeated} repeated", end="")
    print(f"; {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
