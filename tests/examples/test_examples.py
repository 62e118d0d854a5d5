"""The examples run as their first lines say, with one peer and with several, and learn."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from manyhands.testing.processes import end_tree

FOLDER = Path(__file__).parents[2] / "examples"
DRIVERS = {"driver"}  # starts peers itself: tests/compat/fluxdistributed/test_processes.py
JOBS = {
    "resnetImported",
    "vgg",
    "wrn",
    "gpt",
}  # of a cluster: tests/compat/deeppool/test_session.py
PLAIN = {"ddp"}  # has no plan: test_plain_ddp_learns_what_one_process_learns
NAMES = sorted({path.stem for path in FOLDER.glob("*.py")} - DRIVERS - JOBS - PLAIN)
STEPS = 4
PATIENCE_S = 200.0  # for programs of which each loads torch, where others work too

# In float32, after four steps of Adam: sums over microbatches have the same order in every plan,
# but gradients of several consumers, and the norm over all peers, are added up in another one.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def said_by(tmp_path_factory):
    """What an example prints, by the peers' names; started once for each set of arguments."""
    # What torch makes for compiled code, though nothing is compiled, must not be left elsewhere.
    cache_folder = tmp_path_factory.mktemp("inductor")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache_folder),
    }

    @cache
    def start(name, num_peers, *options):
        """Without a number of peers: by itself."""
        started = [] if num_peers is None else ["-m", "manyhands", "run", "-n", str(num_peers)]
        process = subprocess.Popen(
            [sys.executable, *started, str(FOLDER / f"{name}.py"), *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            said, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            end_tree(process, patience_s=10)
        assert process.returncode == 0, errors
        if num_peers is None:
            assert errors == ""
        return re.sub(r"^\[\S+\] ", "", said, flags=re.M)

    return start


def losses(said):
    found = [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)$", said, flags=re.M)]
    assert len(found) == STEPS
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("num_peers", "options"),
    [
        (1, ("--schedule", "interleaved", "--stages-per-peer", "2")),
        (2, ("--schedule", "1f1b")),
        (2, ("--schedule", "interleaved", "--stages-per-peer", "2")),
        (3, ("--schedule", "1f1b")),  # so that variables cross a stage that has no use for them
    ],
)
def test_losses_are_those_of_one_process(said_by, name, num_peers, options):
    few = ("--steps", str(STEPS), "--every", "1")
    alone = losses(said_by(name, None, *few))
    assert alone[-1] < alone[0]
    said = said_by(name, num_peers, *few, *options)
    assert losses(said) == pytest.approx(alone, rel=TOLERANCE)
    num_stages = 1 if num_peers == 1 else num_peers * (2 if "interleaved" in options else 1)
    assert len(re.findall(r"^\d+: .*100%", said, flags=re.M)) == num_stages


def test_the_unet_takes_off_more_noise_than_a_blur(said_by):
    said = said_by("unet", None, "--steps", "40")
    blurred, unet = re.search(r"(\S+) blurred, (\S+) now", said).groups()
    assert float(unet) < 0.9 * float(blurred)


def test_the_transformer_reads_what_it_writes_again(said_by):
    said = said_by("seq2seq", None, "--steps", "120")
    right, baseline = re.findall(r": (\S+)%$", said, flags=re.M)
    assert float(right) > float(baseline) + 10


def test_plain_ddp_learns_what_one_process_learns(said_by):
    """Real digits, three processes, the launcher's own hub."""

    def read(said):
        (found,) = re.findall(r"^(\d+) of 360 unseen digits right; .* length is (\S+)$", said, re.M)
        return int(found[0]), float(found[1])

    alone = read(said_by("ddp", None))
    assert alone[0] > 0.95 * 360
    right, length = read(said_by("ddp", 3))
    assert abs(right - alone[0]) <= 1  # a digit on the edge may fall to either side
    assert length == pytest.approx(alone[1], rel=1e-3)
