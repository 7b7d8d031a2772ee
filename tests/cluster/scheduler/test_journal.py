"""The files of the scheduler's journal: what was committed is read again, whatever ends the process, and damage is
named.
"""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from memberships import new_state
from paths import GOLDEN
from recorded_world import RecordedWorld, described, play
from shoal.cluster.scheduler import journal as journal_module
from shoal.cluster.scheduler.inputs import Died, Input, MembersSilent
from shoal.cluster.scheduler.journal import Journal, count_frames, decode_frame, encode_frame
from shoal.cluster.scheduler.membership import Membership
from shoal.cluster.scheduler.recovery import recover
from shoal.errors import CorruptionError, StorageError
from tiers import rounds

MESSAGES = GOLDEN / "journal-v1.json"
STATE = new_state(random.Random(7), servers=2)


def entry(k: int) -> Input:
    return Input(float(k), Died(b"s", "x" * (k % 50)))


def write(directory: Path, commits: list[int]) -> list[Input]:
    """Write commits of so many inputs each."""
    made = []
    with Journal(directory) as journal:
        assert journal.load() is None
        journal.begin(STATE)
        for count in commits:
            for _ in range(count):
                made.append(entry(len(made)))
                journal.append(made[-1])
            journal.commit()
    return made


def read(directory: Path) -> list[Input]:
    with Journal(directory) as journal:
        state, entries = journal.load()
        assert state == STATE
        return entries


def the_log(directory: Path) -> Path:
    (path,) = directory.glob("log-*")
    return path


def test_what_was_committed_is_read_again_and_what_was_not_is_not(tmp_path):
    made = write(tmp_path, [1, 3, 0, 2])
    assert read(tmp_path) == made
    with Journal(tmp_path) as journal:
        journal.load()
        journal.append(entry(6))
        journal.commit()
        journal.append(entry(7))
    assert read(tmp_path) == [*made, entry(6)]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.data())
@settings(max_examples=rounds(25), deadline=None)
def test_a_log_that_is_cut_at_any_byte_gives_the_whole_commits_before_it_and_is_continued(
    tmp_path_factory, sizes, data
):
    directory = tmp_path_factory.mktemp("journal")
    made = write(directory, sizes)
    log = the_log(directory)
    whole = log.read_bytes()
    ends, at = [], journal_module._FILE.size
    while at < len(whole):
        at += journal_module._HEADER_BYTES + len(decode_frame(whole, at)[1])
        ends.append(at)
    cut = data.draw(st.integers(0, len(whole)))
    log.write_bytes(whole[:cut])
    (directory / "committed").write_bytes(b"")  # as of a process that ended before it wrote the number
    kept = sum(size for size, end in zip(sizes, ends, strict=True) if end <= cut)
    assert read(directory) == made[:kept]
    assert read(directory) == made[:kept]  # the torn end is gone
    with Journal(directory) as journal:
        journal.load()
        journal.append(entry(99))
        journal.commit()
    assert read(directory) == [*made[:kept], entry(99)]


def test_a_torn_end_is_reported(tmp_path, caplog):
    write(tmp_path, [1])
    log = the_log(tmp_path)
    log.write_bytes(log.read_bytes() + encode_frame(2, b"\x90")[:-1])
    read(tmp_path)
    assert "bytes that were not committed: they are cut off" in caplog.text
    log.write_bytes(log.read_bytes() + bytes(4096))  # of a file system that had grown the file
    assert read(tmp_path) == [entry(0)]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=90), st.data())
@settings(max_examples=rounds(25), deadline=None)
def test_a_log_that_was_cut_after_its_commits_is_damage_that_names_how_many_are_missing(tmp_path_factory, sizes, data):
    directory = tmp_path_factory.mktemp("journal")
    write(directory, sizes)
    log = the_log(directory)
    whole = log.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    zeros = data.draw(st.sampled_from([0, 100]))  # as a file system leaves them
    log.write_bytes(whole[:cut] + bytes(zeros))
    before = log.read_bytes()
    missing = len(sizes) - count_frames(whole[:cut], 0)
    begin = r"it does not begin with SHOALJNL|has version 0" if cut < journal_module._FILE.size else "no such"
    with pytest.raises(CorruptionError, match=rf"stored: {missing} commits? missing: restore|{begin}"):
        read(directory)
    assert log.read_bytes() == before, "a damaged journal was changed"


def test_whole_commits_after_a_damaged_one_are_counted(tmp_path):
    write(tmp_path, [1] * 84)
    log = the_log(tmp_path)
    whole = bytearray(log.read_bytes())
    at = journal_module._FILE.size + len(encode_frame(1, msgspec.msgpack.encode([entry(0)])))
    whole[at + 5] ^= 1
    log.write_bytes(whole)
    with pytest.raises(CorruptionError, match=r"a commit cannot be read, and whole ones follow it \(82\)"):
        read(tmp_path)


def test_a_journal_whose_files_were_removed_is_damage_and_a_cleared_one_is_new(tmp_path):
    write(tmp_path, [1, 1])
    for path in tmp_path.glob("*-*"):
        path.unlink()
    with pytest.raises(CorruptionError, match="commits up to 2 were stored, and are missing"):
        read(tmp_path)
    with Journal(tmp_path) as journal:
        journal.clear()
        assert journal.load() is None


@pytest.mark.parametrize("name", ["lock", "committed", "log-0000000000000001", "snapshot-0000000000000001"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.timeout(60)
def test_files_of_a_journal_are_not_links_or_pipes(tmp_path, name, kind):
    write(tmp_path / "journal", [1])
    path, target = tmp_path / "journal" / name, tmp_path / "precious"
    target.write_text("precious")
    path.unlink()
    if kind == "link":
        path.symlink_to(target)
    else:
        os.mkfifo(path)
    with pytest.raises(StorageError, match=f"{name} is (a symbolic link|not a file): remove it|No such device"):
        read(tmp_path / "journal")
    assert target.read_text() == "precious"


def test_a_new_snapshot_follows_no_links(tmp_path):
    target = tmp_path / "precious"
    target.write_text("precious")
    for name in ("snapshot.tmp", "log-0000000000000001"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / name).symlink_to(target)
        with Journal(directory) as journal, pytest.raises(StorageError, match="is a symbolic link: remove it"):
            journal.begin(STATE)
    assert target.read_text() == "precious"


@given(st.data())
@settings(max_examples=rounds(40), deadline=None)
def test_a_changed_byte_before_the_last_commit_is_damage_and_is_named(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("journal")
    write(directory, [1, 2, 1])
    log = the_log(directory)
    whole = bytearray(log.read_bytes())
    last = len(whole) - len(encode_frame(3, msgspec.msgpack.encode([entry(3)])))
    at = data.draw(st.integers(0, last - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    log.write_bytes(whole)
    with pytest.raises(CorruptionError, match=r"log-0000000000000001(, byte \d+: | has version)") as caught:
        read(directory)
    assert "with an empty directory" in str(caught.value)
    assert log.read_bytes() == whole, "a damaged journal was changed"


@given(st.data())
@settings(max_examples=rounds(25), deadline=None)
def test_a_changed_or_missing_byte_of_the_snapshot_is_damage(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("journal")
    write(directory, [1])
    (path,) = directory.glob("snapshot-*")
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole if data.draw(st.booleans()) else whole[:at])
    with pytest.raises(CorruptionError, match="snapshot-0000000000000001"):
        read(directory)


def test_missing_files_and_commits_are_damage(tmp_path):
    write(tmp_path, [1, 1, 1])
    log = the_log(tmp_path)
    whole = log.read_bytes()
    (snapshot,) = tmp_path.glob("snapshot-*")
    kept = snapshot.read_bytes()
    snapshot.unlink()
    with pytest.raises(CorruptionError, match="it has 3 commits, but its snapshot is missing"):
        read(tmp_path)
    snapshot.write_bytes(kept)
    log.unlink()
    with pytest.raises(CorruptionError, match=r"log-0000000000000001, byte 0: it is missing"):
        read(tmp_path)
    first = journal_module._FILE.size
    size = len(encode_frame(1, msgspec.msgpack.encode([entry(0)])))
    log.write_bytes(whole[:first] + whole[first + size :])
    with pytest.raises(CorruptionError, match="commit 1 is missing, 2 follows"):
        read(tmp_path)
    log.write_bytes(whole[:first] + encode_frame(1, msgspec.msgpack.encode([["poem", 1.0]])))
    with pytest.raises(CorruptionError, match="commit 1 cannot be read"):
        read(tmp_path)
    log.write_bytes(whole[:8] + b"\x09\x00" + whole[10:])
    with pytest.raises(CorruptionError, match=r"has version 9, and this version of shoal reads version 1"):
        read(tmp_path)


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=rounds(60), deadline=None)
def test_any_bytes_are_a_torn_end_or_damage_and_never_another_error(tmp_path_factory, garbage, in_frame):
    directory = tmp_path_factory.mktemp("journal")
    made = write(directory, [1])
    log = the_log(directory)
    with log.open("ab") as file:
        file.write(encode_frame(2, garbage) if in_frame else garbage)
    try:
        assert read(directory) == made
    except CorruptionError:
        assert in_frame or count_frames(garbage, 0)


class StopError(Exception):
    """The process ends here."""


def stopped_after(monkeypatch, steps, what):
    """Do something whose process ends after so many calls of the operating system; returns whether it was done."""
    left = steps

    def stopping(function):
        def call(*arguments, **named):
            nonlocal left
            left -= 1
            if left < 0:
                raise StopError
            return function(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        for name in ("open", "write", "pwrite", "fsync", "listdir"):
            patch.setattr(os, name, stopping(getattr(os, name)))
        for name in ("rename", "unlink", "open"):
            patch.setattr(Path, name, stopping(getattr(Path, name)))
        try:
            what()
        except StopError:
            return False
    return True


def test_a_process_that_ends_at_any_step_of_a_snapshot_loses_nothing(tmp_path, monkeypatch):
    later = structs.replace(STATE, generation=7)
    seen = set()
    done, steps = False, 0
    while not done:
        directory = tmp_path / str(steps)
        made = write(directory, [2, 1])
        with Journal(directory) as journal:
            journal.load()
            done = stopped_after(monkeypatch, steps, lambda journal=journal: journal.begin(later))
        with Journal(directory) as journal:
            found = journal.load()
        assert found in ((STATE, made), (later, []))
        assert not done or found == (later, [])
        assert [len(list(directory.glob(f"{kind}-*"))) for kind in ("snapshot", "log")] == [1, 1]
        seen.add(found[0].generation)
        steps += 1
    assert seen == {0, 7}
    assert steps > 10


def test_a_failed_write_ends_all_commits_and_what_is_half_written_is_cut_off(tmp_path, monkeypatch):
    made = write(tmp_path, [2])
    write_ = os.write

    def full(file, data):
        if len(data) > 10:
            return write_(file, data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Journal(tmp_path) as journal:
        journal.load()
        journal.append(entry(3))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda file, data: full(file, data if len(data) > 70 else b""))
            with pytest.raises(StorageError, match=r"cannot be written: No space left on device\. The scheduler ends"):
                journal.commit()
        for again in (journal.commit, lambda: journal.begin(STATE)):
            with pytest.raises(StorageError, match="cannot be written: No space left") as caught:
                again()
            assert caught.value.errno == errno.ENOSPC
    assert read(tmp_path) == made


def test_a_journal_in_use_is_refused_with_the_process_that_uses_it_and_free_when_that_one_was_killed(tmp_path):
    hold = (
        "import sys, time; from shoal.cluster.scheduler.journal import Journal\n"
        f"journal = Journal({str(tmp_path)!r}); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(StorageError, match=rf"in use by another scheduler \(process {other.pid}\): end that"):
                Journal(tmp_path)
        finally:
            other.kill()
    with Journal(tmp_path) as journal:
        assert journal.load() is None


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"the journal .*/file cannot be used: (File exists|Not a directory)"):
        Journal(tmp_path / "file")


@pytest.mark.parametrize("seed", range(5))
def test_a_run_is_recovered_from_files_with_snapshots(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(Journal, "has_grown", property(lambda journal: journal._log_bytes > 1000))

    class Filed(RecordedWorld):
        snapshots = 0

        def route(self, outgoing):
            if self.journal.has_grown and self.membership.at_rest:
                self.journal.commit()
                self.journal.begin(self.membership.save())
                self.snapshots += 1
            self.journal.commit()
            super().route(outgoing)

        def record(self, given):
            self.journal.append(given)
            super().record(given)

        def __init__(self, *arguments, **of):
            self.journal = Journal(tmp_path)
            super().__init__(*arguments, **of)
            recover(self.journal, self.membership.state)

        def recover(self, *, missed=0.0):
            before = None if self.kept < len(self.entries) else described(self.membership)
            self.journal.close()
            del self.entries[self.kept :], self.states[self.kept :]
            self.journal = Journal(tmp_path)
            self.membership = recover(self.journal, new_state(RNG, servers=2, workers=2, slots=16, heartbeat=1.0))
            self.membership._record = self.record
            assert before in (None, described(self.membership))
            self.now += missed
            self.membership.restarted("", self.now)
            self.journal.commit()
            self.kept = len(self.entries)

    world = Filed(seed, servers=2, workers=2, loss=0.1)
    play(world, 15, restarts=True)
    world.loss = 0.0
    world.go(8.0)
    assert world.snapshots > 0
    assert world.membership.state.generation > 0
    world.journal.close()


RNG = random.Random(3)


def test_other_settings_than_those_of_the_journal_are_refused_and_an_ended_cluster_begins_anew(tmp_path):
    new = new_state(random.Random(1), servers=2)
    with Journal(tmp_path) as journal:
        first = recover(journal, new)
        first._record = journal.append
        first.restarted("tcp://127.0.0.1:7", 1.0)
        journal.commit()
    with Journal(tmp_path) as journal, pytest.raises(ValueError, match=r"has servers=2, and .* with servers=3"):
        recover(journal, new_state(random.Random(2), servers=3))
    with Journal(tmp_path) as journal:
        cluster = recover(journal, new_state(random.Random(2), servers=2), partial(Membership, record=journal.append))
        again = cluster.state
        assert (again.cluster, again.generation, again.address) == (new.cluster, 1, "tcp://127.0.0.1:7")
        cluster.stop(2.0)
        journal.commit()
    with Journal(tmp_path) as journal:
        anew = recover(journal, new_state(random.Random(3), servers=3)).state
        assert (anew.cluster != new.cluster, anew.generation, anew.address) == (True, 0, "")


def golden() -> dict[str, str]:
    """The bytes of a journal of format version 1, in hex."""
    with_peers = RecordedWorld(4, servers=1, workers=1, loss=0.0)
    with_peers.start_worker()
    with_peers.go(2.0)
    entries = [*with_peers.entries, Input(1.5, Died(b"s", "it is silent", 0.5)), Input(2.5, MembersSilent(True))]
    return {
        "snapshot": encode_frame(1, msgspec.msgpack.encode(with_peers.membership.save())).hex(),
        "log": encode_frame(1, msgspec.msgpack.encode(entries)).hex(),
    }


def test_a_journal_of_the_first_version_is_read(tmp_path):
    kept = {name: bytes.fromhex(data) for name, data in json.loads(MESSAGES.read_text()).items()}
    header = {"snapshot": b"SHOALSNP\1\0", "log": b"SHOALJNL\1\0"}
    for name, data in kept.items():
        (tmp_path / f"{name}-0000000000000001").write_bytes(header[name] + data)
    with Journal(tmp_path) as journal:
        state, entries = journal.load()
    assert encode_frame(1, msgspec.msgpack.encode(state)) == kept["snapshot"]
    assert encode_frame(1, msgspec.msgpack.encode(entries)) == kept["log"]
    membership = Membership(state)
    assert membership.workers == {0: 1}


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1))
