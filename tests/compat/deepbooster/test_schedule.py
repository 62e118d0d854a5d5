"""What trainers say of themselves, and what a foreign one may not bring about."""

from __future__ import annotations

import msgspec
import pytest

from manyhands.collectives.messages import NO_TAG, Part, SelfReport
from manyhands.collectives.ranges import Ranges
from manyhands.compat.deepbooster import TrainingBroken
from manyhands.compat.deepbooster.schedule import (
    Note,
    Standing,
    read_note,
    write_note,
    write_standing,
)


def standing(place):
    return Standing(place, lines=3, chunk="chunk", settings=b"same")


def part(place):
    report = SelfReport(0, scalars=write_standing(standing(place)))
    return Part(0, NO_TAG, 0, Ranges.of((place, place + 1)), report=report)


def test_a_note_names_all_who_take_part():
    note = read_note(write_note([part(0), part(1)], gathered=True, num_trainers=2), 2)
    assert note == Note(True, (standing(0), standing(1)), (0, 1), b"")


def test_a_member_that_is_no_trainer_of_this_training_is_left_out():
    note = read_note(write_note([part(0), part(2)], gathered=True, num_trainers=2), 2)
    assert note == Note(True, (standing(0),), (0,), b"")


@pytest.mark.parametrize(
    "note", [Note(True, (standing(2),), (), b""), Note(True, (standing(0),), (0, 2), b"")]
)
def test_a_note_about_trainers_that_there_are_not_is_refused_by_name(note):
    with pytest.raises(TrainingBroken, match="trainer 2 of 2, from 0"):
        read_note(msgspec.msgpack.encode(note), 2)
