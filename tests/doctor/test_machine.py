"""This machine: each judgement from explicit inputs, torch broken and hanging for real."""

from __future__ import annotations

import sys

import pytest

from manyhands.doctor.machine import (
    RELEASED_S,
    TRAPS,
    Requirement,
    check_dependencies,
    check_disk,
    check_machine,
    check_open_files,
    check_platform,
    check_python,
    check_torch,
    judge_clock,
    judge_torch,
    own_requirements,
    read_requirements,
)
from manyhands.doctor.measure import Measured, judge, part_size
from manyhands.doctor.network import check_dns, check_loopback
from manyhands.doctor.report import Status
from manyhands.links.messages import Terms


def test_this_machine_is_fine():
    findings = {f.check: f for f in check_machine().findings}
    for check in ("python", "manyhands", "platform", "dependencies", "clock"):
        assert findings[check].status is Status.OK, findings[check]
    assert findings["memory"].data["num_cpus"] >= 1
    assert findings["memory"].data["free_bytes"] > 0


def test_python():
    assert check_python((3, 11, 0)).status is Status.OK
    assert check_python((3, 10, 14)).status is Status.PROBLEM


def test_platform():
    assert check_platform(posix=False, gathers=False).status is Status.PROBLEM


def test_requirements_are_read():
    lines = ["amqp>=5.3", "torch>=2.11", "psutil>=6; extra == 'testing'", "rich (>=13)", "typer"]
    assert read_requirements(lines) == (
        Requirement("amqp", "5.3"),
        Requirement("torch", "2.11"),
        Requirement("rich", "13"),
    )
    assert {"amqp", "torch", "msgspec"} <= {r.package for r in own_requirements()}


def test_dependencies_name_all_that_lack():
    wanted = [Requirement("amqp", "5.3"), Requirement("rich", "13"), Requirement("torch", "2.11")]
    installed = {"amqp": "5.10.0", "torch": "2.9.1+cpu"}
    finding = check_dependencies(wanted, installed.get)
    assert finding.status is Status.PROBLEM
    assert finding.summary == "rich is missing; torch 2.9.1+cpu is older than 2.11"
    assert finding.remedy == "type: python -m pip install 'rich>=13' 'torch>=2.11'"


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.11.0", Status.OK),
        ("2.13.0+cu130", Status.OK),
        ("2.12.1", Status.WARNING),
        ("2.1.3", Status.WARNING),
    ],
)
def test_torch_versions(version, status):
    said = {"version": version, "cuda_build": None, "threads": 2, "devices": []}
    torch, devices = judge_torch(said)
    assert torch.status is status
    assert "2 CPU threads" in devices.summary


def test_devices():
    gpu = {"device": "cuda:0", "name": "H", "total_bytes": 2 << 30, "free_bytes": 1 << 30}
    said = {"version": "2.13.0", "cuda_build": "13", "threads": 2, "devices": [gpu]}
    assert judge_torch(said)[1].summary == "cuda:0 H (1.0 GiB of 2.0 GiB free)"


def test_a_broken_torch_is_a_finding(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: no such file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (finding,) = check_torch(60.0).findings
    assert finding.status is Status.PROBLEM
    assert "libtorch.so" in finding.summary


def test_a_processor_that_has_less_than_it_says(tmp_path, monkeypatch):
    """Found on a virtual machine, where every product of bf16 matrices was a SIGILL."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "from types import SimpleNamespace as Any\n"
        "__version__, bfloat16 = '2.13.0', None\n"
        "get_num_threads = lambda: 2\n"
        "version = Any(cuda=None)\n"
        "cuda = Any(is_available=lambda: False)\n"
        "backends = Any(mps=cuda)\n"
        "ones = lambda *args, **options: os.kill(os.getpid(), signal.SIGILL)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    torch, devices, processor = check_torch(60.0).findings
    assert torch.status is devices.status is Status.OK
    assert processor == TRAPS
    assert processor.status is Status.PROBLEM
    assert "ONEDNN_MAX_CPU_ISA" in processor.remedy


def test_a_hanging_torch_is_a_finding(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (finding,) = check_torch(0.3).findings
    assert finding.status is Status.PROBLEM
    assert "did not end" in finding.summary


def test_no_python_to_ask():
    (finding,) = check_torch(1.0, python=sys.executable + "-gone").findings
    assert finding.status is Status.PROBLEM


def test_open_files():
    assert check_open_files(256).status is Status.WARNING
    assert check_open_files(1024).status is Status.OK
    assert check_open_files(None).status is Status.OK


def test_disk():
    assert check_disk("/tmp", 1 << 20).status is Status.WARNING


def test_clock():
    assert judge_clock(RELEASED_S + 1, 0.05, 0.05).status is Status.OK
    assert judge_clock(0.0, 0.05, 0.05).status is Status.PROBLEM
    assert judge_clock(RELEASED_S + 1, 3600.0, 0.05).status is Status.WARNING


def test_dns():
    found = check_dns("localhost", 1, 10.0)
    assert "127.0.0.1" in found.value
    (finding,) = check_dns("no-such-host.invalid", 1, 1.0).findings
    assert finding.status is Status.PROBLEM


def test_loopback():
    assert check_loopback(0.05).value > 0


def measured(**changes):
    values = {"round_trip_s": 0.01, "up_bps": 1e8, "down_bps": 1e8} | changes
    fixed = {"num_pings": 50, "num_bytes": 1, "part_bytes": 1 << 20, "join_s": 0.1}
    return Measured(**values, **fixed, terms=Terms())


@pytest.mark.parametrize(
    ("changes", "latency", "bandwidth"),
    [
        ({}, Status.OK, Status.OK),
        ({"round_trip_s": 2.5}, Status.WARNING, Status.OK),  # 1.25 s each way, beats of 1 s
        ({"up_bps": 4e5}, Status.OK, Status.WARNING),  # 1 MiB in 2.6 s, a lease of 10 s
        ({"down_bps": 0.0}, Status.OK, Status.WARNING),
    ],
)
def test_measurements_are_judged_by_the_terms(changes, latency, bandwidth):
    assert [f.status for f in judge(measured(**changes))] == [latency, bandwidth]


def test_slow_lines_get_small_parts():
    assert part_size(0.0) == 1 << 20
    assert part_size(-0.001) == 1 << 20
    assert part_size(0.1) == 64 << 10
