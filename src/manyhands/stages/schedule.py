"""Schedule: in which order each peer works through its stages and microbatches. Pure.

Every peer's order has the same form: some forwards to warm up, then one forward and one backward in
turn, then the backwards that are left. With all forwards as warm-up that is GPipe (and, with one
microbatch, plain model parallel); with as few as the peers behind need, 1F1B; with several stages
a peer, interleaved 1F1B. Backwards of a stage always come in the order of the microbatches, so sums
of gradients do not depend on the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from manyhands.core.plan import Plan, Stage

Direction = Literal["F", "B"]


class Action(NamedTuple):
    """One stage's work on one microbatch, forward or backward."""

    direction: Direction
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.direction}{self.stage}.{self.microbatch}"


Orders = Mapping[int, tuple[Action, ...]]
"""What each peer does, in order."""


def orders_of(plan: Plan) -> Orders:
    """The order of every peer, such that all of them together never wait in a circle."""
    turned = _turned(plan) or _around(plan)
    if turned is not None:
        return turned
    stages = plan.stages
    turns = {peer: _turns(plan, peer) for peer in range(len(plan.peers))}
    warm_up = {peer: _warm_up(plan, peer, turns[peer][0]) for peer in turns}
    while True:
        orders = {peer: _merge(*turns[peer], warm_up[peer]) for peer in turns}
        stuck = play(orders, stages).stuck
        if not stuck:
            return orders
        # A plan that is no plain pipeline: whoever waits to go back goes one further ahead first.
        # All forwards first is never stuck, so this ends.
        behind = {p: at for p, at in stuck.items() if warm_up[p] < len(turns[p][0])}
        waiting = [peer for peer, action in behind.items() if action.direction == "B"]
        for peer in waiting or behind:
            warm_up[peer] += 1


def _turns(plan: Plan, peer: int) -> tuple[list[Action], list[Action]]:
    """A peer's forwards and its backwards, each in order.

    With several stages a peer, microbatches go through them in groups of as many as there are
    peers: the first of a group is back from the others when its last has left.
    """
    stages = [stage.index for stage in plan.stages_of(peer)]
    count = plan.microbatches
    group = count if plan.schedule == "afab" else len(plan.peers)
    forwards: list[Action] = []
    backwards: list[Action] = []
    for start in range(0, count, group):
        microbatches = range(start, min(start + group, count))
        forwards += [Action("F", stage, m) for stage in stages for m in microbatches]
        backwards += [Action("B", stage, m) for stage in reversed(stages) for m in microbatches]
    return forwards, backwards


def _warm_up(plan: Plan, peer: int, forwards: Sequence[Action]) -> int:
    """How many forwards come before the first pair of a forward and a backward."""
    if plan.schedule == "afab":
        return len(forwards)
    own = plan.stages_of(peer)
    num_stages, num_peers = len(plan.stages), len(plan.peers)
    if len(own) == 1:
        count = num_stages - 1 - own[0].index
    elif _is_looped(plan.stages, num_peers):
        count = 2 * (num_peers - 1 - own[0].index) + (len(own) - 1) * num_peers
    else:
        count = forwards.index(Action("F", own[-1].index, 0))
    return min(count, len(forwards))


def _turned(plan: Plan) -> Orders | None:
    """Orders for a pipeline that begins and ends at one peer, whose others have a stage each.

    That peer takes a new microbatch in whenever one has come back to it; so many are under way
    that no other peer waits for it.
    """
    stages = plan.stages
    last = len(stages) - 1
    peers = [stage.peers for stage in stages]
    ring = len(stages) == len(plan.peers) + 1 > 2 and peers[0] == peers[last]
    if plan.schedule == "afab" or not ring or any(len(own) > 1 for own in peers):
        return None
    count, ahead = plan.microbatches, min(last, plan.microbatches)
    order = [Action("F", 0, m) for m in range(ahead)]
    for m in range(count):
        order += [Action("F", last, m), Action("B", last, m)]
        order += [Action("F", 0, m + ahead)] if m + ahead < count else []
        order += [Action("B", 0, m + 1 - ahead)] if m + 1 >= ahead else []
    order += [Action("B", 0, m) for m in range(count + 1 - ahead, count)]
    orders = {stages[0].lead: tuple(order)}
    for stage in stages[1:last]:
        forwards, backwards = _turns(plan, stage.lead)
        orders[stage.lead] = _merge(forwards, backwards, min(last - stage.index, count))
    return orders


def _around(plan: Plan) -> Orders | None:
    """Orders for a pipeline that goes round several peers, and begins and ends at one beside them.

    They do as without it. What it does takes next to no time: it gives early, and takes its
    gradients, for which nobody waits, late.
    """
    if plan.schedule == "afab" or len(plan.stages) < 6:  # with two others, twice round
        return None
    first, *inner, last = plan.stages
    count = len(plan.peers) - 1
    peers = [stage.peers for stage in inner]
    each = [own for own in (first.peers, *peers[:count]) if len(own) == 1]
    looped = len(inner) > count > 1 and peers == peers[:count] * (len(inner) // count)
    if not looped or first.peers != last.peers or len({*each}) <= count:
        return None
    within = Plan.of_stages(
        [(1, [index % count]) for index in range(len(inner))],
        microbatches=plan.microbatches,
        schedule=plan.schedule,
    )
    orders = orders_of(within)
    spans = play(orders, within.stages).spans
    ended = {action: end for (_, action), (_, end) in spans.items()}
    turns: list[tuple[float, Action]] = []
    for m in range(plan.microbatches):
        there = ended[Action("F", len(inner) - 1, m)]
        turns += [
            (ended[Action("F", 0, m)] - 1 - count, Action("F", first.index, m)),
            (there, Action("F", last.index, m)),
            (there, Action("B", last.index, m)),
            (ended[Action("B", 0, m)] + count, Action("B", first.index, m)),
        ]
    turns.sort(key=lambda turn: turn[0])
    found = {first.lead: tuple(action for _, action in turns)}
    for peer, order in orders.items():
        found[inner[peer].lead] = tuple(action._replace(stage=action.stage + 1) for action in order)
    return found


def _is_looped(stages: Sequence[Stage], num_peers: int) -> bool:
    """Whether the stages go round all peers, one each, several times."""
    return len(stages) % num_peers == 0 and all(
        stage.peers == stages[stage.index % num_peers].peers and len(stage.peers) == 1
        for stage in stages
    )


def _merge(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> tuple[Action, ...]:
    order = list(forwards[:warm_up])
    left = iter(backwards)
    for forward in forwards[warm_up:]:
        order += [forward, next(left)]
    return (*order, *left)


class Played(NamedTuple):
    """What came of playing orders: who did what when, and who waited for ever, before what."""

    spans: Mapping[tuple[int, Action], tuple[float, float]]  # by peer: from, to
    stuck: Mapping[int, Action]

    @property
    def length(self) -> float:
        """From the first start to the last end."""
        return max((end for _, end in self.spans.values()), default=0.0)

    def bubble(self) -> float:
        """The part of all peers' time in which they wait."""
        peers = {peer for peer, _ in self.spans}
        busy = sum(end - start for start, end in self.spans.values())
        return 1 - busy / (self.length * len(peers)) if self.spans else 0.0

    def most_held(self, peer: int) -> int:
        """How many forwards a peer holds the activations of at most."""
        held = most = 0
        own = sorted((span, action) for (who, action), span in self.spans.items() if who == peer)
        for _, action in own:
            held += 1 if action.direction == "F" else -1
            most = max(most, held)
        return most


def play(
    orders: Orders,
    stages: Sequence[Stage],
    *,
    forward: Sequence[float] | float = 1.0,
    backward: Sequence[float] | float = 1.0,
) -> Played:
    """Each peer does its actions in order, each as soon as what it needs is there.

    `forward` and `backward` are the times of one microbatch, for all stages or for each.
    """
    times = {
        "F": [forward] * len(stages) if isinstance(forward, (int, float)) else list(forward),
        "B": [backward] * len(stages) if isinstance(backward, (int, float)) else list(backward),
    }
    ended: dict[Action, dict[int, float]] = {}
    spans: dict[tuple[int, Action], tuple[float, float]] = {}
    place = dict.fromkeys(orders, 0)
    free = dict.fromkeys(orders, 0.0)
    moved = True
    while moved:
        moved = False
        for peer, order in orders.items():
            while place[peer] < len(order):
                action = order[place[peer]]
                start = free[peer]
                for needed in _needs(action, len(stages)):
                    done = ended.get(needed, {})
                    if len(done) < len(stages[needed.stage].peers):
                        break
                    start = max(start, *done.values())
                else:
                    end = start + times[action.direction][action.stage]
                    spans[peer, action] = (start, end)
                    ended.setdefault(action, {})[peer] = free[peer] = end
                    place[peer] += 1
                    moved = True
                    continue
                break
    left = {p: order[place[p]] for p, order in orders.items() if place[p] < len(order)}
    return Played(spans, left)


def _needs(action: Action, num_stages: int) -> Iterator[Action]:
    """What must have ended, at all peers of its stage, before an action can start."""
    if action.direction == "F":
        if action.stage > 0:
            yield action._replace(stage=action.stage - 1)
    else:
        yield action._replace(direction="F")
        if action.stage + 1 < num_stages:
            yield action._replace(stage=action.stage + 1)


def bubble_of(plan: Plan) -> float:
    """The part of their time that peers wait, if all stages take the same time."""
    return play(orders_of(plan), plan.stages).bubble()


def picture(plan: Plan) -> str:
    """As text: a line a peer, a column a unit of time, forwards as numbers, backwards in brackets.

    With several stages a peer, the stage stands before a colon.
    """
    stages = plan.stages
    played = play(orders_of(plan), stages)
    several = any(len(plan.stages_of(peer)) > 1 for peer in range(len(plan.peers)))
    cells: dict[int, dict[int, str]] = {peer: {} for peer in range(len(plan.peers))}
    for (peer, action), (start, _) in played.spans.items():
        text = f"{action.stage}:{action.microbatch}" if several else str(action.microbatch)
        cells[peer][int(start)] = text if action.direction == "F" else f"({text})"
    width = max(len(text) for row in cells.values() for text in row.values())
    left = max(len(name) for name in plan.peers)
    lines = [
        name.ljust(left)
        + " |"
        + " ".join(cells[peer].get(t, ".").center(width) for t in range(int(played.length)))
        + "|"
        for peer, name in enumerate(plan.peers)
    ]
    return "\n".join([*lines, f"{played.bubble():.1%} of the time is waiting"])
