"""Optimizers: one for each replica, and schedules that reach all of them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyhands.core.errors import UsageError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Opt = MakeOptimizer | Optimizer
Schedule = Callable[[int, Optimizer], float | None] | LRScheduler

_HINT = (
    "a function of the parameters, such as functools.partial(torch.optim.SGD, lr=0.01), or an "
    "optimizer of the model"
)

_SCHED = (
    "a function (step, optimizer), which may return the learning rate, or a torch scheduler of "
    "opt; None is FluxDistributed's identity"
)


def optimizer_for(opt: Opt, model: nn.Module, replica: nn.Module) -> Optimizer:
    """For a replica of `model`: made by a function, or like an optimizer of `model`, state and all.

    Raises UsageError for an optimizer of something else.
    """
    if not isinstance(opt, Optimizer):
        made = opt(replica.parameters()) if callable(opt) else None
        if not isinstance(made, Optimizer):
            raise UsageError(f"opt={opt!r} makes no optimizer", hint=_HINT)
        return _checked(made)
    _checked(opt)
    pairs = zip(model.parameters(), replica.parameters(), strict=True)
    ours = {id(parameter): twin for parameter, twin in pairs}
    if any(id(p) not in ours for group in opt.param_groups for p in group["params"]):
        raise UsageError("opt is an optimizer of other parameters than the model's", hint=_HINT)
    # Whatever the copy refers to among the model's parameters becomes the replica's.
    twin = copy.deepcopy(opt, cast("dict[int, Any]", dict(ours)))
    twin.load_state_dict(twin.state_dict())  # which takes its state to the replica's device
    return twin


def _checked(optimizer: Optimizer) -> Optimizer:
    """Raises UsageError for one that steps by calling the model itself."""
    if isinstance(optimizer, LBFGS):
        raise UsageError(
            "LBFGS calls its closure several times a step, and a step here has one gradient",
            hint="any optimizer that steps without a closure: SGD, Adam, ...",
        )
    return optimizer


class Pace(Protocol):
    """When the learning rate of one replica's optimizer changes."""

    kind: str
    """The class of a torch scheduler, whose state is of use to its like; of a function "": it has
    none."""

    def before(self, step: int) -> None:
        """A step, counted from 0, is about to be taken."""
        ...

    def after(self) -> None:
        """It was taken, or skipped: rates depend on the number of the step alone."""
        ...

    def scored(self, loss: float) -> None:
        """An evaluation has this loss."""
        ...

    def state(self) -> Any:  # noqa: ANN401
        """For a checkpoint: plain values."""
        ...

    def load(self, state: Any) -> None:  # noqa: ANN401
        """From a checkpoint."""
        ...


def pace_for(sched: Schedule | None, opt: Opt, optimizer: Optimizer) -> Pace:
    """For one replica. Call it in one thread: a scheduler is copied, with what it refers to."""
    if isinstance(sched, LRScheduler):
        if sched.optimizer is not opt:
            raise UsageError(
                f"{type(sched).__name__} is of another optimizer than opt",
                hint="pass the optimizer that it was made with as opt; or a function "
                "sched(step, optimizer), which may return the learning rate",
            )
        return _Scheduled(sched, opt, optimizer)
    if sched is not None and not callable(sched):
        raise UsageError(f"sched={sched!r}", hint=_SCHED)
    if sched is not None and not _takes_both(sched, optimizer):
        raise UsageError(f"sched={sched!r} does not take (step, optimizer)", hint=_SCHED)
    return _Called(sched, optimizer)


def _takes_both(sched: Callable[..., Any], optimizer: Optimizer) -> bool:
    """Whether a function can be called as schedules are; of some nobody can tell."""
    try:
        signature = inspect.signature(sched)
    except ValueError:
        return True
    try:
        signature.bind(0, optimizer)
    except TypeError:
        return False
    return True


class _Called:
    """A function of (step, optimizer); a number that it returns is the learning rate."""

    kind = ""

    def __init__(
        self, sched: Callable[[int, Optimizer], float | None] | None, optimizer: Optimizer
    ) -> None:
        self._sched, self._optimizer = sched, optimizer

    def before(self, step: int) -> None:
        rate = None if self._sched is None else self._sched(step, self._optimizer)
        if rate is not None:
            set_rate(self._optimizer, float(rate))

    def after(self) -> None:
        pass

    def scored(self, loss: float) -> None:
        pass

    def state(self) -> Any:  # noqa: ANN401
        return None

    def load(self, state: Any) -> None:  # noqa: ANN401
        pass


class _Scheduled:
    """A torch scheduler, copied so that it turns this optimizer's wheels."""

    def __init__(self, sched: LRScheduler, opt: object, optimizer: Optimizer) -> None:
        self._sched = copy.deepcopy(sched, {id(opt): optimizer})
        self._plateau = isinstance(sched, ReduceLROnPlateau)
        self.kind = type(sched).__name__
        # torch warns of a scheduler whose optimizer it did not see at work. This one does its work.
        step: Callable[..., Any] = optimizer.step

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return step(*args, **kwargs)

        vars(watched)["_wrapped_by_lr_sched"] = True
        vars(optimizer).update(step=watched, _opt_called=True)

    def before(self, step: int) -> None:
        pass

    def after(self) -> None:
        if not self._plateau:
            self._sched.step()

    def scored(self, loss: float) -> None:
        if self._plateau:
            cast("Any", self._sched).step(loss)

    def state(self) -> Any:  # noqa: ANN401
        return self._sched.state_dict()

    def load(self, state: Any) -> None:  # noqa: ANN401
        if state is not None:
            self._sched.load_state_dict(state)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Of all groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def rate_of(optimizer: Optimizer) -> float:
    """Of the first group."""
    return float(optimizer.param_groups[0]["lr"])
