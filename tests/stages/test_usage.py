"""What a newcomer does wrong is an error on every peer, in words, and nobody waits for ever."""

import pytest
import torch
from tests.stages.threads import run_threads
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.core.errors import UsageError

X, Y = torch.randn(8, 4), torch.randn(8, 4)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def pipeline(carrier=None, plan=None, model=None, **options):
    given = {"loss_fn": F.mse_loss, "optimizer": sgd, "group": carrier} | options
    return mh.Pipeline(model or [nn.Linear(4, 4), nn.Linear(4, 4)], plan, **given)


def errors_of(plan, act, **options):
    """What act(pipeline) raises, on each peer."""

    def on_peer(carrier):
        with pytest.raises(mh.ManyhandsError) as caught:
            act(pipeline(carrier, plan, **options))
        return caught.value

    return run_threads(len(plan.peers), on_peer)


TWO = mh.Plan.even(2, 2, microbatches=2)
WIDE = mh.Plan.of_stages([(2, [0, 1])])


def test_a_module_that_is_no_list_of_layers_is_refused():
    with pytest.raises(ValueError, match="a Linear cannot be taken apart"):
        pipeline(plan=mh.Plan.even(1, 1), model=nn.Linear(4, 4))


def test_an_optimizer_instead_of_what_makes_one_is_refused():
    optimizer = sgd(nn.Linear(1, 1).parameters())
    with pytest.raises(ValueError, match="the optimizer is a SGD"):
        pipeline(plan=mh.Plan.even(2, 1), optimizer=optimizer)


def test_an_optimizer_that_needs_a_closure_is_refused_by_name():
    """At once, and on every peer."""

    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters)

    def on_peer(carrier):
        with pytest.raises(mh.ManyhandsError, match="LBFGS needs a closure") as caught:
            pipeline(carrier, TWO, optimizer=lbfgs)
        pipe = pipeline(carrier, TWO)
        with pytest.raises(UsageError, match="LBFGS needs a closure"):
            pipe.optimize(lbfgs)
        pipe.step(X, Y)  # with the one that it has
        return caught.value.hint

    assert all("Adam" in hint for hint in run_threads(2, on_peer))


@pytest.mark.parametrize("what", ["step", "apply"])
def test_without_an_optimizer_nothing_pretends_to_learn(what):
    pipe = pipeline(plan=mh.Plan.even(2, 1), optimizer=None)
    assert pipe.evaluate(X, Y) > 0
    with pytest.raises(ValueError, match=rf"{what}\(\) needs an optimizer"):
        pipe.step(X, Y) if what == "step" else pipe.apply()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"mask": 3}, "extra input 'mask' is a int"),
        (X, "the extra inputs are a Tensor"),
        ({"mask": X[:3]}, "extra input 'mask' has 3 rows, the input 8"),
    ],
)
def test_extra_inputs_that_are_none_are_refused_everywhere(extra, said):
    for error in errors_of(TWO, lambda pipe: pipe.step(X, Y, extra)):
        assert error.message == said


def test_targets_of_another_length_are_refused_everywhere():
    for targets in (Y[:4], torch.cat([Y, Y])):  # longer ones would be cut without a word
        for error in errors_of(TWO, lambda pipe, y=targets: pipe.step(X, y)):
            assert isinstance(error, mh.StepFailed)
            assert error.peer == "1"
            assert "where the batch has 8 rows" in error.message


def test_every_peer_of_a_wide_first_stage_needs_the_whole_batch():
    def step(pipe):
        pipe.step(X if pipe.me == 0 else X[:4], Y)

    for error in errors_of(WIDE, step):
        assert "the input has shape (4, 4) where the batch has 8 rows" in error.message
    for error in errors_of(WIDE, lambda pipe: pipe.step(X if pipe.me == 0 else None, Y)):
        assert error.message == "peer 1: this peer is in the first stage and was given no inputs"


def test_a_loss_that_is_no_number_is_refused_with_its_shape():
    for error in errors_of(TWO, lambda pipe: pipe.step(X, Y), loss_fn=lambda a, b: a - b):
        assert error.message == "peer 1: the loss has shape (4, 4)"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda a, b: F.mse_loss(a, b).detach(),
        lambda a, b: F.mse_loss(a.detach(), b),
        lambda _, b: b.sum(),
    ],
)
def test_a_loss_that_nothing_can_learn_from_is_refused(loss_fn, recompute):
    plan = TWO.replace(recompute=recompute)
    for error in errors_of(plan, lambda pipe: pipe.step(X, Y), loss_fn=loss_fn):
        assert isinstance(error, mh.StepFailed)
        assert error.message == "peer 1: the loss has no gradient, and nothing would be learned"


def test_a_loss_without_a_gradient_is_one_where_nothing_can_have_one():
    """Of a model that is frozen, and of rows among which nothing counts."""

    def of_some(output, targets):
        some = targets[:, 0] > 0
        if not some.any():
            return torch.zeros(()), 0
        return (output - targets)[some].square().sum(), some.sum()

    frozen = [nn.Linear(4, 4).requires_grad_(False), nn.ReLU()]
    assert pipeline(plan=mh.Plan.even(2, 1), model=frozen).step(X, Y) > 0
    targets = Y.abs()
    targets[:4] *= -1  # the first of two microbatches
    pipe = pipeline(plan=mh.Plan.even(2, 1, microbatches=2), loss_fn=of_some, loss_is="counted")
    before = [p.detach().clone() for layer in pipe.layers() for p in layer.module.parameters()]
    assert pipe.step(X, targets) > 0
    after = [p for layer in pipe.layers() for p in layer.module.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_function_that_forgets_to_return_its_optimizer_is_refused_everywhere():
    def forgetful(parameters):
        sgd(parameters)

    for error in errors_of(TWO, lambda _: None, optimizer=forgetful):
        assert "the function that makes the optimizer returned a NoneType" in error.message
        assert "returns it at its end" in error.hint


@pytest.mark.parametrize("targets", ["first", "last"])
def test_targets_reach_the_loss_as_they_were_given(targets):
    def loss(out, given):
        assert type(given) is tuple
        return F.mse_loss(out, given[0])

    def step(carrier):
        torch.manual_seed(0)
        return pipeline(carrier, TWO, loss_fn=loss, targets=targets).evaluate(X, (Y,))

    def plain(carrier):
        torch.manual_seed(0)
        return pipeline(carrier, TWO, targets=targets).evaluate(X, Y)

    for act in (step, plain):
        got = run_threads(2, act)
        assert got[0] == got[1] > 0


def test_a_variable_with_the_name_of_an_extra_input_is_refused():
    class Gives(nn.Module):
        def forward(self, x):
            mh.stash("mask", x)
            return x

    with pytest.raises(mh.VariableError, match=r"layer 0 .* 'mask', which is an extra input"):
        pipeline(plan=mh.Plan.even(2, 1), model=[Gives(), nn.Linear(4, 4)]).step(X, Y, {"mask": X})


def test_the_picture_has_the_plan_and_the_schedule():
    assert pipeline(plan=mh.Plan.even(2, 1, microbatches=2)).picture().splitlines() == [
        "stage       0",
        "0: 0 .. 1  100%",
        "2 microbatches, 1f1b",
        "",
        "0 | 0  (0)  1  (1)|",
        "0.0% of the time is waiting",
    ]


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_layer_without_values_is_named(device):
    """Only where it would run: a peer needs values of its own layers, and of no others."""
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    if device is not None:
        empty = (nn.Linear, {"in_features": 4, "out_features": 4, "device": device}, (8, 4))

    def act(carrier):
        with pytest.raises(UsageError if carrier.rank == 1 else mh.StepFailed) as caught:
            mh.Pipeline([nn.Linear(4, 4), empty], mh.Plan.even(2, 2), group=carrier)
        return str(caught.value)

    for said in run_threads(2, act):
        assert "layer 1 (Linear): its weight is on the device meta, without values" in said
        assert "hint: give the layer as (class, kwargs, input shape)" in said


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ((nn.Linear, {"in_features": 4}), "Linear cannot be built with {'in_features': 4}: "),
        ((dict, {"a": 1}), "dict made a dict"),
        ((nn.LazyLinear, {"out_features": 4}), "LazyLinear: its weight has no shape before the"),
    ],
)
def test_a_layer_that_cannot_be_built_is_named_by_its_place(layer, said):
    model = [(nn.Linear, {"in_features": 4, "out_features": 4}), layer]
    for error in errors_of(TWO, lambda _: None, model=model):
        assert f"layer 1: {said}" in error.message
    with pytest.raises(mh.PlanError, match="layer 1: "):
        mh.partition(model, X)
