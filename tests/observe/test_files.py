"""Rows in files: each step once, whatever was cut off or is done again."""

from __future__ import annotations

import csv
import json
import math

import numpy
import pytest
import torch

from manyhands.core.errors import UsageError
from manyhands.observe import Csv, JsonLines
from manyhands.observe.files import _replacing


@pytest.fixture(params=[JsonLines, Csv])
def kind(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "log.txt"


def write(kind, path, steps, loss=0.5, name="loss"):
    logger = kind(path)
    for step in steps:
        logger.log_metrics({name: loss}, step)
    logger.finalize("success")
    logger.finalize("success")


def rows(path):
    lines = path.read_text().splitlines()
    if lines[0].startswith("{"):
        return [tuple(json.loads(line).values()) for line in lines]
    return [(int(step), *map(float, rest)) for step, *rest in csv.reader(lines[1:])]


def table(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_a_line_for_every_step_at_once_there(path):
    logger = JsonLines(path)
    logger.log_metrics({"loss": 0.1, "lr": 1e-3}, 0)
    assert path.read_text() == '{"step": 0, "loss": 0.1, "lr": 0.001}\n'
    logger.log_metrics({"loss": math.nan, "lr": math.inf}, 1)
    logger.finalize("success")
    assert json.loads(path.read_text().splitlines()[1]) == {"step": 1, "loss": None, "lr": None}


def test_no_file_before_the_first_row(kind, path):
    kind(path).finalize("success")
    assert not path.exists()


def test_resumed_it_writes_over_what_is_redone(kind, path):
    write(kind, path, range(5))
    write(kind, path, range(3, 6), loss=0.7)
    assert rows(path) == [(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.7), (4, 0.7), (5, 0.7)]


def test_begun_anew_it_writes_over_everything(kind, path):
    write(kind, path, range(5))
    write(kind, path, range(2), loss=0.7)
    assert rows(path) == [(0, 0.7), (1, 0.7)]


def test_a_step_that_is_logged_again_is_there_once(kind, path):
    write(kind, path, [0, 1, 2, 1, 2])
    assert rows(path) == [(0, 0.5), (1, 0.5), (2, 0.5)]


def test_a_line_that_was_not_written_to_its_end(kind, path):
    write(kind, path, range(3))
    path.write_bytes(path.read_bytes()[:-2])
    write(kind, path, [3])
    assert [step for step, _ in rows(path)] == [0, 1, 3]


@pytest.mark.parametrize(
    "text",
    [
        *("notes\n", "[1]\n", '{"loss": 1}\n', '{"step": "2"}\n', "loss,step\n"),
        *("notes", '{"loss": 1}', '{"steps": 2}', "[", "\0\0"),  # without an end of the line
    ],
)
def test_a_file_of_something_else_is_left_alone(kind, path, text):
    path.parent.mkdir()
    path.write_text(text)
    logger = kind(path)
    for step in range(3):  # not with a later row either
        with pytest.raises(UsageError, match="line 1"):
            logger.log_metrics({}, step)
    logger.finalize("failed")
    assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        *(("step,name\n0,a\nx,b\n", 3), ("step", 1), ("step,name\n0,a\nx,b", 3)),
        *(("step,name\n\u00b2,a\n", 2), ("step,name\n\n", 2)),
    ],
)
@pytest.mark.parametrize("step", [0, 5])
def test_a_table_of_something_else_is_left_alone(path, text, line, step):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(UsageError, match=f"line {line}"):
        Csv(path).log_metrics({"loss": 1.0}, step)
    assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_lines_of_something_else_after_ours_are_left_alone(path):
    """At whatever step: what comes after it would be cut off unseen."""
    text = '{"step": 0}\n{"step": 1}\nnotes\n'
    path.parent.mkdir()
    path.write_text(text)
    for step in (0, 1, 5):
        with pytest.raises(UsageError, match="line 3"):
            JsonLines(path).log_metrics({}, step)
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["", "{", '{"st', '{"step": ', '{"step": 1', '{"step": 0, "lo'])
def test_a_first_line_that_was_not_written_to_its_end(path, text):
    path.parent.mkdir()
    path.write_text(text)
    write(JsonLines, path, [3])
    assert rows(path) == [(3, 0.5)]


def test_columns_that_come_later(path):
    logger = Csv(path)
    logger.log_metrics({"loss": 0.5}, 0)
    first = path.stat().st_ino
    logger.log_metrics({"loss": 0.25}, 1)
    assert path.stat().st_ino == first  # no new file without need
    with path.open() as reader:  # as somebody who looks on has it
        logger.log_metrics({"loss": 0.125, "val/loss": 0.75}, 2)
        assert reader.read() == "step,loss\n0,0.5\n1,0.25\n"  # not half of the new one
    logger.log_metrics({"lr": math.nan}, 3)
    logger.log_metrics({"val/loss": 1e-9}, 4)
    logger.finalize("success")
    assert table(path) == [
        ["step", "loss", "val/loss", "lr"],
        ["0", "0.5", "", ""],
        ["1", "0.25", "", ""],
        ["2", "0.125", "0.75", ""],
        ["3", "", "", "nan"],
        ["4", "", "1e-09", ""],
    ]
    assert list(path.parent.iterdir()) == [path]


def test_a_table_that_is_resumed_keeps_its_columns(path):
    write(Csv, path, range(3), name="a,b")
    write(Csv, path, [2], name="c", loss=0.7)
    assert table(path) == [
        ["step", "a,b", "c"],
        ["0", "0.5", ""],
        ["1", "0.5", ""],
        ["2", "", "0.7"],
    ]


def test_a_value_that_is_called_as_the_step_is(kind, path):
    """It would take its place, and the file would be none of a run's."""
    with pytest.raises(UsageError, match="'step'"):
        kind(path).log_metrics({"step": 1.0}, 0)
    assert not path.exists()


@pytest.mark.parametrize(
    "loss", [numpy.float32(0.5), numpy.float64(0.5), torch.tensor(0.5), torch.tensor([0.5])]
)
def test_numbers_of_others_are_numbers(kind, path, loss):
    write(kind, path, range(2), loss)
    assert rows(path) == [(0, 0.5), (1, 0.5)]


def test_what_is_no_number_is_not_written(kind, path):
    """Of a text in a table nobody knows afterwards whether it is a row."""
    logger = kind(path)
    with pytest.raises(ValueError, match="could not convert"):
        logger.log_metrics({"loss": "a\nb"}, 0)
    logger.log_metrics({"loss": 0.5}, 1)
    logger.finalize("success")
    assert rows(path) == [(1, 0.5)]


def test_hyperparameters_are_beside_it(kind, path):
    logger = kind(path)
    logger.log_hyperparams({"lr": 0.1, "betas": (0.9, 0.99), "clip": None, "never": math.inf})
    logger.finalize("success")
    (beside,) = path.parent.iterdir()
    assert beside.name == "log.hyperparams.json"
    assert json.loads(beside.read_text()) == {
        "lr": 0.1,
        "betas": "(0.9, 0.99)",
        "clip": None,
        "never": "inf",
    }


def test_two_loggers_whose_files_are_called_alike_write_hyperparams_at_once(tmp_path):
    """`log.csv` and `log.jsonl`, each in a thread of its own."""
    path = tmp_path / "log.hyperparams.json"
    with _replacing(path) as first, _replacing(path) as second:
        first.write("1")
        second.write("2")
    assert path.read_text() in "12"
    assert list(tmp_path.iterdir()) == [path]
