"""Which samples are bad, and how they are counted: by position, once, whoever resumes."""

from __future__ import annotations

import gzip
import json
import urllib.error

import pytest
import torch
from PIL import UnidentifiedImageError
from torch.utils.data import TensorDataset

from manyhands.core.errors import DataError, NotThere, UsageError
from manyhands.data import BadSample, Loader, Mixture
from manyhands.data.quarantine import Bad, Quarantine, Rules, TooManyBad
from manyhands.data.table import place_of, says_where
from tests.data import samples
from tests.data.test_loader import ids

SEED = 5


class Outage(OSError):
    """As `requests` has its own."""


class EndpointConnectionError(Exception):
    """botocore's are no OSErrors."""

    __module__ = "botocore.exceptions"


# -- what is bad ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("timed out"),
        ConnectionResetError("reset"),
        urllib.error.URLError("no route"),
        Outage("503"),
        EndpointConnectionError("could not connect"),
        OSError(5, "Input/output error"),
        DataError("a bucket cannot be read"),
        NotThere("a bucket has no such file"),
        UsageError("an index is broken"),
        MemoryError("none left"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("mixed", [False, True])
def test_an_outage_is_no_bad_sample(error, mixed):
    """Nothing about the sample is wrong: left out, the epoch would silently have fewer."""
    table = samples.Foreign({3: error})
    loader = Loader(Mixture([table]) if mixed else table, 8, bad="skip", collate=list)
    with pytest.raises(type(error)):
        list(loader)
    assert not loader.bad


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no number"),
        KeyError("label"),
        OSError("image file is truncated"),
        UnidentifiedImageError("cannot identify image file"),
        gzip.BadGzipFile("not a gzipped file"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("mixed", [False, True])
def test_what_a_data_set_says_of_its_data_is_one(error, mixed):
    """Also where a mixture is between it and the loader, beside a table that knows of bad ones."""
    table = samples.Foreign({3: error})
    both = Mixture([table, samples.Numbers(bad=(5,))], shuffle=False)
    loader = Loader(both if mixed else table, 8, bad="skip", collate=list)
    read = ids(loader)
    assert len(read) == (78 if mixed else 39)
    expected = {"Foreign[3]", "numbers/5.txt"} if mixed else {"Foreign[3]"}
    assert {bad.where for bad in loader.bad} == expected


def test_a_table_that_knows_of_bad_samples_means_its_errors():
    class Broken(samples.Numbers):
        def __getitem__(self, index):
            return {}["a slip of the pen"] if index == 3 else super().__getitem__(index)

    for table in (Broken(), Mixture([samples.Foreign(), Broken()])):
        with pytest.raises(KeyError, match="slip of the pen"):
            list(Loader(table, 8, bad="skip", collate=list))


class Failing(torch.Tensor):
    """A tensor as a data set; it has a `where`, which says nothing about samples."""

    def __getitem__(self, index):
        if index == 3:
            raise ValueError("no number")
        return int(index)


def test_a_tensors_where_is_none_of_a_table():
    table = torch.arange(40.0).as_subclass(Failing)
    assert not says_where(table)
    assert place_of(table, 7) == "Failing[7]"
    loader = Loader(table, 8, bad="skip", collate=list)
    assert sorted(n for batch in loader for n in batch) == [n for n in range(40) if n != 3]
    assert [bad.where for bad in loader.bad] == ["Failing[3]"]


def test_where_a_sample_is_is_asked_for_only_if_it_is_to_be_said():
    class Shy(samples.Numbers):
        def where(self, index):
            raise AssertionError("nobody needs it")

    assert len(ids(Loader(Shy(), 8, bad="skip", transform=samples.double, collate=list))) == 40


# -- how many -------------------------------------------------------------------------------------


def repeating():
    """Of the second table, all of which is bad, every sample comes several times an epoch."""
    tables = [samples.Numbers(40), samples.Numbers(2, bad=(0, 1))]
    return Mixture(tables, [4, 1], seed=3, size=40)


def test_a_resume_counts_no_sample_twice():
    """A file that comes again after the resume is another position: the counts are the same."""
    counts = []
    for resumes in (False, True):
        loader = Loader(repeating(), 5, seed=SEED, bad="skip", collate=list)
        seen = []
        while loader.epoch == 0:
            for _ in loader:
                state = json.loads(json.dumps(loader.state_dict()))
                seen.append(state["bad"])
                if resumes:
                    loader = Loader(repeating(), 5, seed=SEED, bad="skip", collate=list)
                    loader.load_state_dict(state)
                    break
        counts.append(seen)
    assert counts[0] == counts[1]
    assert counts[0][-1] == 8
    assert loader.state_dict()["bad"] == 0  # of the next epoch


def test_a_batch_that_was_not_used_counts_nothing(monkeypatch):
    """What stands in for the second cannot be read at first: the batch is asked for again."""
    loader = Loader(samples.Numbers(bad=tuple(range(40))), 8, seed=SEED, bad="skip", world=2)
    calls = []

    def stand_in(self, request):
        calls.append(request)
        if len(calls) == 2:
            raise TimeoutError("timed out")
        return 0

    monkeypatch.setattr(type(loader._supply), "stand_in", stand_in)
    batches = iter(loader)
    next(batches)
    with pytest.raises(TimeoutError):
        next(batches)
    state = loader.state_dict()
    assert (state["consumed"], state["bad"]) == (8, 4)
    loader.load_state_dict(state)
    next(iter(loader))
    assert loader.state_dict()["bad"] == 8


def test_too_many_are_not_met():
    """So that a larger max_bad can go on from the state that was left."""
    options = {"seed": SEED, "bad": "skip", "collate": list}
    loader = Loader(samples.Numbers(bad=tuple(range(12))), 8, max_bad=3, **options)
    with pytest.raises(TooManyBad) as caught:
        list(loader)
    assert len(caught.value.bad) > 3
    state = loader.state_dict()
    assert state["bad"] <= 3
    patient = Loader(samples.Numbers(bad=tuple(range(12))), 8, max_bad=12, **options)
    patient.load_state_dict(state)
    for _ in patient:
        last = patient.state_dict()
    assert last["bad"] == 12


def test_a_pass_that_is_read_again_counts_once():
    """In a run a round may be tried again, and shares may change hands and come back."""
    quarantine = Quarantine(Rules(policy="skip", max_bad=2))
    torn = BadSample("a file", "it is torn")
    for _ in range(5):
        quarantine.meet(0, [Bad(3, torn), Bad(9, torn)])
    assert quarantine.count_in(0) == 2
    assert len(quarantine.bad) == 1
    with pytest.raises(TooManyBad, match="3 samples of epoch 0"):
        quarantine.meet(0, [Bad(4, torn)])


def test_each_epoch_may_have_as_many_and_all_are_told(caplog):
    """A later epoch may have others: those are told too."""
    quarantine = Quarantine(Rules(policy="skip", max_bad=2))
    for epoch in range(3):
        for turn in range(2):
            quarantine.meet(epoch, [Bad(turn, BadSample(f"file {epoch} {turn}", "torn"))])
    assert len(quarantine.bad) == 6
    assert len([r for r in caplog.records if "left out" in r.getMessage()]) == 6


# -- the state over a mixture ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 4},
        {"weights": [1, 3]},
        {"shuffle": False},
        {"tables": [samples.Numbers(30), samples.Numbers(10)]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_state_knows_the_order_of_its_mixture(options):
    plain = {"tables": [samples.Numbers(20), samples.Numbers(20)], "weights": [3, 1], "seed": 3}
    state = Loader(Mixture(**plain), 8).state_dict()
    Loader(Mixture(**plain), 5, seed=99).load_state_dict(state)
    with pytest.raises(UsageError, match="a state of the order") as caught:
        Loader(Mixture(**plain | options), 8).load_state_dict(state)
    assert "seed of the Mixture" in caught.value.hint
    with pytest.raises(UsageError, match="a state of the order"):
        Loader(TensorDataset(torch.arange(40)), 8).load_state_dict(state)


# -- iterations -----------------------------------------------------------------------------------


def test_an_iteration_begins_with_its_first_batch():
    """One that is made and not used is no epoch."""
    loader = Loader(samples.Numbers(), 8, seed=SEED, collate=list)
    iter(loader)
    batches = iter(loader)
    assert loader.epoch == 0
    state = loader.state_dict()
    first = ids([next(batches)])
    loader.load_state_dict(state)
    assert ids([next(iter(loader))]) == first
