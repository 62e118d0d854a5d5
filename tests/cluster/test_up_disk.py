"""A real `up` on a disk that gets full: a small one, where we may mount one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

# The first job prints as long as there is room for it, and then waits: it is not what fills the
# disk to the last block.
SCENARIO = """
import os, sys
from pathlib import Path
from manyhands.cluster.errors import StoreFull
from manyhands.cluster.job import State
from tests.cluster.running import WAIT_S, World

PRINTS = '''
import os, time
while True:
    disk = os.statvfs(".")
    if disk.f_bavail * disk.f_frsize > 32 << 20:
        os.write(1, b"x" * (1 << 20))
    else:
        time.sleep(0.02)
'''

def free():
    disk = os.statvfs(world.folder)
    return disk.f_bavail * disk.f_frsize

world = World(Path(os.environ["DISK"]))
try:
    world.up("--slots", "1")
    prints = world.submit_python(PRINTS, env={})
    over = world.cluster.wait(prints.id, WAIT_S)
    print(over.state, over.exit_code, over.attempt, over.failure.words.partition(":")[0])
    print(world.cluster.wait(world.submit("true").id, WAIT_S).state)
    world.until(lambda: free() >= 32 << 20, "room, of the log that was cut")
    ballast, refused, jobs = world.folder / "ballast", "", []
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    while not refused:  # what is set aside for jobs.db is used up first
        try:
            jobs.append(world.submit("true", env={"X": "x" * 50_000}).id)
        except Exception as error:
            refused = str(error)
    print(refused)
    ballast.unlink()
    jobs.append(world.submit("true").id)
    print({world.cluster.wait(id, WAIT_S).state for id in jobs} == {State.SUCCEEDED})
    print([job.id for job in world.cluster.jobs()] == [*reversed(jobs), 2, 1])
finally:
    world.close()
"""


def test_the_job_store_keeps_its_room_and_no_job_is_lost(tmp_path):
    mount = ["sh", "-c", 'mount -t tmpfs -o size=160m none "$DISK" && exec "$@"', "sh"]
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    small = ["unshare", *user, "--mount", *mount]
    env = os.environ | {"DISK": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    if not shutil.which("unshare") or subprocess.run([*small, "true"], env=env).returncode:
        pytest.skip("no small disk can be mounted here: NOT TESTED")
    ran = subprocess.run(
        [*small, sys.executable, "-c", SCENARIO], env=env, stdout=subprocess.PIPE, text=True
    )
    first, second, *refused, went_on, whole = ran.stdout.splitlines()
    assert first == "FAILED 153 0 rank 0 was ended"
    assert second == "SUCCEEDED"
    assert "no room" in refused[0]
    assert "hint: " in refused[1]
    assert (went_on, whole) == ("True", "True")
