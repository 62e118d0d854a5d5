"""Setup: a model on several devices, which are named here, ready to be trained on a table."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.compat.fluxdistributed.buffer import Buffer
from manyhands.compat.fluxdistributed.feed import Bad
from manyhands.compat.fluxdistributed.optimizers import Opt, optimizer_for
from manyhands.compat.fluxdistributed.pictures import table_of
from manyhands.compat.fluxdistributed.saving import Terms
from manyhands.core.errors import UsageError
from manyhands.data.calendar import Calendar
from manyhands.data.imagenet import class_ids
from manyhands.data.source import Source, check_whole

Device = torch.device | str | int
"""A torch.device, its name, or the number of a GPU."""

_HINT = 'name them: ["cuda:0", "cuda:1"], ["cpu", "cpu"]; or None for all GPUs, else the CPU'


def resolve(devices: Sequence[Device] | Device | None) -> tuple[torch.device, ...]:
    """The devices by name; None is every GPU that is visible, or the CPU if there is none.

    One that is named twice has two replicas. Raises UsageError for one that is not here.
    """
    if devices is None:
        found = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        return tuple(found) or (torch.device("cpu"),)
    named = [devices] if isinstance(devices, str | int | torch.device) else list(devices)
    if not named:
        raise UsageError("a training on no device", hint=_HINT)
    return tuple(_one(device) for device in named)


def _one(name: Device) -> torch.device:
    try:
        device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{name!r} is no device: {reason}", hint=_HINT) from None
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise UsageError(
                f"{device} is not here: torch sees {torch.cuda.device_count()} GPUs", hint=_HINT
            )
    else:
        _try(device)
    return device


def _try(device: torch.device) -> None:
    """Raises UsageError if torch cannot use it, or was built without it."""
    try:
        torch.empty(1, device=device).add_(1)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise UsageError(f"{device} is not here: {reason}", hint=_HINT) from None


def kind_of(device: torch.device) -> str:
    """What its arithmetic depends on: of two kinds, the last bits differ."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return device.type


@dataclass(kw_only=True)
class Setup:
    """What `prepare_training` makes. The replicas are in `models`, one for each device."""

    devices: tuple[torch.device, ...]
    models: list[nn.Module]
    optimizers: list[Optimizer]
    opt: Opt
    template: nn.Module
    """The user's model, of which replicas are copies; it stays as it was."""
    source: Source
    """The table and the rows of a step, over all devices."""
    steps: int
    options: Options

    @property
    def batchsize(self) -> int:
        """The rows of one device in a step."""
        return self.options.batchsize

    @property
    def calendar(self) -> Calendar:
        """Which rows of which epoch a step covers."""
        return Calendar(self.source.size, self.source.batch, self.source.drop_last)

    @property
    def terms(self) -> Terms:
        """What a checkpoint must be of."""
        source = self.source
        return Terms(source.size, source.batch, self.options.seed, source.drop_last)

    def optimize(self, opt: Opt) -> None:
        """Other optimizers for the replicas as they are."""
        pairs = [optimizer_for(opt, self.template, replica) for replica in self.models]
        self.optimizers, self.opt = pairs, opt


class Prepared(NamedTuple):
    """`setup, buffer = prepare_training(...)`."""

    setup: Setup
    buffer: Buffer


def prepare_training(
    model: nn.Module,
    key: Any,  # noqa: ANN401
    devices: Sequence[Device] | Device | None = None,
    opt: Opt | None = None,
    batchsize: int | None = None,
    *,
    epochs: int | None = None,
    cycles: int = 5,
    classes: Iterable[int] | None = None,
    buffersize: int = 5,
    dataset: Any = "imagenet_local",  # noqa: ANN401
    seed: int = 0,
    transform: Callable[[Any], Any] | None = None,
    drop_last: bool = False,
    bad: Bad = "raise",
) -> Prepared:
    """A replica of `model`, an optimizer and a gradient buffer for each device.

    `key`: the rows of `train_solutions`, whose pictures are in `dataset` (a name of the registry, a
    `Path`, a URL or a tree), or any table of (x, label): a map-style torch data set. `batchsize` is
    that of one device. The training has `epochs` epochs, each sample once in each, or without it
    `cycles` steps. `classes` keeps rows of these ids only, which count from 0 and stay what they
    are. `transform` makes x of what is read; what it draws from `mh.data.generator()` is the same
    at any number of devices. `bad` samples, such as files that are no image, end the training
    ("raise"), are left out ("skip"), or others take their place ("replace"); they are counted.
    Raises UsageError.

    Call it in one thread; when it returns, everything is in place and nothing runs.
    """
    if opt is None or batchsize is None:
        missing = "opt" if opt is None else "batchsize"
        raise UsageError(
            f"prepare_training without {missing}",
            hint="prepare_training(model, key, devices, opt, batchsize): opt is a function of the "
            "parameters or an optimizer, batchsize the rows of one device",
        )
    places = resolve(devices)
    options = Options(
        batchsize=batchsize,
        epochs=epochs,
        cycles=cycles,
        classes=classes,
        buffersize=buffersize,
        dataset=dataset,
        seed=seed,
        transform=transform,
        drop_last=drop_last,
        bad=bad,
    )
    return prepare(model, key, places, opt, options, world=len(places))


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `prepare_training` is told beside model, key, devices and optimizer."""

    batchsize: int
    epochs: int | None
    cycles: int
    classes: Iterable[int] | None
    buffersize: int
    dataset: Any
    seed: int
    transform: Callable[[Any], Any] | None
    drop_last: bool
    bad: Bad

    def __post_init__(self) -> None:
        for name in ("batchsize", "buffersize", "cycles", "epochs", "seed"):
            if (given := getattr(self, name)) is None:
                continue
            value = check_whole(name, given)
            if value < 1 and name != "seed":
                raise UsageError(f"{name}={value}", hint="at least 1")
            object.__setattr__(self, name, value)  # a plain one, for checkpoints
        if self.classes is not None:
            object.__setattr__(self, "classes", class_ids(self.classes))


def prepare(
    model: nn.Module,
    key: Any,  # noqa: ANN401
    places: tuple[torch.device, ...],
    opt: Opt,
    options: Options,
    *,
    world: int,
) -> Prepared:
    """For those of `world` devices that this process has."""
    table = table_of(
        key,
        dataset=options.dataset,
        transform=options.transform,
        classes=options.classes,
        split="train",
        bad=options.bad,
    )
    source = Source(dataset=table, batch=options.batchsize * world, drop_last=options.drop_last)
    calendar = Calendar(source.size, source.batch, source.drop_last)
    epochs = options.epochs
    # One by one, in this thread: whatever a copy or an optimizer draws, it draws in one order.
    models = [copy.deepcopy(model).to(device) for device in places]
    setup = Setup(
        devices=places,
        models=models,
        optimizers=[optimizer_for(opt, model, replica) for replica in models],
        opt=opt,
        template=model,
        source=source,
        steps=options.cycles if epochs is None else epochs * calendar.rounds_per_epoch,
        options=options,
    )
    return Prepared(setup, Buffer(model, places))
