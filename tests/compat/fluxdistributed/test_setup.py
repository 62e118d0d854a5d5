"""prepare_training: what it takes, what it makes."""

import functools
import inspect
import threading

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import manyhands.compat.fluxdistributed as flux
from manyhands.compat.fluxdistributed import prepare_training
from manyhands.compat.fluxdistributed.hands import cores_for
from manyhands.compat.fluxdistributed.setup import resolve
from manyhands.core.errors import UsageError
from manyhands.data import ImageNetTable, ImageTree, Mixture
from manyhands.data.imagenet import ROOT
from tests.compat.fluxdistributed.imagenet import SYNSETS
from tests.compat.fluxdistributed.models import ADAM, SGD, data, mlp, same, trained


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


def test_classes_of_imagenet_are_known_without_reading_a_picture(imagenet, monkeypatch):
    def no(*_):
        raise AssertionError("read")

    monkeypatch.setattr("manyhands.data.picture.read_picture", no)
    table = ImageNetTable(imagenet)
    for key in (table, Mixture([table, ImageTree(imagenet / ROOT / "train")])):
        setup, _ = prepare_training(mlp(), key, ["cpu"], SGD, 4, classes=[2, 9])
        size = setup.source.size
        assert size == len(key) // 5  # of the ten classes
        places = [setup.source.dataset.where(place) for place in range(size)]
        assert len(set(places)) == 80
        assert {place.split("/")[-2] for place in places} == {SYNSETS[2], SYNSETS[9]}


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
        ({"devices": ["hpu"]}, "hpu is not here: "),
        ({"opt": torch.optim.LBFGS}, "LBFGS calls its closure several times"),
        ({"opt": torch.optim.LBFGS([torch.zeros(1)])}, "LBFGS calls its closure several times"),
        ({"opt": lambda parameters: 3}, "makes no optimizer"),
        ({"opt": 3}, "opt=3 makes no optimizer"),
        ({"key": Stream()}, "Stream is no table"),
        ({"key": 3}, "int is no table"),
        ({"key": []}, "the table is empty"),
        ({"classes": []}, "classes="),
        ({"classes": [-1]}, "classes="),
        ({"classes": [77]}, "no row of these classes"),
        ({"classes": 10}, "classes=10"),
        ({"classes": ["n01440764"]}, "classes=.*n01440764"),
        ({"batchsize": 2.5}, r"batchsize=2\.5"),
        ({"cycles": 2.5}, r"cycles=2\.5"),
        ({"epochs": "2"}, "epochs='2'"),
    ],
)
def test_bad_arguments_are_refused(change, said):
    given = {"model": mlp(), "key": data(), "devices": ["cpu"], "opt": SGD, "batchsize": 4}
    with pytest.raises(UsageError, match=said) as caught:
        prepare_training(**{**given, **change})
    if "no row" not in said and "makes" not in said and change.get("key") != []:
        assert caught.value.hint


def test_numbers_of_numpy_are_numbers(tmp_path):
    four, two = numpy.int64(4), numpy.int64(2)
    options = {"cycles": two, "buffersize": two, "seed": two}
    _, made = trained(mlp(), data(), ["cpu"], four, options=options, save=tmp_path)
    assert made.steps == 2


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


def test_defaults_are_those_that_are_promised():
    def defaults(function):
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}

    known = {"devices": None, "epochs": None, "cycles": 5, "classes": None, "buffersize": 5}
    known |= {"dataset": "imagenet_local", "seed": 0, "transform": None}
    assert known.items() <= defaults(flux.prepare_training).items()
    known = {"opt": None, "val": None, "sched": None, "log_every": 10, "eval_every": 50}
    known |= {"on_oom": "skip", "logger": None, "save": None, "resume": None}
    assert known.items() <= defaults(flux.train).items()


@pytest.mark.parametrize("buffersize", [1, 3])
def test_no_more_batches_are_read_ahead_than_the_buffer_has_room_for(buffersize):
    """While the first step waits, its own batch has been read and as many more."""
    room, full, over = 4 * (1 + buffersize), threading.Event(), threading.Event()
    table, read, waited = data(40), set(), []

    class Table(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            read.add(index)
            (over if len(read) > room else full if len(read) == room else threading.Event()).set()
            return table[index]

    def loss(output, target):
        if not waited:
            waited.append(full.wait(60) and not over.wait(0.2))
        return nn.functional.cross_entropy(output, target)

    setup, buffer = prepare_training(
        mlp(), Table(), ["cpu"], SGD, 4, cycles=8, buffersize=buffersize
    )
    flux.train(loss, setup, buffer)
    assert waited == [True]
