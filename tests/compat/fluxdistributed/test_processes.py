"""Process mode: workers with a replica each, a main process that puts their gradients together."""

import functools
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manyhands.compat.fluxdistributed import (
    NotSynced,
    connect,
    getgrads,
    launch,
    processes,
    start,
    syncgrads,
)
from manyhands.compat.fluxdistributed.launch import _Crew
from manyhands.compat.fluxdistributed.processes import worker_device
from manyhands.core.errors import LinkError, UsageError
from manyhands.data import register
from manyhands.testing.processes import end_tree
from tests.compat.fluxdistributed.imagenet import write_imagenet
from tests.compat.fluxdistributed.models import SGD, close, data, mlp, normed, quiet, same, trained

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("program.py")


def together(model_of, workers=2, table=None, opt_of=lambda rank: SGD, where=None, **options):
    """syncgrads and getgrads, as threads: what each of them returned or raised, main first."""
    where = where or f"local:///{secrets.token_hex(8)}"
    table = data(52) if table is None else table
    # One by one: threads share the generator that models draw from.
    models = [model_of(rank) for rank in range(workers + 1)]

    def act(rank):
        group = connect(where, rank=rank, workers=workers, meet_s=60, timeout_s=60)
        try:
            if rank == 0:
                return syncgrads(group)
            return getgrads(
                *(F.cross_entropy, models[rank], table, opt_of(rank), 4),
                group=group,
                device="cpu",
                **{"logger": quiet, **options},
            )
        except Exception as error:  # noqa: BLE001  (looked at by the test)
            group.give_up(str(error))
            return error
        finally:
            group.shutdown()

    with ThreadPoolExecutor(workers + 1) as threads:
        return list(threads.map(act, range(workers + 1)))


@pytest.mark.parametrize(("workers", "link"), [(1, "local"), (3, "local"), (2, "amqp")])
def test_workers_together_are_one_device_with_all_the_rows(workers, link, request):
    where = None
    if link == "amqp":
        where = f"{request.getfixturevalue('broker').url()}?run=flux-{secrets.token_hex(8)}"
    main, *results = together(lambda rank: mlp(), workers, where=where, epochs=2, log_every=1)
    alone, expected = trained(
        mlp(), data(52), ["cpu"], 4 * workers, options={"epochs": 2}, log_every=1
    )
    models = [result.models[0][1] for result in results]
    assert all(same(model, models[0]) for model in models)
    close(models[0], alone.models[0])
    assert main.steps == results[0].steps == expected.steps
    assert [row["train/loss"] for row in main.history] == pytest.approx(
        [row["train/loss"] for row in expected.history]
    )
    made = mlp(seed=7)
    made.load_state_dict(main.state)
    assert same(made, models[0])


def test_workers_begin_with_the_first_ones_values():
    _, *results = together(lambda rank: mlp(seed=rank), cycles=3)
    first = trained(mlp(seed=1), data(52), ["cpu"], 8, options={"cycles": 3})[0].models[0]
    for result in results:
        close(result.models[0][1], first)


def test_buffers_that_are_in_no_checkpoint_are_the_first_ones_too():
    class Shifted(nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.inner = mlp()
            shift = torch.full((6,), float(rank), dtype=torch.float64)
            self.register_buffer("shift", shift, persistent=False)

        def forward(self, x):
            return self.inner(x + self.shift)

    _, one, two = together(Shifted, cycles=3)
    assert same(one.models[0][1], two.models[0][1])
    assert one.models[0][1].shift.tolist() == two.models[0][1].shift.tolist() == [1.0] * 6


def test_a_worker_without_rows_takes_part():
    table = data(9, dtype=torch.float32)  # 8 and 1: none for the second in the last step
    _, one, two = together(lambda rank: normed(), table=table, epochs=2)
    assert same(one.models[0][1], two.models[0][1])
    assert one.steps == 4


def test_out_of_memory_at_one_worker_is_skipped_by_all():
    class Short(nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.inner, self.rank, self.count = mlp(), rank, 0

        def forward(self, x):
            self.count += 1
            if self.rank == 2 and self.count in (2, 5):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self.inner(x)

    main, one, two = together(Short, cycles=6)
    assert same(one.models[0][1], two.models[0][1])
    for result in (main, one, two):
        assert (result.steps, result.skipped) == (4, 2)


def test_what_one_worker_raises_ends_all():
    def odd(rank):
        class Odd(nn.Linear):
            def forward(self, x):
                if rank == 2:
                    raise ZeroDivisionError("here")
                return super().forward(x)

        return Odd(6, 4).double()

    main, one, two = together(odd)
    assert isinstance(two, ZeroDivisionError)
    for error in (main, one):
        assert isinstance(error, LinkError)
        assert "rank 2" in str(error)
        assert "here" in str(error)


def test_a_worker_with_another_model_says_so():
    main, one, two = together(lambda rank: mlp() if rank == 1 else normed().double())
    assert isinstance(two, UsageError)
    assert "this worker's model is not that of worker 1" in str(two)
    assert isinstance(main, LinkError)
    assert isinstance(one, LinkError)


def test_workers_save_and_resume(tmp_path):
    whole = together(lambda rank: mlp(), epochs=2)[1].models[0][1]
    together(lambda rank: mlp(), cycles=5, save=tmp_path)
    main, one, two = together(lambda rank: mlp(seed=9), epochs=2, resume=tmp_path, log_every=1)
    assert same(one.models[0][1], whole)
    assert same(two.models[0][1], whole)
    assert main.steps == 14
    assert main.history[0]["step"] == 6


class Drifts(torch.optim.SGD):
    """Rounds as another kind of device does: worker n otherwise than worker 1."""

    def __init__(self, parameters, rank):
        super().__init__(parameters, lr=0.1)
        self.rank = rank

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(1e-9 * (self.rank - 1))


def drifting(rank):
    return functools.partial(Drifts, rank=rank)


def test_replicas_that_have_drifted_apart_are_found():
    main, *results = together(lambda rank: mlp(), opt_of=drifting, cycles=3)
    said = [str(error) for error in results if isinstance(error, NotSynced)]
    assert said
    assert all("the replica of worker 2 is not that of worker 1" in text for text in said)
    assert all(isinstance(error, NotSynced | LinkError) for error in results)
    assert isinstance(main, LinkError)


def test_workers_of_several_kinds_have_the_first_ones_values_after_each_step(monkeypatch):
    kinds = iter(["cpu of one kind", "cpu of another"])
    monkeypatch.setattr(
        "manyhands.compat.fluxdistributed.processes.kind_of", lambda device: next(kinds)
    )
    main, one, two = together(lambda rank: mlp(), opt_of=drifting, cycles=3)
    assert same(one.models[0][1], two.models[0][1])
    assert main.steps == 3


def test_only_the_first_worker_logs():
    rows = []
    where = threading.Lock()

    def note(row, step):
        with where:
            rows.append(step)

    together(lambda rank: mlp(), cycles=4, log_every=1, logger=note)
    assert rows == [1, 2, 3, 4]


def test_the_main_process_is_no_worker():
    group = connect(f"local:///{secrets.token_hex(8)}", rank=0, workers=0)
    try:
        with pytest.raises(UsageError, match="rank 0 is the main process"):
            getgrads(F.cross_entropy, mlp(), data(), SGD, group=group)
    finally:
        group.shutdown()


@pytest.mark.parametrize(
    ("environ", "given", "outage_s"),
    [
        ({}, {}, 5.0),
        ({"MANYHANDS_OUTAGE": "90"}, {}, 90.0),
        ({"MANYHANDS_OUTAGE": "90"}, {"outage_s": 1.0}, 1.0),
    ],
)
def test_a_meeting_point_is_looked_for_as_long_as_somebody_says(
    monkeypatch, environ, given, outage_s
):
    found = []
    monkeypatch.delenv("MANYHANDS_OUTAGE", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, "open_group", lambda *_, **said: found.append(said["settings"]))
    connect("local:///x", rank=0, workers=1, **given)
    assert [settings.outage_s for settings in found] == [outage_s]


def test_start_does_not_look_long_for_its_own_hub(monkeypatch):
    """What is gone with this process does not come back, whatever the cluster says of its hub."""
    found = []
    monkeypatch.setenv("MANYHANDS_OUTAGE", "660")
    monkeypatch.setattr(processes, "open_group", lambda *_, **said: found.append(said["settings"]))
    launch._meet("local:///x", 0, 1)
    assert [settings.outage_s for settings in found] == [5.0]


def test_a_worker_takes_a_gpu_by_its_number_or_what_it_is_told(monkeypatch):
    assert worker_device("cpu", 3) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(worker_device(None, rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert worker_device(None, 1) == torch.device("cpu")


def test_start_says_what_it_cannot_do():
    with pytest.raises(UsageError, match="0 workers"):
        start(F.cross_entropy, mlp(), data(), SGD, workers=0)
    with pytest.raises(UsageError, match="'gpu:0' is no device"):
        start(F.cross_entropy, mlp(), data(), SGD, devices=["gpu:0"])


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"epoch": 2}, TypeError, "unexpected keyword argument 'epoch'"),
        ({"group": None}, TypeError, "'group'"),
        ({"epochs": 0}, UsageError, "epochs=0"),
        ({"batchsize": "48"}, UsageError, "batchsize='48'"),
        ({"on_oom": "wait"}, UsageError, "on_oom='wait'"),
        ({"log_every": 1.5}, UsageError, "log_every=1.5"),
    ],
)
def test_what_workers_would_refuse_is_refused_before_there_are_any(
    monkeypatch, options, kind, said
):
    def started(*_, **__):
        raise AssertionError("workers were about to be started")

    monkeypatch.setattr("manyhands.compat.fluxdistributed.launch._CALLED", threading.Lock())
    monkeypatch.setattr("manyhands.compat.fluxdistributed.launch.Hub", started)
    with pytest.raises(kind, match=said):
        start(F.cross_entropy, mlp(), data(), SGD, **options)


# -- real processes -------------------------------------------------------------------------------


@contextmanager
def started(tmp_path, *command):
    """A main process, and at the end none of its family."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        end_tree(process, patience_s=10)
        process.stdout.close()
        process.stderr.close()


def workers_of(process, until):
    """The workers' processes, once the main one has said so much."""
    found = {}
    for line in process.stdout:
        if match := re.match(r"worker (\d) is (\d+)", line):
            found[int(match[1])] = psutil.Process(int(match[2]))
        if re.match(until, line) and len(found) == 2:
            return found
    raise AssertionError(f"it ended before it said {until}: {process.stderr.read()}")


def test_a_program_trains_with_workers_and_ends(tmp_path):
    with started(tmp_path, PROGRAM, "train", tmp_path) as process:
        said, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "done: 14 steps, 14 rows" in said
    assert len(re.findall(r"^step \d+ ", said, flags=re.M)) == 14
    model = mlp()
    model.load_state_dict(torch.load(tmp_path / "cpu.pt", weights_only=True))
    alone = trained(mlp(seed=1), data(52), ["cpu"], 8, options={"epochs": 2})[0].models[0]
    close(model, alone)


def test_when_a_worker_is_killed_the_rest_say_so_and_end(tmp_path):
    with started(tmp_path, PROGRAM, "for ever", tmp_path) as process:
        workers = workers_of(process, r"step \d+ ")
        workers[2].kill()
        _, errors = process.communicate(timeout=100)
        gone, alive = psutil.wait_procs(workers.values(), timeout=0)
    assert not alive
    assert len(gone) == 2
    assert process.returncode == 1
    assert "WorkersFailed: worker 2 was killed by signal 9" in errors
    assert re.search(r"worker 1 ends: .*rank 2 .* is gone", errors)


def test_when_a_worker_raises_its_traceback_is_shown_and_all_end(tmp_path):
    with started(tmp_path, PROGRAM, "breaks", tmp_path) as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "ZeroDivisionError: in the third step" in errors
    assert "worker 2 ended with code 1" in errors


def test_a_worker_that_never_comes_does_not_hold_the_others(tmp_path):
    with started(tmp_path, PROGRAM, "absent", tmp_path) as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "WorkersFailed: worker 2 ended with code 3" in errors


def test_a_second_start_is_refused_and_one_that_was_refused_does_not_count(tmp_path):
    with started(tmp_path, PROGRAM, "twice", tmp_path) as process:
        said, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "done: 14 steps, 14 rows" in said
    assert "refused: a second start() in one program" in said
    assert len(re.findall(r"^worker \d is \d+$", said, flags=re.M)) == 2  # no more of them


def test_a_worker_that_does_not_get_to_start_is_named(tmp_path):
    with started(tmp_path, PROGRAM, "elsewhere", tmp_path) as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "WorkersFailed: worker 2 ended before it had met the others" in errors


def test_what_cannot_be_started_leaves_nothing_open(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    crew = _Crew([str(tmp_path / "nothing")], 2, "")
    with pytest.raises(FileNotFoundError):
        crew.run(lambda met: None, lambda: None)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("devices", [1, 2])
def test_a_ctrl_c_ends_a_training(tmp_path, devices):
    command = (PROGRAM, "alone", tmp_path, devices)
    with started(tmp_path, *command) as process:
        line = next(line for line in process.stdout if line.startswith("step "))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    assert line
    assert process.returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors


def test_workers_end_with_the_main_process(tmp_path):
    with started(tmp_path, PROGRAM, "for ever", tmp_path) as process:
        workers = workers_of(process, r"step \d+ ")
        process.kill()
        process.wait(60)
        _, alive = psutil.wait_procs(workers.values(), timeout=60)
        errors = process.stderr.read()
    assert not alive
    assert process.returncode == -signal.SIGKILL
    assert "the main process is gone" in errors


@pytest.mark.timeout(300)  # five processes that load torch
def test_the_driver_starts_four_workers_and_they_learn(tmp_path):
    options = ("--epochs", 2, "--batchsize", 25, "--every", 5)
    with started(tmp_path, ROOT / "examples" / "driver.py", *options) as process:
        said, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    assert "30 steps, 0 skipped" in said  # 1500 samples, 4 * 25 a step
    right = float(re.search(r"(\S+)% of unseen samples are right", said)[1])
    assert right > 50


@pytest.mark.timeout(300)  # three processes that load torch
def test_the_driver_finds_imagenet_by_its_name(tmp_path, monkeypatch):
    write_imagenet(tmp_path / "imagenet", train=4, val=1)
    register("tiny", tmp_path / "imagenet", file=tmp_path / "Data.toml")
    monkeypatch.setenv("MANYHANDS_DATA_PATH", str(tmp_path))
    options = ("--dataset", "tiny", "--classes", 2, "--epochs", 1, "--batchsize", 2)
    with started(
        tmp_path, ROOT / "examples" / "driver.py", "--workers", 2, "--every", 1, *options
    ) as process:
        said, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    assert "2 steps, 0 skipped" in said  # 8 samples of the two classes, 2 * 2 a step
    assert "of unseen samples are right" in said
