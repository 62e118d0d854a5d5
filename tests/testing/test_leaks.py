"""Each kind of leak is found, and what winds down by itself is not one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import psutil
import pytest

from manyhands.testing.leaks import no_leaks

SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]


@contextmanager
def reported(pattern, **arguments):
    """The block must leave something that no_leaks reports in these words."""
    with (
        pytest.raises(AssertionError, match=pattern),
        no_leaks(patience_s=0.1, **arguments),
    ):
        yield


def until_it_sleeps(pid):
    deadline = time.monotonic() + 30
    while psutil.Process(pid).status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_is_not_a_leak(tmp_path):
    with no_leaks(tmp=tmp_path):
        subprocess.run([sys.executable, "-c", ""], check=True)
        with socket.socket(), (tmp_path / "a").open("w"):
            pass
        (tmp_path / "a").unlink()


def test_child_process():
    child = None
    try:
        with reported(r"process \d+ \(sleeping\): .*time\.sleep\(60\)"):
            child = subprocess.Popen(SLEEP, stdout=subprocess.PIPE)
            child.stdout.readline()
            until_it_sleeps(child.pid)
    finally:
        child.kill()
        child.communicate()


def test_unreaped_child_process():
    child = None
    try:
        with reported(r"process \d+ \(zombie\)"):
            child = subprocess.Popen([sys.executable, "-c", ""])
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its end, but not its reaping
    finally:
        child.wait()


def test_detached_process(tmp_path):
    options = "start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    script = f"import subprocess; print(subprocess.Popen({SLEEP!r}, {options}).pid)"
    pid = None
    try:
        with reported(r"process \d+ .*time\.sleep\(60\)", tmp=tmp_path):
            # Its parent ends at once, so it is no child of ours any more.
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", script],
                env=os.environ | {"TMPDIR": str(tmp_path)},
                capture_output=True,
                check=True,
            )
            pid = int(done.stdout)
    finally:
        os.kill(pid, 9)


def test_expected_process():
    child = None
    try:
        with no_leaks(patience_s=0.1, expected=lambda: {child.pid}):
            child = subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("daemon", [False, True])
def test_thread(daemon):
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="lingerer", daemon=daemon)
    with reported(r"thread 'lingerer' \(daemon\)" if daemon else "thread 'lingerer'"):
        thread.start()
    end.set()
    thread.join()


def test_socket():
    opened = socket.socket()
    try:
        with reported(r"open descriptor \d+ -> socket:.*LISTEN.*127\.0\.0\.1"):
            opened.close()
            opened = socket.create_server(("127.0.0.1", 0))
    finally:
        opened.close()


def test_open_file(tmp_path):
    opened = None
    try:
        with reported(r"open descriptor \d+ -> .*left\.txt"):
            opened = (tmp_path / "left.txt").open("w")
    finally:
        opened.close()


def test_temporary_file(tmp_path):
    with reported(r"file .*left\.txt", tmp=tmp_path):
        (tmp_path / "left.txt").touch()


def test_what_winds_down_in_time_is_no_leak():
    with no_leaks():
        threading.Timer(0.3, lambda: None).start()


def test_an_exception_of_the_block_is_not_hidden():
    opened = []

    def leave_and_fail():
        opened.append(socket.socket())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), no_leaks(patience_s=0.1):
        leave_and_fail()
    opened.pop().close()


def test_the_fixture_applies_to_every_test(tmp_path):
    """A leaking test fails under our conftest, a tidy one does not."""
    conftest = os.path.join(os.path.dirname(__file__), "..", "conftest.py")
    text, usual = open_text(conftest), "expected=expected)"
    assert usual in text
    quick = text.replace(usual, "expected=expected, patience_s=0.5)")  # a leak stays anyway
    (tmp_path / "conftest.py").write_text(quick)
    (tmp_path / "test_it.py").write_text(
        "import socket, tempfile\n"
        "kept = []\n"
        "def test_socket(): kept.append(socket.socket())\n"
        "def test_file(): tempfile.mkstemp()\n"
        "def test_tidy(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=."]
    command.append(f"--basetemp={tmp_path / 'inner'}")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "3 passed, 2 errors" in done.stdout, done.stdout + done.stderr


def open_text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()
