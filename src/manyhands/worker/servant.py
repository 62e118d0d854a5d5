"""Servant: a worker's life at the boss's hub, from its offer to its dismissal."""

from __future__ import annotations

import logging
import traceback as tracebacks
from collections.abc import Callable

from manyhands.core.errors import (
    LinkError,
    LinkTimeout,
    Malformed,
    ManyhandsError,
    Refused,
    UsageError,
)
from manyhands.core.peers import PeerId, View
from manyhands.links.base import Delivery, Link
from manyhands.links.messages import Ready
from manyhands.stages import commands as words
from manyhands.stages.errors import PlanBroken, StepFailed
from manyhands.stages.recipes import NotAllowed
from manyhands.worker.workshop import COLLECTIVE, Workshop

log = logging.getLogger(__name__)
_TRACEBACK_CHARS = 20_000  # of its end
_MESSAGE_CHARS = 4_000


class BossGone(ManyhandsError):
    """The boss's process has ended without a word, or cannot be reached any more."""


class Servant:
    """`serve` returns when the boss has finished."""

    def __init__(
        self,
        link: Link,
        workshop: Workshop,
        offer: words.Offer,
        tell: Callable[[str], None],
    ) -> None:
        self._link, self._workshop, self._offer, self._tell = link, workshop, offer, tell
        self._boss: PeerId | None = None

    def serve(self) -> None:
        """Raises Refused if the boss does not want this worker, BossGone, LinkError."""
        self._link.tell(Ready())
        while True:
            try:
                event = self._link.receive()
            except LinkTimeout:
                continue  # a boss may think for long; while it lives the hub answers beats
            match event:
                case View():
                    self._see(event)
                case Delivery() if event.sender == self._boss:
                    if not self._obey(event):
                        return
                case _:
                    pass

    def _see(self, view: View) -> None:
        boss = next((peer for peer in view.peers() if peer.name == words.BOSS), None)
        if self._boss is not None and boss != self._boss:
            raise BossGone("the boss is gone", hint="start it again, then this worker")
        if boss is not None and self._boss is None:
            self._boss = boss
            words.say(self._link, boss, self._offer)
            self._tell("offered")

    def _obey(self, delivery: Delivery) -> bool:
        """Whether there may be more to do."""
        assert self._boss is not None
        try:
            word = words.heard_by_worker(delivery)
        except Malformed as error:
            log.error("not understood: %s", error)  # without a number nobody waits for an answer
            return True
        match word:
            case words.Dismiss():
                return False
            case words.Refuse():
                raise Refused("boss", f"the boss does not take this worker: {word.reason}")
            case _:
                words.say(self._link, self._boss, self._answer(word))
                return True

    def _answer(self, command: words.Command) -> words.Answer:
        try:
            return self._workshop.do(command)
        except Exception as error:  # noqa: BLE001  (the boss raises it; this worker lives on)
            return self._failed(command, error)

    def _failed(self, command: words.Command, error: Exception) -> words.Failed:
        together = isinstance(command, COLLECTIVE)
        if isinstance(error, PlanBroken) and (cause := _own(error)) is not None:
            error = cause
        text = "".join(tracebacks.format_exception(error))[-_TRACEBACK_CHARS:]
        hint = error.hint if isinstance(error, ManyhandsError) else None
        message = error.message if isinstance(error, ManyhandsError) else f"{_name(error)}: {error}"
        what = type(command).__name__
        kind = "error"
        if isinstance(error, NotAllowed):
            kind = "refused"
            log.error("refused: %s", error)
        elif isinstance(error, PlanBroken):
            kind = "broken"
            log.error("the plan is over: %s", error.message)
        elif together and isinstance(error, StepFailed | UsageError):
            kind = "shared"
            log.error("%s: %s", what, error)
        else:
            log.error("%s failed, as the boss is told:\n%s", what, text)
        # What is left of a plan, when one of its peers fails in the middle, is to wait for it.
        ended = kind == "broken" or (together and kind == "error")
        if ended:
            self._workshop.close()
        return words.Failed(command.id, kind, message[:_MESSAGE_CHARS], hint, text, ended)


def _own(broken: PlanBroken) -> Exception | None:
    """What this worker raised in the middle of something, if that has broken the plan."""
    cause = broken.__cause__
    return None if isinstance(cause, LinkError) or not isinstance(cause, Exception) else cause


def _name(error: Exception) -> str:
    return type(error).__name__
