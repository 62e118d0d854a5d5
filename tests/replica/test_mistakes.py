"""Loops that would train something else than they say, or nothing at all: told so, by name."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import manyhands as mh
from manyhands.core.errors import UsageError
from manyhands.replica.gates import Gate
from tests.replica.loops import ALONE, BATCH, TWO, Points, Recipe, adam, mean_loss, net, together


def between(hand, model, optimizer, scheduler, batch):
    """As those of a GAN do, after the hint of the error that it would be without no_sync."""
    with hand.no_sync():
        mean_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    mean_loss(model, batch).backward()


def before(hand, model, optimizer, scheduler, batch):
    optimizer.step()
    optimizer.zero_grad()
    mean_loss(model, batch).backward()


def schedule_before(hand, model, optimizer, scheduler, batch):
    scheduler.step()
    mean_loss(model, batch).backward()
    optimizer.step()


def within(hand, model, optimizer, scheduler, batch):
    """To save memory: each gradient is let go once it was used."""
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    try:
        mean_loss(model, batch).backward()
    finally:
        handle.remove()


@pytest.mark.parametrize("body", [between, before, schedule_before, within])
@pytest.mark.parametrize("speeds", [ALONE, TWO], ids=["alone", "two"])
def test_a_step_that_comes_before_its_backward(body, speeds):
    def loop(hand, model, optimizer, loader, scheduler):
        for batch in loader:
            body(hand, model, optimizer, scheduler, batch)

    with pytest.raises(UsageError, match="before the backward that closes the round") as raised:
        together(Recipe(loop, scheduler=lambda o: StepLR(o, 1)), speeds)
    assert "after the last backward" in raised.value.hint
    assert "run.round" in raised.value.hint


def test_a_step_without_any_backward_is_no_mistake():
    """Of a batch that is left out."""

    def loop(hand, model, optimizer, loader, scheduler):
        for number, batch in enumerate(loader):
            if number != 1:
                mean_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    together(Recipe(loop))


def test_iterations_that_only_accumulate_are_warned_of_once(caplog):
    """As with torch's DDP: the last of several iterations would bring the others' gradients."""

    def loop(hand, model, optimizer, loader, scheduler):
        for number, batch in enumerate(loader):
            if number < 2:
                with hand.no_sync():
                    mean_loss(model, batch).backward()
                continue
            mean_loss(model, batch).backward()
            optimizer.step()

    together(Recipe(loop))
    (said,) = [r.getMessage() for r in caplog.records if "no_sync" in r.getMessage()]
    assert said.startswith("round 0: ")
    assert "count nothing" in said
    assert "run.round" in said


def amp(model, optimizer, loader, scaler):
    for batch in loader:
        optimizer.zero_grad()
        scaler.scale(mean_loss(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scheduled", [True, False])
def test_a_scaler_that_the_run_does_not_know(fused, scheduled):
    model = net().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scheduler = StepLR(optimizer, 1) if scheduled else None
    with mh.join() as run:
        data = DataLoader(Floats(), BATCH)
        _, _, loader, _ = run.wrap(model, optimizer, data, scheduler, epochs=1)
        with pytest.raises(UsageError, match="GradScaler") as raised:
            amp(model, optimizer, loader, torch.amp.GradScaler("cpu"))
    assert "run.register(scaler=scaler)" in raised.value.hint


def test_a_scaler_may_be_known_by_what_it_is_wrapped_in():
    """As libraries do, whose wrapper has the scaler's state."""

    class Wrapped:
        def __init__(self, scaler):
            self._scaler = scaler
            self.state_dict, self.load_state_dict = scaler.state_dict, scaler.load_state_dict

    model = net().float()
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    with mh.join() as run:
        run.register(scaler=Wrapped(scaler))
        _, _, loader, _ = run.wrap(model, optimizer, DataLoader(Floats(), BATCH), epochs=1)
        amp(model, optimizer, loader, scaler)
    assert run.round == 3


def test_a_scaler_that_does_nothing_need_not_be_known():
    model = net().float()
    optimizer = adam(model)
    with mh.join() as run:
        _, _, loader, _ = run.wrap(model, optimizer, DataLoader(Floats(), BATCH), epochs=1)
        amp(model, optimizer, loader, torch.amp.GradScaler("cpu", enabled=False))
    assert run.round == 3


class Floats(Points):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x.float(), y


@pytest.mark.parametrize("name", ["model", "buffers", "gradients"])
def test_a_name_that_the_state_has_already(name):
    with mh.join() as run, pytest.raises(UsageError, match=rf"register\({name}=") as raised:
        run.register(**{name: nn.Linear(2, 2)})
    assert "another name" in raised.value.hint


@pytest.mark.parametrize("thing", [None, object()])
def test_a_thing_without_a_state(thing):
    with mh.join() as run, pytest.raises(UsageError, match="ema") as raised:
        run.register(ema=thing)
    assert type(thing).__name__ in raised.value.message


@pytest.mark.parametrize("known", ["given", "registered", "forgotten"])
def test_a_scheduler_that_was_not_given(known, caplog):
    model = net()
    optimizer = adam(model)
    scheduler = StepLR(optimizer, 1)
    with mh.join() as run:
        if known == "registered":
            run.register(schedule=scheduler)
        given = scheduler if known == "given" else None
        _, _, loader, _ = run.wrap(model, optimizer, DataLoader(Points(), BATCH), given, epochs=1)
        for batch in loader:
            mean_loss(model, batch).backward()
            optimizer.step()
    assert ("AdamW has a scheduler" in caplog.text) == (known == "forgotten")


def test_who_steps_keeps_no_batch_for_it():
    """The loop is looked at, to find a scaler: what it had then must not live as long as it."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gate = Gate()
    gate.guard(optimizer, "step")
    gate.open = True
    batch = Points().x.clone()
    kept = weakref.ref(batch)
    optimizer.step()
    del batch
    assert kept() is None
