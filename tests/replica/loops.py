"""A user's loop, run twice: by peers of a run, and by one process with nothing of ours.

A loop is a function of (hand, model, optimizer, loader, scheduler). For peers these are what
`wrap` returns; for the one process they are plain objects, `Plain` has the few methods of a run
that a loop calls, and the loader yields whole rounds. Only the order of the samples is ours.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import manyhands as mh
from manyhands.core.errors import LinkTimeout
from manyhands.core.peers import PeerState
from manyhands.data.calendar import Calendar
from manyhands.data.order import Order

SIZE, BATCH, EPOCHS, SEED = 28, 10, 2, 5  # the last round of an epoch is shorter
FEATURES, CLASSES = 6, 3
PATIENCE_S = 60.0
COMING_S = 0.05
ALONE, TWO, THREE = (1,), (3, 1), (5, 2, 1)  # speeds: shares follow them

_runs = itertools.count()


class Points(Dataset):
    """Points and their labels."""

    def __init__(self, size: int = SIZE) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, CLASSES, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def mean_loss(model: nn.Module, batch) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


@dataclass
class Recipe:
    """What is trained, and how. All callables: every peer makes its own."""

    loop: Callable[..., None]
    model: Callable[[], nn.Module] = net
    optimizer: Callable[[nn.Module], Any] = adam
    scheduler: Callable[[Any], Any] = lambda optimizer: None
    things: Callable[[nn.Module], dict[str, Any]] = lambda model: {}
    data: Callable[[], Any] = lambda: DataLoader(Points(), BATCH, shuffle=True)
    epochs: int = EPOCHS
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Kit:
        torch.manual_seed(11)
        model = self.model()
        optimizer = self.optimizer(model)
        return Kit(model, optimizer, self.scheduler(optimizer), self.things(model))


@dataclass
class Kit:
    """One peer's own."""

    model: nn.Module
    optimizer: Any
    scheduler: Any
    things: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # of the batches that its loop met
    digest: bytes = b""


class Plain:
    """A run of one process: most of what a loop may call has nothing to do."""

    def __init__(self, recipe: Recipe, kit: Kit) -> None:
        self.recipe, self.kit = recipe, kit
        self.round, self.things, self.alone = 0, kit.things, True

    def no_sync(self):
        return nullcontext()

    def weight(self, value) -> None:
        pass

    def clip_grad_norm_(self, most: float) -> float:
        return float(nn.utils.clip_grad_norm_(self.kit.model.parameters(), most))

    def mean(self, value, name: str = "loss") -> float:
        return float(value.detach()) if isinstance(value, torch.Tensor) else value

    def learnt(self, loss) -> None:
        self.kit.losses.append(float(loss))

    def loader(self) -> PlainLoader:
        return PlainLoader(self)


class PlainLoader:
    """The whole batch of each round."""

    def __init__(self, plain: Plain) -> None:
        self._plain, self._epoch = plain, -1

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        data = self._plain.recipe.data()
        given = isinstance(data, DataLoader)
        dataset = data.dataset if given else data
        batch = data.batch_size if given else self._plain.recipe.options["global_batch"]
        shuffle = not isinstance(getattr(data, "sampler", None), torch.utils.data.SequentialSampler)
        calendar = Calendar(len(dataset), batch, given and data.drop_last)
        order = Order(len(dataset), seed=SEED, epoch=self._epoch, shuffle=shuffle)
        for turn in range(calendar.rounds_per_epoch):
            _, start, stop = calendar.span(turn)
            samples = [dataset[int(place)] for place in order.indices(start, stop)]
            yield (data.collate_fn if given else default_collate)(samples)
            self._plain.round += 1


class Hand:
    """A run, with what the tests note down of it."""

    def __init__(self, run: mh.Run, kit: Kit, number: int) -> None:
        self._run, self._kit = run, kit
        self.things, self.alone = kit.things, False
        self.closed, self.name = 0, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def learnt(self, loss) -> None:
        """What the loop saw as the loss of a round, in the pass that has closed it."""
        if self._run.round > self.closed:
            self.closed = self._run.round
            self._kit.losses.append(float(loss))


class Seen:
    """A loader that notes the size of what it yields, and lets the others come in first."""

    def __init__(self, loader, kit: Kit, rounds, peers: int) -> None:
        self._loader, self._kit = loader, kit
        self._rounds, self._peers = rounds, peers

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self):
        for batch in self._loader:
            if len(self._rounds.members) < self._peers:
                # A newcomer needs rounds that go on, but not that quickly.
                with suppress(LinkTimeout):
                    self._rounds.outlook.wait_for_view(self._all_in, COMING_S)
            leaf = batch
            while not isinstance(leaf, torch.Tensor):
                leaf = next(iter(leaf.values() if isinstance(leaf, dict) else leaf))
            self._kit.sizes.append(len(leaf))
            yield batch

    def _all_in(self, view) -> bool:
        return len(view.peers(PeerState.ACTIVE)) >= self._peers


def alone(recipe: Recipe) -> Kit:
    """The oracle."""
    kit = recipe.make()
    plain = Plain(recipe, kit)
    recipe.loop(plain, kit.model, kit.optimizer, plain.loader(), kit.scheduler)
    return kit


def take_part(
    recipe: Recipe,
    kit: Kit,
    url: str,
    peers: int,
    number: int,
    speed: int,
    run: str | None = None,
) -> None:
    """One peer."""
    # The roster is in the order of names; the first has the most.
    joined = mh.join(url, run=run, name=f"peer-{number}", min_peers=peers, seed=SEED)
    with joined as run:
        run.register(**kit.things)
        options = {"shares": "equal", "epochs": recipe.epochs, **recipe.options}
        given = run.wrap(kit.model, kit.optimizer, recipe.data(), kit.scheduler, **options)
        model, optimizer, loader, scheduler = given
        # Shares by a speed that is not measured: the same in every run of the test.
        rounds = run._session.conductor.rounds
        rounds.measure_speed(speed)
        seen = Seen(loader, kit, rounds, peers)
        recipe.loop(Hand(run, kit, number), model, optimizer, seen, scheduler)
        kit.digest = run.digest()


def together(recipe: Recipe, speeds: tuple[int, ...] = ALONE) -> list[Kit]:
    """Peers as threads of this process. What draws random numbers needs processes."""
    kits, errors = gather(recipe, speeds)
    if errors:
        raise next(iter(errors.values()))
    return kits


def gather(
    recipe: Recipe, speeds: tuple[int, ...], url: str = "local://"
) -> tuple[list[Kit], dict[int, BaseException]]:
    """Like `together`; returns what has ended whom, by number, in the order in which it did."""
    kits = [recipe.make() for _ in speeds]
    run = f"loops-{os.getpid()}-{next(_runs)}"
    errors: dict[int, BaseException] = {}

    def peer(number: int) -> None:
        try:
            take_part(recipe, kits[number], url, len(speeds), number, speeds[number], run)
        except BaseException as error:  # noqa: BLE001  (the test shows it)
            errors[number] = error

    threads = [threading.Thread(target=peer, args=(n,), daemon=True) for n in range(len(speeds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert errors or not any(thread.is_alive() for thread in threads), "a peer does not end"
    return kits, errors


def compare(recipe: Recipe, speeds: tuple[int, ...], *, tolerance: float = 1e-9) -> list[Kit]:
    """Peers end with the same bits, and as one process does. Returns theirs, then the oracle's."""
    kits, plain = together(recipe, speeds), alone(recipe)
    check(kits, plain, tolerance=tolerance)
    return [*kits, plain]


def check(kits: list[Kit], plain: Kit, *, tolerance: float = 1e-9) -> None:
    for kit in kits:
        assert kit.digest == kits[0].digest, "peers have parted"
        assert kit.losses == kits[0].losses
    assert len(kits[0].losses) == len(plain.losses)
    for mine, theirs in zip(kits[0].losses, plain.losses, strict=True):
        assert abs(mine - theirs) <= tolerance, (kits[0].losses, plain.losses)
    mine, theirs = dict(tensors_of(kits[0])), dict(tensors_of(plain))
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=tolerance, atol=tolerance, msg=name)


def tensors_of(kit: Kit) -> Iterator[tuple[str, torch.Tensor]]:
    """Model and optimizers, by name."""
    yield from kit.model.named_parameters()
    yield from kit.model.named_buffers()
    several = kit.optimizer if isinstance(kit.optimizer, list) else [kit.optimizer]
    for number, optimizer in enumerate(several):
        for group in optimizer.param_groups:
            yield f"lr {number}", torch.tensor(float(group["lr"]))
            for at, p in enumerate(group["params"]):
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield f"state {number}.{at}.{key}", value
    for name, thing in kit.things.items():
        for key, value in thing.state_dict().items():
            if isinstance(value, torch.Tensor | float | int):
                yield f"{name}.{key}", torch.as_tensor(value)
