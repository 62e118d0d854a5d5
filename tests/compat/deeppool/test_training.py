"""What the processes of a job do: the same training at any number of them, begun again or not."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from manyhands.checkpoint.store import Store
from manyhands.compat.deeppool import Lesson, main, models
from manyhands.compat.deeppool.tables import pictures, text
from manyhands.compat.deeppool.terms import Place, Terms, check_job, check_split, grain_of
from manyhands.compat.deeppool.training import device_of, load_weights, train
from manyhands.core.errors import UsageError
from manyhands.links.hub import Hub
from manyhands.replica.keeper import Keeper
from manyhands.testing.processes import end_tree

EXAMPLE = Path(__file__).parents[3] / "examples" / "resnetImported.py"
PATIENCE_S = 200.0  # for a program that loads torch, where others work too
EPOCHS = "9999"  # of a training that a test ends
# In float64: sums over grains are added up in another order. What is said has six decimals.
TOLERANCE = 2e-6
_runs = itertools.count()


@pytest.fixture
def meet(monkeypatch):
    """A hub, as a job's environment names it."""
    with Hub("127.0.0.1:0", insecure=True) as hub:
        monkeypatch.setenv("MANYHANDS_URL", f"{hub.address}?insecure=1")
        yield


class Job:
    """The processes of a job, as threads of this one. `said` is the kind of list of what each has
    said.
    """

    said = list

    def __init__(self, tables, make, optimizer=None):
        self._tables, self._make = tables, make
        self._optimizer = optimizer or (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))

    def run(self, world, **terms):
        """What each rank has said."""
        run = f"job-{os.getpid()}-{next(_runs)}"
        models = []
        for _ in range(world):  # here: there is one generator for all threads
            torch.manual_seed(0)
            models.append(self._make())
        with ThreadPoolExecutor(world) as pool:
            ranks = [
                pool.submit(
                    self._train, Place(rank=rank, world=world, run=run), models[rank], terms
                )
                for rank in range(world)
            ]
            return [rank.result() for rank in ranks]

    def _train(self, place, model, terms):
        said = self.said()
        wanted = {"name": "test", "batch": 16, "epochs": 2, "lr": 0.02, "every": 1}
        wanted |= {"device": "cpu", "double": True}
        train(
            Terms(**wanted | terms),
            place,
            self._tables,
            model,
            self._optimizer,
            said.append,
        )
        return said


@pytest.fixture
def resnet(few_digits, meet):
    """BatchNorm, whose values depend on what is normalised together."""
    train_on, test_on = str(few_digits / "train"), str(few_digits / "test")
    return Job(pictures(train_on, test_on, px=32), lambda: models.resnet18(3, width=4))


def numbers(said):
    """Of every line about a round or an epoch: its name, and its values."""
    lines = [line for line in said if re.match(r"round|epoch", line)]
    names = [line.partition("  ")[0] for line in lines]
    return names, [
        float(x) for line in lines for x in re.findall(r"(?:loss|accuracy) ([\d.]+)", line)
    ]


@pytest.mark.parametrize("world", [2, 4])
def test_the_curve_does_not_depend_on_the_number_of_slots(resnet, world):
    alone, several = resnet.run(1, grain=4), resnet.run(world, grain=4)
    names, values = numbers(alone[0])
    assert names[:5] == ["round 1/6", "round 2/6", "round 3/6", "epoch 1/2", "round 4/6"]
    assert names[5:] == ["round 5/6", "round 6/6", "epoch 2/2"]
    for rank, said in enumerate(several):
        assert said[0].startswith(f"test: rank {rank} of {world} on cpu")
        assert numbers(said)[0] == names
        assert numbers(said)[1] == pytest.approx(values, rel=TOLERANCE)
        assert "test is completed (6 iters, " in said[-1]
        assert said[-1].endswith("0.00 be img/s, 16 globalBatchSize).")


class Witness(list):
    """With each line that a rank says: which readers of data live then, those of all ranks."""

    def append(self, line):
        names = [thread.name for thread in threading.enumerate()]
        super().append((line, Counter(name for name in names if name.startswith("reader "))))


@pytest.mark.parametrize("workers", [0, 3])
def test_every_slot_has_its_own_workers_for_data(resnet, workers):
    resnet.said = Witness
    for said in resnet.run(2, epochs=1, workers=workers):
        # In its second round a rank knows that the other one has read a batch, too.
        (second,) = [readers for line, readers in said if line.startswith("round 2/")]
        assert second.keys() == {f"reader {number}" for number in range(workers)}
        assert all(count >= 2 for count in second.values())


def test_a_text_too(tmp_path, meet):
    (tmp_path / "text").write_bytes(EXAMPLE.read_bytes())
    size = models.Size(vocabulary=256, length=16, layers=1, heads=2, width=16)
    job = Job(
        text(str(tmp_path / "text"), length=16),
        lambda: models.gpt(size),
        lambda p, lr: torch.optim.AdamW(p, lr=lr),
    )
    (alone,), several = job.run(1, epochs=1), job.run(3, epochs=1)
    losses = numbers(alone)[1][::2]
    assert losses[-2] < losses[0]  # of its last lines: the mean of the epoch, the evaluation
    for said in several:
        assert numbers(said)[0] == numbers(alone)[0]
        assert numbers(said)[1] == pytest.approx(numbers(alone)[1], rel=TOLERANCE)


def test_every_epoch_is_saved_and_more_of_them_go_on(resnet, tmp_path):
    save = str(tmp_path / "saved")
    (whole,) = resnet.run(1, epochs=3, grain=8)
    (first,) = resnet.run(1, epochs=2, grain=8, save=save)
    assert [place.round for place in Store(save).places() if place.complete] == [3, 6]
    assert f"saved in {save}" in first
    rest = resnet.run(2, epochs=3, grain=8, save=save)
    for said in rest:
        assert f"going on after round 6 of 9, from {save}" in said
        assert numbers(said)[0] == numbers(whole)[0][8:]
        assert numbers(said)[1] == pytest.approx(
            numbers(whole)[1][-len(numbers(said)[1]) :], rel=TOLERANCE
        )
    (nothing,) = resnet.run(1, epochs=3, grain=8, save=save)
    assert numbers(nothing) == ([], [])
    assert "(0 iters, 0.00 be img/s" in nothing[-1]


def test_a_disk_that_is_slower_than_an_epoch_is_waited_for(resnet, tmp_path, monkeypatch):
    """The first write ends when another epoch has come to its end, and waits for it."""
    save, waited = str(tmp_path / "saved"), threading.Event()
    make, save_one = Keeper.__init__, Keeper._write

    class Idle(threading.Event):
        def wait(self, timeout=None):
            waited.set()
            return super().wait(timeout)

    def made(keeper, *arguments, **given):
        make(keeper, *arguments, **given)
        keeper._idle = Idle()
        keeper._idle.set()

    def write(keeper, checkpoint):
        assert checkpoint.round > 3 or waited.wait(PATIENCE_S)
        save_one(keeper, checkpoint)

    monkeypatch.setattr(Keeper, "__init__", made)
    monkeypatch.setattr(Keeper, "_write", write)
    resnet.run(1, epochs=3, grain=8, save=save)
    assert [place.round for place in Store(save).places() if place.complete] == [3, 6, 9]


def test_weights_of_another_training(resnet, tmp_path):
    saved, other = str(tmp_path / "saved"), str(tmp_path / "other")
    resnet.run(1, epochs=1, save=saved)
    (said,) = resnet.run(1, epochs=1, lr=0.0, load=saved, save=other)
    assert f"weights are those of {saved}" in said
    given, taken = load_weights(saved), load_weights(other)
    for name in given:
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            torch.testing.assert_close(taken[name], given[name], rtol=0, atol=0)
    with pytest.raises(UsageError, match="no checkpoint"):
        resnet.run(1, load=str(tmp_path / "nowhere"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: NOT TESTED")
@pytest.mark.usefixtures("started_gpu")
def test_a_gpu_learns_the_same(resnet):
    (cpu,), (gpu,) = resnet.run(1, grain=4), resnet.run(1, grain=4, device="cuda")
    assert "on cuda:0" in gpu[0]
    assert numbers(gpu)[1] == pytest.approx(numbers(cpu)[1], rel=1e-5)


def test_too_few_samples(resnet):
    with pytest.raises(UsageError, match="49, and 48 samples"):
        resnet.run(1, batch=49)


# -- as a process -------------------------------------------------------------------------------


class Program:
    """The example, by itself."""

    def __init__(self, *options, **environ):
        self.process = subprocess.Popen(
            [sys.executable, str(EXAMPLE), *options],
            env=os.environ | {"OMP_NUM_THREADS": "1", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, start):
        """Read on to the line that begins so."""
        for line in self.process.stdout:
            if line.startswith(start):
                return
        raise AssertionError(f"no {start!r}: {self.process.stderr.read()}")

    def end(self):
        """Its exit code, the rest of what it says, and its errors."""
        said, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, said, errors

    def __enter__(self):
        return self

    def __exit__(self, *error):
        end_tree(self.process, patience_s=0)
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def options(few_digits, tmp_path):
    return [
        *("1", "16", "--here", "--width", "4", "--every", "1", "--epochs", EPOCHS),
        *("--data", str(few_digits / "train"), "--evaluation", str(few_digits / "test")),
        *("--save", str(tmp_path / "saved")),
    ]


def saved(folder):
    """The round of the newest checkpoint that is whole."""
    places = Store(folder / "saved").places()
    return max((place.round for place in places if place.complete), default=0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_who_is_killed_or_told_to_end_goes_on(options, tmp_path, number):
    with Program(*options) as program:
        program.until(f"epoch 3/{EPOCHS}")
        while saved(tmp_path) < 6:  # a disk that is slow costs checkpoints
            program.until("epoch ")
        program.process.send_signal(number)
        code, said, errors = program.end()
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 128 + signal.SIGTERM), errors
    newest = saved(tmp_path)
    if number == signal.SIGTERM:
        assert f"told to end after round {newest} of {3 * int(EPOCHS)}" in said
    assert 6 <= newest < 3 * int(EPOCHS)
    epochs = newest // 3 + 2
    with Program(*options, "--epochs", str(epochs)) as program:
        code, said, errors = program.end()
    assert code == 0, errors
    assert f"going on after round {newest} of {3 * epochs}" in said
    assert numbers(said.splitlines())[0][0] == f"round {newest + 1}/{3 * epochs}"
    assert f"epoch {epochs}/{epochs}" in said


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["4", "3", "--here"], "a global batch of 3 has 1 grains of 3 samples, which 4 slots"),
        (["1", "9", "--here"], "leaves one with a single sample"),
        (["0", "8", "--here"], "0 slots"),
        (["1", "0", "--here"], "a global batch of 0"),
        (["1", "8", "--here", "--epochs", "0"], "epochs is 0"),
        (["1", "8", "--here", "--double", "--autocast"], "float64 and bfloat16"),
        (["1", "8", "--here", "--data", "nowhere"], "no folder nowhere"),
    ],
)
def test_what_cannot_be_trained(capsys, wrong, says):
    lesson = Lesson(
        name="test",
        tables=lambda options: pictures(options.data, options.evaluation, px=options.image_px),
        model=lambda tables, options: models.resnet18(tables.num_classes, width=4),
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        lr=0.1,
    )
    with pytest.raises(SystemExit) as ended:
        main(lesson, "script.py", arguments=wrong)
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert says in said.err
    assert "hint: " in said.err


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"WORLD_SIZE": "4"}, "the job has 4 slots, and its program was told of 2"),
        ({"WORLD_SIZE": "2", "MANYHANDS_BATCH": "128"}, "global batch of 128, and .* told of 16"),
    ],
)
def test_what_was_typed_has_to_be_what_the_job_has(environ, says):
    with pytest.raises(UsageError, match=says):
        check_job(environ, 2, 16)
    check_job({}, 2, 16)
    check_job({"WORLD_SIZE": "2", "MANYHANDS_BATCH": "16"}, 2, 16)


# -- decisions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "grain"), [(1, 1), (6, 6), (8, 8), (32, 8), (128, 16), (9999, 32)]
)
def test_grains_by_batch_alone(batch, grain):
    assert grain_of(batch) == grain


def test_the_seeds_jobs_can_be_split():
    for gpus, batch in ((1, 32), (4, 128), (4, 32), (8, 128)):
        check_split(batch, gpus, grain_of(batch))


@pytest.mark.parametrize(
    ("batch", "gpus", "grain", "hint"),
    [
        (32, 8, 8, "--grain 4"),
        (3, 4, None, "at least 4"),
        (4, 4, 4, "at least 8"),
    ],
)
def test_batches_that_cannot_be_split(batch, gpus, grain, hint):
    with pytest.raises(UsageError, match="cannot share") as found:
        check_split(batch, gpus, grain)
    assert hint in found.value.hint


def test_the_place_of_a_process():
    job = {"MANYHANDS_JOB": "7", "MANYHANDS_RUN": "job-7-2", "MANYHANDS_RESTART_COUNT": "2"}
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert Place.of(job | torchrun) == Place(rank=3, world=4, local_rank=1, run="job-7-2")
    assert Place.of({"MANYHANDS_RUN": "mine"}) == Place(run="mine")
    assert Place.of({}) == Place()


def test_the_device_of_a_process():
    assert device_of("cpu", 0) == torch.device("cpu")
    with pytest.raises(UsageError, match="'tpu'"):
        device_of("tpu", 0)
    with pytest.raises(UsageError, match="has no GPU"):
        device_of("cuda", 4096)
