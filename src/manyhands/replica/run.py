"""Run: the user's hand on an elastic training. `manyhands.join` makes it.

    with mh.join() as run:
        model, optimizer, loader, scheduler = run.wrap(model, optimizer, loader, scheduler)
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()                # the round closes: p.grad is the mean over all peers
            optimizer.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from torch.nn import Module
from torch.optim import LBFGS, Optimizer

from manyhands.collectives.mail import Mail
from manyhands.collectives.messages import Snapshot
from manyhands.collectives.rounds import Rounds
from manyhands.core.address import Address, LocalAddress
from manyhands.core.errors import LinkTimeout, NoMeetingPoint, SettingsError, UsageError
from manyhands.core.peers import PeerId, PeerState
from manyhands.core.settings import find_meeting_point
from manyhands.data.calendar import Calendar
from manyhands.data.fetch import Fetcher, Request, WorkerFetcher
from manyhands.data.source import Source
from manyhands.links.base import Link, LinkSettings, dial, new_peer
from manyhands.links.messages import Terms
from manyhands.replica import description as words
from manyhands.replica.conductor import Base, Conductor, Event
from manyhands.replica.gates import Gate
from manyhands.replica.gradients import Gradients, Named, parameters_of
from manyhands.replica.loader import Loader, Units
from manyhands.replica.replica import Replica
from manyhands.replica.scalars import Scalars
from manyhands.replica.snapshots import Snapshots
from manyhands.replica.state import Stateful, TrainingState

log = logging.getLogger(__name__)

_BEATS = 10  # of a lease
_STATE_FACTOR, _STATE_SLACK = 16, 64 << 20  # a state is at most so many times its parameters
_WATCHED = 4  # results that a newcomer may be behind
_EVENTS = 1000  # that are kept


class Mean:
    """A scalar over all peers. `float(mean)` is its newest value: NaN before the first.

    Said before `backward()` it is that of the round which that closes; said after, it comes with
    the next one.
    """

    def __init__(self, scalars: Scalars, name: str) -> None:
        self._scalars, self._name = scalars, name

    @property
    def round(self) -> int | None:
        """Of which round the newest value is."""
        known = self._scalars.known.get(self._name)
        return None if known is None else known[0]

    def __float__(self) -> float:
        known = self._scalars.known.get(self._name)
        return float("nan") if known is None else known[1]

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return f"Mean({self._name}={float(self)}, round={self.round})"


class Run:
    """One peer's part in a run. Used by one thread; leaving the `with` block leaves the run."""

    def __init__(
        self, address: Address, name: str | None, *, min_peers: int, lease_s: float, seed: int
    ) -> None:
        self._address, self._name, self._seed = address, name, seed
        self._min_peers, self._lease_s = min_peers, lease_s
        self._scalars = Scalars()
        self._things: dict[str, Stateful] = {}
        self._undone: dict[str, Stateful] = {}
        self._link: Link | None = None
        self._conductor: Conductor | None = None
        self._replica: Replica | None = None
        self._fetcher: Fetcher | WorkerFetcher | None = None
        self._state: TrainingState | None = None
        self._snapshots: Snapshots | None = None
        self._num_rounds: int | None = None
        self.events: deque[Event] = deque(maxlen=_EVENTS)
        """What has happened to the run, newest last."""

    # -- what a user writes ---------------------------------------------------------------------

    def wrap(
        self,
        model: Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loader: Any,  # noqa: ANN401
        scheduler: Any = None,  # noqa: ANN401
        *,
        global_batch: int | None = None,
        grain_size: int | None = None,
        epochs: int | None = None,
        max_pass: int | None = None,
        wire: str = "fp32",
        loss: str = "mean",
        shares: str = "speed",
    ) -> tuple[Any, Any, Any, Any]:
        """Train this model in rounds; returns all four, for the loop that stays the user's.

        Model, optimizer and scheduler are the same objects; the loader is another one. The batch
        size is that of a whole round, whoever takes part. With `epochs` the run has an end.
        """
        if self._conductor is not None:
            raise UsageError("this run has its model", hint="wrap once")
        optimizers = _as_list(optimizer)
        schedulers = [] if scheduler is None else _as_list(scheduler)
        _check_options(optimizers, grain_size, epochs, max_pass, loss, shares)
        source = Source.of(loader, global_batch)
        calendar = Calendar(source.size, source.batch, source.drop_last)
        units = Units(calendar, grain_size or 1)
        self._num_rounds = None if epochs is None else epochs * calendar.rounds_per_epoch
        inner: Module = getattr(model, "_orig_mod", model)  # of one that torch.compile has made
        parameters = parameters_of(inner, optimizers)
        gradients = Gradients(inner, parameters)
        self._things |= {f"optimizer {i}": o for i, o in enumerate(optimizers)}
        self._things |= {f"scheduler {i}": s for i, s in enumerate(schedulers)}
        state = self._state = TrainingState(inner, self._things)
        about = words.describe(
            parameters,
            [Named(n, b) for n, b in inner.named_buffers()],
            optimizers,
            source,
            {
                "batch": source.batch,
                "drop_last": source.drop_last,
                "shuffle": source.shuffle,
                "grain_size": grain_size,
                "epochs": epochs,
                "seed": self._seed,
                "wire": wire,
                "loss": loss,
                "beside": sorted(self._things),
            },
        )
        num_bytes = sum(t.numel() * t.element_size() for t in gradients.like)
        snapshots = self._snapshots = Snapshots(
            about, lambda theirs: _compare(theirs, about), _STATE_FACTOR * num_bytes + _STATE_SLACK
        )

        def connect() -> Rounds:
            if self._link is not None:
                self._link.close()
            mail = Mail()
            self._link = dial(
                self._address, new_peer(self._name), self._link_settings(num_bytes), mail
            )
            rounds = Rounds(
                self._link,
                gradients.like,
                num_samples=units.num,
                num_rounds=self._num_rounds,
                wire=wire,
                refuse=not self._undone,
                num_measured=gradients.num_parameters,
                form="replicas of a model",
                state=snapshots,
                mail=mail,
            )
            rounds.report, rounds.note = self._scalars.report, self._scalars.note
            snapshots.attach(rounds)
            rounds.start()
            return rounds

        gate = Gate()
        for thing in (*optimizers, *schedulers):
            gate.guard(thing, "step")
        chain = words.digest_of(about) + state.digest()
        most = 1 if grain_size else (max_pass or source.batch)
        conductor = self._conductor = Conductor(
            connect, self._take, self._tell, Base(0, chain), most
        )
        self._replica = Replica(
            conductor,
            gradients,
            state,
            self._scalars,
            gate,
            seed=self._seed,
            batch=calendar.num_samples,
            num_samples=units.num_samples,
            undone=self._undone,
            loss=loss,
            balance=shares == "speed",
        )
        self._replica.between = self._serve
        self._replica.watch(model, [p for _, p in parameters])
        self._fetcher = _fetcher_for(source, self._seed, calendar)
        conductor.begin(self._wait_for_peers)
        wrapped = Loader(
            self._replica, conductor, calendar, units, self._fetcher, self._num_rounds
        )
        return model, optimizer, wrapped, scheduler

    def register(self, **things: Stateful) -> None:
        """More that belongs to the state (a GradScaler, an average of the weights), by name.

        Before `wrap`. Each has `state_dict` and `load_state_dict`, and changes in the loop only.
        """
        if self._conductor is not None:
            raise UsageError("register() came after wrap()", hint="register first")
        self._things |= things
        self._undone |= things

    def mean(self, value: Tensor | float, name: str = "loss") -> Mean:
        """The mean over the whole round of a number that is one over this pass."""
        number = float(value.detach()) if isinstance(value, Tensor) else float(value)
        self._at_work().say(name, number)
        return Mean(self._scalars, name)

    def weight(self, value: float) -> None:
        """This pass counts so much (tokens, say) instead of its samples. Before `backward()`."""
        self._at_work().weight(value)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Like torch's, with the norm that all peers have in common."""
        return self._at_work().clip_grad_norm_(max_norm)

    def no_sync(self) -> Any:  # noqa: ANN401
        """For all backwards of an iteration but the last: they only accumulate."""
        return self._at_work().no_sync()

    @property
    def round(self) -> int:
        """Rounds that this peer has applied."""
        return 0 if self._conductor is None else self._conductor.base.applied

    @property
    def roster(self) -> tuple[PeerId, ...]:
        """Who takes part, in order."""
        view = None if self._conductor is None else self._conductor.rounds.view
        return () if view is None else view.peers(PeerState.ACTIVE)

    @property
    def is_leader(self) -> bool:
        """Whether this peer is the first of the roster: the one that saves and prints."""
        roster = self.roster
        return bool(roster) and self._link is not None and roster[0] == self._link.me

    def digest(self) -> bytes:
        """Of the whole state: equal at all peers of one kind after the same round."""
        if self._state is None:
            raise UsageError("there is no state yet", hint="wrap a model first")
        return self._state.digest()

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave, and let go of the model. Idempotent."""
        if self._replica is not None:
            self._replica.close()
        if self._conductor is not None:
            self._conductor.close()
        if self._fetcher is not None:
            self._fetcher.close()
        if self._link is not None:
            self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._conductor is not None and self._replica is not None:
                self._replica.end()
                self._serve(self._conductor.base.applied)
                self._conductor.finish()
        finally:
            self.close()

    # -- within ---------------------------------------------------------------------------------

    def _at_work(self) -> Replica:
        if self._replica is None:
            raise UsageError("this run has no model yet", hint="call run.wrap(...) first")
        return self._replica

    def _link_settings(self, num_bytes: int) -> LinkSettings:
        beat_s = min(1.0, self._lease_s / _BEATS)
        watch = max(Terms().watch_bytes, _WATCHED * num_bytes)
        return LinkSettings(
            terms=Terms(
                beat_s=beat_s,
                lease_s=self._lease_s,
                grace_s=min(1.0, self._lease_s / 2),
                watch_bytes=watch,
            )
        )

    def _wait_for_peers(self, rounds: Rounds) -> None:
        """Until as many have come as the user wants, or the run is under way."""
        waited = False
        while True:
            try:
                rounds.wait_for_view(
                    lambda view: len(view.roster) >= self._min_peers
                    or view.founder is None
                    or view.over,
                    10.0,
                )
            except LinkTimeout:
                view = rounds.view
                here = 0 if view is None else len(view.roster)
                if not waited:
                    log.warning("%d of %d peers are here; waiting", here, self._min_peers)
                waited = True
            else:
                return

    def _take(self, head: Snapshot) -> None:
        assert self._snapshots is not None and self._state is not None
        assert self._replica is not None
        self._state.load(self._snapshots.take(head))
        self._replica.replaced()

    def _serve(self, applied: int) -> None:
        """The state is the one after so many rounds: whoever waits for it gets it now."""
        assert self._snapshots is not None and self._state is not None
        assert self._link is not None
        if self._snapshots.is_due(applied):
            flat = self._state.flat(copy=True)
            self._snapshots.serve(applied, flat, self._link.terms.part_bytes)

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        log.info("%s", event)


def join(
    url: str | None = None,
    *,
    run: str | None = None,
    name: str | None = None,
    min_peers: int | None = None,
    lease_s: float = 10.0,
    seed: int = 0,
) -> Run:
    """Take part in a run. What is left open comes from the environment; without any, alone."""
    environ = os.environ
    if min_peers is None:
        min_peers = _count(environ.get("MANYHANDS_MIN_PEERS", "1"))
    try:
        point = find_meeting_point(url, run=run, name=name, environ=environ)
    except NoMeetingPoint:
        alone = LocalAddress(run=f"alone-{secrets.token_hex(4)}")
        return Run(alone, name, min_peers=1, lease_s=lease_s, seed=seed)
    return Run(point.address, point.name, min_peers=min_peers, lease_s=lease_s, seed=seed)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise SettingsError(f"MANYHANDS_MIN_PEERS is {text!r}", hint="a number of peers, 1 or more")
    return int(text)


def _as_list(thing: Any) -> list[Any]:  # noqa: ANN401
    return list(thing) if isinstance(thing, list | tuple) else [thing]


def _check_options(
    optimizers: Sequence[Optimizer],
    grain_size: int | None,
    epochs: int | None,
    max_pass: int | None,
    loss: str,
    shares: str,
) -> None:
    for name, value in (("grain_size", grain_size), ("epochs", epochs), ("max_pass", max_pass)):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value}", hint="1 or more, or None")
    if loss not in ("mean", "sum"):
        raise UsageError(f"loss={loss!r}", hint='"mean" or "sum": what it is over a batch')
    if shares not in ("speed", "equal"):
        raise UsageError(f"shares={shares!r}", hint='"speed" or "equal"')
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise UsageError(
                "LBFGS calls its closure several times a step, and a round has one backward",
                hint="take an optimizer that steps without a closure, Adam or SGD say",
            )


def _compare(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    if found := words.differences(theirs, mine):
        raise words.Mismatch(found)


def _fetcher_for(source: Source, seed: int, calendar: Calendar) -> Fetcher | WorkerFetcher:
    if not source.workers.num:
        return Fetcher(source, seed)
    return WorkerFetcher(source, seed, _guess(calendar))


def _guess(calendar: Calendar) -> Callable[[Request], Request]:
    """Most often a peer's share of the next round is its share of this one."""

    def guess(request: Request) -> Request:
        moved = tuple(p + calendar.batch for p in request.positions)
        last = calendar.rounds_per_epoch * calendar.batch
        if moved[-1] < min(calendar.size, last):
            return Request(request.epoch, moved)
        return Request(request.epoch + 1, tuple(p % calendar.batch for p in request.positions))

    return guess
