"""What a Trainer may be told, compared with a plain loop, and what it refuses."""

from __future__ import annotations

import io
import itertools
import threading
from contextlib import suppress
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

import manyhands as mh
from manyhands.core.errors import LinkTimeout, UsageError
from manyhands.core.peers import PeerState
from manyhands.data.loader import Loader
from manyhands.data.table import BadSample
from manyhands.observe import Desk, EventLog, merge
from manyhands.trainer import trainer as module
from tests.replica.loops import (
    BATCH,
    COMING_S,
    SEED,
    SIZE,
    Kit,
    Plain,
    Points,
    Recipe,
    adam,
    mean_loss,
    net,
)

ROUNDS = -(-SIZE // BATCH)
EPOCHS = 4
criterion = nn.functional.cross_entropy
_runs = itertools.count()
HELD_OUT = Points(40)
HELD_OUT.x, HELD_OUT.y = HELD_OUT.x[SIZE:], HELD_OUT.y[SIZE:]


class Quiet:
    def __init__(self):
        self.rows, self.params, self.ends = [], [], []

    def log_metrics(self, metrics, step):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params):
        self.params.append((len(self.rows), dict(params)))

    def finalize(self, status):
        self.ends.append(status)


@pytest.fixture(params=[1, 3])
def number(request):
    return request.param


def kit():
    torch.manual_seed(11)
    model = net()
    return model, adam(model)


def data():
    return DataLoader(Points(), BATCH, shuffle=True)


def held_out():
    return DataLoader(HELD_OUT, 5)


def fit(make, number=1, evaluation=held_out, train=data, **options):
    """By so many peers, as threads; `make` gives each a Trainer. Returns what each has."""
    url, results, errors = f"local:///trainers-{next(_runs)}", {}, []
    trainers = [make() for _ in range(number)]  # here: threads share the random numbers

    def peer(place):
        try:
            trainer, where = trainers[place], {"name": f"peer-{place}", "min_peers": number}
            with mh.join(url, **where, seed=SEED) as run:
                trainer.model.register_forward_pre_hook(lambda *_: let_come(run, number))
                given = evaluation() if evaluation else None
                history = trainer.fit(train(), given, run=run, shares="equal", **options)
            results[place] = trainer, history
        except BaseException as error:  # noqa: BLE001  (the test shows it)
            errors.append(error)

    threads = [threading.Thread(target=peer, args=(n,), daemon=True) for n in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert len(results) == number
    return [results[place] for place in range(number)]


def let_come(run, number):
    """A newcomer needs rounds that go on, but not that quickly."""
    rounds = run._session.conductor.rounds
    if len(rounds.members) < number:
        with suppress(LinkTimeout):
            rounds.outlook.wait_for_view(
                lambda view: len(view.peers(PeerState.ACTIVE)) >= number, COMING_S
            )


def plain(scheduler=None, each_round=False, watch="val/loss", epochs=EPOCHS):
    """The same without anything of ours, but for the order of the samples."""
    model, optimizer = kit()
    schedule = scheduler(optimizer) if scheduler else None
    recipe = Recipe(lambda *given: None)
    loader, rows = Plain(recipe, Kit(model, optimizer, None, {})).loader(), []
    for _ in range(epochs):
        total = 0.0
        for batch in loader:
            loss = mean_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += float(loss.detach()) * len(batch[1])
            if each_round:
                schedule.step()
        with torch.no_grad():
            found = float(criterion(model(HELD_OUT.x), HELD_OUT.y))
        rows.append({"train/loss": total / SIZE, "val/loss": found})
        if schedule is not None and not each_round:
            schedule.step(rows[-1][watch])
    return rows, model, optimizer


def check(results, oracle):
    rows, model, optimizer = oracle
    for trainer, history in results:
        assert history == results[0][1]  # to the bit
        assert len(history.epochs) == len(rows)
        for mine, theirs in zip(history.epochs, rows, strict=True):
            assert {n: mine[n] for n in mine if n in theirs} == pytest.approx(
                {n: theirs[n] for n in theirs if n in mine}, abs=1e-9
            )
        for mine, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
        lr = trainer.optimizer.param_groups[0]["lr"]
        assert lr == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)


def maker(scheduler=None, **given):
    def make():
        model, optimizer = kit()
        how = {"loss": criterion, "epochs": EPOCHS, "loggers": [Quiet()]} | given
        schedule = scheduler(optimizer) if scheduler else None
        return mh.Trainer(model, optimizer, scheduler=schedule, **how)

    return make


# -- the same as a plain loop -------------------------------------------------------------------


def test_a_loss_and_an_evaluation(number):
    results = fit(maker(), number)
    check(results, plain())
    history = results[0][1]
    assert history.rounds == EPOCHS * ROUNDS
    assert not history.stopped
    assert history["val/loss"] == [row["val/loss"] for row in history.epochs]
    loggers = [trainer.loggers[0] for trainer, _ in results]
    assert [logger.ends for logger in loggers] == [["success"]] * number
    (used,) = [logger for logger in loggers if logger.rows]
    assert [round_ for round_, _ in used.rows] == list(range(EPOCHS * ROUNDS))


def test_without_an_evaluation(number):
    results = fit(maker(), number, evaluation=None)
    check(results, plain())
    assert results[0][1]["val/loss"] == []


def test_a_plateau_of_what_is_evaluated(number):
    def plateau(optimizer):
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)

    oracle = plain(plateau)
    assert oracle[2].param_groups[0]["lr"] < 0.05  # it has acted
    check(fit(maker(plateau), number), oracle)


def test_a_plateau_of_what_is_watched(number):
    def plateau(optimizer):
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)

    watch = "train/loss"
    check(fit(maker(plateau, watch=watch), number), plain(plateau, watch=watch))


def test_a_schedule_of_rounds(number):
    def cycle(optimizer):
        return OneCycleLR(optimizer, max_lr=0.2, total_steps=EPOCHS * ROUNDS + 1)

    check(fit(maker(cycle, schedule="round"), number), plain(cycle, each_round=True))


def test_several_optimizers():
    def make():
        torch.manual_seed(11)
        model = net()
        several = [torch.optim.SGD(model[0].parameters(), lr=0.1), adam(model[2])]
        return mh.Trainer(model, several, loss=criterion, epochs=2, loggers=[])

    ((trainer, _),) = fit(make)
    torch.manual_seed(11)
    before = net()
    for mine, theirs in zip(trainer.model.parameters(), before.parameters(), strict=True):
        assert not torch.equal(mine, theirs)


@pytest.mark.parametrize(("mode", "epochs"), [("max", 3), ("min", EPOCHS)])
def test_patience(number, mode, epochs):
    """The loss falls: nothing improves if it shall rise."""
    results = fit(maker(watch="train/loss", mode=mode, patience=2), number)
    check(results, plain(epochs=epochs))
    assert [history.stopped for _, history in results] == [mode == "max"] * number


def test_a_resumed_run_that_had_stopped_stays_so(tmp_path):
    make = maker(watch="train/loss", mode="max", patience=1)
    ((_, before),) = fit(make, checkpoints=tmp_path)
    ((trainer, after),) = fit(make, checkpoints=tmp_path, resume=True)
    assert before.stopped
    assert after == before
    assert trainer.loggers[0].rows == []


def test_what_is_no_number_is_no_improvement():
    def evaluate(model):
        return {"score": float("nan")}

    ((_, history),) = fit(maker(evaluate=evaluate, watch="val/score", patience=2), evaluation=None)
    assert history.stopped
    assert len(history.epochs) == 2


def test_evaluated_on_one_peer_by_a_function(number):
    calls = []

    def evaluate(model):
        assert not model.training
        assert not torch.is_grad_enabled()
        calls.append(1)
        return {"loss": float(criterion(model(HELD_OUT.x), HELD_OUT.y))}

    check(fit(maker(evaluate=evaluate), number, evaluation=None), plain())
    assert len(calls) == EPOCHS


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_a_step_of_any_batch():
    kinds = set()

    def step(model, batch):
        kinds.add((type(batch), model.training))
        loss = criterion(model(batch.x), batch.y)
        return {"loss": loss, "twice": 2 * float(loss.detach())}

    def loader(dataset):
        def collate(samples):
            xs, ys = zip(*samples, strict=True)
            return Pair(torch.stack(xs), torch.stack(ys))

        return DataLoader(dataset, BATCH, shuffle=dataset is not HELD_OUT, collate_fn=collate)

    trainer = maker(loss=None, step=step)()
    with mh.join(seed=SEED) as run:
        history = trainer.fit(loader(Points()), loader(HELD_OUT), run=run)
    check([(trainer, history)], plain())
    assert history["train/twice"] == pytest.approx([2 * loss for loss in history["train/loss"]])
    assert history["val/twice"] == pytest.approx([2 * loss for loss in history["val/loss"]])
    assert kinds == {(Pair, True), (Pair, False)}


def test_alone_without_a_run_and_a_line_for_every_epoch(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    model, optimizer = kit()
    history = mh.Trainer(model, optimizer, loss=criterion, epochs=2).fit(data(), held_out())
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[-1].startswith(f"step {2 * ROUNDS - 1}  epoch 1  train/loss ")
    assert lines[-1].endswith(f"val/loss {history['val/loss'][-1]:.4g}")


def test_layers_keep_their_mode():
    seen = []

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.frozen = net(), nn.Dropout(0.5)

        def forward(self, x):
            seen.append((self.training, self.frozen.training))
            return self.frozen(self.net(x))

    model = Mixed()
    model.frozen.eval()
    trainer = mh.Trainer(model, adam(model), loss=criterion, epochs=2, loggers=[])
    trainer.fit(data(), held_out())
    assert set(seen) == {(True, False), (False, False)}
    assert model.training
    model.eval()
    seen.clear()
    mh.Trainer(model, adam(model), loss=criterion, epochs=1, loggers=[]).fit(data())
    assert set(seen) == {(True, True)}


def test_batches_go_where_the_model_is():
    batch = {
        "x": torch.ones(2),
        "rest": [torch.ones(1), "name", Pair(torch.ones(1), torch.ones(2))],
    }
    moved = module._moved(batch, torch.device("meta"))
    assert moved["x"].is_meta
    assert moved["rest"][0].is_meta
    assert moved["rest"][1] == "name"
    assert moved["rest"][2].y.is_meta


# -- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss": None}, "either a loss or a step"),
        ({"step": mean_loss}, "either a loss or a step"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": "3"}, "epochs='3'"),
        ({"epochs": 2.5}, "epochs=2.5"),
        ({"patience": 0}, "patience=0"),
        ({"mode": "least"}, "mode='least'"),
        ({"schedule": "step"}, "schedule='step'"),
    ],
)
def test_what_makes_no_sense(given, words):
    with pytest.raises(UsageError, match=words):
        maker(**given)()


def test_a_plateau_of_rounds():
    with pytest.raises(UsageError, match="plateau"):
        maker(ReduceLROnPlateau, schedule="round")()


def test_two_ways_to_evaluate():
    with pytest.raises(UsageError, match="two ways"):
        fit(maker(evaluate=lambda model: {}))


def test_a_name_that_nothing_has():
    with pytest.raises(UsageError, match="'val/accuracy'") as caught:
        fit(maker(watch="val/accuracy", patience=1))
    assert "'val/loss'" in str(caught.value)


@pytest.mark.parametrize(
    ("said", "words"), [({"accuracy": 0.5}, "gave 'accuracy'"), ({"loss": 0.5}, "is a float")]
)
def test_a_step_without_a_loss(said, words):
    with pytest.raises(UsageError, match=words):
        fit(maker(loss=None, step=lambda model, batch: said))


# -- loggers ------------------------------------------------------------------------------------


def test_what_a_row_has():
    ((trainer, history),) = fit(maker(hyperparams={"note": "mine"}))
    logger = trainer.loggers[0]
    assert logger.ends == ["success"]
    first, *_, last = [row for _, row in logger.rows]
    assert set(first) == {"epoch", "train/loss", "lr", "data/wait_s", "data/bad"}
    rest = {"perf/samples_per_s", "train/epoch_loss", "val/loss"}
    assert set(last) == set(first) | rest
    assert last["train/epoch_loss"] == history["train/loss"][-1]
    assert all(row["data/wait_s"] > 0.0 for _, row in logger.rows)
    assert all(row["perf/samples_per_s"] > 0.0 for _, row in logger.rows[1:])
    ((before, params),) = logger.params
    assert before == 0
    known = {"model": "Sequential", "optimizer": "AdamW", "lr": 0.05, "epochs": EPOCHS}
    known |= {"batch": BATCH, "samples": SIZE, "shares": "equal", "note": "mine"}
    assert known.items() <= params.items()


def test_a_logger_that_fails_is_counted_and_training_goes_on(caplog):
    class Full(Quiet):
        def log_metrics(self, metrics, step):
            super().log_metrics(metrics, step)
            raise OSError("no space left")

    full, quiet = Full(), Quiet()
    check(fit(maker(loggers=(desk := Desk([full, quiet])))), plain())
    assert [step for step, _ in quiet.rows] == list(range(EPOCHS * ROUNDS))
    assert len(full.rows) == desk.counts[0].failed == EPOCHS * ROUNDS
    assert full.ends == quiet.ends == ["success"]
    assert sum("no space left" in message for message in caplog.messages) == 1


def test_a_logger_that_hangs_holds_no_round_up(caplog):
    go, hangs, whole = threading.Event(), threading.Event(), threading.Event()

    class Hung(Quiet):
        def log_metrics(self, metrics, step):
            hangs.set()
            assert go.wait(60)

    class Other(Quiet):
        def log_metrics(self, metrics, step):
            super().log_metrics(metrics, step)
            if step == EPOCHS * ROUNDS - 1:
                whole.set()

    class Late(Desk):
        """Ends when one hangs and the other has all, however late their threads are."""

        def finalize(self, status):
            assert hangs.wait(60)
            assert whole.wait(60)
            super().finalize(status)

    desk = Late([Hung(), quiet := Other()], end_s=0.05)
    check(fit(maker(loggers=desk)), plain())  # it would not come to its end
    assert desk.counts[0].dropped == EPOCHS * ROUNDS - 1
    go.set()
    for thread in threading.enumerate():
        if thread.name == "Hung":
            thread.join(60)
    assert [step for step, _ in quiet.rows] == list(range(EPOCHS * ROUNDS))


class Spoilt(Points):
    bad = (3, 5, 20)

    def __getitem__(self, index):
        if index in self.bad:
            raise BadSample(f"sample {index}", "broken")
        return super().__getitem__(index)


def test_bad_samples_of_all_peers_are_in_one_log(number, tmp_path):
    paths = iter([tmp_path / f"{place}.jsonl" for place in range(number)])

    def make():
        return maker(loggers=[EventLog(next(paths)), Quiet()])()

    def loader():
        return Loader(Spoilt(), BATCH, bad="skip")

    results = fit(make, number, train=loader)
    found = [event for event in merge(tmp_path.iterdir()) if event.what == "bad sample"]
    assert {event.text for event in found} == {f"sample {n}: broken" for n in Spoilt.bad}
    assert len({(event.peer, event.text) for event in found}) == len(found)  # once by each
    rows = [row for trainer, _ in results for _, row in trainer.loggers[1].rows]
    counts = [row["data/bad"] for row in rows]
    assert counts == sorted(counts)
    assert counts[-1] == len(Spoilt.bad)


def test_a_training_that_fails_says_so(monkeypatch):
    def step(model, batch):
        raise ZeroDivisionError

    made = maker(loss=None, step=step, loggers=[quiet := Quiet()])
    with pytest.raises(ZeroDivisionError):
        fit(made)
    assert quiet.ends == ["failed"]


def test_a_desk_is_for_one_training():
    make = maker(loggers=Desk([]))
    fit(make)
    with pytest.raises(UsageError, match="come to its end"):
        fit(make)


def test_what_is_no_logger():
    with pytest.raises(UsageError, match="a int is no logger"):
        fit(maker(loggers=[3]))
