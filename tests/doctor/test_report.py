"""Reports: what findings amount to, and that no secret is in them."""

from __future__ import annotations

import json
import threading

import pytest

from manyhands.core.address import HubAddress, parse_address
from manyhands.doctor.examine import Request, examine, resolve, total_s
from manyhands.doctor.limits import Budget
from manyhands.doctor.report import (
    Outcome,
    Report,
    Status,
    ok,
    problem,
    secrets_of,
    skipped,
    warning,
    without_secrets,
)

FINE = ok("tcp", "it answers", ms=1.0)
ODD = warning("torch", "not tested", "use another")
BAD = problem("token", "it is wrong", "use the join code")
MISTYPED = problem("address", "not an address", "copy it again")


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ((), 0),
        ((FINE, ODD, skipped("clock", "no reason")), 0),
        ((FINE, BAD, ODD), 1),
        ((BAD, MISTYPED), 2),
    ],
)
def test_exit_code(findings, code):
    assert Report(findings=findings).exit_code == code


def test_json_keys_are_stable():
    plain = Report(findings=(FINE, BAD), address="hub://h:1/", elapsed_s=1.23456).plain()
    assert json.loads(json.dumps(plain)) == plain
    assert list(plain) == [
        *("schema", "manyhands", "address", "ok", "exit_code", "elapsed_s", "counts", "findings")
    ]
    assert plain["schema"] == 1
    assert plain["counts"] == {"ok": 1, "warning": 0, "problem": 1, "skipped": 0}
    assert plain["findings"][1] == {
        "check": "token",
        "status": "problem",
        "summary": "it is wrong",
        "remedy": "use the join code",
        "data": {},
    }


def test_secrets_are_hidden_wherever_they_are():
    address = parse_address("amqp://ann:pa55-word@127.0.0.1/v")
    secrets = secrets_of("amqp://ann:pa55-word@127.0.0.1/v", address)
    finding = problem("x", "ann said pa55-word", "not pa55-word", deep=[{"a": "pa55-word"}], n=1)
    clean = without_secrets(finding, secrets)
    assert "pa55" not in repr(clean)
    assert clean.summary == "ann said ***"
    assert clean.data == {"deep": [{"a": "***"}], "n": 1}


@pytest.mark.parametrize(
    "text",
    [
        "amqp://ann:s3cret/w0rd@host/v",  # a password that ends the host part of a URL
        "amqp://ann:s3cret#w0rd@host:x/v",
        "hub://host/run?token=s3cret-w0rd&nonsense=1",
        "mh1-s3cretw0rd",
        "xx mh1-s3cretw0rd",
    ],
)
def test_a_mistyped_address_gives_nothing_away(text):
    error = resolve(text, None, {})
    assert error is not None
    finding = problem("address", error.message, error.hint or "-")
    shown = repr(without_secrets(finding, secrets_of(text, None)))
    assert "s3cret" not in shown
    assert "w0rd" not in shown


def test_resolve_without_an_address(tmp_path):
    file = tmp_path / "manyhands.toml"
    assert resolve(None, None, {}, file=file) is None
    found = resolve(None, None, {"MANYHANDS_URL": "hub://h:1/r"}, file=file)
    assert isinstance(found, HubAddress)
    file.write_text("colour = 'red'\n")
    assert "unknown keys" in str(resolve(None, None, {}, file=file))


def test_a_check_that_hangs_is_a_finding():
    done = threading.Event()

    def hang(limit_s):
        done.wait()
        return Outcome(findings=())

    (finding,) = Budget(10.0).call("dns", 0.1, hang).findings
    done.set()
    assert finding.status is Status.PROBLEM
    assert "0.1 s" in finding.summary


def test_a_check_that_breaks_is_a_finding():
    (finding,) = Budget(10.0).call("dns", 1.0, lambda s: Outcome(findings=(1 // 0,))).findings
    assert finding.status is Status.PROBLEM
    assert "ZeroDivisionError" in finding.summary


def test_a_budget_that_is_used_up_skips():
    (finding,) = Budget(0.0).call("dns", 1.0, lambda s: Outcome(findings=(FINE,))).findings
    assert finding.status is Status.SKIPPED


def test_the_whole_examination_is_bounded():
    assert total_s(2.0) <= 15.0


def test_all_problems_come_in_one_report(monkeypatch):
    monkeypatch.setattr("manyhands.doctor.machine.MIN_PYTHON", (9, 0))
    monkeypatch.setattr("manyhands.doctor.machine.installed_version", lambda package: None)
    error = resolve("nonsense", None, {})
    findings = list(examine(Request(address=None, bad_address=error, seconds=0.1)))
    problems = {f.check for f in findings if f.status is Status.PROBLEM}
    assert problems == {"python", "dependencies", "address"}
    assert {"own hub bandwidth", "torch", "devices", "trust"} <= {f.check for f in findings}


def test_what_peers_could_do_to_each_other_is_said():
    findings = list(examine(Request(address=None, seconds=0.1)))
    (trust,) = [f for f in findings if f.check == "trust"]
    assert trust.summary.startswith("peers of a run trust each other")
    for words in (
        "torch.distributed's *_object calls run code that the others send",
        "give the join code or the broker's password only to whom you would give a shell",
    ):
        assert words in trust.summary
