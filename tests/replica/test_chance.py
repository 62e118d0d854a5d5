"""Loops that draw random numbers, from peers that are processes: generators are one a process."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import manyhands as mh
from manyhands.data.calendar import Calendar
from manyhands.data.order import Order
from manyhands.replica.replica import seed_of_pass
from tests.replica.loops import (
    ALONE,
    BATCH,
    CLASSES,
    EPOCHS,
    FEATURES,
    PATIENCE_S,
    SEED,
    SIZE,
    THREE,
    TWO,
    Kit,
    Points,
    Recipe,
    adam,
    check,
    mean_loss,
    take_part,
)

GRAIN = 4
ROUNDS = EPOCHS * -(-SIZE // BATCH)


def batchy() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        nn.Tanh(),
        nn.Linear(8, CLASSES),
    ).double()


def noisy(hand, model, optimizer, loader, scheduler):
    """Random numbers before the round closes, and after it."""
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss = mean_loss(model, batch)
            mean = hand.mean(loss)
            loss.backward()
            for p in model.parameters():
                p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
            optimizer.step()
            hand.learnt(mean)


class Augmented(Points):
    """Every look at a sample is another one."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(FEATURES, dtype=torch.float64), y


def augmented(**options):
    return Recipe(usual, data=lambda: DataLoader(Augmented(), BATCH, shuffle=True, **options))


def usual(hand, model, optimizer, loader, scheduler):
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss = mean_loss(model, batch)
            mean = hand.mean(loss)
            loss.backward()
            optimizer.step()
            hand.learnt(mean)


def recipes() -> dict[str, Recipe]:
    """Made in every process: most of what they are made of cannot be sent there."""
    return {
        "grains": Recipe(noisy, model=batchy, options={"grain_size": GRAIN}),
        "augmented": augmented(),
        "workers": augmented(num_workers=2),
    }


def peer(answers, name: str, url: str, peers: int, number: int, speed: int) -> None:
    torch.set_num_threads(1)
    recipe = recipes()[name]
    kit = recipe.make()
    take_part(recipe, kit, url, peers, number, speed)
    # As plain bytes: tensors would come through shared memory, one descriptor each.
    state = {n: (v.dtype, v.tolist()) for n, v in kit.model.state_dict().items()}
    answers.send((kit.losses, kit.sizes, kit.digest, state))
    answers.close()


@pytest.fixture(scope="module")
def context(_torch):
    """A server that has loaded torch, and forks peers."""
    made = multiprocessing.get_context("forkserver")
    # The compiler too: optimizers load it when they first step.
    made.set_forkserver_preload(["tests.replica.test_chance", "torch._dynamo"])
    forkserver.ensure_running()
    yield made
    forkserver._forkserver._stop()


@pytest.fixture
def peers_of(context):
    """Runs the peers of a recipe; their kits."""
    with mh.Hub("127.0.0.1:0", insecure=True) as hub:

        def run(name: str, speeds: tuple[int, ...]) -> list[Kit]:
            url = f"hub://127.0.0.1:{hub.address.port}/{name}-{len(speeds)}?insecure=1"
            started, kits = [], []
            for number, speed in enumerate(speeds):
                mine, theirs = context.Pipe(duplex=False)
                args = (theirs, name, url, len(speeds), number, speed)
                process = context.Process(target=peer, args=args)
                process.start()
                theirs.close()
                started.append((process, mine))
            try:
                for process, answers in started:
                    assert answers.poll(PATIENCE_S), "a peer does not end"
                    kits.append(_kit(recipes()[name], *answers.recv()))
                    process.join(PATIENCE_S)
                    assert process.exitcode == 0
            finally:
                for process, answers in started:
                    process.kill()
                    process.join()
                    process.close()
                    answers.close()
            return kits

        yield run


def _kit(recipe: Recipe, losses, sizes, digest, state) -> Kit:
    kit = recipe.make()
    kit.losses, kit.sizes, kit.digest = losses, sizes, digest
    kit.model.load_state_dict({n: torch.tensor(v, dtype=d) for n, (d, v) in state.items()})
    return kit


def in_grains() -> Kit:
    """One process without anything of ours but the order and the seeds."""
    kit = recipes()["grains"].make()
    model, optimizer, data = kit.model, kit.optimizer, Points()
    calendar = Calendar(SIZE, BATCH)
    for number in range(ROUNDS):
        epoch, start, stop = calendar.span(number)
        places = Order(SIZE, seed=SEED, epoch=epoch).indices(start, stop)
        before = {n: b.clone() for n, b in model.named_buffers()}
        after = {n: torch.zeros_like(b, dtype=torch.float64) for n, b in before.items()}
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, len(places), GRAIN):
            chosen = places[first : first + GRAIN]
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            torch.manual_seed(seed_of_pass(SEED, number, first // GRAIN))
            share = len(chosen) / len(places)
            loss = mean_loss(model, (data.x[chosen], data.y[chosen]))
            (loss * share).backward()
            total += float(loss.detach()) * share
            for name, buffer in model.named_buffers():
                after[name] += buffer * share
        for name, buffer in model.named_buffers():
            buffer.copy_(after[name] if buffer.is_floating_point() else before[name] + 1)
        torch.manual_seed(seed_of_pass(SEED, number, None))
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
        optimizer.step()
        kit.losses.append(total)
    kit.optimizer = adam(model)  # its state did not travel
    return kit


@pytest.mark.parametrize("speeds", [ALONE, THREE], ids=["alone", "three"])
def test_batch_normalisation_dropout_and_noise_in_grains(peers_of, speeds):
    kits = peers_of("grains", speeds)
    check(kits, in_grains())
    assert int(kits[0].model[1].num_batches_tracked) == ROUNDS
    assert max(kits[0].sizes) == GRAIN


def test_worker_processes_read_the_same_samples(peers_of):
    """Augmented by chance: each sample by its own, whoever reads it and in which process."""
    (plain,) = peers_of("augmented", ALONE)
    check(peers_of("workers", TWO), plain)
