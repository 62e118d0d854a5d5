"""What a run does about gradients that are none, and about samples that kill."""

from __future__ import annotations

import logging
import re
from collections import Counter

import pytest
import torch
from torch import nn

from manyhands.checkpoint.store import Store
from manyhands.collectives import messages as m
from manyhands.core.errors import UsageError
from manyhands.replica import session
from manyhands.replica.blame import BadGradient
from manyhands.replica.layers import warn_of_chance
from tests.replica.hands import Hands, until_members
from tests.replica.loops import (
    BATCH,
    SIZE,
    Points,
    Recipe,
    alone,
    check,
    gather,
    mean_loss,
    together,
)
from tests.replica.training import SEED as HANDS_SEED
from tests.replica.training import SIZE as HANDS_SIZE
from tests.replica.training import Calendar, Order

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks

EPOCHS = 4
ROUNDS_AN_EPOCH = -(-SIZE // BATCH)
EQUAL = (1, 1, 1)
BAD = 7  # a sample
DEADLY = 9  # a round, before which all peers of a run are in


def loop_with(spoil, told=None):
    """The usual loop; `spoil(hand, x)` says what the loss of a batch is multiplied with."""

    def loop(hand, model, optimizer, loader, scheduler):
        if told is not None and not hand.alone:
            hand.on_round(lambda closed: told.setdefault(closed.round, closed))
        for _ in range(EPOCHS):
            for batch in loader:
                loss = mean_loss(model, batch) * spoil(hand, batch[0])
                mean = hand.mean(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                hand.learnt(mean)

    return loop


def bad_sample(hand, x):
    """Whoever computes it gets infinite gradients."""
    return float("inf") if bool((x == Points().x[BAD]).all(1).any()) else 1.0


def bad_peer(hand, x):
    """Its device has begun to fail."""
    return float("nan") if not hand.alone and hand.name == 1 and hand.round >= 2 else 1.0


def recipe_for(spoil, policy, told=None, **options):
    return Recipe(
        loop_with(spoil, told), epochs=EPOCHS, options={"bad_gradients": policy, **options}
    )


def refusals(caplog):
    return [r.getMessage() for r in caplog.records if "is not finite" in r.getMessage()]


def test_skip_leaves_the_samples_out_and_every_peer_says_whose(caplog, url):
    told = {}
    kits, errors = gather(recipe_for(bad_sample, "skip", told), EQUAL, url)
    assert not errors
    assert len({kit.digest for kit in kits}) == 1
    assert all(torch.tensor(kit.losses).isfinite().all() for kit in kits)
    said, rounds = refusals(caplog), Counter()
    for text in said:
        found = re.match(
            r"round (\d+): the gradient that peer-\d#\w+ has computed of positions \{[-\d, ]+\} "
            r"of epoch (\d) \(samples ([\d, ]+) of the data\) is not finite in 0\.weight.*: "
            r"these samples count nothing",
            text,
        )
        assert found, text
        number, epoch, samples = found.groups()
        rounds[int(number)] += 1
        assert int(number) // ROUNDS_AN_EPOCH == int(epoch)
        named = [int(sample) for sample in samples.split(", ")]
        assert BAD in named
        size = min(BATCH, SIZE - int(number) % ROUNDS_AN_EPOCH * BATCH)
        assert told[int(number)].weight == size - len(named)
    # One a peer, in each epoch; at a broker one may be a little late for the first rounds, and only
    # who takes part says so.
    assert sorted(number // ROUNDS_AN_EPOCH for number in rounds) == list(range(EPOCHS)), said
    assert rounds == {number: len(told[number].shares) for number in rounds}, said
    assert rounds[max(rounds)] == len(EQUAL), said


def test_drop_puts_out_the_peer_that_cannot_and_the_curve_is_that_of_one_process(url):
    kits, errors = gather(recipe_for(bad_peer, "drop"), EQUAL, url)
    assert list(errors) == [1], errors
    assert isinstance(errors[1], BadGradient)
    assert re.search(r"round 2: the gradient that peer-1#\w+ has computed", str(errors[1]))
    assert "0.weight" in str(errors[1])
    assert "Others have computed the same samples" in str(errors[1])
    check([kits[0], kits[2]], alone(recipe_for(bad_peer, "drop")))


def test_drop_leaves_out_samples_that_nobody_can_compute_and_puts_nobody_out(caplog):
    told = {}
    kits, errors = gather(recipe_for(bad_sample, "drop", told), EQUAL)
    assert not errors
    assert len({kit.digest for kit in kits}) == 1
    left_out = {r: BATCH - c.weight for r, c in told.items() if r % ROUNDS_AN_EPOCH < 2}
    bad = [count for count in left_out.values() if count]
    # What two peers have failed with, which is less than the whole share of one.
    assert bad
    assert max(bad) <= 2
    assert all("others compute these samples once more" in text for text in refusals(caplog))


def test_drop_with_nobody_to_ask():
    (kit,) = together(recipe_for(bad_sample, "drop"))
    assert torch.tensor(kit.losses).isfinite().all()


def test_stop_ends_the_run_at_all_peers_and_saves_the_round_before(url, tmp_path):
    folder = tmp_path / "saved"
    options = {"checkpoints": folder, "save_every": 1000}
    kits, errors = gather(recipe_for(bad_peer, "stop", **options), EQUAL, url)
    assert sorted(errors) == [0, 1, 2], errors
    for error in errors.values():
        assert isinstance(error, BadGradient)
        assert str(error) == str(errors[0])
    assert re.search(r"round 2: .* peer-1#.* positions .* not finite in 0\.weight", str(errors[0]))
    (place,) = Store(folder).places()
    assert place.round == 2
    # Another policy may go on from there.
    (resumed,) = together(recipe_for(bad_peer, "skip", **options, resume=True))
    assert len(resumed.losses) == EPOCHS * ROUNDS_AN_EPOCH - 2
    check([resumed_as(resumed, kits[0])], alone(recipe_for(bad_peer, "skip")))


def resumed_as(kit, before):
    """All losses of a run that was resumed."""
    kit.losses[:0] = before.losses
    return kit


class Cutter:
    """A link by which gradients lose their last bytes; `whose` has the names of the senders."""

    def __init__(self, link, whose) -> None:
        self._link, self._whose = link, whose

    def __getattr__(self, name):
        return getattr(self._link, name)

    def send(self, to, message, buffers=(), **options):
        word = m.decode(message)
        if isinstance(word, m.Part) and word.weight > 0 and buffers:
            buffers = [*buffers[:-1], buffers[-1][:-8]]
            self._whose.add(str(self._link.me))
        self._link.send(to, message, buffers, **options)


def test_a_gradient_of_the_wrong_size_is_refused_by_name(monkeypatch):
    dial, whose = session.dial, set()
    monkeypatch.setattr(session, "dial", lambda *where: Cutter(dial(*where), whose))
    _, errors = gather(recipe_for(lambda hand, x: 1.0, "stop"), (1, 1))
    assert sorted(errors) == [0, 1]
    (name,) = whose  # the other one adds up
    for error in errors.values():
        assert re.search(rf"that {name} .* is not of the size it should have", str(error)), error


def test_policies_have_names():
    with pytest.raises(UsageError, match="bad_gradients='panic'") as raised:
        together(recipe_for(bad_peer, "panic"))
    assert "skip, drop, stop" in raised.value.hint


def test_peers_have_one_policy(zygote, hub):
    with Hands(zygote, f"{hub.address}?insecure=1", epochs=1000) as hands:
        hands.join(pace_s=0.01).until(lambda said: said.get("round", -1) >= 1)
        stranger = hands.join(bad_gradients="stop")
        assert stranger.wait() == 1, stranger.report()
        assert "bad_gradients is skip there and stop here" in stranger.report()


# -- samples that kill ---------------------------------------------------------------------------


def test_a_sample_that_kills_stops_the_run_after_three_deaths(zygote, url, tmp_path):
    calendar = Calendar(HANDS_SIZE, 24)
    epoch, start, _ = calendar.span(DEADLY)
    deadly = int(Order(HANDS_SIZE, seed=HANDS_SEED, epoch=epoch).indices(start + 5, start + 6)[0])
    # Which a peer looks at when it joins.
    assert deadly not in [(HANDS_SIZE - 1) * step // 15 for step in range(16)]
    options = {"checkpoints": str(tmp_path), "save_every": 1000, "grain": None}
    options |= {"deadly": deadly, "deadly_from": DEADLY, "linger_s": 1.0, "linger_from": 1}
    with Hands(zygote, url, **options) as hands:
        first, *_ = hands.start(5)
        until_members(first, 5)  # at a broker one may be late; it would not know of every death
        hands.hurry()
        ends = [hand.wait(60) for hand in hands.all]
        assert sorted(ends) == [-9, -9, -9, 1, 1], [hand.report() for hand in hands.all]
        told = []
        for hand, end in zip(hands.all, ends, strict=True):
            if end == 1:
                found = re.search(
                    rf"DeadlySamples: round {DEADLY}: 3 peers that were to compute positions "
                    rf"\{{[-\d, ]+\}} of epoch {epoch} \(samples ([\d, ]+) of the data\) have died",
                    hand.report(),
                )
                if found:
                    told.append(found[1])
                else:  # one that came too late to take part hears only that nobody is left
                    assert "nobody has it any more" in hand.report()
                    assert not any("round" in said for said in hand.said), hand.report()
        assert told
        assert all(deadly in [int(s) for s in samples.split(", ")] for samples in told)
        (place,) = Store(tmp_path).places()
        assert place.round == DEADLY


# -- layers that see their batch -----------------------------------------------------------------


def batchy():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("layer", "drops"),
    [
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.MultiheadAttention(4, 2), False),
        (nn.LSTM(4, 4, 2, dropout=0.1), True),
        (nn.GRU(4, 4, 2), False),
        (nn.RReLU(), True),
    ],
    ids=str,
)
def test_layers_that_draw_in_themselves_are_named_too(caplog, layer, drops):
    with caplog.at_level(logging.WARNING):
        warn_of_chance(nn.Sequential(nn.Linear(4, 4), layer))
    assert caplog.text.count(f"{type(layer).__name__} see their batch or chance") == drops


@pytest.mark.parametrize(
    ("model", "grain", "named"),
    [
        (batchy, None, "BatchNorm1d, Dropout see their batch or chance"),
        (batchy, 5, None),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3)), None, None),
    ],
    ids=["without grains", "grains", "plain layers"],
)
def test_layers_that_see_their_batch_are_named_without_grains(caplog, model, grain, named):
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in loader:
            pass

    with caplog.at_level(logging.WARNING):
        together(
            Recipe(loop, model=lambda: model().double(), epochs=1, options={"grain_size": grain})
        )
    said = [r.getMessage() for r in caplog.records if "statistically" in r.getMessage()]
    assert len(said) == (named is not None)
    if named is not None:
        assert said[0].startswith(named)
        assert "grain_size=N" in said[0]
