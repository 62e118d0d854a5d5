"""Processes: workers that compute gradients, and a main process that puts them together.

    main        syncgrads: rank 0, adds up and sends back, holds no replica
    worker n    getgrads:  rank n, one device, one replica

They meet as ranks of one group over a link (FluxDistributed's `rcs` and `updated_grads_channel` in
one): the main process's own hub, or any other that all can dial. `start` does all of it on one
machine.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import torch
from torch import nn

from manyhands.collectives.backend.group import ManyhandsGroup
from manyhands.collectives.backend.open import open_group
from manyhands.compat.fluxdistributed.ballot import confirm, share, tell_all, vote
from manyhands.compat.fluxdistributed.buffer import Layout, Slot, tensors_of
from manyhands.compat.fluxdistributed.errors import NotSynced
from manyhands.compat.fluxdistributed.feed import Bad
from manyhands.compat.fluxdistributed.hands import PATIENCE_S, using
from manyhands.compat.fluxdistributed.logs import log_for
from manyhands.compat.fluxdistributed.loop import Loop, OnOom, Outcome, Replica
from manyhands.compat.fluxdistributed.optimizers import Opt, Schedule, pace_for
from manyhands.compat.fluxdistributed.saving import Standing, Where, find
from manyhands.compat.fluxdistributed.setup import (
    Device,
    Options,
    Setup,
    kind_of,
    prepare,
    resolve,
)
from manyhands.compat.fluxdistributed.step import LossFn
from manyhands.compat.fluxdistributed.training import (
    VAL_SAMPLES,
    Result,
    check_options,
    course_for,
    feed_for,
    judge_for,
    params_of,
    result_of,
)
from manyhands.core.address import Address
from manyhands.core.errors import Malformed, UsageError
from manyhands.core.settings import OUTAGE, find_outage
from manyhands.links.base import LinkSettings
from manyhands.stages.carrier import AloneCarrier, Carrier, GroupCarrier
from manyhands.wire.tensors import bytes_of

MEET_S = 300.0  # for the slowest worker to start
OUTAGE_S = 5.0  # for a main process that is gone: nobody waits longer
_CPU = torch.device("cpu")


def connect(
    where: str | Address,
    *,
    rank: int,
    workers: int,
    meet_s: float = MEET_S,
    timeout_s: float = PATIENCE_S,
    outage_s: float | None = None,
) -> ManyhandsGroup:
    """Meet the others: rank 0 is the main process, 1 to `workers` are the workers.

    Returns when all are there. Whoever opens it closes it, by `shutdown()`. A meeting point that
    goes away is looked for, for `outage_s`, else MANYHANDS_OUTAGE seconds, else OUTAGE_S. Raises
    LinkError, and SettingsError.
    """
    if outage_s is None:
        outage_s = find_outage(os.environ) if os.environ.get(OUTAGE) else OUTAGE_S
    settings = LinkSettings(outage_s=outage_s)
    return open_group(
        where, rank=rank, world=workers + 1, timeout_s=timeout_s, meet_s=meet_s, settings=settings
    )


@dataclass(frozen=True, kw_only=True)
class Synced:
    """What the main process has seen, and the first worker's model when all were done."""

    steps: int
    skipped: int
    state: dict[str, Any]
    history: list[dict[str, float]]


def syncgrads(group: ManyhandsGroup, *, verbose: bool = False) -> Synced:
    """In the main process: take the gradients of all workers, give each of them their mean.

    Blocks until all workers are done. Raises LinkError, which names whoever is gone. With
    `verbose`, a line on stderr for each step.
    """
    everybody = GroupCarrier(group, _CPU)
    group.part_of(range(1, group.size()))  # the workers' own, of which this is none
    try:
        layout = msgspec.json.decode(everybody.say(None, 1), type=Layout)
    except msgspec.DecodeError as error:
        raise Malformed(f"worker 1 told no layout of a model: {error}") from None
    slot, steps = Slot(layout, _CPU), 0
    while True:
        verdict = vote(everybody, layout)
        if verdict.done:
            break
        if verdict.short or not verdict.total:
            continue
        slot.weigh(0.0, ())
        slot.add_up(everybody, verdict.used)
        confirm(everybody)
        steps += 1
        if verbose:
            sys.stderr.write(f"step {steps}: {verdict.total} rows, loss {verdict.loss:.6g}\n")
    tree = share(everybody, None, 1)
    return Synced(
        steps=tree["steps"], skipped=tree["skipped"], state=tree["model"], history=tree["history"]
    )


def getgrads(
    loss: LossFn,
    model: nn.Module,
    key: Any,  # noqa: ANN401
    opt: Opt,
    batchsize: int = 48,
    *,
    group: ManyhandsGroup,
    device: Device | None = None,
    epochs: int | None = None,
    cycles: int = 5,
    classes: Iterable[int] | None = None,
    buffersize: int = 5,
    dataset: Any = "imagenet_local",  # noqa: ANN401
    seed: int = 0,
    transform: Callable[[Any], Any] | None = None,
    drop_last: bool = False,
    bad: Bad = "raise",
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
) -> Result:
    """In a worker: train with all others, as `train` does; `batchsize` is this worker's.

    All workers pass the same; they begin with the first worker's values of the model. That one
    logs and saves, and reads what is resumed. Raises what `train` raises, and LinkError.
    """
    check_options(
        loss, log_every=log_every, eval_every=eval_every, on_oom=on_oom, sched=sched, val=val
    )
    rank, num_workers = group.rank() - 1, group.size() - 1
    if rank < 0:
        raise UsageError("rank 0 is the main process", hint="it runs syncgrads(group)")
    place = worker_device(device, rank)
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
    everybody = GroupCarrier(group, place)
    setup, buffer = prepare(model, key, (place,), opt, options, world=num_workers)
    crew = _crew(group, place)
    if rank == 0:
        everybody.say(msgspec.json.encode(buffer.layout), 1)
    else:
        _check_layout(everybody.say(None, 1), buffer.layout)
    replica = Replica(
        model=setup.models[0],
        optimizer=setup.optimizers[0],
        pace=pace_for(sched, opt, setup.optimizers[0]),
        slot=buffer[0],
        device=place,
    )
    standing = _begin(replica, crew, setup, resume, save)
    names = tuple(f"worker {number}" for number in range(1, num_workers + 1))
    _check_equal(replica, crew, names)
    course = course_for(
        *(setup, loss, names, tell_all(crew, kind_of(place).encode())),
        log_every=log_every,
        eval_every=eval_every,
        on_oom=on_oom,
        save=save,
    )
    judge = judge_for(setup, loss, val, val_samples, val_transform)
    feed = feed_for(setup, rank, num_workers, standing.step)
    params = params_of(setup)
    logged = log_for(logger, params, first=standing.step) if rank == 0 else nullcontext()
    try:
        with logged as log_row, using(place):
            outcome = Loop(
                *(course, replica, feed),
                everybody=everybody,
                crew=crew,
                standing=standing,
                judge=judge,
                log_row=log_row,
            ).run()
    finally:
        feed.close()
    _check_equal(replica, crew, names)
    share(everybody, _told(replica, outcome) if rank == 0 else None, 1)
    return result_of(setup, outcome)


def check_call(*arguments: Any, **options: Any) -> None:  # noqa: ANN401
    """Raises for what `getgrads` would refuse by itself, without anybody to meet: TypeError,
    UsageError.
    """
    bound = inspect.signature(getgrads).bind(*arguments, group=None, **options)
    bound.apply_defaults()
    given = bound.arguments
    names = ("log_every", "eval_every", "on_oom", "sched", "val")
    check_options(given["loss"], **{name: given[name] for name in names})
    given["classes"] = None  # they may be such as can be gone through only once
    Options(**{field.name: given[field.name] for field in fields(Options)})


def worker_device(device: Device | None, rank: int) -> torch.device:
    """That one; else a GPU by the worker's number, if there are any, else the CPU."""
    if device is not None:
        return resolve(device)[0]
    found = resolve(None)
    return found[rank % len(found)]


def _crew(group: ManyhandsGroup, place: torch.device) -> Carrier:
    part = group.part_of(range(1, group.size()))
    assert part is not None
    return AloneCarrier() if part.size() == 1 else GroupCarrier(part, place)


def _check_layout(told: bytes, own: Layout) -> None:
    if told != msgspec.json.encode(own):
        raise UsageError(
            "this worker's model is not that of worker 1: other tensors, or other sizes",
            hint="all workers must build the same model",
        )


def _begin(
    replica: Replica, crew: Carrier, setup: Setup, resume: Where | bool | None, save: Where | None
) -> Standing:
    """The first worker's state for all: what it was given, or what it finds to go on from."""
    mine: dict[str, Any] | None = None
    buffers = dict(replica.model.named_buffers())
    for name in replica.model.state_dict():
        buffers.pop(name, None)  # the rest is in no checkpoint
    if crew.rank == 0:
        found = find(resume, save, setup.terms)
        standing = Standing() if found is None else found.standing
        tree = replica.state() if found is None else found.tree
        mine = {"standing": msgspec.to_builtins(standing), "replica": tree, "buffers": buffers}
    told = share(crew, mine, 0)
    replica.load(told["replica"])
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(told["buffers"][name])
    return msgspec.convert(told["standing"], Standing)


def _check_equal(replica: Replica, crew: Carrier, names: tuple[str, ...]) -> None:
    """All replicas are equal, to the bit: buffers that no state_dict has, too.

    All workers call it; raises NotSynced, in all of them.
    """
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors_of(replica.model).values():
        digest.update(bytes_of(tensor.detach().cpu().contiguous()))
    found = tell_all(crew, digest.digest())
    odd = [name for name, said in zip(names, found, strict=True) if said != found[0]]
    if odd:
        raise NotSynced(
            f"the replica of {', '.join(odd)} is not that of {names[0]}",
            hint="is it the same code and the same version of torch on all of them?",
        )


def _told(replica: Replica, outcome: Outcome) -> dict[str, Any]:
    now = outcome.standing
    return {
        "steps": now.step - now.skipped,
        "skipped": now.skipped,
        "model": replica.model.state_dict(),
        "history": outcome.history,
    }


def model_of(model: nn.Module, synced: Synced) -> nn.Module:
    """A copy of the user's model with what the workers have made of it."""
    made = copy.deepcopy(model).cpu()
    made.load_state_dict(synced.state)
    return made
