"""Archive: how the peers of a plan write one checkpoint together, and read it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from manyhands.core.address import redact
from manyhands.core.errors import CheckpointError, UsageError
from manyhands.core.plan import Plan
from manyhands.stages.carrier import Carrier
from manyhands.stages.errors import PlanBroken, StepFailed
from manyhands.stages.part import Part
from manyhands.stages.saving import (
    Save,
    Scheduler,
    add_scheduler,
    discard,
    extra_of,
    kind_of,
    new_save,
    prune,
    read_index,
    read_layers,
    saves_in,
    scheduler_in,
    shard_of,
    write_index,
    write_shard,
)
from manyhands.stages.vote import alike

T = TypeVar("T")
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

    def save(
        self,
        url: str,
        num_steps: int,
        extra: Mapping[str, Any],
        *,
        keep: int,
        scheduler: Scheduler | None = None,
    ) -> None:
        """It counts once every stage's shard is written. Raises CheckpointError, on all peers."""
        said = msgspec.json.encode(new_save(num_steps)) if self._me == 0 else None
        save = self._heard(said, Save, "save()")
        shards = tuple(shard_of(self._plan, stage) for stage in self._plan.stages)

        def write_own() -> None:
            for stage in self._plan.stages:
                if stage.lead == self._me:
                    tree = self._part.state_of(stage)
                    if scheduler is not None:
                        add_scheduler(tree, scheduler)
                    optimizer = kind_of(self._part.optimizer)
                    write_shard(url, save, shards[stage.index], tree, optimizer)

        def finish() -> None:
            if self._me == 0:
                write_index(url, save, shards, extra)

        try:
            self._together(write_own)
            self._together(finish)
        except CheckpointError:
            self._tidy(lambda: discard(url, save))
            raise
        self._tidy(lambda: prune(url, save, keep=keep))

    def load(self, url: str, *, scheduler: Scheduler | None = None) -> Resumed | None:
        """The newest checkpoint that is whole for all peers, made by any plan; None: there is none.

        A broken one is named, and the one before it used. Raises CheckpointError when all are.
        """
        names = [layer.name for layer in self._part.layers()]
        found: dict[Save, tuple[Resumed, dict[str, Any], dict[str, Any] | None]] = {}
        broken: CheckpointError | None = None
        for save in self._candidates(url):

            def read(save: Save = save) -> None:
                index = read_index(url, save)
                optimizer = kind_of(self._part.optimizer)
                states = read_layers(url, save, index, names, optimizer)
                self._part.check_fit(states)
                rates = scheduler_in(states, scheduler)
                found[save] = Resumed(index.num_steps, extra_of(index)), states, rates

            try:
                self._together(read)
            except CheckpointError as error:
                log.warning("the checkpoint of step %d is passed over: %s", save.num_steps, error)
                broken = broken or error
                continue
            resumed, states, rates = found[save]
            self._part.restore(states)
            if scheduler is not None and rates is not None:
                scheduler.load_state_dict(rates)
            return resumed
        if broken is not None:
            raise CheckpointError(
                f"no checkpoint in {redact(url)} can be read: {broken.message}", hint=broken.hint
            )
        return None

    def _candidates(self, url: str) -> list[Save]:
        """As the first peer sees them."""
        seen: list[Save] = []

        def look() -> None:
            if self._me == 0:
                seen.extend(saves_in(url))

        self._together(look)
        said = msgspec.json.encode(seen) if self._me == 0 else None
        return self._heard(said, list[Save], "load()")

    def _heard(self, said: bytes | None, kind: type[T], call: str) -> T:
        """What the first peer says in this call. Raises PlanBroken if it is somewhere else."""
        words = self._carrier.say(said, 0)
        try:
            return msgspec.json.decode(words, type=kind)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise PlanBroken(
                f"peer {self._plan.peers[0]} is not in {call}, this one is: all peers make the "
                "same calls"
            ) from None

    def _together(self, act: Callable[[], None]) -> None:
        """Raises CheckpointError on all peers if one's act failed."""
        try:
            alike(self._carrier, self._plan.peers, act)
        except StepFailed as failed:
            raise CheckpointError(failed.message, hint=failed.hint) from None

    def _tidy(self, act: Callable[[], None]) -> None:
        """On the first peer, after all have done their part; what stays there takes room only."""
        if self._me != 0:
            return
        try:
            act()
        except (CheckpointError, UsageError) as error:
            log.warning("what is of no use any more stays: %s", error.message)
