"""A module that is cut gives what it gave as one, bit by bit; what cannot be cut is refused."""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.stages.threads import run_threads
from torch import nn

from manyhands.core.plan import Plan
from manyhands.stages.cut import cut
from manyhands.stages.layers import Running
from manyhands.stages.pipeline import Pipeline
from manyhands.stages.trace import CutError
from manyhands.stages.variables import Scope


@pytest.fixture(autouse=True)
def _double():
    """So that another order of summands and a wrong gradient are far apart."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# Two executors: one that runs the layers in order, and one that keeps them apart as peers would.


def together(layers, x, extras):
    scope = Scope(extras)
    for index, layer in enumerate(layers):
        x = Running(layer, index, str(index)).run(x, scope)
    return x


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def received(tensor):
    """What a peer gets: the same numbers, another memory, no history."""
    copied = tensor.detach().clone()
    return copied.requires_grad_(tensor.requires_grad)


def apart(layers, x, extras):
    """The output, and a function that takes its gradients back through the layers."""
    known, passes = dict(extras), []
    for index, layer in enumerate(layers):
        running = Running(layer, index, str(index))
        came = tuple(map(received, as_tuple(x)))
        taken = {name: received(known[name]) for name in running.takes}
        scope = Scope(taken)
        x = running.run(came if isinstance(x, tuple) else came[0], scope)
        given = {name: scope.values[name] for name in running.gives}
        assert not known.keys() & given.keys()
        known |= given
        passes.append((came, taken, as_tuple(x), given))

    def backward(grads):
        of_variables = {}
        for came, taken, out, given in reversed(passes):
            pairs = [*zip(out, grads, strict=True)]
            pairs += [(tensor, of_variables.get(name)) for name, tensor in given.items()]
            pairs = [(t, g) for t, g in pairs if g is not None and t.requires_grad]
            if pairs:
                torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
            grads = [tensor.grad for tensor in came]
            for name, tensor in taken.items():
                if tensor.grad is not None:
                    before = of_variables.get(name)
                    of_variables[name] = tensor.grad if before is None else before + tensor.grad

    return x, backward


def gradients(model):
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def check(model, at, x, extras=None, **options):
    """Cuts, and compares with the uncut model: output, gradients, state. Returns the layers."""
    extras = extras or {}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    untouched = {name: dict(vars(module)) for name, module in model.named_modules()}
    model.zero_grad()
    torch.manual_seed(1)
    expected = model(x.clone(), **extras)
    sum((item * item).sum() for item in as_tuple(expected)).backward()
    wanted = gradients(model)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])

    layers = cut(model, at, **options)
    assert len(layers) == len(at) + 1
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == untouched

    model.zero_grad()
    torch.manual_seed(1)
    found = together(layers, x.clone(), extras)
    assert type(found) is type(expected)
    for mine, its in zip(as_tuple(found), as_tuple(expected), strict=True):
        assert torch.equal(mine, its)
    sum((item * item).sum() for item in as_tuple(found)).backward()
    same(gradients(model), wanted)

    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    model.zero_grad()
    torch.manual_seed(1)
    found, backward = apart(layers, x.clone(), extras)
    for mine, its in zip(as_tuple(found), as_tuple(expected), strict=True):
        assert torch.equal(mine, its)
    backward([2 * item.detach() for item in as_tuple(found)])
    close(gradients(model), wanted)

    state = {}
    for layer in layers:
        state |= layer.state_dict(keep_vars=True)
    whole = model.state_dict(keep_vars=True)
    tied = {id(value) for value in whole.values()}
    assert {id(value) for value in state.values()} == tied
    assert all(whole[name] is value for name, value in state.items())
    return layers


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (grad is None) == (found[name] is None), name
        assert grad is None or torch.equal(found[name], grad), name


def close(found, wanted):
    """Gradients of several consumers may be summed in another order there: rounding of float64."""
    for name, grad in wanted.items():
        assert (grad is None) == (found[name] is None), name
        if grad is not None:
            torch.testing.assert_close(found[name], grad, rtol=1e-11, atol=1e-11, msg=name)


def variables(layers):
    return [(layer.dependencies, layer.out_variables) for layer in layers]


# Models


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Residual(nn.Module):
    """A chain of blocks, with residuals over several of them and a parameter of the root."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        first = self.blocks[0](x)
        h = self.blocks[2](self.blocks[1](first))
        h = self.blocks[3](h + first * self.scale)
        h = self.blocks[4](h)
        return self.head(self.blocks[5](h) + first + x)


class Net(nn.Module):
    """A U-Net of three levels: what goes down goes across too."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.norm = norm
        sizes = [(2, 4), (4, 8), (8, 8)]
        self.down = nn.ModuleList(self.conv(i, o) for i, o in sizes)
        self.bottom = self.conv(8, 8)
        self.up = nn.ModuleList(self.conv(i, o) for i, o in [(16, 8), (16, 4), (8, 4)])
        self.out = nn.Conv2d(4, 1, 1)

    def conv(self, before, after):
        conv = nn.Conv2d(before, after, 3, padding=1)
        return nn.Sequential(conv, self.norm(after), nn.ReLU(inplace=True))

    def forward(self, x):
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[2:])
            x = up(torch.cat([x, skip], 1))
        return self.out(x)


class Seq2Seq(nn.Module):
    """An encoder and a decoder of torch's layers, with a mask that all of them use."""

    def __init__(self, width=8, tokens=11, dropout=0.1, tied=True):
        super().__init__()
        self.tied = tied
        self.embed_target = self.head = None
        if not tied:
            self.embed_target = nn.Embedding(tokens, width)
            self.head = nn.Linear(width, tokens)
        self.embed = nn.Embedding(tokens, width)
        self.register_buffer("place", torch.randn(1, 16, width), persistent=False)
        make = {"dim_feedforward": 16, "dropout": dropout, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, **make) for _ in range(3))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(width, 2, **make) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, source, target, mask, causal=None, *, scale=2.0):
        padding = mask.logical_not()
        memory = self.embed(source) * scale + self.place[:, : source.shape[1]]
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        size = target.size(1)
        if causal is None:
            steps = torch.arange(size, device=target.device)
            causal = steps[None, :] > steps[:, None]
        out = (self.embed if self.tied else self.embed_target)(target) + self.place[:, :size]
        for layer in self.decoder:
            out = layer(out, memory, tgt_mask=causal, memory_key_padding_mask=padding)
        out = self.norm(out)
        return F.linear(out, self.embed.weight) if self.tied else self.head(out)


def model_of(forward, **modules):
    kind = type("Small", (nn.Module,), {"forward": forward})
    model = kind()
    for name, module in modules.items():
        if isinstance(module, nn.Parameter | nn.Module):
            setattr(model, name, module)
        else:
            model.register_buffer(name, module)
    return model


def linears(count=3, width=4):
    return {name: nn.Linear(width, width) for name in "abcdefg"[:count]}


X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


# Equality


def test_residuals_over_several_cuts():
    at = ["blocks.1", "blocks.2", "blocks.3", "blocks.5", "head"]
    layers = check(Residual(), at, torch.randn(5, 8))
    assert variables(layers) == [
        ((), ("x", "add")),
        ((), ()),
        (("add",), ()),
        ((), ()),
        (("x", "add"), ()),
        ((), ()),
    ]


def test_unet_whose_boundary_tensors_also_skip():
    at = ["down.1", "down.2", "bottom", "up.0", "up.1", "up.2"]
    layers = check(Net(), at, torch.randn(2, 2, 16, 16))
    assert Counter(name for layer in layers for name in layer.out_variables) == Counter(
        {name for layer in layers for name in layer.dependencies}
    )


def test_unet_in_the_middle_of_a_block():
    at = ["down.0.2", "down.1.1", "up.0.2", "up.2.1"]  # before a ReLU that works in place, too
    check(Net(), at, torch.randn(2, 2, 16, 16))


@pytest.mark.parametrize("training", [True, False])
def test_encoder_and_decoder_with_a_mask(training):
    model = Seq2Seq().train(training)
    source, target = torch.randint(0, 11, (4, 7)), torch.randint(0, 11, (4, 5))
    mask = torch.arange(7)[None, :] < torch.tensor([7, 4, 6, 5])[:, None]
    at = ["encoder.1", "encoder.2", "decoder.0", "decoder.2", "norm"]
    layers = check(model, at, source, {"target": target, "mask": mask})
    # The mask is given from outside, and what is made of it is made by whoever uses it.
    assert all("mask" in layer.dependencies for layer in layers[:5])
    assert {name for layer in layers for name in layer.out_variables} == {
        name for layer in layers for name in layer.dependencies
    } - {"target", "mask"}
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    given = {"target": target, "mask": mask, "causal": causal}
    with_causal = check(model, at, source, given, inputs=["causal"])
    assert "causal" in with_causal[4].dependencies
    assert "causal" not in with_causal[1].dependencies


def test_tied_weights_stay_one_parameter():
    embed, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embed.weight
    model = model_of(
        lambda self, x: self.head(self.a(self.embed(x))), embed=embed, head=head, a=nn.Linear(4, 4)
    )
    layers = check(model, ["a", "head"], torch.tensor([[0, 1], [4, 2]]))
    assert layers[0].embed.weight is layers[2].head.weight


def test_a_weight_that_another_layer_uses_directly():
    def forward(self, x):
        return F.linear(self.b(self.a(x)), self.a.weight)

    layers = check(model_of(forward, **linears(2)), ["b"], X)
    assert [sorted(layer.state_dict()) for layer in layers] == [
        ["a.bias", "a.weight"],
        ["a.weight", "b.bias", "b.weight"],
    ]


def test_several_consumers_and_a_tuple_of_outputs():
    def forward(self, x):
        a = self.a(x)
        b = self.b(a)
        c = self.c(a + b)
        return self.d(c + a) + b, a, c

    layers = check(model_of(forward, **linears(4)), ["b", "c", "d"], X)
    assert variables(layers) == [((), ("a",)), ((), ("b",)), (("a",), ()), (("a", "b"), ())]


def test_a_layer_that_needs_only_extra_inputs_and_its_follower():
    def forward(self, x, y):
        a = self.a(x)
        return self.c(self.b(y)) + a

    layers = check(model_of(forward, **linears(3)), ["b", "c"], X, {"y": X + 1})
    assert variables(layers) == [((), ("a",)), (("y",), ()), (("a",), ())]


def test_numbers_are_computed_where_they_are_used():
    def forward(self, x):
        rows, width = x.shape
        half = width
        half += half  # a number changes its name, not its value
        half //= 4
        scale = 4 / width
        h = self.a(x)
        h = self.b(h).view(rows, 2, half).transpose(1, 2).reshape(rows, -1) * scale
        return self.c(h) * x.size(0) * scale + torch.zeros(rows, 1, dtype=x.dtype)

    model = model_of(forward, **linears(3))
    layers = check(model, ["b", "c"], X)
    assert variables(layers) == [((), ("x",)), ((), ()), (("x",), ())]
    # Each layer counts its own rows: half of the batch is half of everything.
    half = together(layers, X[:2], {})
    assert torch.equal(half, model(X[:2]))


def test_items_of_a_tuple_cross_and_tuples_do_not():
    class Lstm(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)

        def forward(self, x):
            result = self.a(x)
            parts = x.chunk(2, -1)
            y = self.b(result[0])
            return y + result[1][0].transpose(0, 1) + torch.cat([parts[1], parts[0]], -1)

    check(Lstm(), ["b"], torch.randn(3, 5, 4))


def test_what_depends_on_no_input_is_whole():
    def forward(self, x):
        table = self.table * 2
        return self.b(self.a(x)) + table

    model = model_of(forward, table=nn.Parameter(torch.randn(4)), **linears(2))
    layers = check(model, ["b"], X)
    assert layers[0].whole_variables == layers[0].out_variables == ("mul",)
    scope = Scope()
    Running(layers[0], 0, "0").run(X, scope)
    assert scope.whole == {"mul"}


def test_tensors_that_forward_makes_and_buffers_that_are_no_state():
    def forward(self, x):
        return self.b(self.a(x) + torch.tensor([1.0, 2, 3, 4])) + self.offset[:1] * self.plain

    model = model_of(forward, offset=torch.ones(2, 4), **linears(2))
    model.plain = torch.full((4,), 3.0)
    layers = check(model, ["b"], X)
    assert sorted(layers[1].state_dict()) == ["b.bias", "b.weight", "offset"]
    assert layers[1].to(torch.float32).plain.dtype == torch.float32


def test_parameters_that_forward_never_uses_are_kept():
    model = model_of(lambda self, x: self.b(self.a(x)), **linears(3))
    assert "c.weight" in check(model, ["b"], X)[1].state_dict()


def test_changes_in_place_inside_of_a_layer_and_of_what_comes_in():
    def forward(self, x):
        h = self.a(x)
        h += 1
        h[:, 0] = 0
        again = h
        h = self.b(h)
        h.mul_(2)
        h += again
        g = self.c(h)
        return F.relu(g, inplace=True) + again

    check(model_of(forward, **linears(3)), ["b", "c"], X)


def test_a_change_right_after_a_cut():
    class Add(nn.Module):
        def forward(self, x):
            x += 1
            return x * 2

    model = model_of(lambda self, x: self.b(self.add(self.a(x))), add=Add(), **linears(2))
    check(model, ["add", "b"], X)


def test_a_tensor_that_forward_makes_and_fills():
    def forward(self, x):
        made = torch.zeros(x.shape[0], 4)
        made[:, 0] = 1
        return self.b(self.a(x) + made) * made

    check(model_of(forward, **linears(2)), ["b"], X)


def test_no_cut_at_all():
    (layer,) = check(Residual(), [], torch.randn(2, 8))
    assert variables([layer]) == [((), ())]


def test_an_input_of_several_tensors():
    def forward(self, pair):
        one, two = pair
        return self.b(self.a(one)) + two

    model = model_of(forward, **linears(2))
    layers = cut(model, ["b"])
    assert torch.equal(together(layers, (X, X * 2), {}), model((X, X * 2)))


def test_sequential_and_leaves_of_ones_own():
    class Odd(nn.Module):
        def forward(self, x):
            return x if x.sum() > 1e9 else x * 2

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Odd(), nn.Linear(4, 4)), nn.Linear(4, 2))
    check(model, ["1", "2"], X, leaves=[Odd])
    check(model, ["1.1"], X, leaves=["1.0"])


def test_copies_of_layers_are_layers():
    model = Residual()
    x = torch.randn(2, 8)
    layers = copy.deepcopy(cut(model, ["blocks.3", "head"]))
    assert torch.equal(together(layers, x, {}), model(x))
    mine = {id(p) for layer in layers for p in layer.parameters()}
    assert not mine & {id(p) for p in model.parameters()}


def test_state_dicts_of_layers_load():
    model, other = Residual(), Residual()
    layers, x = cut(model, ["blocks.3"]), torch.randn(2, 8)
    for layer in layers:
        mine = {name: other.state_dict()[name] for name in layer.state_dict()}
        layer.load_state_dict(mine)
    assert torch.equal(together(layers, x, {}), other(x))


# Modes


def test_modes_reach_modules_and_functions():
    class Drop(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return F.dropout(self.linear(x), 0.5, training=self.training)

    model = model_of(
        lambda self, x: F.dropout(self.two(self.drop(self.one(x))), 0.5, self.training),
        one=Drop(),
        two=Drop(),
        drop=nn.Dropout(0.5),
    )
    model.two.eval()
    layers = check(model, ["drop", "two"], X)  # each with its own mode
    for mode in (False, True):
        model.train(mode)
        for layer in layers:
            layer.train(mode)
        torch.manual_seed(3)
        expected = model(X)
        torch.manual_seed(3)
        assert torch.equal(together(layers, X, {}), expected)


def test_other_uses_of_the_mode_are_refused():
    class Scaled(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5 if self.training else 0.0)

    class Branch(nn.Module):
        def forward(self, x):
            return x * 2 if self.training else x

    class Other(nn.Module):
        def forward(self, x):
            return x.relu() if self.training else x.tanh()

    for kind in (Scaled, Branch, Other):
        model = model_of(lambda self, x: self.b(self.part(self.a(x))), part=kind(), **linears(2))
        model.b.eval()
        with pytest.raises(CutError, match=r"'part' \(\w+\) does something else in eval mode") as e:
            cut(model, ["b"])
        assert "leaves=['part']" in e.value.hint
        assert model.training
        assert not model.b.training
        check(model, ["b"], X, leaves=["part"])


# Random models, random cuts


class Recipe(NamedTuple):
    sources: tuple[int, ...]
    kind: str


class Random(nn.Module):
    """Nodes that each take some of the earlier ones, in one of several ways."""

    def __init__(self, recipes, width=4):
        super().__init__()
        self.recipes = recipes
        self.middle = 1 + len(recipes) // 2
        self.parts = nn.ModuleList(
            nn.BatchNorm1d(width) if r.kind == "norm" else nn.Linear(width, width) for r in recipes
        )
        self.scales = nn.ParameterList(torch.rand(width) for _ in recipes)
        self.register_buffer("steps", torch.randn(len(recipes), width))

    def forward(self, x, extra, mask):
        values = [x, extra]
        rows = x.shape[0]
        for index, (part, recipe) in enumerate(zip(self.parts, self.recipes, strict=True)):
            taken = [values[source] for source in recipe.sources]
            value = part(sum(taken[1:], taken[0]))
            if recipe.kind == "scale":
                value = value * self.scales[index] + self.steps[index] / rows
            elif recipe.kind == "mask":
                value = value.masked_fill(mask.unsqueeze(-1), 0.5)
            elif recipe.kind == "split":
                one, two = value.split(2, dim=-1)
                value = torch.cat([two.sin(), one], -1)
            elif recipe.kind == "late":
                value = value.relu() + value.view(rows, 2, 2).flatten(1).tanh()
            elif recipe.kind == "drop":
                value = F.dropout(value, 0.3, self.training)
            values.append(value)
        return values[-1], values[self.middle]


@pytest.mark.parametrize("seed", range(40))
def test_random_models_and_random_cuts(seed):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    count = chance.randint(2, 9)
    kinds = ["plain", "scale", "mask", "split", "late", "drop", "norm"]
    recipes = []
    for index in range(count):
        number = chance.randint(1, min(3, index + 2))
        sources = tuple(sorted(chance.sample(range(index + 2), number)))
        recipes.append(Recipe(sources, chance.choice(kinds)))
    model = Random(recipes).train(chance.random() < 0.7)
    for p in model.parameters():
        p.requires_grad_(chance.random() < 0.85)
    model.parts[-1].requires_grad_(True)
    cuts = sorted(chance.sample(range(1, count), chance.randint(1, count - 1)))
    extras = {"extra": torch.randn(5, 4), "mask": torch.rand(5) < 0.3}
    check(model, [f"parts.{index}" for index in cuts], torch.randn(5, 4), extras)


# Plans


def whole(self, x):
    table = self.table.tanh()
    return self.c(self.b(self.a(x))) * table


def translation():
    mask = torch.arange(7)[None, :] < torch.randint(3, 8, (8, 1))
    extras = {"target": torch.randint(0, 11, (8, 5)), "mask": mask}
    at = ["encoder.1", "encoder.2", "decoder.0", "decoder.2", "head"]
    return Seq2Seq(dropout=0.0, tied=False), at, torch.randint(0, 11, (8, 7)), extras


CASES = {
    "residual": lambda: (
        Residual(),
        [f"blocks.{index}" for index in range(1, 6)],
        torch.randn(8, 8),
        {},
    ),
    "unet": lambda: (
        Net(lambda channels: nn.GroupNorm(2, channels)),
        ["down.1", "down.2.2", "bottom", "up.1", "up.2"],
        torch.randn(8, 2, 8, 8),
        {},
    ),
    "translation": translation,
    "whole": lambda: (
        model_of(whole, table=nn.Parameter(torch.randn(4)), **linears(3)),
        ["b", "c"],
        torch.randn(8, 4),
        {},
    ),
}
STAGES = {
    "one peer a stage": ([[0], [1], [2]], "1f1b"),
    "wide and narrow": ([[0, 1, 2], [1], [0, 2]], "1f1b"),
    "interleaved": ([[0], [1], [0]], "interleaved"),
}


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("case", CASES)
def test_plans_of_cut_models_give_the_run_of_one_process(case, stages):
    model, at, x, extras = CASES[case]()
    layers, model = cut(copy.deepcopy(model), at), model
    peers, schedule = STAGES[stages]
    each = [len(layers) // 3] * 2
    counts = [*each, len(layers) - sum(each)]
    plan = Plan.of_stages(zip(counts, peers, strict=True), microbatches=4, schedule=schedule)
    y = torch.randn_like(model(x, **extras))

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    optimizer, wanted = sgd(model.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, **extras), y)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())

    def train(carrier):
        mine = copy.deepcopy(layers)
        with Pipeline(mine, plan, loss_fn=F.mse_loss, optimizer=sgd, group=carrier) as pipe:
            losses = [pipe.step(x, y, extras) for _ in range(3)]
            state = {}
            for layer in pipe.layers():
                state |= layer.module.state_dict()
            return losses, state

    found = {}
    for losses, state in run_threads(len(plan.peers), train):
        assert losses == pytest.approx(wanted, rel=1e-11)
        for name, value in state.items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-9, atol=1e-11)
        found |= state
    assert found.keys() == model.state_dict().keys()


# Refusals


def refused(model, at, message, hint, **options):
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(CutError, match=re.escape(message)) as error:
        cut(model, at, **options)
    assert hint in (error.value.hint or ""), error.value.hint
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == attributes


def small(forward=lambda self, x: self.c(self.b(self.a(x))), count=3, **modules):
    return model_of(forward, **linears(count), **modules)


CALLED = "forward calls, in this order: 'a', 'b', 'c'"


def test_names_that_are_no_place_to_cut_at():
    refused(small(), ["bb"], "the model (Small) has no submodule 'bb'", f"'b'? {CALLED}")
    refused(small(), [""], "the model (Small) has no submodule ''", CALLED)
    refused(small(), "b", "at='b' is one string", "at=['b']")
    refused(small(count=4), ["d"], "'d' (Linear) is never called by forward", CALLED)
    refused(small(), ["c", "b"], "at=['c', 'b'] is not the order", "that is: ['b', 'c']")
    refused(small(), ["b", "b"], "at names 'b' twice", "")
    refused(small(), ["a"], "nothing is computed between the beginning and 'a'", "leave 'a' out")
    twice = small(lambda self, x: self.c(self.b(self.b(self.a(x)))))
    refused(twice, ["b"], "'b' is called 2 times", "name a submodule that is called once; forward")
    check(twice, ["c"], X)
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    inside = small(lambda self, x: self.t(self.a(x)), t=layer)
    refused(
        inside,
        ["t.linear1"],
        "'t.linear1' is inside 't' (TransformerEncoderLayer)",
        "cut before 't'",
    )
    same_module = small()
    same_module.other = same_module.b
    refused(same_module, ["other"], "'other' is the same module as 'b'", "write 'b'")
    nested = small(lambda self, x: self.a(self.s(self.b(x))), s=nn.Sequential(nn.Linear(4, 4)))
    refused(nested, ["s", "s.0"], "nothing is computed between 's' and 's.0'", "leave 's' out")
    lists = small(lambda self, x: self.l[1](self.l[0](x)), l=nn.ModuleList(linears(2).values()))
    refused(lists, ["l"], "'l' (ModuleList) is never called", "'l.0', 'l.1'")


def test_what_cannot_be_traced_names_the_part_and_the_line():
    class Gate(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                return x
            return -x

    model = small(lambda self, x: self.b(self.gate(self.a(x))), gate=Gate())
    message = "'gate' (Gate) cannot be traced, test_cut.py:"
    refused(model, ["b"], message, "keep this submodule whole: leaves=['gate']")
    with pytest.raises(CutError, match=re.escape("`if x.sum() > 0:`: symbolically traced")):
        cut(model, ["b"])
    check(model, ["b"], X, leaves=["gate"])
    check(model, ["gate", "b"], X, leaves=[Gate])

    def forward(self, x):
        for row in x:
            self.a(row)
        return self.b(self.a(x))

    move = "move the part that cannot be traced into a submodule, and keep that whole"
    refused(small(forward), ["b"], "the model (Small) cannot be traced", move)
    refused(
        small(), ["b"], "leaves='z': the model (Small) has no such", "'a', 'b', 'c'", leaves=["z"]
    )
    refused(small(), ["b"], "leaves has a int", "names of submodules, or classes", leaves=[1])


def part_that(forward):
    """A model with a submodule whose forward is this function."""
    part = type("Part", (nn.Module,), {"forward": forward})()
    return small(lambda self, x: self.b(self.part(self.a(x))), count=2, part=part)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


twice = Twice.apply


def test_what_a_trace_would_lose_is_refused_and_works_as_a_leaf():
    def without_gradient(self, x):
        with torch.no_grad():
            y = x * 2
        return x + y

    def autocast(self, x):
        with torch.autocast("cpu"):
            return (x @ x.T @ x).to(x.dtype)

    def counts(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return x

    lost = {
        without_gradient: "it runs under no_grad",
        autocast: "it runs under no_grad, inference_mode or autocast",
        lambda self, x: twice(x): "it calls a torch.autograd.Function",
        counts: "the forward of 'part' (Part) sets self.calls",
    }
    for forward, message in lost.items():
        refused(part_that(forward), ["b"], message, "leaves=['part']")
        model = part_that(forward)
        model.part.calls = 0
        layers = cut(model, ["b"], leaves=["part"])
        assert torch.equal(together(layers, X, {}), model(X))
    for forward in (lambda self, x: x + torch.rand(4), lambda self, x: x * random.random()):
        model, state = part_that(forward), (random.getstate(), torch.get_rng_state())
        refused(model, ["b"], "draws random numbers", "nn.Dropout")
        assert random.getstate() == state[0]
        assert torch.equal(torch.get_rng_state(), state[1])
    hidden = part_that(lambda self, x: x + self._parameters["p"] * 2)
    hidden.part.p = nn.Parameter(torch.ones(4))
    refused(hidden, ["b"], "from parameters that it does not take as self.name", "leaves=")


def test_hooks_are_refused_where_they_would_be_lost():
    model = part_that(lambda self, x: x * 2)
    handle = model.part.register_forward_hook(lambda *_: None)
    refused(model, ["b"], "'part' (Part) has hooks", "leaves=['part']")
    check(model, ["b"], X, leaves=["part"])
    handle.remove()
    model.register_full_backward_hook(lambda *_: None)
    refused(model, ["b"], "the model (Small) has hooks", "add them to the layers")
    model = small()
    seen = []
    model.a.register_forward_hook(lambda *_: seen.append(1))
    together(cut(model, ["b"]), X, {})
    assert seen == [1]


def test_outputs_that_are_no_tensors():
    hint = "return a tensor or a tuple of tensors"
    results = {
        "a dict with ['y']": lambda y: {"y": y},
        "None as item 1": lambda y: (y, None),
        "'getitem', which is no tensor, as item 1": lambda y: (y, y.shape[0]),
        "[b] as item 0": lambda y: ([y], y),
        "a Recipe": lambda y: Recipe(y, y),
    }
    for message, result in results.items():
        model = small(lambda self, x, result=result: result(self.b(self.a(x))))
        refused(model, ["b"], f"the model (Small) returns {message}", hint)


torch.fx.wrap("len")  # in the forwards of this module


def test_tuples_that_cross_as_a_whole():
    def counted(self, x):
        parts = torch.chunk(self.a(x), 2, -1)
        return self.b(parts[0].repeat(1, 2)) * len(parts)

    words = "'chunk' is a tuple and is used after the cut at 'b'"
    refused(small(counted, 2), ["b"], words, "only tensors cross a cut")

    def forward(self, x):
        parts = torch.chunk(self.a(x), 2, -1)
        h = self.b(x)
        return h + torch.cat(parts, -1)

    refused(
        small(forward, 2),
        ["b"],
        "'chunk' is a tuple and is used after the cut at 'b'",
        "`a, b = ...`",
    )


def test_changes_that_another_layer_would_not_see():
    def forward(self, x):
        a = self.a(x)
        view = a.view(-1)
        b = self.b(x)
        a += b
        return self.c(b) + view.view(3, 4)

    words = "'iadd' changes 'a' in place in layer 1"
    refused(small(forward), ["b", "c"], words, "`a = a + b` for `a += b`")
    refused(small(forward), ["b"], words, "or cut elsewhere")  # the view is in the same layer

    def later(self, x):
        a = self.a(x)
        b = self.b(a)
        a.add_(b)
        return self.c(b) + a

    refused(small(later), ["b", "c"], "'add_' changes 'a' in place in layer 1", "inplace=False")

    def buffer(self, x):
        a = self.a(x + self.total)
        self.total.add_(1)
        return self.b(a) + self.total

    refused(small(buffer, 2, total=torch.zeros(())), ["b"], "'add_' changes 'total' in place", "")


@pytest.mark.parametrize(
    "view",
    [
        lambda self, a: +a,
        lambda self, a: torch.positive(a),
        lambda self, a: a.adjoint().adjoint(),
        lambda self, a: torch.view_as_real(torch.view_as_complex(a.view(3, 2, 2))).view(3, 4),
        lambda self, a: torch.conj(a),
        lambda self, a: a.resolve_conj(),
        lambda self, a: self.drop(a.view(3, 4, 1)).view(3, 4),
        lambda self, a: torch.unsafe_split(a, 3)[0],
    ],
)
def test_all_that_may_be_a_view_counts_as_one(view):
    """In a copy on another peer the change would not be seen."""

    def forward(self, x):
        a = self.a(x)
        seen = view(self, a)
        b = self.b(x)
        a += b
        return b + seen

    words = "'iadd' changes 'a' in place in layer 1"
    refused(small(forward, 2, drop=nn.Dropout2d()), ["b"], words, "cut elsewhere")


def test_a_forward_that_casts_to_another_type_than_it_is_cut_under():
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.b(self.a(x))

    words = "it runs under no_grad, inference_mode or autocast, which a trace loses"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refused(small(forward, 2), ["b"], words, "leaves=")


def test_changes_of_a_tensor_that_a_trace_makes_once():
    def added(self, x):
        total = torch.zeros(3, 4)
        total += self.a(x)
        return self.b(total)

    def put(self, x):
        total = torch.zeros(3, 4)
        total[0] = self.a(x)[0]
        return self.b(total)

    for forward in (added, put):
        refused(small(forward, 2), ["b"], "changes a tensor in place that forward", "x.new_zeros")

    def like(self, x):
        total = x.new_zeros(3, 4)
        total += self.a(x)
        total[0] = self.a(x)[1]
        return self.b(total)

    check(small(like, 2), ["b"], X)


def test_arguments():
    refused(
        small(),
        ["b"],
        "the forward of the model (Small) has no argument 'mask'",
        "there are: x",
        inputs=["mask"],
    )
    refused(small(lambda self, *xs: self.a(xs[0])), [], "takes no input by name", "")
    model = small()
    model.forward = lambda x: x
    refused(model, ["b"], "this Small has a forward of its own", "before it is wrapped")
    with pytest.raises(CutError, match=r"cut takes an nn\.Module, not a list"):
        cut([nn.Linear(1, 1)], [])
    clash = small(lambda self, x: self.dependencies(self.a(x)), dependencies=nn.Linear(4, 4))
    refused(clash, [], "the model has an attribute 'dependencies', which layers have too", "rename")
    named = small(lambda self, x: self.graph(self.a(x)), graph=nn.Linear(4, 4))
    check(named, ["graph"], X)
