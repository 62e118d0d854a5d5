"""Random models, plans and batches; and what one process makes of them."""

import random
from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.core.plan import Plan

WIDTH = 6


class Giving(nn.Module):
    """Stashes its input or output under some names."""

    def __init__(self, names, detached=()):
        super().__init__()
        self.names, self.detached = names, detached
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        for index, name in enumerate(self.names):
            value = [x, y, y * 2][index % 3]
            mh.stash(name, value.detach() if name in self.detached else value)
        return y


class Taking(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names = names
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for name in self.names:
            x = x + mh.pop(name) * 0.5
        return self.linear(x)


class GivingWhole(nn.Module):
    """A variable without rows, made from parameters."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.table = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x):
        mh.stash(self.name, self.table.tanh(), whole=True)
        return x * 0.9


class TakingWhole(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return x + mh.pop(self.name).sum(0)


class SeedSpelling(nn.Module):
    """The seeds' way: names as attributes, variables as arguments and beside the output."""

    def __init__(self, takes=(), gives=()):
        super().__init__()
        self.dependencies, self.out_variables = list(takes), list(gives)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *taken):
        out = self.linear(x)
        for variable in taken:
            out = out + variable
        return out, [(name, out * (1 + index)) for index, name in enumerate(self.out_variables)]


class Forking(nn.Module):
    """Hands two tensors to the next layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x), x


class Joining(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


class Masked(nn.Module):
    """Takes an extra input of the model."""

    def __init__(self, name):
        super().__init__()
        self.dependencies = [name]

    def forward(self, x, mask):
        return x * mask


def frozen(layer):
    return layer.requires_grad_(False)


class Case(NamedTuple):
    build: Callable[[], list[nn.Module]]
    plan: Plan
    batches: list[Any]
    extra: bool
    seed: int | None
    clip: float | None
    optimizer: Callable[[Any], torch.optim.Optimizer]
    exact: bool  # whether bits must be equal
    as_specs: bool = False  # whether a plan is given its layers as (class, kwargs, shape)
    targets: str = "last"
    kinds: frozenset[str] = frozenset()  # what is special about it, to be counted

    def model(self, modules=None):
        """As a plan is given it; `modules` are there already where threads share a generator."""
        if not self.as_specs:
            return modules or self.build()
        build = self.build if modules is None else lambda: modules
        count = len(build())
        return [(layer_of, {"build": build, "index": index}, ()) for index in range(count)]


def layer_of(build, index):
    """Stands for the class of one layer: with the values that it has in the whole model."""
    return build()[index]


def random_layers(rng):
    """As a list of (what, argument), with variables that fit."""
    layers, open_names, counter = [], [], 0
    extra = rng.random() < 0.3
    forked = False
    for _ in range(rng.randint(2, 9)):
        if forked:
            layers.append(("joining", None))
            forked = False
            continue
        what = rng.choice(
            [
                "linear",
                "tanh",
                "relu",
                "norm",
                "frozen",
                "giving",
                "taking",
                "seeds",
                "seeds",
                "seeds",
                "whole",
                "dropout",
                "forking",
            ]
        )
        if what in ("giving", "seeds"):
            names = [f"v{counter + i}" for i in range(rng.randint(1, 2))]
            counter += len(names)
            detached = [n for n in names if rng.random() < 0.2]
            takes = rng.sample(open_names, min(len(open_names), rng.randint(0, 2)))
            layers.append((what, (names, detached, takes)))
            open_names += names
        elif what == "taking":
            if open_names:
                layers.append((what, rng.sample(open_names, rng.randint(1, len(open_names)))))
        elif what == "whole":
            layers += [("whole", f"w{counter}"), ("takewhole", f"w{counter}")]
            counter += 1
        else:
            layers.append((what, None))
            forked = what == "forking"
    if forked:
        layers.append(("joining", None))
    taken = set()
    for what, argument in layers:
        if what == "taking":
            taken |= set(argument)
        if what == "seeds":
            taken |= set(argument[2])
    left = [name for name in open_names if name not in taken]
    layers.append(("taking", left) if left else ("linear", None))
    if extra:
        layers.insert(rng.randint(0, len(layers) - 1), ("masked", "mask"))
        # Not between a layer that hands on two tensors and the one that joins them.
        for index, (what, _) in enumerate(layers):
            if what == "forking" and layers[index + 1][0] == "masked":
                layers[index + 1], layers[index] = layers[index], layers[index + 1]
    return layers, extra


def taken_again(layers, rng):
    """Some variables are taken by one more layer, in the place of a linear one."""
    given = {}
    for index, (what, argument) in enumerate(layers):
        if what in ("giving", "seeds"):
            given |= dict.fromkeys(argument[0], index)
    layers = list(layers)
    for name, giver in given.items():
        later = [i for i, (what, _) in enumerate(layers) if what == "linear" and i > giver]
        if later and rng.random() < 0.8:
            layers[rng.choice(later)] = ("taking", [name])
    return layers


def uses_of(layers):
    """By tensor that layers hand on: the layer that makes it, and each that computes with it, of
    which each adds to its gradient. By variable: who gives it, and takes it.
    """
    made, uses, tensors, handed = {-1: -1}, {-1: []}, {}, [-1]
    variables = {}
    for index, (what, argument) in enumerate(layers):
        before, handed = handed, [index]
        made[index], uses[index] = index, []
        for key in before:
            uses[key].append(index)
        names, takes = [], []
        match what:
            case "forking":
                handed.append(before[0])
            case "giving":
                names = argument[0]
                tensors |= dict(zip(names, [before[0], index], strict=False))  # itself, not a copy
                tensors |= dict.fromkeys(argument[1])  # without a gradient
            case "seeds":
                names, takes = argument[0], argument[2]
                uses[index] += [index] * len(names)
                tensors |= {name: name for name in names}
            case "whole":
                names = [argument]
                tensors[argument] = argument
            case "taking":
                takes = argument
            case "takewhole":
                takes = [argument]
        for name in takes:
            variables[name][1].append(index)
            if tensors[name] is not None:
                uses[tensors[name]].append(index)
        for name in names:
            variables[name] = index, []
            if tensors[name] == name:
                made[name], uses[name] = index, []
    return {key: (made[key], own) for key, own in uses.items()}, variables


def kinds_of(layers, plan):
    """What of it is not in every case; "ordered": all sums have an order that no plan changes."""
    stage_of = {i: stage for stage in plan.stages for i in range(stage.first, stage.end)}
    place = {-1: 0} | {i: stage.index for i, stage in stage_of.items()}
    tensors, variables = uses_of(layers)
    kinds = set()
    # Two gradients are the same in either order. What comes from other stages is added up before
    # those of the maker's own stage, as in one process, whose later layers go back first.
    outside = [[u for u in uses if place[u] != place[maker]] for maker, uses in tensors.values()]
    if all(len(uses) <= 2 for uses in outside):
        kinds.add("ordered")
    for giver, takers in variables.values():
        stages = {place[taker] for taker in takers}
        if any(plan.stages[s].peers != stage_of[giver].peers for s in stages):
            kinds.add("crosses")
        if any(s > place[giver] + 1 for s in stages):
            kinds.add("skips")
        if len(stages - {place[giver]}) > 1:
            kinds.add("several")
    peers = [stage.peers for stage in plan.stages]
    count = len(plan.peers)
    rounds = len(peers) // count
    looped = rounds > 1 < count and peers == peers[:count] * rounds
    if looped and plan.schedule == "interleaved" and plan.microbatches > 1:
        kinds.add("looped")
    return frozenset(kinds)


def build(layers, seed):
    torch.manual_seed(seed)
    made = []
    for what, argument in layers:
        match what:
            case "linear":
                made.append(nn.Linear(WIDTH, WIDTH))
            case "tanh":
                made.append(nn.Tanh())
            case "relu":
                # Into what another layer keeps for its backward, one must not write.
                made.append(nn.ReLU(inplace=bool(made) and type(made[-1]) is nn.Linear))
            case "norm":
                made.append(nn.LayerNorm(WIDTH))
            case "frozen":
                made.append(frozen(nn.Linear(WIDTH, WIDTH)))
            case "dropout":
                made.append(nn.Dropout(0.3))
            case "giving":
                made.append(Giving(argument[0], argument[1]))
            case "seeds":
                made.append(SeedSpelling(argument[2], argument[0]))
            case "taking":
                made.append(Taking(argument))
            case "whole":
                made.append(GivingWhole(argument))
            case "takewhole":
                made.append(TakingWhole(argument))
            case "forking":
                made.append(Forking())
            case "joining":
                made.append(Joining())
            case "masked":
                made.append(Masked(argument))
            case "again":  # the layer that stands at an earlier place
                made.append(made[argument])
    return [layer.double() for layer in made]


def tied(layers, plan, rng):
    """If it can be, with a layer that stands at two places; and whether both are in one stage."""
    pairs = [
        (first, second)
        for first, second in combinations(range(len(layers)), 2)
        if layers[first] == layers[second] == ("linear", None)
        and plan.layers[first].peers == plan.layers[second].peers
        and plan.layers[first].split == plan.layers[second].split
    ]
    if not pairs:
        return layers, True
    close = [p for p in pairs if any(s.first <= p[0] < p[1] < s.end for s in plan.stages)]
    first, second = rng.choice(close if close and rng.random() < 0.7 else pairs)
    together = (first, second) in close
    return [*layers[:second], ("again", first), *layers[second + 1 :]], together


def random_stages(rng, num_layers, num_peers, wide):
    fewest = 0 if wide else num_peers - 1
    cuts = sorted(rng.sample(range(1, num_layers), rng.randint(fewest, num_layers - 1)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, num_layers], strict=True)]
    if not wide:
        every = rng.sample(range(num_peers), num_peers)
        others = [rng.randrange(num_peers) for _ in sizes[num_peers:]]
        return [(size, [peer]) for size, peer in zip(sizes, [*every, *others], strict=True)]
    stages = []
    for size in sizes:
        width = rng.randint(1, num_peers)
        peers = rng.sample(range(num_peers), width)
        if width > 1 and rng.random() < 0.5:
            stages.append((size, peers, [rng.choice([1, 2, 5]) for _ in peers]))
        else:
            stages.append((size, peers))
    used = {peer for stage in stages for peer in stage[1]}
    idle = [peer for peer in range(num_peers) if peer not in used]
    if idle:  # the widest plan there is
        last = stages[-1]
        stages[-1] = (last[0], [*last[1], *idle])
    return stages


def random_case(seed, num_peers, *, dropout=True):
    rng = random.Random(seed)
    layers, extra = random_layers(rng)
    layers = taken_again(layers, rng)
    shape = rng.choice(["wide", "wide", "narrow", "narrow", "looped"])
    wide = shape == "wide"
    while len(layers) < num_peers * (2 if shape == "looped" else 1):
        layers.append(("linear", None))
    how = {
        "microbatches": rng.choice([1, 2, 3, 4, 8]),
        "schedule": rng.choice(["afab", "1f1b", "interleaved"]),
        "recompute": rng.random() < 0.3,
    }
    if shape == "looped":
        how |= {"stages_per_peer": 2, "schedule": "interleaved"}
        plan = Plan.even(len(layers), num_peers, **how)
    else:
        plan = Plan.of_stages(random_stages(rng, len(layers), num_peers, wide), **how)
    wide = any(len(stage.peers) > 1 for stage in plan.stages)
    # Drawn for the rows that a peer has: with several peers a stage they are others.
    dropout = dropout and not wide and any(what == "dropout" for what, _ in layers)
    if not dropout:
        layers = [("tanh", None) if what == "dropout" else (what, a) for what, a in layers]
    torch.manual_seed(seed)
    batches = []
    for _ in range(3):
        rows = rng.choice([1, 3, 7, 8, 12])
        x = torch.randn(rows, WIDTH, dtype=torch.float64)
        y = torch.randn(rows, WIDTH, dtype=torch.float64)
        masks = {"mask": (torch.rand(rows, 1) > 0.3).double()} if extra else None
        batches.append((x, y, masks))
    chosen = rng.choice(
        [
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.Adam(p, lr=0.01),
        ]
    )
    clip = rng.choice([None, None, 0.5])
    # Of a layer in two stages the gradients are added one after the other, not both at once.
    layers, together = tied(layers, plan, random.Random(f"tied {seed}"))
    kinds = kinds_of(layers, plan)
    exact = not wide and clip is None and "ordered" in kinds and together
    form = random.Random(f"form {seed}")
    several_places = any(what == "again" for what, _ in layers)  # which no such form can say
    return Case(
        lambda: build(layers, seed),
        plan,
        batches,
        extra,
        seed if dropout else None,
        clip,
        chosen,
        exact,
        form.random() < 0.5 and not several_places,
        form.choice(["last", "first"]),
        kinds,
    )


def alone(case, from_cut=None):
    """One process: the same microbatches, layer after layer, each a plain call of its module.

    Variables come from the runtime's own Scope; test_cut.py compares with models that have none.
    """
    from manyhands.stages.chance import seed_of
    from manyhands.stages.layers import Running
    from manyhands.stages.moves import cut_batch
    from manyhands.stages.variables import Scope, scoped

    modules = case.build()
    layers = [Running(module, index, str(index)) for index, module in enumerate(modules)]
    unique = list({id(p): p for m in modules for p in m.parameters() if p.requires_grad}.values())
    optimizer = case.optimizer(unique) if unique else None
    losses = []
    for number, (x, y, extra) in enumerate(case.batches):
        total = 0.0
        for m, span in enumerate(cut_batch(len(x), case.plan.microbatches)):
            if not len(span):
                continue
            part = slice(span.start, span.end)
            scope = Scope({name: t[part] for name, t in (extra or {}).items()})
            with scoped(scope):
                now = x[part].clone()
                for layer in layers:
                    if case.seed is not None:
                        torch.manual_seed(seed_of(case.seed, number, m, layer.index))
                    now = layer.run(now, scope)
            loss = F.mse_loss(now, y[part]) * (len(span) / len(x))
            if loss.requires_grad:
                loss.backward()
            total += float(loss.detach())
        if case.clip is not None:
            grads = [p.grad for p in unique if p.grad is not None]
            if grads:
                norm = torch.stack([g.norm() for g in grads]).norm()
                for grad in grads:
                    grad.mul_(min(1.0, case.clip / (float(norm) + 1e-6)))
        if optimizer is not None:
            optimizer.step()
        for p in unique:
            p.grad = None
        losses.append(total)
    return losses, modules
