"""Batches in a run's order, by threads or processes, from any position on."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from manyhands.core.errors import UsageError
from manyhands.data import BadSample, CsvTable, Loader, Mixture, generator
from manyhands.data.child import WorkerDied, WorkerError
from manyhands.data.order import Order
from manyhands.data.quarantine import TooManyBad
from manyhands.data.source import Source
from tests.data import samples

SIZE, BATCH, SEED = 40, 7, 5
KINDS = {
    "direct": {},
    "threads": {"workers": 3, "kind": "thread"},
    "processes": {"workers": 1, "kind": "process"},
}


@pytest.fixture(params=["direct", "threads"])
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def make():
    """Loaders that the test's end closes."""
    made = []

    def of(table, batch_size=BATCH, **options):
        made.append(Loader(table, batch_size, **{"seed": SEED, "collate": list, **options}))
        return made[-1]

    yield of
    for loader in made:
        loader.close()


def flat(batches):
    return [sample for batch in batches for sample in batch]


def ids(batches):
    return [sample[0] for batch in batches for sample in batch]


def order(epoch):
    return Order(SIZE, seed=SEED, epoch=epoch).indices(0, SIZE).tolist()


# -- order and values -----------------------------------------------------------------------------


def test_each_iteration_is_an_epoch_in_its_own_order(make, kind):
    loader = make(samples.Numbers(), **kind)
    assert len(loader) == 6
    for epoch in range(3):
        assert loader.epoch == epoch
        batches = list(loader)
        assert [len(batch) for batch in batches] == [7, 7, 7, 7, 7, 5]
        assert ids(batches) == order(epoch)
    assert loader.wait_s > 0


def test_what_a_sample_draws_is_its_own_whoever_reads_it(make, kind):
    """By position alone: not by the worker, the batch, or what was drawn before."""
    loader = make(samples.Numbers(), transform=samples.jitter, **kind)
    plain = make(samples.Numbers(), 1, transform=samples.jitter)
    torch.rand(3)
    for _ in range(2):
        assert flat(loader) == flat(plain)


def test_where_no_other_thread_reads_all_generators_are_the_samples(make):
    loader = make(samples.Foreign())
    again = make(samples.Foreign(), 3)
    state = torch.get_rng_state()
    assert flat(loader) == flat(again)
    assert torch.equal(torch.get_rng_state(), state)


def drawn(value):
    """Of all three generators."""
    return value, torch.rand(()).item(), random.random(), numpy.random.rand()


def drawing_collate(rows):
    return drawn(rows)


class Drawing:
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return drawn(index)


@pytest.fixture
def lines(tmp_path):
    """Tables of a file of ours, which the test's end closes."""
    (tmp_path / "rows.csv").write_text("a,b\n" + "1,0\n" * SIZE)
    made = []

    def of(**options):
        made.append(CsvTable(tmp_path / "rows.csv", **options))
        return made[-1]

    yield of
    for table in made:
        table.close()


@pytest.mark.parametrize(
    ("table", "options"),
    [
        (lambda _: Drawing(), {}),
        (lambda lines: lines(), {"transform": drawn}),
        (lambda lines: lines(transform=drawn), {}),
        (lambda lines: lines(types={"a": drawn}), {}),
        (lambda lines: Mixture([lines(transform=drawn)]), {}),
        (lambda lines: lines(), {"collate": drawing_collate}),
    ],
    ids=["a data set", "a transform", "a table's", "a type of a column", "in a mixture", "collate"],
)
def test_what_reading_draws_is_not_taken_from_the_loop(make, lines, table, options):
    loader = make(table(lines), **options)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    assert len(list(loader)) == 6
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert str(numpy.random.get_state()) == str(before[2])


def test_where_nothing_is_drawn_no_generator_is_kept(make, lines, monkeypatch):
    """To keep them costs as much as to read a few samples, for every batch."""

    def kept():
        raise AssertionError("the generators are asked for their state")

    monkeypatch.setattr("manyhands.data.supply.generators_kept", kept)
    assert len(list(make(lines(types={"a": int, "b": bool}), collate=None))) == 6


def test_a_generator_outside_of_a_sample_is_torchs():
    assert generator() is torch.default_generator


def test_without_a_collate_of_its_own_batches_are_torchs(make):
    (x, y), *_ = make(TensorDataset(torch.arange(40), torch.ones(40, 2)), collate=None, workers=1)
    assert x.tolist() == order(0)[:BATCH]
    assert y.shape == (BATCH, 2)


def test_drop_last_and_no_shuffle(make):
    loader = make(samples.Numbers(), 16, shuffle=False, drop_last=True, workers=2)
    assert [[s[0] for s in batch] for batch in loader] == [list(range(16)), list(range(16, 32))]
    assert loader.epoch == 1


def test_an_iteration_that_was_left_is_followed_by_another_epoch(make, kind):
    loader = make(samples.Numbers(), **kind)
    first = next(iter(loader))
    assert ids([first]) == order(0)[:BATCH]
    assert ids(loader) == order(1)


def test_after_an_error_the_rest_of_the_epoch_comes_next(make, kind):
    """A disk that was away for a moment costs no samples."""
    away = [order(0)[2 * BATCH]]

    def read(sample):
        if sample[0] in away:
            raise OSError(5, "away")
        return sample

    loader = make(samples.Numbers(), transform=read, **kind)
    before = []
    with pytest.raises(OSError, match="away"):
        before.extend(loader)
    assert ids(before) == order(0)[: 2 * BATCH]
    assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (0, 2 * BATCH)
    away.clear()
    assert ids(loader) == order(0)[2 * BATCH :]
    assert ids(loader) == order(1)


def test_one_iteration_at_a_time(make):
    loader = make(samples.Numbers())
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    with pytest.raises(UsageError, match="another iteration"):
        next(first)


# -- state ----------------------------------------------------------------------------------------


def test_a_state_goes_on_after_the_last_batch(make, kind):
    loader = make(samples.Numbers(), **kind)
    list(loader)
    batches = iter(loader)
    seen = ids([next(batches), next(batches)])
    state = json.loads(json.dumps(loader.state_dict()))
    assert len(json.dumps(state)) <= 1024
    resumed = make(samples.Numbers(), 4, **{**kind, "seed": 99})
    resumed.load_state_dict(state)
    assert seen + ids(resumed) == order(1)
    assert ids(resumed) == order(2)


def test_numbers_of_numpy_make_a_state_of_plain_ones(make):
    """As somebody has them who computes a batch size."""
    loader = make(samples.Numbers(), numpy.int64(BATCH), seed=numpy.int64(SEED))
    batches = iter(loader)
    seen = ids([next(batches)])
    resumed = make(samples.Numbers())
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert seen + ids(resumed) == order(0)


def test_a_state_of_the_end_of_an_epoch_has_nothing_left_of_it(make):
    loader = make(samples.Numbers())
    for _ in loader:
        state = loader.state_dict()
    resumed = make(samples.Numbers())
    resumed.load_state_dict(state)
    assert (resumed.epoch, list(resumed)) == (0, [])
    assert ids(resumed) == order(1)


def test_a_state_that_is_loaded_ends_the_iteration_under_way(make):
    loader = make(samples.Numbers(), workers=2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert ids(loader) == order(0)[BATCH:]
    with pytest.raises(UsageError, match="a state was loaded"):
        next(batches)


def test_a_position_far_inside_costs_no_more_than_the_first(make):
    """Of 10^8 samples only those of the batch are read."""
    table = samples.Numbers(10**8)
    loader = make(table, 4)
    state = loader.state_dict() | {"consumed": 10**8 - 8, "epoch": 3}
    loader.load_state_dict(state)
    expected = Order(10**8, seed=SEED, epoch=3).indices(10**8 - 8, 10**8).tolist()
    assert ids(loader) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 41}, "a state of 41 samples"),
        ({"shuffle": False}, "shuffle=False, came"),
        ({"consumed": "many"}, "no state of a Loader"),
        ({"consumed": 41}, "position 41 of epoch 0"),
        ({"seed": True}, "no state of a Loader"),
    ],
)
def test_states_that_are_none_of_this_loaders(make, change, words):
    loader = make(samples.Numbers())
    with pytest.raises(UsageError, match=words):
        loader.load_state_dict(loader.state_dict() | change)


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_kills_resumes_and_other_worlds_change_nothing(make, policy):
    """World 4, 3, 5, 1 and 2, each killed at a batch that is drawn: the order of one process."""
    dice, bad = random.Random(3), (3, 17, 18)
    whole = make(samples.Numbers(bad=bad), bad=policy)
    expected = [flat(whole) for _ in range(3)]
    if policy == "skip":
        assert [s[0] for s in expected[0]] == [n for n in order(0) if n not in bad]
    found = [[], [], []]
    state = whole.state_dict() | {"epoch": 0, "consumed": 0, "bad": 0}
    for world in (4, 3, 5, 1, 2, 4):
        ranks = [
            make(samples.Numbers(bad=bad), bad=policy, rank=r, world=world, workers=r % 2)
            for r in range(world)
        ]
        for loader in ranks:
            loader.load_state_dict(state)
        left = dice.randrange(1, 6)
        while left and ranks[0].epoch < 3:
            for parts in zip(*ranks, strict=True):  # no rank waits for another: all get as many
                for loader, part in zip(ranks, parts, strict=True):
                    assert loader.weight in (0, len(part))
                    found[loader.epoch] += part if loader.weight else []
                state = json.loads(json.dumps(ranks[0].state_dict()))
                left -= 1
                if not left:
                    break
        for loader in ranks:
            loader.close()
    last = make(samples.Numbers(bad=bad), bad=policy)
    last.load_state_dict(state)
    while last.epoch < 3:
        epoch = last.epoch
        found[epoch] += flat(last)
    assert found == expected


def test_ranks_have_equally_many_batches_and_each_sample_once(make):
    """The last batch has fewer samples than there are ranks."""
    ranks = [make(samples.Numbers(11), 4, rank=r, world=4, workers=1) for r in range(4)]
    batches = [list(zip(loader, weights(loader), strict=False)) for loader in ranks]
    assert {len(own) for own in batches} == {3}
    counted = [s[0] for own in batches for batch, weight in own if weight for s in batch]
    assert sorted(counted) == list(range(11))
    assert all(batch for own in batches for batch, _ in own)


def weights(loader):
    while True:
        yield loader.weight


# -- bad samples ----------------------------------------------------------------------------------


def test_a_bad_sample_is_raised_where_its_batch_would_have_come(make, kind):
    bad = order(0)[2 * BATCH]
    loader = make(samples.Numbers(bad=(bad,)), **kind)
    seen = []
    with pytest.raises(BadSample, match=rf"numbers/{bad}\.txt: it is torn") as caught:
        seen.extend(loader)
    assert ids(seen) == order(0)[: 2 * BATCH]
    assert caught.value.reason == "it is torn"
    assert loader.state_dict()["consumed"] == 2 * BATCH


def test_skip_leaves_it_out_and_says_so_once(make, kind, caplog):
    loader = make(samples.Numbers(bad=(3, 17)), bad="skip", **kind)
    for epoch in range(2):
        sizes = [len(batch) for batch in loader]
        assert sum(sizes) == SIZE - 2, epoch
    assert {error.where for error in loader.bad} == {"numbers/3.txt", "numbers/17.txt"}
    told = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert sorted(told) == [
        "numbers/17.txt: it is torn: it is left out",
        "numbers/3.txt: it is torn: it is left out",
    ]


def test_a_batch_of_bad_samples_only_is_passed_over(make):
    loader = make(samples.Numbers(bad=tuple(order(0)[BATCH : 2 * BATCH])), bad="skip", workers=2)
    batches = iter(loader)
    next(batches)
    assert ids([next(batches)]) == order(0)[2 * BATCH : 3 * BATCH]
    state = loader.state_dict()
    assert (state["consumed"], state["bad"]) == (3 * BATCH, BATCH)


def test_replace_takes_another_the_same_for_all(make, kind):
    bad = (3, 17, 18)
    loader = make(samples.Numbers(bad=bad), bad="replace", **kind)
    ranks = [make(samples.Numbers(bad=bad), bad="replace", rank=r, world=3) for r in range(3)]
    for epoch in range(2):
        whole = list(loader)
        assert whole == [flat(parts) for parts in zip(*ranks, strict=True)]
        kept = [(a, b) for a, b in zip(ids(whole), order(epoch), strict=True) if a != b]
        assert [b for _, b in kept] == [n for n in order(epoch) if n in bad]
        assert not {a for a, _ in kept} & set(bad)


def test_a_replacement_that_is_bad_too_is_replaced(make):
    bad = tuple(n for n in range(SIZE) if n % 4)
    (batch,) = make(samples.Numbers(bad=bad), SIZE, bad="replace", workers=1)
    assert len(batch) == SIZE
    assert not {s[0] for s in batch} & set(bad)
    with pytest.raises(Exception, match="64 other samples were tried"):
        next(iter(make(samples.Numbers(bad=tuple(range(SIZE))), bad="replace")))


def test_too_many_bad_ones_end_the_loop_and_are_listed(make, kind):
    loader = make(samples.Numbers(bad=tuple(range(12))), bad="skip", max_bad=9, **kind)
    with pytest.raises(TooManyBad, match=r"1\d samples of epoch 0 .* and max_bad=9") as caught:
        list(loader)
    assert caught.value.message.count("it is torn") == 5
    assert "more" in caught.value.message
    assert caught.value.hint


def test_an_epoch_may_have_so_many_and_the_next_one_again(make):
    loader = make(samples.Numbers(bad=(3, 17)), bad="skip", max_bad=2)
    for _ in range(3):
        list(loader)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    met = sum(n in (3, 17) for n in order(3)[: 5 * BATCH])
    assert state["bad"] == met > 0
    resumed = make(samples.Numbers(bad=(3, 17)), 1, bad="skip", max_bad=met - 1)
    resumed.load_state_dict(state | {"consumed": 0})
    with pytest.raises(TooManyBad):
        list(resumed)


def test_whatever_a_foreign_data_set_raises_is_bad_but_not_what_the_machine_does(make):
    torn = samples.Foreign({3: ValueError("no image"), 4: OSError("image file is truncated")})
    loader = make(torn, bad="skip")
    assert sorted(ids(loader)) == [n for n in range(40) if n not in (3, 4)]
    assert {error.message for error in loader.bad} == {
        "Foreign[3]: ValueError: no image",
        "Foreign[4]: OSError: image file is truncated",
    }
    for error in (FileNotFoundError(2, "gone"), MemoryError("none left")):
        with pytest.raises(type(error)):
            list(make(samples.Foreign({3: error}), bad="skip"))
    with pytest.raises(ValueError, match="no image"):
        list(make(torn))


def test_a_transform_that_fails_is_no_bad_sample(make):
    loader = make(samples.Numbers(), transform=samples.fails_at_seven, bad="skip", workers=2)
    with pytest.raises(ArithmeticError) as caught:
        list(loader)
    assert caught.value.__notes__ == ["for the sample numbers/7.txt"]


def test_a_batch_that_fails_again_is_warned_about_once(make, caplog):
    loader = make(samples.Numbers(), transform=samples.fails_at_seven)
    for times in (0, 1, 1, 1):
        with pytest.raises(ArithmeticError):
            list(loader)
        told = [r.getMessage() for r in caplog.records if "have failed again" in r.getMessage()]
        assert len(told) == times


# -- threads --------------------------------------------------------------------------------------


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


def test_threads_read_ahead_so_far_and_no_further(make):
    table = samples.Counted(ahead=(1 + 2 * 3) * BATCH)
    loader = make(table, workers=2, prefetch=3)
    for _ in range(3):
        for batch in loader:
            table.taken += len(batch)


def test_processes_read_one_batch_more_ahead_which_waits_here(make, tmp_path):
    """So that none of them waits for its parent."""
    loader = make(samples.Marking(str(tmp_path)), 4, workers=2, prefetch=1, kind="process")
    batches = iter(loader)
    for taken in (1, 2):
        next(batches)
        jobs = list(loader._supply._crew._jobs)
        assert all(job.done.wait(60) for job in jobs)
        assert len(list(tmp_path.iterdir())) == 4 * (taken + 2 * (1 + 1))


def test_batches_come_in_order_though_the_first_is_read_last(make):
    table = samples.Gated(order(0)[0])
    loader = make(table, workers=2)
    opener = threading.Thread(target=lambda: (table.waiting.wait(30), table.gate.set()))
    opener.start()
    assert ids(loader) == order(0)
    opener.join()


def test_closed_it_has_no_threads_and_begins_anew(make):
    loader = make(samples.Numbers(), workers=3)
    batches = iter(loader)
    next(batches)
    assert len(readers()) == 3
    loader.close()
    assert not readers()
    assert ids(batches) == order(0)[BATCH:]
    loader.close()
    with make(samples.Numbers(), workers=1) as other:
        next(iter(other))
    assert not readers()


def test_garbage_has_no_threads_either():
    gc.disable()  # nothing here waits for a collection
    try:
        loader = Loader(samples.Numbers(), BATCH, workers=2, collate=list)
        next(iter(loader))
        ending = readers()
        assert len(ending) == 2
        del loader
        for thread in ending:
            thread.join(30)
            assert not thread.is_alive()
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["threads", "processes"])
def test_a_process_that_ends_without_closing_ends(name):
    code = f"""
import tests.data.samples as samples
from manyhands.data import Loader
if __name__ == "__main__":
    loader = Loader(samples.Numbers(), 7, **{KINDS[name]!r})
    print(next(iter(loader))[0].tolist())
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[")
    assert "Traceback" not in done.stderr


def run(*arguments):
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "PYTHONPATH": path},
    )


# -- processes ------------------------------------------------------------------------------------


def test_processes_read_the_same(make):
    """What all generators give, at any grouping; bad samples; what comes after a jump."""
    table = samples.Foreign({3: ValueError("no image"), 17: ValueError("none")})
    loader = make(table, bad="replace", workers=2, kind="process", transform=samples.double)
    direct = make(table, 5, bad="replace", transform=samples.double)
    state = loader.state_dict()
    for _ in range(2):
        assert flat(loader) == flat(direct)
    loader.load_state_dict(state)
    direct.load_state_dict(state)
    assert flat(loader) == flat(direct)
    assert {e.message for e in loader.bad} == {e.message for e in direct.bad}
    assert len(loader.bad) == 2
    loader.close()
    assert not multiprocessing.active_children()


def test_large_batches_are_as_they_were(make):
    loader = make(samples.Wide(), 16, collate=None, **KINDS["processes"])
    for numbers, images in loader:
        assert images.shape[1:] == (3, 64, 64)
        assert torch.equal(images[:, 2, 5, 60], numbers.to(images.dtype))
        images.add_(1)  # it is the user's own


def test_what_fails_in_a_process_is_told_with_its_traceback(make):
    loader = make(samples.Numbers(), transform=samples.fails_at_seven, **KINDS["processes"])
    with pytest.raises(WorkerError, match="ArithmeticError in a worker process: seven") as caught:
        list(loader)
    assert "fails_at_seven" in caught.value.__notes__[0]


def test_a_process_that_dies_is_named_and_replaced(make, tmp_path):
    victim = order(0)[BATCH + 2]
    table = samples.Deadly(victim, str(tmp_path / "seen"))
    loader = make(table, **KINDS["processes"])
    batches, seen = iter(loader), []
    with pytest.raises(WorkerDied, match=rf"signal 9\) while it read samples .*\b{victim}\b"):
        seen.extend(batches)
    assert ids(seen) == order(0)[:BATCH]
    loader.load_state_dict(loader.state_dict())
    assert ids(loader) == order(0)[BATCH:]


def test_what_cannot_be_sent_to_a_process_is_refused_with_the_remedy(make):
    loader = make(samples.Numbers(), transform=lambda sample: sample, **KINDS["processes"])
    with pytest.raises(UsageError, match="cannot be sent") as caught:
        next(iter(loader))
    assert 'kind="thread"' in caught.value.hint


def test_a_script_that_begins_anew_in_its_workers_is_told_what_it_lacks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from manyhands.data import Loader\n"
        'for batch in Loader(range(9), 3, workers=1, kind="process"): print(batch)\n'
    )
    done = run(script)
    assert done.returncode == 1
    assert "could not begin (exit code 1)" in done.stderr
    assert 'if __name__ == "__main__"' in done.stderr


def test_file_systems_are_opened_by_whoever_reads(make):
    filesystem = fsspec.filesystem("file", skip_instance_cache=True)
    loader = make(samples.Opened(filesystem), **KINDS["processes"])
    opened = flat(loader)
    assert all(pid == reader != os.getpid() for pid, reader in opened)
    assert len({reader for _, reader in opened}) == 1


# -- settings -------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bad": "panic"}, "bad='panic'"),
        ({"max_bad": -1}, "max_bad=-1"),
        ({"max_bad": 1.5}, r"max_bad=1\.5"),
        ({"workers": -1}, "workers=-1"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"kind": "fibre"}, "kind='fibre'"),
        ({"rank": 2, "world": 2}, "rank 2 of a world of 2"),
        ({"batch_size": 0}, "a global batch of 0"),
        ({"batch_size": 41, "drop_last": True}, "do not fill one batch"),
        ({"batch_size": 8.0}, r"batch_size=8\.0"),
        ({"batch_size": "8"}, "batch_size='8'"),
        ({"seed": "one"}, "seed='one'"),
        ({"workers": 1.5}, r"workers=1\.5"),
        ({"device": "nowhere"}, "device='nowhere'"),
        ({"table": Stream()}, "IterableDataset"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(options, words):
    options = {"table": samples.Numbers(), "batch_size": BATCH, **options}
    with pytest.raises(UsageError, match=words) as caught:
        Loader(options.pop("table"), **options)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("environ", "workers", "warned"),
    [
        ({}, 1, False),
        ({}, 10_000, True),
        ({"LOCAL_WORLD_SIZE": "10000"}, 1, True),
        ({"MANYHANDS_LOCAL_PEERS": "10000"}, 1, True),
        ({"LOCAL_WORLD_SIZE": "10000"}, 0, False),
        ({"LOCAL_WORLD_SIZE": "10000", "MANYHANDS_CORES": "1"}, 1, False),
        ({"LOCAL_WORLD_SIZE": "10000", "MANYHANDS_CORES": "1"}, 10_000, True),
    ],
)
def test_more_workers_than_cores_are_warned_about(monkeypatch, caplog, environ, workers, warned):
    for name in ("LOCAL_WORLD_SIZE", "MANYHANDS_LOCAL_PEERS", "MANYHANDS_CORES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        Loader(samples.Numbers(), BATCH, workers=workers)
    assert any("cores" in r.getMessage() for r in caplog.records) == warned


def test_what_is_said_to_fit_fits(monkeypatch, caplog):
    monkeypatch.delenv("MANYHANDS_CORES", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "10000")
    with caplog.at_level(logging.WARNING):
        Loader(samples.Numbers(), BATCH, workers=1)
    assert "workers=0 would fit" in caplog.text


def test_a_run_takes_what_a_loader_says():
    table = samples.Numbers()
    loader = Loader(table, 8, shuffle=False, workers=2, prefetch=3, bad="skip", collate=list)
    source = Source.of(loader)
    assert (source.dataset, source.batch, source.shuffle, source.size) == (table, 8, False, 40)
    assert (source.workers.num, source.workers.kind, source.workers.prefetch) == (2, "thread", 3)
    assert source.rules.policy == "skip"
    assert Source.of(loader, 4).batch == 4
    assert Source.of(DataLoader(table, 8)).rules is None
    with pytest.raises(UsageError, match="so does the run"):
        Source.of(Loader(table, 8, rank=1, world=2))
