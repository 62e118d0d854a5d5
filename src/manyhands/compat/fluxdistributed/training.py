"""Train: one thread a device, in one process. For supervised learning: x, and a label for it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from manyhands.compat.fluxdistributed.buffer import Buffer, same_bits, tensors_of
from manyhands.compat.fluxdistributed.errors import NotSynced
from manyhands.compat.fluxdistributed.feed import Feed
from manyhands.compat.fluxdistributed.hands import PATIENCE_S, run_hands
from manyhands.compat.fluxdistributed.logs import log_for
from manyhands.compat.fluxdistributed.loop import Course, Loop, OnOom, Outcome, Replica
from manyhands.compat.fluxdistributed.metrics import Judge, is_batch
from manyhands.compat.fluxdistributed.optimizers import Opt, Schedule, pace_for
from manyhands.compat.fluxdistributed.pictures import table_of
from manyhands.compat.fluxdistributed.saving import Standing, Where, find
from manyhands.compat.fluxdistributed.setup import Setup, kind_of
from manyhands.compat.fluxdistributed.step import LossFn, check_reduction
from manyhands.core.errors import UsageError
from manyhands.data.fetch import generators_kept
from manyhands.data.imagenet import Solutions
from manyhands.data.source import check_whole
from manyhands.stages.carrier import Carrier

VAL_SAMPLES = 300  # of a table, each time: FluxDistributed's number


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `train` has made of it."""

    models: list[tuple[torch.device, nn.Module]]
    """Each device and its replica, in the machine's memory; all are equal."""
    steps: int
    """That were taken, those before a resume too."""
    skipped: int
    """That were not, because memory ran out."""
    history: list[dict[str, float]]
    """What was logged: a row has its `step`."""


def train(
    loss: LossFn,
    setup: Setup,
    buffer: Buffer,
    opt: Opt | None = None,
    *,
    val: Any = None,  # noqa: ANN401
    sched: Schedule | None = None,
    log_every: int = 10,
    eval_every: int = 50,
    on_oom: OnOom = "skip",
    logger: Any = None,  # noqa: ANN401
    save: Where | None = None,
    resume: Where | bool | None = None,
    val_samples: int | None = VAL_SAMPLES,
    val_transform: Callable[[Any], Any] | None = None,
    timeout_s: float = PATIENCE_S,
) -> Result:
    """Train the replicas of a setup, all in step; the same as one device with all of the rows.

    `loss(output, labels)` is the mean over rows. `opt`, if it is another one than the setup's,
    takes its place. `val` is a batch, (x, y), or a table, of which the same `val_samples` are
    looked at each time (None: all); `val_transform` makes x of what is read of it, else that of the
    training does with the rows of `train_solutions`. `sched(step, optimizer)` is called before each
    step, counted from 0, in each device's thread, and may return the learning rate; or it is a
    torch scheduler of `opt`.

    When a device runs out of memory, all of them skip the step, or take it in smaller pieces
    ("split"), or what it raised is raised here; replicas stay equal in each case. Steps are
    logged to `logger` (or that of `with_logger`, or the console) each `log_every`; each
    `eval_every` there is an evaluation and, with `save`, a checkpoint in that folder or URL, and
    so at the end. `resume`: where to go on from; True: from `save`, if there is something. Without
    it, there must be no checkpoints in `save`. `timeout_s` is for the slowest device: a step, an
    evaluation, a checkpoint.

    Blocks. Raises UsageError, TrainingBroken, CheckpointError, and what a device raised. Nothing is
    left running.
    """
    check_options(
        loss, log_every=log_every, eval_every=eval_every, on_oom=on_oom, sched=sched, val=val
    )
    _check_fit(setup, buffer)
    if opt is not None and opt is not setup.opt:
        setup.optimize(opt)
    judge = judge_for(setup, loss, val, val_samples, val_transform)
    course = course_for(
        *(setup, loss, tuple(map(str, setup.devices)), map(kind_of, setup.devices)),
        log_every=log_every,
        eval_every=eval_every,
        on_oom=on_oom,
        save=save,
    )
    replicas = _replicas(setup, buffer, sched)
    found = find(resume, save, setup.terms)
    if found is not None:
        for replica in replicas:
            replica.load(found.tree)
    standing = Standing() if found is None else found.standing
    check_equal(setup)
    with log_for(logger, params_of(setup), first=standing.step) as log_row, generators_kept():

        def act(rank: int, carrier: Carrier) -> Outcome:
            now = msgspec.structs.replace(standing)  # each counts for itself, all alike
            feed = feed_for(setup, rank, len(setup.devices), now.step)
            try:
                return Loop(
                    *(course, replicas[rank], feed),
                    everybody=carrier,
                    crew=carrier,
                    standing=now,
                    judge=judge,
                    log_row=log_row,
                ).run()
            finally:
                feed.close()

        outcomes = run_hands(setup.devices, act, timeout_s=timeout_s)
    check_equal(setup)
    return result_of(setup, outcomes[0])


def check_options(
    loss: LossFn,
    *,
    log_every: int,
    eval_every: int,
    on_oom: str,
    sched: object,
    val: object,
) -> None:
    """Of any kind of training. Raises UsageError."""
    check_reduction(loss)
    for name, value in {"log_every": log_every, "eval_every": eval_every}.items():
        if check_whole(name, value) < 1:
            raise UsageError(f"{name}={value}", hint="at least 1")
    if on_oom not in ("skip", "split", "raise"):
        raise UsageError(f"on_oom={on_oom!r}", hint='"skip", "split" or "raise"')
    if isinstance(sched, ReduceLROnPlateau) and val is None:
        raise UsageError(
            "a plateau is one of evaluations, and there are none", hint="val=..., or another sched"
        )


def params_of(setup: Setup) -> dict[str, object]:
    """What a logger is told before the first row."""
    options = setup.options
    return {
        "devices": ", ".join(map(str, setup.devices)),
        "optimizer": type(setup.optimizers[0]).__name__,
        "batchsize": options.batchsize,
        "rows": setup.source.batch,
        "samples": setup.source.size,
        "steps": setup.steps,
        "seed": options.seed,
    }


def _check_fit(setup: Setup, buffer: Buffer) -> None:
    if len(buffer) != len(setup.devices):
        raise UsageError(
            f"a buffer of {len(buffer)} slots for {len(setup.devices)} devices",
            hint="use the setup and the buffer that one prepare_training has returned",
        )


def course_for(
    setup: Setup,
    loss: LossFn,
    names: tuple[str, ...],
    kinds: Iterable[object],
    *,
    log_every: int,
    eval_every: int,
    on_oom: OnOom,
    save: Where | None,
) -> Course:
    """What all devices know."""
    return Course(
        loss=loss,
        steps=setup.steps,
        terms=setup.terms,
        calendar=setup.calendar,
        names=names,
        on_oom=on_oom,
        log_every=log_every,
        eval_every=eval_every,
        save=save,
        mixed=len(set(kinds)) > 1,
    )


def judge_for(
    setup: Setup,
    loss: LossFn,
    val: Any,  # noqa: ANN401
    samples: int | None,
    transform: Callable[[Any], Any] | None,
) -> Judge | None:
    """For the evaluation; rows of `train_solutions` are of the val split here."""
    if val is None:
        return None
    options = setup.options
    made = partial(table_of, val, classes=None, split="val", bad=options.bad)
    if isinstance(val, Solutions):
        val = made(dataset=options.dataset, transform=transform or options.transform)
    elif transform is not None:
        if is_batch(val):
            raise UsageError(
                "val_transform, and val is a batch", hint="a batch is taken as it is: leave it out"
            )
        val = made(dataset=None, transform=transform)
    return Judge(
        *(val, loss),
        batchsize=setup.batchsize,
        samples=samples,
        seed=options.seed,
        bad=options.bad,
    )


def feed_for(setup: Setup, rank: int, world: int, first: int) -> Feed:
    """One device's rows from a step on."""
    return Feed(
        setup.source,
        seed=setup.options.seed,
        bad=setup.options.bad,
        rank=rank,
        world=world,
        first=first,
        ahead=setup.options.buffersize,
    )


def _replicas(setup: Setup, buffer: Buffer, sched: Schedule | None) -> list[Replica]:
    # On a device that several share, and so its generator, numbers come in no certain order.
    shared = Counter(setup.devices)
    return [
        Replica(
            model=setup.models[rank],
            optimizer=setup.optimizers[rank],
            pace=pace_for(sched, setup.opt, setup.optimizers[rank]),
            slot=buffer[rank],
            device=device,
            chance=shared[device] == 1,
        )
        for rank, device in enumerate(setup.devices)
    ]


def check_equal(setup: Setup) -> None:
    """All replicas are equal, to the bit. Raises NotSynced, with device and tensor."""
    first = tensors_of(setup.models[0])
    for rank, model in enumerate(setup.models[1:], 1):
        for name, tensor in tensors_of(model).items():
            if not same_bits(tensor, first[name]):
                raise NotSynced(
                    f"{name} of replica {rank} ({setup.devices[rank]}) is not that of replica 0"
                )


def result_of(setup: Setup, outcome: Outcome) -> Result:
    """For the user."""
    now = outcome.standing
    return Result(
        models=[
            (device, _here(model))
            for device, model in zip(setup.devices, setup.models, strict=True)
        ],
        steps=now.step - now.skipped,
        skipped=now.skipped,
        history=outcome.history,
    )


def _here(model: nn.Module) -> nn.Module:
    """In the machine's memory: itself, or a copy."""
    if all(tensor.device.type == "cpu" for tensor in tensors_of(model).values()):
        return model
    return copy.deepcopy(model).cpu()
