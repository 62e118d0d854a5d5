"""Pursuit: who catches up, and who is told that it cannot."""

from __future__ import annotations

from collections import deque

import pytest

from manyhands.collectives.messages import NO_TAG, Sum
from manyhands.collectives.outcomes import Committed
from manyhands.collectives.pursuit import Pursuit
from manyhands.core.errors import TooSlow


class Nothing:
    """A result that nobody reads."""

    def close(self) -> None:
        pass


class Chase:
    """A newcomer with a state of round 10, and a run, at so many rounds a second."""

    def __init__(self, behind: int = 0) -> None:
        self.now_s, self.replayed, self.made = 0.0, 10.0, 10.0 + behind
        self.outcomes: deque = deque()
        self.pursuit = Pursuit(self.outcomes, 10.0, self.give_up, lambda: self.now_s)

    def give_up(self, error: TooSlow) -> None:
        assert not self.outcomes
        raise error

    def follow(self) -> None:
        """As many rounds wait as were made and not replayed."""
        self.outcomes.clear()
        for _ in range(int(self.made) - int(self.replayed)):
            self.outcomes.append(Committed(0, Nothing(), (), None, b"", False, False))

    def look(self) -> bool:
        self.follow()
        return self.pursuit.look(int(self.made))

    def lose(self) -> None:
        self.follow()
        self.pursuit.lose(int(self.made))

    def start_over(self) -> None:
        self.pursuit.heard = int(self.made)
        self.pursuit.start_over()

    def wait(self, seconds: float, *, run: float) -> None:
        """For a state that does not come in time."""
        self.now_s += seconds
        self.made += seconds * run
        self.start_over()

    def replay(self, seconds: float, *, run: float, own: float) -> bool:
        """Whether it catches up in that time. It looks after every round."""
        if self.look():
            return True
        for _ in range(int(seconds * own)):
            self.now_s += 1 / own
            self.made += run / own
            self.replayed = min(self.replayed + 1, self.made)
            if self.look():
                return True
        return False


def test_one_that_is_faster_catches_up_however_long_it_takes():
    assert Chase(behind=100).replay(1000, run=1.0, own=1.2)


def test_one_that_is_not_gives_up_and_says_why():
    chase = Chase()
    with pytest.raises(TooSlow) as caught:
        chase.replay(1000, run=8.0, own=2.0)
    assert (caught.value.run_rate, caught.value.own_rate) == pytest.approx((8.0, 2.0))
    assert "the run makes 8 rounds a second, this peer managed to replay 2," in str(caught.value)
    assert "hint: " in str(caught.value)
    assert chase.now_s == pytest.approx(20.0)


def test_it_may_warm_up():
    chase = Chase()
    assert not chase.replay(15, run=5.0, own=1.0)
    assert chase.replay(100, run=5.0, own=20.0)


def test_few_rounds_say_nothing():
    """However long they take: a lap has four, and there are two laps."""
    assert not Chase().replay(70, run=10.0, own=0.1)
    with pytest.raises(TooSlow):
        Chase().replay(80, run=10.0, own=0.1)


def test_nobody_has_caught_up_before_it_has_shown_its_speed():
    chase = Chase()
    assert not chase.look()
    assert not chase.look()
    chase.made = chase.replayed = 11
    assert chase.look()


def test_starting_over_twice_is_enough():
    """What it could keep was full before it had come nearer."""
    chase = Chase()
    chase.replay(3, run=100.0, own=1.0)
    chase.lose()
    chase.pursuit.start_over()
    assert not chase.outcomes
    chase.replay(3, run=100.0, own=1.0)
    with pytest.raises(TooSlow, match="the run makes 100 rounds a second"):
        chase.lose()


def test_one_whose_state_never_comes_in_time_gives_up_and_says_why():
    """Its link is too slow: there is a hole in what follows before the state is here."""
    chase = Chase()
    chase.start_over()  # the state that it had brought is none of this run
    chase.wait(10.0, run=3.0)
    with pytest.raises(TooSlow) as caught:
        chase.wait(10.0, run=3.0)
    assert (caught.value.run_rate, caught.value.own_rate) == pytest.approx((3.0, 0.0))
    assert "and is 30 rounds behind" in str(caught.value)
    assert "link" in str(caught.value)


def test_a_state_that_comes_later_than_others_is_no_defeat():
    chase = Chase()
    chase.start_over()
    chase.wait(10.0, run=3.0)
    assert chase.replay(100, run=3.0, own=4.0)
    for _ in range(3):  # within a lap: a network that breaks says nothing about speed
        chase.wait(3.0, run=3.0)


def test_a_hole_now_and_then_is_no_defeat_for_one_that_gains():
    chase = Chase(behind=1000)
    chase.start_over()
    for _ in range(5):
        assert not chase.replay(15, run=1.0, own=2.0)
        chase.wait(0.0, run=1.0)


def test_no_time_counts_twice():
    """It had no room for more, and then starts over for that."""
    chase = Chase()
    chase.start_over()
    chase.wait(8.0, run=100.0)
    chase.replay(3, run=100.0, own=1.0)
    chase.lose()
    chase.start_over()
    chase.wait(9.0, run=100.0)
    with pytest.raises(TooSlow, match="the run makes 100 rounds a second"):
        chase.wait(9.0, run=100.0)


@pytest.mark.parametrize("exact", [True, False])
def test_a_resync_shows_no_speed(exact):
    """It has nothing to compute: who has replayed only that may be as slow as anybody."""
    chase = Chase()
    assert not chase.look()
    heads = (Sum(10, NO_TAG, 1, (), exact=exact),)
    chase.outcomes.append(Committed(10, Nothing(), heads, None, b"", False, False))
    assert chase.pursuit.take().sums == heads
    assert not chase.outcomes
    chase.made = chase.replayed = 11.0
    assert chase.look() is not exact
    chase.made = chase.replayed = 12.0
    assert chase.look()
