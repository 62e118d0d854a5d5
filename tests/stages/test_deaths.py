"""A peer that dies in any phase: all others know who, at once; fewer go on with another plan.

What they go on from shows that every step was applied on all stages or on none: they get the losses
and parameters of the run that was not interrupted.
"""

import itertools
import signal

import pytest
import torch
from tests.collectives.backend.crew import Crew
from tests.stages.cases import alone
from tests.stages.deaths import NUM_STEPS, Death, case, erring_layers

NOTICED_S = 8.0  # a closed connection counts after a second; a lease ends after ten
NARROW = [(2, [0]), (2, [1]), (2, [2])]
WIDE = [(2, [0]), (2, [1, 2]), (2, [0])]
FEWER = [(3, [0, 1]), (3, [1])]
ALONE = [(6, [0])]
NAMES = ("ada", "bob", "cyd")

DEATHS = {
    "building": Death("build", 0, "stages.carrier:GroupCarrier.prepare"),
    "rehearsal": Death("step", 0, "stages.pipeline:rehearse"),
    "opening": Death("step", 4, "stages.pipeline:Pipeline._open"),
    "forward": Death("step", 4, "stages.step:Step._forward", 1),
    "between": Death("step", 4, "stages.step:Step._backward"),
    "backward": Death("step", 4, "stages.step:Step._backward", 2),
    "sum": Death("step", 4, "stages.part:Part.sum_gradients"),
    "before the vote": Death("step", 4, "stages.pipeline:vote"),
    "in the vote": Death("step", 4, "stages.carrier:GroupCarrier.sum", after=True),
    "after the vote": Death("step", 4, "stages.pipeline:Pipeline._apply"),
    "applied": Death("step", 4, "stages.part:Part.apply", after=True),
    "shard": Death("save", 4, "checkpoint.store:write_tensors", after=True),
    "before the index": Death("save", 4, "stages.archive:Archive._together", 1),
    "after the index": Death("save", 4, "stages.archive:Archive._together", 1, after=True),
}
# Of a wide stage, the sums of gradients are those before the vote.
WIDE_DEATHS = {
    "backward": DEATHS["backward"],
    "in the sum": DEATHS["in the vote"],
    "in the vote": DEATHS["in the vote"]._replace(call=1),
    "before the index": DEATHS["before the index"],
}
_runs = itertools.count()


@pytest.fixture(scope="session")
def at_hub(hub_port):
    return lambda: f"hub://127.0.0.1:{hub_port}/deaths-{next(_runs)}?insecure=1"


@pytest.fixture(scope="session")
def at_broker(broker):
    return lambda: f"{broker.url()}?run=deaths-{next(_runs)}"


@pytest.fixture(scope="module")
def uninterrupted():
    losses, modules = alone(case(ALONE))
    return losses, [module.state_dict() for module in modules]


def check(answers, uninterrupted):
    losses, states = uninterrupted
    seen = set()
    for answer in answers.values():
        for number, loss in answer["losses"].items():
            assert loss == pytest.approx(losses[number], rel=1e-9)
        for index, state in answer["states"].items():
            seen.add(index)
            for name, value in state.items():
                torch.testing.assert_close(value, states[index][name], rtol=1e-9, atol=1e-12)
    assert seen == set(range(len(states)))


def killed_and_resumed(zygote, new_url, folder, stages, death, victim, uninterrupted):
    saved, mark = str(folder / "saved"), folder / "died"
    with Crew(zygote, 3) as crew:
        crew.call("tests.stages.programs", "enter", new_url(), 3)
        crew.begin("tests.stages.deaths", "train", stages, saved, death, victim, str(mark))
        assert crew.ended(victim) == -signal.SIGKILL
        died_s = float(mark.read_text())
        answers = crew.finish()
    assert len(answers) == 2
    for answer in answers.values():
        assert answer.ok, answer.value
        said = answer.value
        assert f"rank {victim} (rank-{victim}" in said["error"], said["error"]
        assert f"rank {victim} is peer {NAMES[victim]}" in said["error"], said["error"]
        assert said["ended_s"] - died_s < NOTICED_S
        assert "python" in said["hint"]
        words = "nothing was saved" if death.number == 0 else "to go on after step"
        assert words in said["hint"]
        for number, loss in said["losses"].items():
            assert loss == pytest.approx(uninterrupted[0][number], rel=1e-9)
    with Crew(zygote, 2) as crew:
        crew.call("tests.stages.programs", "enter", new_url(), 2)
        resumed = crew.call("tests.stages.deaths", "train", FEWER, saved)
    starts = {answer["start"] for answer in resumed.values()}
    if death.during == "save":
        written = death.function.endswith("_together") and death.after
        # Whoever writes the index may have done it while another one died.
        assert starts <= ({4} if written else {2, 4}), starts
    else:
        assert starts == {4 if death.number else 0}
    check(resumed, uninterrupted)
    for answer in resumed.values():
        assert sorted(answer["losses"]) == list(range(min(starts), NUM_STEPS))


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("phase", DEATHS)
def test_any_peer_dies_in_any_phase(zygote, at_hub, tmp_path, uninterrupted, phase, victim):
    death = DEATHS[phase]
    killed_and_resumed(zygote, at_hub, tmp_path, NARROW, death, victim, uninterrupted)


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("phase", WIDE_DEATHS)
def test_wide_stages(zygote, at_hub, tmp_path, uninterrupted, phase, victim):
    death = WIDE_DEATHS[phase]
    if phase in ("in the sum", "in the vote") and victim == 0:
        death = death._replace(call=0)  # it sums with nobody
    killed_and_resumed(zygote, at_hub, tmp_path, WIDE, death, victim, uninterrupted)


@pytest.mark.parametrize(
    ("phase", "victim"), [(phase, i % 3) for i, phase in enumerate(DEATHS)], ids=str
)
def test_over_rabbitmq(zygote, at_broker, tmp_path, uninterrupted, phase, victim):
    stages = WIDE if victim == 1 else NARROW
    death = DEATHS[phase]
    killed_and_resumed(zygote, at_broker, tmp_path, stages, death, victim, uninterrupted)


@pytest.mark.parametrize(
    ("what", "culprit", "words"),
    [
        ("forward", 0, ("ArithmeticError: a mistake of a layer", "the forward of layers 0 to 1")),
        ("forward", 1, ("ArithmeticError: a mistake of a layer", "the forward of layers 2 to 3")),
        ("backward", 1, ("ArithmeticError: a mistake of a layer", "the backward of layers 2")),
        ("backward", 2, ("ArithmeticError: a mistake of a layer", "the backward of layers 4")),
        ("loss", 2, ("the loss is tensor", "returns one number")),
        ("targets", 2, ("the target has shape (3, 6) where the batch has 10 rows",)),
        ("no targets", 2, ("was given no targets",)),
        ("text", 2, ("the target is a str",)),
    ],
)
def test_an_error_of_one_peer_is_heard_by_all(crew_of, what, culprit, words):
    """Nothing is applied, and the next step gives what one process gives."""
    with crew_of(3) as crew:
        answers = crew.call("tests.stages.deaths", "err", NARROW, culprit, what)
    made = case(ALONE)._replace(build=erring_layers)
    losses, modules = alone(made._replace(batches=made.batches[:4]))
    for answer in answers.values():
        assert answer["peer"] == NAMES[culprit]
        for word in words:
            assert word in answer["text"], answer["text"]
        wanted = "raise ArithmeticError" if what in ("forward", "backward") else "UsageError"
        assert wanted in answer["traceback"]
    for answer in answers.values():
        answer["losses"] = dict(enumerate(answer["losses"]))
    check(answers, (losses, [module.state_dict() for module in modules]))
