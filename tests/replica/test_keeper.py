"""Keeper: whatever goes wrong with saving is said, and the next state is saved all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from manyhands.checkpoint.store import Store
from manyhands.checkpoint.tree import flatten
from manyhands.collectives.messages import Record
from manyhands.core.errors import Malformed, UsageError
from manyhands.core.peers import NO_VIEW
from manyhands.replica.conductor import Base
from manyhands.replica.keeper import Keeper, NotSaved, Saved
from manyhands.replica.options import Options

PATIENCE_S = 120.0  # for a program that loads torch, where others work too
RECORD = Record(b"", NO_VIEW, NO_VIEW, ())
DESCRIPTION = dict.fromkeys(("manyhands", "epochs", "bad_gradients", "resync_every"))


def keeper_of(place, **options):
    state = Mock(flat=lambda copy: flatten({"weight": torch.ones(2)}))
    about = DESCRIPTION | {"optimizers": []}
    return Keeper(Options(checkpoints=place, **options), state, about, every=1)


def test_what_was_loaded_is_not_saved_again_before_something_was_applied(tmp_path):
    """By a peer that is asked to go while it waits for others: all that wait would."""
    keeper_of(tmp_path).save_last(Base(4, bytes(16), RECORD), 3)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    keeper = keeper_of(tmp_path)
    base = keeper.load()
    keeper.save_last(base.open(b"about"), 3)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    keeper.save_last(Base(5, bytes(16), RECORD), 4)
    assert [place.round for place in Store(tmp_path).places()] == [3, 4]


def test_a_place_is_named_without_its_secrets():
    keeper = keeper_of("memory://user:s3cr3t@host/x?sig=AKIA")
    keeper._found = 3
    with pytest.raises(UsageError, match="up to round 3") as caught:
        keeper.check_free()
    assert "s3cr3t" not in str(caught.value)
    assert "AKIA" not in str(caught.value)


def test_an_error_of_any_kind_costs_one_checkpoint(tmp_path, monkeypatch, caplog):
    state = Mock(flat=lambda copy: flatten({"weight": torch.ones(2)}))
    keeper = Keeper(Options(checkpoints=tmp_path), state, {}, every=1)
    fails, save = [OSError("the driver's own words")], keeper._store.save

    def saving(checkpoint):
        if fails:
            raise fails.pop()
        return save(checkpoint)

    monkeypatch.setattr(keeper._store, "save", saving)
    try:
        for round_ in (1, 2):
            keeper._idle.wait(60)
            assert keeper.is_due(round_)
            keeper.copy(Base(round_, b"chain"), round_)
            keeper.stable(round_)
    finally:
        keeper.close()
    failed, saved = (keeper.events.get_nowait() for _ in range(2))
    assert isinstance(failed, NotSaved)
    assert "saving failed by OSError: the driver's own words" in str(failed.error)
    assert isinstance(failed.error.__cause__, OSError)
    assert "round 1 was not saved, and the run goes on" in caplog.text
    assert isinstance(saved, Saved)
    assert saved.round == 2


@pytest.mark.parametrize("every_one", [True, False])
def test_one_that_never_was_stable_is_said_where_none_is_to_be_left_out(tmp_path, every_one):
    keeper = keeper_of(tmp_path, save_all=every_one)
    try:
        for round_ in (1, 2):
            assert keeper.is_due(round_)
            keeper.copy(Base(round_, b"chain", RECORD), round_)
        keeper.stable(2)
    finally:
        keeper.close()
    events = [keeper.events.get_nowait() for _ in range(keeper.events.qsize())]
    assert [event.round for event in events if isinstance(event, Saved)] == [2]
    lost = [event for event in events if isinstance(event, NotSaved)]
    assert [event.round for event in lost] == [1] * every_one
    assert all("before it was sure to stay" in str(event.error) for event in lost)


def test_a_description_that_lacks_a_part_is_no_checkpoint_of_a_run(tmp_path):
    keeper = keeper_of(tmp_path)
    keeper._description = {}
    keeper.save_last(Base(4, bytes(16), RECORD), 3)
    with pytest.raises(Malformed, match="is no checkpoint of a run: 'optimizers'"):
        keeper_of(tmp_path).load()


UNCLOSED = """
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
run = mh.join()
options = {"checkpoints": sys.argv[1], "save_every": 1, "save_all": True}
_, optimizer, loader, _ = run.wrap(model, optimizer, data, epochs=1, **options)
for (x,) in loader:
    model(x).mean().backward()
    optimizer.step()
"""


def test_a_run_that_nobody_has_closed_does_not_keep_its_process(tmp_path):
    """As in a notebook, whose cells know no `with`. What was to be written is."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    command = [sys.executable, "-c", UNCLOSED, str(tmp_path / "saved")]
    ended = subprocess.run(command, env=env, timeout=PATIENCE_S, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert any(place.complete for place in Store(tmp_path / "saved").places())
