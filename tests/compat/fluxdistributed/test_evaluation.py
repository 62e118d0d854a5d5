"""Evaluation of a training: what is looked at, by whom, and what goes wrong there."""

import functools
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.compat.fluxdistributed import prepare_training, train, train_solutions
from manyhands.core.errors import UsageError
from manyhands.data.chance import generator
from manyhands.data.table import BadSample
from tests.compat.fluxdistributed.models import (
    SGD,
    Seen,
    data,
    mlp,
    normed,
    quiet,
    same,
    trained,
)


@pytest.mark.parametrize("num_devices", [1, 3])
def test_an_evaluation_is_of_all_rows_whoever_computes_them(num_devices):
    table, val = data(), data(31, seed=9)
    setup, result = trained(
        *(mlp(), table, ["cpu"] * num_devices, 4), val=val, eval_every=2, log_every=100
    )
    assert [row["step"] for row in result.history] == [2, 4, 5]
    x, y = val[:]
    with torch.no_grad():
        output = setup.models[0](x)
    last = result.history[-1]
    assert last["val/loss"] == pytest.approx(float(F.cross_entropy(output, y)))
    assert last["val/top1"] == pytest.approx(float((output.argmax(1) == y).double().mean()))
    assert last["val/top5"] == last["val/top10"] == 1.0  # there are four classes


def test_of_a_large_table_the_same_samples_are_looked_at_each_time():
    val = Seen(data(40, seed=9))
    trained(
        *(mlp(), data(), ["cpu"] * 2, 4),
        options={"cycles": 2},
        val=val,
        eval_every=1,
        val_samples=10,
    )
    assert len(val.places) == 20
    assert sorted(val.places[:10]) == sorted(val.places[10:])
    assert len(set(val.places)) == 10


def test_evaluation_neither_trains_nor_leaves_eval_mode():
    table = data(48, dtype=torch.float32)
    kept, result = trained(normed(), table, ["cpu"], 8, val=table[:], eval_every=1)
    other, _ = trained(normed(), table, ["cpu"], 8)
    assert same(kept.models[0], other.models[0])
    assert all(module.training for module in kept.models[0].modules())
    assert len(result.history) == 5


def test_a_regression_has_a_loss_and_no_top_k():
    torch.manual_seed(0)
    x = torch.randn(20, 3)
    table = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    setup, buffer = prepare_training(nn.Linear(3, 1), table, ["cpu"] * 2, SGD, 2)
    result = train(F.mse_loss, setup, buffer, val=table, logger=quiet)
    assert result.history[-1].keys() == {"step", "val/loss"}


@pytest.mark.parametrize("wide", [False, True])
def test_one_output_is_a_number_and_its_labels_are_no_classes(wide):
    """Yes or no by a single logit; and counts, which may be any whole number."""
    torch.manual_seed(0)
    x = torch.randn(20, 3)

    def loss(output, labels):
        return F.mse_loss(output[:, 0], labels.reshape(-1).float())

    labels = torch.arange(20) % 7
    table = torch.utils.data.TensorDataset(x, labels[:, None] if wide else labels)
    setup, buffer = prepare_training(nn.Linear(3, 1), table, ["cpu"] * 2, SGD, 2)
    result = train(loss, setup, buffer, val=table, logger=quiet)
    assert result.steps == 5
    assert result.history[-1].keys() == {"step", "val/loss"}


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss()])
def test_one_output_has_one_class_where_the_loss_is_of_classes(loss):
    """On a GPU torch would end the process."""
    table = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.arange(20) % 2)
    setup, buffer = prepare_training(nn.Linear(3, 1), table, ["cpu"], SGD, 4)
    with pytest.raises(UsageError, match="class 1, but the model has 1 outputs"):
        train(loss, setup, buffer, logger=quiet)


def test_rows_have_the_keys_of_all_loggers():
    rows = []
    _, result = trained(
        *(mlp(), data(), ["cpu"] * 2, 4),
        options={"epochs": 2},
        logger=lambda metrics, step: rows.append((step, metrics)),
        val=data()[:],
        log_every=3,
        eval_every=6,
    )
    assert [step for step, _ in rows] == [3, 6, 9, 12, 14]
    assert rows[1][1].keys() == {
        *("train/loss", "lr", "epoch", "perf/samples_per_s", "data/wait_s", "data/bad"),
        "oom/skipped",
        *("val/loss", "val/top1", "val/top5", "val/top10"),
    }
    assert [row["epoch"] for _, row in rows[:4]] == [0, 0, 1, 1]
    assert [{"step": step, **row} for step, row in rows] == result.history


def test_inputs_may_be_several():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, a, b):
            return self.one(a) + self.two(b)

    class Pairs:
        def __len__(self):
            return 20

        def __getitem__(self, place):
            made = torch.Generator().manual_seed(place)
            a, b = torch.randn(2, 3, generator=made)
            return (a, b), int(a[0] > b[0])

    torch.manual_seed(0)
    setup, buffer = prepare_training(
        Two(), Pairs(), ["cpu"] * 2, functools.partial(torch.optim.SGD, lr=0.5), 4, epochs=10
    )
    result = train(F.cross_entropy, setup, buffer, log_every=1, logger=quiet)
    assert result.history[-1]["train/loss"] < result.history[0]["train/loss"] / 2


class Torn(Seen):
    """Some samples of which are bad."""

    def __init__(self, table, bad):
        super().__init__(table)
        self.bad = bad

    def __getitem__(self, place):
        if place in self.bad:
            raise BadSample(f"file {place}", "cut short")
        return super().__getitem__(place)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_bad_samples_of_val_are_left_out_and_counted(num_devices, caplog):
    good, bad = data(20, seed=9), {3, 11, 12, 13}
    setup, result = trained(
        *(mlp(), data(), ["cpu"] * num_devices, 4),
        options={"cycles": 4, "bad": "skip"},
        val=Torn(good, bad),
        eval_every=2,
    )
    x, y = good[[place for place in range(20) if place not in bad]]
    with torch.no_grad():
        expected = float(F.cross_entropy(setup.models[0](x), y))
    first, last = result.history
    assert first["val/bad"] == last["val/bad"] == 4
    assert last["val/loss"] == pytest.approx(expected)
    said = [record.message for record in caplog.records if "cut short" in record.message]
    assert len(said) == 4  # once each


def test_bad_samples_of_val_are_replaced_raised_or_all_there_is():
    def run(bad, policy):
        options = {"cycles": 2, "bad": policy}
        return trained(mlp(), data(), ["cpu"] * 2, 4, options=options, val=Torn(data(20), bad))[1]

    assert "val/loss" in run({3}, "replace").history[-1]
    with pytest.raises(BadSample, match="file 3: cut short"):
        run({3}, "raise")
    assert run(range(20), "skip").history[-1].keys() == {"step", "val/bad"}


class Tight(nn.Module):
    """Has memory for so many rows, in training and in evaluation, which it remembers."""

    def __init__(self, train=10**9, evaluation=10**9):
        super().__init__()
        self.inner, self.rows = mlp(), []
        self.most = {True: train, False: evaluation}

    def forward(self, x):
        if len(x) > self.most[self.training]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if not self.training:
            self.rows.append(len(x))
        return self.inner(x)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_an_evaluation_that_runs_out_of_memory_is_left_out(num_devices, caplog):
    setup, buffer = prepare_training(Tight(), data(), ["cpu"] * num_devices, SGD, 4, cycles=4)
    setup.models[-1].most[False] = 2
    with caplog.at_level(logging.WARNING):
        result = train(
            *(F.cross_entropy, setup, buffer), val=data(24), eval_every=4, log_every=4, logger=quiet
        )
    assert (result.steps, result.skipped) == (4, 0)
    (row,) = result.history
    assert not any(name.startswith("val/") for name in row)
    said = [record.message for record in caplog.records if "out of memory" in record.message]
    assert len(said) == 1
    assert "in the evaluation after step 4" in said[0]


def test_an_evaluation_that_runs_out_of_memory_takes_fewer_rows_at_once_or_raises():
    def run(**how):
        setup, buffer = prepare_training(Tight(), data(), ["cpu"] * 2, SGD, 4, cycles=4)
        setup.models[1].most[False] = 1
        return train(F.cross_entropy, setup, buffer, val=data(24), logger=quiet, **how)

    free = trained(Tight(), data(), ["cpu"] * 2, 4, options={"cycles": 4}, val=data(24))[1]
    result = run(on_oom="split")
    assert result.history[-1]["val/loss"] == pytest.approx(free.history[-1]["val/loss"])
    with pytest.raises(torch.OutOfMemoryError):
        run(on_oom="raise")


def test_rows_are_evaluated_in_the_pieces_in_which_they_are_trained():
    setup, _ = trained(
        *(Tight(train=2), data(), ["cpu"], 4),
        options={"cycles": 2},
        val=data(8),
        on_oom="split",
    )
    assert setup.models[0].rows == [2] * 4


def noisy(x):
    return x + torch.randn(x.shape, generator=generator(), dtype=x.dtype)


def test_random_transforms_of_val_draw_the_same_each_time_at_any_number_of_devices():
    still = functools.partial(torch.optim.SGD, lr=0.0)
    runs = []
    for num_devices in (1, 3):
        torch.manual_seed(num_devices)
        _, result = trained(
            *(mlp(), data(), ["cpu"] * num_devices, 4, still),
            options={"cycles": 3},
            val=data(31, seed=9),
            val_transform=noisy,
            eval_every=1,
        )
        runs += [row["val/loss"] for row in result.history]
    assert runs == pytest.approx([runs[0]] * 6)
    _, plain = trained(mlp(), data(), ["cpu"], 4, still, val=data(31, seed=9))
    assert plain.history[-1]["val/loss"] != pytest.approx(runs[0])


def test_pictures_of_val_have_a_transform_of_their_own(imagenet):
    class Looks(nn.Linear):
        def forward(self, x):
            assert x.min() > 500 if self.training else x.max() < 500
            return super().forward(x / 1000)

    tree = mh.data.BlobTree.at(imagenet)
    key, val = (
        train_solutions(tree, f"LOC_{split}_solution.csv", range(10)) for split in ("train", "val")
    )
    _, result = trained(
        *(Looks(3, 10), key, ["cpu"] * 2, 4),
        options={"dataset": tree, "transform": lambda image: image.float().mean((1, 2)) + 1000},
        val=val,
        val_samples=8,
        val_transform=lambda image: image.float().mean((1, 2)),
    )
    assert "val/top5" in result.history[-1]


def test_what_an_evaluation_cannot_do_is_refused():
    x, y = data()[:]
    with pytest.raises(UsageError, match="val_transform, and val is a batch"):
        trained(mlp(), data(), ["cpu"], 4, val=(x, y), val_transform=noisy)
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
    with pytest.raises(UsageError, match="a plateau is one of evaluations"):
        trained(model, data(), ["cpu"], 4, opt, sched=sched)
