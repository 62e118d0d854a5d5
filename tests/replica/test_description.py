"""What peers must have in common: each difference is named, with what is there and what here."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import manyhands as mh
from manyhands.data import BadSample, Loader
from manyhands.data.source import Source
from manyhands.replica import description
from manyhands.replica.description import (
    check_same,
    check_saved,
    describe,
    differences,
    digest_of,
    warn_of_torch,
)
from manyhands.replica.gradients import Named, parameters_of
from tests.replica.loops import Points, Recipe, gather, mean_loss


def adamw(model, **changed):
    return [torch.optim.AdamW(model.parameters(), **{"lr": 0.1, "weight_decay": 0.2, **changed})]


def described(model=None, optimizers=adamw, data=None, **options):
    model = model or nn.Linear(4, 2)
    made = optimizers(model)
    data = data or DataLoader(TensorDataset(torch.zeros(20, 4)), 5)
    buffers = [Named(name, buffer) for name, buffer in model.named_buffers()]
    found = describe(parameters_of(model, made), buffers, made, Source.of(data), options)
    return msgspec.json.decode(msgspec.json.encode(found))  # as it comes from another peer


def data_of(size, value=0.0):
    return DataLoader(TensorDataset(torch.full((size, 4), value)), 5)


def by_group(**own):
    """Two groups; the second has settings of its own."""

    def make(model):
        first, second = model.parameters()
        groups = [{"params": first}, {"params": second, **own}]
        return [torch.optim.AdamW(groups, lr=0.1)]

    return make


class Wider(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.more = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"model": nn.Linear(4, 3)},
            ["parameters.weight is float32[2, 4] there and float32[3, 4]"],
        ),
        ({"model": nn.Linear(4, 2).double()}, ["parameters.bias is float32[2] there and float64"]),
        (
            {"model": nn.Linear(4, 2, bias=False)},
            ["parameters.bias is float32[2] there and missing"],
        ),
        ({"model": Wider()}, ["parameters.more is missing there and float32[1] here"]),
        (
            {"model": nn.Sequential(nn.Linear(4, 2))},
            ["parameters.weight is", "parameters.0.weight"],
        ),
        ({"model": nn.BatchNorm1d(4)}, ["buffers.running_mean is missing there and float32[4]"]),
        (
            {"optimizers": lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)]},
            ["optimizers.0.class is AdamW there and SGD here"],
        ),
        (
            {"optimizers": lambda m: adamw(m, betas=(0.9, 0.95))},
            ["optimizers.0.betas is [0.9, 0.999] there and [0.9, 0.95] here"],
        ),
        (
            {"optimizers": lambda m: adamw(m, weight_decay=0.0)},
            ["optimizers.0.weight_decay is 0.2 there and 0.0 here"],
        ),
        (
            {"optimizers": lambda m: adamw(m, fused=True)},
            ["optimizers.0.fused is None there and True here"],
        ),
        (
            {"optimizers": lambda m: adamw(m, lr=torch.tensor(0.25))},
            ["optimizers.0.lr is 0.1 there and 0.25 here"],
        ),
        ({"optimizers": lambda m: adamw(m) * 2}, ["optimizers is [{"]),
        (
            {"optimizers": lambda m: [torch.optim.AdamW([{"params": p} for p in m.parameters()])]},
            ["optimizers.0.groups is [2] there and [1, 1] here"],
        ),
        ({"data": data_of(21)}, ["data.samples is 20 there and 21 here"]),
        ({"data": data_of(20, 1.0)}, ["data.fingerprint is"]),
        ({"epochs": 3}, ["epochs is missing there and 3 here"]),
    ],
)
def test_each_difference_is_named(changed, said):
    found = "; ".join(differences(described(), described(**changed)))
    assert all(text in found for text in said), found
    assert not differences(described(**changed), described(**changed))


LOOKED_AT = [place * 1599 // 15 for place in range(16)]


def changed_at(place, size=1600):
    """A data set in which one sample has another value."""
    x = torch.zeros(size, 4)
    if place is not None:
        x[place] = 1.0
    return DataLoader(TensorDataset(x), 5)


@pytest.mark.parametrize("place", LOOKED_AT)
def test_another_sample_in_data_of_the_same_length_is_named(place):
    (found,) = differences(described(data=changed_at(None)), described(data=changed_at(place)))
    assert found.startswith("data.fingerprint is ")


def test_of_small_data_every_sample_counts():
    """Where none is left out between those that are looked at."""
    found = {described(data=changed_at(n, 16))["data"]["fingerprint"] for n in (None, *range(16))}
    assert len(found) == 17


class Noted(Dataset):
    """Samples of different lengths, that no batch can have beside each other; it notes the reads.

    Those that are bad cannot be read.
    """

    def __init__(self, size, bad=()):
        self.size, self.bad, self.read = size, frozenset(bad), []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        if index in self.bad:
            raise BadSample(self.where(index), "it is torn")
        return torch.full((index % 3 + 1,), float(index))

    def where(self, index):
        return f"sample {index}"


def test_how_many_are_read_does_not_follow_the_size():
    for size in (1, 2, 15, 16, 17, 100_000):
        data = Noted(size)
        described(data=DataLoader(data, 1, shuffle=True))
        assert len(data.read) == len(set(data.read)) == min(size, 16)
        assert {0, size - 1} <= set(data.read)


def test_bad_samples_among_those_that_are_looked_at_are_left_out():
    """Also where all of them are; a peer with whom one is bad that is not so elsewhere differs."""
    found = set()
    for bad in ((), LOOKED_AT[3:5], LOOKED_AT):
        for policy in ("skip", "replace"):
            data = described(data=Loader(Noted(1600, bad), 5, bad=policy))["data"]
            found.add(data["fingerprint"])
    assert len(found) == 3


def test_another_release_is_named(monkeypatch):
    mine = described()
    monkeypatch.setattr(description, "__version__", "99.0")
    assert differences(mine, described())[0].startswith("manyhands is ")
    assert "99.0 here" in differences(mine, described())[0]


def test_another_torch_refuses_nobody(monkeypatch):
    """Peers that round otherwise train together: see re-syncs."""
    free = {"epochs": 1, "bad_gradients": "skip", "resync_every": 256}
    theirs = described(**free)
    monkeypatch.setattr(description, "_TORCH", "99.0")
    mine = described(**free)
    assert differences(theirs, mine) == [f"torch is {torch.__version__} there and 99.0 here"]
    check_same(theirs, mine)
    check_saved(theirs, mine)
    # Else who comes with the same weights would have another history.
    assert digest_of(theirs) == digest_of(mine) != digest_of(described(epochs=9))


def test_what_an_earlier_release_has_saved_says_nothing_of_torch(caplog):
    mine = described(epochs=1, bad_gradients="skip", resync_every=256)
    saved = {name: value for name, value in mine.items() if name != "torch"}
    check_saved(saved, mine)
    warn_of_torch("the one that was saved", saved, mine)
    assert not caplog.messages


def test_who_comes_later_with_another_torch_says_so_once(monkeypatch, caplog):
    """And trains."""
    begun, come = threading.Event(), threading.Event()

    def train(name, each):
        torch.manual_seed(3)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mh.join("local:///another-torch", name=name) as run:
            _, _, loader, _ = run.wrap(model, optimizer, data_of(20, 1.0), epochs=50)
            for _ in range(50):
                for (x,) in loader:
                    model(x).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    each(run)

    def first(run):
        if run.round == 3:
            begun.set()
        if run.round >= 3:
            come.wait(0.05)  # so that there are rounds for the other one

    old = threading.Thread(target=train, args=("old", first))
    old.start()
    assert begun.wait(60)
    monkeypatch.setattr(description, "_TORCH", "99.0")
    train("new", lambda run: come.set())
    old.join(60)
    assert come.is_set()
    said = (
        f"torch 99.0, and the run it joined {torch.__version__}: they are the same up to rounding"
    )
    assert [said in message for message in caplog.messages].count(True) == 1


def test_only_what_differs_is_said():
    theirs, mine = described(), described(optimizers=lambda m: adamw(m, eps=1e-3))
    assert differences(theirs, mine) == ["optimizers.0.eps is 1e-08 there and 0.001 here"]


@pytest.mark.parametrize(
    ("theirs", "mine", "said"),
    [
        ({"lr": 0.01}, {"lr": 0.02}, "lr is [0.1, 0.01] there and [0.1, 0.02] here"),
        ({}, {"lr": 0.02}, "lr is missing there and [0.1, 0.02] here"),
        (
            {"betas": (0.5, 0.9)},
            {"betas": (0.5, 0.8)},
            "betas is [[0.9, 0.999], [0.5, 0.9]] there and [[0.9, 0.999], [0.5, 0.8]] here",
        ),
        ({"weight_decay": 0.5}, {}, "weight_decay is [0.01, 0.5] there and missing here"),
    ],
)
def test_what_a_group_has_of_its_own_is_compared(theirs, mine, said):
    there, here = (described(optimizers=by_group(**own)) for own in (theirs, mine))
    assert differences(there, here) == [f"optimizers.0.own.{said}"]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 10),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [0.3, 0.2], total_steps=9),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.3),
    ],
)
def test_what_a_schedule_has_moved_is_not_compared(schedule):
    """One of a cell that was run again, say, with the model that it had already trained."""

    def moved(model, steps):
        (optimizer,) = by_group(lr=0.01)(model)
        scheduler = schedule(optimizer)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return [optimizer]

    there, here = (described(optimizers=lambda m, n=n: moved(m, n)) for n in (0, 3))
    assert not differences(there, here)


def plateau(optimizer):
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    schedule.step(1.0)
    schedule.step(1.0)


def by_hand(optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.1


def plain(model):
    """Keeps nothing about its steps."""
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


@pytest.mark.parametrize("made", [adamw, plain, by_group(lr=0.01)])
@pytest.mark.parametrize("move", [plateau, by_hand])
def test_a_rate_that_was_moved_in_a_phase_before_is_not_compared(made, move):
    """Nothing says from where it was moved; who comes late has a fresh optimizer."""
    model = nn.Linear(4, 2)
    optimizers = made(model)
    before = described(model, lambda _: optimizers)
    model(torch.ones(1, 4)).sum().backward()
    optimizers[0].step()
    move(optimizers[0])
    there = described(model, lambda _: optimizers)
    assert there["optimizers"][0]["own"] != before["optimizers"][0]["own"]
    here = described(optimizers=made)
    check_same(there, here)
    check_same(here, there)


def test_a_schedule_that_began_at_a_rate_that_was_moved_tells_nothing():
    model = nn.Linear(4, 2)
    optimizers = adamw(model)
    described(model, lambda _: optimizers)
    by_hand(optimizers[0])
    torch.optim.lr_scheduler.StepLR(optimizers[0], 1)
    check_same(described(model, lambda _: optimizers), described())


def test_what_a_group_has_besides_its_rate_is_compared_in_a_later_phase_too():
    model = nn.Linear(4, 2)
    optimizers = by_group(eps=0.5)(model)
    described(model, lambda _: optimizers)
    by_hand(optimizers[0])
    there = described(model, lambda _: optimizers)
    found = differences(there, described(optimizers=by_group(eps=0.25)))
    assert found == ["optimizers.0.own.eps is [1e-08, 0.5] there and [1e-08, 0.25] here"]


def test_a_rate_that_a_schedule_remembers_is_compared_in_a_later_phase_too():
    model = nn.Linear(4, 2)
    optimizers = by_group(lr=0.01)(model)
    torch.optim.lr_scheduler.StepLR(optimizers[0], 1)
    described(model, lambda _: optimizers)
    by_hand(optimizers[0])
    there = described(model, lambda _: optimizers)
    found = differences(there, described(optimizers=by_group(lr=0.02)))
    assert found == ["optimizers.0.own.lr is [0.1, 0.01] there and [0.1, 0.02] here"]


def test_a_peer_with_another_optimizer_is_refused_and_the_run_goes_on():
    """Both come to a run that begins: whoever follows hears of it."""

    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(2):
            for batch in loader:
                mean_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    rates = iter([0.1, 0.2])
    recipe = Recipe(loop, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=next(rates)))
    recipe.data = lambda: DataLoader(Points(), 10)
    kits, errors = gather(recipe, (1, 1))
    ((_, error),) = errors.items()
    assert isinstance(error, description.Mismatch)
    assert "optimizers.0.lr is" in str(error)
    assert "start it with the run's script" in str(error)
    assert len([kit for kit in kits if kit.digest]) == 1
