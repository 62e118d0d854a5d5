"""The side index: whole or not there, of one state of one file, and wherever it can be written."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import fsspec
import pytest

from manyhands.core.errors import UsageError
from manyhands.data import drafts
from manyhands.data.drafts import drafting
from manyhands.data.index import SUFFIX
from manyhands.data.jsonl import JsonlTable
from tests.data.kit import Blob


class Counting(JsonlTable):
    """Says how often its file was gone through."""

    scans = 0

    def scan(self, lines):
        Counting.scans += 1
        return super().scan(lines)


@pytest.fixture
def scans():
    Counting.scans = 0
    return lambda: Counting.scans


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "rows.jsonl"
    made.write_bytes(b"1\n2\n\n3\n")
    return made


def beside(path):
    return path.with_name(path.name + SUFFIX)


def test_it_is_made_once(path, scans):
    assert len(Counting(path)) == 3
    assert beside(path).stat().st_size == 512 + 8 * (3 + 1) + 8 * 1
    for _ in range(3):
        table = Counting(path)
        assert [table[i] for i in range(3)] == [1, 2, 3]
        assert table.where(2) == f"{path}:4"
    assert scans() == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["rows.jsonl", f"rows.jsonl{SUFFIX}"]


def test_any_change_of_the_file_makes_it_anew(path, scans):
    Counting(path)
    first = path.stat().st_mtime_ns
    changes = [
        (b"1\n2\n\n34\n", first),  # size
        (b"1\n2\n\n34\n", first + 1),  # time
        (b"5\n2\n\n34\n", first + 1),  # the first bytes
        (b"5\n2\n\n36\n", first + 1),  # the last ones
    ]
    for number, (data, mtime_ns) in enumerate(changes, start=2):
        path.write_bytes(data)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        assert list(Counting(path)) == [int(line) for line in data.split()]
        table = Counting(path)
        assert [table[i] for i in range(3)] == [int(line) for line in data.split()]
        # Once to make it, and once for each time that all was iterated over.
        assert scans() == 1 + 2 * (number - 1)


def test_the_middle_of_a_large_file_is_told_by_its_time(tmp_path, scans):
    path = tmp_path / "large.jsonl"
    rows = [b"%06d" % i for i in range(100_000, 200_000)]
    path.write_bytes(b"\n".join(rows))
    Counting(path)
    rows[50_000] = b"1\n2\n\n\n"
    path.write_bytes(b"\n".join(rows))
    table = Counting(path)
    assert scans() == 2
    assert len(table) == 100_001
    assert table[100_000] == 199_999
    assert table.where(100_000) == f"{path}:100004"


def test_in_the_cache_if_the_folder_cannot_be_written(path, cache, scans):
    beside(path).mkdir()  # so that no file can be there, whoever we are
    for _ in range(2):
        table = Counting(path)
        assert [table[i] for i in range(3)] == [1, 2, 3]
    assert scans() == 2  # it turned out only when there was one to be put there; then never more
    (cached,) = cache.rglob(f"*{SUFFIX}")
    assert cached.stat().st_size == 512 + 8 * 5
    assert not [p for p in path.parent.rglob("*") if p.name.endswith(".draft")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_in_the_cache_if_the_folder_is_somebody_elses(path, cache):
    path.parent.chmod(0o500)
    try:
        assert len(JsonlTable(path)) == 3
    finally:
        path.parent.chmod(0o700)
    assert len(list(cache.rglob(f"*{SUFFIX}"))) == 1


def test_where_the_user_says(path, tmp_path, scans):
    place = tmp_path / "deep" / "er" / "my.index"
    for _ in range(2):
        assert Counting(path, index=place)[2] == 3
    assert place.exists()
    assert scans() == 1
    assert not beside(path).exists()


@pytest.mark.parametrize("index", [None, "my.index"])
def test_the_same_place_from_another_folder(path, tmp_path, monkeypatch, scans, index):
    """As in a process that begins elsewhere than where the table was made."""
    monkeypatch.chdir(path.parent)
    table = pickle.dumps(Counting(path.name, index=index))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    table = pickle.loads(table)
    assert table[1:] == [2, 3]
    assert scans() == 1
    assert not any((tmp_path / "elsewhere").iterdir())


def test_nowhere(path, cache):
    beside(path).mkdir()
    (cache / "manyhands").write_text("a file where a folder should be")
    with pytest.raises(UsageError, match=r"written nowhere: .*rows.*; .*manyhands.*\n.*index=PATH"):
        JsonlTable(path)


def test_nothing_else_is_written_over(path, tmp_path):
    precious = tmp_path / "thesis.txt"
    precious.write_text("ten years of work")
    with pytest.raises(UsageError, match="is there, and is no index"):
        JsonlTable(path, index=precious)
    assert precious.read_text() == "ten years of work"


@pytest.mark.parametrize("size", [0, 3, 511, 512, 520, 512 + 8 * 5 - 1, 512 + 8 * 5 + 1])
def test_half_of_one_is_none(path, scans, size):
    Counting(path)
    whole = beside(path).read_bytes()
    beside(path).write_bytes((whole + b"?")[:size])
    table = Counting(path)
    assert [table[i] for i in range(3)] == [1, 2, 3]
    assert scans() == 2
    assert beside(path).read_bytes() == whole


def test_one_that_somebody_spoilt(path):
    """Whatever it says, nothing beyond the file is asked for."""
    JsonlTable(path)
    data = bytearray(beside(path).read_bytes())
    data[512 + 8 * 2 + 6] = 0xFF
    beside(path).write_bytes(data)
    table = JsonlTable(path)
    assert table[0] == 1
    for index in (1, 2):
        with pytest.raises(UsageError, match="is broken\nhint: remove it"):
            table[index]
    table.close()


def test_without_a_home(path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr("os.path.expanduser", lambda name: name)  # as for a user without a name
    assert JsonlTable(path)[2] == 3
    with pytest.raises(UsageError, match="written nowhere: no folder"):
        JsonlTable(Blob(b"1\n"))


def test_one_of_another_kind_of_table_is_none(path, scans):
    """And none takes the place of another's: each is made once, whoever comes when."""

    class Other(Counting):
        kind = "other"

        def scan(self, lines):
            return (found for found in super().scan(lines) if found[2] != b"2\n")

    for _ in range(3):
        assert len(Counting(path)) == 3
        assert len(Other(path)) == 2
    assert scans() == 2


def test_of_those_who_come_at_once_one_makes_it(path, scans, monkeypatch):
    """The ranks of a job: who comes second waits for the first, and goes through nothing."""
    at_work, waiting, gate = threading.Event(), threading.Event(), threading.Event()
    sleep = time.sleep

    def looked(seconds):
        waiting.set()
        sleep(seconds)

    class Slow(Counting):
        def scan(self, lines):
            at_work.set()
            assert gate.wait(60)
            return super().scan(lines)

    monkeypatch.setattr(drafts.time, "sleep", looked)
    lengths = []
    first = threading.Thread(target=lambda: lengths.append(len(Slow(path))))
    second = threading.Thread(target=lambda: lengths.append(len(Counting(path))))
    first.start()
    try:
        assert at_work.wait(60)
        second.start()
        assert waiting.wait(60)
    finally:
        gate.set()
        first.join()
    second.join()
    assert lengths == [3, 3]
    assert scans() == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["rows.jsonl", f"rows.jsonl{SUFFIX}"]


def test_who_has_waited_long_enough_makes_its_own(path, scans, monkeypatch):
    monkeypatch.setattr("manyhands.data.index._TURN_S", 0.0)
    with drafts.turn(path.parent, beside(path).name, 0.0):
        assert len(Counting(path)) == 3
    assert scans() == 1


def test_a_turn_of_a_process_that_was_killed_is_nobodys(path, scans):
    path.with_name(f".{beside(path).name}.turn").touch()
    assert len(Counting(path)) == 3
    assert scans() == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["rows.jsonl", f"rows.jsonl{SUFFIX}"]


def test_a_remote_file_is_known_by_what_its_place_says_of_it(cache, scans):
    """Size, first and last bytes are the same; nobody could tell by them."""
    memory = fsspec.filesystem("memory")
    rows = [b"%06d" % i for i in range(100_000, 200_000)]
    for changed in (b"150000", b"1\n2\n\n\n"):
        rows[50_000] = changed
        memory.pipe_file("/remote/rows.jsonl", b"\n".join(rows))
        table = Counting("memory://remote/rows.jsonl")
        assert table[len(table) - 1] == 199_999
    assert scans() == 2
    assert len(table) == 100_001
    assert len(Counting("memory://remote/rows.jsonl")) == 100_001
    assert scans() == 2
    memory.rm("/remote", recursive=True)


KILLED = """
import os, signal, sys
from manyhands.data import index
from manyhands.data.jsonl import JsonlTable
from tests.data.kit import Blob
real, count = os.pwrite, 0
def pwrite(*arguments):
    global count
    count += 1
    if count == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)
index._BATCH, index.os.pwrite = 10, pwrite
JsonlTable(sys.argv[1])
"""


@pytest.mark.parametrize("write", [1, 5, 11, 12])
def test_kill_9_while_it_is_written(tmp_path, scans, write):
    """At the first numbers, in their middle, before the header and before it has its name."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(b"%d\n" % i for i in range(100)))
    command = [sys.executable, "-c", KILLED, path, str(write)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not beside(path).exists()
    assert list(path.parent.glob("*.draft")) or list(path.parent.glob(".*.draft"))
    table = Counting(path)
    assert [table[i] for i in range(100)] == list(range(100))
    assert scans() == 1
    # What the dead process left is cleared by the next that writes one.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.jsonl", f"rows.jsonl{SUFFIX}"]


def test_what_somebody_is_writing_is_left_alone(path):
    with drafting(path.parent, beside(path).name) as draft:
        assert JsonlTable(path)[0] == 1
        assert draft.path.exists()
    assert not draft.path.exists()


def test_the_users_error_is_no_reason_to_write_elsewhere(path, cache):
    class Broken(JsonlTable):
        def scan(self, lines):
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        Broken(path)
    assert not list(cache.rglob("*"))
    assert [p.name for p in path.parent.iterdir()] == ["rows.jsonl"]
