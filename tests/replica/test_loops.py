"""What a user's loop may contain: the same curve and the same weights as in one plain process."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
)

import manyhands as mh
from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.core.peers import PeerState
from manyhands.links.messages import Ready
from manyhands.replica import session
from tests.replica.loops import (
    ALONE,
    BATCH,
    CLASSES,
    COMING_S,
    EPOCHS,
    FEATURES,
    SEED,
    SIZE,
    THREE,
    TWO,
    Points,
    Recipe,
    adam,
    alone,
    check,
    compare,
    gather,
    mean_loss,
    net,
    together,
)

ROUNDS = EPOCHS * -(-SIZE // BATCH)


@pytest.fixture(params=[ALONE, TWO, THREE], ids=["alone", "two", "three"])
def speeds(request):
    return request.param


def body(hand, model, optimizer, batch, loss_of=mean_loss):
    """The usual one."""
    loss = loss_of(model, batch)
    mean = hand.mean(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    hand.learnt(mean)


def usual(hand, model, optimizer, loader, scheduler):
    for _ in range(EPOCHS):
        for batch in loader:
            body(hand, model, optimizer, batch)


def with_loss(loss_of):
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                body(hand, model, optimizer, batch, loss_of)

    return loop


def test_the_usual_loop_with_unequal_shares(speeds):
    *peers, _ = compare(Recipe(usual, options={"epochs": EPOCHS}), speeds)
    assert len(peers[0].losses) == ROUNDS


def test_shares_are_unequal_and_cover_the_round():
    def longer(hand, model, optimizer, loader, scheduler):
        for _ in range(6):
            for batch in loader:
                body(hand, model, optimizer, batch)

    one, two, _ = compare(Recipe(longer, epochs=6), TWO)
    # By then both are members: 3 to 1 of the last two rounds, of 10 and 8 samples.
    assert (one.sizes[-1], two.sizes[-1]) == (6, 2)
    assert (one.sizes[-2], two.sizes[-2]) in ((7, 3), (8, 2))


# -- accumulation -------------------------------------------------------------------------------


@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_step_every_second_round(speeds, none, first):
    """zero_grad at the start of the body, or after the step; with and without set_to_none."""

    def loop(hand, model, optimizer, loader, scheduler):
        turn = 0
        for _ in range(EPOCHS):
            for batch in loader:
                if first and turn % 2 == 0:
                    optimizer.zero_grad(set_to_none=none)
                loss = mean_loss(model, batch) / 2
                mean = hand.mean(loss)
                loss.backward()
                turn += 1
                if turn % 2 == 0:
                    optimizer.step()
                    if not first:
                        optimizer.zero_grad(set_to_none=none)
                hand.learnt(mean)

    compare(Recipe(loop), speeds)


@pytest.mark.parametrize("theirs", [True, False])
def test_clipping_what_was_accumulated(speeds, theirs):
    norms = {}

    def loop(hand, model, optimizer, loader, scheduler):
        turn, mine = 0, norms.setdefault(hand.alone, [])
        for _ in range(EPOCHS):
            for batch in loader:
                loss = mean_loss(model, batch)
                loss.backward()
                turn += 1
                if turn % 2 == 0:
                    if theirs:
                        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    else:
                        norm = hand.clip_grad_norm_(0.1)
                    mine.append(float(norm))
                    optimizer.step()
                    optimizer.zero_grad()

    compare(Recipe(loop, optimizer=sgd), speeds)
    assert sorted(norms[False]) == pytest.approx(sorted(norms[True] * len(speeds)), rel=1e-9)
    assert min(norms[True]) > 0.1  # it did clip


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


@pytest.mark.parametrize("theirs", [True, False])
def test_clipping(speeds, theirs):
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                optimizer.zero_grad()
                mean_loss(model, batch).backward()
                if theirs:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                else:
                    hand.clip_grad_norm_(0.05)
                optimizer.step()

    compare(Recipe(loop, optimizer=sgd), speeds)


def test_further_backwards_under_no_sync(speeds):
    def loop(hand, model, optimizer, loader, scheduler):
        turn = 0
        for _ in range(EPOCHS):
            for x, y in loader:
                with hand.no_sync():
                    model(x).square().mean().backward()
                    model(x).abs().mean().backward()
                loss = nn.functional.cross_entropy(model(x), y)
                mean = hand.mean(loss)
                loss.backward()
                turn += 1
                if turn % 2 == 0:  # what the rounds before have left counts too
                    optimizer.step()
                    optimizer.zero_grad()
                hand.learnt(mean)

    compare(Recipe(loop), speeds)


def test_a_pass_with_backwards_under_no_sync_alone_gives_nothing():
    def loop(hand, model, optimizer, loader, scheduler):
        turn = 0
        for _ in range(EPOCHS):
            for x, y in loader:
                turn += 1
                if turn == 2:
                    if not hand.alone:
                        with hand.no_sync():
                            model(x).sum().backward()
                    continue
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    compare(Recipe(loop), ALONE)


@pytest.mark.parametrize("quiet", [True, False])
def test_a_second_backward_is_an_error(quiet):
    def loop(hand, model, optimizer, loader, scheduler):
        for x, _ in loader:
            model(x).sum().backward()
            if quiet:
                with hand.no_sync():
                    model(x).sum().backward()
            else:
                model(x).sum().backward()

    with pytest.raises(UsageError, match="second backward") as raised:
        together(Recipe(loop))
    assert "no_sync" in raised.value.hint


def test_a_gradient_that_is_not_a_backward(speeds):
    """torch.autograd.grad, for a gradient penalty, adds nothing to p.grad and closes no round."""

    def loss_of(model, batch):
        x, y = batch
        x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        torch.autograd.grad(out.sum(), list(model.parameters()), retain_graph=True)
        return nn.functional.cross_entropy(out, y) + slope.square().mean()

    compare(Recipe(with_loss(loss_of)), speeds)


# -- weights ------------------------------------------------------------------------------------


def tokens_of(x):
    """How many tokens each sample has: 1 to 3, or none."""
    return (x[:, 0].abs() * 10).long() % 4


@pytest.mark.parametrize("late", [True, False])
def test_weights_in_tokens(speeds, late):
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for x, y in loader:
                tokens = tokens_of(x)
                if not late:
                    hand.weight(int(tokens.sum()))
                losses = nn.functional.cross_entropy(model(x), y, reduction="none")
                loss = (losses * tokens).sum() / tokens.sum()  # NaN where there is none
                mean = hand.mean(loss)
                if late:
                    hand.weight(tokens.sum())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                hand.learnt(mean)

    compare(Recipe(loop), speeds)


def test_samples_of_weight_0_count_nothing_not_even_as_nan():
    """One peer's batches are all of weight 0, and not numbers."""

    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(6):
            for x, y in loader:
                nan = not hand.alone and hand.name == 1
                if nan:
                    hand.weight(0)
                loss = nn.functional.cross_entropy(model(x), y) * (float("nan") if nan else 1.0)
                mean = hand.mean(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                hand.learnt(mean)
                assert mean.round is None or not math.isnan(float(mean))

    kits = together(Recipe(loop, epochs=6), TWO)
    assert kits[0].digest == kits[1].digest
    assert all(p.isfinite().all() for p in kits[0].model.parameters())


def test_what_only_samples_of_weight_0_use_is_used_by_nobody():
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(6):
            for x, y in loader:
                out = model.head(x)
                if not hand.alone and hand.name == 1:
                    hand.weight(0)
                    out = out + model.rare(x)
                nn.functional.cross_entropy(out, y).backward()
                optimizer.step()
                optimizer.zero_grad()

    recipe = Recipe(loop, model=Branches, optimizer=groups, epochs=6)
    kits = together(recipe, (1, 1))
    assert kits[0].digest == kits[1].digest
    assert torch.equal(kits[0].model.rare.weight, recipe.make().model.rare.weight)
    assert not torch.equal(kits[0].model.head.weight, recipe.make().model.head.weight)


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf")])
def test_a_weight_that_is_none(wrong):
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in loader:
            hand.weight(wrong)

    with pytest.raises(UsageError, match="weight"):
        together(Recipe(loop))


def test_a_weight_after_its_backward_is_an_error():
    def loop(hand, model, optimizer, loader, scheduler):
        for batch in loader:
            mean_loss(model, batch).backward()
            hand.weight(3)

    with pytest.raises(UsageError, match="after the backward"):
        together(Recipe(loop))


def test_rounds_that_count_nothing_at_all(speeds):
    """No step, no decay, nothing that the schedule could see."""

    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for x, y in loader:
                mute = hand.round % 2 == 1
                hand.weight(0 if mute else len(y))
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                if not (hand.alone and mute):
                    optimizer.step()
                    scheduler.step()
                optimizer.zero_grad()

    compare(Recipe(loop, scheduler=lambda o: StepLR(o, 1, gamma=0.5)), speeds)


def test_an_epoch_that_ends_with_a_round_that_counts_nothing(speeds):
    """It is over all the same: its schedule goes on, and its last body has left no trace."""

    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for x, y in loader:
                mute = (hand.round + 1) % (ROUNDS // EPOCHS) == 0
                if hand.alone and mute:
                    continue
                hand.weight(0 if mute else len(y))
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()

    recipe = Recipe(loop, model=Averaging, scheduler=lambda o: StepLR(o, 1, gamma=0.5))
    compare(recipe, speeds)


def test_a_loop_that_is_broken_off_within_a_round():
    model = Averaging()
    optimizer, closed = adam(model), []
    with mh.join() as run:
        data = DataLoader(Points(), BATCH)
        _, _, loader, _ = run.wrap(model, optimizer, data, max_pass=BATCH // 2)
        for batch in loader:
            mean_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.round == 1 and not run.round_closed:
                assert run.digest() != closed[0]  # buffers
                break
            closed = [run.digest()]
    assert run.digest() == closed[0]


def test_a_loss_that_is_a_sum(speeds):
    """p.grad is the mean over the samples, whatever their share; buffers are means too."""

    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
                (loss / len(y) if hand.alone else loss).backward()
                optimizer.step()
                optimizer.zero_grad()

    compare(Recipe(loop, model=Averaging, options={"loss": "sum"}), speeds)


# -- bodies that skip ----------------------------------------------------------------------------


def test_one_process_that_leaves_out_batches():
    """They come to nothing: what their forwards have left in buffers neither."""

    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                if hand.round % 3 == 1:
                    if not hand.alone:
                        model(batch[0])
                    continue
                body(hand, model, optimizer, batch)

    kit, _ = compare(Recipe(loop, model=Averaging), ALONE)
    assert len(kit.sizes) == ROUNDS


def test_a_peer_that_leaves_out_what_it_does_not_like():
    """Its samples do not count; it steps like all others."""

    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(6):
            for x, y in loader:
                # What comes after a skip has no samples, and must run its backward.
                if not hand.alone and hand.name == 1 and len(y) > 2:
                    continue
                body(hand, model, optimizer, (x, y))

    kits = together(Recipe(loop, epochs=6), (1, 1))
    assert kits[0].digest == kits[1].digest
    assert not torch.equal(kits[0].model[0].weight, Recipe(loop).make().model[0].weight)
    assert set(kits[1].losses) <= set(kits[0].losses)


class Fragile(nn.Module):
    """The gradient of its first layer fails on demand, when others have theirs already."""

    def __init__(self):
        super().__init__()
        self.net, self.broken = net(), False

    def forward(self, x):
        hidden = self.net[1](self.net[0](x))
        if hidden.requires_grad:
            hidden.register_hook(self._fail)
        return self.net[2](hidden)

    def _fail(self, grad):
        if self.broken:
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("again", [True, False])
def test_a_backward_that_fails(again):
    """The user goes on without the batch, or does it once more."""

    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                model.broken = hand.round % 3 == 1
                try:
                    mean_loss(model, batch).backward()
                except RuntimeError:
                    optimizer.zero_grad()
                    if not again:
                        continue
                    model.broken = False
                    mean_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    compare(Recipe(loop, model=Fragile), ALONE)


def test_a_gradient_that_is_no_number_does_not_count():
    """Without a scaler. In one process, of all samples of a round: there is no step."""

    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                nan = hand.round % 3 == 1
                (mean_loss(model, batch) * (float("nan") if nan else 1.0)).backward()
                if not (hand.alone and nan):
                    optimizer.step()
                optimizer.zero_grad()

    compare(Recipe(loop), ALONE)


def test_a_gradient_that_does_not_count_is_let_go():
    """It is as large as the model."""
    model = net()
    optimizer = adam(model)
    weight, gradients = model[0].weight, []
    weight.register_post_accumulate_grad_hook(lambda p: gradients.append(weakref.ref(p.grad)))
    with mh.join() as run:
        _, _, loader, _ = run.wrap(model, optimizer, DataLoader(Points(), BATCH), epochs=1)
        for number, batch in enumerate(loader):
            if number == 1:
                assert gradients[0]() is None
            loss = mean_loss(model, batch)
            (loss * math.nan if number == 0 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_all_stop_early_by_a_common_number():
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                loss = mean_loss(model, batch)
                mean, at = hand.mean(loss), hand.round
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                hand.learnt(mean)
                if (hand.alone or hand.round > at) and float(mean) < 1.05:
                    return

    *_, plain = compare(Recipe(loop), TWO)
    assert 1 < len(plain.losses) < ROUNDS


def test_a_loop_that_ends_while_the_last_of_the_others_dies():
    """What that had of the round comes to it while it waits for what the others do."""
    ended, leaving = threading.Event(), []

    def leave_late(rounds):
        """Its word comes to the meeting point after the death of the other."""
        leave = rounds.leave

        def wait_and_leave(finished):
            rounds.outlook.wait_for_view(lambda view: len(view.roster) == 1, 30)
            leave(finished=finished)

        def begin(finished):
            leaving.append(threading.Thread(target=wait_and_leave, args=(finished,)))
            leaving[0].start()
            ended.set()

        rounds.leave = begin

    def loop(hand, model, optimizer, loader, scheduler):
        for batch in loader:
            if hand.round == 2 and hand.is_leader:  # it adds up, and sees what others give
                leave_late(hand._session.conductor.rounds)
                return
            if hand.round == 2:
                assert ended.wait(30)
                raise RuntimeError("dies")
            body(hand, model, optimizer, batch)

    _, errors = gather(Recipe(loop), TWO)
    assert [str(error) for error in errors.values()] == ["dies"]
    leaving[0].join()


class Hesitant:
    """A link by which its peer is ready only after it has called this."""

    def __init__(self, link, hesitate):
        self._link, self._hesitate = link, hesitate

    def __getattr__(self, name):
        return getattr(self._link, name)

    def tell(self, word):
        if isinstance(word, Ready):
            self._hesitate()
        self._link.tell(word)


def test_a_loop_that_ends_before_a_newcomer_is_taken_in(monkeypatch):
    """It is the only member, and the other waits for the round that it does not compute."""
    going, coming, may_come = threading.Event(), threading.Event(), threading.Event()
    over, dial = [], session.dial

    def hesitate():
        coming.set()
        assert may_come.wait(30)

    def dial_hesitantly(address, me, *more):
        link = dial(address, me, *more)
        return Hesitant(link, hesitate) if me.name == "second" else link

    monkeypatch.setattr(session, "dial", dial_hesitantly)

    def come(view):
        return len(view.peers(PeerState.ACTIVE)) == 2

    def loop(run, model, optimizer, loader, *, stays):
        rounds = run._session.conductor.rounds
        while not stays or run.round < 100:
            for batch in loader:
                if not stays:
                    going.set()
                    # It comes between two commits, and so is no member of this round.
                    if coming.wait(COMING_S):
                        may_come.set()
                        rounds.outlook.wait_for_view(come, 30)
                        assert (len(run.roster), len(rounds.members)) == (2, 1)
                        return
                mean_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    def peer(name):
        model = net()
        with mh.join("local:///taken-in-by-nobody", name=name) as run:
            given = run.wrap(model, adam(model), DataLoader(Points(), BATCH))
            loop(run, *given[:3], stays=name == "second")
        over.append((name, name == "second" and run.round >= 100))

    threads = [threading.Thread(target=peer, args=(n,), daemon=True) for n in ("first", "second")]
    threads[0].start()
    assert going.wait(30)
    threads[1].start()
    threads[0].join(30)
    assert over == [("first", False)]
    threads[1].join(30)
    assert over == [("first", False), ("second", True)]


def test_a_loop_that_ends_with_a_turn_of_a_later_epoch():
    """A state has come that is further than this loop goes, and with it something to compute."""

    def loop(hand, model, optimizer, loader, scheduler):
        for batch in loader:
            body(hand, model, optimizer, batch)
        inner = hand._session.loader
        inner._held = inner._replica.next_turn()

    together(Recipe(loop), TWO)


# -- parameters ---------------------------------------------------------------------------------


class Branches(nn.Module):
    """Some parameters are frozen, some used by nobody, one by few samples, one is tied."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.unused = nn.Linear(FEATURES, 2)
        self.rare = nn.Linear(FEATURES, CLASSES)
        self.first = nn.Linear(FEATURES, FEATURES, bias=False)
        self.again = nn.Linear(FEATURES, FEATURES, bias=False)
        self.again.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)
        self.double()

    def forward(self, x):
        out = self.head(torch.tanh(self.again(torch.tanh(self.first(self.frozen(x))))))
        few = x[:, 1] > 1.0
        if few.any():
            out = out + torch.where(few[:, None], self.rare(x), 0.0)
        return out


def groups(model):
    return torch.optim.AdamW(
        [
            {"params": list(model.head.parameters()), "lr": 0.01},
            {"params": [p for n, p in model.named_parameters() if not n.startswith("head")]},
        ],
        lr=0.05,
        weight_decay=0.5,
    )


def test_parameters_that_are_frozen_unused_rare_tied_and_in_groups(speeds):
    *peers, _ = compare(Recipe(usual, model=Branches, optimizer=groups), speeds)
    torch.manual_seed(11)
    fresh = Branches()
    for kit in peers:
        for name in ("frozen", "unused"):
            mine, begun = getattr(kit.model, name), getattr(fresh, name)
            assert torch.equal(mine.weight, begun.weight), "weight decay has moved it"
            assert mine.weight.grad is None
        assert kit.model.again.weight is kit.model.first.weight
        assert not torch.equal(kit.model.rare.weight, fresh.rare.weight)
    rounds = Points().x[:, 1] > 1.0
    assert 0 < rounds.sum() < SIZE / 2  # some peers' samples only


def test_a_parameter_that_is_frozen_later(speeds):
    def loop(hand, model, optimizer, loader, scheduler):
        for epoch in range(EPOCHS):
            model[0].requires_grad_(epoch == 0)
            for batch in loader:
                body(hand, model, optimizer, batch)

    compare(Recipe(loop), speeds)


def test_a_parameter_that_is_unfrozen_later_is_refused_by_name():
    def frozen():
        model = net()
        model[0].requires_grad_(False)
        return model

    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                body(hand, model, optimizer, batch)
            model[0].requires_grad_(True)

    with pytest.raises(UsageError, match=r"0\.weight"):
        together(Recipe(loop, model=frozen))


def test_two_optimizers_and_several_schedules(speeds):
    def two(model):
        return [torch.optim.SGD(model[0].parameters(), lr=0.1), adam(model[2])]

    def schedules(optimizers):
        return [
            OneCycleLR(optimizers[0], max_lr=0.5, total_steps=ROUNDS + 1),
            StepLR(optimizers[1], 1, gamma=0.3),
        ]

    def loop(hand, model, optimizers, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                loss = mean_loss(model, batch)
                mean = hand.mean(loss)
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                scheduler[0].step()
                hand.learnt(mean)
            scheduler[1].step()

    compare(Recipe(loop, optimizer=two, scheduler=schedules), speeds)


def test_a_plateau_of_the_common_loss(speeds):
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                loss = mean_loss(model, batch)
                mean = hand.mean(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                hand.learnt(mean)
                scheduler.step(float(mean))

    def plateau(optimizer):
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    *peers, plain = compare(Recipe(loop, scheduler=plateau), speeds)
    assert plain.scheduler.get_last_lr()[0] < 0.05  # it has acted
    assert all(kit.scheduler.state_dict() == peers[0].scheduler.state_dict() for kit in peers)


@pytest.mark.parametrize("kind", ["foreach", "plain", "fused"])
def test_how_an_optimizer_computes(kind):
    how = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}

    def make(model):
        return torch.optim.Adam(model.parameters(), lr=0.05, **how[kind])

    compare(Recipe(usual, optimizer=make), TWO)


# -- gradients that are lent --------------------------------------------------------------------


@pytest.mark.parametrize("none", [True, False])
def test_references_to_gradients(none):
    """What the user keeps of p.grad is what torch would have left there."""
    kept = {}

    def loop(hand, model, optimizer, loader, scheduler):
        mine = kept.setdefault(id(hand), (hand.alone, [], []))
        for _ in range(EPOCHS):
            for batch in loader:
                optimizer.zero_grad(set_to_none=none)
                mean_loss(model, batch).backward()
                mine[1].append(model[0].weight.grad)
                mine[2].append(model[0].weight.grad.clone())
                optimizer.step()

    compare(Recipe(loop), TWO)
    (plain,) = [grads for is_alone, *grads in kept.values() if is_alone]
    for _, references, copies in kept.values():
        torch.testing.assert_close(references, plain[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(copies, plain[1], rtol=1e-9, atol=1e-9)
        assert (references[0] is references[-1]) == (not none)


def test_gradients_in_memory_of_the_users_own():
    """Views of one flat tensor, as some optimizers keep them."""
    flats = {}

    def loop(hand, model, optimizer, loader, scheduler):
        flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        at = 0
        for p in model.parameters():
            p.grad = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
        for _ in range(EPOCHS):
            for batch in loader:
                flat.zero_()
                mean_loss(model, batch).backward()
                flats.setdefault(hand.alone, []).append(flat.clone())
                optimizer.step()

    compare(Recipe(loop), ALONE)
    torch.testing.assert_close(flats[True], flats[False], rtol=1e-9, atol=1e-9)


def test_gradients_changed_by_the_user_before_clipping(speeds):
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                mean_loss(model, batch).backward()
                for p in model.parameters():
                    p.grad.mul_(0.1)
                hand.clip_grad_norm_(0.02)
                optimizer.step()
                optimizer.zero_grad()

    compare(Recipe(loop, optimizer=sgd), speeds)


# -- buffers ------------------------------------------------------------------------------------


class Averaging(nn.Module):
    """Buffers of all kinds: constant, infinite, replaced, not saved, counted."""

    def __init__(self):
        super().__init__()
        self.net = net()
        generator = torch.Generator().manual_seed(1)
        constant = torch.rand(50, generator=generator).double() / 3
        self.register_buffer("constant", constant.index_fill(0, torch.tensor([1]), -0.0))
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
        self.register_buffer("average", torch.zeros(FEATURES, dtype=torch.float64))
        self.register_buffer("fleeting", torch.ones((), dtype=torch.float64), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.tensor(False))

    def forward(self, x):
        # Linear in the samples: the mean over shares is that over the round.
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.fleeting.mul_(0.5).add_(x.detach().mean())
        self.count += 1
        self.flag.fill_(True)
        return self.net(x) + self.average[:CLASSES].detach() * 0 + self.mask[0, 0]


def test_buffers_of_all_kinds(speeds):
    *peers, _ = compare(Recipe(usual, model=Averaging), speeds)
    fresh = Averaging()
    for kit in peers:
        mine, begun = kit.model.constant, fresh.constant
        assert torch.equal(mine.view(torch.int64), begun.view(torch.int64)), "not to the last bit"
        assert torch.equal(kit.model.mask, fresh.mask)
        assert int(kit.model.count) == ROUNDS


def test_buffers_that_only_some_peers_change(speeds):
    class Rare(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.register_buffer("seen", torch.zeros(FEATURES, dtype=torch.float64))

        def forward(self, x):
            if (few := x[:, 1] > 1.0).any():
                self.seen += torch.where(few[:, None], x.detach(), 0.0).sum(0) / len(x)
            return self.net(x)

    compare(Recipe(usual, model=Rare), speeds)


class Counting(nn.Module):
    """Buffers that are no numbers to average, and depend on which samples are seen."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.uint8))
        self.register_buffer("signs", torch.zeros(FEATURES, dtype=torch.bool))
        self.register_buffer("fixed", torch.arange(5))
        self.register_buffer("wave", torch.zeros(2, dtype=torch.complex128))

    def forward(self, x):
        self.samples += len(x)
        self.passes += 1
        self.signs = x[0] > 0
        self.wave += torch.complex(x[:, :2], x[:, 2:4]).mean(0).detach()
        return self.net(x)


@pytest.mark.parametrize("options", [{}, {"max_pass": 2}], ids=["whole", "several passes"])
def test_buffers_that_have_no_mean_come_from_who_has_the_first_sample(speeds, options):
    """The same at all peers, and a counter of passes counts rounds."""
    kits = together(Recipe(usual, model=Counting, options=options), speeds)
    plain = alone(Recipe(usual, model=Counting))
    for kit in kits:
        assert kit.digest == kits[0].digest
        assert int(kit.model.passes) == ROUNDS
        assert torch.equal(kit.model.signs, plain.model.signs)
        assert torch.equal(kit.model.fixed, torch.arange(5))
        torch.testing.assert_close(kit.model.wave, plain.model.wave)
    counted = int(kits[0].model.samples)
    assert ROUNDS <= counted <= EPOCHS * SIZE
    assert (counted == EPOCHS * SIZE) == (speeds == ALONE and not options)


# -- rounds of several passes -------------------------------------------------------------------


@pytest.mark.parametrize("none", [True, False])
def test_a_share_in_several_passes(speeds, none):
    """In those that do not close the round, nothing happens that a user could see afterwards."""
    seen = []

    def ema(model):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        return {"ema": average}

    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                loss = mean_loss(model, batch)
                mean, at = hand.mean(loss), hand.round
                loss.backward()
                if not hand.alone and hand.round == at:
                    seen.append(at)
                    assert hand.clip_grad_norm_(1e-9) == 0.0
                    assert not any(p.grad.any() for p in model.parameters())
                optimizer.step()
                scheduler.step()
                hand.learnt(mean)
                hand.things["ema"].update_parameters(model)
                optimizer.zero_grad(set_to_none=none)

    recipe = Recipe(
        loop,
        model=Averaging,
        scheduler=lambda o: StepLR(o, 1, gamma=0.8),
        things=ema,
        options={"max_pass": 2},
    )
    *peers, plain = compare(recipe, speeds)
    assert len(seen) >= ROUNDS
    for kit in peers:
        assert max(kit.sizes) == 2
        assert int(kit.things["ema"].n_averaged) == ROUNDS == int(plain.things["ema"].n_averaged)


def test_several_passes_while_gradients_accumulate():
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                at = hand.round
                mean_loss(model, batch).backward()
                closed = hand.alone or hand.round > at
                if closed and at % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()

    compare(Recipe(loop, options={"max_pass": 3}), TWO)


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_last_round_of_an_epoch_dropped(speeds, shuffle):
    recipe = Recipe(
        usual, data=lambda: DataLoader(Points(), BATCH, shuffle=shuffle, drop_last=True)
    )
    *peers, _ = compare(recipe, speeds)
    assert len(peers[0].losses) == EPOCHS * 2


# -- mixed precision ----------------------------------------------------------------------------


def single():
    return net().float()


def autocast_loss(model, batch):
    x, y = batch
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x.float())
    return nn.functional.cross_entropy(out.float(), y)


def test_autocast(speeds):
    """With SGD: Adam makes a step of full size out of a gradient that is only rounding."""
    recipe = Recipe(
        with_loss(autocast_loss),
        model=single,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    compare(recipe, speeds, tolerance=1e-2)


@pytest.mark.parametrize(("clipped", "most"), [(False, None), (True, None), (True, 3)])
def test_a_scaler_skips_and_lowers_together(speeds, clipped, most):
    """One sample makes its peer's gradient infinite, at scales that are too high."""

    def scaled(model):
        return {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)}

    def loop(hand, model, optimizer, loader, scheduler):
        scaler = hand.things["scaler"]
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                mean = hand.mean(loss)
                worst = bool((x == Points().x[7]).all(1).any()) and scaler.get_scale() > 2.0**13
                scaler.scale(loss * (float("inf") if worst else 1.0)).backward()
                if clipped:
                    scaler.unscale_(optimizer)
                    hand.clip_grad_norm_(0.05)
                scaler.step(optimizer)
                scaler.update()
                hand.learnt(mean)

    recipe = Recipe(loop, optimizer=sgd, things=scaled, options={"max_pass": most})
    *peers, plain = compare(recipe, speeds)
    scales = [kit.things["scaler"].state_dict() for kit in (*peers, plain)]
    assert all(state == scales[-1] for state in scales)
    assert scales[-1]["scale"] != 2.0**14


# -- models -------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    reentrant = True

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = checkpoint(lambda h: torch.tanh(self.second(h)), h, use_reentrant=self.reentrant)
        # Its parameters have the first gradients of all, in a graph of their own.
        return checkpoint(self.last, h, use_reentrant=self.reentrant)


class Light(Checkpointed):
    reentrant = False


@dataclass
class Out:
    logits: torch.Tensor
    extra: object = None


class Dressed(Checkpointed):
    """Its output is something else than a tensor; with reentrant checkpoints that matters."""

    def __init__(self, dress):
        super().__init__()
        self.dress = dress

    def forward(self, x):
        return self.dress(super().forward(x))


def test_activation_checkpoints(speeds):
    compare(Recipe(usual, model=Checkpointed), speeds)
    compare(Recipe(usual, model=Light), speeds)


@pytest.mark.parametrize(
    ("dress", "undress"),
    [
        (lambda t: {"a": {"logits": t}}, lambda o: o["a"]["logits"]),
        (lambda t: ("x", [t]), lambda o: o[1][0]),
        (lambda t: Out(t), lambda o: o.logits),
        (lambda t: [Out(torch.ones(1), {"in": t})], lambda o: o[0].extra["in"]),
    ],
    ids=["dict", "tuple", "dataclass", "nested"],
)
def test_outputs_of_any_form(dress, undress):
    def loss_of(model, batch):
        x, y = batch
        return nn.functional.cross_entropy(undress(model(x)), y)

    compare(Recipe(with_loss(loss_of), model=lambda: Dressed(dress)), TWO)


def test_a_method_that_is_not_forward(speeds):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def score(self, x, y):
            return nn.functional.cross_entropy(self.net(x), y)

    compare(Recipe(with_loss(lambda model, batch: model.score(*batch)), model=Other), speeds)


def test_a_model_called_several_times(speeds):
    def loss_of(model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y) + model(-x).square().mean()

    compare(Recipe(with_loss(loss_of)), speeds)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model(in_place, backend):
    def compiled():
        model = net()
        if not in_place:
            return torch.compile(model, backend=backend)
        model.compile(backend=backend)
        return model

    # Peers are not threads here: the compiler is one for all of them.
    torch._dynamo.reset()
    kits = together(Recipe(usual, model=compiled))
    plain = alone(Recipe(usual))
    inner = getattr(kits[0].model, "_orig_mod", kits[0].model)
    check([replace(kits[0], model=inner)], plain)


class Images(Points):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x.repeat(12).reshape(2, 6, 6), y


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.turned = nn.Parameter(torch.randn(CLASSES, 64).t())  # not contiguous
        self.double().to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.conv(x.contiguous(memory_format=torch.channels_last)).flatten(1) @ self.turned


def test_gradients_that_are_not_contiguous(speeds):
    compare(Recipe(usual, model=Conv, data=lambda: DataLoader(Images(), BATCH, True)), speeds)
    assert not Conv().conv.weight.is_contiguous()
    assert not Conv().turned.is_contiguous()


def test_copies_of_the_model_are_watched_by_nobody():
    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for x, y in loader:
                best, sent = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
                for other in (best, sent):
                    other(x).sum().backward()
                    assert other[0].weight.grad is not None
                body(hand, model, optimizer, (x, y))

    compare(Recipe(loop), ALONE)


# -- refused, by name ---------------------------------------------------------------------------


def test_a_sparse_gradient_is_refused():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(CLASSES, 4, sparse=True).double()

    def loop(hand, model, optimizer, loader, scheduler):
        for _, y in loader:
            model.words(y).sum().backward()

    with pytest.raises(UsageError, match=r"words\.weight is sparse") as raised:
        together(Recipe(loop, model=Words, optimizer=sgd))
    assert "sparse=False" in raised.value.hint


def test_optimizers_that_cannot_work():
    def lbfgs(model):
        return torch.optim.LBFGS(model.parameters())

    def stray(model):
        return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3, 2))])

    with pytest.raises(UsageError, match="LBFGS"):
        together(Recipe(usual, optimizer=lbfgs))
    with pytest.raises(UsageError, match=r"SGD has a parameter of shape \(3, 2\)"):
        together(Recipe(usual, optimizer=stray))


def test_a_step_with_a_closure_is_refused():
    def loop(hand, model, optimizer, loader, scheduler):
        for batch in loader:

            def closure(batch=batch):
                loss = mean_loss(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)

    with pytest.raises(UsageError, match="closure"):
        together(Recipe(loop))
    with pytest.raises(UsageError, match="closure"):
        together(Recipe(loop, scheduler=lambda o: StepLR(o, 1)))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Halves(torch.utils.data.Sampler):
    def __iter__(self):
        yield [0, 1]


@pytest.mark.parametrize(
    ("make", "named", "remedy"),
    [
        (lambda: DataLoader(Stream(), 2), "IterableDataset", "map-style"),
        (
            lambda: DataLoader(Points(), 2, sampler=DistributedSampler(Points(), 2, 0)),
            "DistributedSampler",
            "shuffle",
        ),
        (lambda: DataLoader(Points(), batch_sampler=Halves()), "Halves", "batch_size"),
        (lambda: DataLoader(Points(), batch_size=None), "batch_size=None", "batch_size"),
        (
            lambda: DataLoader(Points(), batch_sampler=BatchSampler(range(SIZE), 4, False)),
            "whose batches a BatchSampler makes up",
            "batch_size",
        ),
        (lambda: DataLoader(Points(), 2, sampler=Halves()), "Halves", "Subset"),
        (lambda: Points(), "Points", "global_batch"),
        (lambda: iter([1, 2]), "list_iterator", ""),
    ],
)
def test_data_that_cannot_work(make, named, remedy):
    with pytest.raises(UsageError, match=named) as raised:
        together(Recipe(usual, data=make))
    assert remedy in raised.value.hint


def test_calls_in_the_wrong_order():
    model = net()
    with mh.join("local:///wrong-order", seed=SEED) as run:
        for call in (lambda: run.mean(1.0), lambda: run.weight(1), run.no_sync, lambda: run.round):
            with pytest.raises(UsageError, match="no model yet") as raised:
                call()
            assert "wrap" in raised.value.hint
        run.wrap(model, adam(model), DataLoader(Points(), 4))
        with pytest.raises(UsageError, match="has its model"):
            run.wrap(model, adam(model), DataLoader(Points(), 4))
        with pytest.raises(UsageError, match="after wrap"):
            run.register(ema=AveragedModel(model))


def test_a_wrap_that_fails_leaves_everything_as_it_was():
    class Odd(LambdaLR):
        def state_dict(self):
            return {"what": object()}

    model = net()
    optimizer = adam(model)
    odd = Odd(optimizer, lambda step: 0.5)
    with pytest.raises(ManyhandsError), mh.join("local:///fails", seed=SEED) as run:
        run.wrap(model, optimizer, DataLoader(Points(), 4), odd)
    before = model[0].weight.detach().clone()
    mean_loss(model, (Points().x, Points().y)).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


# -- data ---------------------------------------------------------------------------------------


def named(samples):
    xs, ys = zip(*samples, strict=True)
    return {"x": torch.stack(xs) * 2, "y": torch.stack(ys)}


def test_a_collate_function_and_a_subset(speeds):
    def data():
        return DataLoader(Subset(Points(), range(3, 24)), 8, shuffle=True, collate_fn=named)

    def loss_of(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    compare(Recipe(with_loss(loss_of), data=data), speeds)


def test_a_raw_data_set_with_a_global_batch(speeds):
    compare(Recipe(usual, data=Points, options={"global_batch": 9}), speeds)


def test_what_a_loop_asks_its_loader():
    def loop(hand, model, optimizer, loader, scheduler):
        if not hand.alone:
            assert len(loader) == 3
            assert len(loader.dataset) == SIZE
            assert loader.batch_size == BATCH
        usual(hand, model, optimizer, loader, scheduler)

    compare(Recipe(loop), ALONE)


def test_the_order_of_the_samples_themselves(speeds):
    compare(Recipe(usual, data=lambda: DataLoader(Points(), BATCH)), speeds)


def test_pinned_memory_where_there_is_no_device():
    compare(Recipe(usual, data=lambda: DataLoader(Points(), BATCH, True, pin_memory=True)), ALONE)


# -- before, between and after -------------------------------------------------------------------


def test_evaluation_and_backwards_between_epochs(speeds):
    """They are the user's own, and change nothing."""
    points = Points()

    def loop(hand, model, optimizer, loader, scheduler):
        mean_loss(model, (points.x[:3], points.y[:3])).backward()  # before the first epoch
        model.zero_grad()
        for _ in range(EPOCHS):
            model.train()
            for batch in loader:
                body(hand, model, optimizer, batch)
                with torch.no_grad():
                    model(points.x)
            model.eval()
            with torch.no_grad():
                hand.things.setdefault("seen", Note()).add(mean_loss(model, (points.x, points.y)))
            model.zero_grad()
            mean_loss(model, (points.x[:5], points.y[:5])).backward()
            mine = [p.grad.clone() for p in model.parameters()]
            again = copy.deepcopy(model)
            again.zero_grad()
            mean_loss(again, (points.x[:5], points.y[:5])).backward()
            theirs = [p.grad for p in again.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
            model.zero_grad()
            scheduler.step()

    compare(Recipe(loop, scheduler=lambda o: StepLR(o, 1, gamma=0.1)), speeds)


class Note:
    """What a loop has seen."""

    def __init__(self):
        self.values = []

    def add(self, value):
        self.values.append(value)

    def state_dict(self):
        return {str(i): v for i, v in enumerate(self.values)}


def test_afterwards_all_are_ordinary_objects():
    def loop(hand, model, optimizer, loader, scheduler):
        for batch in loader:
            body(hand, model, optimizer, batch)
        for _ in loader:
            # One more schedule, made where a step would do nothing: it keeps that step.
            hand.things["late"] = StepLR(optimizer, 1)
            break

    (kit,) = together(Recipe(loop, scheduler=lambda o: StepLR(o, 1, gamma=0.5)))
    (bare,) = together(Recipe(loop))
    for made in (kit, bare):
        before = made.model[0].weight.detach().clone()
        for _ in range(2):
            made.model.zero_grad()
            mean_loss(made.model, (Points().x, Points().y)).backward()
            made.optimizer.step()
        assert not torch.equal(made.model[0].weight, before)
        assert not made.model._forward_hooks
        assert type(made.optimizer) is torch.optim.AdamW
        made.things["late"].step()
    kit.scheduler.step()
    assert kit.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5 * 0.1)
    assert type(kit.scheduler) is StepLR
    assert "step" not in vars(kit.scheduler)


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import manyhands as mh

torch.manual_seed(0)
x = torch.randn(64, 4)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with mh.join() as run:
    model, optimizer, loader, _ = run.wrap(model, optimizer, data)
    for epoch in range(20):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
print(f"loss {loss.item():.6f} after {run.round} rounds")
"""


def test_a_script_by_itself(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    (tmp_path / "train.py").unlink()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "loss 0.000000 after 80 rounds\n", done.stdout
    assert done.stderr == ""
