"""Saves that break off: killed with -9, a full disk, no rights, several at once."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from manyhands.checkpoint.folder import open_folder
from manyhands.checkpoint.store import Store
from manyhands.core.errors import CheckpointError
from tests.checkpoint.kit import checkpoint_of, rounds, same

NOBODY = 65534


@contextmanager
def saver(folder, round, moment, *prefix):
    """A process that saves and stands still at this moment."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "tests.checkpoint.saver", folder, str(round), moment],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def files(folder):
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("moment", ["values", "data", "manifest", "rename"])
def test_killed_in_the_middle_of_a_save(moment, tmp_path):
    """The one before is found, the half one named, and removed by the next save, not before."""
    store = Store(tmp_path, keep=2)
    store.save(checkpoint_of(1))
    before = files(tmp_path)
    with saver(tmp_path, 2, moment) as process:
        assert process.stdout.readline() == "here\n"
        # At work: a save of another process leaves it alone.
        store.save(checkpoint_of(1))
        before, during = [name for name in files(tmp_path) if "0001-" in name], files(tmp_path)
        assert [p.round for p in store.places() if not p.complete] == [2]
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert files(tmp_path) == during
    found = store.load()
    assert same(found.checkpoint, checkpoint_of(1))
    assert [broken.reason for broken in found.broken] == [
        "it has no manifest: saving broke off, or is under way"
    ]
    store.save(checkpoint_of(3))
    left = set(files(tmp_path)) - set(before)
    assert len(left) == 2
    assert all("-000000000003-" in name for name in left)
    assert rounds(store) == [1, 3]


def test_killed_after_the_rename(tmp_path):
    """From there on it counts."""
    store = Store(tmp_path, keep=2)
    with saver(tmp_path, 2, "folder") as process:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = store.load()
    assert same(found.checkpoint, checkpoint_of(2))
    assert found.broken == []


def test_one_that_is_at_work_gets_done_whatever_others_save(tmp_path):
    """Also if what it saves is older than all that are kept by now."""
    store = Store(tmp_path, keep=2)
    with saver(tmp_path, 2, "values") as process:
        assert process.stdout.readline() == "here\n"
        for round in (2, 3, 4):
            store.save(checkpoint_of(round))
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "saved\n"
        process.wait()
    assert rounds(store) == [2, 3, 4]  # it leaves its own; the next save removes it
    assert same(store.load(2).checkpoint, checkpoint_of(2))
    store.save(checkpoint_of(5))
    assert rounds(store) == [4, 5]


def test_one_that_gets_done_between_the_listing_and_the_clearing_stays(tmp_path):
    folder = open_folder(tmp_path)
    for manifest in ("done", "other"):
        with folder.draft(f"draft of {manifest}") as file:
            file.write(b"values")
    folder.put("done", b"{}")
    folder.clear("draft of done", "done")
    folder.clear("draft of other", "other")
    folder.clear("draft of nobody", "nobody")
    assert files(tmp_path) == ["done", "draft of done"]


def test_many_that_save_the_same_rounds_at_once(tmp_path):
    """At every moment the newest that was saved can be loaded."""

    def work():
        store = Store(tmp_path, keep=1)
        for round in range(12):
            store.save(checkpoint_of(round))
            found = store.load()
            assert found.checkpoint.round >= round
            assert same(found.checkpoint, checkpoint_of(found.checkpoint.round))

    with ThreadPoolExecutor() as pool:
        for worker in [pool.submit(work) for _ in range(4)]:
            worker.result()
    store = Store(tmp_path, keep=1)
    store.save(checkpoint_of(12))
    assert len(files(tmp_path)) == 2


@contextmanager
def files_up_to(size):
    """The kernel refuses to make a file larger, in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LARGE = [torch.zeros(1 << 20), torch.ones(1 << 20)]


@pytest.mark.parametrize("tree", [LARGE, "x" * (6 << 20)], ids=["tensors", "manifest"])
def test_a_file_that_may_not_grow(tree, tmp_path):
    store = Store(tmp_path, keep=1)
    store.save(checkpoint_of(1))
    before = files(tmp_path)
    with files_up_to(5 << 20), pytest.raises(CheckpointError, match="File too large\nhint:"):
        store.save(checkpoint_of(2, tree=tree))
    assert files(tmp_path) == before
    assert same(store.load().checkpoint, checkpoint_of(1))


def small_disk():
    """A command that runs another one with a disk of 1 MB at DISK, if that can be had here."""
    mount = ["sh", "-c", 'mount -t tmpfs -o size=1m none "$DISK" && exec "$@"', "sh"]
    if os.geteuid() != 0:
        return ["unshare", "--user", "--map-root-user", "--mount", *mount]
    return ["unshare", "--mount", *mount]


def can_mount(folder):
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        [*small_disk(), "true"], env=os.environ | {"DISK": str(folder)}, stderr=subprocess.DEVNULL
    )
    return tried.returncode == 0


FULL_DISK = """
import os, sys, torch
from pathlib import Path
from manyhands.checkpoint.store import Store
from manyhands.core.errors import CheckpointError
from tests.checkpoint.kit import checkpoint_of, same

disk = Path(os.environ["DISK"])
store = Store(disk / "checkpoints", keep=1)
store.save(checkpoint_of(1))
before = sorted(disk.rglob("*"))
for tree in ([torch.zeros(1 << 20)], "x" * (2 << 20)):
    try:
        store.save(checkpoint_of(2, tree=tree))
    except CheckpointError as error:
        print(error.message.rpartition(": ")[2], "/", error.hint)
    assert sorted(disk.rglob("*")) == before
assert same(store.load().checkpoint, checkpoint_of(1))
store.save(checkpoint_of(3))
assert same(store.load().checkpoint, checkpoint_of(3))
print("went on")
"""


def test_a_disk_that_is_full(tmp_path):
    if not can_mount(tmp_path):
        pytest.skip("needs the right to mount a small disk")
    ran = subprocess.run(
        [*small_disk(), sys.executable, "-c", FULL_DISK],
        env=os.environ | {"DISK": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    full = "No space left on device / make room there: it takes one checkpoint more than are kept"
    assert ran.stdout.splitlines() == [full, full, "went on"]


@pytest.fixture
def no_rights():
    """A folder with a checkpoint that this process may read but not write to."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # all folders above it are open to all
        Store(folder).save(checkpoint_of(1))
        Path(folder).chmod(0o555)
        if os.geteuid() == 0:
            os.seteuid(NOBODY)
        yield folder
        os.seteuid(os.getuid())
        Path(folder).chmod(0o700)


def test_a_folder_without_rights(no_rights):
    store = Store(no_rights)
    with pytest.raises(CheckpointError, match="cannot be written: Permission denied\nhint:"):
        store.save(checkpoint_of(2))
    assert same(store.load().checkpoint, checkpoint_of(1))


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(CheckpointError, match="Not a directory\nhint: name a folder"):
            Store(place).save(checkpoint_of(1))
    assert (tmp_path / "file").read_text() == "mine"


def test_interrupted_in_the_middle_of_a_save(tmp_path, monkeypatch):
    """Ctrl-C leaves nothing half-written either."""
    store = Store(tmp_path)
    store.save(checkpoint_of(1))
    before = files(tmp_path)

    def interrupt(file):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(checkpoint_of(2))
    assert files(tmp_path) == before


def test_removed_while_it_is_written(tmp_path, monkeypatch):
    store, sync = Store(tmp_path), os.fsync

    def remove_all(file):
        for path in tmp_path.iterdir():
            Path(path).unlink()
        sync(file)

    monkeypatch.setattr(os, "fsync", remove_all)
    with pytest.raises(CheckpointError, match="was removed while it was being written"):
        store.save(checkpoint_of(1))
    assert store.load() == (None, None, [])
