"""A JSONL file, dealt into chunks."""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.errors import DataError, UsageError
from manyhands.data.chunks import check_json, deal, scan, split

from .registry.conftest import patient


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(f'{{"i": {i}}}\n' for i in range(10)))
    return path


def numbers(path):
    return [json.loads(line)["i"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("num", [1, 3, 10, 12])
def test_line_i_goes_to_chunk_i_mod_n(data, num):
    made = split(data, num)
    assert [path.name for path in made] == [f"train-{k}-of-{num}.jsonl" for k in range(num)]
    assert [numbers(path) for path in made] == [list(range(k, 10, num)) for k in range(num)]
    assert list(made.values()) == [len(range(k, 10, num)) for k in range(num)]


def test_a_second_time_gives_the_same(data):
    first = {path: path.read_bytes() for path in split(data, 3)}
    assert {path: path.read_bytes() for path in split(data, 3)} == first
    assert {path.name for path in data.parent.iterdir()} == {data.name, *(p.name for p in first)}


def test_blank_lines_and_line_ends(data):
    data.write_bytes(b'{"i": 0}\r\n\n  \n{"i": 1}\n[]\n"\xc3\xa9"\nNaN')
    one, two = split(data, 2)
    assert one.read_bytes() == b'{"i": 0}\n[]\nNaN\n'
    assert two.read_bytes() == b'{"i": 1}\n"\xc3\xa9"\n'


def test_a_broken_line_writes_nothing(data):
    chunks = split(data, 2)
    before = {path: path.read_bytes() for path in chunks}
    with data.open("ab") as file:
        file.write(b'{"i": \n\xff\n' + b"no\n" * 20)
    with pytest.raises(UsageError) as caught:
        split(data, 2)
    assert f"{data}:11: not JSON" in str(caught.value)
    assert f"{data}:12: " in str(caught.value)
    assert "and 12 more" in str(caught.value)
    assert {path: path.read_bytes() for path in chunks} == before
    assert len(list(data.parent.iterdir())) == 3  # nothing half-written lies about


def test_a_byte_order_mark_is_no_part_of_the_first_line(data):
    data.write_bytes(b'\xef\xbb\xbf{"i": 0}\n{"i": 1}\n')
    (one,) = split(data, 1)
    assert one.read_bytes() == b'{"i": 0}\n{"i": 1}\n'
    data.write_bytes(b"\xef\xbb\xbf")
    (one,) = split(data, 1)
    assert one.read_bytes() == b""


def test_of_many_broken_lines_only_the_first_are_remembered(data):
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="and 49990 more") as caught:
            list(scan(io.BytesIO(b"no\n" * 50_000), data))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert str(caught.value).count("not JSON") == 10


KILLED = """
import os, signal, sys
from pathlib import Path
from manyhands.data import chunks
os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)
chunks.split(Path(sys.argv[1]), 3)
"""


def test_what_a_killed_process_has_left_is_cleared(data):
    command = [sys.executable, "-c", KILLED, data]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert len(list(data.parent.iterdir())) == 1 + 3  # nothing has its name yet
    made = split(data, 2)
    assert {path.name for path in data.parent.iterdir()} == {data.name, *(p.name for p in made)}


def test_nobody_else_can_read_what_is_only_its_owners(data):
    data.chmod(0o600)
    seen = []

    def lines():
        drafts = [p for p in data.parent.iterdir() if p.suffix == ".draft"]
        seen.extend(stat.S_IMODE(os.stat(path).st_mode) for path in drafts)
        yield b"1\n"

    deal(lines(), [data.with_name("chunk.jsonl")], data)
    assert seen == [0o600]


def test_another_folder_and_its_rights(data, tmp_path):
    data.chmod(0o600)
    made = split(data, 2, tmp_path / "new" / "place")
    assert {path.parent for path in made} == {tmp_path / "new" / "place"}
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in made} == {0o600}


def test_what_cannot_be_split(data, tmp_path):
    with pytest.raises(UsageError, match="0 chunks"):
        split(data, 0)
    with pytest.raises(DataError, match=r"no\.jsonl cannot be split: No such file"):
        split(tmp_path / "no.jsonl", 2)
    with pytest.raises(DataError, match="cannot be split"):
        split(tmp_path, 2)
    with pytest.raises(DataError, match="cannot be split: File name too long"):
        split(tmp_path / f"{'x' * 300}.jsonl", 2)
    (tmp_path / "train-0-of-1.jsonl").symlink_to(data)
    with pytest.raises(UsageError, match="replaced by a chunk of itself"):
        split(data, 1)


def test_a_compressed_file_is_told_from_a_broken_one(data):
    packed = data.with_name("train.jsonl.gz")
    packed.write_bytes(gzip.compress(data.read_bytes()))
    with pytest.raises(UsageError, match=r"train\.jsonl\.gz is compressed") as caught:
        split(packed, 2)
    assert "gzip -dk" in caught.value.hint
    assert len(list(data.parent.iterdir())) == 2


def test_more_chunks_than_files_may_be_open(data):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, before[1]))
    try:
        with pytest.raises(DataError, match="cannot be split: Too many open files") as caught:
            split(data, 30)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "ulimit -n" in caught.value.hint
    assert list(data.parent.iterdir()) == [data]


def test_the_folder_is_looked_through_once_whatever_the_number_of_chunks(data, monkeypatch):
    looked = []
    monkeypatch.setattr(
        Path,
        "glob",
        lambda self, pattern, glob=Path.glob: looked.append(self) or glob(self, pattern),
    )
    split(data, 50)
    assert looked == [data.parent]


@patient
@given(st.binary(max_size=30))
def test_json_is_what_python_reads(text):
    try:
        json.loads(text.decode())
    except ValueError:
        good = False
    else:
        good = True
    try:
        check_json(text)
    except ValueError:
        assert not good
    else:
        assert good
