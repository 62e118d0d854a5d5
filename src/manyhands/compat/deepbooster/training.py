"""Training: the rounds of one training, from the meeting of the trainers to their leaving.

A round is one step: every trainer contributes the gradient of its next line with weight 1, or
nothing with weight 0 when its chunk has no more lines in this epoch. Chunks are private, so the
samples that the engine shares out stand for nothing but one line of whoever gets some of them;
what it asks for after a death, in the same round, is answered with weight 0.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from manyhands.collectives import messages as m
from manyhands.collectives.instructions import StopReason
from manyhands.collectives.mail import Mail
from manyhands.collectives.outcomes import Committed, Stopped, Task
from manyhands.collectives.rounds import Rounds
from manyhands.compat.deepbooster.dataset import Dataset
from manyhands.compat.deepbooster.errors import TrainingBegun, TrainingBroken
from manyhands.compat.deepbooster.learner import Learner
from manyhands.compat.deepbooster.report import Report
from manyhands.compat.deepbooster.schedule import (
    Phase,
    Schedule,
    Standing,
    read_note,
    shorten,
    write_note,
    write_standing,
)
from manyhands.core.errors import LinkTimeout, UsageError
from manyhands.core.peers import PeerId, PeerState, View
from manyhands.links.base import Link

log = logging.getLogger(__name__)
JOIN_LEASES = 4  # how long a newcomer waits to be let in
_IN_TIME, _LATE = b"\x01", b"\x00"
_GATHER_S = 0.1  # of each round while some are on their way in
_LOOK_S = 0.5
_TICK_S = 0.02
_SAY_S = 30.0  # how often it is said who is missing
_GOOD_ENDS = (StopReason.LEFT, StopReason.FINISHED, StopReason.OVER)
_BEGUN_HINT = (
    "its lines are not trained in this run. Wait until the others have ended, then start all "
    "trainers again"
)


class EarlierRun(Exception):
    """The last training of these trainers has ended, and some are not out of it yet."""


class _Given(NamedTuple):
    """Where this trainer's values of a round went: they count as long as the generation does."""

    round: int
    generation: int


class _Door:
    """The engine's `State`: how newcomers are let in, or told that they are late.

    Until all are gathered nothing has been trained, so the state that a newcomer needs is empty:
    one byte, which says whether it is in time.
    """

    def __init__(self) -> None:
        self.is_late = False
        self.let_in: Callable[[PeerId, m.Snapshot], None] | None = None
        self._due: deque[tuple[m.Snapshot, PeerId]] = deque()

    def give(self, head: m.Snapshot, to: PeerId) -> None:
        if head.place == 0:  # one donor's word is enough
            self._due.append((head, to))

    def arrived(self, sender: PeerId, head: m.Snapshot, buffers: Sequence[memoryview]) -> None:
        if b"".join(buffers) == _IN_TIME:
            assert self.let_in is not None
            self.let_in(sender, head)
        else:
            self.is_late = True

    def answer(self, rounds: Rounds, *, in_time: bool) -> None:
        """In the user's thread, after a round: to those who have asked for the state after it."""
        while self._due:
            rounds.send_snapshot(*self._due.popleft(), [memoryview(_IN_TIME if in_time else _LATE)])


class Training:
    """One trainer's part in it. `run` in the user's thread, then `close`."""

    def __init__(
        self,
        link: Link,
        mail: Mail,
        learner: Learner,
        dataset: Dataset,
        *,
        names: Sequence[str],
        n_epoch: int,
    ) -> None:
        """`names`: the sorted `trainers_queues`; the link's own is among them."""
        self._link, self._learner, self._dataset = link, learner, dataset
        self._names = names
        self._schedule = Schedule(names, n_epoch, learner.num_states)
        self._standing = Standing(
            place=names.index(link.me.name),
            lines=len(dataset),
            chunk=shorten(str(dataset.path), len(names)),
            settings=learner.settings(n_epoch),
        )
        self._given: _Given | None = None
        self._leaving = False
        # At least one sample for each member, so that each is asked.
        self._door = _Door()
        self._rounds = Rounds(
            link,
            learner.tensors,
            num_samples=lambda r: len(names),
            state=self._door,
            mail=mail,
        )
        self._door.let_in = self._rounds.snapshot_arrived
        self._rounds.report = self._add_standing
        self._rounds.note = self._write_note

    def run(self) -> Report:
        """Until all lines of all trainers that are still there are done in every epoch.

        Raises TrainingBegun, TrainingBroken, EarlierRun, and whatever the user's code does.
        """
        self._rounds.start()
        self._meet()
        heard_s = time.monotonic()
        while True:
            try:
                outcome = self._rounds.next(_LOOK_S)
            except LinkTimeout:
                self._look_around(time.monotonic() - heard_s)
                continue
            match outcome:
                case Task():
                    self._contribute(outcome)
                case Committed():
                    self._take(outcome)
                case Stopped():
                    return self._end(outcome)
                case _:
                    pass  # what becomes of an attempt is the engine's matter
            heard_s = time.monotonic()

    def close(self) -> None:
        """Leave at once, if it is not over. The link is closed, too."""
        self._link.close()  # first: then nothing is waited for
        self._rounds.close()

    # -- the beginning ----------------------------------------------------------------------------

    def _meet(self) -> None:
        """Wait until all trainers are here, or the first of them has begun since they were, or
        this one's link has ended.
        """
        said_s = time.monotonic()
        while True:
            view = self._rounds.view
            if view is not None:
                if view.over:
                    raise EarlierRun
                if view.peers(PeerState.ACTIVE, PeerState.LEAVING):
                    me = view.member(self._link.me.incarnation)
                    if me is None or view.cut <= me.since:  # coming back is a cut by itself
                        raise self._too_late()
                    return
                here = {peer.name for peer in view.peers()}
                missing = [name for name in self._names if name not in here]
                if not missing:
                    self._maybe_found(view)
                    return
                if time.monotonic() - said_s > _SAY_S:
                    said_s = time.monotonic()
                    log.warning("waiting for %s: started and ignited?", ", ".join(missing))
            if self._rounds.outlook.stopped:
                return  # `run` says why
            time.sleep(_TICK_S)  # a view is no outcome, so there is no event

    def _maybe_found(self, view: View) -> None:
        """The first of the roster begins; the others ask it in."""
        first = view.peers()[:1] == (self._link.me,)
        if first and not view.peers(PeerState.ACTIVE, PeerState.LEAVING):
            with suppress(UsageError):  # one who has begun, and died, has let this one in
                self._rounds.offer_state(0, b"")

    def _await_newcomers(self) -> None:
        """For a moment: to be let in takes rounds."""
        deadline = time.monotonic() + _GATHER_S
        while not self._is_gathered() and time.monotonic() < deadline:
            time.sleep(_TICK_S)

    def _is_gathered(self) -> bool:
        """Whether all that are here take part; who is not here by now comes too late."""
        view = self._rounds.view
        return view is not None and not view.peers(PeerState.WATCHING)

    def _look_around(self, silent_s: float) -> None:
        """While nothing is heard."""
        if self._schedule.phase is not Phase.GATHER:
            return
        if self._door.is_late or silent_s > JOIN_LEASES * self._link.terms.lease_s:
            raise self._too_late()
        if self._rounds.view is not None:
            self._maybe_found(self._rounds.view)  # the one who should have begun may be gone

    def _too_late(self) -> TrainingBegun:
        name = self._link.me.name
        return TrainingBegun(f"the others have begun without trainer {name}", hint=_BEGUN_HINT)

    # -- rounds -----------------------------------------------------------------------------------

    def _contribute(self, task: Task) -> None:
        # Asked again in the same round: after a death, for what is not ours; or everything that
        # was computed was dropped (another generation), and the line must not be lost.
        again = self._given is not None and self._given.round == task.round
        counts = again and self._given == _Given(task.round, task.generation)
        gives = not counts and self._gives(again=again)
        if gives:
            self._given = _Given(task.round, task.generation)
        self._rounds.contribute(task, self._learner.tensors, weight=float(gives))

    def _gives(self, *, again: bool) -> bool:
        """Whether this trainer has values for the round; then they are in the learner's tensors."""
        schedule = self._schedule
        match schedule.phase:
            case Phase.GATHER:
                if self._rounds.members[:1] == (self._link.me.incarnation,):
                    self._await_newcomers()
                return False
            case Phase.EQUALIZE:
                if schedule.source != self._standing.place:
                    return False
                self._learner.show_state(schedule.equalized)
                return True
            case Phase.TRAIN:
                if schedule.step >= len(self._dataset):
                    return False
                if not again:
                    self._compute(schedule.step)
                return True
            case Phase.INTRODUCE | Phase.DONE:
                return False

    def _compute(self, line: int) -> None:
        try:
            used = self._learner.compute(*self._dataset[line])
        except Exception as error:
            error.add_note(f"at {self._dataset.where(line)}")
            raise
        self._standing = msgspec.structs.replace(self._standing, used=used)

    def _take(self, committed: Committed) -> None:
        schedule, phase, epoch = self._schedule, self._schedule.phase, self._schedule.epoch
        note = read_note(committed.sums[0].notes, len(self._names))
        try:
            if committed.weight > 0:
                committed.result.read_into(self._learner.tensors)
        finally:
            committed.result.close()
        self._standing = msgspec.structs.replace(self._standing, used=b"")
        if committed.weight > 0 and phase is Phase.EQUALIZE:
            self._learner.take_state(schedule.equalized)
        elif committed.weight > 0 and phase is Phase.TRAIN:
            self._learner.step(note.used)
        for news in schedule.advance(note, committed.weight):
            log.warning("%s", news)
        self._door.answer(self._rounds, in_time=schedule.phase is Phase.GATHER)
        if schedule.present and self._standing.place not in schedule.present:
            raise self._too_late()  # let in, but only after the others had counted who is here
        if schedule.epoch > epoch:
            log.info("epoch %d is done, %d steps in all", schedule.epoch, schedule.report.steps)
        if schedule.phase is Phase.DONE and not self._leaving:
            self._leaving = True
            self._rounds.leave()

    def _end(self, stopped: Stopped) -> Report:
        schedule = self._schedule
        if schedule.phase is Phase.DONE and stopped.reason in _GOOD_ENDS:
            if schedule.fault is not None:
                raise schedule.fault
            return schedule.report
        if schedule.phase is Phase.GATHER and stopped.reason is StopReason.OVER:
            raise EarlierRun
        left = "" if schedule.phase is Phase.DONE else f", with {self._untrained()} lines to come"
        why = stopped.text if stopped.error is None else stopped.error.message
        raise TrainingBroken(
            f"trainer {self._link.me.name} is out in epoch {schedule.epoch + 1}{left}: {why}",
            hint="others may go on without it; its model has the state of the last step it took",
        ) from stopped.error

    def _untrained(self) -> int:
        return self._schedule.untrained(len(self._dataset))

    # -- what all know ----------------------------------------------------------------------------

    def _add_standing(self, round_: int, report: m.SelfReport) -> m.SelfReport:
        return msgspec.structs.replace(report, scalars=write_standing(self._standing))

    def _write_note(self, parts: Sequence[m.Part]) -> bytes:
        gathered = self._is_gathered()
        return write_note(parts, gathered=gathered, num_trainers=len(self._names))
