"""What a user sees of programs that were interrupted."""

from __future__ import annotations

import pytest

from manyhands.cli.traces import Traces

FRAMES = [
    b"Traceback (most recent call last):",
    b'  File "train.py", line 23, in <module>',
    b"    loss = pipe.step(x, y)",
    b"           ^^^^^^^^^^^^^^^",
    b'  File "pipeline.py", line 170, in step',
    b"    step.run(order)",
]
FIRST = b'interrupted: File "train.py", line 23, in <module>'
PLACES = FIRST + b' ... File "pipeline.py", line 170, in step'


def shown(*lines):
    """The same, whether they come one by one or at once."""
    one_by_one, at_once = Traces(), Traces()
    seen = [shown for line in lines for shown in one_by_one.feed([line])] + one_by_one.finish()
    assert at_once.feed(lines) + at_once.finish() == seen
    return seen


def test_an_interruption_is_one_line():
    assert shown(b"epoch 1", *FRAMES, b"KeyboardInterrupt", b"bye") == [b"epoch 1", PLACES, b"bye"]


def test_with_the_rank_before_each_line():
    lines = [b"[rank12]: " + line for line in [*FRAMES, b"KeyboardInterrupt"]]
    assert shown(*lines) == [PLACES]
    assert shown(*lines[:-1], b"[rank12]: KeyError: 1") == [*lines[:-1], b"[rank12]: KeyError: 1"]


def test_where_there_is_one_place_it_is_said_once():
    assert shown(*FRAMES[:3], b"KeyboardInterrupt") == [FIRST]


def test_where_there_is_none():
    assert shown(FRAMES[0], b"KeyboardInterrupt") == [b"interrupted: KeyboardInterrupt"]


@pytest.mark.parametrize("last", [b"ValueError: KeyboardInterrupt", b"KeyError: 1", b"", b"x"])
def test_other_tracebacks_pass(last):
    assert shown(*FRAMES, last, *FRAMES, b"KeyboardInterrupt") == [*FRAMES, last, PLACES]


def test_a_traceback_that_breaks_off_is_not_lost():
    assert shown(*FRAMES) == FRAMES


def test_nothing_is_held_without_end():
    lines = [FRAMES[0], *[b"  more"] * 5000]
    traces = Traces()
    assert len(traces.feed(lines)) > 4000
    assert len(traces.finish()) < 1001
