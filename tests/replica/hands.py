"""Peers of one training, in processes of their own, and what must be true of all that they say."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from manyhands.checkpoint.store import Store
from tests.collectives.rounds_peer import PATIENCE_S, PeerProcess, Zygote
from tests.replica import training
from tests.replica.training import BATCH, GRAIN, SIZE, alone, shadow

PROGRAM = "tests.replica.training"
TOLERANCE = 1e-9
# Who is killed is missed soon, and nobody is whom a busy machine keeps waiting.
LEASE_S, TERMS = 10.0, {"beat_s": 0.2, "grace_s": 0.2}
_runs = itertools.count()


def new_zygote() -> Zygote:
    return Zygote(PROGRAM, "torch._dynamo")  # that an optimizer loads with its first step


class Hands:
    """All peers of one run. Leaving the block ends those that are left.

    With `linger_s` they take their time for each pass until `hurry`, and `finish` begins with that:
    the run lasts until what the test waits for has happened, however late that is.
    """

    def __init__(
        self, zygote: Zygote, url: str, *, epochs: int = 3, terms: dict | None = None, **train
    ) -> None:
        self._zygote, self._url = zygote, url
        self._train = {"epochs": epochs, "lease_s": LEASE_S, **train}
        self._terms = TERMS | (terms or {})
        self._hurries = False
        self.run = f"hands-{os.getpid()}-{next(_runs)}"
        self.all: list[PeerProcess] = []
        self.strays: dict[PeerProcess, list[int]] = {}
        """Those that may have another state than the first of all, and after which rounds."""
        self.epochs = epochs
        self._life = 0

    @property
    def num_rounds(self) -> int:
        return self.epochs * -(-SIZE // BATCH)

    @property
    def brink(self) -> dict:
        """The point at which a peer waits before the last round."""
        return held_at(self.num_rounds - 2)

    def join(self, *points: dict, loses: str | None = None, **train) -> PeerProcess:
        """One more. It may be told to die, to say so, or to wait at some points.

        Its link `loses` messages of that kind.
        """
        name = f"hand{len(self.all)}"
        orders = {"url": self._url, "run": self.run, "name": name, **self._train, **train}
        more = {} if loses is None else {"loses": loses}
        hand = PeerProcess(
            self._zygote,
            name,
            program=PROGRAM,
            points=list(points),
            train=orders,
            terms=self._terms,
            **more,
        )
        if self._hurries:
            hand.tell("hurry")
        hand.life = self._life
        self.all.append(hand)
        return hand

    def start(self, number: int, *points: dict, **train) -> list[PeerProcess]:
        """So many, that wait for each other."""
        return [self.join(*points, min_peers=number, **train) for _ in range(number)]

    def kill(self) -> None:
        """All that are left, at once: whoever comes next begins another life of the run."""
        self._life += 1
        left = [hand for hand in self.all if self._zygote.status(hand.pid, 0) is None]
        for hand in left:
            with suppress(ProcessLookupError):  # then its status says so
                os.kill(hand.pid, signal.SIGKILL)
        for hand in left:
            assert hand.wait() == -signal.SIGKILL, f"it ended by itself: {hand.report()}"

    def hurry(self) -> None:
        """Nobody lingers any more."""
        self._hurries = True
        for hand in self.all:
            with suppress(OSError):  # it has ended
                hand.tell("hurry")

    def finish(self, *dead: PeerProcess, patience_s: float = 60.0) -> None:
        """All but the dead come to the end; then all that anybody has said is checked."""
        self.hurry()
        for hand in self.all:
            if hand not in dead:
                assert hand.wait(patience_s) == 0, hand.report()
        self.check(dead)
        assert any(hand not in dead for hand in self.all), "all were to die"

    def check(self, dead: Sequence[PeerProcess] = ()) -> None:
        """The same run: loss, state, samples and the model at the end are those of one process."""
        grain, bad = self._train.get("grain", GRAIN), self._train.get("bad") or ()
        losses, model = alone(self.epochs, grain, bad=bad)
        states: dict[tuple[int, int], str] = {}
        seen: set[int] = set()
        for hand in self.all:
            last = max((said["round"] for said in hand.said if "round" in said), default=-1)
            for said in hand.said:
                if "round" in said:
                    number = said["round"]
                    assert said["of"] == number, hand.report()
                    assert abs(said["loss"] - losses[number]) < TOLERANCE, hand.report()
                    seen.add(number)
                    if hand in dead and number == last:
                        continue  # it alone may have seen the end of it, and others did it anew
                    # Within a life to the bit; another may have other shares of the same round.
                    state = states.setdefault((number, hand.life), said["state"])
                    if hand in self.strays and state != said["state"]:
                        self.strays[hand].append(number)
                        continue
                    assert state == said["state"], f"round {number} differs: {hand.report()}"
                if "counted" in said:
                    check_counted(said, grain or 1)
                if "done" in said and hand not in dead:
                    assert said["done"] == self.num_rounds, hand.report()
                    wanted = pytest.approx(shadow(model), abs=100 * TOLERANCE)
                    assert said["shadow"] == wanted, hand.report()
        assert sorted(seen) == list(range(self.num_rounds)), self.report()

    def report(self) -> str:
        """Of all of them."""
        return "\n\n".join(hand.report() for hand in self.all)

    def __enter__(self) -> Hands:
        return self

    def __exit__(self, *error) -> None:
        for hand in self.all:
            hand.close()


def check_counted(said: dict, grain: int = GRAIN) -> None:
    """Each sample of the round counted once."""
    calendar = training.Calendar(SIZE, BATCH)
    counted = sorted(unit for start, stop in said["spans"] for unit in range(start, stop))
    units = -(-calendar.num_samples(said["counted"]) // grain)
    assert counted == list(range(units)), said


def held_at(round_: int) -> dict:
    """The point at which a peer waits: it has done one more round than so many.

    Nobody can end by itself meanwhile, whether they wait for it or for themselves.
    """
    return {"what": "forward", "round": round_ + 1, "then": "wait"}


def saving(round_: int) -> dict:
    """How peers train that are to be killed when the state after so many rounds is on disk.

    It is written beside the training, and one that comes while another is written is left out. So
    they do not wait but go on, and slowly: one of the next will be saved.
    """
    return {"linger_s": 1.0, "linger_from": round_ + 1}


def until_saved(hands: Hands, folder: Path, round_: int, number: int = 1) -> None:
    """The state after so many rounds, or more, is on disk, and `number` in all."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        saved = [place.round for place in Store(str(folder)).places() if place.complete]
        if len(saved) >= number and max(saved) >= round_:
            return
        waited = f"{number} states, up to round {round_}, are not in {folder}: {saved}"
        assert time.monotonic() < deadline, f"{waited}: {hands.report()}"
        time.sleep(0.01)


def until_round(hand: PeerProcess, number: int) -> None:
    """It has applied that round, or a later one."""
    hand.until(lambda said: said.get("round", -1) >= number)


def until_members(hand: PeerProcess, number: int, after: int = -1) -> int:
    """The first round after that one in which so many took part."""
    wanted = hand.until(lambda said: said.get("members") == number and said["counted"] > after)
    return wanted["counted"]


def members(hand: PeerProcess) -> list[int]:
    """How many took part in each round that it saw."""
    return [said["members"] for said in hand.said if "members" in said]
