"""Gradients that are added up over several rounds: part of the state, like all that is learnt."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import manyhands as mh
from manyhands.core.errors import LinkTimeout, UsageError
from manyhands.core.peers import PeerState
from manyhands.replica.deviation import Deviated
from manyhands.replica.gradients import Gradients, parameters_of
from manyhands.replica.state import TrainingState
from tests.replica.loops import BATCH, COMING_S, EPOCHS, FEATURES, SEED, Points, mean_loss, net

PATIENCE_S = 60.0


class Rare(nn.Module):
    """One layer is used by the first round only: what becomes of it depends on its p.grad."""

    def __init__(self):
        super().__init__()
        self.net, self.first = net(), nn.Linear(FEATURES, 3).double()

    def forward(self, x, *, rare):
        return self.net(x) + (self.first(x) if rare else 0.0)


def train(options, *, every, none=True, stop=None, first=False, anew=False, epochs=EPOCHS):
    """Steps after `every` rounds; ends after `stop`. `first`: zeroes when a body begins; `anew`:
    also when an epoch does, and before the first.
    """
    torch.manual_seed(11)
    model = Rare()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    with mh.join(seed=SEED) as run:
        data = DataLoader(Points(), BATCH, shuffle=True)
        _, _, loader, _ = run.wrap(model, optimizer, data, epochs=epochs, **options)
        if anew:
            optimizer.zero_grad(set_to_none=none)
        for _ in range(epochs):
            if anew:
                optimizer.zero_grad(set_to_none=none)
            for x, y in loader:
                if first and run.round % every == 0:
                    optimizer.zero_grad(set_to_none=none)
                out = model(x, rare=run.round == 0)
                (nn.functional.cross_entropy(out, y) / every).backward()
                if run.round_closed and run.round % every == 0:
                    optimizer.step()
                    if not first:
                        optimizer.zero_grad(set_to_none=none)
                if run.round == stop:
                    return run.digest()
    return run.digest()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_run_that_stopped_between_two_steps_goes_on_from_there(tmp_path, every, none, first):
    given = {"every": every, "none": none, "first": first}
    whole = train({}, **given)
    options = {"checkpoints": str(tmp_path), "save_every": 1}
    train(options, stop=3, **given)
    assert train(options | {"resume": True}, **given) == whole


@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize(("every", "stop"), [(2, 1), (2, 3), (2, 5), (3, 1), (3, 5)])
def test_what_a_loop_zeroes_before_its_first_body_is_not_what_was_saved(
    tmp_path, every, stop, none
):
    """Three rounds are an epoch, each of which zeroes what the one before has left."""
    given = {"every": every, "none": none, "anew": True}
    whole = train({}, **given)
    options = {"checkpoints": str(tmp_path), "save_every": 1}
    train(options, stop=stop, **given)
    assert train(options | {"resume": True}, **given) == whole


def test_a_run_that_ended_and_goes_on_zeroes_what_one_that_never_ended_does(tmp_path):
    given = {"every": 2, "anew": True}
    whole = train({}, epochs=4, **given)
    options = {"checkpoints": str(tmp_path)}
    train(options, epochs=3, **given)
    assert train(options | {"resume": True}, epochs=4, **given) == whole


@pytest.mark.parametrize(("batch", "epochs", "anew"), [(BATCH, 30, False), (1, 4, True)])
def test_who_joins_between_two_steps_has_what_the_others_have_added_up(batch, epochs, anew):
    """The only step is after the last round: whenever it comes, there is something. `anew`: each
    epoch zeroes, and ends with a step.
    """
    started, kits = threading.Event(), {}

    def peer(name, url):
        torch.manual_seed(11)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mh.join(url, name=name, seed=SEED) as run:
            data = DataLoader(Points(), batch, shuffle=True)
            _, _, loader, _ = run.wrap(model, optimizer, data, epochs=epochs)
            every = len(loader) * (1 if anew else epochs)
            rounds = run._session.conductor.rounds
            for _ in range(epochs):
                if anew:
                    optimizer.zero_grad()
                for points in loader:
                    if name == "first" and run.round >= len(loader) + 2:
                        started.set()
                        with suppress(LinkTimeout):  # not too fast for one that comes
                            rounds.outlook.wait_for_view(are_two, COMING_S)
                    mean_loss(model, points).backward()
                    if run.round_closed and run.round % every == 0:
                        optimizer.step()
            came = [event for event in run.events if isinstance(event, Deviated)]
        kits[name] = ([p.detach() for p in model.parameters()], run.digest(), came)

    def are_two(view):
        return len(view.peers(PeerState.ACTIVE)) == 2

    url = f"local:///added-up-{anew}"
    threads = [threading.Thread(target=peer, args=(n, url), daemon=True) for n in ("first", "late")]
    threads[0].start()
    assert started.wait(PATIENCE_S)
    threads[1].start()
    for thread in threads:
        thread.join(PATIENCE_S)
    peer("alone", f"{url}-alone")
    assert kits["late"][1] == kits["first"][1]
    assert not kits["late"][2]
    for mine, plain in zip(kits["late"][0], kits["alone"][0], strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-9)


def test_a_state_that_was_saved_without_gradients_is_taken():
    model = net()
    gradients = Gradients(model, parameters_of(model, []))
    state = TrainingState(model, {}, gradients)
    tree = state.tree()
    assert tree.pop("gradients") == {}
    mean_loss(model, (Points().x, Points().y)).backward()
    assert set(state.tree()["gradients"]) == dict(model.named_parameters()).keys()
    state.load(tree)
    gradients.begin_round()
    assert all(p.grad is None for p in model.parameters())


def test_a_state_that_has_come_is_given_on_before_its_first_body_too():
    model, other = net(), net()
    mine = Gradients(model, parameters_of(model, []))
    joined = Gradients(other, parameters_of(other, []))
    mean_loss(model, (Points().x, Points().y)).backward()
    joined.load_state_dict(mine.state_dict())
    other.zero_grad()
    assert joined.state_dict() == mine.state_dict()
    joined.begin_round()
    for (name, p), value in zip(other.named_parameters(), mine.state_dict().values(), strict=True):
        assert torch.equal(p.grad, value), name
    other.zero_grad()
    joined.begin_round()
    assert joined.state_dict() == {}


@pytest.mark.parametrize("wrong", [torch.zeros(2), "text"])
def test_a_gradient_of_another_form_is_refused(wrong):
    model = net()
    gradients = Gradients(model, parameters_of(model, []))
    with pytest.raises(UsageError, match=r"0\.weight"):
        gradients.load_state_dict({"0.weight": wrong})


def test_who_has_joined_says_the_same_of_gradients_as_who_has_stepped():
    """A state comes in pieces of several peers, which have to fit."""
    model, other = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = Gradients(model, parameters_of(model, []))
    joined = Gradients(other, parameters_of(other, []))
    mean_loss(model, (Points().x, Points().y)).backward()
    optimizer.step()
    mine.stepped(optimizer)
    joined.load_state_dict(mine.state_dict())
    assert joined.state_dict() == mine.state_dict() == dict.fromkeys(mine.state_dict())


def test_a_pass_that_was_undone_left_nothing_that_a_step_needs():
    model = net()
    gradients = Gradients(model, parameters_of(model, []))
    gradients.begin_backward()
    mean_loss(model, (Points().x, Points().y)).backward()
    gradients.undo()
    assert gradients.state_dict() == {name: None for name, _ in model.named_parameters()}
