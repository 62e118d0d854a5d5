"""Blame: whose samples could not be used in a round, and which samples they were, in words."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from manyhands.collectives.instructions import Lost, Retry
from manyhands.collectives.messages import MOST_DEATHS
from manyhands.collectives.ranges import Ranges
from manyhands.collectives.refusal import OnRefusal
from manyhands.core.errors import ManyhandsError
from manyhands.core.peers import PeerId
from manyhands.data.fetch import Request, Spots
from manyhands.data.source import Source

log = logging.getLogger(__name__)

POLICIES = {"skip": OnRefusal.SKIP, "drop": OnRefusal.REDO, "stop": OnRefusal.STOP}
_FOLLOWS = {
    "skip": "these samples count nothing in this round",
    "drop": "others compute these samples once more, and leave out what fails again",
    "stop": "the run stops",
}
_SHOWN = 8  # samples, and tensors, that a text lists


class BadGradient(ManyhandsError):
    """What a peer has computed cannot be averaged: it is not finite, or not of its size."""


class DeadlySamples(ManyhandsError):
    """Peer after peer has died that was to compute some samples."""


class Blame:
    """Of one run. Used by the user's thread.

    `tensors` are the names of what peers contribute, `locate` says which positions of an epoch
    these units of a round are (None: those of an evaluation), `name_of` what a peer is called,
    `count` which of the rounds that the user knows one of the engine's is.
    """

    def __init__(
        self,
        policy: str,
        tensors: Sequence[str],
        source: Source,
        seed: int,
        locate: Callable[[int, Ranges], Request | None],
        name_of: Callable[[int], PeerId | None],
        count: Callable[[int], int],
    ) -> None:
        self._policy, self._tensors = policy, tensors
        self._source, self._spots = source, Spots(source, seed)
        self._locate, self._name_of, self._count = locate, name_of, count
        self._refusals: list[Retry] = []  # of the newest round that had some
        self._lost: Lost | None = None

    def refused(self, retry: Retry) -> None:
        """Say it, once, and remember it."""
        if self._refusals and self._refusals[0].round != retry.round:
            self._refusals.clear()
        self._refusals.append(retry)
        log.warning("%s: %s", self._say(retry), _FOLLOWS[self._policy])

    def lost(self, lost: Lost) -> None:
        """Remember it."""
        self._lost = lost

    def judge(self, number: int, quarantine: Ranges, me: int) -> None:
        """A round is over: raise BadGradient if others could compute what this peer could not."""
        if self._policy != "drop" or not self._refusals or self._refusals[0].round != number:
            return
        mine = [r for r in self._refusals if any(fault.peer == me for fault in r.faults)]
        shares = (share for retry in mine for share in retry.contributions)
        given = Ranges.union(share.ranges for share in shares if share.peer == me)
        if given and not given & quarantine:
            raise BadGradient(
                f"{self._say(mine[0])}. Others have computed the same samples and got numbers: "
                "the run goes on without this peer",
                hint="look for what differs here: the device, its memory, the data on its disk",
            )

    def error(self) -> ManyhandsError:
        """Why the run has stopped."""
        if self._lost is not None:
            return DeadlySamples(
                f"round {self._count(self._lost.round)}: {MOST_DEATHS} peers that were to compute "
                f"{self._samples(self._lost.round, self._lost.ranges)} have died, one after the "
                "other: the run stops before it kills the rest",
                hint="compute these samples in a process of their own: too large for the memory, "
                "or something that crashes a library",
            )
        said = self._say(self._refusals[-1]) if self._refusals else "a gradient was refused"
        return BadGradient(
            f'{said}: the run stops, since bad_gradients="stop"',
            hint='look at these samples and the learning rate; bad_gradients="skip" leaves such '
            'samples out, "drop" the peers whose gradients only they cannot compute',
        )

    def _say(self, retry: Retry) -> str:
        at = f"round {self._count(retry.round)}: "
        if not retry.faults:
            given = ", ".join(str(self._name_of(share.peer)) for share in retry.contributions)
            whose = f"those of {given} are finite, their mean is not" if given else "not usable"
            return f"{at}gradients of {self._samples(retry.round, retry.refused)}: {whose}"
        return at + "; ".join(self._accuse(retry, peer) for peer in _peers(retry))

    def _accuse(self, retry: Retry, peer: int) -> str:
        places = {fault.tensor for fault in retry.faults if fault.peer == peer}
        known = dict(enumerate(self._tensors))  # what others say of them need not be true
        names = [known.get(p, f"tensor {p}") for p in sorted(p for p in places if p is not None)]
        found = "is not of the size it should have"
        if names:
            found = f"is not finite in {', '.join(names[:_SHOWN])}"
        given = Ranges.union(s.ranges for s in retry.contributions if s.peer == peer)
        return (
            f"the gradient that {self._name_of(peer)} has computed of "
            f"{self._samples(retry.round, given)} {found}"
        )

    def _samples(self, number: int, ranges: Ranges) -> str:
        """Units of a round, as positions of its epoch and as the data set counts them."""
        request = self._locate(number, ranges)
        if request is None:
            return f"positions {ranges} of the evaluation"
        positions = Ranges.of(*((p, p + 1) for p in request.positions))
        first = request.positions[:_SHOWN]
        spots = self._spots.of(Request(request.epoch, first))
        numbers = ", ".join(str(self._source.number(spot.place)) for spot in spots)
        more = ", ..." if len(first) < len(request.positions) else ""
        return (
            f"positions {positions} of epoch {request.epoch} (samples {numbers}{more} of the data)"
        )


def _peers(retry: Retry) -> list[int]:
    return list(dict.fromkeys(fault.peer for fault in retry.faults))
