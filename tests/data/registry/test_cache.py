"""Copies of remote files: whole or not there, whoever is killed."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from manyhands.core.errors import DataError
from manyhands.data.blobs import Blob, BlobTree
from manyhands.data.cache import CachedStore
from manyhands.data.registry import dataset
from manyhands.data.stores import LocalStore, UrlStore

from .conftest import CONTENT, config


def cached(inner, copies):
    return BlobTree(CachedStore(inner, str(copies)), "", "content")


def copies_in(folder):
    """What lies under names that readers look for."""
    return [p for p in folder.rglob("*") if p.is_file() and p.parent.name != "parts"]


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def test_a_file_is_fetched_once(memory, tmp_path):
    memory.pipe_file("/content/a", b"first")
    storage = {"driver": "fsspec", "url": "memory://content"}
    storage["cache"] = {"folder": str(tmp_path / "copies")}
    blob = dataset("content#a", project=config(storage)).open()
    assert not (tmp_path / "copies").exists()  # opening fetches nothing
    assert blob.read_bytes() == b"first"
    memory.rm("/content/a")
    assert (blob.read_bytes(), blob.size) == (b"first", 5)
    assert blob.local.read_bytes() == b"first"
    assert [p.read_bytes() for p in copies_in(tmp_path / "copies")] == [b"first"]
    assert list((tmp_path / "copies" / "parts").iterdir()) == []


def test_the_users_cache_is_the_default(memory, tmp_path, monkeypatch):
    memory.pipe_file("/content/a", b"data")
    storage = {"driver": "fsspec", "url": "memory://content", "cache": True}
    assert dataset("content#a", project=config(storage)).open().read_bytes() == b"data"
    assert len(copies_in(tmp_path / "home" / ".cache" / "manyhands" / "data")) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert dataset("content#a", project=config(storage)).open().read_bytes() == b"data"
    assert len(copies_in(tmp_path / "other" / "manyhands" / "data")) == 1
    storage["cache"] = False
    assert dataset("content#a", project=config(storage)).open().local is None


def test_stores_do_not_mix(memory, tmp_path):
    for place in "ab":
        memory.pipe_file(f"/{place}/x", place.encode())
    trees = {place: cached(UrlStore(f"memory://{place}"), tmp_path / "copies") for place in "ab"}
    assert {place: tree["x"].read_bytes() for place, tree in trees.items()} == {
        "a": b"a",
        "b": b"b",
    }
    # Neither do a file, and a folder of the same name: buckets can have both.
    memory.pipe_file("/a/y", b"file")
    assert trees["a"]["y"].read_bytes() == b"file"
    memory.rm("/a/y")
    memory.pipe_file("/a/y/z", b"below")
    assert Blob(trees["a"].store, "y/z", "z").read_bytes() == b"below"


def test_a_file_that_ends_early_is_not_kept(memory, tmp_path, monkeypatch):
    memory.pipe_file("/content/a", b"all of it")
    tree = cached(UrlStore("memory://content"), tmp_path / "copies")

    class Short(io.BytesIO):
        size = 9

    monkeypatch.setattr(type(memory), "open", lambda *_, **__: Short(b"all"))
    with pytest.raises(DataError, match="a ended after 3 of 9 bytes"):
        tree["a"].read_bytes()
    assert copies_in(tmp_path / "copies") == []
    assert list((tmp_path / "copies" / "parts").iterdir()) == []


def test_a_cache_that_cannot_be_written(memory, tmp_path):
    memory.pipe_file("/content/a", b"data")
    (tmp_path / "copies").write_bytes(b"a file, where a folder should be")
    tree = cached(UrlStore("memory://content"), tmp_path / "copies")
    with pytest.raises(DataError, match=r"content/a cannot be copied to .*/copies"):
        tree["a"].read_bytes()


def start(code, *words):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, words)])


READ_ONE = """
import sys
from manyhands.data.cache import CachedStore
from manyhands.data.stores import LocalStore
class Piped(LocalStore):  # itself, it reads no pipes
    def open(self, key):
        return open(self.place(key), "rb")
with CachedStore(Piped(sys.argv[1]), sys.argv[2]).open("slow") as file:
    assert file.read() == b"x" * (1 << 24)
"""


def test_killed_in_the_middle_of_a_file(tmp_path):
    """The file is a pipe, of which we hold the other end: it is half read when we kill."""
    source, copies = tmp_path / "source", tmp_path / "copies"
    source.mkdir()
    os.mkfifo(source / "slow")
    process = start(READ_ONE, source, copies)
    with open(source / "slow", "wb", buffering=0) as pipe:
        sent = 0
        while sent < 1 << 23:  # what a pipe holds is less: most has been read
            sent += pipe.write(b"x" * (1 << 16))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    (part,) = (copies / "parts").iterdir()
    assert copies_in(copies) == []
    (source / "slow").unlink()
    (source / "slow").write_bytes(b"x" * (1 << 24))
    assert start(READ_ONE, source, copies).wait() == 0
    assert len(copies_in(copies)) == 1
    assert not part.exists()  # swept by the next one who writes


READ_ALL = """
import sys
from manyhands.data.blobs import BlobTree
from manyhands.data.cache import CachedStore
from manyhands.data.stores import LocalStore
tree = BlobTree(CachedStore(LocalStore(sys.argv[1]), sys.argv[2]), "", "content")
for blob in tree.walk():
    print(blob.name, flush=True)
    blob.read_bytes()
"""


def test_killed_at_any_moment_by_any_number(tmp_path):
    """Two readers of one cache, one killed over and over: all copies are whole at any time."""
    source, copies = tmp_path / "source", tmp_path / "copies"
    source.mkdir()
    chance = random.Random(5)
    content = {f"f{n:03}": chance.randbytes(1 << chance.randrange(22)) for n in range(60)}
    for name, data in content.items():
        (source / name).write_bytes(data)
    tree = cached(LocalStore(str(source)), copies)
    whole = {tree.store._copy(name): data for name, data in content.items()}
    for killed_after in (1, 25, 50):
        with subprocess.Popen(
            [sys.executable, "-c", READ_ALL, str(source), str(copies)], stdout=subprocess.PIPE
        ) as process:
            for _ in range(killed_after):
                process.stdout.readline()
            process.kill()
        for path in copies_in(copies):
            assert path.read_bytes() == whole[path]
    others = [start(READ_ALL, source, copies) for _ in range(2)]
    assert [process.wait() for process in others] == [0, 0]
    assert {path: path.read_bytes() for path in copies_in(copies)} == whole
    assert {blob.name: blob.read_bytes() for blob in tree.walk()} == content
    assert list(Path(copies, "parts").iterdir()) == []


def test_a_part_of_a_writer_at_work_is_left_alone(memory, tmp_path):
    """A second reader writes its own while the first is in the middle of its."""
    for name in CONTENT:
        memory.pipe_file(f"/content/{name}", CONTENT[name])
    source, copies = tmp_path / "source", tmp_path / "copies"
    source.mkdir()
    os.mkfifo(source / "slow")
    process = start(READ_ONE, source, copies)
    with open(source / "slow", "wb", buffering=0) as pipe:
        pipe.write(b"x" * (1 << 18))  # more than a pipe holds: it is at work
        tree = cached(UrlStore("memory://content"), copies)
        assert {blob.name: blob.read_bytes() for blob in tree.walk()} == CONTENT
        assert len(list((copies / "parts").iterdir())) == 1
        for _ in range((1 << 24) - (1 << 18) >> 16):
            pipe.write(b"x" * (1 << 16))
    assert process.wait() == 0
