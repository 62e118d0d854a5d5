"""Autocast: the same losses and parameters as in one process, on in some steps, the same on all."""

import copy
from contextlib import nullcontext

import pytest
import torch
from tests.stages.threads import run_threads
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.core.errors import UsageError
from manyhands.stages.precision import precision_here

CPU = torch.device("cpu")
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
WAYS = [None, "bfloat16", "bfloat16", None, "float16", "bfloat16"]  # of one step after the other


class Gives(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        mh.stash("skip", y)
        return y.float().tanh()


class Takes(nn.Module):
    def forward(self, x):
        return x + mh.pop("skip")


def build():
    torch.manual_seed(0)
    return [Gives(), nn.Linear(4, 4), nn.LayerNorm(4), Takes(), nn.Linear(4, 4)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def cast(way):
    return nullcontext() if way is None else torch.autocast("cpu", dtype=getattr(torch, way))


def plain(ways, microbatches):
    """The loop that torch's documentation has: forward and loss inside, backward outside."""
    model = nn.Sequential(*build())
    optimizer, losses = sgd(model.parameters()), []
    for way in ways:
        total = torch.zeros(())
        for x, y in zip(X.chunk(microbatches), Y.chunk(microbatches), strict=True):
            with cast(way), mh.variables():
                loss = F.mse_loss(model(x), y) * (len(x) / len(X))
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses, model.state_dict()


def pipelines(plan, act, **options):
    made = build()
    models = [copy.deepcopy(made) for _ in plan.peers]

    def body(carrier):
        given = {"loss_fn": F.mse_loss, "optimizer": sgd, "group": carrier} | options
        pipe = mh.Pipeline(models[carrier.rank], plan, **given)
        return act(pipe), {
            f"{layer.index}.{name}": value
            for layer in pipe.layers()
            for name, value in layer.module.state_dict().items()
        }

    found = run_threads(len(plan.peers), body)
    whole = {name: value for _, state in found for name, value in state.items()}
    return [result for result, _ in found], whole


PLANS = {
    "alone": mh.Plan.even(5, 1, microbatches=2),
    "two": mh.Plan.even(5, 2, microbatches=2),
    "interleaved": mh.Plan.even(5, 2, stages_per_peer=2, microbatches=2),
    "three": mh.Plan.even(5, 3, microbatches=2),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_steps_with_and_without_autocast_are_those_of_one_process(plan, recompute):
    def act(pipe):
        losses = []
        for way in WAYS:
            with cast(way):
                losses.append(pipe.step(X, Y))
        return losses

    losses, state = plain(WAYS, 2)
    found, whole = pipelines(PLANS[plan].replace(recompute=recompute), act)
    for of_peer in found:
        assert of_peer == pytest.approx(losses, rel=1e-6)
    assert whole.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(whole[name], value), name


@pytest.mark.parametrize("recompute", [False, True])
def test_many_steps_in_one_block(recompute):
    """The weights that autocast has cast are not those of the step before."""

    def act(pipe):
        losses = []
        with cast("bfloat16"):
            for _ in range(3):
                losses += [pipe.evaluate(X, Y), pipe.step(X, Y)]
        return losses

    losses, state = plain(["bfloat16"] * 3, 2)
    found, whole = pipelines(PLANS["two"].replace(recompute=recompute), act)
    assert found[0][1::2] == pytest.approx(losses, rel=1e-6)
    assert found[0][::2] == pytest.approx(losses, rel=1e-6)
    for name, value in state.items():
        assert torch.equal(whole[name], value), name


@pytest.mark.parametrize("plan", ["two", "three"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("rehearsed", [True, False])
def test_peers_that_differ_hear_so_and_can_go_on(plan, first, rehearsed):
    """Whether or not steps of this kind were made before."""

    def act(pipe):
        if rehearsed:
            for way in ("bfloat16", None):
                with cast(way):
                    pipe.step(X, Y)
        before = [p.clone() for layer in pipe.layers() for p in layer.module.parameters()]
        with (
            cast("bfloat16" if (pipe.me == 0) == first else None),
            pytest.raises((mh.StepFailed, mh.PlanError), match="autocast") as caught,
        ):
            pipe.step(X, Y)
        after = [p for layer in pipe.layers() for p in layer.module.parameters()]
        assert all(map(torch.equal, before, after))
        with cast("bfloat16"):
            return str(caught.value), pipe.step(X, Y)

    found, _ = pipelines(PLANS[plan], act)
    losses, _ = plain(["bfloat16", None, "bfloat16"] if rehearsed else ["bfloat16"], 2)
    (said,) = {text for text, _ in found}
    ways = ("under autocast to bfloat16", "without autocast")
    there, here = ways if first else ways[::-1]
    assert f"peer 0 computes {there}, peer 1 {here}" in said
    assert "with torch.autocast(...)" in said
    for _, loss in found:
        assert loss == pytest.approx(losses[-1], rel=1e-6)


def test_peers_of_one_stage_that_differ():
    plan = mh.Plan.of_stages([(5, [0, 1])], microbatches=2)

    def act(pipe):
        with cast("bfloat16" if pipe.me == 0 else None), pytest.raises(mh.StepFailed) as caught:
            pipe.step(X, Y)
        return str(caught.value)

    found, _ = pipelines(plan, act)
    assert all("peer 1: peer 0 computes under autocast to bfloat16, peer 1" in s for s in found)


def test_halves_of_a_step_of_which_only_the_first_is_cast():
    def act(pipe):
        with cast("bfloat16"):
            output = pipe.forward(X)
        gradient = None
        if output is not None:
            output.requires_grad_()
            with cast("bfloat16"):
                loss = F.mse_loss(output, Y)
            loss.backward()
            gradient = output.grad
        pipe.backward(gradient)
        pipe.apply()

    _, state = plain(["bfloat16"], 1)
    for recompute in (False, True):
        plan = mh.Plan.even(5, 2, recompute=recompute)
        _, whole = pipelines(plan, act)
        for name, value in state.items():
            assert torch.equal(whole[name], value), (name, recompute)


@pytest.mark.parametrize(
    ("on", "told"),
    [
        ({}, None),
        ({"cuda": torch.float16}, "float16"),
        ({"cpu": torch.bfloat16, "cuda": torch.bfloat16}, "bfloat16"),
        ({"cpu": torch.bfloat16, "cuda": torch.float16}, UsageError),
        ({"cuda": torch.float64}, UsageError),
    ],
)
def test_what_others_are_told_is_one_type(monkeypatch, on, told):
    """Of whatever kind of device: who tells may have no GPU, and others no CPU to compute with."""
    monkeypatch.setattr(torch, "is_autocast_enabled", on.__contains__)
    monkeypatch.setattr(torch, "get_autocast_dtype", on.__getitem__)
    if told is UsageError:
        with pytest.raises(UsageError, match=r"autocast is to (bfloat16 and float16|float64) here"):
            precision_here()
    else:
        assert precision_here() == told
