"""The seed's session: a cluster in one terminal, and what is typed in another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from manyhands.testing.processes import end_tree

EXAMPLES = Path(__file__).parents[3] / "examples"
PATIENCE_S = 200.0  # for programs of which each loads torch, where others work too
READY = "Now, cluster is ready to accept training jobs.\n"
HOSTFILE = "#address,gpu_idx\n127.0.0.1,0\n127.0.0.1,1\n127.0.0.1,2\n127.0.0.1,3\n"


class Session:
    """Leaving the block is the Ctrl-C. Slots are shares of the CPUs, on machines with GPUs too,
    unless they are to be `gpus`.
    """

    def __init__(self, folder, hostfile=HOSTFILE, *, gpus=False):
        self.folder = folder
        (folder / "hostfile.txt").write_text(hostfile)
        self.environ = os.environ | {
            "XDG_STATE_HOME": str(folder / "state"),
            "OMP_NUM_THREADS": "1",
        }
        # What is typed in the second terminal finds the cluster as a user's does: by its folder.
        for name in ("MANYHANDS_COORDINATOR", "MANYHANDS_TOKEN", "MANYHANDS_FINGERPRINT"):
            self.environ.pop(name, None)
        if not gpus:
            self.environ["CUDA_VISIBLE_DEVICES"] = ""
        self.state = folder / "state" / "manyhands" / "cluster"
        self.said = ""

    def __enter__(self):
        self._errors = (self.folder / "errors").open("w+")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "manyhands.compat.deeppool.cluster"),
                *("--addrToBind", "127.0.0.1:0", "--be_batch_size=0", "--cpp"),
                *("--logdir", "logs", "--hostfile", "hostfile.txt"),
                *("--target_slowdown_factor", "1.1"),
            ],
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        for line in self.process.stdout:
            self.said += line
            if line == READY:
                break
        else:
            raise AssertionError(self.errors)
        self.address = re.search(r"https://(\S+)", self.said)[1]
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            finally:
                end_tree(self.process, patience_s=0)
        self.said += self.process.stdout.read()
        self.process.stdout.close()
        self._errors.close()

    @property
    def errors(self):
        return (self.folder / "errors").read_text()

    def type(self, example, *arguments):
        """`python examples/EXAMPLE.py ...`, under way."""
        return subprocess.Popen(
            [sys.executable, str(EXAMPLES / f"{example}.py"), *arguments],
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def transcript(self, slot, *, ends=None):
        """What the file of a slot has; once it ends with this line, if one is given."""
        deadline_s = time.monotonic() + PATIENCE_S
        place = self.folder / "logs" / f"cpprt{slot}.out"
        while True:
            text = place.read_text()
            if ends is None or re.search(rf"{ends}\n\Z", text):
                return text
            assert time.monotonic() < deadline_s, f"no {ends!r} at the end of {text}"
            time.sleep(0.05)  # a file says nothing when it grows


def done(process):
    """What it has said; it has to have gone well."""
    try:
        said, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        end_tree(process, patience_s=0)
    assert process.returncode == 0, errors
    return said


def job_of(said):
    return int(re.search(r"^job (\d+): ", said, flags=re.M)[1])


def part_of(transcript, job, start):
    """What a transcript has of one job: from the last line that begins so, to the job's end."""
    before, _, _ = transcript.partition(f" job {job} in poll NOTICE")
    return before[before.rindex(start) :]
