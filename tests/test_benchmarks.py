"""Every benchmark runs, in small, and writes what its readers expect. No number is judged here."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from manyhands.testing.processes import end_all, end_tree, is_gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

FOLDER = Path(__file__).parents[1] / "benchmarks"
ROW = {"link", "tls", "peers", "median_s", "p10_s", "p90_s", "cpu_s"}
PATIENCE_S = 250.0  # for programs that start brokers and others that load torch, on a busy machine
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
            process.wait(PATIENCE_S)
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
    options = ["--peers", "2", "--mbytes", "1", "--turns", "1", "--wire", "fp32,int8"]
    links = "gloo,bare,bare-amqp,hub,door,amqp"
    rows = rows_of(tmp_path, "allreduce", "--link", links, *options, keys=AVERAGING)
    told = {(row["link"], row["engine"], row["wire"]) for row in rows}
    assert told == {(link, link, "fp32") for link in ("gloo", "bare", "bare-amqp")} | {
        (link, engine, wire)
        for link in ("hub", "door", "amqp")
        for engine in ("team", "rounds")
        for wire in ("fp32", "int8")
    }
    assert all(row["identical"] for row in rows)
    assert {row["void_rounds"] for row in rows} == {0}
    assert [row["link"] for row in rows if row["bytes_sent_per_peer"] is None] == ["gloo"]
    for row in rows:
        if row["engine"] in ("team", "rounds"):
            assert row["threads"].keys() >= {"main", "send", reader_of(row), row["engine"]}


def reader_of(row: dict) -> str:
    """Whose threads read what comes over that link; others may have read nothing meanwhile."""
    return "inbox" if row["link"] == "amqp" else "read"


def test_rounds_that_did_not_average_are_counted_and_not_timed(
    allreduce: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    variant = {"link": "hivemind", "engine": "hivemind", "wire": "fp32"}
    common = {"cpu": 3.0, "sent": None, "identical": True, "error": 0.0, "extra": 0}
    meeting = {"meeting_cpu": 0.0, "meeting_peak": 0}

    def turn(*averaged: bool) -> list[dict]:
        said = {"averaged": averaged, **common}
        return [{"times": [5.0, 1.0, 2.0], **said, **meeting}, {"times": [1.0, 4.0, 3.0], **said}]

    row = allreduce.row_of(2, 8, variant, [turn(False, True, True), turn(False, True, False)])
    assert (row["rounds"], row["void_rounds"]) == (3, 3)
    assert (row["p10_s"], row["median_s"], row["p90_s"]) == (3.0, 4.0, 4.0)
    assert row["turn_medians_s"] == [3.5, 4.0]
    assert row["cpu_s"] == 2.0  # of all rounds
    allreduce.add_ratios([row])
    allreduce.show([row])
    assert "void 3 rounds of 6" in capsys.readouterr().out
    table = module_of("readme_table", FOLDER.parent / "scripts")
    assert "; 3 of 6 rounds did not average |" in table.allreduce({"rows": [row]})[-1]
    assert allreduce.row_of(2, 8, variant, [turn(False, False, False)]) is None
    assert "averaged in no round" in capsys.readouterr().err


def test_what_is_a_mean(allreduce: ModuleType) -> None:
    given = torch.randn(3, allreduce.PICKED, dtype=torch.float64)
    mean = given.mean(0).expand(3, -1)
    rounded = mean.bfloat16().double()
    assert allreduce.is_mean(given, mean)
    assert allreduce.is_mean(given, rounded)
    assert not allreduce.is_mean(given, given)  # nobody has averaged
    one_of_them = torch.stack([mean[0], mean[1], given[2]])
    assert not allreduce.is_mean(given, one_of_them)
    part_of_it = mean.clone()
    part_of_it[:, :100] = given[:, :100]
    assert not allreduce.is_mean(given, part_of_it)
    assert not allreduce.is_mean(given, mean * torch.nan)
    values = torch.arange(3.0 * allreduce.PICKED)
    assert allreduce.picked(values).tolist() == values[::3].tolist()


def test_allreduce_of_hivemind(tmp_path: Path) -> None:
    if importlib.util.find_spec("hivemind") is None:
        pytest.skip(
            "hivemind is not installed, so nothing here is compared: pip install '.[bench]'"
        )
    options = ["--link", "gloo,hivemind", "--peers", "2", "--mbytes", "1", "--turns", "1"]
    rows = rows_of(tmp_path, "allreduce", *options, keys=AVERAGING)
    assert [row["link"] for row in rows] == ["gloo", "hivemind"]


@pytest.mark.parametrize("asked", ["gloo,hub,hivemind", "gloo,hub"])
def test_rows_of_what_could_not_be_run_are_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    """As those of hivemind where it is not installed; whoever does not ask for them, knows."""
    harness = module_of("harness")
    target = tmp_path / "allreduce.json"
    rows = [{"link": link} for link in ("gloo", "hub", "hivemind")]
    assert harness.store(target, {"rows": rows}, asked.split(",")) == target
    again = {"rows": rows[:2]}
    beside = harness.store(target, again, asked.split(","))
    assert json.loads(beside.read_text()) == again
    said = capsys.readouterr().err
    if "hivemind" in asked:
        assert json.loads(target.read_text())["rows"] == rows
        assert f"{target} STAYS AS IT WAS: it has rows of hivemind" in said
        assert str(beside) in said
    else:
        assert beside == target
        assert said == ""


@pytest.fixture
def allreduce(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return module_of("allreduce")


def module_of(name: str, folder: Path = FOLDER) -> ModuleType:
    """A file of the benchmarks, which are no package."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ddp(tmp_path: Path) -> None:
    options = ["--backend", "gloo,bare,hub,door,amqp", "--ranks", "2", "--parameters", "0.1"]
    keys = AVERAGING | {"parameters", "steps_per_s", "ratio_to_gloo", "difference_to_gloo"}
    rows = rows_of(tmp_path, "ddp", *options, "--turns", "1", keys=keys)
    assert [row["link"] for row in rows] == ["gloo", "bare", "hub", "door", "amqp"]
    assert all(row["identical"] for row in rows)
    counted = [row["link"] for row in rows if row["bytes_sent_per_peer"] is not None]
    assert counted == ["hub", "door", "amqp"]  # of the others nobody does
    for row in rows:
        ours = {"send", reader_of(row), "team"} if row["link"] in counted else set()
        assert row["threads"].keys() >= {"main"} | ours


TRAINING = AVERAGING | {
    "parameters",
    "batch",
    "samples_per_s",
    "samples_per_s_p10",
    "samples_per_s_p90",
    "samples_taken",
    "ratio_to_plain",
    "ratio_to_gloo",
    "loss",
    "difference_to_plain",
    "peak_bytes",
    "heap_kept",
    "device",
}


def test_train(tmp_path: Path) -> None:
    options = ["--link", "plain,alone,gloo,hub,door,amqp", "--peers", "1,2", "--batch", "8"]
    rows = rows_of(tmp_path, "train", *options, "--parameters", "0.1", keys=TRAINING)
    assert [row["link"] for row in rows] == ["plain", "alone", "gloo", "hub", "door", "amqp"]
    assert all(row["identical"] for row in rows)
    assert all(row["difference_to_plain"] < 1e-5 for row in rows)
    assert [row["link"] for row in rows if row["bytes_sent_per_peer"] is None] == ["gloo"]
    assert len({row["heap_kept"] for row in rows}) == 1  # ratios are of nothing else


def test_train_of_hivemind(tmp_path: Path) -> None:
    if importlib.util.find_spec("hivemind") is None:
        pytest.skip(
            "hivemind is not installed, so nothing here is compared: pip install '.[bench]'"
        )
    options = ["--link", "hivemind", "--peers", "2", "--parameters", "0.1", "--turns", "1"]
    (row,) = rows_of(tmp_path, "train", *options, keys=TRAINING)
    assert row["link"] == "hivemind"


def test_train_of_torchft(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchft") is None:
        pytest.skip(
            "torchft is not installed, so nothing here is compared: pip install torchft==0.2.0"
        )
    options = ["--link", "plain,torchft", "--peers", "1,2", "--parameters", "0.1", "--turns", "1"]
    plain, row = rows_of(tmp_path, "train", *options, keys=TRAINING)
    assert (plain["link"], row["link"]) == ("plain", "torchft")
    assert row["identical"]
    assert row["difference_to_plain"] < 1e-5


@pytest.mark.parametrize("name", ["hivemind", "torchft"])
def test_train_says_what_is_left_out(tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed, so nothing leaves it out")
    options = ["--link", f"plain,{name}", "--peers", "1", "--parameters", "0.1", "--turns", "1"]
    (row,) = rows_of(tmp_path, "train", *options, keys=TRAINING)
    assert row["link"] == "plain"
    assert f"{name} is not installed and left out: pip install" in (tmp_path / "log").read_text()


def test_train_on_a_gpu_is_for_one_peer(tmp_path: Path) -> None:
    command = [sys.executable, FOLDER / "train.py", "--quick", "--device", "cuda"]
    ended = subprocess.run(
        [*command, "--link", "plain,gloo,amqp"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.returncode == 2
    assert "--device cuda is for plain and alone, not for gloo, amqp" in ended.stderr


ON_META = """
import contextlib
from train import Job, trainer_of
common = {"rank": 0, "size": 1, "millions": 0.01, "batch": 4, "steps": 2, "turns": 1}
with contextlib.ExitStack() as stack:
    trainer = trainer_of(Job(link="plain", device="meta", **common), stack)
    print(sum(1 for _ in trainer.epoch()), *{p.grad.device for p in trainer.module.parameters()})
"""


def test_train_has_all_of_a_step_on_its_device(tmp_path: Path) -> None:
    """Where nothing is computed, a step with a tensor of elsewhere fails as on a GPU."""
    ended = subprocess.run(
        [sys.executable, "-c", ON_META],
        cwd=FOLDER,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # see rows_of
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.stdout.split() == ["2", "meta"], ended.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: NOT TESTED")
def test_train_on_a_gpu(tmp_path: Path) -> None:
    options = ["--link", "plain,alone", "--peers", "1", "--parameters", "0.1", "--device", "cuda"]
    rows = rows_of(tmp_path, "train", *options, keys=TRAINING)
    assert [(row["link"], row["device"]) for row in rows] == [("plain", "cuda"), ("alone", "cuda")]


def test_order(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    command = [sys.executable, FOLDER / "order.py", "--quick", "--json", target]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    result = json.loads(target.read_text())
    assert result["bench"] == "order"
    assert [row["order"] for row in result["rows"] if row["what"] == "resume"] == [
        *["manyhands"] * 3,
        *["manyhands mixture"] * 3,
        *["torch"] * 3,
    ]
    for row in result["rows"]:
        assert 0 < row["p10_s"] <= row["median_s"] <= row["p90_s"]
        assert row["extra_peak_bytes"] < 64 << 20  # of a hundred million samples


def test_scale(tmp_path: Path) -> None:
    keys = AVERAGING | {"parameters", "wrong_values", "extra_bound_bytes"}
    options = ["--parameters", "1e6", "--rounds", "2"]
    (row,) = rows_of(tmp_path, "scale", *options, keys=keys)
    assert row["wrong_values"] == 0
    assert row["rounds"] == len(row["round_s"]) == 2
    assert {row["p10_s"], row["p90_s"]} == set(row["round_s"])


def test_data(tmp_path: Path) -> None:
    digits = ["direct", "thread", "process", "torch-direct", "torch"]
    photos = ["photos-thread", "overlap-thread", "overlap-process"]
    ways = ",".join(digits + photos)
    keys = ROW | {"way", "workers", "batch", "wait_s", "ratio_to_torch"}
    rows = rows_of(tmp_path, "data", "--way", ways, "--turns", "1", keys=keys)
    assert [row["way"] for row in rows] == digits + photos
    for row in rows[-2:]:
        assert row.keys() >= {"decode_s", "step_s", "ratio_to_larger"}
    assert all(row["identical"] and row["cpu_per_sample_s"] > 0 for row in rows[:-2])
    assert [row["samples"] for row in rows[:-2]] == [1797] * 5 + [24]


def test_cluster(tmp_path: Path) -> None:
    target, log = tmp_path / "result.json", tmp_path / "log"
    command = [sys.executable, FOLDER / "cluster.py", "--quick", "--json", target]
    (scratch := tmp_path / "scratch").mkdir()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            process.wait(PATIENCE_S)
        finally:
            end_tree(process, patience_s=0.0)
    assert process.returncode == 0, log.read_text()
    assert "ray is left out" in log.read_text()
    result = json.loads(target.read_text())
    assert result["bench"] == "cluster"
    rows = result["rows"]
    assert {row["system"] for row in rows} == {"manyhands"}
    assert [(row["job"], row["by"]) for row in rows if row["what"] == "start"] == [
        ("hello", "client"),
        ("hello", "command"),
        ("step", "client"),
        ("step", "command"),
    ]
    assert [row["clients"] for row in rows if row["what"] == "submit"] == [1, 8]
    assert [row["complete"] for row in rows if row["what"] == "logs"] == [True]
    assert [row["nothing_lost"] for row in rows if row["what"] == "recovery"] == [True]
    assert {row["moment"] for row in rows if row["what"] == "tick"} >= {"empty", "full", "rush"}
    for row in rows:
        assert 0 < row["p10_s"] <= row["median_s"] <= row["p90_s"]


# -- ended before its end -------------------------------------------------------------------------

GUARDED = """
import signal, subprocess, sys, tempfile, time
from guardian import guarded
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started this may ignore it: nohup does
with guarded():
    tempfile.mkdtemp()
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    subprocess.run(["sh", "-c", "sleep 1000 >/dev/null 2>&1 &"])  # its parent is gone
    print(flush=True)
    try:
        time.sleep(1000)
    finally:
        print(flush=True)
        time.sleep(SLOW)
"""
RABBIT = "beam.smp"
LONG = {
    "allreduce": "--link hub,amqp --peers 2 --mbytes 1 --turns 100000",
    "ddp": "--backend gloo,hub,amqp --ranks 2 --parameters 0.1 --turns 100000",
    "links": "--link hub,amqp --peers 2 --turns 100000",
    "scale": "--parameters 1e6 --rounds 100000",
    "train": "--link gloo,hub,amqp --peers 2 --batch 8 --parameters 0.1 --turns 100000",
}


class Ended:
    """A process that is to be ended, and all that it had started by then."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        self.family: list[psutil.Process] = []

    def wait_for(self, *words: str) -> None:
        """Until it has descendants with each of these words in their commands."""
        deadline = time.monotonic() + PATIENCE_S / 2
        while True:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            self.family = psutil.Process(self.process.pid).children(recursive=True)
            told = " ".join(command_of(member) for member in self.family)
            if all(word in told for word in words):
                return
            time.sleep(0.02)

    def left(self) -> list[psutil.Process]:
        """Who of them is still there."""
        return [member for member in self.family if not is_gone(member)]

    @property
    def said(self) -> str:
        """On standard error."""
        return self._log.read_text()


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""  # it has just ended


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ended]]:
    """Starts a command whose temporary files are in `scratch`; ends it and what it left."""
    (tmp_path / "scratch").mkdir()
    log = tmp_path / "log"
    all_of_them: list[Ended] = []

    def begin(*command: object) -> Ended:
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=FOLDER,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "TMPDIR": str(tmp_path / "scratch")},
                start_new_session=True,  # a group of its own, as a shell would make it
            )
        all_of_them.append(Ended(process, log))
        return all_of_them[-1]

    yield begin
    for one in all_of_them:
        end_tree(one.process, patience_s=0.0)
        one.process.stdout.close()
        end_all(one.family)


@pytest.mark.parametrize("name", LONG)
def test_a_benchmark_that_is_ended_leaves_nothing(
    start: Callable[..., Ended], tmp_path: Path, name: str
) -> None:
    """By a signal to its whole group, as `timeout` and Ctrl-C send it."""
    number = signal.SIGTERM if name in ("allreduce", "links") else signal.SIGINT
    one = start(FOLDER / f"{name}.py", *LONG[name].split())
    worker = {"ddp": "--rank", "links": "--call"}.get(name, "--peer")
    one.wait_for(RABBIT, worker)
    os.killpg(one.process.pid, number)
    code = one.process.wait(60)
    assert one.left() == []
    assert list((tmp_path / "scratch").iterdir()) == []
    assert code == 128 + number
    # A peer may lose the broker, which has the signal too, before it is ended itself.
    assert one.said.count("Traceback") == one.said.count("errors.LinkBroken: "), one.said


def test_a_benchmark_that_is_killed_or_ended_while_its_broker_starts_leaves_nothing(
    start: Callable[..., Ended], tmp_path: Path
) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        one = start(FOLDER / "scale.py", *LONG["scale"].split())
        one.wait_for(RABBIT)
        one.process.send_signal(number)
        one.process.wait(60)
        soon_gone(one, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_guarded(start: Callable[..., Ended], tmp_path: Path, number: int) -> None:
    one = start("-c", GUARDED.replace("SLOW", "0"))
    one.process.stdout.readline()
    one.family = children_of(one, tmp_path)
    one.process.send_signal(number)
    code = one.process.wait(60)
    if number in (signal.SIGTERM, signal.SIGINT):
        assert code == 128 + number
        assert one.left() == []  # by then, not soon after
        assert list((tmp_path / "scratch").iterdir()) == []
    else:
        assert code == -number
        soon_gone(one, tmp_path)
    assert "Traceback" not in one.said, one.said


def test_guarded_cleans_up_whatever_signal_comes_next(
    start: Callable[..., Ended], tmp_path: Path
) -> None:
    one = start("-c", GUARDED.replace("SLOW", "0.5"))
    one.process.stdout.readline()
    one.family = children_of(one, tmp_path)
    one.process.send_signal(signal.SIGINT)
    one.process.stdout.readline()  # the clean-up has begun
    one.process.send_signal(signal.SIGINT)
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(60) == 128 + signal.SIGINT
    assert one.left() == []
    assert list((tmp_path / "scratch").iterdir()) == []
    assert "Traceback" not in one.said, one.said


def children_of(one: Ended, tmp_path: Path) -> list[psutil.Process]:
    """The guardian, and both that sleep, one of them no child any more."""
    sleepers: list[psutil.Process] = []
    deadline = time.monotonic() + 20
    while len(sleepers) != 2:  # one that is just being started shows nothing
        assert time.monotonic() < deadline, sleepers
        sleepers = [p for p in psutil.process_iter() if is_under(p, tmp_path / "scratch")]
    return [*psutil.Process(one.process.pid).children(recursive=True), *sleepers]


def soon_gone(one: Ended, tmp_path: Path) -> None:
    """Nobody could wait for it to be so."""
    deadline = time.monotonic() + 20
    while one.left() or list((tmp_path / "scratch").iterdir()):
        assert time.monotonic() < deadline, one.left()
        time.sleep(0.02)


def is_under(process: psutil.Process, folder: Path) -> bool:
    """Whether its temporary files are in a folder inside this one."""
    try:
        return Path(process.environ().get("TMPDIR", "/")).parent == folder
    except psutil.Error:
        return False  # it has just ended, or is another user's


def test_stages(tmp_path: Path) -> None:
    ways = ["plain", "alone", "halves", "naive", "afab", "1f1b", "interleaved"]
    ways += ["torch", "1f1b@hub", "1f1b@door", "1f1b@amqp"]
    keys = ROW | {"way", "stages", "microbatches", "bubble", "bubble_in_theory", "ratio_to_plain"}
    keys |= {"heap_kept", "bubble_of_busy", "queued", "ratio_to_halves", "threads"}
    small = ["--batch", "8", "--channels", "4", "--microbatches", "4", "--turns", "1"]
    rows = rows_of(tmp_path, "stages", "--way", ",".join(ways), *small, keys=keys)
    assert [row["way"] for row in rows] == ways
    by_way = {row["way"]: row for row in rows}
    halves = by_way["halves"]
    assert all(row["difference_to_plain"] < 1e-5 for row in rows if row is not halves)
    assert (halves["peers"], halves["stages"], halves["bubble_in_theory"]) == (2, 2, 0.0)
    busy = {way: row["bubble_of_busy"] for way, row in by_way.items()}
    assert busy["plain"] is busy["alone"] is busy["halves"] is None
    assert busy["naive"] == pytest.approx(0.5)  # whatever each of the two takes
    assert all(0 < busy[way] < 0.5 for way in ways[4:])
    for way, row in by_way.items():
        linked = {"send", "team"} if "@" in way else set()
        assert row["threads"].keys() >= {"main"} | linked, way
        assert row["threads"]["main"]["cpu_s"] <= row["cpu_s"]
    assert all(row["queued"] is None or 0 <= row["queued"] < 1 for row in rows)
