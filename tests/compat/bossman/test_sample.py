"""The README's example, as programs: a boss and two workers."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.core.plan import Plan
from tests.compat.bossman.hands import free_port

SAMPLE = Path(__file__).with_name("sample.py")
DOCS = Path(__file__).parents[3] / "docs" / "bossman.md"
PATIENCE_S = 200.0  # for programs of which each loads torch, where others work too
WORKERS = (
    [sys.executable, "-m", "manyhands.worker"],
    [sys.executable, "-m", "manyhands", "worker"],
)


@pytest.fixture
def start(tmp_path):
    port = str(free_port())
    env = os.environ | {
        "MODEL_HOST": "127.0.0.1",
        "MODEL_PORT": port,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    env.pop("MODEL_TOKEN", None)
    started = []

    def start(*command):
        pipe = subprocess.PIPE
        program = subprocess.Popen(
            command, env=env, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True
        )
        started.append(program)
        return program

    yield start
    for program in started:
        program.kill()
        program.communicate()


def test_the_sample_learns_sin_with_a_residual_that_crosses_workers(start):
    workers = [start(*command) for command in WORKERS]  # before there is a boss
    boss = start(sys.executable, SAMPLE, "60")
    said, log = boss.communicate(timeout=PATIENCE_S)
    assert boss.returncode == 0, log
    found = json.loads(said)
    assert found["loss"] < 0.02  # of a constant: 0.1
    layers = Plan.from_json(found["plan"]).layers
    giver, taker = layers[3], layers[7]
    assert giver.name == "model[2] wrapped_linear"
    assert taker.name == "model[6] wrapped_linear"
    assert giver.peers != taker.peers
    for worker in workers:
        _, log = worker.communicate(timeout=PATIENCE_S)
        assert worker.returncode == 0, log
        assert log.rstrip().endswith("finished")


def test_the_program_of_the_documentation_runs(start):
    (program,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert "range(400)" in program
    program = program.replace("range(400)", "range(10)")
    workers = [start(*command) for command in WORKERS]
    boss = start(sys.executable, "-c", program + "\nprint('trained')")
    said, log = boss.communicate(timeout=PATIENCE_S)
    assert re.fullmatch(r"loss \S+\ntrained\n", said), log
    assert [worker.wait(PATIENCE_S) for worker in workers] == [0, 0]


def test_workers_end_when_the_boss_is_killed(start):
    workers = [start(*command, "--json") for command in WORKERS]
    boss = start(sys.executable, SAMPLE, "100000")
    for worker in workers:
        assert json.loads(worker.stdout.readline())["event"] == "offered"
    for _ in range(3):  # it listens
        boss.stderr.readline()
    boss.send_signal(signal.SIGKILL)
    boss.wait()
    for worker in workers:
        _, log = worker.communicate(timeout=PATIENCE_S)
        assert worker.returncode == 1, log
        assert "error: " in log
        said = log.split("error: ")[-1]
        assert said.startswith("the boss is gone")
        assert "start it again, then this worker" in said
        assert "manyhands hub" not in said  # nobody has started one
        assert "Traceback" not in said
