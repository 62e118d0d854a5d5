"""Servant: a worker's life at the boss's hub, from its offer to its dismissal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from manyhands.core.errors import (
    LinkBroken,
    LinkError,
    LinkTimeout,
    Malformed,
    ManyhandsError,
    Oversized,
    Refused,
    UsageError,
)
from manyhands.core.peers import PeerId, View
from manyhands.links.base import DEFAULT_TIMEOUT_S, Delivery, Link
from manyhands.links.messages import Ready
from manyhands.stages import commands as words
from manyhands.stages.errors import PlanBroken, StepFailed
from manyhands.stages.recipes import NotAllowed
from manyhands.stages.vote import sayable, traceback_of, words_of
from manyhands.worker.workshop import COLLECTIVE, Workshop

log = logging.getLogger(__name__)
_AGAIN = "start it again, then this worker"


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

    def serve(self, patience_s: float) -> None:
        """Raises LinkTimeout if there is no boss in that time, Refused if it does not want this
        worker, BossGone, LinkError.
        """
        try:
            self._serve(patience_s)
        except LinkBroken as error:
            if self._boss is None:
                raise
            # The hub was the boss's own: nobody shall be told to look for another one.
            said, _, _ = error.message.partition("\nhint: ")
            raise BossGone(f"the boss is gone: {said}", hint=_AGAIN) from None

    def _serve(self, patience_s: float) -> None:
        self._link.tell(Ready())
        deadline_s = time.monotonic() + patience_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                event = self._link.receive(left_s if self._boss is None else DEFAULT_TIMEOUT_S)
            except LinkTimeout:
                if self._boss is None:
                    raise LinkTimeout(
                        "boss, at a hub without one",
                        patience_s,
                        hint="are MODEL_HOST and MODEL_PORT those of a BossMan?",
                    ) from None
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
            raise BossGone("the boss is gone", hint=_AGAIN)
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
                self._say(self._boss, self._answer(word))
                return True

    def _say(self, boss: PeerId, answer: words.Answer) -> None:
        try:
            words.say(self._link, boss, answer)
        except Oversized as error:
            log.error("an answer is too long: %s", error)
            words.say(self._link, boss, words.Failed(answer.id, "error", error.message))

    def _answer(self, command: words.Command) -> words.Answer:
        try:
            return self._workshop.do(command)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the boss raises it)
            return self._failed(command, error)  # and this worker lives on

    def _failed(self, command: words.Command, error: BaseException) -> words.Failed:
        together = isinstance(command, COLLECTIVE)
        if isinstance(error, PlanBroken) and (cause := _own(error)) is not None:
            error = cause
        text = traceback_of(error)
        hint = sayable(error.hint) if isinstance(error, ManyhandsError) and error.hint else None
        message = error.message if isinstance(error, ManyhandsError) else words_of(error)
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
        return words.Failed(command.id, kind, sayable(message), hint, text, ended)


def _own(broken: PlanBroken) -> Exception | None:
    """What this worker raised in the middle of something, if that has broken the plan."""
    cause = broken.__cause__
    return None if isinstance(cause, LinkError) or not isinstance(cause, Exception) else cause
