"""`manyhands demo` runs to its end and finds nothing wrong; what is wrong, it would find."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from manyhands.cli import demo as module
from manyhands.cli.demo_score import ACCURACY, TOLERANCE, Score
from manyhands.cli.demo_screen import Screen
from manyhands.core.errors import ManyhandsError
from manyhands.data.calendar import Calendar

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0  # for processes that were told to end
PEER = "manyhands.cli.demo_peer"

# Whoever runs the tests in the background may have SIGINT ignored.
MAIN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from manyhands.cli.main import main
main()
"""


# A peer that, where it waits to be let in, says whether it had to load more for its first step.
WAITING = """
import runpy, sys

class Stdin:
    def readline(self):
        sys.exit(0 if "torch._dynamo" in sys.modules else "it has yet to load the compiler")

sys.argv, sys.stdin = ["demo_peer", "1"], Stdin()
runpy.run_module("manyhands.cli.demo_peer", run_name="__main__")
"""


@contextmanager
def start(tmp_path, *options):
    """The demo; leaving the block kills it."""
    command = [sys.executable, "-c", MAIN, "demo", *options]
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def demo(tmp_path, *options):
    with start(tmp_path, *options) as process:
        out, err = process.communicate()
    return process.returncode, out, err


def test_one_is_killed_and_another_joins(tmp_path):
    code, out, err = demo(tmp_path, "--epochs", "10", "--json")
    assert code == 0, err
    summary = json.loads(out)
    assert summary["problems"] == []
    assert summary["accuracy"] >= ACCURACY
    assert summary["off"] <= TOLERANCE
    assert summary["samples"] == 10 * 1437  # every digit that is not kept for the test
    assert sorted(summary["samples_of"]) == ["peer-1", "peer-2", "peer-3", "peer-4"]
    assert all(summary["samples_of"].values())
    assert summary["killed"] == "peer-2"
    assert summary["noticed_s"] > 0
    assert summary["took_part_from"] > summary["killed_in"]
    assert summary["wall_s"] > summary["train_s"] > 0
    assert "manyhands run -n 3" in err  # what to type next


def test_at_a_broker_and_not_long_enough(broker, tmp_path):
    """After four epochs nobody reads well: that is an error. The run may be over, too, before the
    late peer is in. All else is as it must be.
    """
    options = ["--epochs", "4", "--peers", "2", "--json", "--amqp", broker.url()]
    code, out, err = demo(tmp_path, *options)
    assert code == 1, err
    *late, problem = problems = json.loads(out)["problems"]
    assert "read right instead of 97 %" in problem
    assert late in ([], ["peer-3 joined too late to compute anything"])
    assert f"error: {'; '.join(problems)}" in err
    assert "manyhands run -n 3" not in err


def test_make_demo_amqp(tmp_path):
    """What it runs: through a RabbitMQ node of its own, that is gone afterwards."""
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, ROOT / "scripts/demo_amqp.py", "--json"]
    command += ["--peers", "2", "--epochs", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["ok"]
    assert summary["accuracy"] >= ACCURACY
    assert sorted(summary["samples_of"]) == ["peer-1", "peer-2", "peer-3"]
    assert "they meet at your broker" in done.stderr
    made = subprocess.run(
        ["make", "-n", "demo", "AMQP=1"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "python scripts/demo_amqp.py" in made.stdout


def test_what_is_wrong_ends_it(monkeypatch, capsys):
    """Nobody reads well, say: it is in the summary, and an error; nothing is to be typed next."""
    score = score_of(FIRST, SECOND)
    score.accuracies[:] = [0.5]
    monkeypatch.setattr(module.Show, "play", lambda *_: (score, 1.0))
    monkeypatch.setattr(module, "train_alone", lambda *_: (1.0, 1.0))
    with pytest.raises(ManyhandsError, match="read right instead of 97 %"):
        module.demo(peers=2, amqp=None, epochs=2, json_output=True)
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert not summary["ok"]
    (problem,) = summary["problems"]
    assert "read right instead of 97 %" in problem
    assert "manyhands run -n 3" not in err


def test_a_peer_that_waits_has_loaded_all_that_it_needs(tmp_path):
    """Else the run could be over before one that joins late has made its first step."""
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", WAITING]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr


def test_a_place_that_is_not_there(tmp_path):
    code, _, err = demo(tmp_path, "--amqp", "amqp://guest:guest@127.0.0.1:1/")
    assert code == 1
    assert "cannot be reached" in err
    assert "hint:" in err
    assert "Traceback" not in err
    assert "guest:guest" not in err


@pytest.mark.parametrize(
    ("number", "when", "code"), [(signal.SIGINT, "round ", 130), (signal.SIGKILL, "2 peers", -9)]
)
def test_nothing_is_left_behind(tmp_path, number, when, code):
    with start(tmp_path, "--peers", "2") as process:
        family = family_of(process, when)
        process.send_signal(number)
        _, err = process.communicate()
        assert process.returncode == code
        assert "Traceback" not in err
        _, alive = psutil.wait_procs(family, PATIENCE_S)
        assert alive == []


def test_a_peer_that_fails_ends_the_demo(tmp_path):
    with start(tmp_path, "--peers", "2") as process:
        family = family_of(process, "2 peers")
        (last,) = (one for one in family if name_of(one) == "peer-3")
        last.terminate()
        out, err = process.communicate()
    assert process.returncode == 1, out
    assert "peer-3 ended with code -15" in err


def family_of(process, when):
    """Its guard and its peers, once it has said something that begins with `when`."""
    assert any(line.startswith(when) for line in process.stdout)
    parent = psutil.Process(process.pid)
    while len([child for child in parent.children() if name_of(child) is not None]) < 3:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    return parent.children()


def name_of(child):
    """Of a peer; None if it is none, or not yet."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # one that has just begun, or ended
        if PEER in child.cmdline():
            return child.environ()["MANYHANDS_NAME"]
    return None


# -- what the score finds -----------------------------------------------------------------------


def told(number, *shares, loss=1.0, **by):
    names = (f"peer-{i + 1}" for i in range(len(shares)))
    return {"round": number, "loss": loss, "shares": dict(zip(names, shares, strict=False)), **by}


def score_of(*reports):
    """Of a run of two rounds, of four samples and of two; the second peer is killed."""
    score = Score(Calendar(6, 4), 1, "peer-3")
    for now_s, report in enumerate(reports):
        score.take(report.get("by", "peer-1"), report, float(now_s))
        if now_s == 0:
            score.kill("peer-2", 0.5)
    score.accuracies.append(0.99)
    return score


FIRST = told(0, [[0, 1], [3, 4]], [[1, 3]])
SECOND = told(1, [[0, 1]], [], [[1, 2]])


def problems(*reports, alone=(1.0, 1.0)):
    score = score_of(*reports)
    score.judge(score.compare(alone))
    return score.problems


def test_a_run_as_promised():
    assert problems(FIRST, FIRST, SECOND) == []
    score = score_of(FIRST, SECOND)
    assert (score.killed_in, score.noticed_s, score.took_part_from) == (1, 0.5, 1)
    assert score.computed == {"peer-1": 3, "peer-2": 2, "peer-3": 1}


def test_a_round_that_the_dead_alone_had_seen():
    """The others share it out again; what they say counts, in whichever order it comes."""
    anew = told(0, [[0, 4]], loss=1.0 + 1e-9)
    assert problems({**FIRST, "by": "peer-2"}, anew, anew, SECOND) == []
    assert score_of({**FIRST, "by": "peer-2"}, anew, SECOND).computed["peer-1"] == 5
    assert problems(FIRST, {**anew, "by": "peer-2"}, SECOND) == []
    assert problems(FIRST, anew, SECOND) == ["peers had different losses in round 0"]


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([told(0, [[0, 3]]), SECOND], ["round 0 did not count", "5 samples were counted"]),
        ([told(0, [[0, 3]], [[2, 4]]), SECOND], ["round 0 did not count", "7 samples"]),
        ([told(0, [[0, 3]], [[2, 3]]), SECOND], ["round 0 did not count"]),
        ([FIRST, told(0, loss=1.1), SECOND], ["different losses in round 0"]),
        ([FIRST, told(1, [[0, 2]])], ["peer-3 joined too late"]),
        ([FIRST], ["4 samples were counted instead of 6", "peer-3 joined too late"]),
        ([FIRST, {**SECOND, "loss": 1.0001}], ["away from one process's"]),
        ([FIRST, {**SECOND, "loss": float("nan")}], ["away from one process's"]),
    ],
)
def test_what_is_wrong_is_found(reports, expected):
    found = problems(*reports)
    assert len(found) == len(expected), found
    for problem, words in zip(found, expected, strict=True):
        assert words in problem


def test_a_table_on_a_terminal():
    shown = io.StringIO()
    screen = Screen(Console(file=shown, force_terminal=True, width=100))
    screen.states |= {"peer-1": "trains", "peer-2": "killed"}
    with screen:
        screen.show(score_of(FIRST, SECOND))
    assert "round 2 of 2, loss 1.0000" in shown.getvalue()
    assert "peer-2 │ killed" in shown.getvalue()
