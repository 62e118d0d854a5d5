"""A run that is saved behind a URL, and goes on from there: at a real S3 server on loopback.

Each in a process of its own: what s3fs keeps open ends with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.registry.test_buckets import KEYS, SERVER

ROOT = Path(__file__).parents[2]
TRAIN = """
import sys
from tests.replica.test_resume import train
print(train("s3://bucket/runs/one", resume=sys.argv[1] == "again", epochs=int(sys.argv[2])))
"""


@pytest.fixture
def environ():
    environ = os.environ | KEYS | {"AWS_EC2_METADATA_DISABLED": "true"}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, "{}"],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as server:
        port = int(server.stdout.readline())
        yield environ | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        server.stdin.close()


def trained(environ, *words):
    """How many rounds."""
    command = [sys.executable, "-c", TRAIN, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert "not saved" not in done.stderr
    return int(done.stdout)


def test_what_was_saved_in_a_bucket_is_gone_on_from(environ):
    assert trained(environ, "anew", "1") == 2
    assert trained(environ, "again", "3") == 4
