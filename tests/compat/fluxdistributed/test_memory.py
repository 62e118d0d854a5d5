"""Out of memory: all devices do the same about it, and no replica is left behind."""

import copy
import functools
import logging
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manyhands.compat.fluxdistributed import TrainingBroken, check_nans, prepare_training, train
from tests.compat.fluxdistributed.models import (
    ADAM,
    CLASSES,
    FEATURES,
    SGD,
    close,
    data,
    mlp,
    quiet,
    same,
    trained,
)


def shortage(kind):
    """What a device says when it has no memory left."""
    return {
        "gpu": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        "python": MemoryError,
        "cpu": lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        "blas": lambda: RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `create`"),
    }[kind]()


class Greedy(nn.Module):
    """Has memory for so many rows at once, and after BatchNorm has counted them."""

    most = 10**9
    kind = "gpu"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(FEATURES // 2)  # of two values a row: one row is enough
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        x = self.norm(x.unflatten(1, (-1, 2))).flatten(1)
        if len(x) > self.most:
            raise shortage(self.kind)
        return self.layer(x)


def fails_on(setup, rank, steps, kind="gpu"):
    """The device of that rank has no memory in these steps, counted from 0."""
    model, count, plain = setup.models[rank], [0], setup.models[rank].forward

    def forward(x):
        count[0] += 1
        output = plain(x)
        if count[0] - 1 in steps:
            raise shortage(kind)
        return output

    model.forward = forward


def prepared(opt=SGD, num_devices=3, **options):
    table = data(72, dtype=torch.float32)
    options = {"cycles": 6, **options}
    return prepare_training(Greedy(), table, ["cpu"] * num_devices, opt, 4, **options)


@pytest.mark.parametrize("kind", ["gpu", "python", "cpu", "blas"])
def test_skip_leaves_the_step_out_on_all_devices_and_counts_it(kind, caplog):
    setup, buffer = prepared()
    fails_on(setup, 1, {1, 4}, kind)
    calls = {rank: [] for rank in range(3)}

    def look(step, optimizer):
        rank = setup.optimizers.index(optimizer)
        calls[rank].append(copy.deepcopy(setup.models[rank].state_dict()))

    rows = []
    with caplog.at_level(logging.WARNING):
        result = train(
            *(F.cross_entropy, setup, buffer),
            sched=look,
            log_every=1,
            logger=lambda row, step: rows.append(row),
        )
    assert (result.steps, result.skipped) == (4, 2)
    for step in range(6):
        states = [calls[rank][step] for rank in range(3)]
        for other in states[1:]:
            assert all(torch.equal(other[name], states[0][name]) for name in other), step
    for step, skipped in enumerate([False, True, False, False, True]):
        before, after = calls[0][step], calls[0][step + 1]
        stays = all(torch.equal(before[name], after[name]) for name in before)
        assert stays is skipped  # BatchNorm's statistics too
    assert same(setup.models[0], setup.models[1])
    assert same(setup.models[0], setup.models[2])
    assert [row["oom/skipped"] for row in rows] == [0, 1, 1, 1, 2, 2]
    assert ["train/loss" in row for row in rows] == [True, False, True, True, False, True]
    said = [record.message for record in caplog.records if "out of memory" in record.message]
    assert len(said) == 2
    assert "step 1 is skipped on all devices, with its 12 samples" in said[0]


@pytest.mark.parametrize(("on_oom", "steps"), [("skip", 5), ("split", 6)])
def test_memory_that_is_short_before_anything_is_computed(on_oom, steps, monkeypatch):
    """What BatchNorm has is copied first: two of its three buffers are, in the second step."""
    plain, count = torch.Tensor.clone, [0]

    def clone(tensor):
        if tensor.dtype is torch.int64 and threading.current_thread().name.startswith("device 1"):
            count[0] += 1
            if count[0] == 2:
                raise shortage("gpu")
        return plain(tensor)

    setup, buffer = prepared()
    monkeypatch.setattr(torch.Tensor, "clone", clone)
    result = train(F.cross_entropy, setup, buffer, logger=quiet, on_oom=on_oom)
    assert (result.steps, result.skipped) == (steps, 6 - steps)
    assert count[0] == 6 + (on_oom == "split")  # which tries again
    assert int(setup.models[1].norm.num_batches_tracked) == steps + (on_oom == "split") * 5
    assert same(setup.models[0], setup.models[1])


def test_a_skipped_step_is_as_if_its_samples_were_not_there():
    """The others go on with the next rows, not with those that were skipped."""
    table = data(72)
    places = []

    class Seen:
        def __len__(self):
            return 72

        def __getitem__(self, place):
            places.append(place)
            return table[place]

    setup, buffer = prepare_training(mlp(), Seen(), ["cpu"], SGD, 12, epochs=1)
    fails_on(setup, 0, {2})
    result = train(F.cross_entropy, setup, buffer, logger=quiet)
    plain = mlp()
    optimizer = SGD(plain.parameters())
    for step in (0, 1, 3, 4, 5):
        x, y = table[places[12 * step : 12 * step + 12]]
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert same(setup.models[0], plain)
    assert result.skipped == 1


@pytest.mark.parametrize("most", [2, 1])
def test_split_takes_smaller_pieces_and_loses_no_sample(most, monkeypatch, caplog):
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            if len(x) > most and threading.current_thread().name.startswith("device 1"):
                raise shortage("gpu")
            return self.inner(x)

    table = data(51)
    free, _ = trained(mlp(), table, ["cpu"] * 3, 4, options={"epochs": 2})
    with caplog.at_level(logging.WARNING):
        tight, result = trained(
            Narrow(), table, ["cpu"] * 3, 4, options={"epochs": 2}, on_oom="split"
        )
    assert result.skipped == 0
    assert result.steps == 2 * 5
    close(tight.models[0].inner, free.models[0])
    assert same(tight.models[0], tight.models[1])
    said = [record.message for record in caplog.records if "out of memory" in record.message]
    assert len(said) == (1 if most == 2 else 2)  # it is remembered: no step fails for it again
    assert f"all devices compute their rows in {4 // most} pieces" in said[-1]


def test_split_skips_what_even_single_rows_do_not_fit():
    setup, buffer = prepared()
    setup.models[2].most = 0
    result = train(F.cross_entropy, setup, buffer, on_oom="split", logger=quiet)
    assert (result.steps, result.skipped) == (0, 6)
    for model in setup.models:
        assert same(model, Greedy())


@pytest.mark.parametrize("kind", ["gpu", "python"])
def test_raise_raises_what_the_device_did_and_leaves_all_replicas_equal(kind):
    setup, buffer = prepared()
    fails_on(setup, 1, {3}, kind)
    with pytest.raises(type(shortage(kind))):
        train(F.cross_entropy, setup, buffer, on_oom="raise", logger=quiet)
    assert same(setup.models[0], setup.models[1])
    assert same(setup.models[0], setup.models[2])
    assert not same(setup.models[0], Greedy())  # of the steps before it
    result = train(F.cross_entropy, setup, buffer, logger=quiet)  # and they can go on
    assert (result.steps, result.skipped) == (6, 0)


class Hungry(torch.optim.Adam):
    """Runs out of memory in its own step, when half of the parameters have moved."""

    fails = frozenset()

    def step(self, closure=None):
        self.count = getattr(self, "count", -1) + 1
        if self.count in self.fails:
            group = self.param_groups[0]
            with torch.no_grad():
                group["params"][0].add_(1.0)
            raise shortage("gpu")
        return super().step(closure)


@pytest.mark.parametrize("fails", [{0}, {3}], ids=["first", "later"])
def test_a_replica_whose_optimizer_has_failed_is_taken_from_another_one(fails, caplog):
    setup, buffer = prepared(functools.partial(Hungry, lr=0.1))
    setup.optimizers[0].fails = fails
    with caplog.at_level(logging.WARNING):
        result = train(F.cross_entropy, setup, buffer, logger=quiet)
    assert (result.steps, result.skipped) == (6, 0)
    assert same(setup.models[0], setup.models[1])
    other, again = prepared(functools.partial(Hungry, lr=0.1))
    train(F.cross_entropy, other, again, logger=quiet)
    assert same(setup.models[0], other.models[0])  # as if nothing had happened
    assert any("taken from cpu" in record.message for record in caplog.records)


def test_a_device_that_has_no_memory_for_the_check_takes_the_step_of_another(monkeypatch):
    setup, buffer = prepared(ADAM)
    count = [0]

    def check(gradient):
        if threading.current_thread().name.startswith("device 1"):
            count[0] += 1
            if count[0] == 6:  # in the second step: there are four gradients
                raise shortage("gpu")
        return check_nans(gradient)

    monkeypatch.setattr("manyhands.compat.fluxdistributed.loop.check_nans", check)
    result = train(F.cross_entropy, setup, buffer, logger=quiet)
    assert count[0] > 6
    assert (result.steps, result.skipped) == (6, 0)
    assert same(setup.models[0], setup.models[1])
    other, again = prepared(ADAM)
    train(F.cross_entropy, other, again, logger=quiet)
    assert same(setup.models[1], other.models[1])


def test_if_no_replica_is_whole_the_training_ends():
    setup, buffer = prepared(functools.partial(Hungry, lr=0.1), num_devices=2)
    for optimizer in setup.optimizers:
        optimizer.fails = {2}
    with pytest.raises(TrainingBroken, match="left no replica that is whole"):
        train(F.cross_entropy, setup, buffer, logger=quiet)


def test_memory_that_is_short_is_not_held_by_the_error():
    """What the failed step had computed is gone before the next one."""
    held = []

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.step = nn.Linear(FEATURES, CLASSES), 0

        def forward(self, x):
            import weakref

            assert all(ref() is None for ref in held)
            self.step += 1
            made = self.layer(x)
            held.append(weakref.ref(made))
            if self.step in (2, 3):
                raise shortage("gpu")
            return made

    table = data(72, dtype=torch.float32)
    setup, buffer = prepare_training(Holds(), table, ["cpu"], ADAM, 4, cycles=5)
    result = train(F.cross_entropy, setup, buffer, logger=quiet)
    assert (result.steps, result.skipped) == (3, 2)
