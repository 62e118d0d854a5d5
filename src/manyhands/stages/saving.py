"""Saving: a plan's state, each stage's written by its first peer, readable by any other plan.

    stage-0000-0003/round-...            parameters and optimizer state of layers 0 to 2
    stage-0003-0007/round-...            ... of layers 3 to 6
    steps-000000000120.json              written last: from here on the checkpoint counts

Everything is kept by layer and parameter, so it can be cut anew for other peers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from torch.optim import Optimizer

from manyhands.checkpoint.folder import open_folder
from manyhands.checkpoint.store import Checkpoint, Store
from manyhands.core.errors import CheckpointError
from manyhands.core.plan import Plan, Stage
from manyhands.stages.layers import Running

log = logging.getLogger(__name__)

_NAME = re.compile(r"steps-(\d{12,18})\.json")
VERSION = 1


class Shard(msgspec.Struct, frozen=True):
    """The layers [first, end), by name, and the folder that they are in."""

    folder: str
    layers: tuple[str, ...]


class Index(msgspec.Struct, frozen=True):
    """What makes the shards of one step a checkpoint."""

    manyhands_stages: int
    num_steps: int
    shards: tuple[Shard, ...]
    extra: dict[str, Any]


def shard_of(plan: Plan, stage: Stage) -> Shard:
    """Where a stage's state goes."""
    names = tuple(layer.name for layer in plan.layers[stage.first : stage.end])
    return Shard(f"stage-{stage.first:04}-{stage.end:04}", names)


def write_shard(
    url: str, shard: Shard, num_steps: int, tree: Mapping[str, Any], *, keep: int
) -> None:
    """Raises CheckpointError."""
    store = Store(f"{url}/{shard.folder}", keep=keep)
    about = {"layers": list(shard.layers)}
    store.save(Checkpoint(round=num_steps, chain=b"", about=about, tree=dict(tree)))


def write_index(url: str, index: Index, *, keep: int) -> None:
    """After all shards: from here on the checkpoint counts. Raises CheckpointError."""
    folder = open_folder(url)
    folder.put(f"steps-{index.num_steps:012}.json", msgspec.json.encode(index))
    for num_steps in _steps_in(folder.sizes())[keep:]:
        folder.remove(f"steps-{num_steps:012}.json")


def steps_in(url: str) -> list[int]:
    """Of the checkpoints that are there, newest first. Raises CheckpointError."""
    return _steps_in(open_folder(url).sizes())


def _steps_in(names: Iterable[str]) -> list[int]:
    return sorted((int(m[1]) for m in map(_NAME.fullmatch, names) if m), reverse=True)


def read_index(url: str, num_steps: int) -> Index:
    """Raises CheckpointError."""
    folder = open_folder(url)
    name = f"steps-{num_steps:012}.json"
    with folder.open(name) as file:
        text = file.read(1 << 24)
    try:
        index = msgspec.json.decode(text, type=Index)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{folder.locate(name)} cannot be read: {error}") from None
    if index.manyhands_stages > VERSION:
        raise CheckpointError(
            f"{folder.locate(name)} is of format {index.manyhands_stages}, this release reads up "
            f"to {VERSION}",
            hint="update manyhands",
        )
    return index


def read_layers(url: str, index: Index, names: Iterable[str]) -> dict[str, Any]:
    """The state of these layers, by name. Raises CheckpointError."""
    wanted = dict.fromkeys(names)
    found: dict[str, Any] = {}
    for shard in index.shards:
        own = [name for name in shard.layers if name in wanted]
        if not own:
            continue
        came = Store(f"{url}/{shard.folder}").load(index.num_steps)
        if came.checkpoint is None:
            reasons = "; ".join(broken.reason for broken in came.broken) or "it is missing"
            raise CheckpointError(
                f"step {index.num_steps}: {shard.folder} in {url} cannot be read: {reasons}"
            )
        found |= {name: came.checkpoint.tree[name] for name in own}
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(
            f"the checkpoint of step {index.num_steps} in {url} has no layer {missing[0]!r}",
            hint=f"it has: {', '.join(n for shard in index.shards for n in shard.layers)}",
        )
    return found


def state_of(layer: Running, optimizer: Optimizer | None) -> dict[str, Any]:
    """A layer's parameters and buffers, and what the optimizer keeps for each parameter."""
    kept: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    groups = {} if optimizer is None else _groups(optimizer)
    for name, parameter in layer.module.named_parameters():
        if optimizer is not None and id(parameter) in groups:
            kept[name] = dict(optimizer.state.get(parameter, {}))
            settings[name] = groups[id(parameter)]
    return {"module": layer.module.state_dict(), "optimizer": kept, "settings": settings}


def _groups(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        found |= {id(parameter): settings for parameter in group["params"]}
    return found


def restore(
    layers: Iterable[Running], states: Mapping[str, Any], optimizer: Optimizer | None
) -> None:
    """Put a saved state in its place. Raises CheckpointError for what does not fit."""
    kept: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for layer in layers:
        state = states[layer.name]
        try:
            layer.module.load_state_dict(state["module"])
        except RuntimeError as error:
            raise CheckpointError(f"{layer.said} is another one than was saved: {error}") from None
        for name, parameter in layer.module.named_parameters():
            if name in state["optimizer"]:
                kept[id(parameter)] = state["optimizer"][name], state["settings"][name]
    if optimizer is None:
        return
    whole = optimizer.state_dict()
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole["state"] = {
        number: kept[id(parameter)][0]
        for number, parameter in enumerate(order)
        if id(parameter) in kept and kept[id(parameter)][0]
    }
    for group, saved in zip(optimizer.param_groups, whole["param_groups"], strict=True):
        first = next((kept[id(p)][1] for p in group["params"] if id(p) in kept), None)
        if first is not None:
            saved.update(first)
    optimizer.load_state_dict(whole)
