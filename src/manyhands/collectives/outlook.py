"""Outlook: what a peer sees of the others while it waits, besides what the engine tells it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from manyhands.collectives.machine import RoundMachine
from manyhands.collectives.outcomes import Outcome, Stopped
from manyhands.collectives.shelf import Shelf
from manyhands.core.errors import LinkTimeout, ManyhandsError
from manyhands.core.peers import PeerState, View
from manyhands.links.base import DEFAULT_TIMEOUT_S


class Outlook:
    """Of one engine, which notifies `news` of views and outcomes, and tells of contributions.

    Thread-safe; one thread waits for news.
    """

    def __init__(
        self,
        news: threading.Condition,
        machine: RoundMachine,
        shelf: Shelf,
        outcomes: Sequence[Outcome],
    ) -> None:
        """`outcomes`: those that wait to be taken."""
        self._news, self._machine, self._shelf, self._outcomes = news, machine, shelf, outcomes
        self.first: View | None = None
        """The view with which this peer came."""
        self._wanted = False  # somebody waits for contributions, too

    def wait_for_view(
        self, enough: Callable[[View], bool], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> View:
        """The first view from now on that is. Raises LinkTimeout, or what ended the engine."""

        def seen() -> View | None:
            view = self._machine.view
            return view if view is not None and enough(view) else None

        with self._news:
            self._news.wait_for(lambda: seen() or isinstance(self._outcome(), Stopped), timeout_s)
            if (view := seen()) is not None:
                return view
            if isinstance(last := self._outcome(), Stopped):
                raise last.error or ManyhandsError(last.text)
        raise LinkTimeout("view that was waited for", timeout_s)

    def wait_for_news(self, timeout_s: float) -> bool:
        """Until a view, a contribution or a question for the state has come, or an outcome; whether
        there is one to take.
        """
        with self._news:
            if self._outcome() is None:
                self._wanted = True
                self._news.wait(timeout_s)
                self._wanted = False
            return self._outcome() is not None

    def heard(self) -> None:
        """A contribution has come, or a newcomer asks for the state; the engine holds its lock.
        Whoever waits for the round to be over is not woken for it.
        """
        if self._wanted:
            self._news.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether the engine has ended, with nothing before that left to take."""
        with self._news:
            return isinstance(self._outcome(), Stopped)

    def _outcome(self) -> Outcome | None:
        return self._outcomes[0] if self._outcomes else None

    @property
    def is_first(self) -> bool:
        """Whether nobody has a state, and this peer is the first that a run could start from."""
        with self._news:
            states = self._machine.states
            watching = all(state is PeerState.WATCHING for state in states.values())
            return watching and next(iter(states), None) == self._machine.me

    @property
    def is_stranded(self) -> bool:
        """Whether that peer has none either: it waits for one that is gone."""
        with self._news:
            return self.is_first and not self._machine.based

    @property
    def must_start(self) -> bool:
        """Whether others wait for this peer to start."""
        with self._news:
            return len(self._machine.states) > 1 and self.is_first

    @property
    def num_following(self) -> int:
        """Who is active, and newcomers that have asked for the state since theirs was of no use:
        this peer's next commit gives it to them. Who asks for the first time (0) may be about to
        offer one that the run confirms.
        """
        with self._news:
            states = self._machine.states
            active = sum(state is PeerState.ACTIVE for state in states.values())
            asking = (peer for peer, number in self._machine.asks.items() if number > 0)
            return active + sum(states.get(peer) is PeerState.WATCHING for peer in asking)

    @property
    def owns(self) -> bool:
        """Whether this peer adds up a part of the round under way, and so sees who gives to it."""
        with self._news:
            machine = self._machine
            if not machine.member:
                return False
            return machine.members.index(machine.me) < machine.course.num_parts

    @property
    def given(self) -> bool:
        """Whether somebody who does not leave has contributed to the attempt under way."""
        with self._news:
            machine = self._machine
            return any(
                (key.round, key.attempt) == (machine.applied, machine.tag)
                and key.sender != machine.me
                and machine.states.get(key.sender) is PeerState.ACTIVE
                for key in self._shelf.parts
            )
