"""Plan: on which peers each layer runs, and how the batch is split over them.

    Plan.of_stages([(3, [0]), (2, [1, 2]), (4, [0, 1, 2])], microbatches=8)

Model parallel is a plan with one peer a layer, data parallel one with all peers at every layer;
pipeline and burst parallel lie between them. A plan is a value: it can be compared, written as JSON
and drawn as text, and it is valid or cannot be made.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Real
from typing import Any, Literal, Self, get_args

import msgspec

from manyhands.core.errors import UsageError

VERSION = 1
MOST = 100_000
"""Layers, peers and microbatches: no machine could carry out more, and lists are made of them."""
_SHARES = (1e-100, 1e100)  # sums and products with rows are numbers

ScheduleName = Literal["afab", "1f1b", "interleaved"]
"""All forward then all backward; one forward, one backward; the same with several stages a peer."""


class PlanError(UsageError):
    """A plan that no runtime can carry out; `layer` is the index of the layer to blame, if any."""

    def __init__(self, message: str, *, layer: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.layer = layer


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer: its name, the peers that hold it (indexes), and each peer's share of the rows.

    Shares are relative: (1, 1) halves every microbatch, (3, 1) gives the first peer three quarters.
    Without shares all are equal.
    """

    name: str
    peers: tuple[int, ...]
    shares: tuple[float, ...] = ()

    @property
    def split(self) -> tuple[float, ...]:
        """The shares, written out."""
        return self.shares or (1.0,) * len(self.peers)


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on the same peers with the same split: layers[first:end] of the plan."""

    index: int
    first: int
    end: int
    peers: tuple[int, ...]
    split: tuple[float, ...]

    @property
    def lead(self) -> int:
        """The peer that speaks for the stage."""
        return self.peers[0]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Layers in order, the peers by name (a peer's index is its rank), microbatches, schedule."""

    layers: tuple[Layer, ...]
    peers: tuple[str, ...]
    microbatches: int = 1
    schedule: ScheduleName = "1f1b"
    recompute: bool = False  # keep a stage's inputs instead of its activations

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def of_stages(
        cls,
        stages: Iterable[tuple[int, Sequence[int]] | tuple[int, Sequence[int], Sequence[float]]],
        *,
        names: Sequence[str] | None = None,
        peers: Sequence[str] | None = None,
        microbatches: int = 1,
        schedule: ScheduleName = "1f1b",
        recompute: bool = False,
    ) -> Self:
        """From (number of layers, peers) or (number of layers, peers, shares) of each stage."""
        rows = [_stage_of(index, row) for index, row in enumerate(stages)]
        num_layers = sum(row[0] for row in rows)
        _check_count("layers", num_layers)
        if names is not None and len(names) != num_layers:
            raise PlanError(
                f"the stages have {num_layers} layers, {len(names)} names were given",
                hint="give each layer a name, or none of them: they are numbered then",
            )
        for index, row in enumerate(rows):
            if row[0] < 1:
                raise PlanError(f"stage {index} has {row[0]} layers", hint="give it at least one")
        if peers is None:
            num_peers = 1 + max((peer for row in rows for peer in row[1]), default=0)
            _check_count("peers", num_peers)
            peers = [str(index) for index in range(num_peers)]
        layers: list[Layer] = []
        for count, of_stage, shares in rows:
            for _ in range(count):
                name = names[len(layers)] if names is not None else str(len(layers))
                layers.append(Layer(name, of_stage, shares))
        return cls(
            layers=tuple(layers),
            peers=tuple(peers),
            microbatches=microbatches,
            schedule=schedule,
            recompute=recompute,
        )

    @classmethod
    def even(
        cls,
        num_layers: int,
        num_peers: int,
        *,
        stages_per_peer: int = 1,
        names: Sequence[str] | None = None,
        peers: Sequence[str] | None = None,
        microbatches: int = 1,
        schedule: ScheduleName | None = None,
        recompute: bool = False,
    ) -> Self:
        """A pipeline with as many layers in each stage, or one more in the first ones.

        With several stages a peer they go round all peers, which is what `"interleaved"` needs:
        then that is the schedule, unless you name one.
        """
        num_stages = num_peers * stages_per_peer
        _check_count("stages", num_stages)
        _check_count("layers", num_layers)
        if num_stages < 1:
            raise PlanError(
                f"{num_peers} peers with {stages_per_peer} stages each",
                hint="at least one peer and one stage",
            )
        if num_layers < num_stages:
            stages = f"{num_peers} peers with {stages_per_peer} stages each need {num_stages}"
            if stages_per_peer == 1:
                stages = f"{num_peers} peers with a stage each need {num_peers}"
            raise PlanError(
                f"the model has {num_layers} layers, {stages}",
                hint="take fewer peers or stages, or several peers for a layer (Plan.of_stages)",
            )
        size, larger = divmod(num_layers, num_stages)
        return cls.of_stages(
            [(size + (stage < larger), [stage % num_peers]) for stage in range(num_stages)],
            names=names,
            peers=peers,
            microbatches=microbatches,
            schedule=schedule or ("interleaved" if stages_per_peer > 1 else "1f1b"),
            recompute=recompute,
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The layers, grouped."""
        return _group(self.layers)

    def stages_of(self, peer: int) -> tuple[Stage, ...]:
        """Those in which a peer takes part, in the order of the layers."""
        return tuple(stage for stage in self.stages if peer in stage.peers)

    def replace(self, **changes: Any) -> Self:  # noqa: ANN401  (fields of any type)
        """The same plan with other values for some fields. Raises PlanError."""
        return msgspec.structs.replace(self, **changes)

    def to_json(self) -> str:
        """As text; `from_json` gives an equal plan back."""
        return msgspec.json.encode(_Written(manyhands_plan=VERSION, plan=self)).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Raises PlanError for what is no plan, or one that a newer release wrote."""
        try:
            version = msgspec.json.decode(text, type=_Version).manyhands_plan
            if version > VERSION:
                raise PlanError(
                    f"this plan is of format {version}, this release reads up to {VERSION}",
                    hint="update manyhands",
                )
            return msgspec.json.decode(text, type=_Written).plan
        except (msgspec.DecodeError, UnicodeError, OverflowError, RecursionError) as error:
            raise PlanError(
                f"this is no plan: {str(error)[:400]}",
                hint="what plan.to_json() gives is expected, unchanged and whole",
            ) from None

    def picture(self) -> str:
        """As text: a line a stage, a column a peer, each with its share of the rows."""
        names = [f"{s.index}: {_layer_range(self, s)}" for s in self.stages]
        left = max(len(name) for name in [*names, "stage"])
        widths = [max(len(name), 4) for name in self.peers]
        lines = ["stage".ljust(left) + "  " + "  ".join(map(str.center, self.peers, widths))]
        for name, stage in zip(names, self.stages, strict=True):
            total = sum(stage.split)
            shares = {
                peer: f"{share / total:.0%}"
                for peer, share in zip(stage.peers, stage.split, strict=True)
            }
            cells = [shares.get(peer, ".").center(width) for peer, width in enumerate(widths)]
            lines.append(name.ljust(left) + "  " + "  ".join(cells))
        recompute = ", activations computed anew" if self.recompute else ""
        plural = "" if self.microbatches == 1 else "es"
        lines.append(f"{self.microbatches} microbatch{plural}, {self.schedule}{recompute}")
        return "\n".join(line.rstrip() for line in lines)


@lru_cache(maxsize=64)  # asked for in every step
def _group(layers: tuple[Layer, ...]) -> tuple[Stage, ...]:
    found: list[Stage] = []
    for index, layer in enumerate(layers):
        if found and (found[-1].peers, found[-1].split) == (layer.peers, layer.split):
            found[-1] = replace(found[-1], end=index + 1)
        else:
            found.append(Stage(len(found), index, index + 1, layer.peers, layer.split))
    return tuple(found)


class _Version(msgspec.Struct):
    manyhands_plan: int


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    manyhands_plan: int
    plan: Plan


def _stage_of(index: int, row: Any) -> tuple[int, tuple[int, ...], tuple[float, ...]]:  # noqa: ANN401  (what a user wrote)
    try:
        count, peers, *shares = row
        split = tuple(map(_plain, tuple(*shares)))
        return operator.index(count), tuple(map(operator.index, peers)), split
    except (TypeError, ValueError):
        raise PlanError(
            f"stage {index} is {row!r}",
            hint="expected (number of layers, [peers]) or (number of layers, [peers], [shares])",
        ) from None


def _plain(share: Any) -> Any:  # noqa: ANN401  (what a user wrote)
    """Of numpy's numbers Python's own: those can be written as JSON."""
    own = isinstance(share, int) or type(share) is float
    return share if own or not isinstance(share, Real) else float(share)


def _layer_range(plan: Plan, stage: Stage) -> str:
    first, last = plan.layers[stage.first].name, plan.layers[stage.end - 1].name
    return first if stage.end - stage.first == 1 else f"{first} .. {last}"


def _check_count(what: str, count: Any) -> None:  # noqa: ANN401  (what users pass)
    if not isinstance(count, int) or isinstance(count, bool):
        raise PlanError(f"{what} = {count!r:.100}", hint="a whole number is expected")
    if count > MOST:
        raise PlanError(f"{count} {what}", hint=f"a plan has at most {MOST}")


def _check_tuples(said: str, **parts: object) -> None:
    for what, part in parts.items():
        if not isinstance(part, tuple):
            raise PlanError(
                f"the {what} of {said} are a {type(part).__name__}",
                hint="a tuple is expected: a plan cannot be changed",
            )


def _check(plan: Plan) -> None:
    if not plan.layers:
        raise PlanError("the plan has no layers", hint="give it those of the model, in order")
    for what in ("layers", "peers"):
        _check_count(what, len(getattr(plan, what)))
    _check_tuples("the plan", layers=plan.layers, peers=plan.peers)
    _check_count("microbatches", plan.microbatches)
    if not isinstance(plan.recompute, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"recompute = {plan.recompute!r:.100}", hint="True or False is expected")
    if plan.microbatches < 1:
        raise PlanError(f"{plan.microbatches} microbatches", hint="1 is the whole batch at once")
    if plan.schedule not in get_args(ScheduleName):
        known = ", ".join(get_args(ScheduleName))
        raise PlanError(f"there is no schedule {plan.schedule!r}", hint=f"there are: {known}")
    if len(set(plan.peers)) < len(plan.peers):
        twice = next(name for name in plan.peers if plan.peers.count(name) > 1)
        raise PlanError(
            f"two peers are named {twice!r}", hint="give each a name of its own, or no names"
        )
    for what, named in (("peer", plan.peers), ("layer", [layer.name for layer in plan.layers])):
        for index, name in enumerate(named):
            # JSON would not give another one back.
            if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise PlanError(
                    f"{what} {index} has the name {name!r:.100}",
                    layer=index if what == "layer" else None,
                    hint="names are texts",
                )
    names: dict[str, int] = {}
    for index, layer in enumerate(plan.layers):
        said = f"layer {index} ({layer.name})"
        if layer.name in names:
            raise PlanError(
                f"{said} has the name of layer {names[layer.name]}",
                layer=index,
                hint="checkpoints are kept by name: give each layer one of its own",
            )
        names[layer.name] = index
        _check_tuples(said, peers=layer.peers, shares=layer.shares)
        if not layer.peers:
            raise PlanError(
                f"{said} is on no peer", layer=index, hint="give it at least one: [0] is the first"
            )
        for peer in layer.peers:
            if not 0 <= peer < len(plan.peers):
                raise PlanError(
                    f"{said} is on peer {peer}, the plan has peers 0 to {len(plan.peers) - 1}",
                    layer=index,
                    hint="peers are numbers, the first is 0; or name more of them (peers=...)",
                )
        if len(set(layer.peers)) < len(layer.peers):
            raise PlanError(
                f"{said} names a peer twice: {list(layer.peers)}",
                layer=index,
                hint="name it once; shares say how many of the rows it takes",
            )
        if layer.shares and len(layer.shares) != len(layer.peers):
            raise PlanError(
                f"{said} has {len(layer.peers)} peers and {len(layer.shares)} shares",
                layer=index,
                hint="give a share for each peer, or none: then all are equal",
            )
        for share in layer.shares:
            number = type(share) in (int, float)  # JSON would not give another one back
            if not number or not _SHARES[0] <= share <= _SHARES[1]:
                raise PlanError(
                    f"{said} gives a peer a share of {share!r:.100}",
                    layer=index,
                    hint="shares are relative: (3, 1) is three quarters and one",
                )
    used = {peer for layer in plan.layers for peer in layer.peers}
    idle = [name for index, name in enumerate(plan.peers) if index not in used]
    if idle:
        shown = [*idle[:8], *(["..."] if len(idle) > 8 else [])]
        raise PlanError(
            f"{', '.join(shown)}: no layer for {'this peer' if len(idle) == 1 else 'these peers'} "
            f"({len(plan.layers)} layers, {len(plan.peers)} peers)",
            hint="leave them out of the plan, or give a layer to several peers",
        )
