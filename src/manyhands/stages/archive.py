"""Archive: how the peers of a plan write one checkpoint together, and read it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from manyhands.core.errors import CheckpointError
from manyhands.core.plan import Plan
from manyhands.stages.carrier import Carrier
from manyhands.stages.errors import StepFailed
from manyhands.stages.part import Part
from manyhands.stages.saving import (
    VERSION,
    Index,
    read_index,
    read_layers,
    shard_of,
    steps_in,
    write_index,
    write_shard,
)
from manyhands.stages.vote import Failure, vote

log = logging.getLogger(__name__)


class Resumed(NamedTuple):
    """A checkpoint that was put in place."""

    num_steps: int
    extra: dict[str, Any]


class Archive:
    """All peers call the same methods in one order."""

    def __init__(self, plan: Plan, part: Part, carrier: Carrier) -> None:
        self._plan, self._part, self._carrier = plan, part, carrier
        self._me = carrier.rank

    def save(self, url: str, num_steps: int, extra: Mapping[str, Any], *, keep: int) -> None:
        """It counts once every stage's shard is written. Raises CheckpointError, on all peers."""
        shards = tuple(shard_of(self._plan, stage) for stage in self._plan.stages)

        def write_own() -> None:
            for stage in self._plan.stages:
                if stage.lead == self._me:
                    tree = self._part.state_of(stage)
                    write_shard(url, shards[stage.index], num_steps, tree, keep=keep)

        def finish() -> None:
            if self._me == 0:
                write_index(url, Index(VERSION, num_steps, shards, dict(extra)), keep=keep)

        self._together(write_own)
        self._together(finish)

    def load(self, url: str) -> Resumed | None:
        """The newest checkpoint that is whole for all peers, made by any plan; None: there is none.

        A broken one is named, and the one before it used. Raises CheckpointError when all are.
        """
        names = [layer.name for layer in self._part.layers()]
        found: dict[int, tuple[Index, dict[str, Any]]] = {}
        broken: CheckpointError | None = None
        for num_steps in self._candidates(url):

            def read(number: int = num_steps) -> None:
                index = read_index(url, number)
                found[number] = index, read_layers(url, index, names)

            try:
                self._together(read)
            except CheckpointError as error:
                log.warning("the checkpoint of step %d is passed over: %s", num_steps, error)
                broken = error
                continue
            index, states = found[num_steps]
            self._together(lambda own=states: self._part.restore(own))
            return Resumed(index.num_steps, index.extra)
        if broken is not None:
            raise CheckpointError(
                f"no checkpoint in {url} can be read: {broken.message}", hint=broken.hint
            )
        return None

    def _candidates(self, url: str) -> list[int]:
        """As the first peer sees them."""
        seen: list[int] = []

        def look() -> None:
            if self._me == 0:
                seen.extend(steps_in(url))

        self._together(look)
        said = msgspec.json.encode(seen) if self._me == 0 else None
        return msgspec.json.decode(self._carrier.say(said, 0), type=list[int])

    def _together(self, act: Callable[[], None]) -> None:
        """Raises CheckpointError on all peers if it did on one."""
        failure = None
        try:
            act()
        except CheckpointError as error:
            failure = Failure(error.message, "", error.hint)
        try:
            vote(self._carrier, self._plan.peers, failure=failure, loss=0.0, squares=0.0)
        except StepFailed as failed:
            raise CheckpointError(failed.message, hint=failed.hint) from None
