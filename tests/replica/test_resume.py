"""What a run that was saved may go on as, and what is said of one that may not."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.core.errors import UsageError
from manyhands.replica import description
from manyhands.replica.description import Mismatch, differences, resumable

PATIENCE_S = 60.0


def train(
    folder,
    *,
    width=2,
    url=None,
    epochs=1,
    min_peers=1,
    rate=0.1,
    lease_s=10.0,
    name=None,
    wrapped=lambda: None,
    each=lambda round_: None,
    **options,
):
    """One peer, from the beginning to the end of its run; how many rounds it has trained."""
    torch.manual_seed(3)
    model = nn.Linear(width, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    data = DataLoader(TensorDataset(torch.ones(4, width)), batch_size=2)
    with mh.join(url, min_peers=min_peers, lease_s=lease_s, name=name) as run:
        options = {"checkpoints": str(folder), "resume": True, **options}
        _, _, loader, _ = run.wrap(model, optimizer, data, epochs=epochs, **options)
        wrapped()
        trained = 0
        for _ in range(epochs):
            for (x,) in loader:
                each(run.round)
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                trained += run.round_closed
    return trained


def test_another_release_goes_on(tmp_path, monkeypatch):
    assert train(tmp_path, resume=False) == 2
    monkeypatch.setattr(description, "__version__", "99.0")
    assert train(tmp_path, epochs=3) == 4


def test_with_another_torch_it_goes_on_and_says_so(tmp_path, monkeypatch, caplog):
    train(tmp_path, resume=False)
    monkeypatch.setattr(description, "_TORCH", "99.0")
    assert train(tmp_path, epochs=3) == 4
    said = f"torch 99.0, and the one that was saved {torch.__version__}: they are the same up to"
    assert caplog.text.count(said) == 1


def test_settings_of_optimizers_that_only_one_release_of_torch_has():
    options = {"epochs": 1, "bad_gradients": "skip", "resync_every": 9, "manyhands": "0.1.0"}
    saved = {**options, "optimizers": [{"class": "SGD", "lr": 0.1, "gone": 1}]}
    mine = {**options, "optimizers": [{"class": "SGD", "lr": 0.1, "new": None}]}
    assert differences(saved, mine)
    assert not differences(resumable(saved, mine), mine)
    mine["optimizers"][0]["lr"] = 0.2
    assert differences(resumable(saved, mine), mine) == [
        "optimizers.0.lr is 0.1 there and 0.2 here"
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"width": 3}, "parameters.weight is float32[1, 2] there and float32[1, 3] here"),
        ({"rate": 0.5}, "optimizers.0.lr is 0.1 there and 0.5 here"),
    ],
)
def test_something_else_is_refused_by_name(tmp_path, changed, said):
    train(tmp_path, resume=False)
    with pytest.raises(Mismatch) as caught:
        train(tmp_path, **changed)
    assert said in str(caught.value)
    assert "than the one that was saved" in str(caught.value)
    assert "resume with the script, data and options that saved it" in str(caught.value)


def test_a_run_does_not_begin_among_what_an_earlier_one_has_saved(tmp_path):
    """Its own checkpoints, of fewer rounds, would go first, and it would go on from the other's."""
    train(tmp_path, resume=False, epochs=3)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="of an earlier run, up to round 6") as caught:
        train(tmp_path, resume=False)
    assert str(tmp_path) in str(caught.value)
    assert "resume=True" in caught.value.hint
    assert sorted(tmp_path.iterdir()) == before
    assert train(tmp_path, resume=False, checkpoints=None) == 2
    assert train(tmp_path, resume="auto", epochs=4) == 2


def test_who_joins_finds_what_its_own_run_has_saved(tmp_path):
    saved, joined = threading.Event(), threading.Event()

    def wait(round_):
        if round_ == 3:  # so the state after 1 is written: see save_all
            saved.set()
            assert joined.wait(PATIENCE_S)

    options = {"resume": False, "save_every": 1, "save_all": True, "epochs": 9}
    place = {"url": "local:///joined", "lease_s": 600.0}
    with ThreadPoolExecutor() as pool:
        first = pool.submit(train, tmp_path, **options, **place, each=wait)
        assert saved.wait(PATIENCE_S)
        try:
            train(tmp_path, **options, **place, wrapped=joined.set)
        finally:
            joined.set()
        assert first.result(PATIENCE_S) == 18


def test_peers_that_resume_at_once_are_compared(tmp_path):
    """Whoever leads: one that would end the run sooner must not end it for the others."""
    train(tmp_path, resume=False)
    ends: queue.SimpleQueue = queue.SimpleQueue()

    def peer(name, epochs):
        # The one that may begin waits for another, however long that takes to come.
        place = {"url": "local:///together", "name": name, "min_peers": 2, "lease_s": 600.0}
        try:
            ends.put((name, train(tmp_path, epochs=epochs, **place)))
        except Mismatch as error:
            ends.put((name, error))

    epochs = {"a": 3, "b": 2}
    started = [threading.Thread(target=peer, args=pair, daemon=True) for pair in epochs.items()]
    for thread in started:
        thread.start()
    refused, error = ends.get(timeout=PATIENCE_S)
    assert isinstance(error, Mismatch)
    (other,) = set(epochs) - {refused}
    assert f"epochs is {epochs[other]} there and {epochs[refused]} here" in str(error)
    # Should it still wait. If it does not, this one may come too late.
    started.append(threading.Thread(target=peer, args=("c", epochs[other]), daemon=True))
    started[-1].start()
    rounds = dict(ends.get(timeout=PATIENCE_S) for _ in range(2))
    assert rounds[other] == 2 * (epochs[other] - 1)  # after what was saved
    for thread in started:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
