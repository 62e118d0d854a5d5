"""What variables add to a stage's memory and messages."""

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core.plan import PlanError
from manyhands.planner.cost import LayerCost, PeerPower, Variable, read_costs, write_costs
from manyhands.planner.crossing import variables_of
from manyhands.planner.load import Loads
from manyhands.planner.partition import DoesNotFit, partition
from manyhands.stages.dealing import profile

MIB = 1 << 20


def layer(name, *, gives=(), takes=(), activation_bytes=0):
    return LayerCost(
        name=name,
        forward_s=1.0,
        output_bytes=10,
        activation_bytes=activation_bytes,
        gives=gives,
        takes=takes,
    )


def unet():
    """`skip` leaves the first layer, and enters the last two, of which one keeps it."""
    return [
        layer("down", gives=(Variable("skip", 100),)),
        layer("middle"),
        layer("up", takes=(Variable("skip", 100, kept=True),), activation_bytes=100),
        layer("image", takes=(Variable("skip", 100), Variable("mask", 7))),
    ]


def held(costs, cuts, **kind):
    """Of each stage, for as many microbatches as it holds."""
    peers = [PeerPower(name=str(index)) for index in range(len(cuts) + 1)]
    loads = Loads(costs, peers, microbatches=8, **kind)
    bounds = [0, *cuts, len(costs)]
    return [loads.of(i, bounds[i], bounds[i + 1]).held_bytes for i in range(len(peers))]


def test_a_variable_is_held_where_it_comes_from_and_once_where_it_goes():
    assert held(unet(), [1, 2, 3]) == [
        4 * 100,  # given, until the gradients of all that take it are back
        3 * 10,  # not on its way through the middle
        2 * (10 + 100),  # the copy that came is the one that is kept
        1 * (10 + 100 + 7),  # not kept for the backward, but held; and an extra input
    ]
    assert held(unet(), [2]) == [2 * 100, 1 * (10 + 100 + 7)]  # one copy for both


def test_a_variable_that_stays_in_its_stage_is_counted_once():
    assert held(unet(), []) == [100 + 7]
    both = unet()
    both[0] = layer("down", gives=(Variable("skip", 100, kept=True),), activation_bytes=100)
    assert held(both, []) == [100 + 7]
    assert held(both, [2]) == [2 * 100, 1 * (10 + 100 + 7)]
    unkept = [
        layer("a", gives=(Variable("v", 100),)),
        layer("b", takes=(Variable("v", 100),)),
    ]
    assert held(unkept, []) == [0]  # gone when b has used it


def test_with_recomputation_only_what_comes_from_elsewhere_is_held():
    assert held(unet(), [1, 2, 3], recompute=True) == [
        100,  # of one microbatch at a time
        3 * 10,
        2 * (10 + 100),
        1 * (10 + 100 + 7),
    ]


def test_variables_are_sent_and_their_gradients_come_back():
    peers = [PeerPower(name=str(index)) for index in range(3)]
    loads = Loads(unet(), peers, bandwidth_bytes_s=1.0)
    assert loads.of(0, 0, 1).time_s == 1 + 10 + 100
    assert loads.of(1, 1, 3).time_s == 2 + 10 + 10 + 100
    assert loads.of(2, 3, 4).time_s == 1 + 10 + 100  # nothing goes back to an extra input


def test_a_cut_that_would_hold_too_much_of_a_variable_is_not_made():
    def costs(num_bytes):
        return [
            layer("a", gives=(Variable("v", num_bytes),)),
            *(layer(f"m{index}") for index in range(3)),
            layer("b", takes=(Variable("v", num_bytes),)),
            layer("c"),
        ]

    # By time a and two others, then the rest. But the first peer would hold v.
    peers = [PeerPower(name="small", memory_bytes=MIB), PeerPower(name="large")]
    assert partition(costs(MIB // 2), peers, microbatches=4).stages[0].end == 3
    assert partition(costs(4 * MIB), peers, microbatches=4).stages[0].end == 5
    few = [PeerPower(name=name, memory_bytes=MIB) for name in ("a", "b")]
    many = [*costs(4 * MIB), layer("d", takes=(Variable("v", 4 * MIB),))]
    with pytest.raises(DoesNotFit, match=r"4\.0 activations"):
        partition(many, few, microbatches=1)


class Gives(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 16)

    def forward(self, x):
        mh.stash("skip", self.linear(x))
        return x * 2


class Takes(nn.Module):
    def forward(self, x):
        return x + mh.pop("skip").sum(1, keepdim=True) * mh.pop("mask")


def test_what_layers_give_and_take_is_measured():
    x, mask = torch.randn(8, 4), torch.ones(8, 1)
    gives, middle, takes = profile([Gives(), nn.Tanh(), Takes()], x, 2, extra={"mask": mask})
    assert gives.gives == (Variable("skip", 4 * 4 * 16, kept=False),)
    assert (gives.takes, middle.gives, middle.takes, takes.gives) == ((), (), (), ())
    assert takes.takes == (
        Variable("skip", 4 * 4 * 16, kept=False),
        Variable("mask", 4 * 4, kept=True),  # a product keeps what it is with
    )
    costs = [gives, middle, takes]
    assert read_costs(write_costs(costs)) == tuple(costs)


def test_impossible_sizes_are_refused():
    with pytest.raises(PlanError, match="layer a has v=-1"):
        layer("a", gives=(Variable("v", -1),))


def test_a_layer_that_stashes_for_itself_keeps_it_once():
    own = Variable("own", 100, kept=True)
    costs = [layer("one", gives=(own,), takes=(own,), activation_bytes=100), layer("two")]
    (known,) = variables_of(costs)
    assert known.keepers == (0,)
