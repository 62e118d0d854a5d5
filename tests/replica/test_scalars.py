"""Scalars: what was said of passes that do not count any more does not count either."""

from __future__ import annotations

import math

import pytest
import torch

from manyhands.collectives.messages import NO_TAG, NOTES_BYTES, Part, SelfReport
from manyhands.collectives.outcomes import Task
from manyhands.collectives.ranges import Ranges
from manyhands.core.errors import UsageError
from manyhands.replica.cap import Cap
from manyhands.replica.conductor import Turn
from manyhands.replica.gates import Gate
from manyhands.replica.gradients import Gradients, parameters_of
from manyhands.replica.replica import Replica
from manyhands.replica.scalars import Scalars

UNITS = Ranges.of((0, 2))


def mean_of(scalars: Scalars) -> float:
    """What the round comes to, if this peer is its only one."""
    part = Part(0, NO_TAG, 0, UNITS, report=scalars.report(0, SelfReport(0)))
    scalars.committed(0, scalars.note([part]), 0)
    return scalars.latest.get("loss", math.nan)


class Rounds:
    """A conductor whose rounds go on."""

    nothing = ()
    cap = Cap(None)

    def close_turn(self, turn: Turn, tensors, weight: float) -> None:
        turn.ended = True


@pytest.fixture
def scalars():
    return Scalars()


@pytest.fixture
def body(scalars):
    """One run of a loop body, for a task of that generation."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters())
    replica = Replica(
        Rounds(),
        Gradients(model, parameters_of(model, [optimizer])),
        scalars,
        Gate(),
        seed=0,
        batch=lambda round_: 4,
        num_samples=lambda turn: len(turn.ranges),
        undone={},
        loss="mean",
        balance=False,
    )
    replica.watch(model, list(model.parameters()))

    def run(generation: int, loss: float, *, backward: bool = True) -> None:
        replica.begin(Turn(0, 0, UNITS, Task(0, UNITS, generation)))
        replica.say("loss", loss)
        if backward:
            model(torch.ones(2, 3)).mean().backward()
        replica.settle()

    yield run
    replica.close()


def test_passes_of_a_round_are_one_mean(scalars, body):
    body(0, 5.0)
    body(0, 1.0)
    assert mean_of(scalars) == 3.0


def test_what_does_not_count_any_more(scalars, body):
    body(0, 5.0)
    body(1, 1.0)
    assert mean_of(scalars) == 1.0


def test_what_does_not_count_any_more_before_a_pass_without_a_backward(scalars, body):
    body(0, 5.0)
    body(1, 1.0, backward=False)
    assert math.isnan(mean_of(scalars))


def test_what_was_said_before_this_peer_was_put_out(scalars, body):
    """It comes back to the same round, with an engine that counts from 0 again."""
    body(0, 5.0)
    scalars.restart()
    body(0, 1.0)
    assert mean_of(scalars) == 1.0


def test_a_word_that_went_out_with_a_resync_goes_out_again(scalars):
    """Who has no samples reports for it before its thread has come to the end of the round."""
    notes = scalars.note([])
    scalars.begin_pass(4)
    scalars.report(4, SelfReport(0))
    scalars.give_word("stop", 1.0)
    scalars.report(5, SelfReport(0))
    scalars.committed(4, notes, 0)
    scalars.pass_by(5, notes)
    scalars.begin_pass(6)
    part = Part(6, NO_TAG, 0, UNITS, report=scalars.report(6, SelfReport(0)))
    scalars.committed(5, scalars.note([part]), 0)
    assert scalars.agreed == {"stop": (5, 1.0)}
    assert b"stop" not in scalars.report(7, SelfReport(0)).scalars


@pytest.mark.parametrize("letter", ["a", "\u00fc", "\u4e94", "\U0001f602"])
def test_as_many_as_may_be_fit_into_a_message_in_any_language(scalars, letter):
    """A message that is too long would be taken for a broken one, by every peer."""
    size = len(letter.encode())
    names = [f"{i:04}" + letter * (60 // size) for i in range(64)]
    assert len(names[0].encode()) in (63, 64)
    scalars.begin_pass(0)
    for name in names:
        scalars.say_after(name, 0.1, 0.3, closed=True)
        scalars.say_after(name, 0.1, 0.3, closed=False)
        scalars.give_word(name, 0.1)
    report = scalars.report(0, SelfReport(0))
    assert len(report.scalars) <= NOTES_BYTES
    part = Part(0, NO_TAG, 0, UNITS, report=report)
    assert len(scalars.note([part])) <= NOTES_BYTES


@pytest.mark.parametrize("name", ["", "a" * 65, "\u00fc" * 33, "\U0001f602" * 17, "\ud800"])
def test_names_that_do_not_fit(scalars, name):
    with pytest.raises(UsageError, match="UTF-8"):
        scalars.say(name, 1.0)
    with pytest.raises(UsageError, match="UTF-8"):
        scalars.give_word(name, 1.0)


class Computed:
    """A number that a device still computes: looking at it waits."""

    def __init__(self) -> None:
        self.ready = False

    def __float__(self) -> float:
        assert self.ready, "it was waited for"
        return 3.0


def test_no_number_is_waited_for_before_its_pass_has_ended():
    scalars, number = Scalars(), Computed()
    scalars.begin_pass(0)
    scalars.say("loss", number)
    scalars.say("loss", 5.0)
    number.ready = True
    scalars.end_pass(0, 2.0, [])
    assert mean_of(scalars) == 4.0
