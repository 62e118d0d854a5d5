"""Two terminals, as DeepPool's README has them: real processes, real digits, slots of a CPU; and of
a GPU, where there is one.
"""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manyhands.cluster.client import Cluster
from manyhands.cluster.job import State
from manyhands.compat.deeppool import ClusterClient, load_weights
from manyhands.compat.deeppool.client import FLAGS
from manyhands.testing.processes import end_tree
from tests.compat.deeppool.session import (
    EXAMPLES,
    PATIENCE_S,
    READY,
    Session,
    done,
    job_of,
    part_of,
)

DOCS = Path(__file__).parents[3] / "docs"


def blocks(page):
    """The Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def gone(said, end="completed"):
    """The line with which the transcript of a slot has to end, once this job was in it."""
    line = rf"in poll NOTICE\[1\]: Removed the {end} job\. Remaining: 0"
    return rf"\d{{10}}\.\d{{9}} job {job_of(said)} {line}"


@pytest.fixture(scope="module")
def session(tmp_path_factory, few_digits):
    with Session(tmp_path_factory.mktemp("session")) as made:
        yield made
    assert made.process.returncode == 0, made.errors
    assert made.said.endswith("the cluster is down\n")


@pytest.fixture
def small(few_digits):
    """So that a slot of a CPU makes an epoch in no time; float64, to compare curves."""
    return [
        *("--width", "4", "--epochs", "2", "--grain", "4", "--double", "--every", "1"),
        *("--data", str(few_digits / "train"), "--evaluation", str(few_digits / "test")),
    ]


def curve(text):
    """The values of all rounds and epochs."""
    lines = [line for line in text.splitlines() if re.match("round|epoch", line)]
    return [float(value) for line in lines for value in re.findall(r"[a-z] ([\d.]+)", line)]


def test_one_slot_and_four_have_one_curve(session, small, digits_for_128):
    small = [*small, "--grain", "32", "--data", str(digits_for_128 / "train")]
    said = done(session.type("resnetImported", "1", "128", *small))
    assert re.match(r"job \d+: resnet18, 1 slot, global batch 128, 2 epochs\n", said)
    assert re.search(r"^checkpoints: .*/saved/resnet18-", said, flags=re.M)
    text = session.transcript(0, ends=gone(said))
    one = part_of(text, job_of(said), "resnet18: rank 0 of 1 on cpu")
    assert "is completed (4 iters, " in one
    assert len(curve(one)) == 4 * 3 + 2 * 5
    said = done(session.type("resnetImported", "4", "128", *small, "--wait"))
    assert "epoch 2/2" in said
    for slot in range(4):
        text = session.transcript(slot, ends=gone(said))
        four = part_of(text, job_of(said), f"resnet18: rank {slot} of 4 on cpu")
        assert curve(four) == pytest.approx(curve(one), rel=2e-6)
    [folder] = re.findall(r"^checkpoints: .*/(\S+)$", said, flags=re.M)
    assert len(list(session.folder.glob(f"saved/{folder}/*.json"))) == 2


def test_what_was_ended_goes_on_from_its_folder(session, small, digits_for_128):
    again = [*small, "--grain", "16", "--data", str(digits_for_128 / "train"), "--save", "mine"]
    said = done(session.type("resnetImported", "1", "32", *again, "--epochs", "9999"))
    with Cluster(state=session.state) as cluster:
        pieces = iter(cluster.logs(job_of(said), follow=True))
        written = b""
        while b"epoch 2/9999" not in written:
            written += next(pieces)
        cluster.cancel(job_of(said))
        assert cluster.wait(job_of(said)).state is State.CANCELLED
    text = session.transcript(0, ends=gone(said, "cancelled"))
    last = int(re.findall(r"told to end after round (\d+) of 79992", text)[-1])
    epochs = last // 8 + 2
    said = done(
        session.type("resnetImported", "2", "32", *again, "--epochs", str(epochs), "--wait")
    )
    assert f"going on after round {last} of {8 * epochs}, from {session.folder / 'mine'}" in said
    assert f"round {last + 1}/{8 * epochs}" in said
    assert f"epoch {epochs}/{epochs}" in said
    session.transcript(1, ends=gone(said))


def test_other_models_side_by_side(session, few_digits):
    data = ["--data", str(few_digits / "train"), "--evaluation", str(few_digits / "test")]
    few = ["1", "16", "--epochs", "1", "--wait"]
    programs = {
        "vgg16": session.type("vgg", *few, *data, "--width", "4", "--hidden", "16", "--pool", "1"),
        "wrn": session.type("wrn", *few, *data, "--depth", "10", "--factor", "1"),
        "gpt": session.type("gpt", *few, "--data", __file__, "--length", "16", "--width", "16"),
    }
    try:
        for name, program in programs.items():
            said = done(program)
            assert f"A training job {name} is completed" in said
            loss, accuracy = re.search(r"evaluation loss (\S+)  accuracy (\S+)%", said).groups()
            assert 0 < float(loss) < 10
            assert 0 <= float(accuracy) <= 100
    finally:
        for program in programs.values():
            end_tree(program, patience_s=0)


def test_the_examples_are_programs_that_can_be_submitted_too(session, few_digits):
    """As the page has it; they say so when their numbers are not the job's."""
    data = ["--data", str(few_digits / "train"), "--evaluation", str(few_digits / "test")]
    few = ["--epochs", "1"]
    submitted = {
        "vgg16": ("vgg", *data, "--width", "4", "--hidden", "16", "--pool", "1"),
        "wrn": ("wrn", *data, "--depth", "10", "--factor", "1"),
        "gpt": ("gpt", "--data", __file__, "--length", "16", "--width", "16"),
    }
    for name, (example, *small) in submitted.items():
        code, said = submit(session, "2", f"examples/{example}.py", "2", "16", *few, *small)
        assert code == 0, said
        assert f"{name}: rank 0 of 2 on cpu" in said
        assert f"A training job {name} is completed" in said
    code, said = submit(session, "1", "examples/vgg.py", "2", "16")
    assert code == 2
    assert "the job has 1 slots, and its program was told of 2" in said


def submit(session, slots, *words):
    """`manyhands submit --wait`, typed where the examples are; its code and all that it says."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "manyhands", "submit", "--gpus", slots, "--wait"),
            *("--", "python", *words),
        ],
        cwd=EXAMPLES.parent,
        env=session.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_script_of_ones_own_by_the_client(session, few_digits):
    """Both as the page about it has them."""
    script, _ = blocks(DOCS / "deeppool.md")
    (session.folder / "mine.py").write_text(script)
    params = {
        "training_data": str(few_digits / "train"),
        "evaluation_data": str(few_digits / "test"),
        "num_workers": 2,
        "epochs_to_train": 1,
        "checkpoint_path": str(session.folder / "of my own"),
    }
    with ClusterClient(session.address, state=session.state) as client:
        folder, shown = session.folder, io.BytesIO()
        asked = {"gpus": 2, "globalBatchSize": 16, "jobParams": params, "workdir": folder}
        job = client.submitTrainingJob("pets", ["mine.py"], **asked)
        assert client.follow(job.id, shown) == 0
    assert b"mine: rank 0 of 2 on cpu, 11,178,051 parameters" in shown.getvalue()
    assert "fc.weight" in load_weights(session.folder / "of my own")


def test_the_page_shows_what_the_client_takes():
    _, client = blocks(DOCS / "deeppool.md")
    names = re.findall(r'^ +"(\w+)": ', client, flags=re.M)
    assert set(names) < set(FLAGS)
    compile(client, "deeppool.md", "exec")


def test_a_job_that_fails_says_why(session, capsys):
    (session.folder / "fails.py").write_text("raise SystemExit('no such luck')\n")
    with ClusterClient(session.address, state=session.state) as client:
        job = client.submitTrainingJob(
            "fails", ["fails.py"], gpus=1, globalBatchSize=1, workdir=session.folder
        )
        assert client.follow(job.id, io.BytesIO()) == 1
    assert "no such luck" in capsys.readouterr().err
    ends = rf"no such luck\n\S+ job {job.id} in poll NOTICE\[1\]: Removed the failed job\. .*"
    session.transcript(0, ends=ends)


@pytest.mark.parametrize(
    ("gpus", "batch", "says"),
    [
        ("5", "40", "the job asks for 5 slots, and the cluster has 4"),
        ("4", "8", "a global batch of 8 has 2 grains of 4 samples, which 4 slots cannot share"),
    ],
)
def test_what_is_refused_at_once(session, small, gpus, batch, says):
    program = session.type("resnetImported", gpus, batch, *small)
    said, errors = program.communicate()
    assert (program.returncode, said) == (2, "")
    assert says in errors
    assert "hint: " in errors


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: NOT TESTED")
def test_the_seeds_command_on_a_gpu(tmp_path):
    with Session(tmp_path, "#address,gpu_idx\n127.0.0.1,0\n", gpus=True) as session:
        said = done(session.type("resnetImported", "1", "32"))
        text = session.transcript(0, ends=gone(said))
    assert "resnet18: rank 0 of 1 on cuda:0, " in text
    assert "epoch 3/3 " in text
    assert "A training job resnet18 is completed" in text
    assert session.process.returncode == 0, session.errors
    assert session.said.endswith("the cluster is down\n")


def test_flags_that_mean_nothing_are_said_to(session):
    ignored = [line for line in session.errors.splitlines() if line.startswith("ignored: ")]
    names = [re.match(r"ignored: --(\w+)", line)[1] for line in ignored]
    assert sorted(names) == ["be_batch_size", "cpp", "target_slowdown_factor"]
    assert session.said.endswith(READY)
    assert "127.0.0.1: 4 slots" in session.said
