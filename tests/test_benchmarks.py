"""Every benchmark runs, in small, and writes what its readers expect. No number is judged here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.testing.processes import end_tree

FOLDER = Path(__file__).parents[1] / "benchmarks"
ROW = {"link", "tls", "peers", "median_s", "p10_s", "p90_s", "cpu_s"}
AVERAGING = ROW | {"mbytes", "wire", "bytes_sent_per_peer", "identical", "extra_peak_bytes"}


def rows_of(tmp_path: Path, name: str, *options: str, keys: set[str]) -> list[dict]:
    """Run a benchmark; its rows, each of which has these keys."""
    target = tmp_path / "result.json"
    command = [sys.executable, FOLDER / f"{name}.py", "--quick", "--json", target, *options]
    # torch makes folders for compiled code and shared memory, and leaves them there.
    (scratch := tmp_path / "scratch").mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            process.wait(100)
        finally:
            end_tree(process, patience_s=0.0)  # one that hangs has processes of its own
    assert process.returncode == 0, log.read_text()
    result = json.loads(target.read_text())
    assert result.keys() == {"bench", "machine", "rows"}
    assert result["bench"] == name
    assert result["machine"].keys() >= {"cpu", "cores", "memory_bytes", "system", "python"}
    for row in result["rows"]:
        assert keys <= row.keys(), keys - row.keys()
        assert 0 < row["p10_s"] <= row["median_s"] <= row["p90_s"]
        assert isinstance(row["tls"], bool)
        assert row["cpu_s"] >= 0
        assert isinstance(row.get("extra_peak_bytes", 0), int)
    return result["rows"]


def test_links(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path, "links", "--link", "socket,local,hub", "--peers", "2", "--turns", "1", keys=ROW
    )
    assert {row["link"] for row in rows} == {"socket", "local", "hub"}


def test_allreduce(tmp_path: Path) -> None:
    options = ["--link", "gloo,bare,hub,amqp", "--peers", "2", "--mbytes", "1", "--turns", "1"]
    rows = rows_of(tmp_path, "allreduce", *options, "--wire", "fp32,int8", keys=AVERAGING)
    told = {(row["link"], row["engine"], row["wire"]) for row in rows}
    assert told == {("gloo", "gloo", "fp32"), ("bare", "bare", "fp32")} | {
        (link, engine, wire)
        for link in ("hub", "amqp")
        for engine in ("team", "rounds")
        for wire in ("fp32", "int8")
    }
    assert all(row["identical"] for row in rows)


def test_allreduce_of_hivemind(tmp_path: Path) -> None:
    if importlib.util.find_spec("hivemind") is None:
        pytest.skip(
            "hivemind is not installed, so nothing here is compared: pip install '.[bench]'"
        )
    options = ["--link", "gloo,hivemind", "--peers", "2", "--mbytes", "1", "--turns", "1"]
    rows = rows_of(tmp_path, "allreduce", *options, keys=AVERAGING)
    assert [row["link"] for row in rows] == ["gloo", "hivemind"]


def test_ddp(tmp_path: Path) -> None:
    options = ["--backend", "gloo,hub,amqp", "--ranks", "2", "--parameters", "0.1"]
    keys = AVERAGING | {"parameters", "steps_per_s", "ratio_to_gloo", "difference_to_gloo"}
    rows = rows_of(tmp_path, "ddp", *options, "--turns", "1", keys=keys)
    assert [row["link"] for row in rows] == ["gloo", "hub", "amqp"]
    assert all(row["identical"] for row in rows)


def test_scale(tmp_path: Path) -> None:
    keys = AVERAGING | {"parameters", "wrong_values", "extra_bound_bytes"}
    (row,) = rows_of(tmp_path, "scale", "--parameters", "1e6", keys=keys)
    assert row["wrong_values"] == 0
