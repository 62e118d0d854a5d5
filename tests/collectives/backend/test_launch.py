"""How processes find each other: arguments, torchrun, meeting point, join code; and mistakes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.core.peers import PeerState
from manyhands.links.base import open_link
from manyhands.links.hub import Hub
from manyhands.testing.broker import free_ports
from manyhands.testing.contract import Reader
from tests.collectives.backend import programs
from tests.collectives.backend.crew import Crew

SCRIPT = Path(programs.__file__).parent / "script.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
PATIENCE_S = 200.0  # for programs of which each loads torch, where others work too


@pytest.fixture(scope="module")
def loose(zygote):
    """Three processes in no group."""
    with Crew(zygote, 3, env={"CREW_WORLD": "3"}) as made:
        yield made


def entered(answers):
    """rank -> (world, the sum) of those that got in; process -> error of the others."""
    inside = {a["rank"]: (a["world"], a["sum"]) for a in answers.values() if "rank" in a}
    return inside, {process: a["error"] for process, a in answers.items() if "error" in a}


WORLDS = ["says 3", "rank 1 says 4"]
ALL_IN = {0: (3, 7.0), 1: (3, 7.0), 2: (3, 7.0)}


@pytest.mark.parametrize(
    "given",
    [
        {r: {"rank": r, "world_size": 3} for r in range(3)},
        {0: {}, 1: {"world_size": 3}, 2: {}},
        {0: {"rank": 2, "world_size": 3}, 1: {}, 2: {"world_size": 3}},
    ],
    ids=["arguments", "meeting point", "mixed"],
)
def test_ranks(loose, new_url, given):
    inside, errors = entered(loose.call("launch", "enter", given, url=new_url()))
    assert not errors
    assert inside == ALL_IN


def test_ranks_stay_with_those_who_asked_for_them(loose, new_url):
    given = {0: {"rank": 2, "world_size": 3}, 1: {"rank": 0, "world_size": 3}, 2: {}}
    answers = loose.call("launch", "enter", given, url=new_url())
    assert {process: answer["rank"] for process, answer in answers.items()} == {0: 2, 1: 0, 2: 1}


def test_a_join_code(loose, tmp_path):
    """TLS, certificate and token: all of it in one word."""
    with Hub("127.0.0.1:0", state=tmp_path / "state") as hub:
        code = dataclasses.replace(hub.address, run="coded").code()
        given = {r: {"rank": r, "world_size": 3} for r in range(3)}
        inside, errors = entered(loose.call("launch", "enter", given, url=code))
        assert not errors
        assert inside == ALL_IN


@pytest.mark.parametrize(
    ("given", "who", "words"),
    [
        ({r: {"rank": r, "world_size": 3 + (r == 1)} for r in range(3)}, (0, 1, 2), WORLDS),
        ({r: {"rank": r + 1, "world_size": 3} for r in range(3)}, (2,), ["rank 3", "world of 3"]),
        ({0: {"rank": 5}, 1: {"world_size": 3}, 2: {}}, (0, 1, 2), ["rank 5", "world_size is 3"]),
        # Those that have given up a moment earlier are missing too.
        (
            {r: {"rank": r, "world_size": 4} for r in range(3)},
            (0, 1, 2),
            ["no rank", "3 in run '", "within 2 s"],
        ),
        (
            {r: {"world_size": 4} for r in range(3)},
            (0, 1, 2),
            ["of 4 are here) in run '", "within 2 s"],
        ),
        ({}, (0, 1, 2), ["knows world_size"]),
    ],
    ids=[
        *("worlds", "rank of 3", "rank of another's world"),
        *("one missing", "some missing", "no world"),
    ],
)
def test_what_cannot_work_is_said(loose, new_url, given, who, words):
    timeout_s = 2.0
    if set(who) == set(given) and not any("within" in word for word in words):
        # All are told as soon as all are here, and the last may take its time to come.
        timeout_s, given = 40.0, {r: one | {"refusal_s": 30.0} for r, one in given.items()}
    answers = loose.call("launch", "enter", given, url=new_url(), timeout_s=timeout_s)
    _, errors = entered(answers)
    for process in who:
        assert process in errors, answers
        assert answers[process]["took_s"] < 10
        assert all(word in errors[process] for word in words), errors


def test_whoever_comes_a_little_later_is_told_too(loose, new_url):
    """Two disagree already, and do not leave before the third has heard why."""
    given = {r: {"rank": r, "world_size": 3 + (r == 1)} for r in range(3)}
    given[2]["delay_s"] = 0.5
    for one in given.values():
        one["refusal_s"] = 30.0  # it may take longer to come than they would usually wait
    answers = loose.call("launch", "enter", given, url=new_url(), timeout_s=40.0)
    for answer in answers.values():
        assert all(word in answer["error"] for word in WORLDS), answers
        assert answer["took_s"] < 15


def test_nobody_waits_for_one_that_does_not_come_to_be_told(loose, new_url):
    given = {0: {"rank": 0, "world_size": 3}, 1: {"rank": 1, "world_size": 4}}
    given[2] = {"rank": 2, "world_size": 3, "timeout_s": 1.0}
    url = new_url()
    answers = loose.call("launch", "enter", given, url=url, timeout_s=20.0, ranks=(0, 1))
    for process in (0, 1):
        assert all(word in answers[process]["error"] for word in WORLDS), answers
        assert answers[process]["took_s"] < 10
    # By now they have left.
    answers |= loose.call("launch", "enter", given, url=url, ranks=(2,))
    assert "no ranks 0, 1 in run '" in answers[2]["error"], answers


def test_one_more_than_the_world_is_turned_away(new_crew, zygote, new_url):
    """Long after the others have met; they do not notice."""
    url = new_url()
    with Crew(zygote, 2) as crew, Crew(zygote, 1) as late:
        crew.join(url)
        (answer,) = late.call("launch", "enter", {0: {"world_size": 2}}, url=url).values()
        assert "all 2 ranks of this run are taken" in answer["error"]
        crew.call("sums", "coalesced")


def enter_after(loose, url, given, *, first, here):
    """What all of them say; the others come when the first ones, of these names, want seats."""
    last = [process for process in given if process not in first]
    with open_link(url, name="watcher") as link:
        loose.begin("launch", "enter", given, url=url, ranks=first)
        Reader(link).settle(
            lambda view: set(here) <= {peer.name for peer in view.peers(PeerState.ACTIVE)}
        )
        return loose.call("launch", "enter", given, url=url, ranks=last) | {
            process: answer.value for process, answer in loose.finish(ranks=first).items()
        }


def test_a_rank_that_is_given_twice(loose, new_url):
    """Whoever comes later is taken for a restart of the first, which is told so."""
    given = {
        0: {"rank": 0, "world_size": 3, "timeout_s": 6.0},  # it is there when the last gives up
        1: {"rank": 1, "world_size": 3, "timeout_s": 6.0},
        2: {"rank": 1, "world_size": 3, "timeout_s": 1.0},
    }
    answers = enter_after(loose, new_url(), given, first=(0, 1), here=("rank-0", "rank-1"))
    assert "rank-1" in answers[1]["error"] or "no longer part" in answers[1]["error"], answers[1]
    for process in (0, 2):
        assert "rank 2" in answers[process]["error"], answers[process]


@pytest.mark.parametrize("kind", ["hub"], indirect=True)
def test_no_meeting_point(loose, kind):
    """The error says what to pass; torch's own store cannot carry tensors."""
    port = free_ports().amqp
    given = {
        0: {"url": f"tcp://127.0.0.1:{port}", "rank": 0, "world_size": 1},
        1: {"url": "no-such-thing", "rank": 0, "world_size": 1},
        2: {"url": "hub://127.0.0.1:1/", "rank": 0, "world_size": 1},
    }
    answers = loose.call("launch", "enter", given)
    assert "init_method=" in answers[0]["error"], answers[0]
    assert "join code" in answers[1]["error"], answers[1]
    assert "names no run" in answers[2]["error"], answers[2]


def test_a_room_inside_one_process(loose, kind):
    """torch makes one slash of the three."""
    given = {r: {"url": f"local:///only-{r}", "rank": 0, "world_size": 1} for r in range(3)}
    inside, errors = entered(loose.call("launch", "enter", given))
    assert not errors
    assert inside == {0: (1, 1.0)}


def test_a_code_in_quotes_works_and_is_never_shown(loose, tmp_path, kind):
    with Hub("127.0.0.1:0", state=tmp_path / "state") as hub:
        code = hub.address.code()
        given = {
            0: {"url": f'"{code}?run=quoted"', "rank": 0, "world_size": 1},
            1: {"url": f"MANYHANDS_URL={code}", "rank": 0, "world_size": 1},
            2: {"url": "amqp:/guest:SECRET@127.0.0.1/?run=x", "rank": 0, "world_size": 1},
        }
        answers = loose.call("launch", "enter", given)
    assert answers[0]["world"] == 1
    assert code[6:] not in answers[1]["error"], answers[1]
    assert "SECRET" not in answers[2]["error"], answers[2]


def test_another_takes_a_rank_that_is_at_work(loose, new_url):
    """As `torchrun --standalone` on a second machine does."""
    stays = {"world_size": 2, "stays": True}
    given = {
        0: {"rank": 0, **stays},
        1: {"rank": 1, **stays},
        2: {"rank": 0, "world_size": 2, "timeout_s": 1.0},
    }
    answers = enter_after(loose, new_url(), given, first=(0, 1), here=("rank-0", "rank-1"))
    assert "another peer joined as 'rank-0'" in answers[0]["error"], answers
    assert "a rank of its own" in answers[0]["error"], answers
    assert "rank 0" in answers[1]["error"], answers


def test_two_with_one_rank(loose, new_url):
    """Whoever came first is told what has happened, in words of torch's users."""
    given = {
        0: {"rank": 0, "world_size": 3, "timeout_s": 30.0},
        1: {"rank": 0, "world_size": 3, "timeout_s": 3.0},
        2: {"rank": 1, "world_size": 3, "timeout_s": 3.0},
    }
    answers = enter_after(loose, new_url(), given, first=(0, 2), here=("rank-0",))
    assert "another peer joined as 'rank-0'" in answers[0]["error"], answers
    assert "a rank of its own" in answers[0]["error"], answers
    assert answers[0]["took_s"] < 15, answers


def test_a_rank_that_failed_before_comes_again(loose, new_url):
    """torch has counted its failed group, and names the next one otherwise than the others do."""
    failed = {0: {"url": "no-such-thing"}, 1: {"url": "no-such-thing"}}
    loose.call("launch", "enter", failed | {2: {"url": new_url(), "world_size": 1}})
    given = {r: {"rank": r, "world_size": 3} for r in range(3)}
    inside, errors = entered(loose.call("launch", "enter", given, url=new_url()))
    assert not errors
    assert inside == ALL_IN
    loose.call("launch", "again_and_again", new_url(), 2)


def test_group_after_group(loose, new_url, kind):
    loose.call("launch", "again_and_again", new_url(), 4)


def test_torch_looks_closely(new_crew):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL and TORCH_DIST_INIT_BARRIER=1."""
    env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_DIST_INIT_BARRIER": "1"}
    with new_crew(2, env=env) as crew:
        crew.call("launch", "set_debug_level")
        crew.call("ddp", "plain")
        crew.call("ddp", "find_unused")
        crew.call("groups", "local_synchronization")
        crew.call("transfers", "objects")


@pytest.fixture
def start(tmp_path):
    """Starts a process whose output can be read; what it leaves behind is the test's."""
    return lambda *command, **variables: begin(*command, TMPDIR=str(tmp_path), **variables)


def begin(*command, **variables):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env | {"OMP_NUM_THREADS": "1"} | variables,
    )


def ended(*processes):
    """(code, stdout, stderr) of each; none is left running."""
    try:
        said = [process.communicate(timeout=PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
    return [(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


def test_torchrun(new_url, start):
    """RANK and WORLD_SIZE are torchrun's; the script names the meeting point alone."""
    command = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", SCRIPT, "torchrun", new_url())
    ((code, out, err),) = ended(start(*command))
    assert code == 0, err
    assert sorted(out.split("\n")) == ["", "torchrun 0/2 3", "torchrun 1/2 3"]
    assert "Error" not in err, err


@pytest.mark.parametrize("kind", ["hub"], indirect=True)
def test_imports_in_any_order_and_no_goodbye(kind, new_url, start):
    """manyhands before torch, after it, not at all, without torch's search for backends.

    Three of them end without destroy_process_group.
    """
    url = new_url()
    hows = ("before", "after", "not at all", "no autoload")
    processes = [
        start(
            *(sys.executable, "-W", "error", SCRIPT, how, url),
            **({"WORLD_SIZE": "4"} if how == "before" else {}),
            **({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if how == "no autoload" else {}),
        )
        for how in hows
    ]
    for how, (code, out, err) in zip(hows, ended(*processes), strict=True):
        assert code == 0, (how, err)
        assert out.startswith(how), out
        assert out.endswith("/4 10\n"), out
        assert not err, err


@pytest.mark.parametrize("kind", ["amqp"], indirect=True)
def test_a_program_that_raises(kind, new_url, start):
    """Its own traceback there, an error that names it here; both end as programs do."""
    url = new_url()
    processes = [
        start(sys.executable, SCRIPT, "raise", url, RANK=str(rank), WORLD_SIZE="2")
        for rank in range(2)
    ]
    (code, _, err), (victim_code, _, victim_err) = ended(*processes)
    assert (code, victim_code) == (1, 1)
    assert "ValueError: a mistake of rank 1" in victim_err
    assert "`barrier`" in err
    assert "rank 1 (rank-1" in err
    for text in (err, victim_err):
        assert "terminate called" not in text
        assert "Fatal" not in text


def test_a_fork_that_ends_leaves_its_parent_in_the_group(new_url, start):
    """As any interpreter does at its end, it runs what was registered for that."""
    url = new_url()
    processes = [
        start(sys.executable, "-W", "error", SCRIPT, "fork", url, RANK=str(rank), WORLD_SIZE="2")
        for rank in range(2)
    ]
    for code, _, err in ended(*processes):
        assert (code, err) == (0, "")
