"""Saving: a plan's state, each stage's written by its first peer, readable by any other plan.

    steps-000000000120-18a7...c3/0000-0003/    parameters and optimizer state of layers 0 to 2
    steps-000000000120-18a7...c3/0003-0007/    ... of layers 3 to 6
    steps-000000000120-18a7...c3.json          written last: from here on the checkpoint counts

Everything is kept by layer and parameter, so it can be cut anew for other peers. Each save has a
folder of its own: shards of one can never be taken for those of another, not even of the same step,
and what an older one has stays until a newer one counts.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Protocol, cast

import msgspec
import xxhash
from torch import Tensor
from torch.optim import Optimizer

from manyhands.checkpoint.folder import Folder, open_folder
from manyhands.checkpoint.store import Checkpoint, Store
from manyhands.checkpoint.tree import flatten, unflatten
from manyhands.core.errors import CheckpointError, UsageError, WireError
from manyhands.core.plan import Plan, Stage
from manyhands.stages.layers import Running


class Scheduler(Protocol):
    """Of learning rates, such as those of torch.optim.lr_scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, as a checkpoint can hold them."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Go on from there."""
        ...


_NAME = re.compile(r"steps-(\d{12,18})-([0-9a-f]{24})")
VERSION = 1
_MOST_INDEX_BYTES = 64 << 20


class Save(msgspec.Struct, frozen=True, order=True):
    """One save. They sort by age: by steps, then by when they were begun."""

    num_steps: Annotated[int, msgspec.Meta(ge=0, le=10**18 - 1)]
    token: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{24}$")]  # it becomes a part of paths

    @property
    def folder(self) -> str:
        """Where its shards are."""
        return f"steps-{self.num_steps:012}-{self.token}"

    @property
    def index(self) -> str:
        """The file that is written last."""
        return f"{self.folder}.json"


def new_save(num_steps: int) -> Save:
    """Under a name that nobody else uses."""
    return Save(num_steps, f"{time.time_ns():016x}{secrets.token_hex(4)}")


class Shard(msgspec.Struct, frozen=True):
    """The layers [first, end), and their names."""

    first: int
    end: int
    layers: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Its own, in that of the save."""
        return f"{self.first:04}-{self.end:04}"


class Index(msgspec.Struct, frozen=True):
    """What makes the shards of one save a checkpoint; `extra` is a tree as JSON."""

    num_steps: int
    shards: tuple[Shard, ...]
    extra: Any


class _Written(msgspec.Struct):
    manyhands_stages: int  # the version of the format
    digest: str  # xxh3-128 of the index as it is written
    index: msgspec.Raw


def shard_of(plan: Plan, stage: Stage) -> Shard:
    """Where a stage's state goes."""
    names = tuple(layer.name for layer in plan.layers[stage.first : stage.end])
    return Shard(stage.first, stage.end, names)


def write_shard(
    url: str, save: Save, shard: Shard, tree: Mapping[str, Any], optimizer: str | None = None
) -> None:
    """`optimizer` is the name of its kind. Raises CheckpointError."""
    about = {"layers": list(shard.layers), "save": save.token, "optimizer": optimizer}
    checkpoint = Checkpoint(round=save.num_steps, chain=b"", about=about, tree=dict(tree))
    _store(url, save, shard).save(checkpoint)


def write_index(url: str, save: Save, shards: tuple[Shard, ...], extra: Mapping[str, Any]) -> None:
    """After all shards: from here on the checkpoint counts. Raises CheckpointError; UsageError for
    an `extra` that cannot be saved.
    """
    flat = flatten(dict(extra), "extra")
    if flat.tensors:
        raise UsageError(f"{flat.names[0]} is a tensor", hint="extra is for plain data")
    text = msgspec.json.encode(Index(save.num_steps, shards, flat.shape))
    written = _Written(VERSION, xxhash.xxh3_128_hexdigest(text), msgspec.Raw(text))
    open_folder(url).put(save.index, msgspec.json.encode(written))


def saves_in(url: str) -> list[Save]:
    """Those that count, newest first. Raises CheckpointError."""
    return _saves_in(open_folder(url))


def _saves_in(folder: Folder) -> list[Save]:
    names = [name.removesuffix(".json") for name in folder.sizes() if name.endswith(".json")]
    return sorted(_parsed(names), reverse=True)


def _parsed(names: Iterable[str]) -> list[Save]:
    return [Save(int(m[1]), m[2]) for m in map(_NAME.fullmatch, names) if m]


def prune(url: str, own: Save, *, keep: int) -> None:
    """Remove all but the newest save of each of the newest `keep` steps, and what saves that broke
    off have left; never `own`. Raises CheckpointError.
    """
    folder = open_folder(url)
    newest: dict[int, Save] = {}
    saves = _saves_in(folder)
    for save in saves:
        newest.setdefault(save.num_steps, save)
    kept = {own, *list(newest.values())[:keep]}
    for save in saves:
        if save not in kept:
            folder.remove(save.index)  # first, so that none counts without its shards
    for save in _parsed(folder.folders()):
        if save not in kept:
            folder.drop(save.folder)


def discard(url: str, save: Save) -> None:
    """A save that did not come about: its shards take room. Raises CheckpointError."""
    open_folder(url).drop(save.folder)


def read_index(url: str, save: Save) -> Index:
    """Raises CheckpointError."""
    folder = open_folder(url)
    place = folder.locate(save.index)
    text = bytearray()
    with folder.open(save.index) as file:
        while len(text) <= _MOST_INDEX_BYTES and (piece := file.read(1 << 20)):
            text += piece
    if len(text) > _MOST_INDEX_BYTES:
        raise CheckpointError(f"{place} has more than {_MOST_INDEX_BYTES} bytes: it is no index")
    try:
        written = msgspec.json.decode(text, type=_Written)
        if written.manyhands_stages > VERSION:
            raise CheckpointError(
                f"{place} is of format {written.manyhands_stages}, this release reads up to "
                f"{VERSION}",
                hint="update manyhands",
            )
        if xxhash.xxh3_128_hexdigest(bytes(written.index)) != written.digest:
            raise CheckpointError(f"{place} was changed: its digest is another")
        index = msgspec.json.decode(written.index, type=Index)
    except (msgspec.DecodeError, UnicodeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{place} cannot be read: {error}") from None
    if index.num_steps != save.num_steps:
        raise CheckpointError(f"{place} says that it is of step {index.num_steps}")
    return index


def extra_of(index: Index) -> dict[str, Any]:
    """Raises CheckpointError."""
    try:
        extra = unflatten(index.extra, [])
    except WireError as error:
        raise CheckpointError(f"what was saved as extra cannot be read: {error}") from None
    if not isinstance(extra, dict):
        raise CheckpointError("what was saved as extra is no dict")
    return cast("dict[str, Any]", extra)


def read_layers(
    url: str, save: Save, index: Index, names: Iterable[str], optimizer: str | None = None
) -> dict[str, Any]:
    """The state of these layers, by name, for an optimizer of this kind. Raises CheckpointError."""
    wanted = dict.fromkeys(names)
    found: dict[str, Any] = {}
    for shard in index.shards:
        own = [name for name in shard.layers if name in wanted]
        if not own:
            continue
        came = _store(url, save, shard).load(save.num_steps)
        place = open_folder(url).locate(f"{save.folder}/{shard.folder}")
        if came.checkpoint is None:
            reasons = "; ".join(broken.reason for broken in came.broken) or "it is missing"
            raise CheckpointError(f"{place} cannot be read: {reasons}")
        _check_about(came.checkpoint.about, place, save, optimizer)
        tree = came.checkpoint.tree
        if not isinstance(tree, dict) or not all(name in tree for name in own):
            raise CheckpointError(f"{place} has not the layers that {save.index} says")
        found |= {name: cast("dict[str, Any]", tree)[name] for name in own}
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(
            f"the checkpoint of step {index.num_steps} in {open_folder(url).locate(save.index)} "
            f"has no layer {missing[0]!r}",
            hint=f"it has: {', '.join(n for shard in index.shards for n in shard.layers)}",
        )
    return found


def _check_about(about: Mapping[str, Any], place: str, save: Save, optimizer: str | None) -> None:
    """Older releases wrote neither."""
    if about.get("save", save.token) != save.token:
        raise CheckpointError(
            f"{place} is of another save than {save.index}",
            hint="folders of several checkpoints were mixed: copy a whole one",
        )
    saved = about.get("optimizer")
    if saved is not None and optimizer is not None and saved != optimizer:
        raise CheckpointError(
            f"{place} was saved with the optimizer {saved}, here it is {optimizer}",
            hint=f"make a {saved}; or, for the parameters alone, load into a Pipeline without an "
            "optimizer, then pipe.optimize(...)",
        )


def kind_of(optimizer: Optimizer | None) -> str | None:
    """Its name: what one keeps for a parameter is of no use to another."""
    return None if optimizer is None else type(optimizer).__qualname__


def _store(url: str, save: Save, shard: Shard) -> Store:
    return Store(f"{url.rstrip('/')}/{save.folder}/{shard.folder}")


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


def check_fit(layers: Iterable[Running], states: Mapping[str, Any]) -> None:
    """Whether a saved state can be put in its place, before anything is. Raises CheckpointError."""
    for layer in layers:
        state = states[layer.name]
        if not _is_state(state):
            raise CheckpointError(f"what was saved for {layer.said} is no layer's state")
        saved = cast("dict[str, Any]", state["module"])
        here = layer.module.state_dict()
        for name in [*here, *saved]:
            if name not in saved or name not in here:
                where = "saved" if name in saved else "here"
                what = f"{name} is only {where}"
            elif _form(saved[name]) != _form(here[name]):
                what = f"{name} was saved as {_form(saved[name])}, here it is {_form(here[name])}"
            else:
                continue
            raise CheckpointError(
                f"{layer.said} is another one than was saved: {what}",
                hint="build the model that was saved, or name another place for its checkpoints",
            )


_KEPT = {"module", "optimizer", "settings"}
_RATES = "scheduler"  # not in checkpoints of runs without one


def _is_state(state: object) -> bool:
    """Of the form that `state_of` gives."""
    if not isinstance(state, dict) or set(cast("dict[str, Any]", state)) - {_RATES} != _KEPT:
        return False
    parts = cast("dict[str, dict[str, Any]]", state)
    if not all(isinstance(cast("object", part), dict) for part in parts.values()):
        return False
    return set(parts["optimizer"]) == set(parts["settings"])


def _form(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def restore(
    layers: Iterable[Running], states: Mapping[str, Any], optimizer: Optimizer | None
) -> None:
    """Put a saved state that fits in its place."""
    kept: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for layer in layers:
        state = states[layer.name]
        layer.module.load_state_dict(state["module"])
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


def add_scheduler(states: Mapping[str, Any], scheduler: Scheduler) -> None:
    """To the states of a stage's layers: each has it, so that it is found by any other plan."""
    for state in states.values():
        state[_RATES] = scheduler.state_dict()


def scheduler_in(states: Mapping[str, Any], scheduler: Scheduler | None) -> dict[str, Any] | None:
    """What was saved of the scheduler of whoever had these layers, if one is asked for.

    Raises CheckpointError for one that it does not fit.
    """
    if scheduler is None:
        return None
    found = next((state[_RATES] for state in states.values() if _RATES in state), None)
    if not isinstance(found, dict):
        raise CheckpointError(
            "no scheduler was saved with these layers",
            hint="pass it to save() too: save(url, scheduler=scheduler)",
        )
    saved, here = cast("dict[str, Any]", found), scheduler.state_dict()
    # Names with _ come and go with releases of torch.
    names = {name for name in {*saved} ^ {*here} if not str(name).startswith("_")}
    counts = [len(state.get("base_lrs", ())) for state in (saved, here)]
    if names or counts[0] != counts[1]:
        if names:
            what = f"one of the two has {min(names)!r}"
        else:
            what = f"it was for {counts[0]} groups of parameters, here there are {counts[1]}"
        raise CheckpointError(
            f"the scheduler is another one than was saved: {what}",
            hint="make the scheduler that was saved, or load without one",
        )
    return saved
