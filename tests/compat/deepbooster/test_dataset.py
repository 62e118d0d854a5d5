"""JSONL files as data sets: what numbers become, and what is wrong with which line."""

from __future__ import annotations

import json

import pytest
import torch

from manyhands.compat.deepbooster import ChunkError, Dataset


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def sample(value, label):
    return json.dumps({"input": value, "label": label})


def test_lines_by_number(tmp_path):
    path = write(tmp_path / "c.jsonl", *(sample([[i, i + 0.5]], [i]) for i in range(4)))
    data = Dataset(str(path), torch.Tensor, True)
    assert len(data) == 4
    for i in (3, 0, -1, 2):
        x, y = data[i]
        assert torch.equal(x, torch.tensor([[i % 4, i % 4 + 0.5]]))
        assert torch.equal(y, torch.tensor([float(i % 4)]))
    with pytest.raises(IndexError):
        data[4]


@pytest.mark.parametrize("label", [0, 4, 2.5, -1, True])
def test_a_number_becomes_a_scalar_of_that_value(tmp_path, label):
    path = write(tmp_path / "c.jsonl", sample([1], label))
    _, y = Dataset(path, torch.Tensor, apply_transformer_to_label=True)[0]
    assert y.shape == ()
    assert y == torch.tensor(float(label))
    _, y = Dataset(path, torch.LongTensor, apply_transformer_to_label=True)[0]
    assert y.shape == ()
    assert y == int(label)


def test_the_label_is_left_alone_unless_asked_for(tmp_path):
    path = write(tmp_path / "c.jsonl", sample([1], 3))
    assert Dataset(path, torch.Tensor)[0][1] == 3
    assert Dataset(path)[0] == ([1], 3)
    assert Dataset(path, lambda value: ("seen", value), True)[0] == (("seen", [1]), ("seen", 3))


def test_all_broken_lines_are_named(tmp_path):
    path = write(
        tmp_path / "c.jsonl",
        sample(1, 2),
        "{",
        "",
        '{"label": 1}',
        "[1]",
        '{"input": NaN, "label": 1}',
    )
    with pytest.raises(ChunkError) as caught:
        Dataset(path)
    text = str(caught.value)
    assert f"{path}:2: not JSON" in text
    assert f"{path}:4: without input" in text
    assert f"{path}:5: not an object" in text
    assert ":1:" not in text
    assert ":3:" not in text  # a blank line is no line
    assert ":6:" not in text  # Python writes NaN


@pytest.mark.parametrize(
    "broken",
    [
        b'{"input": "\xe9t\xe9", "label": 1}',  # Latin-1
        b'{"input": 1, "label": 1, "\xff": 1}',
        b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b', "label": 1}',
        b'{"input": "\0", "label": 1}',
        b'{"input": 1, "label": [-' + b"12" * 2500 + b"]}",  # more than Python reads
        b'{"input": 1, "label": 1}\0',
        b'{"input": 1, "label": 1} {"input": 1, "label": 1}',
    ],
)
def test_what_cannot_be_read_later_shows_at_once(tmp_path, broken):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input": 1, "label": 1}\r\n' + broken + b"\n")
    with pytest.raises(ChunkError, match=r"c\.jsonl:2: not JSON") as caught:
        Dataset(path)
    assert ":1:" not in str(caught.value)  # Windows writes such a mark at the beginning


def test_many_digits_that_are_no_integer(tmp_path):
    digits = "12" * 2500
    path = write(tmp_path / "c.jsonl", sample(digits, 1), f'{{"input": 0.{digits}, "label": 2}}')
    data = Dataset(path)
    assert [data[0], data[1]] == [(digits, 1), (float(f"0.{digits}"), 2)]


def test_many_broken_lines(tmp_path):
    path = write(tmp_path / "c.jsonl", *["x"] * 50)
    with pytest.raises(ChunkError, match="and 40 more") as caught:
        Dataset(path)
    assert f"{path}:10:" in str(caught.value)
    assert f"{path}:11:" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ChunkError, match="No such file"):
        Dataset(tmp_path / "c.jsonl")


def test_no_newline_at_the_end_and_others_in_between(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\r\n" + sample(1, 2).encode() + b"\r\n\n" + sample("é", 4).encode())
    data = Dataset(path)
    assert [data[i] for i in range(len(data))] == [(1, 2), ("é", 4)]
    assert data.where(1) == f"{path}:4"


def test_a_file_that_is_replaced_does_not_mix_with_this_one(tmp_path):
    path = write(tmp_path / "c.jsonl", sample(1, 1), sample(2, 2))
    data = Dataset(path)
    write(tmp_path / "other", sample("other", "other")).replace(path)
    assert data[1] == (2, 2)


def test_a_file_that_is_overwritten_is_told(tmp_path):
    path = write(tmp_path / "c.jsonl", sample(1, 1), sample(2, 2))
    data = Dataset(path)
    write(path, "short")
    with pytest.raises(ChunkError, match=r"c\.jsonl:2: .*was the file changed"):
        data[1]
