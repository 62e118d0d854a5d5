"""A peer that dies in any phase: all others know who, at once; fewer go on with another plan.

What they go on from shows that every step was applied on all stages or on none: they get the losses
and parameters of the run that was not interrupted.
"""

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.collectives.backend.crew import PATIENCE_S, Crew
from tests.stages.cases import alone
from tests.stages.deaths import (
    NUM_STEPS,
    Asserting,
    Death,
    Unbuildable,
    batches,
    case,
    erring_layers,
    layers,
    pipeline,
)
from tests.stages.threads import run_threads
from torch import nn

from manyhands.core.errors import LinkBroken
from manyhands.core.plan import PlanError
from manyhands.links.base import LinkSettings, open_link
from manyhands.links.messages import Terms
from manyhands.stages.errors import PlanBroken, StepFailed
from manyhands.stages.resume import again, gone

# A closed connection counts after a second: within the lease that a run has by itself; those of
# these crews are of a minute. docs/log.md has what was measured.
NOTICED_S = Terms().lease_s
NARROW = [(2, [0]), (2, [1]), (2, [2])]
WIDE = [(2, [0]), (2, [1, 2]), (2, [0])]
ROUND = [(1, [0]), (1, [1]), (1, [2]), (1, [0]), (1, [1]), (1, [2])]
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
    "load": Death("load", 4, "stages.archive:Archive.load"),
    "loaded": Death("load", 4, "stages.part:Part.restore", after=True),
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


@pytest.fixture(scope="session", params=["hub", "broker"])
def at_any(request):
    return request.getfixturevalue(f"at_{request.param}")


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


def killed_and_resumed(zygote, new_url, folder, stages, death, victim, uninterrupted, **how):
    saved, mark = str(folder / "saved"), folder / "died"
    with Crew(zygote, 3) as crew:
        crew.call("tests.stages.programs", "enter", new_url(), 3)
        args = stages, saved, death, victim, str(mark)
        crew.begin("tests.stages.deaths", "train", *args, **how)
        assert crew.ended(victim) == -signal.SIGKILL, crew.report()
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
    ("schedule", "phase", "victim"),
    [
        ("interleaved", "forward", 0),
        ("interleaved", "between", 1),
        ("interleaved", "late", 2),
        ("interleaved", "late", 0),
        ("afab", "forward", 1),
        ("afab", "between", 2),
        ("afab", "late", 0),
    ],
)
def test_other_schedules(zygote, at_hub, tmp_path, uninterrupted, schedule, phase, victim):
    """With two stages a peer, deaths in its second one too."""
    stages = ROUND if schedule == "interleaved" else NARROW
    # Eight of each with two stages a peer, four with one.
    late = DEATHS["backward"]._replace(call=6 if schedule == "interleaved" else 3)
    death = late if phase == "late" else DEATHS[phase]
    args = stages, death, victim, uninterrupted
    killed_and_resumed(zygote, at_hub, tmp_path, *args, schedule=schedule)


@pytest.mark.parametrize("victim", [0, 2])
def test_stages_that_are_computed_anew(zygote, at_hub, tmp_path, uninterrupted, victim):
    args = NARROW, DEATHS["backward"], victim, uninterrupted
    killed_and_resumed(zygote, at_hub, tmp_path, *args, recompute=True)


@pytest.mark.parametrize(
    ("death", "victim"),
    [
        (DEATHS["forward"], 1),
        (Death("step", 4, "stages.pipeline:Pipeline.backward"), 2),
        (DEATHS["backward"], 0),
        (Death("step", 4, "stages.pipeline:Pipeline.apply"), 1),
        (DEATHS["in the vote"]._replace(call=2), 2),  # after those of both halves
    ],
    ids=["forward", "between", "backward", "before apply", "in the vote"],
)
def test_steps_in_halves(zygote, at_hub, tmp_path, uninterrupted, death, victim):
    args = NARROW, death, victim, uninterrupted
    killed_and_resumed(zygote, at_hub, tmp_path, *args, halves=True)


@pytest.mark.parametrize(
    ("phase", "victim"), [(phase, i % 3) for i, phase in enumerate(DEATHS)], ids=str
)
def test_over_rabbitmq(zygote, at_broker, tmp_path, uninterrupted, phase, victim):
    stages = WIDE if victim == 1 else NARROW
    death = DEATHS[phase]
    killed_and_resumed(zygote, at_broker, tmp_path, stages, death, victim, uninterrupted)


@pytest.mark.parametrize("phase", ["forward", "between", "before the vote", "before the index"])
@pytest.mark.parametrize("victim", range(3))
def test_over_gloo(zygote, tmp_path, uninterrupted, phase, victim):
    """torch does not say who it was; and who has heard it must end for others to hear it."""
    saved, mark = str(tmp_path / "saved"), tmp_path / "died"
    outs = [tmp_path / f"out-{rank}" for rank in range(3)]
    with Crew(zygote, 3) as crew:
        crew.call("tests.stages.programs", "enter", f"file://{tmp_path}/meeting", 3)
        for rank, out in enumerate(outs):
            args = NARROW, saved, DEATHS[phase], victim, str(mark), str(out)
            crew.begin("tests.stages.deaths", "train_and_end", *args, ranks=[rank])
        assert crew.ended(victim) == -signal.SIGKILL, crew.report()
        survivors = [rank for rank in range(3) if rank != victim]
        assert [crew.ended(rank) for rank in survivors] == [7, 7], crew.report()
    for rank in survivors:
        ended_s, _, error = outs[rank].read_text().partition(" ")
        assert float(ended_s) - float(mark.read_text()) < NOTICED_S, error
        assert "Connection closed by peer" in error or "onnection reset" in error, error
        assert "to go on after step" in error
    with Crew(zygote, 2) as crew:
        crew.call("tests.stages.programs", "enter", f"file://{tmp_path}/second", 2)
        check(crew.call("tests.stages.deaths", "train", FEWER, saved), uninterrupted)


@pytest.mark.parametrize(
    ("function", "victim"), [("_power", 0), ("_gather", 2), ("profile", 0), ("_power", 1)]
)
def test_a_peer_dies_while_a_plan_is_made(zygote, at_hub, tmp_path, function, victim):
    mark = tmp_path / "died"
    with Crew(zygote, 3) as crew:
        crew.call("tests.stages.programs", "enter", at_hub(), 3)
        args = f"stages.dealing:{function}", victim, str(mark)
        crew.begin("tests.stages.deaths", "deal", *args)
        assert crew.ended(victim) == -signal.SIGKILL, crew.report()
        answers = crew.finish()
    assert len(answers) == 2
    for answer in answers.values():
        assert answer.ok, answer.value
        assert f"rank {victim} (rank-{victim}" in answer.value["error"], answer.value
        assert answer.value["hint"].startswith("to begin again with the peers that are left: ")
        assert answer.value["ended_s"] - float(mark.read_text()) < NOTICED_S


def test_killed_long_before_its_lease(zygote, at_any):
    """The end of its connection tells of a death: a lease would outlast the patience of this test.

    It is ten minutes; nobody waits longer for a crew than PATIENCE_S.
    """
    url, terms = at_any(), Terms(lease_s=600.0)
    assert terms.lease_s > 2 * PATIENCE_S
    with (
        open_link(url, name="watcher", settings=LinkSettings(terms=terms)),
        Crew(zygote, 3) as crew,
    ):
        crew.call("tests.stages.programs", "enter", url, 3)
        crew.call("tests.stages.deaths", "begin", NARROW)
        crew.begin("tests.stages.deaths", "train_until_broken")
        crew.kill(1)
        for answer in crew.finish(ranks=[0, 2]).values():
            assert answer.ok, answer.value
            assert "rank 1 is peer bob" in answer.value, answer.value


def test_stopped_beyond_its_lease(zygote, at_any):
    """A process that stands still is out when its lease ends; it finds out when it goes on."""
    url, terms = at_any(), Terms(beat_s=0.3, lease_s=3.0)  # longer than others wait on a busy one
    # Whoever opens the run sets its terms; this one only watches.
    with (
        open_link(url, name="watcher", settings=LinkSettings(terms=terms)),
        Crew(zygote, 3) as crew,
    ):
        crew.call("tests.stages.programs", "enter", url, 3)
        crew.call("tests.stages.deaths", "begin", NARROW)
        crew.begin("tests.stages.deaths", "train_until_broken")
        crew.signal(1, signal.SIGSTOP)
        start_s = time.monotonic()
        answers = crew.finish(ranks=[0, 2])
        assert time.monotonic() - start_s < terms.lease_s + NOTICED_S
        crew.signal(1, signal.SIGCONT)
        answers |= crew.finish(ranks=[1])
    for rank, answer in answers.items():
        assert answer.ok, answer.value
        assert "rank 1 is peer bob" in answer.value or rank == 1, answer.value


@pytest.mark.parametrize("what", ["Ctrl-C", "optimizer"])
def test_a_peer_that_gives_up_in_the_middle_of_a_step(zygote, at_any, what):
    """It lives on, but not the plan: nobody goes on with a step that only some have applied."""
    with Crew(zygote, 3) as crew:
        crew.call("tests.stages.programs", "enter", at_any(), 3)
        answers = crew.call("tests.stages.deaths", "give_up", NARROW, 1, what)
    said = "KeyboardInterrupt" if what == "Ctrl-C" else "RuntimeError: a mistake of Adam"
    for rank, (errors, num_steps) in answers.items():
        applied = what == "optimizer" and rank != 1
        assert num_steps == 1 + applied, rank
        own = f"PlanBroken: peer bob gave up: {said}"
        if rank != 1:
            assert all(f"rank 1 gave up: {said} on peer bob" in error for error in errors), errors
        else:
            first = "KeyboardInterrupt" if what == "Ctrl-C" else own
            assert errors[0].startswith(first), errors
            assert errors[1].startswith(own), errors


@pytest.mark.parametrize("num_peers", [3, 2])
def test_the_command_that_goes_on(tmp_path, uninterrupted, num_peers):
    """What `manyhands run` started says how; fewer copies then get where all would have got."""
    tests = Path(__file__).parents[1]
    paths = [str(tests.parent), str(tests.parent / "src")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}

    def run(words, **extra):
        assert words[:2] == ["manyhands", "run"]
        command = [sys.executable, "-m", *words]
        return subprocess.run(
            command, env=environ | extra, capture_output=True, text=True, timeout=140, check=False
        )

    script = [str(tests / "stages" / "script.py"), str(tmp_path / "saved")]
    before, after = (["-n", n, "--min-peers", n] for n in (str(num_peers), str(num_peers - 1)))
    died = run(["manyhands", "run", *before, *script], DIES="1 at 3")
    assert died.returncode == 1, died.stderr
    (said,) = set(
        re.findall(r"to go on after step 2 with .* on a plan for them: (.*)", died.stderr)
    )
    command = shlex.split(said)
    assert command == ["manyhands", "run", *after, "--resume", *script]
    resumed = run(command)
    assert resumed.returncode == 0, resumed.stderr
    for output, steps in ((died.stdout, [0, 1, 2]), (resumed.stdout, [2, 3, 4, 5])):
        losses = re.findall(r"loss (\d+) (\S+)", output)
        assert sorted({int(number) for number, _ in losses}) == steps
        for number, loss in losses:
            assert float.fromhex(loss) == pytest.approx(uninterrupted[0][int(number)], rel=1e-9)


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        ({}, "python train.py -n 3"),
        ({"LOCAL_WORLD_SIZE": "3"}, "torchrun --nproc-per-node 2 train.py -n 3"),
        (  # torchrun on several machines: one process alone would be another run
            {"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "desk"},
            "torchrun --nnodes 1:3 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint desk "
            "train.py -n 3",
        ),
        (
            {"LOCAL_WORLD_SIZE": "2"},
            "torchrun --nnodes 1:3 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST "
            "train.py -n 3",
        ),
        (
            {"MANYHANDS_AGAIN": "manyhands run -n 3 --resume train.py -n 3 --min-peers 3"},
            "manyhands run -n 2 --resume train.py -n 3 --min-peers 3",
        ),
        ({"MANYHANDS_AGAIN": "make train"}, "make train"),
        # Some of them are elsewhere: nobody here knows which are left.
        (
            {"MANYHANDS_AGAIN": "manyhands run -n 1 --hub CODE --run r --resume train.py"},
            "manyhands run -n 1 --hub CODE --run r --resume train.py",
        ),
        (
            {"LOCAL_WORLD_SIZE": "3", "MANYHANDS_JOB": "7"},
            "manyhands submit --gpus 2 -- python train.py -n 3",
        ),
    ],
)
def test_commands(environ, command):
    assert again(3, environ, ["train.py", "-n", "3"]) == command
    anew = command.replace("--resume ", "")  # nothing was saved
    assert again(3, environ, ["train.py", "-n", "3"], saved=False) == anew


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        ({"LOCAL_WORLD_SIZE": "3"}, "torchrun --nproc-per-node 1 train.py"),
        (
            {"MANYHANDS_AGAIN": "manyhands run -n 3 --min-peers 3 --resume train.py"},
            "manyhands run -n 1 --min-peers 1 --resume train.py",
        ),
    ],
)
def test_when_two_are_gone_the_command_is_for_one(monkeypatch, environ, command):
    for name in ("LOCAL_WORLD_SIZE", "MANYHANDS_AGAIN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    reason = "rank 1 (rank-1#2), rank 2 (rank-2#3) is gone: it ended, its lease did"
    models = [layers() for _ in range(3)]

    def act(carrier):
        pipe = pipeline(NARROW, lambda: models[carrier.rank], group=carrier)
        pipe._saved = "saved", 2

        def say(words, root):
            raise LinkBroken(reason)

        carrier.say = say
        with pytest.raises(PlanBroken, match="rank 1 is peer bob, rank 2 is peer cyd") as caught:
            pipe.step(*batches()[0][:2])
        assert caught.value.hint.endswith(f": {command}")
        with pytest.raises(PlanBroken) as later:
            pipe.step(*batches()[0][:2])
        assert later.value.hint == caught.value.hint

    run_threads(3, act)


def test_who_is_gone_is_not_whoever_else_is_named():
    assert gone("rank 1 (b), rank 2 (c) is gone: it ended") == {1, 2}
    assert gone("rank 1 (b) gave up: RuntimeError on peer b") == set()
    assert gone("`all_reduce` was not finished: no data from rank 1 (b), rank 2 (c)") == set()


@pytest.mark.parametrize(
    ("what", "culprit", "words"),
    [
        ("forward", 0, ("RuntimeError: a mistake of a layer", "the forward of layers 0 to 1")),
        ("forward", 1, ("RuntimeError: a mistake of a layer", "the forward of layers 2 to 3")),
        ("backward", 1, ("RuntimeError: a mistake of a layer", "the backward of layers 2")),
        ("backward", 2, ("RuntimeError: a mistake of a layer", "the backward of layers 4")),
        ("loss", 2, ("the loss has shape", "returns one number")),
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
        wanted = "raise RuntimeError" if what in ("forward", "backward") else "UsageError"
        assert wanted in answer["traceback"]
    for answer in answers.values():
        answer["losses"] = dict(enumerate(answer["losses"]))
    check(answers, (losses, [module.state_dict() for module in modules]))


@pytest.mark.parametrize("culprit", range(3))
def test_a_layer_that_one_peer_cannot_build(culprit):
    """All hear of it, and can go on with another model."""
    models = [layers() for _ in range(3)]

    def act(carrier):
        model = [(nn.Linear, {"in_features": 6, "out_features": 6})] * 6
        model[2 * culprit + 1] = (Unbuildable, {})
        with pytest.raises(StepFailed, match="RuntimeError: no memory for this one") as caught:
            pipeline(NARROW, lambda: model, group=carrier)
        assert caught.value.peer == NAMES[culprit]
        assert "Unbuildable" in caught.value.traceback or "__init__" in caught.value.traceback
        with pytest.raises(StepFailed, match="ValueError: no such rate") as caught:
            pipeline(NARROW, lambda: models[carrier.rank], group=carrier, optimizer=make(carrier))
        assert caught.value.peer == NAMES[culprit]
        pipe = pipeline(NARROW, lambda: models[carrier.rank], group=carrier)
        return pipe.step(*batches()[0][:2])

    def make(carrier):
        def made(parameters):
            if carrier.rank == culprit:
                raise ValueError("no such rate")
            return torch.optim.Adam(parameters)

        return made

    losses, _ = alone(case(ALONE))
    assert run_threads(3, act) == pytest.approx([losses[0]] * 3, rel=1e-9)


def test_a_layer_that_asserts_in_the_rehearsal():
    models = [[*layers()[:3], Asserting(), *layers()[4:]] for _ in range(3)]

    def act(carrier):
        pipe = pipeline(NARROW, lambda: models[carrier.rank], group=carrier)
        with pytest.raises(PlanError, match=r"layer 3 .*AssertionError: one column is expected"):
            pipe.step(*batches()[0][:2])
        return pipe.num_steps

    assert run_threads(3, act) == [0, 0, 0]
