"""`manyhands doctor` as a process: its exit codes, its JSON, its lines, and no secret in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from rich.console import Console

from manyhands.cli.doctor import plain_lines, show
from manyhands.doctor.report import ok, problem
from manyhands.links.hub import Hub

STATUSES = {"ok", "warning", "problem", "skipped"}


# The command, with limits for a machine on which others work too: to load torch takes most of them.
PATIENT = """
from manyhands.cli.main import main
from manyhands.doctor import examine, limits
examine._BASE_S = limits.TORCH_S = 60.0
main()
"""


def doctor(*arguments, said=None, **environ):
    done = subprocess.run(
        [sys.executable, "-c", PATIENT, "doctor", "--seconds", "0.1", *arguments],
        capture_output=True,
        input=said,
        text=True,
        check=False,
        env={**os.environ, **environ},
        timeout=200,
    )
    return done.returncode, done.stdout, done.stderr


def as_json(text):
    report = json.loads(text)
    assert set(report) == {
        *("schema", "manyhands", "address", "ok", "exit_code", "elapsed_s", "counts", "findings")
    }
    for finding in report["findings"]:
        assert set(finding) == {"check", "status", "summary", "remedy", "data"}
        assert finding["status"] in STATUSES
        assert finding["remedy"] or finding["status"] in ("ok", "skipped")
    return report, {finding["check"]: finding for finding in report["findings"]}


def test_without_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = doctor(NO_COLOR="1")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "own hub bandwidth" in out
    assert "nothing failed" in out.splitlines()[-1]


def test_with_a_join_code():
    start_s = time.monotonic()
    with Hub("127.0.0.1:0") as hub:
        secret, token = hub.address.code(), hub.address.token
        code, out, err = doctor("--json", MANYHANDS_URL=secret)
        report, found = as_json(out)
    assert (code, err) == (0, "")
    assert report["ok"]
    assert report["address"] == f"hub://127.0.0.1:{hub.address.port}/"
    assert found["bandwidth"]["status"] == "ok"
    assert secret not in out
    assert token not in out
    assert 0 < report["elapsed_s"] < time.monotonic() - start_s


def test_the_code_by_standard_input():
    with Hub("127.0.0.1:0") as hub:
        code, out, _ = doctor("-", "--json", said=hub.address.code() + "\n")
    assert code == 0
    assert json.loads(out)["address"].startswith("hub://127.0.0.1")


def test_no_code_on_standard_input():
    """Another address than the one that was meant is not examined in its place."""
    with Hub("127.0.0.1:0") as hub:
        code, out, err = doctor("-", said="", MANYHANDS_URL=hub.address.code())
    assert (code, out) == (2, "")
    assert "standard input" in err


def test_a_failed_check(broker):
    code, out, err = doctor(broker.url("guest", "wr0ng-password"), "--json")
    report, found = as_json(out)
    assert (code, report["exit_code"], report["ok"]) == (1, 1, False)
    assert found["credentials"]["status"] == "problem"
    assert "wr0ng-password" not in out + err


@pytest.mark.parametrize(
    "address", ["amqp://ann:s3cret-w0rd@far.example/v", "amqp://ann:s3cret/w0rd@far.example/v"]
)
def test_a_bad_address(address):
    code, out, err = doctor(address, "--json")
    _, found = as_json(out)
    assert code == 2
    assert found["address"]["status"] == "problem"
    assert found["torch"]["status"] in STATUSES  # the rest was examined all the same
    assert "s3cret" not in out + err
    assert "w0rd" not in out + err


def test_options_are_checked():
    assert doctor("--seconds", "0")[0] == 2


def test_lines():
    assert plain_lines(ok("tcp", "fine")) == "ok       tcp                fine"
    line, remedy = plain_lines(problem("tcp", "nothing listens", "start it")).splitlines()
    assert line.startswith("problem  tcp")
    assert remedy.strip() == "remedy: start it"


def test_a_terminal_shows_text_as_it_is(capsys):
    console = Console(force_terminal=True, width=50, color_system=None)
    show(console, problem("tls", "[red]no markup[/red] " + "long " * 12, "do [this]"))
    out = capsys.readouterr().out
    assert "[red]no markup[/red]" in out
    assert "→ do [this]" in out
    assert all(len(line) <= 50 for line in out.splitlines())
