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
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from difflib import get_close_matches
from types import TracebackType
from typing import Any, Self, cast

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from manyhands.core.address import LocalAddress
from manyhands.core.errors import AddressError, NoMeetingPoint, SettingsError, UsageError
from manyhands.core.peers import PeerId
from manyhands.core.settings import find_meeting_point, find_outage
from manyhands.data.source import Source
from manyhands.observe.events import Happening
from manyhands.replica.journal import Own
from manyhands.replica.loader import Evaluation
from manyhands.replica.options import Options, Place, RoundClosed
from manyhands.replica.session import Session
from manyhands.replica.state import OWN, Stateful

log = logging.getLogger(__name__)

_LONGEST_S = 86400.0  # that links take a lease of


class Mean:
    """A scalar over all peers. `float(mean)` is its newest value: NaN before the first.

    Said before `backward()` it is that of the round which that closes; said after, it comes with
    the next one.
    """

    def __init__(self, known: Mapping[str, tuple[int, float]], name: str) -> None:
        self._known, self._name = known, name

    @property
    def round(self) -> int | None:
        """Of which round the newest value is; if of an evaluation, how many came before it."""
        known = self._known.get(self._name)
        return None if known is None else known[0]

    def __float__(self) -> float:
        known = self._known.get(self._name)
        return float("nan") if known is None else known[1]

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}={float(self)}, round={self.round})"


class Agreed(Mean):
    """One peer's word, the same at all peers after the same round. False before the first."""

    def __bool__(self) -> bool:
        return not math.isnan(float(self)) and float(self) != 0.0


class Run:
    """One peer's part in a run. Used by one thread; leaving the `with` block leaves the run."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._registered: dict[str, Stateful] = {}
        self._session: Session | None = None

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
        evaluation: Any = None,  # noqa: ANN401
        **options: Any,  # noqa: ANN401
    ) -> tuple[Any, Any, Any, Any]:
        """Train this model in rounds; returns all four, for the loop that stays the user's.

        Model, optimizer and scheduler (or a list of them) are the same objects; the loader is
        another one. The loader given is torch's DataLoader or `manyhands.data.Loader`, and its
        batch size that of a whole round, whoever takes part. With `epochs` the run has an end.
        `evaluation` is such a loader too: see the property. `options`: see `options.Options`.
        """
        if self._session is not None:
            raise UsageError("this run has its model", hint="wrap once")
        known = [field.name for field in fields(Options)]
        if unknown := sorted(set(options) - set(known)):
            near = get_close_matches(unknown[0], known, 1) or known
            raise UsageError(
                f"wrap() has no option {unknown[0]!r}", hint=f"perhaps {', '.join(near)}"
            )
        resume = os.environ.get("MANYHANDS_RESUME")  # as `manyhands run` says
        options.setdefault("resume", resume if resume == "auto" else resume == "1")
        source = Source.of(loader, global_batch)
        if source.seed and source.seed != self._place.seed:
            raise UsageError(
                f"the loader has seed {source.seed}, the run {self._place.seed}, whose order it is",
                hint=f"mh.join(..., seed={source.seed}), and a loader without one",
            )
        optimizers = _as_list(optimizer)
        schedulers = [] if scheduler is None else _as_list(scheduler)
        _warn_of_schedules(optimizers, [*schedulers, *self._registered.values()])
        self._session = Session(
            self._place,
            Options(grain_size=grain_size, epochs=epochs, **options),
            source,
            None if evaluation is None else Source.of(evaluation),
            model,
            optimizers,
            schedulers,
            self._registered,
        )
        return model, optimizer, self._session.loader, scheduler

    def register(self, **things: Stateful) -> None:
        """More that belongs to the state (a GradScaler, an average of the weights), by name.

        Before `wrap`. Each has `state_dict` and `load_state_dict`, and changes in the loop only.
        """
        if self._session is not None:
            raise UsageError("register() came after wrap()", hint="register first")
        for name, thing in things.items():
            if name in OWN:
                raise UsageError(
                    f"register({name}=...): a run's state has its own {name}",
                    hint=f"give it another name, {name}_2 say",
                )
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise UsageError(
                    f"register({name}=...): a {type(thing).__name__} has no state_dict() and "
                    "load_state_dict()",
                    hint="both are needed to save it, to send it to who joins late, and to undo "
                    "what a pass has done to it",
                )
        self._registered |= things

    def mean(self, value: Tensor | float, name: str = "loss") -> Mean:
        """The mean over the whole round of a number that is one over this pass."""
        if isinstance(value, Tensor):
            value = value.detach()
            # A GPU is not waited for before the pass has ended. The tensor stays the user's.
            value = value.clone() if value.is_cuda and value.numel() == 1 else float(value)
        self._at_work.replica.say(name, value)
        return Mean(self._at_work.scalars.known, name)

    def agree(self, value: float, name: str = "agreed") -> Agreed:
        """This peer's word on what is no mean over samples: a clock, a file, a person's wish.

        With each round's record comes, under a name, the word of the first of the roster that has
        said one before its part of the round went out; by that all peers decide alike, whoever
        dies. Said before `backward()` it can be known right after. Who joins later knows only what
        is said again: say it in every round.
        """
        self._at_work.scalars.give_word(name, float(value))
        return Agreed(self._at_work.scalars.agreed, name)

    def weight(self, value: float) -> None:
        """This pass counts so much (tokens, say) instead of its samples. Before `backward()`."""
        self._at_work.replica.weight(value)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Like torch's, with the norm that all peers have in common."""
        return self._at_work.replica.clip_grad_norm_(max_norm)

    def no_sync(self) -> AbstractContextManager[None]:
        """For all backwards of an iteration but the last: they only accumulate."""
        return self._at_work.replica.no_sync()

    @property
    def round(self) -> int:
        """Rounds that this peer has applied."""
        return self._at_work.round

    @property
    def round_closed(self) -> bool:
        """Whether steps act now: the last pass, or evaluation, has closed its round here.

        What a loop does once a round, or at the end of an epoch, belongs under it; a peer that
        comes late, or is about to leave, runs past that without.
        """
        return self._at_work.replica.round_closed

    @property
    def evaluation(self) -> Evaluation:
        """After every epoch, this peer's share of `wrap(..., evaluation=...)`, batch by batch."""
        if self._at_work.evaluation is None:
            raise UsageError("there is nothing to evaluate", hint="wrap(..., evaluation=LOADER)")
        return self._at_work.evaluation

    @property
    def evaluated(self) -> dict[str, float]:
        """What was said with `mean` in the evaluation that has just ended, over all its samples.

        The same at all peers; empty again once the next round is closed.
        """
        known = self._at_work.scalars.known
        return {name: mean for name, (at, mean) in known.items() if at == self.round}

    @property
    def roster(self) -> tuple[PeerId, ...]:
        """Who takes part, in order."""
        return self._at_work.roster

    @property
    def is_leader(self) -> bool:
        """Whether this peer is the first of the roster: the one that saves and prints."""
        return self.roster[:1] == (self._at_work.me,)

    @property
    def events(self) -> Sequence[Own]:
        """What this peer has seen happen, newest last."""
        return tuple(self._at_work.events)

    def tell(self, what: str, text: str = "") -> None:
        """An event of this peer's, for the log of the run: it reaches all peers with a round.

        `what` it is, in a word or two; a text of 240 bytes at most. From any thread.
        """
        self._at_work.scalars.news.tell(what, text)

    def happened(self) -> list[Happening]:
        """What has happened to the run since this was last called: to any of its peers.

        Who has joined and left, what was refused, what peers have told: see `tell`. Called in every
        round it is the same at all peers, in the same order. There is one caller; in a Trainer's
        run it is the Trainer, which gives it to its loggers.
        """
        conductor = self._at_work.conductor
        record = conductor.base.record
        members = () if record is None else record.members
        return self._at_work.events.take(self.round, members, conductor.rounds.name_of)

    def waiting(self) -> list[Happening]:
        """What this peer has told, and no round has brought back yet."""
        return self._at_work.events.waiting()

    def on_round(self, listener: Callable[[RoundClosed], None]) -> None:
        """Call it in this thread whenever a round is closed, before `backward()` returns."""
        self._at_work.listeners.append(listener)

    def save(self) -> None:
        """Save the state once this round is over; where, `wrap(..., checkpoints=...)` says.

        The first of the roster does: call it at all peers. One that becomes the first later has
        not forgotten it.
        """
        self._at_work.save()

    def digest(self) -> bytes:
        """Of the whole state: equal at all peers of one kind after the same round."""
        return self._at_work.state.digest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is None:
            return
        try:
            if kind is None:
                if self._session.loader.epoch < 0 and self.round == 0:
                    log.warning("nothing was trained: iterate over the loader that wrap() returns")
                self._session.finish()
        finally:
            self._session.close()

    @property
    def _at_work(self) -> Session:
        if self._session is None:
            raise UsageError("this run has no model yet", hint="call run.wrap(...) first")
        return self._session


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
    few = _count(os.environ.get("MANYHANDS_MIN_PEERS", "1")) if min_peers is None else min_peers
    if type(few) is not int or few < 1:
        raise UsageError(f"min_peers={few!r}", hint="a number of peers, 1 or more")
    if type(lease_s) not in (int, float) or not 0 < lease_s <= _LONGEST_S:
        raise UsageError(f"lease_s={lease_s!r}", hint="seconds, 10 say; a day at most")
    try:
        point = find_meeting_point(url, run=run, name=name, environ=os.environ)
    except NoMeetingPoint:
        address = LocalAddress(run=f"alone-{secrets.token_hex(4)}")
        return Run(Place(address=address, name=name, lease_s=lease_s, seed=seed))
    if point.address.run is None:
        raise AddressError(
            f"{point.address} names no run", hint="pass run=NAME, or set MANYHANDS_RUN"
        )
    return Run(
        Place(
            address=point.address,
            name=point.name,
            min_peers=few,
            lease_s=lease_s,
            outage_s=find_outage(os.environ),
            seed=seed,
        )
    )


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise SettingsError(f"MANYHANDS_MIN_PEERS is {text!r}", hint="a number of peers, 1 or more")
    return int(text)


def _as_list(thing: Any) -> list[Any]:  # noqa: ANN401
    return list(cast("Sequence[Any]", thing)) if isinstance(thing, list | tuple) else [thing]


def _warn_of_schedules(optimizers: Sequence[Optimizer], known: Sequence[object]) -> None:
    """Of optimizers whose steps a scheduler of torch's counts, where none is known at all: a mere
    warning, since nobody can say whether it is still in use.
    """
    if any(hasattr(thing, "step") for thing in known):
        return
    for optimizer in optimizers:
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            log.warning(
                "%s has a scheduler that wrap() was not given: who resumes or joins late begins "
                "it anew, and it steps in passes that are undone; "
                "wrap(model, optimizer, loader, scheduler)",
                type(optimizer).__name__,
            )
