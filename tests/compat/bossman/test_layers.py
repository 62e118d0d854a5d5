"""What layers cost, and which variables they name, before any is built."""

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.compat.bossman import wrapped_linear
from manyhands.compat.bossman.cost import cost_of
from manyhands.compat.bossman.variables import variables_of
from manyhands.core.errors import UsageError
from manyhands.stages.layers import Running, Spec, specs_of
from manyhands.stages.variables import Scope, VariableError


@pytest.mark.parametrize("more", [{}, {"device": "cpu"}], ids=str)
def test_costs_are_counted_without_the_layer(more):
    kwargs = {"in_features": 1 << 20, "out_features": 1 << 20, **more}
    large = Spec(nn.Linear, kwargs, ())  # 4 TiB
    assert cost_of(large, "layer 0").state_bytes == 4 * 4 * ((1 << 40) + (1 << 20))
    relu = cost_of(Spec(nn.ReLU, {}, ((32, 512), (32, 512))), "layer 0")
    assert (relu.state_bytes, relu.activation_bytes) == (0, 2 * 32 * 512 * 4)


class Looking(nn.Linear):
    """Its constructor needs values."""

    def __init__(self):
        super().__init__(2, 2)
        assert float(self.weight.sum()) != 0
        self.bias.requires_grad_(False)


def test_costs_of_layers_that_must_be_built():
    state = torch.get_rng_state()
    cost = cost_of(Spec(Looking, {}, ()), "layer 0")
    assert (cost.parameter_bytes, cost.gradient_bytes, cost.optimizer_bytes) == (24, 16, 32)
    assert torch.equal(torch.get_rng_state(), state)


def test_wrong_arguments_name_the_layer():
    with pytest.raises(UsageError, match=r"layer 4 cannot be built with {.width.: 3}"):
        cost_of(Spec(nn.Linear, {"width": 3}, ()), "layer 4")
    with pytest.raises(UsageError, match=r"layer 4 cannot .* its weight has no shape before the f"):
        cost_of(Spec(nn.LazyLinear, {"out_features": 3}, ()), "layer 4")


def linear(**more):
    return (wrapped_linear, {"in_features": 4, "out_features": 4, **more}, (8, 4))


def variables(*layers):
    return variables_of(specs_of(list(layers)))


def test_variables_are_found_with_givers_and_takers():
    assert variables(
        linear(out_variables=["a", "b"]),
        linear(dependencies=["a"]),
        (nn.ReLU, {}, (8, 4)),
        linear(dependencies=["b", "a", "mask"]),
    ) == {"a": (0, (1, 3)), "b": (0, (3,)), "mask": (None, (3,))}


def test_in_variables_is_the_same_word():
    model = [linear(out_variables=["a"]), linear(in_variables=["a"]), linear(dependencies=["a"])]
    assert variables(*model) == {"a": (0, (1, 2))}


def test_wrapped_linear_takes_either_word():
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    x, skip = torch.randn(2, 3, 4)
    for word in ("dependencies", "in_variables"):
        layer = specs_of([linear(**{word: ["a"]})])[0].build()
        layer.load_state_dict(plain.state_dict())
        scope = Scope({"a": skip})
        found = Running(layer, 0, "layer").run(x, scope)
        assert torch.equal(found, plain(x) + skip)
        assert list(scope.popped) == ["a"]


class Takes(nn.Module):
    """Says so as its class."""

    dependencies = ["a"]  # noqa: RUF012


class Ordered(nn.Module):
    """Says it by the order of its arguments only."""

    forward_order = ["a", "x"]  # noqa: RUF012


class Pops(nn.Module):
    """Says it when it runs."""

    def forward(self, x):
        return x + mh.pop("a")


class Gives(nn.Module):
    out_variables = ("a",)


@pytest.mark.parametrize(
    ("giver", "taker", "takers"),
    [
        (linear(out_variables=["a"]), (Takes, {}), (1,)),
        (linear(out_variables=["a"]), (Ordered, {}), (1,)),
        (linear(out_variables=["a"]), (Pops, {}), ()),
        ((Gives, {}), linear(dependencies=["a"]), (1,)),
        ((Gives, {}), (Pops, {}), ()),
    ],
)
def test_layers_that_say_it_elsewhere_than_in_their_arguments(giver, taker, takers):
    assert variables(giver, taker) == {"a": (0, takers)}
    # Whoever comes before cannot take it, and torch's own layers never do.
    with pytest.raises(
        VariableError, match=r"gives 'a', and no layer takes it|layer 0 .* takes 'a'"
    ):
        variables(taker, giver, (nn.ReLU, {}))


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (
            [linear(out_variables=["a"]), linear(out_variables=["a"])],
            "layer 1 .* gives 'a', which layer 0",
        ),
        (
            [linear(dependencies=["a"]), linear(out_variables=["a"])],
            "layer 0 .* takes 'a', which layer 1",
        ),
        ([linear(dependencies=["a"], out_variables=["a"])], "layer 0 .* takes 'a', which layer 0"),
        ([linear(out_variables=["a"]), linear()], "layer 0 .* gives 'a', and no layer takes it"),
        (
            [linear(in_variables=["a"]), linear(out_variables=["a"])],
            "layer 0 .* takes 'a', which layer 1",
        ),
        (
            [linear(dependencies=["a"], in_variables=["b"])],
            r"layer 0 .*dependencies=\['a'\] and in_variables=\['b'\]",
        ),
    ],
)
def test_wrong_variables_are_named_with_their_layers(layers, words):
    with pytest.raises(VariableError, match=words):
        variables(*layers)
