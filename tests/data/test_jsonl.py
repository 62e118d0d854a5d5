"""JSONL by line number: what is a sample, where it is, and that a worker reads the same file."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import pickle
import random
import threading

import pytest
import torch
from torch.utils.data import DataLoader

from manyhands.core.errors import UsageError
from manyhands.data.jsonl import JsonlTable
from manyhands.data.table import BadSample
from tests.data.kit import Blob, bad, notes, put_rows


def written(tmp_path, data: bytes | str, name: str = "rows.jsonl"):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_lines_by_number(tmp_path):
    dice = random.Random(4)
    rows = [{"id": i, "text": "ä\u2028" * dice.randrange(50), "x": [i / 7]} for i in range(1000)]
    path = written(tmp_path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    table = JsonlTable(path)
    assert len(table) == 1000
    for i in dice.sample(range(1000), 300):
        assert table[i] == rows[i]
        assert table.where(i) == f"{path}:{i + 1}"
    assert table[-1] == rows[-1]
    assert list(table) == rows
    for none in (1000, -1001):
        with pytest.raises(IndexError):
            table[none]


@pytest.mark.parametrize(
    ("data", "values", "lines"),
    [
        (b'1\n2\n"last"', [1, 2, "last"], [1, 2, 3]),  # no new line at the end
        (b"1\r\n2\r\n", [1, 2], [1, 2]),
        (b"\n\n1\n \t\r\n2\n\n\n3\n\n", [1, 2, 3], [3, 5, 8]),  # blank ones
        (b"\xef\xbb\xbf1\n2\n", [1, 2], [1, 2]),  # a byte-order mark
        (b"\xef\xbb\xbf\n1", [1], [2]),
        (b"[NaN, -Infinity]\n", None, [1]),
        (b"  {} \n", [{}], [1]),
        (b"123456789012345678901234567890\n", [123456789012345678901234567890], [1]),
    ],
)
def test_odd_files(tmp_path, data, values, lines):
    path = written(tmp_path, data)
    table = JsonlTable(path)
    assert len(table) == len(lines)
    if values is not None:
        assert [table[i] for i in range(len(table))] == values
        assert list(table) == values
    assert [table.where(i) for i in range(len(table))] == [f"{path}:{n}" for n in lines]


def test_an_empty_file_has_no_samples(tmp_path):
    for data in (b"", b"\n \n", b"\xef\xbb\xbf"):
        assert len(JsonlTable(written(tmp_path, data))) == 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1', "not JSON"),
        (b"1 2", "not JSON"),
        (b"what?", "not JSON"),
        (b'"\xff\xfe"', "not UTF-8"),
        (b"[" * 200_000, "not JSON"),
        (b"9" * 100_000, "not JSON"),
    ],
)
def test_a_broken_line_is_named_and_the_others_are_read(tmp_path, line, reason):
    path = written(tmp_path, b"1\n\n" + line + b"\n3\n")
    table = JsonlTable(path)
    assert (table[0], table[2]) == (1, 3)
    for _ in range(2):
        error = bad(lambda: table[1])
        assert error.where == f"{path}:3"
        assert reason in error.reason
    rows = iter(table)
    assert next(rows) == 1
    with pytest.raises(BadSample, match=reason):
        next(rows)
    assert list(rows) == [3]


def test_a_transform_that_fails_says_for_which_sample(tmp_path):
    path = written(tmp_path, '{"x": 1}\n{"y": 1}\n')
    table = JsonlTable(path, transform=lambda row: row["x"])
    assert table[0] == 1
    assert notes(lambda: table[1], KeyError) == [f"for the sample {path}:2"]


def test_a_transform_may_find_a_sample_bad(tmp_path):
    def check(row):
        if "x" not in row:
            raise BadSample("rows", "without x")
        return row

    with pytest.raises(BadSample, match="without x"):
        JsonlTable(written(tmp_path, "{}\n"), transform=check)[0]


def test_bad_samples_travel():
    error = pickle.loads(pickle.dumps(BadSample("file:3", "not JSON")))
    assert (error.where, error.reason, str(error)) == ("file:3", "not JSON", "file:3: not JSON")


def test_compressed_files_are_read_from_the_beginning_only(tmp_path):
    path = written(tmp_path, gzip.compress(b"\xef\xbb\xbf1\n\nwhat\n3"), "rows.jsonl.gz")
    table = JsonlTable(path)
    for use in (lambda: table[0], lambda: len(table), lambda: table.where(0)):
        with pytest.raises(UsageError, match=r"from its beginning only.*\n.*gzip -dk"):
            use()
    rows = iter(table)
    assert next(rows) == 1
    with pytest.raises(BadSample, match=r"rows.jsonl.gz:3: not JSON"):
        next(rows)
    assert list(rows) == [3]
    assert not list(tmp_path.glob("*.mhindex"))


def test_a_compressed_file_that_is_cut_off(tmp_path):
    rows = b"".join(b"%d\n" % i for i in range(100_000))
    path = written(tmp_path, gzip.compress(rows)[:50_000], "rows.jsonl.gz")
    got = iter(JsonlTable(path))
    with pytest.raises(UsageError, match="cannot be unpacked after line"):
        list(got)
    assert list(got) == []


def test_a_run_says_why_it_cannot_use_one(tmp_path):
    from manyhands.data.source import Source

    table = JsonlTable(written(tmp_path, gzip.compress(b"1\n"), "rows.jsonl.gz"))
    with pytest.raises(UsageError, match="from its beginning only"):
        Source.of(table, 4)


def test_other_encodings_are_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match="is UTF-16"):
        JsonlTable(written(tmp_path, '{"a": 1}\n'.encode("utf-16")))


@pytest.mark.parametrize("source", ["nowhere.jsonl", ".", 7])
def test_what_is_no_file(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="hint: give"):
        JsonlTable(source)


def test_many_threads(tmp_path):
    rows = [{"i": i, "pad": "x" * (i % 97)} for i in range(3000)]
    path = written(tmp_path, "".join(json.dumps(r) + "\n" for r in rows))
    for table in (JsonlTable(path), JsonlTable(Blob(path.read_bytes()))):
        wrong: list[int] = []

        def read(seed: int, table=table, wrong=wrong) -> None:
            dice = random.Random(seed)
            wrong.extend(i for i in dice.choices(range(3000), k=2000) if table[i] != rows[i])

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_blobs_that_are_elsewhere(tmp_path, cache):
    blob = Blob(b"1\n\n2\nwhat")
    table = JsonlTable(blob)
    assert [table[0], table[1], len(table)] == [1, 2, 3]
    with pytest.raises(BadSample, match=r"memory://rows.jsonl:4: not JSON"):
        table[2]
    assert len(list(cache.rglob("*.mhindex"))) == 1
    assert blob.opened == 1
    assert list(JsonlTable(Blob(b"7\n"))) == [7]  # of the same place, but changed


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["path", "blob"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_worker_processes(tmp_path, method, kind):
    data = b"".join(b'{"i": %d}\n' % i for i in range(500))
    table = JsonlTable(written(tmp_path, data) if kind == "path" else Blob(data))
    assert table[3] == {"i": 3}
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    child = context.Process(target=put_rows, args=(table, [7, 499, 0], results))
    child.start()
    assert results.get() == [{"i": 7}, {"i": 499}, {"i": 0}]
    child.join()
    child.close()
    results.close()
    assert table[4] == {"i": 4}  # nobody moved its place


def test_with_torchs_own_loader(tmp_path):
    path = written(tmp_path, "".join(f'{{"x": [{i}.0, 1.0], "y": {i}}}\n' for i in range(10)))
    table = JsonlTable(path, transform=_tensors)
    batches = list(DataLoader(table, 4, shuffle=False))
    assert [batch[1].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def _tensors(row):
    return torch.tensor(row["x"]), row["y"]


def test_a_file_that_is_replaced_does_not_mix_with_the_one_that_was_opened(tmp_path):
    path = written(tmp_path, "1\n2\n3\n")
    table = JsonlTable(path)
    packed = pickle.dumps(table)
    other = written(tmp_path, "40\n50\n60\n", "other.jsonl")
    os.replace(other, path)
    assert [table[i] for i in range(3)] == [1, 2, 3]
    with pytest.raises(UsageError, match="has changed since"):
        len(pickle.loads(packed))
    assert list(JsonlTable(path)) == [40, 50, 60]


def test_a_file_that_grows_is_what_it_was(tmp_path):
    path = written(tmp_path, "1\n2\n")
    table = JsonlTable(path)
    with path.open("ab") as file:
        file.write(b"3\n")
    assert list(table) == [1, 2]
    assert [table[i] for i in range(len(table))] == [1, 2]
    assert len(JsonlTable(path)) == 3


def test_a_file_that_shrinks_is_a_bad_sample(tmp_path):
    path = written(tmp_path, "1\n2\n33333\n")
    table = JsonlTable(path)
    os.truncate(path, 5)
    assert table[1] == 2
    with pytest.raises(BadSample, match="shorter"):
        table[2]
