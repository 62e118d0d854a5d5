"""prepare_training: what it takes, what it makes."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import manyhands.compat.fluxdistributed as flux
from manyhands.compat.fluxdistributed import prepare_training
from manyhands.compat.fluxdistributed.hands import cores_for
from manyhands.compat.fluxdistributed.setup import resolve
from manyhands.core.errors import UsageError
from tests.compat.fluxdistributed.models import ADAM, SGD, data, mlp, same


def test_a_replica_an_optimizer_and_a_slot_for_each_device():
    model = mlp()
    setup, buffer = prepare_training(model, data(), ["cpu", "cpu", "cpu"], SGD, 4)
    assert setup.devices == (torch.device("cpu"),) * 3
    assert len(buffer) == len(setup.models) == len(setup.optimizers) == 3
    memory = {parameter.data_ptr() for m in (model, *setup.models) for parameter in m.parameters()}
    assert len(memory) == 4 * 4  # nothing is shared
    for replica, optimizer in zip(setup.models, setup.optimizers, strict=True):
        assert same(replica, model)
        own = {id(parameter) for parameter in replica.parameters()}
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == own
    for slot in buffer:
        assert not any(slot[name].any() for name in dict(model.named_parameters()))


def test_arguments_may_be_named_and_devices_left_out():
    setup, _ = prepare_training(mlp(), data(), opt=ADAM, batchsize=4)
    visible = torch.cuda.device_count()
    assert len(setup.devices) == max(1, visible)
    assert setup.devices[0].type == ("cuda" if visible else "cpu")
    assert resolve("cpu") == (torch.device("cpu"),)
    assert resolve([torch.device("cpu"), "cpu"]) == (torch.device("cpu"),) * 2


def test_the_number_of_steps():
    def steps(**options):
        return prepare_training(mlp(), data(50), ["cpu", "cpu"], SGD, 4, **options)[0].steps

    assert steps() == 5
    assert steps(cycles=11) == 11
    assert steps(epochs=3) == 3 * 7  # the last of an epoch has two rows
    assert steps(epochs=3, drop_last=True) == 3 * 6


@pytest.mark.parametrize("classes", [range(2), [1, 3], (0,)])
def test_classes_keeps_rows_of_these_ids_which_stay_what_they_are(classes):
    table = data(60)
    setup, _ = prepare_training(mlp(), table, ["cpu"], SGD, 4, classes=classes)
    kept = [setup.source.dataset[place] for place in range(setup.source.size)]
    expected = [(x, y) for x, y in table if int(y) in set(classes)]
    assert len(kept) == len(expected) > 0
    for (x, y), (other, label) in zip(kept, expected, strict=True):
        assert torch.equal(x, other)
        assert y == label


def test_classes_of_a_table_that_says_its_labels_or_has_one_hot_rows():
    class Says:
        targets = (2, 0, 2)

        def __len__(self):
            return 3

        def __getitem__(self, place):
            raise AssertionError("read")

    setup, _ = prepare_training(mlp(), Says(), ["cpu"], SGD, 4, classes=[2])
    assert setup.source.size == 2
    hot = TensorDataset(torch.arange(3.0), torch.eye(4)[[2, 0, 2]])
    setup, _ = prepare_training(mlp(), hot, ["cpu"], SGD, 4, classes=[2])
    assert [float(setup.source.dataset[place][0]) for place in range(2)] == [0.0, 2.0]


def test_a_transform_makes_x_of_what_is_read():
    table = data(8)
    setup, _ = prepare_training(mlp(), table, ["cpu"], SGD, 4, transform=lambda x: x * 2)
    x, y = setup.source.dataset[3]
    assert torch.equal(x, table[3][0] * 2)
    assert y == table[3][1]


class Stream(IterableDataset):
    def __iter__(self):
        yield 0, 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"opt": None}, "without opt"),
        ({"batchsize": None}, "without batchsize"),
        ({"batchsize": 0}, "batchsize=0"),
        ({"buffersize": 0}, "buffersize=0"),
        ({"epochs": 0}, "epochs=0"),
        ({"cycles": 0}, "cycles=0"),
        ({"devices": []}, "no device"),
        ({"devices": ["gpu:0"]}, "'gpu:0' is no device"),
        ({"devices": ["cuda:77"]}, "cuda:77 is not here: torch sees"),
        ({"opt": lambda parameters: 3}, "makes no optimizer"),
        ({"opt": 3}, "opt=3 makes no optimizer"),
        ({"key": Stream()}, "Stream is no table"),
        ({"key": 3}, "int is no table"),
        ({"key": []}, "the table is empty"),
        ({"classes": []}, "classes="),
        ({"classes": [-1]}, "classes="),
        ({"classes": [77]}, "no row of these classes"),
    ],
)
def test_bad_arguments_are_refused(change, said):
    given = {"model": mlp(), "key": data(), "devices": ["cpu"], "opt": SGD, "batchsize": 4}
    with pytest.raises(UsageError, match=said) as caught:
        prepare_training(**{**given, **change})
    if "no row" not in said and "makes" not in said and change.get("key") != []:
        assert caught.value.hint


def test_an_optimizer_of_something_else_is_refused():
    other = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(UsageError, match="an optimizer of other parameters"):
        prepare_training(mlp(), data(), ["cpu"], other, 4)


def test_cores_are_divided():
    assert [cores_for(n, 8) for n in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]


@pytest.fixture
def four_cores():
    """As torch counts them: with one, a part of them is all of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_devices", "part"), [(1, 4), (2, 2), (3, 1)])
@pytest.mark.usefixtures("four_cores")
def test_devices_compute_with_their_part_of_the_cores(num_devices, part):
    found = []

    class Asks(nn.Linear):
        def forward(self, x):
            found.append(torch.get_num_threads())
            return super().forward(x)

    opt = functools.partial(torch.optim.SGD, lr=0.1)
    devices = ["cpu"] * num_devices
    setup, buffer = prepare_training(Asks(6, 4).double(), data(), devices, opt, 4)
    flux.train(nn.functional.cross_entropy, setup, buffer, logger=lambda row, step: None)
    assert set(found) == {part}
    assert torch.get_num_threads() == 4


def test_every_name_is_there():
    for name in flux.__all__:
        assert callable(getattr(flux, name)), name
    assert callable(flux.train)  # whatever was imported before
    with pytest.raises(AttributeError):
        _ = flux.nothing
