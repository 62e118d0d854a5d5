"""Logs on the coordinator's disk: offsets, repeats, full disks, followers, descriptors."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands.cluster.logs import (
    DiskFull,
    LogError,
    LogName,
    Logs,
    OtherBytes,
    WrongOffset,
)
from manyhands.core.errors import SettingsError

NAME = LogName(17, 0, 3)
_numbers = itertools.count(1)


@pytest.fixture
def logs(tmp_path):
    return Logs(tmp_path / "logs", reserve_bytes=0)


def test_a_log_is_a_file_named_by_numbers(logs, tmp_path):
    assert logs.append(NAME, 0, b"hello\n") == 6
    path = tmp_path / "logs" / "job-17" / "attempt-0" / "rank-3.log"
    assert path.read_bytes() == b"hello\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert logs.path(NAME) == path


def test_a_log_that_nobody_wrote_is_empty(logs, tmp_path):
    assert logs.length(NAME) == 0
    assert logs.read(NAME, 0, 100) == b""
    assert logs.read(NAME, 50, 100) == b""
    assert list((tmp_path / "logs").iterdir()) == []


def test_reads_are_pieces(logs):
    logs.append(NAME, 0, b"0123456789")
    assert logs.read(NAME, 2, 3) == b"234"
    assert logs.read(NAME, 8, 100) == b"89"
    assert logs.read(NAME, 10, 100) == b""
    assert logs.read(NAME, 99, 100) == b""


def test_a_repeated_piece_changes_nothing(logs):
    logs.append(NAME, 0, b"abc")
    heard = []
    end = logs.listen(heard.append)
    assert logs.append(NAME, 0, b"abc") == 3
    assert logs.append(NAME, 1, b"b") == 3
    assert logs.append(NAME, 3, b"") == 3
    assert heard == []
    assert logs.append(NAME, 1, b"bcde") == 5
    assert heard == [NAME]
    assert logs.read(NAME, 0, 9) == b"abcde"
    end()
    logs.append(NAME, 5, b"f")
    assert heard == [NAME]


def test_a_gap_is_refused_with_the_true_length(logs):
    logs.append(NAME, 0, b"abc")
    with pytest.raises(WrongOffset) as caught:
        logs.append(NAME, 5, b"x")
    assert caught.value.have == 3
    assert logs.read(NAME, 0, 9) == b"abc"
    with pytest.raises(WrongOffset):
        logs.append(LogName(1, 0, 0), 1, b"x")


def test_other_bytes_are_refused(logs):
    logs.append(NAME, 0, b"abc")
    with pytest.raises(OtherBytes) as caught:
        logs.append(NAME, 1, b"Xcd")
    assert caught.value.have == 3
    assert logs.read(NAME, 0, 9) == b"abc"


@given(
    st.binary(min_size=1, max_size=64),
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), max_size=12),
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_order_of_resends_gives_the_text(logs, text, pieces):
    name = LogName(next(_numbers), 0, 0)  # a log of its own for every example
    have = 0
    for offset, length in pieces:
        piece = text[offset : offset + length]
        if offset > have:
            with pytest.raises(WrongOffset) as caught:
                logs.append(name, offset, piece)
            assert caught.value.have == have
        else:
            have = max(have, offset + len(piece))
            assert logs.append(name, offset, piece) == have
        assert logs.read(name, 0, 100) == text[:have]
    assert logs.append(name, have, text[have:]) == len(text)


def test_negative_numbers_are_no_path(logs):
    with pytest.raises(ValueError, match="negative"):
        logs.path(LogName(1, -1, 0))


def test_a_symbolic_link_is_not_followed(logs, tmp_path):
    target = tmp_path / "precious"
    target.write_bytes(b"secret")
    path = logs.path(NAME)
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    with pytest.raises(LogError):
        logs.append(NAME, 0, b"x")
    with pytest.raises(LogError):
        logs.read(NAME, 0, 9)
    assert target.read_bytes() == b"secret"


@pytest.mark.parametrize("part", ["job", "attempt"])
def test_a_folder_that_is_a_link_is_not_followed(logs, tmp_path, part):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    attempt = logs.path(NAME).parent
    place = attempt if part == "attempt" else attempt.parent
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(elsewhere)
    with pytest.raises(LogError):
        logs.append(NAME, 0, b"x")
    with pytest.raises(LogError):
        logs.read(NAME, 0, 9)
    assert list(elsewhere.iterdir()) == []


def test_what_is_no_file_is_an_error_and_nobody_waits_for_it(logs):
    path = logs.path(NAME)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises(LogError, match="no file"):
        logs.append(NAME, 0, b"x")
    with pytest.raises(LogError, match="no file"):
        logs.read(NAME, 0, 9)


def test_what_is_no_folder_is_an_error(logs):
    place = logs.path(NAME).parent.parent
    place.write_bytes(b"")
    with pytest.raises(LogError, match="cannot be used"):
        logs.append(NAME, 0, b"x")
    with pytest.raises(LogError, match="cannot be used"):
        logs.read(NAME, 0, 9)


def test_a_folder_that_cannot_be_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SettingsError, match="--logdir"):
        Logs(tmp_path / "file" / "logs")


def test_a_folder_has_the_logs_of_one_cluster(logs, tmp_path):
    logs.claim("one")
    logs.append(NAME, 0, b"x")
    again = Logs(tmp_path / "logs", reserve_bytes=0)
    again.claim("one")
    with pytest.raises(SettingsError, match="another cluster") as caught:
        again.claim("two")
    assert "--logdir" in caught.value.hint
    assert again.read(NAME, 0, 9) == b"x"
    for lost in ((tmp_path / "logs" / "cluster").unlink, (tmp_path / "logs" / "cluster").touch):
        lost()
        with pytest.raises(SettingsError, match="another cluster"):
            again.claim("one")  # of whom, nobody knows


@pytest.mark.parametrize("whole", [True, False], ids=["folder", "contents"])
def test_a_folder_that_was_cleared_away_says_again_whose_it_is(logs, tmp_path, whole):
    logs.claim("one")
    logs.append(NAME, 0, b"x")
    shutil.rmtree(tmp_path / "logs")
    if not whole:
        (tmp_path / "logs").mkdir()
    logs.append(NAME, 0, b"y")
    Logs(tmp_path / "logs").claim("one")
    with pytest.raises(SettingsError, match="another cluster"):
        Logs(tmp_path / "logs").claim("two")


def test_a_folder_of_other_things_may_have_logs_too(tmp_path):
    (tmp_path / "job-12.out").write_text("of another program")
    (tmp_path / "job-12").write_text("likewise")
    (tmp_path / "cluster").touch()  # a power failure came between its making and its writing
    Logs(tmp_path).claim("one")
    assert (tmp_path / "cluster").read_text() == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster", "job-12", "job-12.out"]


def test_the_job_store_keeps_its_room(tmp_path):
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    logs = Logs(tmp_path / "logs", reserve_bytes=free * 2)
    with pytest.raises(DiskFull) as caught:
        logs.append(NAME, 0, b"x")
    assert caught.value.have == 0
    assert logs.append(NAME, 0, b"") == 0


def test_a_full_disk_leaves_the_true_length(logs, tmp_path):
    """The size of files is limited in a child, to which a disk is full in the middle of a piece."""
    logs.append(NAME, 0, b"a" * 900)
    program = f"""
import resource as limits
from pathlib import Path
from manyhands.cluster.logs import *
logs = Logs(Path({str(tmp_path / "logs")!r}), reserve_bytes=0)
limits.setrlimit(limits.RLIMIT_FSIZE, (1000, 1000))
heard = []
logs.listen(heard.append)
for attempt in range(2):
    try:
        logs.append(LogName{tuple(NAME)}, 900, b"b" * 200)
        print("taken")
    except DiskFull as error:
        print(error.have, len(heard))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    # What did fit is there, and said to followers; the rest is refused again.
    assert done.stdout.split("\n")[:2] == ["1000 1", "1000 1"]
    assert logs.length(NAME) == 1000
    assert logs.append(NAME, 900, b"b" * 200) == 1100
    assert logs.read(NAME, 0, 2000) == b"a" * 900 + b"b" * 200


def test_a_writer_killed_in_the_middle_is_continued_from_the_length(logs, tmp_path):
    """kill -9 of whoever appends, at any moment: the sender goes on from what the disk has."""
    text = bytes(range(256)) * 4096
    program = f"""
import sys
from pathlib import Path
from manyhands.cluster.logs import *
logs = Logs(Path({str(tmp_path / "logs")!r}), reserve_bytes=0)
text = bytes(range(256)) * 4096
have = logs.length(LogName{tuple(NAME)})
while have < len(text):
    have = logs.append(LogName{tuple(NAME)}, have, text[have:have + 1021])
    sys.stdout.write("x"); sys.stdout.flush()
"""
    for pieces in (1, 7, 50):
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
            child.stdout.read(pieces)
            child.kill()
        have = logs.length(NAME)
        assert have > 0
        assert logs.read(NAME, 0, len(text)) == text[:have]
    assert logs.append(NAME, have, text[have:]) == len(text)


def test_many_writers_take_no_descriptors_with_them(logs):
    before = len(os.listdir("/proc/self/fd"))
    start = threading.Barrier(16)

    def write(rank):
        start.wait()
        for number in range(100):
            name = LogName(number, 0, rank)
            assert logs.append(name, 0, b"x" * 10) == 10
            assert logs.read(name, 0, 99) == b"x" * 10

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_log_and_many_writers(logs):
    text = b"0123456789" * 100

    def write():
        have = 0
        while have < len(text):
            have = logs.append(NAME, have, text[have : have + 7])

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert logs.read(NAME, 0, 2000) == text


def test_a_folder_that_was_cleared_away_is_made_anew(logs, tmp_path):
    """And it is still the cluster's, whose next `up` finds its own logs there."""
    logs.claim("mine")
    logs.append(NAME, 0, b"abc")
    shutil.rmtree(tmp_path / "logs")
    assert logs.read(NAME, 0, 9) == b""
    with pytest.raises(WrongOffset):
        logs.append(NAME, 3, b"def")
    assert logs.append(NAME, 0, b"abcdef") == 6
    Logs(tmp_path / "logs").claim("mine")
    with pytest.raises(SettingsError, match="another cluster"):
        Logs(tmp_path / "logs").claim("other")


def test_a_folder_that_cannot_be_made_anew_is_an_error_with_a_name(logs, tmp_path):
    shutil.rmtree(tmp_path / "logs")
    (tmp_path / "logs").symlink_to(tmp_path / "nowhere" / "at all")
    with pytest.raises(LogError, match="cannot be used"):
        logs.append(NAME, 0, b"abc")
