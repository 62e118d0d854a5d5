"""An evaluation after every epoch, shared out: each sample counts once, and nothing is learnt."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import manyhands as mh
from manyhands.core.errors import UsageError
from manyhands.replica.agenda import Agenda, Calendar
from tests.replica.loops import (
    ALONE,
    BATCH,
    EPOCHS,
    FEATURES,
    SIZE,
    THREE,
    TWO,
    Points,
    Recipe,
    adam,
    compare,
    mean_loss,
    net,
    together,
)

HELD_OUT = 13


class HeldOut(Points):
    """Others than those that are trained on, each with its number."""

    def __init__(self, size: int = HELD_OUT) -> None:
        super().__init__(50)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        return *super().__getitem__(30 + index), index


def held_out(**options):
    return DataLoader(HeldOut(**options), 4)


@pytest.fixture(params=[ALONE, TWO, THREE], ids=["alone", "two", "three"])
def speeds(request):
    return request.param


def values(model, x, y):
    output = model(x)
    loss = nn.functional.cross_entropy(output, y)
    return {"eval loss": loss, "right": (output.argmax(1) == y).double().mean()}


def evaluate(hand, model, seen):
    with torch.no_grad():
        if hand.alone:
            data = HeldOut()
            x, y = (torch.stack([data[i][part] for i in range(len(data))]) for part in (0, 1))
            return {name: float(value) for name, value in values(model, x, y).items()}
        for x, y, numbers in hand.evaluation:
            seen.append((hand.round, hand.name, numbers.tolist()))
            for name, value in values(model, x, y).items():
                hand.mean(value, name)
        return hand.evaluated


def train(hand, model, optimizer, loader):
    for batch in loader:
        loss = mean_loss(model, batch)
        mean = hand.mean(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hand.learnt(mean)


def test_which_rounds_evaluate():
    agenda = Agenda(Calendar(5, 2), 2, num_evaluated=7)
    assert [agenda.evaluates(n) for n in range(8)] == [False, False, False, True] * 2
    assert [agenda.round(n) for n in range(9)] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert [agenda.leg(n) for n in range(9)] == [0, 0, 0, 1, 2, 2, 2, 3, 4]
    without = Agenda(Calendar(5, 2), 2)
    assert not any(map(without.evaluates, range(8)))
    assert [without.round(n) for n in range(8)] == list(range(8))
    assert [without.leg(n) for n in range(7)] == [0, 0, 0, 2, 2, 2, 4]


def test_the_same_values_everywhere_and_each_sample_once(speeds):
    seen, found = [], {}

    def loop(hand, model, optimizer, loader, scheduler):
        mine = found.setdefault("plain" if hand.alone else hand.name, [])
        for _ in range(EPOCHS):
            train(hand, model, optimizer, loader)
            got = evaluate(hand, model, seen)
            mine.append(got)
            scheduler.step(got["eval loss"])

    def plateau(optimizer):
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)

    options = {"evaluation": held_out()}
    *_, plain = compare(Recipe(loop, scheduler=plateau, options=options), speeds)
    assert plain.scheduler.get_last_lr()[0] < 0.05  # it has acted
    for number in range(len(speeds)):
        assert found[number] == found[0]  # to the bit
    for mine, oracle in zip(found[0], found["plain"], strict=True):
        assert mine == pytest.approx(oracle, abs=1e-9)
    assert len({at for at, *_ in seen}) == EPOCHS
    for at in {at for at, *_ in seen}:
        counted = Counter(i for round_, _, numbers in seen if round_ == at for i in numbers)
        assert counted == Counter(range(HELD_OUT))
    assert max(len(numbers) for *_, numbers in seen) == 4
    assert len({name for _, name, _ in seen}) == len(speeds)


class Moving(nn.Module):
    """A buffer changes in every forward, also in evaluation."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.register_buffer("average", torch.zeros(FEATURES, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.count += 1
        return self.net(x)


def test_the_last_batch_dropped():
    """As a DataLoader does."""
    seen = []

    def loop(hand, model, optimizer, loader, scheduler):
        train(hand, model, optimizer, loader)
        if not hand.alone:
            evaluate(hand, model, seen)

    dropped = DataLoader(HeldOut(), 4, drop_last=True)
    together(Recipe(loop, epochs=1, options={"evaluation": dropped}), TWO)
    assert sorted(i for *_, numbers in seen for i in numbers) == list(range(12))


def test_it_leaves_no_trace(speeds):
    """As if nobody had evaluated."""

    def evaluating(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            train(hand, model, optimizer, loader)
            if not hand.alone:
                for x, y, _ in hand.evaluation:
                    with torch.no_grad():
                        mean_loss(model, (x, y))

    compare(Recipe(evaluating, model=Moving, options={"evaluation": held_out()}), speeds)


class Average:
    """Of the weights. It takes the tensors that it is given, as many do."""

    def __init__(self, model):
        self._of, self.values = model, [p.detach().clone() for p in model.parameters()]

    def update(self):
        for mine, p in zip(self.values, self._of.parameters(), strict=True):
            mine.lerp_(p.detach(), 0.1)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state_dict):
        self.values = state_dict["values"]


def test_in_inference_mode(speeds):
    """What is undone after it can be trained on."""

    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                mean_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                hand.things["average"].update()
            if not hand.alone:
                with torch.inference_mode():
                    for x, y, _ in hand.evaluation:
                        mean_loss(model, (x, y))

    def things(model):
        return {"average": Average(model)}

    *peers, plain = compare(
        Recipe(loop, model=Moving, things=things, options={"evaluation": held_out()}), speeds
    )
    for kit in peers:
        for mine, theirs in zip(
            kit.things["average"].values, plain.things["average"].values, strict=True
        ):
            torch.testing.assert_close(mine, theirs)


def test_one_sample_is_for_one_peer():
    seen = []

    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            train(hand, model, optimizer, loader)
            for *_, number in hand.evaluation:
                seen.append(number.item())
                hand.mean(2.5, "score")
            assert hand.evaluated == {"score": 2.5}

    together(Recipe(loop, options={"evaluation": held_out(size=1)}), THREE)
    assert seen == [0] * EPOCHS


def test_its_means_are_not_those_of_the_round_after_it(speeds):
    """That has the same number: so many came before either."""
    told = {}

    def loop(hand, model, optimizer, loader, scheduler):
        mine = told.setdefault(hand.name, [])
        hand.on_round(lambda closed: mine.append(set(closed.means)))
        for _ in range(EPOCHS):
            train(hand, model, optimizer, loader)
            for _ in hand.evaluation:
                hand.mean(2.5, "score")

    together(Recipe(loop, options={"evaluation": held_out()}), speeds)
    rounds = EPOCHS * -(-SIZE // BATCH)
    assert all(mine == [{"loss"}] * rounds for mine in told.values())


def test_nothing_said_is_nothing_known():
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            assert hand.evaluated == {}
            train(hand, model, optimizer, loader)
            for _ in hand.evaluation:
                pass
            assert hand.evaluated == {}

    together(Recipe(loop, options={"evaluation": held_out()}), TWO)


def test_read_by_workers():
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            train(hand, model, optimizer, loader)
            numbers = [number for *_, some in hand.evaluation for number in some.tolist()]
            assert numbers == list(range(HELD_OUT))

    workers = DataLoader(HeldOut(), 4, num_workers=1)
    together(Recipe(loop, options={"evaluation": workers}))


def test_schedulers_step_after_it_and_not_in_the_middle_of_nothing():
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            train(hand, model, optimizer, loader)
            assert hand.round_closed
            for _ in hand.evaluation:
                assert not hand.round_closed
            assert hand.round_closed

    together(Recipe(loop, options={"evaluation": held_out()}), TWO)


# -- refused ------------------------------------------------------------------------------------


def test_a_loop_that_does_not_evaluate_is_told():
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            train(hand, model, optimizer, loader)

    with pytest.raises(UsageError, match="after round 2 comes an evaluation"):
        together(Recipe(loop, options={"evaluation": held_out()}))


def test_an_evaluation_within_an_epoch_is_told():
    def loop(hand, model, optimizer, loader, scheduler):
        for batch in loader:
            mean_loss(model, batch).backward()
            break
        list(hand.evaluation)

    with pytest.raises(UsageError, match="round 1 comes next"):
        together(Recipe(loop, options={"evaluation": held_out()}))


def test_a_backward_in_an_evaluation_is_told():
    def loop(hand, model, optimizer, loader, scheduler):
        train(hand, model, optimizer, loader)
        for x, y, _ in hand.evaluation:
            mean_loss(model, (x, y)).backward()

    with pytest.raises(UsageError, match="nothing is learnt"):
        together(Recipe(loop, options={"evaluation": held_out()}))


def test_a_data_set_in_place_of_a_loader_is_told():
    """A batch size beside it would be that of what is trained on."""
    model, data = net(), DataLoader(Points(), BATCH)
    with mh.join() as run, pytest.raises(UsageError, match="HeldOut has no batch size") as caught:
        run.wrap(model, adam(model), data, evaluation=HeldOut())
    assert "give a DataLoader" in str(caught.value)


def test_evaluating_without_a_loader_is_told():
    with mh.join() as run:
        model = net()
        run.wrap(model, adam(model), DataLoader(Points(), BATCH), epochs=1)
        with pytest.raises(UsageError, match="nothing to evaluate"):
            _ = run.evaluation


@pytest.mark.parametrize(
    "other",
    [held_out(size=HELD_OUT - 1), DataLoader(HeldOut(), 4, drop_last=True)],
    ids=["smaller", "drops"],
)
def test_a_newcomer_that_evaluates_something_else_is_told(other):
    going, over, told = threading.Event(), threading.Event(), []

    def peer(name, evaluation):
        model = net()
        optimizer = adam(model)
        with mh.join("local:///evaluation-differs", name=name) as run:
            data = DataLoader(Points(), BATCH)
            _, _, loader, _ = run.wrap(model, optimizer, data, evaluation=evaluation)
            while not over.is_set():
                for batch in loader:
                    mean_loss(model, batch).backward()
                    optimizer.step()
                    going.set()
                list(run.evaluation)

    def newcomer():
        try:
            peer("other", other)
        except mh.ManyhandsError as error:
            told.append(str(error))
        over.set()

    first = threading.Thread(target=peer, args=("one", held_out()), daemon=True)
    first.start()
    assert going.wait(30)
    second = threading.Thread(target=newcomer, daemon=True)
    second.start()
    second.join(30)
    first.join(30)
    assert not first.is_alive()
    (error,) = told
    assert "evaluation" in error
