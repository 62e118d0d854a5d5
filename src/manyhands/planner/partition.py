"""Partition: which layers go to which peer. Pure: from costs and powers to a plan.

    partition(costs, [PeerPower(name="a"), PeerPower(name="b", speed=2.0)], by="auto")

Stages are contiguous, one peer a stage, in the order of the peers. The search goes over all places
where stages can end, one stage after another; of all ways to the same place it keeps the best. So
the result is exact: no other partition has a faster slowest stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from manyhands.core.plan import Plan, PlanError, ScheduleName
from manyhands.planner.cost import LayerCost, PeerPower
from manyhands.planner.load import Loads, StageLoad, mib

By = Literal["memory", "time", "auto"]
"""In proportion to free memory; the fastest; the fastest that fits into memory."""

MAX_WAYS = 64
"""Ways to one place that are kept at most, if peers with several stages are short of memory."""

Price = Callable[[StageLoad], float]
Ends = tuple[int, ...]


class Span(msgspec.Struct, frozen=True):
    """Consecutive layers of a model: the index of the first, and all their names."""

    first: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        if len(self.names) == 1:
            return f"layer {self.first} ({self.names[0]})"
        last = self.first + len(self.names) - 1
        return f"layers {self.first} to {last} ({self.names[0]} .. {self.names[-1]})"


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """A peer whose memory is too small for its layers. Plain: it can be told to other peers."""

    peer: str
    spans: tuple[Span, ...]
    state_bytes: int  # parameters, gradients, optimizer
    held_bytes: int  # activations
    free_bytes: int


class DoesNotFit(PlanError):
    """A model that is larger than the peers' memory: where, and by how much.

    Told of the partition that fills the peers most evenly, and there of the peer that lacks most.
    """

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage
        self.peer, self.free_bytes = shortage.peer, shortage.free_bytes
        self.layers = tuple(name for span in shortage.spans for name in span.names)
        self.needed_bytes = shortage.state_bytes + shortage.held_bytes
        where = " and ".join(map(str, shortage.spans))
        super().__init__(
            f"the model does not fit, however it is cut: peer {self.peer} has "
            f"{mib(self.free_bytes)} MiB free and needs {mib(self.needed_bytes)} MiB for {where}, "
            f"{mib(self.missing_bytes)} MiB more ({mib(shortage.state_bytes)} are parameters, "
            f"gradients and optimizer, {mib(shortage.held_bytes)} activations)",
            layer=shortage.spans[0].first,
            hint="add a peer, make the microbatches smaller, keep inputs instead of activations "
            "(recompute=True), or cut a large layer in two",
        )

    @property
    def missing_bytes(self) -> int:
        """How many more the peer would need."""
        return self.needed_bytes - self.free_bytes


def partition(
    costs: Sequence[LayerCost],
    peers: Sequence[PeerPower],
    *,
    by: By = "auto",
    microbatches: int = 1,
    schedule: ScheduleName = "1f1b",
    chunks: int = 1,
    recompute: bool = False,
    bandwidth_bytes_s: float | None = None,
) -> Plan:
    """The plan that gives each peer `chunks` stages of consecutive layers.

    `by`: "memory" fills all peers to the same degree (where no cost says a number of bytes, each
    layer counts the same); "time" makes the slowest stage as fast as can be, whether it fits or
    not; "auto" does so among the plans that fit. With `chunks` > 1 the stages go round the peers so
    many times, and "auto" is exact unless memory is so short that more than MAX_WAYS ways to one
    place are worth keeping. Raises PlanError, and DoesNotFit unless by="time".
    """
    _check(costs, peers, by=by, chunks=chunks, bandwidth_bytes_s=bandwidth_bytes_s)
    loads = Loads(
        costs,
        peers,
        microbatches=microbatches,
        schedule=schedule,
        chunks=1 if len(peers) == 1 else chunks,  # all stages of a single peer are one
        recompute=recompute,
        bandwidth_bytes_s=bandwidth_bytes_s,
    )
    price = _time if by in ("time", "auto") else _share_of_memory(costs, peers)
    ends = _balance(loads, price, within_memory=by != "time")
    if ends is None:
        ends = _balance(loads, _fullness(peers), within_memory=False)
        assert ends is not None
        if lacking := _lacking(loads, ends):
            raise max(lacking, key=lambda error: error.missing_bytes)
    return Plan.of_stages(
        [(load.end - load.first, [load.peer]) for load in _stages(loads, ends)],
        names=[cost.name for cost in costs],
        peers=[peer.name for peer in peers],
        microbatches=microbatches,
        schedule=schedule,
        recompute=recompute,
    )


def _check(
    costs: Sequence[LayerCost],
    peers: Sequence[PeerPower],
    *,
    by: str,
    chunks: int,
    bandwidth_bytes_s: float | None,
) -> None:
    if by not in get_args(By):
        known = ", ".join(get_args(By))
        raise PlanError(f"there is no partition by {by!r}", hint=f"there are: {known}")
    if not peers:
        raise PlanError("there are no peers to give layers to", hint="name at least one")
    if chunks < 1:
        raise PlanError(f"{chunks} chunks", hint="1 is one stage a peer")
    if bandwidth_bytes_s is not None and not bandwidth_bytes_s > 0:
        raise PlanError(f"a bandwidth of {bandwidth_bytes_s} bytes/s", hint="None: do not count it")
    if len(costs) < len(peers) * chunks:
        each = "one" if chunks == 1 else f"{chunks}"
        raise PlanError(
            f"{len(costs)} layers cannot be dealt to {len(peers)} peers, at least {each} to each",
            hint="use fewer peers" + (" or chunks" if chunks > 1 else "") + ", or smaller layers",
        )
    if by != "memory" and not any(cost.time_s for cost in costs):
        raise PlanError(
            f"a partition by {by!r} needs the layers' times, and all are 0",
            hint='measure them (profile_layers), or use by="memory"',
        )


def _time(load: StageLoad) -> float:
    return load.time_s


def _share_of_memory(costs: Sequence[LayerCost], peers: Sequence[PeerPower]) -> Price:
    """How much of its peer's memory a stage takes. A peer without a limit counts as the largest."""
    known = [peer.memory_bytes for peer in peers if peer.memory_bytes is not None]
    largest = max(known, default=1)
    rooms = [largest if p.memory_bytes is None else p.memory_bytes for p in peers]
    sized = any(c.state_bytes or c.activation_bytes or c.output_bytes for c in costs)

    def price(load: StageLoad) -> float:
        weight = load.needed_bytes if sized else load.end - load.first
        return weight / max(rooms[load.peer], 1)

    return price


def _fullness(peers: Sequence[PeerPower]) -> Price:
    def price(load: StageLoad) -> float:
        free = peers[load.peer].memory_bytes
        return 0.0 if free is None else load.needed_bytes / max(free, 1)

    return price


def _balance(loads: Loads, price: Price, *, within_memory: bool) -> Ends | None:
    """Where the stages end, so that the highest price is as low as can be; None: nothing fits."""
    ends = _even(loads, price, within_memory=False)
    assert ends is not None  # there are enough layers, and nothing else was asked
    if within_memory and _lacking(loads, ends):
        return _even(loads, price, within_memory=True)
    return ends


def _even(loads: Loads, price: Price, *, within_memory: bool) -> Ends | None:
    """Of all the best partitions, the one with the smallest sum of squares of the prices.

    So the stages that are not the slowest are alike too.
    """
    ends = _search(loads, price, max, within_memory=within_memory)
    if ends is None:
        return None
    # Sums in another order may differ in their last bits.
    limit = max(price(load) for load in _stages(loads, ends)) * (1 + 1e-9)
    evened = _search(loads, price, _add_square, within_memory=within_memory, limit=limit)
    return evened or ends


def _add_square(total: float, price: float) -> float:
    return total + price * price


class _Way(NamedTuple):
    """Stages so far: their value, the memory of peers that get more stages, where they end."""

    value: float
    used: tuple[int, ...]
    ends: Ends


def _search(
    loads: Loads,
    price: Price,
    add: Callable[[float, float], float],
    *,
    within_memory: bool,
    limit: float = float("inf"),
) -> Ends | None:
    num_layers, num_stages, num_peers = len(loads.costs), loads.num_stages, len(loads.peers)
    ways = {0: [_Way(0.0, (0,) * num_peers, ())]}
    for stage in range(num_stages):
        peer = stage % num_peers
        free = loads.peers[peer].memory_bytes if within_memory else None
        remember = free is not None and stage + num_peers < num_stages
        behind = num_stages - 1 - stage  # each needs a layer
        found: dict[int, list[_Way]] = {}
        for first, before in ways.items():
            lowest = first + 1 if behind else num_layers
            for end in range(lowest, num_layers - behind + 1):
                load = loads.of(stage, first, end)
                own = price(load)
                if own > limit:
                    continue
                for way in before:
                    used = way.used[peer] + load.needed_bytes
                    if free is not None and used > free:
                        continue
                    kept = (*way.used[:peer], used if remember else 0, *way.used[peer + 1 :])
                    new = _Way(add(way.value, own), kept, (*way.ends, end))
                    found.setdefault(end, []).append(new)
        ways = {end: _worth_keeping(those) for end, those in found.items()}
    last = ways.get(num_layers)
    return min(last).ends if last else None


def _worth_keeping(ways: Sequence[_Way]) -> list[_Way]:
    """Those that no other one beats both in value and in every peer's memory."""
    # Most have the same memory: always, if no peer gets more stages or none is short of it.
    best = {way.used: way for way in sorted(ways, reverse=True)}
    left = sorted(best.values())
    if len(left) > MAX_WAYS:  # half of them the best ones, half the emptiest
        half = MAX_WAYS // 2
        left[half:] = sorted(left[half:], key=lambda way: (max(way.used), way))[:half]
        left.sort()
    kept: list[_Way] = []
    for way in left:
        if not any(all(map(int.__le__, other.used, way.used)) for other in kept):
            kept.append(way)
    return kept


def _stages(loads: Loads, ends: Ends) -> list[StageLoad]:
    firsts = (0, *ends[:-1])
    return [loads.of(i, *pair) for i, pair in enumerate(zip(firsts, ends, strict=True))]


def _lacking(loads: Loads, ends: Ends) -> list[DoesNotFit]:
    """What is wrong at each peer whose memory is too small."""
    stages = _stages(loads, ends)
    found: list[DoesNotFit] = []
    for index, peer in enumerate(loads.peers):
        own = [load for load in stages if load.peer == index]
        needed = sum(load.needed_bytes for load in own)
        if peer.memory_bytes is not None and needed > peer.memory_bytes:
            shortage = Shortage(
                peer=peer.name,
                spans=tuple(_span(load, loads.costs) for load in own),
                state_bytes=sum(load.state_bytes for load in own),
                held_bytes=sum(load.held_bytes for load in own),
                free_bytes=peer.memory_bytes,
            )
            found.append(DoesNotFit(shortage))
    return found


def _span(load: StageLoad, costs: Sequence[LayerCost]) -> Span:
    return Span(load.first, tuple(cost.name for cost in costs[load.first : load.end]))
