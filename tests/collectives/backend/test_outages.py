"""A meeting point that dies for good: every rank has an error that names it and the operation."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from tests.collectives.backend.crew import Crew

OUTAGE_S, MARGIN_S = 2.0, 28.0


@contextmanager
def mortal_hub(folder):
    """Yields its address and what kills it."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "manyhands", "hub", "--bind", "127.0.0.1:0", "--insecure"),
            *("--json", "--state", str(folder)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        place = f"127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        yield f"hub://{place}/doomed?insecure=1", place, process.kill
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


@pytest.fixture(params=["hub", "amqp"])
def doomed(request, tmp_path):
    """The URL of a run, the meeting point as errors name it, and what kills that."""
    if request.param == "hub":
        with mortal_hub(tmp_path) as made:
            yield made
        return
    broker = request.getfixturevalue("fresh_broker")()
    url = broker.url()
    yield f"{url}?run=doomed", url.split("@")[1].split("/")[0], broker.kill


def test_gone_for_good(zygote, doomed):
    url, place, kill = doomed
    with Crew(zygote, 3) as crew:
        crew.join(url, outage_s=OUTAGE_S)
        crew.call("sums", "coalesced")
        crew.begin("failures", "all_reduce_until_error")
        start_s = time.monotonic()
        kill()
        answers = crew.finish(timeout_s=OUTAGE_S + MARGIN_S)
        assert time.monotonic() - start_s > OUTAGE_S  # it is looked for
        for answer in answers.values():
            assert answer.ok, answer.value
            text = answer.value["error"]
            assert text.startswith("DistBackendError: `all_reduce float32[600000]"), text
            assert place in text, text
            assert f"not found again within {OUTAGE_S:g} s" in text, text
        for answer in crew.call("failures", "all_reduce_until_error").values():
            assert answer["took_s"] < OUTAGE_S  # it is not looked for again
            assert place in answer["error"]
