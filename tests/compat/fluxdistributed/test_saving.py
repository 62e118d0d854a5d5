"""Checkpoints: a resumed training is the uninterrupted one."""

import json

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

from manyhands.compat.fluxdistributed import load_weights, prepare_training, train
from manyhands.compat.fluxdistributed.loop import Replica
from manyhands.core.errors import CheckpointError, UsageError
from tests.compat.fluxdistributed.models import ADAM, CLASSES, FEATURES, data, normed, quiet, same


class Stop(Exception):
    pass


def table():
    return data(52, dtype=torch.float32)


def prepared(num_devices=2, batchsize=4, opt=ADAM, **options):
    devices = ["cpu"] * num_devices
    return prepare_training(normed(), table(), devices, opt, batchsize, **{"epochs": 2, **options})


def halving(step, optimizer):
    return 0.1 * 0.9**step


def interrupted(folder, at, **how):
    """A training that ends by an error before that step; what it has saved is left."""

    def stops(step, optimizer):
        if step == at:
            raise Stop
        return halving(step, optimizer)

    setup, buffer = prepared(**how)
    with pytest.raises(Stop):
        train(F.cross_entropy, setup, buffer, sched=stops, save=folder, eval_every=3, logger=quiet)


@pytest.mark.parametrize("at", [4, 6, 11])
def test_a_resumed_training_is_the_uninterrupted_one_to_the_bit(tmp_path, at):
    whole, buffer = prepared()
    expected = train(F.cross_entropy, whole, buffer, sched=halving, log_every=1, logger=quiet)
    interrupted(tmp_path, at)
    setup, buffer = prepared()
    result = train(
        *(F.cross_entropy, setup, buffer),
        sched=halving,
        save=tmp_path,
        resume=True,
        log_every=1,
        logger=quiet,
    )
    assert same(setup.models[0], whole.models[0])
    assert same(setup.models[1], whole.models[0])
    assert (result.steps, result.skipped) == (expected.steps, 0) == (14, 0)
    done = (at - 1) // 3 * 3 if at % 3 else at
    assert [row["step"] for row in result.history] == list(range(done + 1, 15))
    ours = [row["train/loss"] for row in result.history]
    assert ours == [row["train/loss"] for row in expected.history[done:]]


def test_a_resumed_training_is_the_uninterrupted_one_with_dropout_and_a_torch_scheduler(tmp_path):
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sched = torch.optim.lr_scheduler.MultiStepLR(opt, [2, 4, 9], gamma=0.5)
        return *prepare_training(model, table(), ["cpu"], opt, 8, cycles=12), sched

    whole, buffer, sched = made()
    expected = train(F.cross_entropy, whole, buffer, sched=sched, log_every=1, logger=quiet)
    first, buffer, sched = made()
    first.steps = 5
    train(F.cross_entropy, first, buffer, sched=sched, save=tmp_path, logger=quiet)
    torch.manual_seed(99)
    second, buffer, sched = made()
    result = train(
        F.cross_entropy, second, buffer, sched=sched, resume=tmp_path, log_every=1, logger=quiet
    )
    assert same(second.models[0], whole.models[0])
    assert [row["lr"] for row in result.history] == [row["lr"] for row in expected.history[5:]]
    assert result.history[-1]["lr"] == pytest.approx(0.0125)


def test_another_number_of_devices_goes_on_with_the_same_rows(tmp_path):
    def plain(num_devices, batchsize):
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, CLASSES).double()
        return prepare_training(model, data(52), ["cpu"] * num_devices, ADAM, batchsize, epochs=2)

    whole, buffer = plain(1, 8)
    train(F.cross_entropy, whole, buffer, logger=quiet)
    first, buffer = plain(4, 2)
    first.steps = 5
    train(F.cross_entropy, first, buffer, save=tmp_path, logger=quiet)
    second, buffer = plain(2, 4)
    train(F.cross_entropy, second, buffer, resume=tmp_path, logger=quiet)
    for name, tensor in whole.models[0].state_dict().items():
        torch.testing.assert_close(second.models[0].state_dict()[name], tensor)


def test_weights_are_safetensors_that_anybody_reads(tmp_path):
    setup, buffer = prepared()
    train(F.cross_entropy, setup, buffer, save=tmp_path, logger=quiet)
    newest = sorted(tmp_path.glob("*.safetensors"))[-1]
    found = safetensors.torch.load_file(newest)
    for name, tensor in setup.models[0].state_dict().items():
        assert torch.equal(found[f"state.model.{name}"], tensor)
    model = normed(seed=5)
    model.load_state_dict(load_weights(tmp_path))
    assert same(model, setup.models[0])
    about = json.loads(newest.with_suffix(".json").read_text())
    assert about["round"] == 14


def test_there_are_checkpoints_at_each_evaluation_and_at_the_end(tmp_path):
    setup, buffer = prepared()
    train(F.cross_entropy, setup, buffer, save=tmp_path, eval_every=5, logger=quiet)
    rounds = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("*.json"))
    assert rounds == [5, 10, 14]


def test_what_was_skipped_and_split_is_remembered(tmp_path):
    setup, buffer = prepared()
    full, count = setup.models[0].forward, [0]

    def forward(x):
        count[0] += 1
        if count[0] == 2 or len(x) > 2:
            raise MemoryError
        return full(x)

    setup.models[0].forward = forward
    setup.steps = 4
    first = train(F.cross_entropy, setup, buffer, on_oom="split", save=tmp_path, logger=quiet)
    again, buffer = prepared()
    result = train(F.cross_entropy, again, buffer, resume=tmp_path, save=tmp_path, logger=quiet)
    assert first.skipped == 0
    assert result.steps == 14
    about = json.loads(sorted(tmp_path.glob("*.json"))[-1].read_text())["about"]
    assert ["pieces", 4] in about


def test_true_begins_anew_where_there_is_nothing_and_a_folder_must_have_something(tmp_path):
    setup, buffer = prepared()
    result = train(F.cross_entropy, setup, buffer, save=tmp_path, resume=True, logger=quiet)
    assert result.steps == 14
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        train(F.cross_entropy, setup, buffer, resume=tmp_path / "other", logger=quiet)
    with pytest.raises(UsageError, match="no weights"):
        load_weights(tmp_path / "other")


@pytest.mark.parametrize("change", [{"seed": 1}, {"batchsize": 3}, {"classes": [0, 1]}])
def test_a_checkpoint_of_another_training_is_refused(tmp_path, change):
    setup, buffer = prepared()
    train(F.cross_entropy, setup, buffer, save=tmp_path, logger=quiet)
    other, buffer = prepared(**change)
    with pytest.raises(UsageError, match=r"52 samples, 8 rows a step, seed 0; this one has"):
        train(F.cross_entropy, other, buffer, resume=tmp_path, logger=quiet)


def test_a_broken_checkpoint_is_passed_over(tmp_path, caplog):
    setup, buffer = prepared()
    train(F.cross_entropy, setup, buffer, save=tmp_path, eval_every=5, logger=quiet)
    newest = sorted(tmp_path.glob("*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-8])
    again, buffer = prepared()
    result = train(F.cross_entropy, again, buffer, resume=tmp_path, log_every=1, logger=quiet)
    assert result.history[0]["step"] == 11
    assert same(again.models[0], setup.models[0])
    assert any("is passed over" in record.message for record in caplog.records)


def test_a_folder_that_cannot_be_written_is_told_and_at_the_end_raised(tmp_path, caplog):
    place = tmp_path / "file"
    place.write_text("")
    setup, buffer = prepared()
    with pytest.raises(CheckpointError):
        train(F.cross_entropy, setup, buffer, save=place / "in", eval_every=7, logger=quiet)
    assert any("no checkpoint of step 7" in record.message for record in caplog.records)
    assert not same(setup.models[0], normed())  # it was trained all the same
    assert same(setup.models[0], setup.models[1])


def test_a_training_is_not_saved_among_anothers_checkpoints(tmp_path):
    """The older one's last step is later, so it would be taken for the newer one's."""
    older, other = tmp_path / "older", tmp_path / "other"
    setup, buffer = prepared()
    train(F.cross_entropy, setup, buffer, save=older, logger=quiet)
    weights = load_weights(older)
    short, buffer = prepared(seed=3, epochs=1)
    with pytest.raises(UsageError, match="an earlier training, up to step 14") as caught:
        train(F.cross_entropy, short, buffer, save=older, logger=quiet)
    assert "resume=True" in caught.value.hint
    assert same(short.models[0], normed())  # before anything was done
    train(F.cross_entropy, short, buffer, save=other, logger=quiet)
    again, buffer = prepared(seed=3)
    with pytest.raises(UsageError, match="an earlier training, up to step 14"):
        train(F.cross_entropy, again, buffer, resume=other, save=older, logger=quiet)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load_weights(older).items())
    result = train(F.cross_entropy, again, buffer, resume=other, save=other, logger=quiet)
    assert result.steps == 14


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"opt": torch.optim.Adam}, r"with SGD and StepLR; this one has Adam and no torch"),
        ({"sched": lambda step, _: 0.1}, r"with SGD and StepLR; this one has SGD and no torch"),
        (
            {"sched": torch.optim.lr_scheduler.ExponentialLR},
            r"with SGD and StepLR; this one has SGD and ExponentialLR",
        ),
    ],
)
def test_another_kind_of_optimizer_or_scheduler_is_refused(tmp_path, changed, said):
    """Before anything is done: torch would fail late, or begin its schedule anew in silence."""

    def made(sched, opt=None):
        model = normed()
        opt = sgd(model) if opt is None else opt(model.parameters())
        if isinstance(sched, type):
            sched = sched(opt, gamma=0.5)
        return *prepare_training(model, table(), ["cpu"], opt, 8, cycles=3), sched

    setup, buffer, _ = made(None)
    sched = torch.optim.lr_scheduler.StepLR(setup.opt, 2)
    train(F.cross_entropy, setup, buffer, sched=sched, save=tmp_path, logger=quiet)
    other, buffer, sched = made(changed.get("sched"), changed.get("opt"))
    with pytest.raises(UsageError, match=said):
        train(F.cross_entropy, other, buffer, sched=sched, resume=tmp_path, logger=quiet)
    assert same(other.models[0], normed())


def test_a_function_may_become_another_but_no_scheduler(tmp_path):
    model = normed()
    setup, buffer = prepare_training(model, table(), ["cpu"], sgd(model), 8, cycles=3)
    train(F.cross_entropy, setup, buffer, sched=halving, save=tmp_path, logger=quiet)
    setup, buffer = prepare_training(model, table(), ["cpu"], sgd(model), 8, cycles=3)
    train(F.cross_entropy, setup, buffer, resume=tmp_path, logger=quiet)
    sched = torch.optim.lr_scheduler.StepLR(setup.opt, 2)
    with pytest.raises(UsageError, match="SGD and no torch scheduler; this one has SGD and StepLR"):
        train(F.cross_entropy, setup, buffer, sched=sched, resume=tmp_path, logger=quiet)


def test_a_checkpoint_that_does_not_say_its_kinds_is_taken(tmp_path, monkeypatch):
    """Those of earlier releases."""
    state = Replica.state
    monkeypatch.setattr(
        Replica, "state", lambda self: {k: v for k, v in state(self).items() if k != "kinds"}
    )
    interrupted(tmp_path, 7)
    monkeypatch.undo()
    setup, buffer = prepared()
    result = train(F.cross_entropy, setup, buffer, sched=halving, resume=tmp_path, logger=quiet)
    assert result.steps == 14


def test_a_training_that_drops_the_last_rows_is_another_one(tmp_path):
    setup, buffer = prepared(drop_last=True)
    train(F.cross_entropy, setup, buffer, save=tmp_path, logger=quiet)
    other, buffer = prepared()
    with pytest.raises(UsageError, match=r"seed 0, drop_last; this one has .*, seed 0\n"):
        train(F.cross_entropy, other, buffer, resume=tmp_path, logger=quiet)


def test_if_no_checkpoint_can_be_read_the_training_does_not_begin_anew(tmp_path):
    setup, buffer = prepared()
    train(F.cross_entropy, setup, buffer, save=tmp_path, eval_every=5, logger=quiet)
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-8])
    again, buffer = prepared()
    for resume in (True, tmp_path):
        with pytest.raises(CheckpointError, match="none can be read"):
            train(F.cross_entropy, again, buffer, save=tmp_path, resume=resume, logger=quiet)
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_a_first_checkpoint_that_broke_off_is_none(tmp_path):
    """What a process leaves that is killed while it saves for the first time."""
    setup, buffer = prepared()
    setup.steps = 3
    train(F.cross_entropy, setup, buffer, save=tmp_path, logger=quiet)
    (manifest,) = tmp_path.glob("*.json")
    manifest.unlink()
    again, buffer = prepared()
    result = train(F.cross_entropy, again, buffer, save=tmp_path, resume=True, logger=quiet)
    assert result.steps == 14
