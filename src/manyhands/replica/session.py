"""Session: one peer's whole part in a training, from the link up to the loader.

It puts the pieces together: what each of them does is its own module's matter.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from manyhands.collectives.instructions import Generation, Lost, Retry, Stable, StopReason
from manyhands.collectives.mail import Mail
from manyhands.collectives.messages import SelfReport, Snapshot
from manyhands.collectives.outcomes import Committed, Stopped
from manyhands.collectives.ranges import Ranges
from manyhands.collectives.rounds import Rounds
from manyhands.collectives.shares import Resyncs
from manyhands.core.address import AmqpAddress, LocalAddress
from manyhands.core.errors import LinkTimeout, UsageError
from manyhands.core.peers import PeerId, PeerState, View
from manyhands.data.calendar import Calendar
from manyhands.data.fetch import Request
from manyhands.data.source import Source
from manyhands.links.base import Link, LinkSettings, dial, new_peer
from manyhands.links.messages import Terms
from manyhands.replica.agenda import Agenda
from manyhands.replica.arithmetic import arithmetic_of
from manyhands.replica.blame import POLICIES, Blame
from manyhands.replica.cap import Cap, memory_of
from manyhands.replica.conductor import Base, Conductor, Event, Turn
from manyhands.replica.description import (
    agreed,
    check_same,
    describe,
    describe_data,
    digest_of,
    warn_of_torch,
)
from manyhands.replica.deviation import Watch, classes_of
from manyhands.replica.fingerprint import Tensors
from manyhands.replica.gates import Gate
from manyhands.replica.gradients import Gradients, Named, parameters_of
from manyhands.replica.heap import keep_freed
from manyhands.replica.journal import Journal
from manyhands.replica.keeper import Keeper
from manyhands.replica.layers import least_rows, warn_of_chance
from manyhands.replica.loader import Evaluation, Intake, Loader
from manyhands.replica.openings import Openings
from manyhands.replica.options import Options, Place, RoundClosed
from manyhands.replica.replica import Replica
from manyhands.replica.scalars import Scalars
from manyhands.replica.signals import Signals, how_to_go_on
from manyhands.replica.snapshots import Snapshots
from manyhands.replica.state import Stateful, TrainingState
from manyhands.replica.units import Units

log = logging.getLogger(__name__)

_BEATS = 10  # of a lease
_GRACES = 20  # of a lease: all wait that long for one that was killed, and coming back is cheap
_STATE_FACTOR, _STATE_SLACK = 16, 64 << 20  # a state is at most so many times its parameters
_WATCHED = 4  # results that a newcomer may be behind
_TICK_S = 1.0  # how often a wait looks whether it shall end
_REMIND_S = 10.0  # how often a peer that waits for others says so
_FATAL = (StopReason.REFUSED, StopReason.DEADLY)
_FORM = "replicas of a model"  # what else must agree, a description says in full


class Session:
    """Made once the model is known; it joins the run at once. Used by the user's thread."""

    def __init__(
        self,
        place: Place,
        options: Options,
        source: Source,
        evaluated: Source | None,
        model: Module,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        registered: Mapping[str, Stateful],
    ) -> None:
        """`registered`: more that belongs to the state, and is undone with a pass."""
        self._place, self._options = place, options
        if options.grain_size is None:
            warn_of_chance(model)
        inner: Module = getattr(model, "_orig_mod", model)  # of one that torch.compile has made
        parameters = parameters_of(inner, optimizers)
        calendar = self._calendar = Calendar(source.size, source.batch, source.drop_last)
        least = least_rows(inner)
        self._units = Units(calendar, options.grain_size, least)
        most = 1 if options.grain_size else self._units.most(options.max_pass)
        agenda = self._agenda = Agenda(calendar, most)
        if evaluated is not None:
            days = Calendar(evaluated.size, evaluated.batch, evaluated.drop_last)
            agenda = self._agenda = Agenda(calendar, most, days.samples_per_epoch, evaluated.batch)
        self._num_rounds = (
            None if options.epochs is None else options.epochs * agenda.rounds_per_epoch
        )
        self._gradients = Gradients(inner, parameters)
        self._refuse = not any(hasattr(thing, "unscale_") for thing in registered.values())
        self._blame = Blame(
            options.bad_gradients,
            self._gradients.names,
            source,
            place.seed,
            self._locate,
            lambda peer: self.conductor.rounds.name_of(peer),
            self._count,
        )
        things: dict[str, Stateful] = dict(registered)
        things |= {f"optimizer {i}": o for i, o in enumerate(optimizers)}
        things |= {f"scheduler {i}": s for i, s in enumerate(schedulers)}
        self.state = TrainingState(inner, things, self._gradients)
        self.scalars = Scalars()
        self._watch = Watch(Tensors(inner, optimizers), self._count, options.resync_every)
        self._device = parameters[0].tensor.device
        self.events = Journal(self.scalars.news)
        buffers = [Named(n, b) for n, b in inner.named_buffers()]
        self.description = describe(
            parameters, buffers, optimizers, source, agreed(place, options, source, things)
        )
        if evaluated is not None:
            counted = {"samples": agenda.num_evaluated}
            self.description["evaluation"] = describe_data(evaluated) | counted
        num_bytes = sum(t.numel() * t.element_size() for t in self._gradients.like)
        keep_freed(num_bytes, self._device, os.environ)
        most_bytes = _STATE_FACTOR * num_bytes + _STATE_SLACK
        check = partial(check_same, mine=self.description)
        self._snapshots = Snapshots(self.description, check, self._learn, most_bytes)
        self._settings = LinkSettings(terms=_terms(place, num_bytes), outage_s=place.outage_s)
        self._link: Link | None = None
        gate = Gate(registered.values())
        self._keeper: Keeper | None = None
        if options.checkpoints is not None:
            every = options.save_every or calendar.rounds_per_epoch
            self._keeper = Keeper(options, self.state, self.description, every=every)
        base = self._first_base()
        self.conductor = Conductor(
            self._connect,
            self._take,
            self._tell,
            self._look,
            self._between,
            self._is_gathered,
            self._gradients.nothing(),
            base or Base(0, b""),
            agenda,
            Cap(memory_of(self._device)),
            gather_s=place.lease_s,
            offers=base is not None,
            outage_s=self._settings.outage_s,
        )
        self._openings = self.conductor.base.openings  # as the engine knows them
        self.replica = Replica(
            self.conductor,
            self._gradients,
            self.scalars,
            gate,
            seed=place.seed,
            batch=calendar.num_samples,
            num_samples=self._units.num_samples,
            undone=registered,
            loss=options.loss,
            balance=options.shares == "speed",
        )
        self.replica.on_commit = self._closed
        self.listeners: list[Callable[[RoundClosed], None]] = []
        self._intakes = [Intake(source, place.seed, calendar, least)]
        self.loader = Loader(
            self.replica,
            self.conductor,
            agenda,
            self._units,
            self._intakes[0],
            self._num_rounds,
            source.dataset,
        )
        self.loader.at_end = self._at_end
        self.evaluation: Evaluation | None = None
        if evaluated is not None:
            days = Calendar(evaluated.size, evaluated.batch, evaluated.drop_last)
            self._intakes.append(Intake(evaluated, place.seed, days))
            self.evaluation = Evaluation(self.loader, self._intakes[1])
        self._signals = Signals()
        self._is_new = True  # nobody had begun the run when this peer came
        try:
            self.conductor.begin(self._wait_for_peers)
            self.replica.watch(model, [p for _, p in parameters])
            for optimizer in optimizers:
                gate.guard(optimizer, "step", partial(self._gradients.stepped, optimizer))
            for scheduler in schedulers:
                gate.guard(scheduler, "step")
        except BaseException:
            self.close()
            raise

    @property
    def me(self) -> PeerId:
        """This peer, as the others see it now."""
        assert self._link is not None
        return self._link.me

    @property
    def roster(self) -> tuple[PeerId, ...]:
        """Who takes part, in order."""
        view = self.conductor.rounds.view
        return () if view is None else view.peers(PeerState.ACTIVE)

    @property
    def round(self) -> int:
        """How many rounds that train were applied here."""
        return self._agenda.round(self.conductor.base.round)

    def save(self) -> None:
        """As soon as this round is over, and cannot be lost any more."""
        if self._keeper is None:
            raise UsageError("there is no place to save to", hint="wrap(..., checkpoints=FOLDER)")
        self._keeper.want()

    def finish(self) -> bool:
        """The user's loop has ended: go when the others can do without this peer. Returns whether
        it is the one that saves the state at the end.
        """
        turn = self.replica.abandon() or self.loader.abandon()
        self._between(self.conductor.base.applied)
        last = not self.roster or self._leads()
        ended = self._num_rounds is not None and self.conductor.base.round >= self._num_rounds
        healing = self.conductor.healing
        self.conductor.finish(turn, ended=ended)
        if self._keeper is None or not last:
            return False
        if healing or (self.conductor.left_outside and not self._is_alone()):
            log.warning(
                "the state after round %d was not saved: this peer was put out of the run or was "
                "to heal, and its state may not be the run's",
                self.round,
            )
            return False
        self._keeper.save_last(self.conductor.base, self.round)
        return True

    def _is_alone(self) -> bool:
        """Whether the next round was this peer's only: without it nobody can have gone on."""
        record = self.conductor.base.record
        return record is not None and record.members == (self.me.incarnation,)

    def close(self) -> None:
        """Let go of the run and of the model. Idempotent."""
        self._signals.close()
        self.replica.close()
        self.conductor.close()
        for intake in self._intakes:
            intake.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._link is not None:
            self._link.close()

    # -- between rounds -------------------------------------------------------------------------

    def _between(self, applied: int) -> None:
        """The state is the one after so many rounds: whoever waits for it gets it now."""
        self._compare_bits(applied)
        if self.conductor.healing:
            return  # nobody shall have this one
        if self._link is not None and self._snapshots.is_due(applied):
            kind, part_bytes = self._watch.kind, self._link.terms.part_bytes
            self._snapshots.serve(applied, self.state.flat(), self._openings, kind, part_bytes)
        base = self.conductor.base
        if self._keeper is None or self._agenda.evaluates(base.round):
            return  # a state is saved with what its evaluation says
        if self._keeper.is_due(self.round) and self._leads():
            self._keeper.copy(base, self.round)

    def _compare_bits(self, applied: int) -> None:
        """Whether this state is what it should be: what others have found, and what to show."""
        rounds, record = self.conductor.rounds, self.conductor.base.record
        found, mine = self._watch.heed(self.scalars.compared, rounds.name_of)
        self.events.extend(found)
        if mine:
            self.conductor.heal()
        members = () if record is None else record.members
        self._watch.look(applied, members, alone=rounds.members == (self.me.incarnation,))

    def _closed(self, number: int, committed: Committed) -> None:
        self._blame.judge(committed.round, committed.record.quarantine, self.me.incarnation)
        if not self.listeners:
            return
        name_of = self.conductor.rounds.name_of
        shares = ((name_of(s.peer), s.ranges) for s in committed.sums[0].contributions)
        closed = RoundClosed(
            round=number,
            samples=self._calendar.num_samples(number),
            weight=committed.weight * self._calendar.num_samples(number),
            shares={peer: ranges for peer, ranges in shares if peer is not None},
            means=dict(self.scalars.latest),
        )
        for listener in self.listeners:
            listener(closed)

    def _leads(self) -> bool:
        return self.roster[:1] == (self.me,)

    def _look(self) -> None:
        """Whether this peer was asked to leave; what has become of checkpoints."""
        if self._signals.leave:
            self.conductor.leave(finished=False)
        if self._keeper is not None:
            while not self._keeper.events.empty():
                self.events.append(self._keeper.events.get())

    def _at_end(self) -> None:
        """The loader has no more; perhaps since this peer has left."""
        if not (self.conductor.over and self._signals.interrupted):
            return
        if self.finish():  # else others go on, and save
            log.warning("to go on from round %d: %s", self.round, how_to_go_on())
        raise KeyboardInterrupt

    def _tell(self, event: Event) -> None:
        if isinstance(event, Stable):
            if self._keeper is not None:
                self._keeper.stable(event.applied)
            return  # every round is
        if isinstance(event, Retry):
            self._blame.refused(event)
        elif isinstance(event, Lost):
            self._blame.lost(event)
        elif isinstance(event, Stopped) and event.reason in _FATAL:
            self._save_before_the_end()
            raise self._blame.error()
        own = isinstance(event, Generation) and event.own
        if own and not self._is_new and self.conductor.base.round == 0:
            raise UsageError(
                f"the run at {self._place.address} had a state, and nobody has it any more",
                hint="resume from a checkpoint, or begin anew with another run name",
            )
        self.events.append(event)
        if isinstance(event, Stopped) and event.reason is StopReason.OVER:
            log.warning(
                "run %s is over: this peer came too late, and its model is that of round %d; "
                "another run name begins a new run",
                self._place.address.run,
                self.round,
            )
        log.info("%s", event)

    def _save_before_the_end(self) -> None:
        """The run stops within a round: what all have of the one before must not be lost."""
        first = self.conductor.rounds.members[:1]
        if self._keeper is not None and first == (self.me.incarnation,):
            self._keeper.save_last(self.conductor.base, self.round)

    def _locate(self, number: int, ranges: Ranges) -> Request | None:
        """These units of a round of the engine's; None for one that evaluates."""
        count = self.conductor.base.count(number)
        if self._agenda.evaluates(count):
            return None
        return self._units.request(Turn(self._agenda.round(count), number, ranges))

    def _count(self, number: int) -> int:
        """Which of the rounds that the user knows one of the engine's is."""
        return self._agenda.round(self.conductor.base.count(number))

    # -- joining --------------------------------------------------------------------------------

    def _connect(self) -> Rounds:
        if self._link is not None:
            self._link.close()
        mail = Mail()
        me, alone = new_peer(self._place.name), isinstance(self._place.address, LocalAddress)
        self._link = dial(self._place.address, me, self._settings, mail)
        self.scalars.news.peer = str(me)
        rounds = Rounds(
            self._link,
            self._gradients.like,
            num_samples=self._num_units,
            num_rounds=None if self._num_rounds is None else self._num_engine_rounds,
            harmless=lambda number: self._openings.is_opening(number),
            wire=self._options.wire,
            refuse=self._refuse,
            on_refusal=POLICIES[self._options.bad_gradients],
            resyncs=Resyncs(classes_of, self._options.resync_every),
            num_measured=self._gradients.num_parameters,
            form=_FORM,
            state=self._snapshots,
            mail=mail,
            vouched=alone,
        )
        self._watch.begin(me.incarnation, b"" if alone else arithmetic_of(self._device))
        self.scalars.restart()
        rounds.report, rounds.note = self._report, self.scalars.note
        self._snapshots.attach(rounds)
        rounds.start()
        return rounds

    def _report(self, number: int, report: SelfReport) -> SelfReport:
        return self._watch.report(self.scalars.report(number, report))

    def _num_units(self, number: int) -> int:
        """Of a round, as the engine counts them; one of an opening has nothing but a claim."""
        if self._openings.is_opening(number):
            return 1
        count = self._openings.count(number)
        if self._agenda.evaluates(count):
            return self._agenda.num_evaluated
        return self._units.num(self._agenda.round(count))

    def _num_engine_rounds(self) -> int:
        assert self._num_rounds is not None
        return self._num_rounds + self._openings.num_rounds

    def _is_gathered(self, rounds: Rounds) -> bool:
        return rounds.outlook.num_following >= self._place.min_peers

    def _wait_for_peers(self, rounds: Rounds) -> bool:
        """Until as many have come as the user wants, or the run is under way; False if this peer
        shall not wait any more.
        """
        view = rounds.outlook.wait_for_view(lambda view: True)
        self._is_new = (rounds.outlook.first or view).founder is not None
        if self._is_new and self._keeper is not None:
            self._keeper.check_free()
        waiting_s = time.monotonic()
        while True:
            if self._signals.interrupted:
                raise KeyboardInterrupt
            if self._signals.leave:
                return False
            try:
                rounds.outlook.wait_for_view(self._is_enough, _TICK_S)
            except LinkTimeout:
                if time.monotonic() - waiting_s > _REMIND_S:
                    waiting_s = time.monotonic()
                    here = 0 if rounds.view is None else len(rounds.view.roster)
                    log.warning("%s", self._place.waiting(here))
            else:
                return True

    def _is_enough(self, view: View) -> bool:
        under_way = bool(view.peers(PeerState.ACTIVE))
        return len(view.roster) >= self._place.min_peers or under_way or view.over

    def _take(self, head: Snapshot) -> Base:
        taken = self._snapshots.take(head)
        warn_of_torch("the run it joined", taken.description, self.description)
        self.state.load(taken.tree)
        self.replica.replaced()
        self._watch.replaced(taken.kind, head.chain)
        return Base(head.applied, head.chain, head.record, taken.openings)

    def _learn(self, openings: Openings) -> None:
        """Those of a state that has come: the engine may need them before the user's thread."""
        self._openings = openings

    def _first_base(self) -> Base | None:
        """Where this peer starts from; None if it needs another one's state."""
        about = digest_of(self.description)
        fresh = Base(0, about + self.state.digest())
        if not self._options.resume:
            if self._keeper is not None:
                self._keeper.look()
            return fresh.open(about)
        assert self._keeper is not None
        or_begin = self._options.resume == "auto"
        base = self._keeper.load(or_begin=or_begin)
        if base is None and or_begin:
            return fresh.open(about)
        if base is None:
            log.warning(
                "no checkpoint in %s: waiting for a peer that has a state "
                "(if there is none: Ctrl-C, and start without resuming)",
                self._keeper.place,
            )
            return None
        return base.open(about)


def _terms(place: Place, num_bytes: int) -> Terms:
    # At a broker coming back takes longer: what was under way is lost with the connection.
    graces = _GRACES / 2 if isinstance(place.address, AmqpAddress) else _GRACES
    return Terms(
        beat_s=min(1.0, place.lease_s / _BEATS),
        lease_s=place.lease_s,
        grace_s=min(1.0, place.lease_s / graces),
        watch_bytes=max(Terms().watch_bytes, _WATCHED * num_bytes),
    )
