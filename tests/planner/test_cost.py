"""Costs and powers: what they add up to, what they refuse, and their JSON."""

import pytest

from manyhands.core.plan import PlanError
from manyhands.planner.cost import LayerCost, PeerPower, read_costs, write_costs


def test_gradients_are_as_many_as_parameters_unless_a_layer_says_otherwise():
    assert LayerCost(name="a", parameter_bytes=8, optimizer_bytes=16).state_bytes == 32
    frozen = LayerCost(name="a", parameter_bytes=8, gradient_bytes=0)
    assert frozen.state_bytes == 8


def test_written_costs_are_read_again():
    costs = (
        LayerCost(name="a", forward_s=0.25, backward_s=0.1, parameter_bytes=3, gradient_bytes=0),
        LayerCost(name="b", activation_bytes=1 << 40, output_bytes=7, input_bytes=2),
    )
    assert read_costs(write_costs(costs)) == costs
    assert read_costs(write_costs(costs).encode()) == costs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "this is no profile"),
        ('{"manyhands_plan": 1}', "this is no profile.*manyhands_profile"),
        ('{"manyhands_profile": 1, "layers": [{"title": "a"}]}', "this is no profile.*layers"),
        ('{"manyhands_profile": 1, "layers": [{"name": "a", "forward_s": -1}]}', "forward_s=-1"),
        ('{"manyhands_profile": 2}', "format 2, this release reads up to 1\nhint: update"),
    ],
)
def test_what_is_no_profile_is_refused(text, said):
    with pytest.raises(PlanError, match=said):
        read_costs(text)


def test_impossible_values_are_refused():
    with pytest.raises(PlanError, match="layer a has activation_bytes=-1"):
        LayerCost(name="a", activation_bytes=-1)
    with pytest.raises(PlanError, match="layer a has backward_s=inf"):
        LayerCost(name="a", backward_s=float("inf"))
    with pytest.raises(PlanError, match="peer a has -5 bytes of free memory"):
        PeerPower(name="a", memory_bytes=-5)
    with pytest.raises(PlanError, match=r"peer a has a speed of 0\.0"):
        PeerPower(name="a", speed=0.0)
