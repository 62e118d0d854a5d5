"""Dealing: a plan for the peers that are here, from what layers cost and what peers have."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.core.plan import Plan, PlanError, ScheduleName
from manyhands.planner.cost import LayerCost, PeerPower
from manyhands.planner.memory import free_memory
from manyhands.planner.partition import By, DoesNotFit, Shortage
from manyhands.planner.partition import partition as partition_costs
from manyhands.planner.profile import Ran, profile_layers
from manyhands.stages.carrier import Carrier, carrier_for, exchanging
from manyhands.stages.errors import PlanBroken
from manyhands.stages.layers import Carried, Model, Running, Spec, build, specs_of
from manyhands.stages.resume import again, gone
from manyhands.stages.variables import Scope, scoped
from manyhands.stages.vote import sayable, words_of

_SPEED_S = 0.05  # how long a peer's speed is measured
_SIDE = 256


class _Dealt(msgspec.Struct, frozen=True):
    """What the first peer found: a plan, or why there is none."""

    plan: str = ""
    error: str | None = None
    layer: int | None = None  # to blame for it
    hint: str | None = None
    shortage: Shortage | None = None  # of memory


class _Member(msgspec.Struct, frozen=True):
    """What a peer says of itself, or why it cannot."""

    power: PeerPower = PeerPower(name="")
    memory: str = ""  # whose it is: those who name the same one share it
    error: str | None = None


def partition(
    model: Model,
    inputs: Carried | None = None,
    *,
    by: By = "auto",
    microbatches: int = 1,
    schedule: ScheduleName = "1f1b",
    chunks: int = 1,
    recompute: bool = False,
    extra: Mapping[str, Tensor] | None = None,
    group: dist.ProcessGroup | Carrier | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Plan:
    """A plan of one peer a stage for the peers of the group, all of which call this alike.

    by="memory" deals the layers in proportion to free memory, "time" so that the slowest stage is
    as fast as can be, "auto" the same within everybody's memory. The first peer measures the
    layers, one at a time, on the rows of one microbatch of `inputs`. Raises PlanError, on all
    peers alike; its subclass DoesNotFit says by how much and where. Raises PlanBroken when a peer
    is gone.
    """
    device = torch.device(device)
    carrier = carrier_for(group, device)
    with _surviving(carrier):
        peers = _gather(carrier, _member(device))
    said = None
    if carrier.rank == 0:
        try:
            costs = profile(model, inputs, microbatches, extra=extra, device=device, seed=seed)
            plan = partition_costs(
                costs,
                peers,
                by=by,
                microbatches=microbatches,
                schedule=schedule,
                chunks=chunks,
                recompute=recompute,
            )
            dealt = _Dealt(plan.to_json())
        except DoesNotFit as error:
            dealt = _Dealt(shortage=error.shortage)
        except ManyhandsError as error:
            dealt = _Dealt(
                error=sayable(error.message),
                layer=error.layer if isinstance(error, PlanError) else None,
                hint=error.hint and sayable(error.hint),
            )
        except Exception as error:  # noqa: BLE001  (told to everybody)
            dealt = _Dealt(error=f"the layers cannot be measured: {words_of(error)}")
        said = msgspec.json.encode(dealt)
    with _surviving(carrier):
        dealt = msgspec.json.decode(carrier.say(said, 0), type=_Dealt)
    if dealt.shortage is not None:
        raise DoesNotFit(dealt.shortage)
    if dealt.error is not None:
        raise PlanError(dealt.error, layer=dealt.layer, hint=dealt.hint)
    return Plan.from_json(dealt.plan)


def profile(
    model: Model,
    inputs: Carried | None,
    microbatches: int = 1,
    *,
    extra: Mapping[str, Tensor] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[LayerCost]:
    """What each layer costs for one microbatch, measured here, one layer at a time."""
    if inputs is None:
        raise UsageError(
            "the first peer was given no inputs to measure with",
            hint="pass a batch on rank 0: mh.partition(model, x)",
        )
    if microbatches < 1:
        raise UsageError(f"{microbatches} microbatches", hint="1 is the whole batch at once")
    device = torch.device(device)
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    rows = -(-len(parts[0]) // microbatches)  # of the largest one
    cut = tuple(part[:rows].to(device) for part in parts)
    given = {name: tensor[:rows].to(device) for name, tensor in (extra or {}).items()}

    def run(module: nn.Module, carried: Carried, variables: Mapping[str, Tensor]) -> Ran:
        known = {**given, **variables}
        scope = Scope(known)
        with scoped(scope):
            output = Running(module, 0, type(module).__name__).run(carried, scope)
        gives = {name: t for name, t in scope.values.items() if name not in known}
        return Ran(output, gives, {name: scope.values[name] for name in scope.popped})

    return list(
        profile_layers(
            _layers(specs_of(model), device, seed),
            cut[0] if isinstance(inputs, Tensor) else cut,
            run=run,
            device=device,
        )
    )


def _layers(
    specs: list[nn.Module | Spec], device: torch.device, seed: int
) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    for index, spec in enumerate(specs):
        yield str(index), partial(build, spec, index, seed=seed, device=device)


@contextmanager
def _surviving(carrier: Carrier) -> Generator[None]:
    """Whoever is left of those who deal hears how to begin again."""
    try:
        with exchanging():
            yield
    except PlanBroken as error:
        num_gone = len(gone(error.message)) or 1
        command = again(carrier.size, os.environ, sys.argv, num_gone=num_gone)
        error.hint = f"to begin again with the peers that are left: {command}"
        raise


def _member(device: torch.device) -> _Member:
    """This peer. What goes wrong is for everybody to hear."""
    try:
        return _Member(_power(device), _memory(device))
    except Exception as error:  # noqa: BLE001  (told to everybody)
        return _Member(error=words_of(error))


def _power(device: torch.device) -> PeerPower:
    """This peer's free memory, and how many small products a second it does."""
    a = torch.ones(_SIDE, _SIDE, device=device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    torch.mm(a, a)
    wait()
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < _SPEED_S:
        torch.mm(a, a)
        wait()
        count += 1
    name = f"{socket.gethostname().split('.')[0]}-{os.getpid()}"
    return PeerPower(name=name, memory_bytes=free_memory(device), speed=count / spent)


def _memory(device: torch.device) -> str:
    """The memory that a device uses: the machine's, or that of one GPU, by its UUID."""
    if device.type == "cuda":
        # torch does not say of which type they are.
        properties = cast("Any", torch.cuda.get_device_properties(device))  # pyright: ignore[reportUnknownMemberType]
        return f"GPU {properties.uuid}"
    return f"{device.type} of {socket.gethostname()}"


def _gather(carrier: Carrier, own: _Member) -> list[PeerPower]:
    """Everybody's, by rank; speeds relative to the first one's. Raises PlanError on all alike."""
    said = [
        carrier.say(msgspec.json.encode(own) if rank == carrier.rank else None, rank)
        for rank in range(carrier.size)
    ]
    members = [msgspec.json.decode(words, type=_Member) for words in said]
    for rank, member in enumerate(members):
        if member.error is not None:
            raise PlanError(
                f"peer {rank} cannot say what it has: {member.error}",
                hint="device= is where that peer can compute",
            )
    first = members[0].power.speed
    memories = [member.memory for member in members]

    def seen_by_all(rank: int, power: PeerPower, memory: str) -> PeerPower:
        # Peers of one machine may share a name with those of another.
        host, free = power.name.rpartition("-")[0], power.memory_bytes
        return msgspec.structs.replace(
            power,
            name=f"{rank}-{host}",
            speed=power.speed / first,
            memory_bytes=None if free is None else free // memories.count(memory),
        )

    return [seen_by_all(rank, m.power, m.memory) for rank, m in enumerate(members)]
