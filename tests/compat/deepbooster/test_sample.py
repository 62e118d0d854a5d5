"""DeepBooster's sample as two programs, ignited by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from manyhands.core.address import parse_address
from manyhands.links.amqp import login_of
from manyhands.links.amqp.queues import post, set_up

SAMPLE = Path(__file__).with_name("sample.py")
PATIENCE_S = 200.0  # for programs of which each loads torch, where others work too


def test_the_sample_runs(broker, tmp_path):
    url = broker.url().removesuffix("/%2F")  # as in the README: no vhost
    login = login_of(parse_address(url))
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    programs = [
        subprocess.Popen(
            [sys.executable, SAMPLE, str(number), url],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    try:
        set_up(login, ["start_1", "start_2"])
        post(login, {"start_1": b"any message", "start_2": b""})
        said = [program.communicate(timeout=PATIENCE_S) for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert [program.returncode for program in programs] == [0, 0], said
    first, second = (json.loads(out) for out, _ in said)
    assert first == second
    # torch's own warning: MSELoss spreads one label over a thousand rows.
    assert all("UserWarning" in err and "target size" in err for _, err in said)
