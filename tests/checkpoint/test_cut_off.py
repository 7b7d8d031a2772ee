"""Saves that are cut off: what was there before is there after, or a load says that nothing is.

By an error at every single call to the system, by a full disk, by Ctrl-C, by SIGKILL at random moments.
"""

from __future__ import annotations

import builtins
import io
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.storage import checksummed_json

KEYS = np.arange(200, dtype=np.uint64)


def fill(store, value):
    table = store.table("t", dim=2, optimizer=shoal.SGD())
    table.assign(KEYS, np.full((200, 2), value, np.float32))
    other = store.table("u", dim=1, optimizer=shoal.FTRL())
    other.assign(KEYS, np.full(200, value, np.float32))


def loaded(folder):
    """Return the one number that all rows of all tables hold."""
    with shoal.local() as store:
        store.load(folder)
        rows = np.concatenate([store.tables["t"].pull(KEYS).ravel(), store.tables["u"].pull(KEYS).ravel()])
        assert np.all(np.abs(rows - rows[0]) < 1e-3), "rows of two moments"
        return round(float(rows[0]))


class FailingSystem:
    """Lets the first ``left`` calls to the system pass and fails the next one; a write fails half way."""

    NAMES = ("fsync", "replace", "rename", "unlink", "open", "close", "mkdir", "link", "remove")

    def __init__(self, monkeypatch, error):
        self.left = None
        self.failed = False
        self.error = error
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self.failing(getattr(os, name)))
        real = io.open
        for module in (builtins, io):
            monkeypatch.setattr(
                module, "open", lambda *args, **kwargs: FailingFile(self.failing(real)(*args, **kwargs), self)
            )

    def count(self):
        if self.left is not None:
            if self.left == 0:
                self.left = None
                self.failed = True
                raise self.error
            self.left -= 1

    def failing(self, call):
        def counted(*args, **kwargs):
            self.count()
            return call(*args, **kwargs)

        return counted


class FailingFile:
    """A file of a failing system."""

    def __init__(self, file, system):
        self.file = file
        self.system = system

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def write(self, data):
        try:
            self.system.count()
        except BaseException:
            self.file.write(memoryview(data).cast("B")[: memoryview(data).nbytes // 2])
            raise
        return self.file.write(data)


@pytest.mark.slow
@pytest.mark.combined
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk full", "ctrl-c"]
)
@pytest.mark.parametrize("first", [False, True], ids=["over another", "the first"])
def test_an_error_at_any_call_to_the_system_leaves_the_old_checkpoint_or_the_new(monkeypatch, tmp_path, error, first):
    system = FailingSystem(monkeypatch, error)
    with shoal.local(slots=4) as store:
        fill(store, 1)
        for calls in range(200):
            folder = tmp_path / str(calls)
            if not first:
                store.save(folder)
            fill(store, 2)
            system.left, system.failed = calls, False
            try:
                store.save(folder, overwrite=True)
                raised = False
            except type(error):
                raised = True
            system.left = None
            if not system.failed:
                break
            if first:
                try:
                    assert loaded(folder) == 2
                except (shoal.CorruptionError, FileNotFoundError):
                    assert raised
                    assert not (folder / "manifest.json").exists()
            else:
                assert loaded(folder) in {1, 2}
            store.save(folder, overwrite=True)  # and the next save is whole again
            assert loaded(folder) == 2
            fill(store, 1)
        else:
            pytest.fail("the save never came to its end")
        assert calls > 5, "nothing was intercepted"


LIMITED = """
import resource, signal, sys
import numpy as np, shoal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with shoal.local(slots=4) as store:
    table = store.table("t", dim=64, optimizer=shoal.SGD())
    keys = np.arange(2000, dtype=np.uint64)
    table.assign(keys, np.ones((2000, 64), np.float32))
    store.save(sys.argv[1])
    table.assign(keys, np.full((2000, 64), 2, np.float32))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        store.save(sys.argv[1], overwrite=True)
    except OSError as error:
        print("refused", error.errno)
    table.push(keys, np.ones((2000, 64), np.float32))  # nobody waits for the save that failed
with shoal.local() as store:
    store.load(sys.argv[1])
    print(float(store.tables["t"].pull(keys).min()), float(store.tables["t"].pull(keys).max()))
"""


def test_a_file_that_may_not_grow_is_an_error_and_the_old_checkpoint_stays(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "refused 27\n1.0 1.0\n"), done.stderr
    assert len(list((tmp_path / "c").iterdir())) == 2  # what was written of the new one is gone


ENDLESS = """
import sys
import numpy as np, shoal
keys = np.arange(200, dtype=np.uint64)
with shoal.local(slots=64) as store:
    t = store.table("t", dim=2, optimizer=shoal.SGD())
    u = store.table("u", dim=1, optimizer=shoal.FTRL())
    value = 0
    while True:
        value += 1
        t.assign(keys, np.full((200, 2), value, np.float32))
        u.assign(keys, np.full(200, value, np.float32))
        store.save(sys.argv[1])
        print(value, flush=True)
"""


@pytest.mark.slow
def test_a_process_killed_while_saving_leaves_a_checkpoint_of_one_moment(tmp_path):
    seed = 11
    print(f"seed {seed}")
    wait = random.Random(seed)
    folder = tmp_path / "c"
    for _ in range(6):
        with subprocess.Popen([sys.executable, "-c", ENDLESS, str(folder)], stdout=subprocess.PIPE, text=True) as child:
            child.stdout.readline()  # one save is done
            time.sleep(wait.uniform(0.0, 0.15))
            child.send_signal(signal.SIGKILL)
            rest = child.stdout.read().split()
        done = int(rest[-1]) if rest else 1
        assert loaded(folder) in {done, done + 1}
    with shoal.local() as store:
        fill(store, 5)
        store.save(folder, overwrite=True)
    assert loaded(folder) == 5
    assert len(list(folder.iterdir())) == 3  # the litter is gone


def test_a_failed_load_changes_nothing_and_leaves_nothing_locked(tmp_path, monkeypatch):
    with shoal.local() as store:
        fill(store, 3)
        store.save(tmp_path / "c")
        fill(store, 4)
        real = os.preadv

        def failing(*args):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(OSError, match="Input/output"):
            store.load(tmp_path / "c")
        monkeypatch.setattr(os, "preadv", real)
        np.testing.assert_array_equal(store.tables["t"].pull(KEYS), np.full((200, 2), 4))
        store.tables["t"].push(KEYS, np.ones((200, 2), np.float32)).result()
        store.load(tmp_path / "c")
        assert store.tables["t"].pull(KEYS)[0, 0] == 3


def test_a_path_that_cannot_be_made_is_an_error_of_the_system(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with shoal.local() as store:
        fill(store, 1)
        with pytest.raises(OSError):  # noqa: PT011 - which one depends on the system
            store.save(tmp_path / "file" / "c")
        with pytest.raises(OSError):  # noqa: PT011
            store.save(tmp_path / "file")
        store.tables["t"].push(KEYS, np.ones((200, 2), np.float32)).result()
    assert Path(tmp_path / "file").read_bytes() == b""


def test_an_interruption_after_the_new_manifest_is_in_place_leaves_the_new_checkpoint(tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    with shoal.local() as store:
        fill(store, 1)
        store.save(tmp_path)
        fill(store, 2)
        whole = checksummed_json.sync_directory
        monkeypatch.setattr(checksummed_json, "sync_directory", interrupt)  # the sync behind the rename of the manifest
        with pytest.raises(KeyboardInterrupt):
            store.save(tmp_path, overwrite=True)
        monkeypatch.setattr(checksummed_json, "sync_directory", whole)
    assert loaded(tmp_path) == 2


def test_the_names_of_all_directories_that_a_save_makes_are_on_disk_before_the_manifest_is(tmp_path, monkeypatch):
    calls = []

    def recorded(name, what):
        real = getattr(os, name)

        def call(*args, **kwargs):
            result = real(*args, **kwargs)
            calls.append((name, what(args)))
            return result

        monkeypatch.setattr(os, name, call)

    recorded("mkdir", lambda args: Path(args[0]))
    recorded("replace", lambda args: Path(args[1]))
    recorded("rename", lambda args: Path(args[1]))
    recorded("fsync", lambda args: Path(os.readlink(f"/proc/self/fd/{args[0]}")))
    for folder in (tmp_path / "c", tmp_path / "deep" / "er" / "c"):
        calls.clear()
        with shoal.local() as store:
            fill(store, 1)
            store.save(folder)
        made = [path for name, path in calls if name == "mkdir"]
        assert made == [
            path
            for path in (tmp_path / "deep", tmp_path / "deep" / "er", folder)
            if path in folder.parents or path == folder
        ]
        (in_place,) = (i for i, (_, path) in enumerate(calls) if path == folder / "manifest.json")
        for path in made:
            synced = calls.index(("fsync", path.parent), calls.index(("mkdir", path)))
            assert synced < in_place
    calls.clear()
    with shoal.local() as store:
        fill(store, 2)
        store.save(folder, overwrite=True)
    assert folder.parent not in {path for _, path in calls}  # which may be none of ours to read
