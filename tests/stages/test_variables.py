"""What is wrong is found before the first step, on all peers alike, and the layer is named."""

import pytest
import torch
from tests.stages.cases import WIDTH, Giving, Joining, Masked, SeedSpelling, Taking
from tests.stages.threads import run_threads
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.core.errors import UsageError
from manyhands.core.plan import PlanError
from manyhands.stages.errors import StepFailed


def start(layers, extra=None, rows=4):
    """The first step with one peer a layer; returns the errors of all peers."""
    size = len(layers)
    names = [f"l{index}" for index in range(size)]
    plan = mh.Plan.of_stages([(1, [index]) for index in range(size)], names=names)
    x = torch.randn(rows, WIDTH)
    before = [parameter.detach().clone() for layer in layers for parameter in layer.parameters()]

    def act(carrier):
        pipe = mh.Pipeline(
            layers, plan, loss_fn=F.mse_loss, optimizer=torch.optim.Adam, group=carrier
        )
        with pytest.raises(UsageError) as caught:
            pipe.step(x, x, extra)
        return caught.value

    errors = run_threads(size, act)
    assert len({(type(error), str(error)) for error in errors}) == 1
    after = [parameter for layer in layers for parameter in layer.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return errors[0]


def linear():
    return nn.Linear(WIDTH, WIDTH)


def test_unknown():
    error = start([Giving(["a"]), Taking(["a", "b"])])
    assert isinstance(error, mh.VariableError)
    assert "layer 1 (l1) pops 'b', which no layer before it has stashed" in str(error)
    assert "there are: 'a'" in str(error)


def test_out_of_order():
    error = start([Taking(["a"]), Giving(["a"]), Taking(["a"])])
    assert isinstance(error, mh.VariableError)
    assert "layer 0 (l0) pops 'a', which no layer before it has stashed" in str(error)


def test_given_twice():
    error = start([Giving(["a"]), Giving(["a"]), Taking(["a"])])
    assert isinstance(error, mh.VariableError)
    assert "layer 1 (l1) stashes 'a', which layer 0 (l0) has stashed already" in str(error)


def test_unused():
    error = start([linear(), Giving(["a", "b"]), Taking(["a"])])
    assert isinstance(error, mh.VariableError)
    assert "layer 1 (l1) stashes 'b', and no later layer pops it" in str(error)


def test_an_extra_input_that_nobody_takes():
    error = start([linear(), linear()], {"mask": torch.ones(4, 1)})
    assert "no layer takes the extra input 'mask'" in str(error)


def test_an_extra_input_that_is_missing():
    error = start([linear(), Masked("mask")])
    assert "layer 1 (l1) pops 'mask'" in str(error)


def test_the_seeds_spelling_returns_other_names_than_it_says():
    layer = SeedSpelling(gives=["a"])
    layer.forward = lambda x: (layer.linear(x), [("b", x)])
    error = start([layer, Taking(["a"])])
    assert "layer 0 (l0) says out_variables=['a'] and returned ['b']" in str(error)


def test_a_variable_without_rows_must_say_so():
    class Odd(nn.Module):
        def forward(self, x):
            mh.stash("table", torch.zeros(3, WIDTH))
            return x

    error = start([Odd(), Taking(["table"])])
    assert isinstance(error, PlanError)
    assert "layer 0 (l0) stashed as 'table' a tensor of shape (3, 6) for 4 rows" in str(error)
    assert "whole=True" in str(error)


def test_a_layer_writes_into_what_was_stashed():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            y = self.linear(x)
            mh.stash("a", y)
            return y

    layers = [nn.Sequential(Keeping(), nn.ReLU(inplace=True)), Taking(["a"])]
    error = start(layers)
    assert "layer 0 (l0) stashes 'a', and a later layer writes into that tensor" in str(error)


class Doubling(nn.Module):
    """Writes into a variable that it takes."""

    def forward(self, x):
        return x * mh.pop("mask").mul_(2)


class Mask(nn.Module):
    def forward(self, x):
        mh.stash("mask", (x > 0).to(x.dtype))
        return x


@pytest.mark.parametrize("from_outside", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "stages",
    [
        [(4, [0])],
        [(2, [0]), (2, [1])],
        [(2, [0]), (1, [1]), (1, [0])],
        [(1, [0]), (3, [1])],
        [(3, [0]), (1, [1])],
    ],
    ids=str,
)
def test_a_layer_writes_into_what_it_takes(stages, last, from_outside):
    """Refused by every plan: whoever takes it later sees the change in some plans only."""
    layers = [nn.Identity() if from_outside else Mask(), linear(), Doubling(), Masked("mask")]
    if last:
        layers[2:] = [Masked("mask"), Doubling()]
    x = torch.randn(4, WIDTH)
    extra = {"mask": torch.ones(4, WIDTH)} if from_outside else None
    plan = mh.Plan.of_stages(stages)
    giver = "the input 'mask' is given" if from_outside else r"layer 0 \(0\) stashes 'mask'"

    def act(carrier):
        pipe = mh.Pipeline(layers, plan, group=carrier)
        with pytest.raises(mh.VariableError, match=f"{giver}, and a later layer writes into") as no:
            pipe.predict(x, extra)
        return str(no.value)

    assert len(set(run_threads(len(plan.peers), act))) == 1


def test_a_layer_writes_into_what_it_takes_on_some_values_only():
    """Nothing of it is seen in the rehearsal, on zeros."""

    class Sometimes(nn.Module):
        def forward(self, x):
            mask = mh.pop("mask")
            return x * (mask.mul_(2) if x.any() else mask)

    def act(carrier):
        pipe = mh.Pipeline(
            [Mask(), linear(), Sometimes()], mh.Plan.of_stages([(2, [0]), (1, [1])]), group=carrier
        )
        with pytest.raises(StepFailed, match=r"'mask'.* and a later layer writes into that tensor"):
            pipe.predict(torch.randn(4, WIDTH))
        return True

    assert run_threads(2, act) == [True, True]


def test_shapes_that_do_not_fit():
    error = start([linear(), nn.Linear(WIDTH, 3), linear()])
    assert isinstance(error, PlanError)
    assert "layer 2 (l2) cannot take what it is given" in str(error)


def test_rows_that_get_lost():
    class Flat(nn.Module):
        def forward(self, x):
            return x.reshape(1, -1)

    error = start([linear(), Flat(), nn.Identity()])
    assert "layer 1 (l1) returned a tensor of shape (1, 24) for 4 rows" in str(error)


def test_a_layer_that_returns_something_else():
    class Dictionary(nn.Module):
        def forward(self, x):
            return {"x": x}

    error = start([Dictionary(), linear()])
    assert "layer 0 (l0) returned a dict" in str(error)


def test_a_layer_that_joins_what_is_one():
    error = start([linear(), Joining()], rows=1)
    assert "layer 1 (l1) cannot take what it is given" in str(error)


def test_outside_of_a_plan():
    with pytest.raises(mh.VariableError, match=r"mh.stash\('a'\) outside of a plan"):
        Giving(["a"])(torch.zeros(1, WIDTH))
    with pytest.raises(mh.VariableError, match=r"mh.pop\('a'\) outside of a plan"):
        Taking(["a"])(torch.zeros(1, WIDTH))


def test_a_model_that_runs_as_one():
    torch.manual_seed(0)
    model = nn.Sequential(Giving(["a"]), linear(), Taking(["a"]))
    x = torch.randn(2, WIDTH)
    with mh.variables():
        first = model(x)
    with mh.variables():
        assert torch.equal(model(x), first)
    with mh.variables():
        model(x)
        with pytest.raises(mh.VariableError, match="stashed already"):
            model(x)


def test_forward_order_says_where_the_input_goes():
    class Ordered(nn.Module):
        dependencies = ["a", "b"]  # noqa: RUF012
        forward_order = ["b", "x", "a"]  # noqa: RUF012

        def forward(self, b, x, a):
            return b * 100 + x * 10 + a

    class Two(nn.Module):
        out_variables = ["a", "b"]  # noqa: RUF012

        def forward(self, x):
            return x, [("b", x * 3), ("a", x * 2)]

    plan = mh.Plan.of_stages([(2, [0])])
    pipe = mh.Pipeline([Two(), Ordered()], plan)
    assert torch.equal(pipe.predict(torch.ones(1, 1)), torch.tensor([[312.0]]))


class Two(nn.Module):
    out_variables = ["a", "b"]  # noqa: RUF012

    def forward(self, x):
        return x, [("b", x * 3), ("a", x * 2)]


class Summing(nn.Module):
    """Takes what it is told to, under one of the two words."""

    def __init__(self, word, names):
        super().__init__()
        setattr(self, word, names)

    def forward(self, x, *taken):
        return sum((10 ** (place + 1) * t for place, t in enumerate(taken)), x)


@pytest.mark.parametrize("word", ["dependencies", "in_variables"])
@pytest.mark.parametrize("names", [["a", "b"], ("b", "a")])
def test_both_words_for_what_a_layer_takes(word, names):
    """Between peers; in the order in which they are named."""
    plan = mh.Plan.even(3, 3, microbatches=2, schedule="1f1b")
    x = torch.ones(4, 1)

    def act(carrier):
        pipe = mh.Pipeline([Two(), nn.Identity(), Summing(word, names)], plan, group=carrier)
        return pipe.predict(x)

    *others, found = run_threads(3, act)
    assert others == [None, None]
    assert torch.equal(found, x * (321 if list(names) == ["a", "b"] else 231))


def test_in_variables_with_forward_order():
    class Ordered(nn.Module):
        in_variables = ["a", "b"]  # noqa: RUF012
        forward_order = ["b", "x", "a"]  # noqa: RUF012

        def forward(self, b, x, a):
            return b * 100 + x * 10 + a

    pipe = mh.Pipeline([Two(), Ordered()], mh.Plan.of_stages([(2, [0])]))
    assert torch.equal(pipe.predict(torch.ones(1, 1)), torch.tensor([[312.0]]))


def test_in_variables_that_nobody_gives():
    error = start([Giving(["a"]), Taking(["a"]), Summing("in_variables", ["c"])])
    assert isinstance(error, mh.VariableError)
    assert "layer 2 (l2) pops 'c', which no layer before it has stashed" in str(error)


def test_two_words_that_say_different_things():
    class Both(nn.Module):
        dependencies = ["a"]  # noqa: RUF012
        in_variables = ["b"]  # noqa: RUF012

    with pytest.raises(mh.VariableError, match=r"Both has dependencies=.'a'. and in_var") as no:
        mh.Pipeline([Both()], mh.Plan.of_stages([(1, [0])]))
    assert "use one of them" in no.value.hint
    Both.in_variables = ("a",)
    mh.Pipeline([Both()], mh.Plan.of_stages([(1, [0])]))


def test_names_that_are_none():
    class Wrong(nn.Module):
        in_variables = [1, 2]  # noqa: RUF012

    with pytest.raises(mh.VariableError, match=r"Wrong.in_variables is \[1, 2\], not names") as no:
        mh.Pipeline([Wrong()], mh.Plan.of_stages([(1, [0])]))
    assert no.value.hint


def test_forward_order_that_leaves_a_variable_out():
    class Wrong(nn.Module):
        dependencies = ["a", "b"]  # noqa: RUF012
        forward_order = ["x", "a"]  # noqa: RUF012

    with pytest.raises(mh.VariableError, match="names every variable"):
        mh.Pipeline([Wrong()], mh.Plan.of_stages([(1, [0])]))
