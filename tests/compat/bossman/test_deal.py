"""Which layers go to which worker; which variables cross."""

import itertools
import random

import pytest
from torch import nn

from manyhands.compat.bossman import wrapped_linear
from manyhands.compat.bossman.cost import cost_of
from manyhands.compat.bossman.deal import NotEnoughMemory, deal
from manyhands.compat.bossman.variables import variables_of
from manyhands.core.errors import UsageError
from manyhands.core.plan import PlanError
from manyhands.stages.layers import Spec, specs_of
from manyhands.stages.variables import VariableError


def fullness(costs, workers, parts):
    return max(
        sum(costs[i] for i in part) / free for part, (_, free) in zip(parts, workers, strict=True)
    )


def test_the_fullest_worker_is_as_empty_as_can_be():
    rng = random.Random(3)
    for _ in range(200):
        num = rng.randint(1, 4)
        costs = [rng.choice([0, 1, 5, 20, 100]) for _ in range(rng.randint(num, 9))]
        workers = [(str(i), rng.randint(1000, 4000)) for i in range(num)]
        parts = deal(costs, workers)
        assert [i for part in parts for i in part] == list(range(len(costs)))
        assert all(parts)
        ways = itertools.combinations(range(1, len(costs)), num - 1)
        cuts = [(0, *way, len(costs)) for way in ways]
        best = min(
            fullness(costs, workers, [range(*pair) for pair in itertools.pairwise(cut)])
            for cut in cuts
        )
        assert fullness(costs, workers, parts) == pytest.approx(best)


def test_in_proportion_to_free_memory():
    parts = deal([10] * 9, [("small", 1000), ("large", 2000)])
    assert [len(part) for part in parts] == [3, 6]


def test_what_does_not_fit_says_where_and_by_how_much():
    mib = 1 << 20
    with pytest.raises(NotEnoughMemory, match=r"worker b has 2.0 MiB free") as no:
        deal([mib, mib, 5 * mib], [("a", 2 * mib), ("b", 2 * mib)])
    assert no.value.missing_bytes == 3 * mib
    assert "(layer 2) needs 5.0 MiB: 3.0 MiB too little" in str(no.value)
    with pytest.raises(PlanError, match="1 layers for 2 workers"):
        deal([1], [("a", 9), ("b", 9)])
    with pytest.raises(NotEnoughMemory, match=r"worker b has 0.0 MiB free"):
        deal([mib, mib], [("a", 9 * mib), ("b", 0)])


def test_costs_are_counted_without_the_layer():
    large = Spec(nn.Linear, {"in_features": 1 << 20, "out_features": 1 << 20}, ())  # 4 TiB
    assert cost_of(large, "layer 0") == 4 * 4 * ((1 << 40) + (1 << 20))
    assert cost_of(Spec(nn.ReLU, {}, ((32, 512), (32, 512))), "layer 0") == 2 * 32 * 512 * 4
    with pytest.raises(UsageError, match=r"layer 4 cannot be built with {.width.: 3}"):
        cost_of(Spec(nn.Linear, {"width": 3}, ()), "layer 4")


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
    ],
)
def test_wrong_variables_are_named_with_their_layers(layers, words):
    with pytest.raises(VariableError, match=words):
        variables(*layers)
