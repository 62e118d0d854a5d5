"""Task mode: one thread a device, all replicas in step, the same run as one device."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manyhands.compat.fluxdistributed import prepare_training, train
from manyhands.compat.fluxdistributed.optimizers import pace_for
from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.data.chance import generator
from manyhands.data.order import Order
from manyhands.data.table import BadSample
from tests.compat.fluxdistributed.models import (
    ADAM,
    CLASSES,
    FEATURES,
    SGD,
    Seen,
    close,
    data,
    mlp,
    normed,
    quiet,
    same,
    trained,
)


@pytest.mark.parametrize("opt", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize(("num_devices", "batchsize"), [(2, 4), (4, 2)])
def test_devices_together_are_one_device_with_all_the_rows(num_devices, batchsize, opt):
    model, table = mlp(), data(51)  # 51 = 6 * 8 + 3: a last batch that is uneven, and small
    options = {"epochs": 2}
    one, alone = trained(model, table, ["cpu"], 8, opt, options=options, val=table[:], log_every=1)
    many, together = trained(
        *(model, table, ["cpu"] * num_devices, batchsize, opt),
        options=options,
        val=table[:],
        log_every=1,
    )
    assert alone.steps == together.steps == 2 * 7
    close(many.models[0], one.models[0], rtol=1e-9, atol=1e-11)
    for ours, theirs in zip(together.history, alone.history, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"])
    assert together.history[-1]["val/loss"] == pytest.approx(alone.history[-1]["val/loss"])
    assert alone.history[-1]["val/loss"] < alone.history[0]["train/loss"] / 2


def test_one_device_is_plain_torch_to_the_bit():
    model, table = normed(), data(48, dtype=torch.float32)
    read = Seen(table)
    setup, result = trained(model, read, ["cpu"], 8, options={"cycles": 9})
    plain = copy.deepcopy(model)
    optimizer = SGD(plain.parameters())
    for step in range(9):
        x, y = table[read.places[step * 8 : step * 8 + 8]]
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert same(setup.models[0], plain)
    assert result.steps == 9
    assert result.models == [(torch.device("cpu"), setup.models[0])]


@pytest.mark.parametrize("make", [mlp, normed])
def test_replicas_are_equal_after_each_step(make):
    """Statistics of BatchNorm too, and after a step in which a device had no rows."""
    dtype = torch.float64 if make is mlp else torch.float32
    table = data(50, dtype=dtype)  # 4 * 12 + 2: two rows for four devices
    setup, buffer = prepare_training(make(), table, ["cpu"] * 4, ADAM, 3, epochs=2)
    states = [[] for _ in setup.models]
    ranks = {id(optimizer): rank for rank, optimizer in enumerate(setup.optimizers)}

    def look(step, optimizer):
        rank = ranks[id(optimizer)]
        states[rank].append(copy.deepcopy(setup.models[rank].state_dict()))

    result = train(F.cross_entropy, setup, buffer, sched=look, logger=quiet)
    for rank, model in enumerate(setup.models):
        states[rank].append(model.state_dict())
    for at, first in enumerate(states[0]):
        for others in states[1:]:
            assert all(torch.equal(first[name], others[at][name]) for name in first), at
    assert len(states[0]) == result.steps + 1
    weights = [state["0.weight"] for state in states[0]]
    assert not any(torch.equal(*pair) for pair in itertools.pairwise(weights))


def test_a_device_without_rows_takes_the_statistics_of_the_others():
    table = data(1, dtype=torch.float32)
    setup, _ = trained(normed(), table, ["cpu"] * 2, 2, options={"cycles": 1})
    alone, _ = trained(normed(), table, ["cpu"], 4, options={"cycles": 1})
    assert same(setup.models[0], alone.models[0])
    assert same(setup.models[1], alone.models[0])
    assert setup.models[1].state_dict()["2.num_batches_tracked"] == 1


def test_buffers_that_nobody_writes_stay_what_they_are():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES).double()
            self.register_buffer("mask", torch.tensor([0.1, -float("inf"), float("nan"), -0.0]))
            self.register_buffer("flags", torch.tensor([True, False]))

        def forward(self, x):
            return self.layer(x)

    model = Masked()
    setup, _ = trained(model, data(50), ["cpu"] * 3, 4, options={"epochs": 1})
    for replica in setup.models:
        assert torch.equal(replica.mask.view(torch.int32), model.mask.view(torch.int32))
        assert torch.equal(replica.flags, model.flags)


class Notices(nn.Module):
    """Has buffers that it changes when a row is large; a device with none leaves them alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES).double()
        self.register_buffer("level", torch.tensor([10.0, -3.0]))
        self.register_buffer("times", torch.tensor([5]))
        self.register_buffer("met", torch.tensor([False]))

    def forward(self, x):
        if x.max() > 100:
            self.level *= 2
            self.times += 1
            self.met |= True
        return self.layer(x.clamp(-1, 1))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_buffer_that_one_device_changes_counts_the_others_as_they_are(rank):
    places = Order(6, seed=0, epoch=0).indices(0, 6).tolist()
    x, y = data(6)[:]
    x[places[2 * rank], 0] = 1000.0  # each device has two rows
    table = torch.utils.data.TensorDataset(x, y)
    setup, _ = trained(Notices(), table, ["cpu"] * 3, 2, options={"cycles": 1})
    for replica in setup.models:
        torch.testing.assert_close(replica.level, torch.tensor([10.0, -3.0]) * 4 / 3)
        assert replica.times.tolist() == [6]
        assert replica.met.tolist() == [True]


class Waves(nn.Module):
    """With complex parameters, and a complex buffer that it writes."""

    def __init__(self):
        super().__init__()
        made = torch.Generator().manual_seed(0)
        parts = torch.randn(FEATURES, CLASSES, 2, generator=made, dtype=torch.float64)
        self.weight = nn.Parameter(torch.view_as_complex(parts))
        self.register_buffer("mean", torch.zeros(CLASSES, dtype=torch.complex128))

    def forward(self, x):
        made = x.to(torch.complex128) @ self.weight
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * made.detach().mean(0)
        return made.abs()


def test_complex_parameters_are_averaged_too():
    one, _ = trained(Waves(), data(48), ["cpu"], 12, options={"cycles": 6})
    many, _ = trained(Waves(), data(48), ["cpu"] * 3, 4, options={"cycles": 6})
    close(many.models[0], one.models[0])
    assert all(same(model, many.models[0]) for model in many.models)
    assert not same(one.models[0], Waves())


@pytest.mark.parametrize("devices", [1, 3])
def test_each_epoch_has_every_sample_once(devices):
    computed = []

    class Notes(nn.Linear):
        def forward(self, x):
            computed.extend(x[:, 0].tolist())
            return super().forward(x)

    numbers = torch.arange(50.0)[:, None]
    table = torch.utils.data.TensorDataset(numbers, torch.zeros(50).long())
    trained(Notes(1, 2), table, ["cpu"] * devices, 4, options={"epochs": 3})
    assert sorted(computed) == sorted([*range(50)] * 3)


def test_cycles_are_steps_and_the_order_depends_on_the_seed():
    runs = []
    for seed in (0, 0, 1):
        read = Seen(data(50))
        _, result = trained(mlp(), read, ["cpu"], 8, options={"cycles": 4, "seed": seed})
        assert result.steps == 4
        runs.append(read.places[:32])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0] != sorted(runs[0])


def test_five_cycles_by_default():
    assert trained(mlp(), data(), ["cpu"], 4)[1].steps == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_labels_may_be_one_hot(dtype):
    """Also as `F.one_hot` makes them, and as Flux has them: losses of torch's take floats."""
    x, y = data(40)[:]
    hot = torch.utils.data.TensorDataset(x, F.one_hot(y, CLASSES).to(dtype))
    options = {"cycles": 6}
    ids, with_ids = trained(
        mlp(), data(40), ["cpu"] * 2, 4, options=options, val=(x, y), eval_every=6
    )
    rows, with_rows = trained(mlp(), hot, ["cpu"] * 2, 4, options=options, val=hot[:], eval_every=6)
    close(ids.models[0], rows.models[0])
    assert with_rows.history[-1]["val/top1"] == with_ids.history[-1]["val/top1"]


def test_the_users_model_and_torchs_generators_stay_as_they_were():
    model = mlp()
    before, drawn = copy.deepcopy(model), torch.get_rng_state()
    trained(model, data(), ["cpu"], 4)
    assert same(model, before)
    assert torch.equal(torch.get_rng_state(), drawn)


class Torn(Seen):
    """Some samples of which are bad."""

    def __init__(self, table, bad):
        super().__init__(table)
        self.bad = bad

    def __getitem__(self, place):
        if place in self.bad:
            raise BadSample(f"file {place}", "cut short")
        return super().__getitem__(place)


SECOND = set(Order(50, seed=0, epoch=0).indices(8, 16).tolist())  # all of the second step


@pytest.mark.parametrize("bad", [{3, 17, 40}, SECOND], ids=["three", "a whole step"])
def test_bad_samples_are_left_out_and_counted(bad):
    runs = []
    for devices, batchsize in ((1, 8), (4, 2)):
        read = Torn(data(50), bad)
        setup, result = trained(
            *(mlp(), read, ["cpu"] * devices, batchsize),
            options={"epochs": 1, "bad": "skip"},
            log_every=1,
        )
        assert result.steps == 7  # those of nothing but bad ones are steps, too
        assert result.history[-1]["data/bad"] == len(bad)
        assert set(read.places) == set(range(50)) - bad
        assert all(same(model, setup.models[0]) for model in setup.models)
        runs.append(setup.models[0])
    close(*runs)
    assert not same(runs[0], mlp())


def test_bad_samples_are_replaced_or_raised():
    _, result = trained(
        *(mlp(), Torn(data(50), {3}), ["cpu"] * 2, 4), options={"epochs": 1, "bad": "replace"}
    )
    assert result.steps == 7
    with pytest.raises(BadSample, match="file 3: cut short"):
        trained(mlp(), Torn(data(50), {3}), ["cpu"] * 2, 4, options={"epochs": 1})
    with pytest.raises(UsageError):
        trained(mlp(), data(50), ["cpu"], 4, options={"bad": "ignore"})


class Foreign(Torn):
    """It knows no BadSample."""

    def __getitem__(self, place):
        try:
            return super().__getitem__(place)
        except BadSample:
            raise ValueError(f"row {place}") from None


@pytest.mark.parametrize("transform", [None, lambda x: x], ids=["plain", "transformed"])
@pytest.mark.parametrize("table", [Torn, Foreign])
def test_bad_samples_among_rows_of_some_classes_are_left_out_and_counted(table, transform):
    bad = {3, 17, 40}
    options = {"epochs": 1, "classes": [0, 1], "transform": transform}
    rows = sum(int(y) in (0, 1) for place, (_, y) in enumerate(data(50)) if place not in bad)
    for policy in ("skip", "replace"):
        read = table(data(50), bad)
        setup, result = trained(
            *(mlp(), read, ["cpu"], 8), options=options | {"bad": policy}, log_every=1
        )
        assert setup.source.size == rows + len(bad)  # of which class these are nobody can tell
        assert result.history[-1]["data/bad"] == len(bad)
    with pytest.raises((BadSample, ValueError), match=r"file 3: cut short|row 3"):
        prepare_training(mlp(), table(data(50), bad), ["cpu"], SGD, 8, **options)


def test_errors_of_a_transform_are_errors():
    def wrong(x):
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        trained(mlp(), Seen(data(50)), ["cpu"], 8, options={"transform": wrong, "bad": "skip"})


@pytest.mark.parametrize(
    ("devices", "said"), [(1, "no sample of epoch 0 can be read"), (2, "all are bad")]
)
def test_a_table_of_nothing_but_bad_samples_is_an_error(devices, said):
    table = Torn(data(50), range(50))
    with pytest.raises(ManyhandsError, match=said):
        trained(mlp(), table, ["cpu"] * devices, 4, options={"epochs": 1, "bad": "skip"})


def test_random_transforms_draw_the_same_at_any_number_of_devices():
    def noisy(x):
        return x + 0.1 * torch.randn(x.shape, generator=generator(), dtype=x.dtype)

    options = {"epochs": 2, "transform": noisy}
    one, _ = trained(mlp(), data(50), ["cpu"], 8, options=options)
    many, _ = trained(mlp(), data(50), ["cpu"] * 4, 2, options=options)
    close(one.models[0], many.models[0])


def test_layers_that_are_meant_to_be_in_eval_mode_stay_so():
    model = normed()
    model[2].eval()
    setup, _ = trained(model, data(48, dtype=torch.float32), ["cpu"] * 2, 4)
    for replica in setup.models:
        assert replica.training
        assert not replica[2].training
        assert torch.equal(replica[2].running_mean, model[2].running_mean)
        assert not torch.equal(replica[2].weight, model[2].weight)
    model = normed().eval()  # as a whole: as after an evaluation
    setup, _ = trained(model, data(48, dtype=torch.float32), ["cpu"], 8)
    assert all(module.training for module in setup.models[0].modules())


# -- optimizers and schedules ---------------------------------------------------------------------


def test_an_optimizer_is_cloned_with_its_groups_and_its_state():
    model, table = mlp(), data()
    opt = torch.optim.Adam(
        [
            {"params": model[0].parameters(), "lr": 1e-2},
            {"params": model[2].parameters(), "lr": 1e-3, "weight_decay": 0.1},
        ]
    )
    F.cross_entropy(model(table[:][0]), table[:][1]).backward()
    opt.step()  # so it has moments
    opt.zero_grad()
    setup, _ = trained(model, table, ["cpu"] * 2, 4, opt)
    read = Seen(table)
    plain, twin = trained(model, read, ["cpu"], 8, opt)
    close(setup.models[0], plain.models[0])
    steps = [float(state["step"]) for state in setup.optimizers[1].state.values()]
    assert steps == [6.0] * 4
    assert float(next(iter(opt.state.values()))["step"]) == 1.0
    assert [group["lr"] for group in setup.optimizers[0].param_groups] == [1e-2, 1e-3]
    assert twin.steps == 5


def test_an_optimizer_given_to_train_takes_the_place_of_the_other():
    table = data()
    setup, buffer = prepare_training(mlp(), table, ["cpu"], SGD, 4)
    train(F.cross_entropy, setup, buffer, SGD, logger=quiet)  # the README passes it again
    assert setup.optimizers[0].state
    before = setup.optimizers[0]
    train(F.cross_entropy, setup, buffer, ADAM, logger=quiet)
    assert isinstance(setup.optimizers[0], torch.optim.Adam)
    assert setup.optimizers[0] is not before


def test_a_schedule_is_called_with_step_and_optimizer_and_may_return_the_rate():
    called = []

    def sched(step, optimizer):
        called.append((step, optimizer))
        return 0.1 / (step + 1)

    setup, result = trained(
        *(mlp(), data(), ["cpu"] * 2, 4), options={"cycles": 4}, sched=sched, log_every=1
    )
    assert [row["lr"] for row in result.history] == pytest.approx([0.1, 0.05, 0.1 / 3, 0.025])
    for optimizer in setup.optimizers:
        assert [step for step, seen in called if seen is optimizer] == [0, 1, 2, 3]


def test_a_schedule_may_do_it_itself():
    def sched(step, optimizer):
        optimizer.param_groups[0]["lr"] = 0.5

    _, result = trained(mlp(), data(), ["cpu"], 4, sched=sched, log_every=1)
    assert {row["lr"] for row in result.history} == {0.5}


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_torch_scheduler_turns_the_rates_of_all_replicas(num_devices):
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    sched = torch.optim.lr_scheduler.SequentialLR(
        opt,
        [
            torch.optim.lr_scheduler.LinearLR(opt, 0.25, 1.0, total_iters=2),
            torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.1),
        ],
        milestones=[2],
    )
    _, result = trained(
        *(model, data(), ["cpu"] * num_devices, 4, opt),
        options={"cycles": 5},
        sched=sched,
        log_every=1,
    )
    # A row has the rate for the next step, as get_last_lr() has after scheduler.step().
    assert [row["lr"] for row in result.history] == pytest.approx([0.625, 1.0, 1.0, 0.1, 0.1])
    assert opt.param_groups[0]["lr"] == 0.25  # the user's own has not moved


def test_a_plateau_is_measured_by_the_evaluation():
    model, table = mlp(), data()
    opt = torch.optim.SGD(model.parameters(), lr=1e-9)  # so nothing gets better
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(
        opt, factor=0.5, patience=0, eps=0.0, threshold=0.01
    )
    setup, _ = trained(
        *(model, table, ["cpu"] * 2, 4, opt),
        options={"cycles": 6},
        sched=sched,
        val=table[:],
        eval_every=2,
    )
    assert [group["lr"] for o in setup.optimizers for group in o.param_groups] == [0.25e-9] * 2


def test_a_scheduler_of_another_optimizer_is_refused():
    model = mlp()
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(UsageError, match="StepLR is of another optimizer"):
        trained(model, data(), ["cpu"], 4, sched=torch.optim.lr_scheduler.StepLR(other, 1))
    with pytest.raises(UsageError, match="sched=3"):
        trained(model, data(), ["cpu"], 4, sched=3)


def test_an_identity_is_no_schedule_and_what_is_one_is_said():
    """FluxDistributed's own example has `sched = identity`."""
    with pytest.raises(UsageError, match=r"\(step, optimizer\)") as caught:
        trained(mlp(), data(), ["cpu"], 4, sched=lambda x: x)
    assert "None" in caught.value.hint
    for sched in (max, lambda *both: None, lambda step, optimizer, least=0.0: least):
        pace_for(sched, SGD, SGD(mlp().parameters()))  # what takes both, and what nobody knows of
