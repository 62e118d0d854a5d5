"""Keeper: saves the state of a run now and then, and finds it again.

A state is copied when the user's thread is between two rounds, and written by a thread of its own
once its round is stable: no other history can take its place. A place that cannot be written to is
said, and the run goes on.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from manyhands.checkpoint.store import Checkpoint, Store
from manyhands.checkpoint.tree import unflatten
from manyhands.collectives.messages import Record
from manyhands.core.errors import CheckpointError, Malformed, UsageError
from manyhands.data.secret import redacted
from manyhands.replica.conductor import Base
from manyhands.replica.description import check_saved, warn_of_torch
from manyhands.replica.openings import Openings
from manyhands.replica.options import Options
from manyhands.replica.state import TrainingState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written. For `run.events`."""

    round: int
    place: str


@dataclass(frozen=True)
class NotSaved:
    """One could not be; the run goes on."""

    round: int
    error: CheckpointError


class Keeper:
    """Of one store. Used by the user's thread; `events` may be read by any."""

    def __init__(
        self,
        options: Options,
        state: TrainingState,
        description: Mapping[str, Any],
        *,
        every: int,
    ) -> None:
        """Every so many rounds, in the place that the options name."""
        assert options.checkpoints is not None
        self.place = redacted(os.fspath(options.checkpoints))
        self._store = Store(options.checkpoints, keep=options.keep)
        self._state, self._description, self._every = state, description, every
        self._every_one, self._wanted = options.save_all, False
        self._copied: tuple[int, Checkpoint] | None = None  # waits until its round is stable
        self._last = 0  # round of the last one that was copied
        self._loaded: int | None = None  # rounds, as the engine counts, of the one that was taken
        self._found: int | None = None  # round of the newest one that was there before
        self._work: queue.SimpleQueue[Checkpoint | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()  # nothing waits to be written
        self._idle.set()
        self.events: queue.SimpleQueue[Saved | NotSaved] = queue.SimpleQueue()

    # -- saving ---------------------------------------------------------------------------------

    def want(self) -> None:
        """Save at the next opportunity."""
        self._wanted = True

    def is_due(self, round: int) -> bool:
        """Whether the state after so many rounds shall be saved.

        Not while another is being written: a slow disk costs checkpoints, not memory; or time, if
        none is to be left out: then this waits for it.
        """
        if round <= self._last or not (self._wanted or round % self._every == 0):
            return False
        if self._every_one:
            self._idle.wait()  # the thread that writes has no other way to end
        return self._idle.is_set()

    def copy(self, base: Base, round: int) -> None:
        """The state is that of `base`, now. It takes the place of one that still waits."""
        if self._copied is not None and self._every_one:
            lost = self._copied[1].round
            why = f"round {round} was due before it was sure to stay"
            self._not_saved(lost, CheckpointError(why, hint="save less often: save_every=..."))
        self._wanted, self._last = False, round
        self._copied = base.applied, self._checkpoint(base, round)

    def stable(self, applied: int) -> None:
        """This state cannot be lost or replaced any more: it may be written."""
        if self._copied is None or self._copied[0] != applied:
            return
        copied = self._copied[1]
        self._copied = None
        if self._thread is None:
            # A daemon: a run that nobody has closed must not keep its process from its end.
            self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self._idle.clear()
        self._work.put(copied)

    def save_last(self, base: Base, round: int) -> None:
        """The state is that of `base`, and nobody will change it: written before this returns.

        Unless nothing was applied since it was loaded: it is there, and others may write beside us.
        """
        self.close()
        if round > 0 and base.applied != self._loaded:
            self._write(self._checkpoint(base, round))

    def close(self) -> None:
        """What is to be written is. Idempotent."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
            atexit.unregister(self.close)

    def _checkpoint(self, base: Base, round: int) -> Checkpoint:
        flat = self._state.flat(copy=True)
        about = {
            "description": dict(self._description),
            "record": msgspec.msgpack.encode(base.record),
            "applied": base.applied,
            "openings": list(base.openings.starts),
        }
        tree = unflatten(flat.shape, flat.tensors)
        return Checkpoint(round=round, chain=base.chain, about=about, tree=tree)

    def _run(self) -> None:
        while (checkpoint := self._work.get()) is not None:
            try:
                self._write(checkpoint)
            finally:
                self._idle.set()

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            self.events.put(Saved(checkpoint.round, self._store.save(checkpoint)))
        except CheckpointError as error:
            self._not_saved(checkpoint.round, error)
        except Exception as error:  # noqa: BLE001  (a file system's own, say: none ends a run)
            kind = type(error).__name__
            failed = CheckpointError(f"saving failed by {kind}: {error}")
            failed.__cause__ = error
            self._not_saved(checkpoint.round, failed)

    def _not_saved(self, round: int, error: CheckpointError) -> None:
        log.warning("round %d was not saved, and the run goes on: %s", round, error)
        self.events.put(NotSaved(round, error))

    # -- finding --------------------------------------------------------------------------------

    def look(self) -> None:
        """Remember what is there before this peer comes to its run."""
        with suppress(CheckpointError):  # what cannot be listed is told when something is saved
            self._found = max((p.round for p in self._store.places() if p.complete), default=None)

    def check_free(self) -> None:
        """The run begins now: raises UsageError if another one's states were there before. The
        newest is that of most rounds: they would be taken for this run's, and its own be removed.
        """
        if self._found is not None:
            raise UsageError(
                f"{self.place} has checkpoints of an earlier run, up to round {self._found}, "
                "which would be taken for this one's",
                hint='to go on from there, resume=True (manyhands run --resume), or "auto"; to '
                "begin anew, name another place or remove them",
            )

    def load(self, *, or_begin: bool = False) -> Base | None:
        """The newest whole state is taken, if it is one of what is trained here; returns where it
        stands.

        None if there is none. Broken ones are named; if there are no others, and without one the
        run would begin, that is an error. Raises CheckpointError, Malformed, Mismatch.
        """
        found = self._store.load()
        for broken in found.broken:
            log.warning("the checkpoint %s cannot be used: %s", broken.place, broken.reason)
        checkpoint = found.checkpoint
        if checkpoint is None:
            if or_begin and found.broken:
                raise CheckpointError(
                    f"no checkpoint can be used, the newest is {found.broken[0].place}: "
                    f"{found.broken[0].reason}",
                    hint="to begin anew, name another place for checkpoints, or clear this one",
                )
            return None
        try:
            record = msgspec.msgpack.decode(checkpoint.about["record"], type=Record)
            description = cast("Mapping[str, Any]", checkpoint.about["description"])
            applied = int(checkpoint.about["applied"])
            openings = Openings(tuple(checkpoint.about["openings"]))
            check_saved(description, self._description)
        except (KeyError, TypeError, ValueError, AttributeError, msgspec.DecodeError) as error:
            raise Malformed(f"{found.place} is no checkpoint of a run: {error}") from None
        warn_of_torch("the one that was saved", description, self._description)
        self._state.load(checkpoint.tree)
        self._last, self._loaded = checkpoint.round, applied
        log.info("going on after round %d, from %s", checkpoint.round, found.place)
        return Base(applied, checkpoint.chain, record, openings)
