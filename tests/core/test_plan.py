"""Plans as values: round trip, pictures, and what cannot be one."""

import json
from fractions import Fraction

import numpy as np
import pytest

from manyhands.core.plan import Layer, Plan, PlanError


def burst():
    return Plan.of_stages(
        [(2, [0, 1, 2, 3]), (1, [0, 1], [3, 1]), (1, [2]), (1, [0, 1, 2, 3])],
        names=["in", "conv", "mid", "head", "out"],
        peers=["ann", "bob", "cem", "dot"],
        microbatches=4,
        schedule="interleaved",
    )


def test_stages_are_consecutive_layers_on_the_same_peers_with_the_same_split():
    stages = burst().stages
    assert [(s.first, s.end, s.peers) for s in stages] == [
        (0, 2, (0, 1, 2, 3)),
        (2, 3, (0, 1)),
        (3, 4, (2,)),
        (4, 5, (0, 1, 2, 3)),
    ]
    assert [s.index for s in burst().stages_of(2)] == [0, 2, 3]
    assert stages[1].split == (3, 1)
    assert stages[1].lead == 0


def test_two_splits_over_the_same_peers_are_two_stages():
    plan = Plan.of_stages([(1, [0, 1]), (1, [0, 1], [2, 1]), (1, [0, 1], [2, 1])])
    assert [(s.first, s.end) for s in plan.stages] == [(0, 1), (1, 3)]


def test_json_gives_an_equal_plan_back():
    plan = burst()
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["manyhands_plan"] == 1


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64, Fraction])
def test_shares_and_peers_may_be_numbers_of_others(kind):
    plan = Plan.of_stages([(np.int64(2), np.array([1, 0]), [kind(3), kind(1)])])
    assert plan == Plan.of_stages([(2, [1, 0], [3, 1])])
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_cannot_be_changed():
    with pytest.raises(AttributeError):
        burst().microbatches = 3
    assert burst().replace(microbatches=3).microbatches == 3
    with pytest.raises(PlanError, match="0 microbatches"):
        burst().replace(microbatches=0)


def test_a_picture():
    assert burst().picture().splitlines() == [
        "stage          ann   bob   cem   dot",
        "0: in .. conv  25%   25%   25%   25%",
        "1: mid         75%   25%    .     .",
        "2: head         .     .    100%   .",
        "3: out         25%   25%   25%   25%",
        "4 microbatches, interleaved",
    ]


PEERS_WITHOUT_END = (
    '{"manyhands_plan": 1, "plan": {"peers": ["a"], "layers": '
    '[{"name": "a", "peers": [1000000000000000000]}]}}'
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "this is no plan"),
        ("{}", "this is no plan"),
        ('{"manyhands_plan": 1}', "this is no plan"),
        ('{"manyhands_plan": 99, "plan": {"new": 1}}', "format 99.*reads up to 1"),
        ('{"manyhands_plan": 1, "plan": {"layers": [], "peers": ["a"]}}', "no layers"),
        ('{"manyhands_plan": 1, "plan": ' + "[" * 100_000, "this is no plan"),
        ('{"manyhands_plan": ' + "9" * 400 + "}", "of format 999"),
        (b'{"manyhands_plan": 1, "plan": "\xff"}', "this is no plan"),
        ('{"manyhands_plan": 1, "plan": "\ud800"}', "this is no plan"),
        (PEERS_WITHOUT_END, "on peer 1000000000000000000"),
    ],
)
def test_what_is_no_plan(text, said):
    with pytest.raises(PlanError, match=said) as caught:
        Plan.from_json(text)
    assert caught.value.hint


def plan_with(layer, **fields):
    layers = (Layer("first", (0,)), layer)
    return Plan(**{"layers": layers, "peers": ("a", "b"), **fields})


@pytest.mark.parametrize(
    ("make", "said", "layer"),
    [
        (lambda: plan_with(Layer("x", ())), r"layer 1 \(x\) is on no peer", 1),
        (lambda: plan_with(Layer("x", (2,))), r"layer 1 \(x\) is on peer 2.*peers 0 to 1", 1),
        (lambda: plan_with(Layer("x", (1, 1))), r"layer 1 \(x\) names a peer twice", 1),
        (lambda: plan_with(Layer("x", (0, 1), (1.0,))), "2 peers and 1 shares", 1),
        (lambda: plan_with(Layer("x", (0, 1), (1.0, 0.0))), "a share of 0.0", 1),
        (lambda: plan_with(Layer("x", (0, 1), (1.0, float("nan")))), "a share of nan", 1),
        (lambda: plan_with(Layer("first", (1,))), r"layer 1 \(first\) has the name of layer 0", 1),
        (lambda: plan_with(Layer("x", (0,))), r"b: no layer for this peer \(2 layers, 2 p", None),
        (lambda: plan_with(Layer("x", (1,)), schedule="2f2b"), "no schedule '2f2b'", None),
        (lambda: plan_with(Layer("x", (1,)), peers=("a", "a")), "two peers are named 'a'", None),
        (lambda: Plan(layers=(), peers=()), "no layers", None),
        (lambda: Plan.of_stages([(0, [0])]), "stage 0 has 0 layers", None),
        (lambda: Plan.of_stages([(2, [0])], names=["a"]), "2 layers, 1 names", None),
        (lambda: Plan.of_stages([(10**12, [0])]), "1000000000000 layers", None),
        (lambda: Plan.of_stages([(1, [10**12])]), "1000000000001 peers", None),
        (lambda: Plan.of_stages([(1, [0]), (1, [-1])]), r"layer 1 \(1\) is on peer -1", 1),
        (lambda: Plan.even(10**12, 10**12), "1000000000000 stages", None),
        (lambda: Plan.even(2, 0), "0 peers with 1 stages each", None),
        (lambda: Plan.even(2, 1, microbatches=10**12), "1000000000000 microbatches", None),
        (lambda: Plan.even(2, 1, microbatches=-1), "-1 microbatches", None),
        (lambda: Plan.even(2, 1, microbatches="8"), "microbatches = '8'", None),
        (lambda: Plan.even(2, 1, microbatches=8.0), "microbatches = 8.0", None),
        (lambda: Plan.of_stages([(1, [0, 1], [1e308, 1e308])]), "a share of 1e[+]308", 0),
        (lambda: Plan.of_stages([(1, [0, 1], [5e-324, 1])]), "a share of 5e-324", 0),
        (lambda: Plan.of_stages([("2", [0])]), "stage 0 is", None),
        (lambda: Plan.of_stages([(2, ["a"])]), "stage 0 is", None),
        (lambda: Plan.of_stages([(2, [0.5])]), "stage 0 is", None),
        (lambda: Plan.of_stages([(1, [0, 1], ["1", "2"])]), "a share of '1'", 0),
        (lambda: Plan.of_stages([(1, [0, 1], [True, 1])]), "a share of True", 0),
        (lambda: Plan.even(2, 1, recompute="yes"), "recompute = 'yes'", None),
        (lambda: Plan.even(2, 1, recompute=1), "recompute = 1", None),
        (lambda: burst().replace(layers=[]), "no layers", None),
        (lambda: burst().replace(layers=[*burst().layers]), "layers of the plan are a list", None),
        (lambda: plan_with(Layer("x", [1])), r"peers of layer 1 \(x\) are a list", None),
        (lambda: Plan.even("2", 1), "layers = '2'", None),
        (lambda: Plan.even(2, 1, names=["a", 7]), "layer 1 has the name 7", 1),
        (lambda: Plan.even(2, 1, peers=[7]), "peer 0 has the name 7", None),
    ],
)
def test_what_no_runtime_can_carry_out_is_refused_by_name(make, said, layer):
    with pytest.raises(PlanError, match=said) as caught:
        make()
    assert caught.value.layer == layer
    assert caught.value.hint
