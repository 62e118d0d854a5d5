"""Running statistics: a step that fails leaves none, on any peer."""

import copy

import pytest
import torch
from tests.stages.threads import run_threads
from torch import nn
from torch.nn import functional as F

import manyhands as mh

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(2))


class Assigns(nn.Module):
    """Statistics that are put in place, not written to; and one that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen = 0.5 * self.seen + 0.5 * x.detach().mean(0)
            self.calls += 1
        return x


class Fails(nn.Module):
    """When it is told to, in its second microbatch."""

    def __init__(self):
        super().__init__()
        self.left = None
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise ValueError("no luck")
        return self.linear(x)


def build():
    torch.manual_seed(0)
    return [nn.BatchNorm1d(4), Assigns(), nn.Linear(4, 4), Fails(), nn.BatchNorm1d(4)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


PLANS = [
    mh.Plan.even(5, 1, microbatches=3),
    mh.Plan.even(5, 2, microbatches=3),
    mh.Plan.even(5, 2, microbatches=3, recompute=True),
    mh.Plan.of_stages([(2, [0, 1]), (3, [1])], microbatches=3),
    mh.Plan.of_stages([(5, [0, 1])], microbatches=3),
]


def on_all(plan, act):
    made = build()
    models = [copy.deepcopy(made) for _ in plan.peers]

    def body(carrier):
        pipe = mh.Pipeline(
            models[carrier.rank], plan, group=carrier, loss_fn=F.mse_loss, optimizer=sgd
        )
        return act(pipe), {layer.index: layer.module.state_dict() for layer in pipe.layers()}

    return run_threads(len(plan.peers), body)


def tell(pipe, left):
    for layer in pipe.layers():
        if isinstance(layer.module, Fails):
            layer.module.left = left


def state(pipe):
    return {
        (layer.index, name): value.clone()
        for layer in pipe.layers()
        for name, value in layer.module.state_dict().items()
    }


def equal(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[k], others[k]) for k in some)


@pytest.mark.parametrize("call", ["step", "evaluate", "predict", "forward"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_step_that_fails_leaves_no_statistics(plan, call):
    """Then the run is the one of a process that never tried."""

    def failing(pipe):
        losses = [pipe.step(X, Y)]
        before = state(pipe)
        tell(pipe, 1)
        with pytest.raises(mh.StepFailed, match="no luck"):
            getattr(pipe, call)(*((X, Y) if call in ("step", "evaluate") else (X,)))
        tell(pipe, None)
        assert equal(state(pipe), before)
        return [*losses, *(pipe.step(X, Y) for _ in range(2))]

    def smooth(pipe):
        return [pipe.step(X, Y) for _ in range(3)]

    for (losses, layers), (wanted, others) in zip(
        on_all(plan, failing), on_all(plan, smooth), strict=True
    ):
        assert losses == wanted
        for index, values in others.items():
            assert equal(layers[index], values), index


def test_a_backward_that_fails_takes_back_what_its_forward_saw():
    def act(pipe):
        before = state(pipe)
        output = pipe.forward(X)
        if output is not None:
            assert not equal(state(pipe), before)
        with pytest.raises(mh.StepFailed, match="2 gradients for 1 outputs"):
            pipe.backward(None if output is None else (output, output))
        assert equal(state(pipe), before)

    on_all(mh.Plan.even(5, 2, microbatches=3), act)


def test_statistics_noted_in_inference_mode_do_not_hinder_training():
    def act(pipe):
        with torch.inference_mode():
            pipe.predict(X)
        return pipe.step(X, Y)

    ((loss, _),) = on_all(mh.Plan.even(5, 1), act)
    assert loss > 0


class Forgets(nn.Module):
    """Has statistics only until its first step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.zeros(4))

    def forward(self, x):
        self.first = None
        return x


def test_statistics_that_a_layer_gives_up():
    def act(carrier):
        model = [nn.Linear(4, 4), Forgets()]
        plan = mh.Plan.even(2, 1, microbatches=2)
        with mh.Pipeline(model, plan, loss_fn=F.mse_loss, optimizer=sgd, group=carrier) as pipe:
            return [pipe.step(X, Y) for _ in range(3)]

    ((first, second, third),) = run_threads(1, act)
    assert first > second > third
