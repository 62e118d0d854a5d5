"""Peers that were not started alike hear of it, instead of waiting for each other."""

import re

import numpy as np
import pytest
import torch
from tests.stages.threads import run_threads
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.core.errors import UsageError

X, Y = torch.randn(8, 4), torch.randn(8, 4)
TWO = mh.Plan.even(2, 2, microbatches=2)
WIDE = mh.Plan.of_stages([(2, [0, 1])])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def layers():
    return [nn.Linear(4, 4), nn.Linear(4, 4)]


def made(second, plan=TWO, size=2):
    """What each peer hears when the second one's Pipeline is made with something else."""

    def on_peer(carrier):
        given = {"model": layers(), "plan": plan, "loss_fn": F.mse_loss, "optimizer": sgd}
        if carrier.rank == 1:
            given |= second
        with pytest.raises(mh.ManyhandsError) as caught:
            mh.Pipeline(**given, group=carrier)
        return caught.value

    return run_threads(size, on_peer)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"plan": TWO.replace(microbatches=4)}, "microbatches is 2 there, 4 here"),
        ({"plan": TWO.replace(schedule="afab")}, "schedule is '1f1b' there, 'afab' here"),
        ({"plan": WIDE}, r"layer 0 is 0 on \[0\] there, 0 on \[0, 1\] here"),
        ({"plan": mh.Plan.even(3, 3)}, "the plan is for 3 peers, the group has 2"),
        ({"plan": mh.Plan.even(3, 2)}, r"layer 1 is 1 on \[1\] there, 1 on \[0\] here"),
        ({"clip_norm": 1.0}, "the first peer has clip_norm=None, this one clip_norm=1.0"),
        ({"seed": 3}, "the first peer has seed=None, this one seed=3"),
        ({"loss_fn": None}, "the first peer has loss_fn given, this one no loss_fn"),
        ({"optimizer": None}, "the first peer has optimizer given, this one no optimizer"),
        ({"targets": "first"}, "targets='last', this one targets='first'"),
        ({"loss_is": "sum"}, "loss_is='mean', this one loss_is='sum'"),
        ({"optimizer": sgd([nn.Parameter(X)])}, "the optimizer is a SGD"),
        ({"model": [nn.Linear(4, 4)]}, "the plan has 2 layers, the model 1"),
    ],
)
def test_what_is_not_the_same_is_said_on_every_peer(second, said):
    first, other = made(second)
    assert isinstance(first, mh.StepFailed)
    assert first.peer == "1"
    assert isinstance(other, ValueError)
    for error in (first, other):
        assert error.hint
        with pytest.raises(type(error), match=said):
            raise error


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)], "4 and 3|3 and 4"),
        ([nn.Linear(4, 4), nn.Linear(4, 4).double()], "float64"),
        ([nn.Linear(4, 4), nn.Linear(4, 5)], r"\(5, 4\)"),
        ([nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)], "False"),
    ],
)
def test_parameters_of_a_wide_stage_are_the_same_on_its_peers(model, said):
    for error in made({"model": model}, WIDE):
        with pytest.raises(type(error), match=f"other parameters here than on peer 0: .*{said}"):
            raise error


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("evaluate", "step", r"evaluate\(\) in training mode, this one in step\(\) in training"),
        ("eval", "step", r"step\(\) in evaluation mode, this one in step\(\) in training mode"),
        ("step", "predict", r"peer 0 is in step\(\) in training mode, this one in predict\(\)"),
        ("save", "step", r"peer 0 does not begin a step, this one is in step\(\) in training mode"),
        ("step", "save", r"peer 0 is not in save\(\), this one is"),
    ],
)
def test_a_peer_in_another_call_ends_the_plan_and_says_why(first, second, said, tmp_path):
    heard = []

    def on_peer(carrier):
        carrier.timeout_s = 2.0
        carrier.give_up = heard.append
        pipe = mh.Pipeline(layers(), TWO, loss_fn=F.mse_loss, optimizer=sgd, group=carrier)
        call = first if pipe.me == 0 else second
        if call == "eval":
            pipe.eval()
            call = "step"
        given = {"predict": (X,), "save": (str(tmp_path),)}.get(call, (X, Y))
        with pytest.raises(mh.PlanBroken) as caught:
            getattr(pipe, call)(*given)
        return caught.value

    _, other = run_threads(2, on_peer)
    with pytest.raises(mh.PlanBroken, match=said):
        raise other
    assert any(re.search(r"all peers make the same calls.* on peer 1$", words) for words in heard)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"clip_norm": float("nan")}, "clip_norm=nan"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"clip_norm": float("inf")}, "clip_norm=inf"),
        ({"targets": "middle"}, "targets='middle'"),
        ({"loss_is": "median"}, "loss_is='median'"),
        ({"clip_norm": "1"}, "clip_norm='1'"),
        ({"seed": 1 << 64}, "seed=18446744073709551616"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": np.int64(3)}, "seed=np.int64"),
    ],
)
def test_options_that_no_run_can_have(option, said):
    with pytest.raises(UsageError, match=said):
        mh.Pipeline(layers(), mh.Plan.even(2, 1), loss_fn=F.mse_loss, optimizer=sgd, **option)
