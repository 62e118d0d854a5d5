"""Random reads of files behind URLs: what they fetch, and how many at once."""

from __future__ import annotations

import threading

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from manyhands.core.errors import DataError
from manyhands.data.access import open_access
from manyhands.data.blobs import Blob
from manyhands.data.jsonl import JsonlTable

ROWS = [b'{"id": %d, "text": "%s"}\n' % (i, b"x" * 10_000) for i in range(400)]
TEXT = b"".join(ROWS)


class FarFile(AbstractBufferedFile):
    """Its file system tells what was asked for."""

    DEFAULT_BLOCK_SIZE = 1 << 20  # more than a line by far, as with s3fs

    def _fetch_range(self, start, end):
        return self.fs.fetched(start, end)


class Far(AsyncFileSystem):
    """One file; a place that takes ranges, as buckets do."""

    protocol = "far"

    def __init__(self, **options):
        super().__init__(asynchronous=True, **options)  # no loop: it has nothing to wait for
        self.ranges, self.meeting, self.broken = [], None, False
        self.reply = lambda start, stop: TEXT[start:stop]

    def info(self, path, **_):
        return {"name": path, "type": "file", "size": len(TEXT), "ETag": "1"}

    def _open(self, path, mode="rb", **_):
        return FarFile(self, path, mode, size=len(TEXT))

    def fetched(self, start, end):
        if self.broken:
            raise ConnectionResetError
        self.ranges.append((start, end))
        if self.meeting is not None:
            self.meeting.wait()
        return self.reply(start, end)


@pytest.fixture
def far(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = Far(skip_instance_cache=True)
    monkeypatch.setattr(fsspec, "url_to_fs", lambda url, **_: (made, "lines.jsonl"))
    return made


def test_a_line_at_random_fetches_its_bytes_and_no_more(far):
    table = JsonlTable("far://lines.jsonl")
    scanned = sum(stop - start for start, stop in far.ranges)
    assert scanned <= len(TEXT) + (1 << 18)  # once, and the ends again for the fingerprint
    assert len(far.ranges) < 8  # each of them waits for an answer
    far.ranges.clear()
    wanted = [19 * i % len(ROWS) for i in range(100)]
    assert [table[index]["id"] for index in wanted] == wanted
    fetched = [stop - start for start, stop in far.ranges]
    assert fetched == [len(ROWS[index]) for index in wanted]


def test_threads_do_not_wait_for_each_other(far):
    table = JsonlTable("far://lines.jsonl")
    far.meeting = threading.Barrier(3, timeout=60)  # each read waits until all three are under way
    found = []
    threads = [threading.Thread(target=lambda i=i: found.append(table[i]["id"])) for i in (1, 5, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [1, 5, 9]


def test_a_fetch_that_fails_says_of_which_file(far):
    table = JsonlTable("far://lines.jsonl")
    far.broken = True
    with pytest.raises(DataError, match=r"far://lines.jsonl cannot be read"):
        table[3]


def test_a_reply_that_is_short_is_not_the_end(far):
    far.reply = lambda start, stop: TEXT[start : min(stop, start + 3000)]
    table = JsonlTable("far://lines.jsonl")
    assert len(table) == len(ROWS)
    assert table[7]["id"] == 7


def test_a_file_that_has_become_shorter_ends(far):
    opened = open_access(Blob.at("far://lines.jsonl"))
    far.reply = lambda start, stop: TEXT[:15_000][start:stop]
    assert opened.read(10_000, 20_000) == TEXT[10_000:15_000]


def test_a_reply_that_is_longer_than_asked_for_is_refused(far):
    table = JsonlTable("far://lines.jsonl")
    far.reply = lambda start, stop: TEXT[start : stop + 1]
    with pytest.raises(DataError, match=r"far://lines.jsonl cannot be read: \d+ bytes were asked"):
        table[3]


def test_a_folder_over_plain_files_is_read_by_one_thread_at_a_time(tmp_path, monkeypatch):
    """It says that it works by a loop of its own, and its files have a position all the same."""
    (tmp_path / "lines.jsonl").write_bytes(TEXT)
    # No loop, which would be a thread: files of this machine have nothing to wait for.
    made = DirFileSystem(str(tmp_path), LocalFileSystem(), loop=object(), skip_instance_cache=True)
    monkeypatch.setattr(fsspec, "url_to_fs", lambda url, **_: (made, "lines.jsonl"))
    blob = Blob.at("dir://lines.jsonl")
    with blob.open("rb") as opened:
        assert opened.raw.fetch is None
    assert open_access(blob).read(9_000, 12_000) == TEXT[9_000:12_000]
