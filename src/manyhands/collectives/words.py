"""Words: what an engine says to the arbiter, and how it hears that it still has its lease."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from manyhands.collectives.courier import Courier
from manyhands.collectives.errands import Errands
from manyhands.collectives.events import LeaseConfirmed
from manyhands.collectives.instructions import ConfirmLease
from manyhands.core.errors import LinkError, LinkTimeout, ManyhandsError
from manyhands.links.base import Link
from manyhands.links.messages import Gone, Leaving, Ready, Resign

_TICK_S = 0.2  # how often a wait for an answer looks whether it shall end


class Words:
    """`heard` takes a confirmed lease, `failed` what has gone wrong; `ended`: do not wait."""

    def __init__(
        self,
        link: Link,
        errands: Errands,
        courier: Courier,
        ended: Callable[[], bool],
        heard: Callable[[LeaseConfirmed], None],
        failed: Callable[[ManyhandsError], None],
    ) -> None:
        self._link, self._errands, self._courier = link, errands, courier
        self._ended, self._heard, self._failed = ended, heard, failed

    def say(self, word: Ready | Leaving | Gone | Resign) -> None:
        """Now; a last word when all that was sent before it has left."""
        if isinstance(word, Gone | Resign):
            self._errands.run(self._say_last, word)
            return
        try:
            self._link.tell(word)
        except ManyhandsError as error:
            self._failed(error)

    def when_heard(self, then: Callable[[], None]) -> None:
        """Call it when all that was sent is at the meeting point, or a lease has passed."""
        self._errands.run(self._when_heard, then)

    def confirm(self, wanted: ConfirmLease) -> None:
        """Hear `LeaseConfirmed` once a beat that is sent from now on was answered."""
        self._errands.run(self._confirm, wanted, time.monotonic())

    def _say_last(self, word: Gone | Resign) -> None:
        """After it nothing of this peer's reaches anybody, and what it has posted is owed.

        The last results of a round that it has committed may be among that.
        """
        with suppress(LinkError):  # the engine stops anyway, for the reason that it gives
            self._settle()
            self._link.tell(word)

    def _when_heard(self, then: Callable[[], None]) -> None:
        with suppress(LinkTimeout):  # whoever does not take it will be out soon
            self._settle()
        then()

    def _settle(self) -> None:
        patience_s = self._link.terms.lease_s
        self._courier.drain(patience_s)
        self._link.flush(patience_s)

    def _confirm(self, wanted: ConfirmLease, asked_s: float) -> None:
        while not self._ended():
            try:
                self._link.renew_lease(_TICK_S)
            except LinkTimeout:
                if self._link.lease_start_s() <= asked_s:
                    continue  # not answered yet; the answer to any beat since then will do
            self._heard(LeaseConfirmed(wanted.round, wanted.attempt))
            return
