"""Plans for common cases: what they are, and what is said of those that cannot be."""

import pytest

from manyhands.core.plan import Plan, PlanError


def stages(plan):
    return [(stage.end - stage.first, list(stage.peers)) for stage in plan.stages]


def test_even_stages_differ_by_one_layer_and_the_larger_ones_come_first():
    assert stages(Plan.even(8, 3)) == [(3, [0]), (3, [1]), (2, [2])]
    assert stages(Plan.even(8, 1)) == [(8, [0])]


def test_several_stages_a_peer_go_round_all_peers_and_are_interleaved():
    plan = Plan.even(5, 2, stages_per_peer=2, microbatches=4, names=list("abcde"))
    assert stages(plan) == [(2, [0]), (1, [1]), (1, [0]), (1, [1])]
    assert plan.schedule == "interleaved"
    assert [layer.name for layer in plan.layers] == list("abcde")
    assert Plan.even(5, 2).schedule == "1f1b"
    assert Plan.even(5, 2, stages_per_peer=2, schedule="afab").schedule == "afab"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((2, 3, 1), "the model has 2 layers, 3 peers with a stage each need 3"),
        ((5, 3, 2), "the model has 5 layers, 3 peers with 2 stages each need 6"),
        ((5, 0, 1), "0 peers with 1 stages each"),
    ],
)
def test_fewer_layers_than_stages_are_refused(arguments, said):
    with pytest.raises(PlanError, match=said):
        Plan.even(arguments[0], arguments[1], stages_per_peer=arguments[2])


@pytest.mark.parametrize("row", [(2, 0), (2,), 2, (1, [0], [1], [1])])
def test_a_stage_that_is_written_wrong_is_refused(row):
    with pytest.raises(PlanError, match="stage 1 is "):
        Plan.of_stages([(1, [0]), row])
