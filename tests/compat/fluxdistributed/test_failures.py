"""What goes wrong in a training, and that all devices stop in one state."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manyhands.compat.fluxdistributed import BadGradient, NotSynced, prepare_training, train
from manyhands.core.errors import UsageError
from tests.compat.fluxdistributed.models import (
    CLASSES,
    FEATURES,
    SGD,
    Seen,
    data,
    mlp,
    normed,
    quiet,
    same,
    trained,
)


def test_a_nan_stops_everybody_before_it_is_taken():
    x, y = data(16)[:]
    x[11, 0] = float("nan")
    setup, buffer = prepare_training(
        normed().double(), torch.utils.data.TensorDataset(x, y), ["cpu"] * 2, SGD, 4, epochs=2
    )
    with pytest.raises(BadGradient, match=r"the mean gradient of step \d has NaNs"):
        train(F.cross_entropy, setup, buffer, logger=quiet)
    assert same(*setup.models)
    assert not any(tensor.isnan().any() for tensor in setup.models[0].state_dict().values())


def test_what_one_device_raises_ends_all_and_is_raised():
    class Odd(nn.Linear):
        def forward(self, x):
            if x[:, 0].min() < -100:
                raise ZeroDivisionError("this row")
            return super().forward(x)

    x, y = data(16)[:]
    x[5, 0] = -1000.0
    table = torch.utils.data.TensorDataset(x, y)
    model = Odd(FEATURES, CLASSES).double()
    setup, buffer = prepare_training(model, table, ["cpu"] * 3, SGD, 2, epochs=1)
    with pytest.raises(ZeroDivisionError, match="this row"):
        train(F.cross_entropy, setup, buffer, logger=quiet)
    assert same(setup.models[0], setup.models[1])
    assert same(setup.models[0], setup.models[2])


def test_what_reading_raises_ends_all_and_is_raised():
    class Lost(Seen):
        def __getitem__(self, place):
            if place == 13:
                raise OSError("disk")
            return super().__getitem__(place)

    with pytest.raises(OSError, match="disk"):
        trained(mlp(), Lost(data(40)), ["cpu"] * 3, 2, options={"epochs": 1})


def test_a_label_that_the_model_has_no_output_for():
    x, y = data(16)[:]
    y[9] = CLASSES
    table = torch.utils.data.TensorDataset(x, y)
    with pytest.raises(UsageError, match="class 4, but the model has 4 outputs"):
        trained(mlp(), table, ["cpu"] * 2, 4, options={"epochs": 1})


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"on_oom": "wait"}, "on_oom='wait'"),
        ({"log_every": 0}, "log_every=0"),
        ({"log_every": 1.5}, "log_every=1.5"),
        ({"eval_every": None}, "eval_every=None"),
        ({"val": 3}, "val is a int"),
        ({"val": []}, "val is empty"),
        ({"resume": True}, "resume=True without save"),
        ({"logger": object()}, "object is no logger"),
    ],
)
def test_bad_options_are_refused(how, said):
    with pytest.raises(UsageError, match=said):
        trained(mlp(), data(), ["cpu"], 4, **how)


def test_a_row_that_is_too_few_for_a_layer_is_told_with_the_remedy():
    """Of ten rows, the last step has two, one for each device; a single device would have both."""
    model, options = nn.Sequential(mlp(), nn.BatchNorm1d(4).double()), {"epochs": 1}
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        trained(model, data(10), ["cpu"] * 2, 4, options=options)
    assert any("drop_last=True" in note for note in caught.value.__notes__)
    _, result = trained(model, data(10), ["cpu"] * 2, 4, options={**options, "drop_last": True})
    assert result.steps == 1


def test_a_loss_that_is_no_mean_is_refused():
    setup, buffer = prepare_training(mlp(), data(), ["cpu"], SGD, 4)
    with pytest.raises(UsageError, match="reduction='sum'"):
        train(nn.CrossEntropyLoss(reduction="sum"), setup, buffer, logger=quiet)


def test_a_buffer_of_another_setup_is_refused():
    setup, _ = prepare_training(mlp(), data(), ["cpu"], SGD, 4)
    _, other = prepare_training(mlp(), data(), ["cpu", "cpu"], SGD, 4)
    with pytest.raises(UsageError, match="2 slots for 1 devices"):
        train(F.cross_entropy, setup, other, logger=quiet)


def test_replicas_that_were_changed_by_hand_are_found():
    setup, buffer = prepare_training(mlp(), data(), ["cpu"] * 2, SGD, 4)
    with torch.no_grad():
        setup.models[1][0].bias[0] += 1
    with pytest.raises(NotSynced, match=r"0\.bias of replica 1 \(cpu\)"):
        train(F.cross_entropy, setup, buffer, logger=quiet)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_an_exit_on_a_device_is_an_exit_of_the_training(num_devices):
    def sched(step, optimizer):
        if step == 2:
            sys.exit(3)

    with pytest.raises(SystemExit) as caught:
        trained(mlp(), data(), ["cpu"] * num_devices, 4, sched=sched)
    assert caught.value.code == 3


def test_a_caller_who_wants_no_gradients_gets_a_training_all_the_same():
    with torch.no_grad():
        setup, _ = trained(mlp(), data(), ["cpu"], 4)
    assert not same(setup.models[0], mlp())
