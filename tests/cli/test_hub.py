"""`manyhands hub` as a user runs it: a process, a join code, signals, exit codes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

import pytest

from manyhands.core.peers import PeerState, View
from manyhands.links.base import LinkSettings, open_link
from manyhands.links.messages import Terms
from manyhands.testing.contract import Reader, activate


@contextlib.contextmanager
def hub(*options):
    process = subprocess.Popen(
        [sys.executable, "-m", "manyhands", "hub", "--bind", "127.0.0.1:0", "--json", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
        assert "Traceback" not in errors


def test_peers_come_in_by_the_code(tmp_path):
    with hub("--state", str(tmp_path)) as (_, said), open_link(said["code"], run="r") as link:
        assert isinstance(link.receive(10), View)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_same_hub_after_a_restart(tmp_path, number):
    with hub("--state", str(tmp_path)) as (process, first):
        process.send_signal(number)
        assert process.wait(30) == 0
    with hub("--state", str(tmp_path), "--bind", f"127.0.0.1:{first['port']}") as (_, second):
        assert second["code"] == first["code"]


def test_impatient_fingers(tmp_path):
    """Signals while it closes change nothing."""
    with hub("--state", str(tmp_path)) as (process, _):
        for _ in range(50):
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_advertise_is_what_the_code_says(tmp_path):
    with hub("--state", str(tmp_path), "--advertise", "hub.example.org:1234") as (_, said):
        assert (said["host"], said["port"]) == ("hub.example.org", 1234)


@pytest.mark.parametrize("option", ["--bind", "--advertise"])
@pytest.mark.parametrize("address", ["http://hub.example.org", "ann:w0rd@here:1", "here:1/run"])
def test_more_than_a_host_is_refused(tmp_path, option, address):
    command = [sys.executable, "-m", "manyhands", "hub", "--state", str(tmp_path)]
    done = subprocess.run(
        [*command, option, address], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "HOST:PORT" in done.stderr
    assert "w0rd" not in done.stdout + done.stderr


def test_the_code_is_not_in_the_log(tmp_path):
    with hub("--state", str(tmp_path)) as (process, said):
        open_link(said["code"], run="r").close()
        process.terminate()
        _, errors = process.communicate(timeout=30)
    token = (tmp_path / "token").read_text()
    assert "joined run 'r'" in errors
    assert token not in errors
    assert said["code"] not in errors


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--bind", "0.0.0.0:0", "--insecure"], 2, ("insecure", "hint:")),
        (["--bind", "127.0.0.1:none"], 2, ("port", "HOST:PORT")),
        (["--run", "no spaces"], 2, ("run name", "hint:")),
        (["--bind", "192.0.2.1:7799"], 1, ("cannot listen", "hint:")),
        (["--state", "/proc/nope"], 2, ("cannot keep its state in /proc/nope", "--state")),
    ],
)
def test_errors_say_what_to_do(tmp_path, options, code, words):
    command = [sys.executable, "-m", "manyhands", "hub", "--state", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr


def test_a_hub_killed_in_the_middle_of_traffic_is_the_same_hub_again(tmp_path):
    """Its peers come back as what they were, learn of one cut, and go on."""
    settings = LinkSettings(terms=Terms(beat_s=0.2, lease_s=5.0))
    with contextlib.ExitStack() as stack:
        process, said = stack.enter_context(hub("--state", str(tmp_path)))
        readers = [
            Reader(stack.enter_context(open_link(said["code"], run="r", name=n, settings=settings)))
            for n in ("one", "two")
        ]
        before = activate(*readers)
        one, two = (reader.link for reader in readers)
        for i in range(200):
            one.send(two.me, str(i).encode(), [bytes(60_000)])
            if i == 100:
                readers[1].until_deliveries(60)  # the rest is where it may be
                process.kill()
                process.wait()
                again = ("--state", str(tmp_path), "--bind", f"127.0.0.1:{said['port']}")
                stack.enter_context(hub(*again))
        views = [reader.until_view(lambda view: view.cut > before.cut) for reader in readers]
        assert views[0] == views[1]
        assert views[0].number.era > before.number.era
        assert views[0].peers(PeerState.ACTIVE) == before.peers(PeerState.ACTIVE)
        one.send(two.me, b"after")
        readers[1].until_message(b"after")
        # In order, none twice; what was under way when the hub died may be missing.
        numbers = [int(d.message) for d in readers[1].deliveries if d.message != b"after"]
        assert numbers == sorted(set(numbers))
        assert len(numbers) > 50
