"""The file of a run's events: it grows, and has nothing twice."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from manyhands.core.errors import UsageError
from manyhands.observe import Desk, EventLog, Happening, merge


def event(id, step=0, time_s=0.0, what="joined"):
    return Happening(id=id, step=step, time_s=time_s, peer="a#0001", what=what, text="")


def write(path, *events):
    log = EventLog(path)
    for one in events:
        log.log_event(one)
    log.finalize("success")
    log.finalize("success")


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "events.jsonl"


def test_a_line_for_each_at_once_there(path):
    log = EventLog(path)
    log.log_hyperparams({"lr": 0.1})
    log.log_metrics({"train/loss": 0.5}, 0)
    assert not path.exists()
    log.log_event(event("x"))
    assert read(path) == [asdict(event("x"))]
    log.finalize("success")


def test_none_twice_in_one_life_or_in_several(path):
    write(path, event("x"), event("y"), event("x"))
    write(path, event("y", step=9), event("z"))
    assert [line["id"] for line in read(path)] == ["x", "y", "z"]


def test_a_line_that_was_not_written_to_its_end_is_written_again(path):
    write(path, event("x"), event("y"))
    path.write_bytes(path.read_bytes()[:-3])
    write(path, event("y"), event("z"))
    assert [line["id"] for line in read(path)] == ["x", "y", "z"]


@pytest.mark.parametrize("text", ["notes\n", "[1]\n", '{"step": 1}\n', '{"step": 1, "id": 2}\n'])
def test_a_file_of_something_else_is_left_alone(path, text):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(UsageError, match="line 1"):
        EventLog(path).log_event(event("x"))
    with pytest.raises(UsageError, match="line 1"):
        merge([path])
    assert path.read_text() == text


def test_files_of_several_peers_are_one(tmp_path):
    write(tmp_path / "a", event("x", 0, 5.0), event("y", 1, 7.0))
    write(tmp_path / "b", event("z", 0, 6.0), event("y", 0, 7.5), event("w", 1, 6.5))
    with (tmp_path / "b").open("a") as file:
        file.write('{"id"')  # its peer was killed
    found = merge([tmp_path / "a", tmp_path / "b"])
    assert [(one.id, one.step) for one in found] == [("x", 0), ("z", 0), ("y", 0), ("w", 1)]


def test_a_desk_gives_events_to_those_that_take_them(path):
    rows = []
    with Desk([EventLog(path), lambda row, step: rows.append(step)]) as desk:
        desk.log_event(event("x"))
        desk.log_metrics({}, 1)
    assert [line["id"] for line in read(path)] == ["x"]
    assert rows == [1]
    assert [(count.failed, count.dropped) for count in desk.counts] == [(0, 0)] * 2
