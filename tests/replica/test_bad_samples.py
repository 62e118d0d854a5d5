"""Samples that cannot be read: the mean of a round is over those that are there, at any number of
peers, whoever dies.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from manyhands.core.errors import UsageError
from manyhands.data import BadSample, Loader
from manyhands.data.quarantine import TooManyBad
from manyhands.data.source import Source
from manyhands.replica.description import describe_data, differences, resumable
from tests.replica import loops
from tests.replica.hands import Hands
from tests.replica.loops import EPOCHS, Recipe, gather, mean_loss, together
from tests.replica.training import BATCH, SEED, SIZE, Calendar, Order

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks


def samples_at(round_: int, *turns: int) -> list[int]:
    """Of the round, in its order."""
    epoch, start, _ = Calendar(SIZE, BATCH).span(round_)
    places = Order(SIZE, seed=SEED, epoch=epoch).indices(0, SIZE).tolist()
    return [places[start + turn] for turn in turns]


# The first grain of a round and another one have nothing left, one has a single sample, one two.
BAD = sorted(
    {
        0,  # which peers look at when they join
        *samples_at(1, 0, 1, 2, 3),
        *samples_at(2, 8, 9, 10),
        *samples_at(4, 4, 5, 6, 7),
        *samples_at(5, 1, 3),
    }
)
THREADS = {"workers": 2, "kind": "thread"}


@pytest.mark.parametrize(
    ("number", "grain"),
    [(1, 4), (2, None), (5, 4), (5, None)],
    ids=["one in grains", "two", "five in grains", "five"],
)
def test_any_number_of_peers(zygote, url, number, grain):
    """With batch normalisation in grains, and without; some passes have nothing to count."""
    with Hands(zygote, url, bad=BAD, grain=grain, shares="equal") as hands:
        hands.start(number)
        hands.finish()
        met = {where for hand in hands.all for where in hand.said[-2]["bad"]}
        assert met <= {f"point {sample}" for sample in BAD}
        if number == 1:
            assert len(met) == len(BAD)


@pytest.mark.parametrize(
    ("what", "round_", "grain"),
    [("forward", 1, 4), ("Part", 4, None), ("stepped", 4, 4)],
    ids=["forward", "Part", "stepped"],
)
def test_one_that_is_killed(zygote, url, what, round_, grain):
    """What it had is computed by the others, bad samples and all; they read ahead in threads."""
    death = {"what": what, "round": round_, "then": "die"}
    with Hands(zygote, url, bad=BAD, grain=grain, reading=THREADS, lease_s=10.0) as hands:
        for number in range(3):
            hands.join(*[death][number:], min_peers=3).until(lambda said: "dialed" in said)
        assert hands.all[0].wait(60) == -9
        hands.finish(hands.all[0])
        for hand in hands.all[1:]:
            assert hand.said[-1] == {"threads": []}


def test_worker_processes_of_a_peer(zygote, hub):
    """They are of one life with it; the other peer reads in its own thread."""
    with Hands(zygote, f"{hub.address}?insecure=1", bad=BAD) as hands:
        hands.join(min_peers=2, reading={"workers": 1, "kind": "process"})
        hands.join(min_peers=2)
        hands.finish()


def test_peers_have_one_policy(zygote, hub):
    with Hands(zygote, f"{hub.address}?insecure=1", bad=BAD, epochs=1000) as hands:
        hands.join(pace_s=0.01).until(lambda said: said.get("round", -1) >= 1)
        stranger = hands.join(reading={"bad": "replace"})
        assert stranger.wait() == 1
        assert "data.bad is skip there and replace here" in stranger.report()


# -- in one process -------------------------------------------------------------------------------


class Points(loops.Points):
    """Some are bad."""

    def __init__(self, bad) -> None:
        super().__init__()
        self.bad = frozenset(bad)

    def __getitem__(self, index):
        if index in self.bad:
            raise BadSample(self.where(index), "it is torn")
        return super().__getitem__(index)

    def where(self, index):
        return f"point {index}"


def round_of(number: int) -> list[int]:
    epoch, start, stop = loops.Calendar(loops.SIZE, loops.BATCH).span(number)
    order = loops.Order(loops.SIZE, seed=loops.SEED, epoch=epoch)
    return order.indices(start, stop).tolist()


def loop(hand, model, optimizer, loader, scheduler):
    for _ in range(EPOCHS):
        for batch in loader:
            loss = mean_loss(model, batch)
            hand.mean(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def recipe_for(bad, policy="skip", told=None, **loading):
    def listening(hand, *rest):
        if told is not None:
            hand.on_round(lambda closed: told.setdefault(closed.round, closed))
        loop(hand, *rest)

    data = lambda: Loader(Points(bad), loops.BATCH, bad=policy, **loading)  # noqa: E731
    return Recipe(listening, data=data)


def plain(bad) -> nn.Module:
    """One process, without anything of ours but the order."""
    points, kit = loops.Points(), Recipe(loop).make()
    per_epoch = -(-loops.SIZE // loops.BATCH)
    for number in range(EPOCHS * per_epoch):
        good = [sample for sample in round_of(number) if sample not in bad]
        if good:
            mean_loss(kit.model, (points.x[good], points.y[good])).backward()
            kit.optimizer.step()
            kit.optimizer.zero_grad()
    return kit.model


def assert_like(model, expected):
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("speeds", [loops.ALONE, loops.THREE], ids=["one", "three"])
def test_a_round_without_any_good_sample_teaches_nothing(speeds):
    """Its optimizer does not step, and the run goes on."""
    bad, told = {*round_of(1), round_of(3)[2]}, {}
    kits = together(recipe_for(bad, told=told, workers=1), speeds)
    assert len({kit.digest for kit in kits}) == 1
    assert_like(kits[0].model, plain(bad))
    weights = {number: closed.weight for number, closed in told.items()}
    assert weights[1] == 0
    assert all(
        weights[number] == pytest.approx(len(set(round_of(number)) - bad)) for number in weights
    )


@pytest.mark.parametrize("speeds", [loops.ALONE, loops.THREE], ids=["one", "three"])
def test_replace_counts_all_and_is_the_same_for_all(speeds):
    bad, told = {3, 17, 18}, {}
    kits = together(recipe_for(bad, "replace", told), speeds)
    (one,) = together(recipe_for(bad, "replace", workers=2))
    assert_like(kits[0].model, one.model)
    assert all(
        closed.weight == pytest.approx(len(round_of(number))) for number, closed in told.items()
    )


def test_raise_ends_all_with_the_name_of_the_sample():
    _, errors = gather(recipe_for({5}, "raise"), (1, 1))
    assert sorted(errors) == [0, 1]
    assert any(isinstance(error, BadSample) for error in errors.values())
    assert any("point 5: it is torn" in str(error) for error in errors.values())


def test_too_many_are_an_error_that_lists_them():
    _, errors = gather(recipe_for(set(range(9)), max_bad=4), loops.ALONE)
    assert isinstance(errors[0], TooManyBad)
    assert len(re.findall(r"point \d: it is torn", str(errors[0]))) == 5


@pytest.mark.parametrize("policies", [("raise", "skip"), ("skip", "raise"), ("replace", "skip")])
def test_a_resumed_run_may_have_another_policy(tmp_path, policies):
    """It is what a user changes when a bad sample has ended a run."""
    per_epoch, told = -(-loops.SIZE // loops.BATCH), {}
    saved = {"checkpoints": str(tmp_path / "saved"), "save_every": 1}
    first = recipe_for((), policies[0])
    first.epochs, first.options = 1, saved
    together(first)
    second = recipe_for((), policies[1], told)
    second.options = {**saved, "resume": True}
    (kit,) = together(second)
    assert sorted(told) == list(range(per_epoch, EPOCHS * per_epoch))
    assert_like(kit.model, plain(()))


def test_what_was_saved_is_compared_but_for_what_is_free():
    data = {"samples": 9, "fingerprint": "ab", "bad": "raise"}
    saved = {"epochs": 1, "bad_gradients": "stop", "resync_every": 1, "seed": 3, "data": data}
    saved |= {"evaluation": dict(data), "manyhands": "0.1.0", "optimizers": []}
    mine = saved | {"epochs": 2, "manyhands": "0.2.0", "data": data | {"bad": "skip"}}
    mine["evaluation"] = {name: value for name, value in data.items() if name != "bad"}
    assert differences(resumable(saved, mine), mine) == []
    mine |= {"seed": 4, "data": data | {"samples": 8}}
    assert [found.split()[0] for found in differences(resumable(saved, mine), mine)] == [
        "seed",
        "data.samples",
    ]


@pytest.mark.parametrize("policy", ["raise", "replace"])
def test_data_are_the_same_whatever_is_done_about_bad_samples(policy):
    """One of those that are looked at is bad."""
    skip, other = (
        describe_data(Source.of(Loader(Points({0}), 5, bad=name))) for name in ("skip", policy)
    )
    assert other | {"bad": "skip"} == skip


def test_weights_of_the_users_own_do_not_make_a_stand_in_count():
    bad, told = set(round_of(1)), {}
    recipe = recipe_for(bad, told=told)
    inner = recipe.loop

    def weighing(hand, model, optimizer, loader, scheduler):
        model.register_forward_pre_hook(lambda module, args: hand.weight(7 * len(args[0])))
        inner(hand, model, optimizer, loader, scheduler)

    recipe.loop = weighing
    together(recipe)
    assert told[1].weight == 0
    assert told[0].weight == pytest.approx(7 * len(round_of(0)))


def test_the_order_is_the_runs():
    with pytest.raises(UsageError, match="the loader has seed 3, the run 5"):
        together(recipe_for((), seed=3))
    together(recipe_for((), seed=loops.SEED))


def test_what_is_evaluated_is_over_the_samples_that_are_there():
    bad = {2, 9, 30, 31}
    found = []

    def evaluating(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                mean_loss(model, batch).backward()
            with torch.no_grad():
                for x, _ in hand.evaluation:
                    hand.mean(x.sum(1).mean(), "sum")
            found.append(hand.evaluated["sum"])

    evaluation = Loader(Points(bad), 5, shuffle=False, bad="skip", workers=1)
    recipe = Recipe(evaluating, options={"evaluation": evaluation})
    together(recipe)
    points = loops.Points()
    good = [n for n in range(loops.SIZE) if n not in bad]
    expected = points.x[good].sum(1).mean().item()
    assert found == pytest.approx([expected] * EPOCHS)
    assert not evaluation.bad  # the run has read it, not the loader
