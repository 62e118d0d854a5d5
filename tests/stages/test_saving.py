"""Checkpoints of a plan: bit for bit, for any other plan, and never half of one."""

import errno
import logging
import os
import shutil
from collections import Counter

import fsspec
import msgspec
import pytest
import torch
from tests.stages.cases import alone
from tests.stages.deaths import batches, case, layers, pipeline
from tests.stages.threads import run_threads

from manyhands.checkpoint import folder as folders
from manyhands.core.errors import CheckpointError, UsageError
from manyhands.stages import archive
from manyhands.stages.saving import Save, read_index, saves_in, write_shard

PLANS = {
    "one": [(6, [0])],
    "two": [(3, [1]), (3, [0])],
    "three": [(2, [0]), (2, [1]), (2, [2])],
    "four, wide": [(1, [0, 1, 2, 3]), (2, [3, 1], [2, 1]), (1, [2]), (2, [0, 1, 2, 3])],
    "all": [(6, [0, 1])],
}


def sgd(parameters):
    """Momentum, two groups that differ in everything."""
    wide = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() < 2]
    return torch.optim.SGD(
        [
            {"params": wide, "lr": 0.1, "weight_decay": 0.01},
            {"params": rest, "lr": 0.05, "nesterov": True, "momentum": 0.8},
        ],
        lr=1.0,
        momentum=0.9,
    )


def adam(parameters):
    wide = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() < 2]
    return torch.optim.Adam(
        [{"params": wide, "betas": (0.8, 0.95)}, {"params": rest, "amsgrad": True}], lr=0.02
    )


def num_peers(stages):
    return 1 + max(peer for stage in stages for peer in stage[1])


def on_all(stages, act, build=layers, **options):
    """act(pipe) on each peer."""
    models = [build() for _ in range(num_peers(stages))]  # threads have one random generator

    def run(carrier):
        made = models[carrier.rank]
        with pipeline(stages, lambda: made, group=carrier, **options) as pipe:
            return act(pipe)

    return run_threads(num_peers(stages), run)


def state_of(pipe):
    """All that a run goes on from, by layer and parameter."""
    found = {}
    for layer in pipe.layers():
        for name, parameter in layer.module.named_parameters():
            kept = {} if pipe.optimizer is None else pipe.optimizer.state.get(parameter, {})
            groups = [] if pipe.optimizer is None else pipe.optimizer.param_groups
            group = next(g for g in groups if any(p is parameter for p in g["params"]))
            settings = {key: value for key, value in group.items() if key != "params"}
            found[layer.index, name] = parameter.detach().clone(), dict(kept), settings
    return found


def go_on(pipe, end):
    losses = {}
    while (number := pipe.num_steps) < end:
        x, y, _ = batches()[number]
        losses[number] = pipe.step(x, y)
    return losses


def train_and_save(stages, url, *ends, keep=3, **options):
    def act(pipe):
        for end in ends:
            go_on(pipe, end)
            pipe.save(str(url), {"end": end}, keep=keep)
        return state_of(pipe)

    return on_all(stages, act, **options)


def loaded(stages, url, **options):
    """(num_steps, extra, state) of every peer, or its CheckpointError."""

    def act(pipe):
        try:
            extra = pipe.load(str(url))
        except CheckpointError as error:
            return error
        return pipe.num_steps, extra, state_of(pipe)

    return on_all(stages, act, **options)


def names_in(path):
    return sorted(os.listdir(path)) if path.exists() else []


def steps_in(path):
    """Of the indexes, and of the folders with shards."""
    names = names_in(path)
    indexes = [int(n.split("-")[1]) for n in names if n.endswith(".json")]
    return indexes, [int(n.split("-")[1]) for n in names if not n.endswith(".json")]


@pytest.mark.parametrize("optimizer", [sgd, adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("name", PLANS)
def test_bit_for_bit(tmp_path, name, optimizer):
    stages = PLANS[name]
    before = train_and_save(stages, tmp_path, 3, optimizer=optimizer)
    after = loaded(stages, tmp_path, optimizer=optimizer)
    for wanted, (num_steps, extra, state) in zip(before, after, strict=True):
        assert (num_steps, extra) == (3, {"end": 3})
        assert state.keys() == wanted.keys()
        for key, (parameter, kept, settings) in wanted.items():
            torch.testing.assert_close(state[key][0], parameter, rtol=0, atol=0)
            assert state[key][1].keys() == kept.keys()
            assert kept
            for part, value in kept.items():
                assert type(state[key][1][part]) is type(value)
                torch.testing.assert_close(state[key][1][part], value, rtol=0, atol=0)
            assert state[key][2] == settings


@pytest.mark.parametrize("optimizer", [sgd, adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("new", PLANS)
@pytest.mark.parametrize("old", PLANS)
def test_cut_anew(tmp_path, old, new, optimizer):
    train_and_save(PLANS[old], tmp_path, 3, optimizer=optimizer)

    def act(pipe):
        pipe.load(str(tmp_path))
        losses = go_on(pipe, 6)
        return losses, {layer.index: layer.module.state_dict() for layer in pipe.layers()}

    wanted_losses, modules = alone(case(PLANS["one"])._replace(optimizer=optimizer))
    seen = set()
    for losses, states in on_all(PLANS[new], act, optimizer=optimizer):
        assert sorted(losses) == [3, 4, 5]
        for number, loss in losses.items():
            assert loss == pytest.approx(wanted_losses[number], rel=1e-9)
        for index, state in states.items():
            seen.add(index)
            torch.testing.assert_close(
                state, dict(modules[index].state_dict()), rtol=1e-9, atol=1e-12
            )
    assert seen == set(range(6))


@pytest.mark.parametrize("new", PLANS)
def test_learning_rates_that_change(tmp_path, new):
    """A scheduler's state is the caller's: it goes into `extra`, the rates are in the shards."""

    def scheduler_of(pipe):
        if pipe.optimizer is None:
            return None
        return torch.optim.lr_scheduler.MultiStepLR(pipe.optimizer, [2, 4], gamma=0.3)

    def train(pipe, scheduler, end):
        while pipe.num_steps < end:
            go_on(pipe, pipe.num_steps + 1)
            if scheduler is not None:
                scheduler.step()

    def whole(pipe):
        train(pipe, scheduler_of(pipe), 6)
        return state_of(pipe)

    def first(pipe):
        scheduler = scheduler_of(pipe)
        train(pipe, scheduler, 3)
        pipe.save(str(tmp_path), {"scheduler": scheduler and scheduler.state_dict()})

    def second(pipe):
        scheduler = scheduler_of(pipe)
        state = pipe.load(str(tmp_path))["scheduler"]
        assert isinstance(state["milestones"], Counter)
        if scheduler is not None:
            scheduler.load_state_dict(state)
        train(pipe, scheduler, 6)
        return state_of(pipe)

    (wanted,) = on_all(PLANS["one"], whole, optimizer=sgd)
    on_all(PLANS["two"], first, optimizer=sgd)
    for state in on_all(PLANS[new], second, optimizer=sgd):
        for key, (parameter, _, settings) in state.items():
            torch.testing.assert_close(parameter, wanted[key][0], rtol=1e-9, atol=1e-12)
            assert settings["lr"] == pytest.approx(wanted[key][2]["lr"], rel=1e-12)


def newest(path):
    """(index, shards' folder) of the newest checkpoint."""
    *_, index = [name for name in names_in(path) if name.endswith(".json")]
    return path / index, path / index.removesuffix(".json")


def tensors_of(path):
    return sorted(newest(path)[1].rglob("*.safetensors"))[1]


def change(file, position=-5):
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def train_other(path):
    """Another run with the same plan, saved after the same steps."""
    other = path.parent / f"{path.name}-other"
    train_and_save(PLANS["three"], other, 2, 4)
    return other


def mix(path, other):
    """A shard of the newest checkpoint is that of the other's."""
    own, foreign = tensors_of(path).parent, tensors_of(other).parent
    assert own.name == foreign.name
    shutil.rmtree(own)
    shutil.copytree(foreign, own)


HARMS = {
    "a shard's values": lambda path: change(tensors_of(path)),
    "a shard's end": lambda path: os.truncate(tensors_of(path), 200),
    "a shard's tensors": lambda path: tensors_of(path).unlink(),
    "a shard's manifest": lambda path: tensors_of(path).with_suffix(".json").unlink(),
    "a shard's manifest's text": lambda path: change(tensors_of(path).with_suffix(".json"), 40),
    "a shard": lambda path: shutil.rmtree(tensors_of(path).parent),
    "a shard of another run": lambda path: mix(path, train_other(path)),
    "all shards": lambda path: shutil.rmtree(newest(path)[1]),
    "the index's text": lambda path: change(newest(path)[0], 120),
    "the index's end": lambda path: os.truncate(newest(path)[0], 90),
    "the index": lambda path: os.truncate(newest(path)[0], 0),
    "the index's format": lambda path: newest(path)[0].write_text(
        '{"manyhands_stages": 99, "digest": "", "index": {}}'
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_broken_one_is_named_and_the_one_before_it_used(tmp_path, caplog, harm):
    train_and_save(PLANS["three"], tmp_path, 2, 4)
    HARMS[harm](tmp_path)
    caplog.set_level(logging.WARNING)
    answers = loaded(PLANS["two"], tmp_path)
    assert [answer[:2] for answer in answers] == [(2, {"end": 2})] * 2
    passed_over = [r.getMessage() for r in caplog.records if "passed over" in r.getMessage()]
    assert len(passed_over) == 2
    assert all("checkpoint of step 4" in said for said in passed_over)
    assert all(str(newest(tmp_path)[1]) in said for said in passed_over), passed_over


def test_another_kind_of_optimizer(tmp_path):
    """What Adam keeps is of no use to SGD, which would go on without a word."""
    train_and_save(PLANS["two"], tmp_path, 2, optimizer=sgd)
    for answer in loaded(PLANS["three"], tmp_path, optimizer=adam):
        assert isinstance(answer, CheckpointError)
        assert "saved with the optimizer SGD, here it is Adam" in answer.message
        assert "without an optimizer" in answer.hint

    def act(pipe):
        pipe.load(str(tmp_path))
        pipe.optimize(adam)
        return pipe.num_steps, go_on(pipe, 4)

    for num_steps, losses in on_all(PLANS["two"], act, optimizer=None):
        assert num_steps == 2
        assert sorted(losses) == [2, 3]


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"module": {}},
        {"module": [], "optimizer": {}, "settings": {}},
        {"module": {}, "optimizer": {"weight": {}}, "settings": {}},
    ],
)
def test_a_whole_file_with_something_else_in_it(tmp_path, state):
    train_and_save(PLANS["one"], tmp_path, 2)
    index, folder = newest(tmp_path)
    (save,) = saves_in(str(tmp_path))
    (shard,) = read_index(str(tmp_path), save).shards
    shutil.rmtree(folder)
    write_shard(str(tmp_path), save, shard, dict.fromkeys(shard.layers, state))
    (answer,) = loaded(PLANS["one"], tmp_path)
    assert isinstance(answer, CheckpointError)
    assert "is no layer's state" in answer.message
    assert index.exists()


def test_only_broken_ones(tmp_path):
    train_and_save(PLANS["three"], tmp_path, 2)
    change(tensors_of(tmp_path))
    for answer in loaded(PLANS["two"], tmp_path):
        assert isinstance(answer, CheckpointError)
        assert "no checkpoint in" in answer.message
        assert "digest" in answer.message


def test_none(tmp_path):
    assert [answer[:2] for answer in loaded(PLANS["two"], tmp_path / "new")] == [(0, None)] * 2


def test_another_model_restores_nothing(tmp_path):
    """Not even on the peers whose layers fit."""
    train_and_save(PLANS["two"], tmp_path, 2)

    def other():
        made = layers()
        made[1] = torch.nn.Linear(6, 6, bias=False).double()
        return made

    def act(pipe):
        before = state_of(pipe)
        with pytest.raises(CheckpointError, match=r"peer bob: layer 1 .*bias is only saved"):
            pipe.load(str(tmp_path))
        after = state_of(pipe)
        assert pipe.num_steps == 0
        assert before
        assert all(torch.equal(before[key][0], after[key][0]) for key in before)

    on_all(PLANS["two"], act, build=other)


def test_a_full_disk_of_one_peer(tmp_path, monkeypatch):
    usual = folders.create_locked

    def full(path):
        if "0002-0004" in str(path):
            raise OSError(errno.ENOSPC, "full")
        return usual(path)

    def act(pipe):
        go_on(pipe, 2)
        pipe.save(str(tmp_path))
        go_on(pipe, 3)
        if pipe.me == 0:
            monkeypatch.setattr(folders, "create_locked", full)
        go_on(pipe, 4)
        with pytest.raises(CheckpointError) as caught:
            pipe.save(str(tmp_path))
        go_on(pipe, 5)  # peer 0 has removed what was written of it
        left = steps_in(tmp_path)
        if pipe.me == 0:
            monkeypatch.setattr(folders, "create_locked", usual)
        losses = go_on(pipe, 6)
        pipe.save(str(tmp_path))
        return caught.value, left, losses

    losses, _ = alone(case(PLANS["one"]))
    for error, left, own in on_all(PLANS["three"], act):
        assert "peer bob" in error.message
        assert "0002-0004" in error.message
        assert "No space left" in error.message
        assert "make room" in error.hint
        assert left == ([2], [2])
        assert own[5] == pytest.approx(losses[5], rel=1e-9)
    assert steps_in(tmp_path) == ([2, 6], [2, 6])


def test_no_place_for_it(tmp_path):
    (tmp_path / "file").write_text("")

    def act(pipe):
        go_on(pipe, 1)
        for url, words in ((str(tmp_path / "file"), "Not a directory"), ("nosuch://x", "nosuch")):
            with pytest.raises(CheckpointError, match=words):
                pipe.save(url)
        with pytest.raises(UsageError, match="keep=0"):
            pipe.save(str(tmp_path), keep=0)
        with pytest.raises(CheckpointError, match=r"extra\.t is a tensor"):
            pipe.save(str(tmp_path), {"t": torch.ones(1)})
        go_on(pipe, 2)

    on_all(PLANS["two"], act)
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_are_kept(tmp_path, keep):
    train_and_save(PLANS["three"], tmp_path, 1, 2, 3, 4, keep=keep)
    wanted = [1, 2, 3, 4][-keep:]
    assert steps_in(tmp_path) == (wanted, wanted)

    def act(pipe):
        pipe.load(str(tmp_path))
        go_on(pipe, 5)
        pipe.save(str(tmp_path), keep=keep)
        pipe.save(str(tmp_path), keep=keep)  # the same step once more
        go_on(pipe, 6)
        pipe.save(str(tmp_path), keep=keep)

    on_all(PLANS["two"], act)
    wanted = [5, 6][-keep:]
    assert steps_in(tmp_path) == (wanted, wanted)


def test_a_save_that_breaks_off_takes_nothing_along(tmp_path, monkeypatch):
    """Not even the last of one that are kept; its rest goes with the next save."""
    train_and_save(PLANS["three"], tmp_path, 2, keep=1)

    def broken_off(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(archive, "write_index", broken_off)
        with pytest.raises(KeyboardInterrupt):
            on_all(PLANS["one"], lambda pipe: (go_on(pipe, 4), pipe.save(str(tmp_path), keep=1)))
    assert steps_in(tmp_path) == ([2], [2, 4])
    assert loaded(PLANS["two"], tmp_path)[0][0] == 2
    train_and_save(PLANS["two"], tmp_path, 3, keep=1)
    assert steps_in(tmp_path) == ([3], [3])


def test_two_saves_of_one_step_do_not_mix(tmp_path, monkeypatch):
    """One with other values breaks off after its shards: the first counts as it was."""
    wanted = train_and_save(PLANS["two"], tmp_path, 2, optimizer=adam)

    def broken_off(*_):
        raise CheckpointError("as if the process had died here")

    with monkeypatch.context() as patch:
        patch.setattr(archive, "write_index", broken_off)
        patch.setattr(archive, "discard", lambda *_: None)
        with pytest.raises(CheckpointError, match="died here"):
            train_and_save(PLANS["two"], tmp_path, 2, optimizer=sgd)
    assert steps_in(tmp_path) == ([2], [2, 2])
    answers = loaded(PLANS["two"], tmp_path, optimizer=adam)
    for (num_steps, _, state), before in zip(answers, wanted, strict=True):
        assert num_steps == 2
        assert all(torch.equal(state[key][0], before[key][0]) for key in before)
        assert all(state[key][1].keys() == before[key][1].keys() for key in before)


def test_behind_a_url():
    url = "memory://stages/saved"
    train_and_save(PLANS["three"], url, 2, 4, 6, keep=2)
    # By one peer: those who read a file of that kind at once share a position in it.
    assert [answer[:2] for answer in loaded(PLANS["one"], url)] == [(6, {"end": 6})]
    system = fsspec.filesystem("memory")
    names = [entry.rpartition("/")[2] for entry in system.ls("/stages/saved", detail=False)]
    assert sorted(int(name.split("-")[1]) for name in names) == [4, 4, 6, 6]
    system.rm("/stages", recursive=True)


def test_extra_comes_back_as_it_was(tmp_path):
    extra = {"a": (1, [2.5, None]), "b": {3: "c"}, "nan": float("inf"), "big": 1 << 70}

    def act(pipe):
        go_on(pipe, 1)
        pipe.save(str(tmp_path), extra if pipe.me == 0 else None)
        return pipe.load(str(tmp_path))

    assert on_all(PLANS["two"], act) == [extra, extra]


@pytest.mark.parametrize(
    "said", [{"num_steps": 1, "token": "x/../../away"}, {"num_steps": -1, "token": "0" * 24}]
)
def test_what_another_peer_calls_a_save_names_no_other_place(said):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(said), type=Save)
