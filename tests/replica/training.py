"""One training, as any peer runs it and as one plain process does it: the oracle.

    python -m tests.replica.training '{"url": ..., "rounds": 40, ...}'

A peer reports a JSON line for every round that it applies, and a last one when it ends. It can be
told to be slow, or to kill itself at a point of a round.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Collection
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.data import DataLoader, Dataset

import manyhands as mh
from manyhands.core.peers import PeerState
from manyhands.data import BadSample, Loader
from manyhands.data.calendar import Calendar
from manyhands.data.order import Order
from manyhands.replica.conductor import Conductor
from manyhands.replica.deviation import Deviated
from manyhands.replica.keeper import NotSaved
from manyhands.replica.replica import seed_of_pass
from manyhands.wire.tensors import bytes_of

SIZE, BATCH, GRAIN, FEATURES, CLASSES, SEED = 90, 24, 4, 12, 4, 7
WIDTH = 160  # so that there are parts for four owners


class Points(Dataset):
    """Labelled points. One of them may kill whoever looks at it, some may be bad."""

    def __init__(self, deadly: int | None = None, bad: Collection[int] = ()) -> None:
        self.deadly, self.bad = deadly, frozenset(bad)
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SIZE, FEATURES, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, CLASSES, (SIZE,), generator=generator)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index):
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if index in self.bad:
            raise BadSample(self.where(index), "it is torn")
        return self.x[index], self.y[index]

    def where(self, index: int) -> str:
        return f"point {index}"


def make(grain: int | None = GRAIN, device: str = "cpu"):
    """Model, optimizer, schedule. With grains it may have layers that see their batch or chance."""
    torch.manual_seed(11)
    special = [nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)] if grain else [nn.LayerNorm(WIDTH)]
    model = (
        nn.Sequential(
            nn.Linear(FEATURES, WIDTH),
            nn.Tanh(),
            # Without bias: the gradient of what a normalisation takes out again is pure rounding,
            # and Adam makes steps of full size out of that.
            nn.Linear(WIDTH, WIDTH, bias=False),
            *special,
            nn.Tanh(),
            nn.Linear(WIDTH, CLASSES),
        )
        .double()
        .to(device)
    )
    # Training is chaotic: with the usual eps, and 20 times the rate, a difference of 1e-15 at the
    # start has become 1e-2 after 300 steps. With these it is 2e-11.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, eps=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.97)
    return model, optimizer, schedule


criterion = nn.CrossEntropyLoss()


def alone(
    epochs: int, grain: int | None = GRAIN, device: str = "cpu", bad: Collection[int] = ()
) -> tuple[list[float], nn.Module]:
    """Loss of each round, and the model at the end, in a plain loop without anything of ours.

    But for the order of the samples and the seed of a pass, which are part of the promise. Samples
    that are bad are left out, and a grain of which one alone is left: nobody can normalise that.
    """
    data, (model, optimizer, schedule) = Points(), make(grain, device)
    calendar, losses = Calendar(SIZE, BATCH), []
    for number in range(epochs * calendar.rounds_per_epoch):
        epoch, start, stop = calendar.span(number)
        places = Order(SIZE, seed=SEED, epoch=epoch).indices(start, stop)
        size = grain or len(places)
        before = {n: b.clone() for n, b in model.named_buffers()}
        sums = {n: torch.zeros_like(b, dtype=torch.float64) for n, b in before.items()}
        optimizer.zero_grad()
        total = 0.0
        grains = {f: left_of(places[f : f + size], bad) for f in range(0, len(places), size)}
        least = 2 if grain else 1
        grains = {f: chosen for f, chosen in grains.items() if len(chosen) >= least}
        num_left = sum(map(len, grains.values()))
        for first, chosen in grains.items():
            for name, buffer in model.named_buffers():
                buffer.data.copy_(before[name])
            torch.manual_seed(seed_of_pass(SEED, number, first // size))
            share = len(chosen) / num_left
            x, y = data.x[chosen].to(device), data.y[chosen].to(device)
            loss = criterion(model(x), y)
            (loss * share).backward()
            total += float(loss.detach()) * share
            for name, buffer in model.named_buffers():
                sums[name] += buffer * share
        for name, buffer in model.named_buffers():
            counted = before[name] + (0 in grains)
            buffer.data.copy_(sums[name] if buffer.is_floating_point() else counted)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
        if calendar.span(number + 1).epoch > epoch:
            schedule.step()
    return losses, model


def left_of(places: torch.Tensor, bad: Collection[int]) -> torch.Tensor:
    """Those that are not bad."""
    return torch.tensor([p for p in places.tolist() if p not in bad], dtype=torch.int64)


def shadow(model: nn.Module) -> list[float]:
    """All of a model's state, on a few random directions."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for tensor in model.state_dict().values():
        directions = torch.randn(3, tensor.numel(), generator=generator, dtype=torch.float64)
        found += (directions @ tensor.detach().double().flatten().cpu()).tolist()
    return found


class Teller:
    """What a peer says, and where it may be told to die: nobody listens, and it is not."""

    def say(self, said: dict) -> None:
        print(json.dumps(said), flush=True)

    def pass_by(self, what: str, round_: int) -> None:
        pass

    def linger(self, seconds: float) -> None:
        pass


def train(
    teller: Any = None,
    *,
    url: str | None = None,
    run: str | None = None,
    name: str | None = None,
    epochs: int = 3,
    grain: int | None = GRAIN,
    pace_s: float = 0.0,
    linger_s: float = 0.0,
    linger_from: int = 0,
    min_peers: int = 1,
    lease_s: float = 10.0,
    stop_at: int | None = None,
    device: str = "cpu",
    deadly: int | None = None,
    deadly_from: int = 0,
    astray: list[int] | None = None,
    flush: bool = False,
    dies_opening: bool = False,
    show: bool = False,
    bad: list[int] | None = None,
    reading: dict[str, Any] | None = None,
    memory: int | None = None,
    file_bytes: int | None = None,
    **options: Any,
) -> None:
    """A peer. It passes by the points "forward", "backward", "step" and "stepped" of a round.

    A pass takes `pace_s` longer than it would; a round, from `linger_from` on, `linger_s`, until
    the peer is told to hurry.
    In rounds that are `astray` its optimizer is off by the last bit of one number. `flush`: its
    arithmetic is another one, though not for numbers that come up here. `dies_opening`: see there.
    `show`: it says what its parameters are when a round begins, and when it has stepped. `bad`
    samples are skipped, or what `reading`, the arguments of a Loader, says. `deadly`: the sample
    that kills, from a round on. `memory`: no pass may have more samples; it says how many each has.
    `file_bytes`: no file of this process may get larger.
    """
    if file_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # else it ends the process
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
    if dies_opening:
        die_opening()
    rows: list[int] = []
    if memory is not None:
        limit_memory(memory, rows)
    torch.set_flush_denormal(flush)
    teller = teller or Teller()
    model, optimizer, schedule = make(grain, device)
    points = Points(None if deadly_from else deadly, bad or ())
    data: Any = DataLoader(points, BATCH, shuffle=True)
    if bad is not None:
        data = Loader(points, BATCH, **{"bad": "skip", **(reading or {})})
    joined = mh.join(url, run=run, name=name, min_peers=min_peers, lease_s=lease_s, seed=SEED)
    with joined as hand:
        model, optimizer, loader, schedule = hand.wrap(
            model, optimizer, data, schedule, grain_size=grain, epochs=epochs, **options
        )
        teller.say({"joined": hand.round})
        if astray:
            optimizer.register_step_post_hook(
                lambda *_: nudge(model[2].weight) if hand.round - 1 in astray else None
            )
        hand.on_round(lambda closed: teller.say(ledger(closed)))
        for _ in range(epochs):
            for x, y in loader:
                at = hand.round
                if at + 1 >= deadly_from:
                    points.deadly = deadly
                if at == stop_at:
                    break  # as a loop does whose author has seen enough
                if show:
                    teller.say({"begins": at, "parameters": digest_of(model)})
                teller.pass_by("forward", at)
                time.sleep(pace_s)
                if at >= linger_from:
                    teller.linger(linger_s)
                    linger_from = at + 1  # once a round
                optimizer.zero_grad()
                if memory is not None:
                    assert len(x) <= memory, f"out of memory: {len(x)} samples"
                    rows.append(len(x))
                    teller.say({"rows": len(x)})
                loss = criterion(model(x.to(device)), y.to(device))
                mean = hand.mean(loss)
                teller.pass_by("backward", at)
                loss.backward()
                teller.pass_by("step", at)
                hand.clip_grad_norm_(1.0)
                optimizer.step()
                teller.pass_by("stepped", at)
                if hand.round > at:
                    teller.say(
                        {
                            "round": hand.round - 1,
                            "loss": float(mean),
                            "of": mean.round,
                            "state": hand.digest().hex(),
                        }
                    )
                    if show:
                        teller.say({"ends": at, "parameters": digest_of(model)})
            if hand.round == stop_at:
                break
            schedule.step()
    deviated = [e for e in hand.events if isinstance(e, Deviated)]
    named = [[e.peer.name, e.round, e.tensor] for e in deviated]
    met = sorted(error.where for error in loader.bad)
    done = {"done": hand.round, "shadow": shadow(model), "deviated": named, "bad": met}
    done["not saved"] = [e.round for e in hand.events if isinstance(e, NotSaved)]
    teller.say(done)


def die_opening() -> None:
    """Whoever is to gather the others in an opening dies once all are there; the last one not."""
    gather = Conductor._open

    def gather_and_die(self: Conductor, task: Any) -> None:
        if self.base.is_gathering(task.round):
            view = self.rounds.outlook.wait_for_view(
                lambda view: len(view.peers(PeerState.ACTIVE)) == len(view.roster)
            )
            if len(view.roster) > 1:
                os.kill(os.getpid(), signal.SIGKILL)
        gather(self, task)

    Conductor._open = gather_and_die


def limit_memory(limit: int, rows: list[int]) -> None:
    """A device of so many bytes, of which each sample takes one while its pass lasts."""
    from manyhands.replica import session
    from manyhands.replica.cap import Memory

    def look(*, anew: bool = False) -> Memory:
        return Memory(0, max(rows, default=0), limit)

    session.memory_of = lambda device: look


def digest_of(model: nn.Module) -> str:
    """Of parameters and buffers."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        digest.update(bytes_of(tensor.detach()))
    return digest.hexdigest()


def nudge(tensor: torch.Tensor, place: int = 1000) -> None:
    """To the next number, in one place."""
    one = tensor.detach().view(-1)[place : place + 1]
    one.copy_(torch.nextafter(one, torch.full_like(one, torch.inf)))


def ledger(closed: mh.RoundClosed) -> dict:
    """Who computed what of a round."""
    spans = [span for ranges in closed.shares.values() for span in ranges.spans]
    names = [peer.name for peer in closed.shares]
    return {"counted": closed.round, "spans": spans, "members": len(names), "names": names}


def dial_by_points(child: Any) -> None:
    """What this process sends passes by its points; it says when it is in the roster."""
    from manyhands.replica import session
    from tests.collectives.rounds_peer import Leaky, Trip

    dial = session.dial

    def dial_as_told(*where: Any) -> Trip:
        link = dial(*where)
        link = Leaky(link, child.orders["loses"]) if "loses" in child.orders else link
        trip = Trip(link, child.orders["points"], child.reached)
        child.say({"dialed": trip.me.name})
        return trip

    session.dial = dial_as_told
    if "terms" in child.orders:
        usual = session._terms
        session._terms = lambda *given: replace(usual(*given), **child.orders["terms"])


def leave_by_points(child: Any) -> None:
    """It passes by the point "leaving" when the others have been told that it will."""
    leave = Conductor.leave

    def leave_and_pass_by(self: Conductor, *, finished: bool) -> None:
        leave(self, finished=finished)
        child.pass_by("leaving", None)

    Conductor.leave = leave_and_pass_by


def play(child: Any) -> None:
    """As a process that a test has forked."""
    from manyhands.replica import deviation

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    dial_by_points(child)
    leave_by_points(child)
    deviation.STRIDE = 1  # all of the state is compared in every round
    train(child, **child.orders["train"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(**json.loads(sys.argv[1]))
