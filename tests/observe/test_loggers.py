"""Where the rows of a run go."""

from __future__ import annotations

import io
import json
import logging
import math

import pytest

from manyhands.core.errors import UsageError
from manyhands.observe.loggers import JsonLines, Records, Terminal

END = {"epoch": 0.0, "loss": 0.25, "epoch loss": 0.5, "eval loss": 0.75}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "log.jsonl"


def write(path, rounds, loss=0.5):
    logger = JsonLines(path)
    for round_ in rounds:
        logger.log(round_, {"loss": loss})
    logger.close()
    logger.close()


def rows(path):
    return [tuple(json.loads(line).values()) for line in path.read_text().splitlines()]


def test_a_line_for_every_round_at_once_there(path):
    logger = JsonLines(path)
    logger.log(0, {"loss": 0.1, "lr": 1e-3})
    assert path.read_text() == '{"round": 0, "loss": 0.1, "lr": 0.001}\n'
    logger.log(1, {"loss": math.nan, "lr": math.inf})
    logger.close()
    assert json.loads(path.read_text().splitlines()[1]) == {"round": 1, "loss": None, "lr": None}


def test_no_file_before_the_first_row(path):
    JsonLines(path).close()
    assert not path.exists()


def test_resumed_it_writes_over_what_is_redone(path):
    write(path, range(5))
    write(path, range(3, 6), loss=0.7)
    assert rows(path) == [(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.7), (4, 0.7), (5, 0.7)]


def test_begun_anew_it_writes_over_everything(path):
    write(path, range(5))
    write(path, range(2), loss=0.7)
    assert rows(path) == [(0, 0.7), (1, 0.7)]


def test_a_round_that_is_logged_again_is_there_once(path):
    write(path, [0, 1, 2, 1, 2])
    assert rows(path) == [(0, 0.5), (1, 0.5), (2, 0.5)]


def test_a_line_that_was_not_written_to_its_end(path):
    write(path, range(3))
    path.write_bytes(path.read_bytes()[:-4])
    write(path, [3])
    assert [round_ for round_, _ in rows(path)] == [0, 1, 3]


@pytest.mark.parametrize("text", ["notes\n", "[1]\n", '{"loss": 1}\n', '{"round": "2"}\n'])
def test_a_file_of_something_else_is_left_alone(path, text):
    path.parent.mkdir()
    path.write_text(text)
    logger = JsonLines(path)
    with pytest.raises(UsageError, match="line 1"):
        logger.log(0, {})
    logger.close()
    assert path.read_text() == text


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_one_line_and_one_that_stays_for_an_epoch(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    screen = Screen()
    terminal = Terminal(screen)
    terminal.log(0, {"loss": 0.123456})
    terminal.log(1, END)
    terminal.log(2, {"loss": 0.1})
    terminal.close()
    terminal.close()
    assert screen.getvalue() == (
        "\r\x1b[Kround 0  loss 0.1235"
        "\r\x1b[Kround 1  epoch 0  loss 0.25  epoch loss\n"
        "\r\x1b[Kround 2  loss 0.1\n"
    )


def test_elsewhere_a_line_for_every_epoch():
    stream = io.StringIO()
    terminal = Terminal(stream)
    terminal.log(0, {"loss": 0.123456})
    terminal.log(1, END)
    terminal.close()
    assert stream.getvalue() == "round 1  epoch 0  loss 0.25  epoch loss 0.5  eval loss 0.75\n"


def test_records_of_pythons_logging(caplog):
    caplog.set_level(logging.DEBUG)
    logger = Records()
    logger.log(0, {"loss": 0.5})
    logger.log(1, END)
    logger.close()
    assert [(r.name, r.levelname) for r in caplog.records] == [
        ("manyhands.rounds", "DEBUG"),
        ("manyhands.rounds", "INFO"),
    ]
    assert caplog.messages[0] == "round 0  loss 0.5"
