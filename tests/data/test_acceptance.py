"""What the data of a run promises, all at once.

Processes killed with -9 at random, five resumes, at 4, 3, 5, 1, 2 and 4 processes, two mixed
sources, three corrupt files: the good samples count once each in every epoch, in the order of a
run that nothing interrupted. Over a hub; in fewer lives over RabbitMQ.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from manyhands.checkpoint.store import Store
from manyhands.data.loader import Loader
from manyhands.links.hub import Hub
from tests.collectives.rounds_peer import PeerProcess, Zygote
from tests.data import acceptance
from tests.data.acceptance import BATCH, CALENDAR, EPOCHS, JPEG, PNG, ROUNDS, SEED, SIZE, mixture
from tests.replica.hands import held_at, until_saved

PROGRAM = "tests.data.acceptance"
WORLDS = (4, 3, 5, 1, 2, 4)
FEWER = (4, 3, 5, 1)
LEASE_S = 20.0
AGAIN_S = 3.0  # a broker waits for one lease before a run whose peers all died begins again
CORRUPT = ("png/*/003.png", "jpeg/*/045.jpg", "jpeg/*/china.jpg")
PATIENCE_S = 100.0
_runs = itertools.count()

pytestmark = [
    pytest.mark.usefixtures("zygote", "hub"),  # before the leak check looks
    pytest.mark.timeout(300),  # thirty processes, one life after the other
]


@pytest.fixture(scope="module", autouse=True)
def _torch(tmp_path_factory):
    """One thread; and what optimizers load of the compiler has its folder where it may stay."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        with suppress(ImportError):  # torch shows its tracing with it; its thread would stay
            patch.setattr(import_module("tqdm").tqdm, "monitor_interval", 0)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def zygote(_torch):
    made = Zygote(PROGRAM, "tests.replica.training", "torch._dynamo")
    yield made
    made.close()


@pytest.fixture(scope="module")
def hub():
    with Hub("127.0.0.1:0", insecure=True) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Real digits as PNG and as JPEG files, and a photograph; three of them are cut off."""
    base = tmp_path_factory.mktemp("images")
    digits = load_digits()
    for number in range(PNG + JPEG - 1):
        kind = "png" if number < PNG else "jpeg"
        place = base / kind / str(digits.target[number])
        place.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[number] * 15.9).astype("uint8").tobytes()
        name = f"{number:03}.{'png' if kind == 'png' else 'jpg'}"
        Image.frombytes("L", (8, 8), pixels).save(place / name)
    (base / "jpeg" / "china").mkdir()
    china = files("sklearn.datasets.images").joinpath("china.jpg").read_bytes()
    (base / "jpeg" / "china" / "china.jpg").write_bytes(china)
    for path in corrupt(base):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
    return base


def corrupt(base: Path) -> list[Path]:
    return [path for name in CORRUPT for path in base.glob(name)]


@pytest.fixture(scope="module")
def uninterrupted(folder):
    """All batches, of one process that reads on and on."""
    with Loader(mixture(folder), BATCH, seed=SEED, bad="skip") as loader:
        batches = [batch for _ in range(EPOCHS) for batch in loader]
        assert sorted(e.where for e in loader.bad) == sorted(map(str, corrupt(folder)))
    return batches


def ids_of(batches) -> list[list[int]]:
    return [batch[2].tolist() for batch in batches]


def flat(rounds: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(rounds))


def test_the_uninterrupted_run_is_what_it_should_be(folder, uninterrupted):
    """Each good sample once an epoch, both sources in each batch, no epoch like another."""
    rounds = ids_of(uninterrupted)
    assert len(rounds) == ROUNDS
    per_epoch = CALENDAR.rounds_per_epoch
    epochs = [flat(rounds[e * per_epoch : (e + 1) * per_epoch]) for e in range(EPOCHS)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == SIZE - len(CORRUPT)
        assert set(epoch) == set(epochs[0])
    assert len({tuple(epoch) for epoch in epochs}) == EPOCHS
    for ids in rounds:
        share = sum(i < PNG for i in ids) / len(ids)
        assert len(ids) < BATCH - 3 or abs(share - PNG / SIZE) < 0.25


# -- an elastic run -------------------------------------------------------------------------------


class Crew:
    """The peers of one run, in all its lives."""

    def __init__(self, zygote: Zygote, url: str, folder: Path, saved: Path) -> None:
        self._zygote, self.saved = zygote, saved
        self._place = {
            "url": url,
            "run": f"acceptance-{os.getpid()}-{next(_runs)}",
            "folder": str(folder),
            "checkpoints": str(saved),
        }
        self.all: list[PeerProcess] = []

    def start(self, number: int, points: dict[int, list[dict]], **train) -> list[PeerProcess]:
        """So many, that wait for each other; each with its points."""
        come = []
        for place in range(number):
            name = f"peer{len(self.all)}"
            orders = {**self._place, "name": name, **train}
            peer = PeerProcess(
                self._zygote, name, program=PROGRAM, points=points.get(place, []), train=orders
            )
            self.all.append(peer)
            come.append(peer)
        return come

    def newest(self) -> int:
        """The round after which the newest state is that was saved."""
        return max((p.round for p in Store(str(self.saved)).places() if p.complete), default=0)

    def until(self, peers: list[PeerProcess], wanted: Callable[[dict], bool]) -> bool:
        """One of them says, or has said, such a thing; or it waits to be killed. Which it was."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            said = [one for peer in peers for one in list(peer.said)]
            if any(map(wanted, said)):
                return True
            if any("at" in one for one in said):
                return False
            if time.monotonic() > deadline:
                self._give_up(peers)
            time.sleep(0.01)

    def _give_up(self, peers: list[PeerProcess]) -> None:
        for peer in peers:
            if self._zygote.status(peer.pid, 0) is None:
                os.kill(peer.pid, signal.SIGUSR1)  # its stacks
        time.sleep(0.5)  # for them; the test has failed anyway
        raise AssertionError("\n\n".join(peer.report() for peer in peers))

    def report(self) -> str:
        """What those who came last have said."""
        return "\n\n".join(peer.report() for peer in self.all[-max(WORLDS) :])

    def kill(self) -> None:
        """All that are left."""
        left = [p for p in self.all if self._zygote.status(p.pid, 0) is None]
        for peer in left:
            os.kill(peer.pid, signal.SIGKILL)
        for peer in left:
            assert peer.wait() == -signal.SIGKILL, f"it ended by itself: {peer.report()}"

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error) -> None:
        for peer in self.all:
            peer.close()


@pytest.fixture
def url(request, hub):
    if request.param == "amqp":
        return request.getfixturevalue("broker").url()
    return f"{hub.address}?insecure=1"


@pytest.mark.parametrize(
    ("url", "seed", "workers", "worlds", "lease_s"),
    [
        ("hub", 1, 0, WORLDS, LEASE_S),
        ("hub", 2, 2, WORLDS, LEASE_S),
        ("amqp", 5, 1, FEWER, AGAIN_S),
    ],
    indirect=["url"],
)
def test_over_an_elastic_run(
    zygote, url, folder, uninterrupted, tmp_path, seed, workers, worlds, lease_s
):
    dice = random.Random(seed)
    with Crew(zygote, url, folder, tmp_path / "saved") as crew:
        for world in worlds[:-1]:
            # Nobody can end by itself: all wait a few rounds later. Some are killed when all take
            # part, in the middle of whatever they do; the others go on, and are then killed too.
            begun = crew.newest()
            points = {place: [held_at(begun + 6)] for place in range(world)}
            train = {"resume": begun > 0, "workers": workers, "lease_s": lease_s}
            peers = crew.start(world, points, min_peers=world, **train)
            all_in = crew.until(peers, lambda said, w=world: said.get("members") == w)
            until_saved(crew, crew.saved, begun + 1)
            dice.shuffle(peers)
            first = dice.randint(1, world - 1) if world > 1 else 0
            for victim in peers[:first]:
                victim.kill()
            if all_in:
                crew.until(peers[first:], lambda _: False)
            crew.kill()
        begun = crew.newest()
        dead = list(crew.all)
        train |= {"resume": True, "min_peers": worlds[-1]}
        last = crew.start(worlds[-1], {}, **train)
        for peer in last:
            assert peer.wait(PATIENCE_S) == 0, peer.report()

        expected = [sorted(ids) for ids in ids_of(uninterrupted)]
        seen = {}
        for peer in crew.all:
            for said in peer.said:
                if "counted" in said:
                    assert said["ids"] == expected[said["counted"]], peer.report()
                    seen.setdefault(said["counted"], said["ids"])
        assert sorted(seen) == list(range(ROUNDS))
        for epoch in range(EPOCHS):
            rounds = range(ROUNDS)[epoch * CALENDAR.rounds_per_epoch :][: CALENDAR.rounds_per_epoch]
            times = Counter(i for r in rounds for i in seen[r])
            assert len(times) == SIZE - len(CORRUPT)
            assert set(times.values()) == {1}
        # Not from the beginning each time; and after all that, the model of one plain loop.
        assert min(s["joined"] for p in last for s in p.said if "joined" in s) >= begun > 0
        model = acceptance.alone(uninterrupted)
        for peer in last:
            (done,) = [said for said in peer.said if "done" in said]
            assert done["done"] == ROUNDS
            for mine, plain in zip(done["parameters"], model.parameters(), strict=True):
                assert mine == pytest.approx(plain.detach().flatten().tolist(), abs=1e-9)
        assert any(peer.wait() == -signal.SIGKILL for peer in dead)


# -- the ranks of a job ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [3, 4])
def test_over_a_loader_with_ranks(zygote, hub, folder, uninterrupted, seed):
    dice = random.Random(seed)
    stops = sorted(dice.sample(range(1, ROUNDS - 1), len(WORLDS) - 1))
    got: list[int] = []
    state, begun, met = None, 0, set()
    for life, (world, stop) in enumerate(zip(WORLDS, [*stops, ROUNDS], strict=True)):
        # What waits at the end cannot end by itself before it is killed.
        end = [{"what": "end", "round": 0, "then": "wait"}]
        reading = {"folder": str(folder), "world": world, "state": state}
        # In threads, in the loop's own; and once in a process, which has to end with its rank.
        reading |= {"workers": life % 3, "kind": "process" if world == 1 else "thread"}
        ranks = [
            PeerProcess(
                zygote, f"rank{r}", program=PROGRAM, points=end, read={**reading, "rank": r}
            )
            for r in range(world)
        ]
        try:
            for rank in ranks:
                rank.until(lambda _, r=rank, n=stop - begun: len(batches(r)) >= n, PATIENCE_S)
            if stop == ROUNDS:
                for rank in ranks:
                    met |= set(rank.until(lambda said: "done" in said)["bad"])
            for rank in dice.sample(ranks, world):
                rank.kill()
            parts = [batches(rank)[: stop - begun] for rank in ranks]
            met |= {where for part in parts for where in part[-1]["bad"]}
            for batch in zip(*parts, strict=True):
                got += [i for said in batch for i in said["ids"]]
            states = [{**part[-1]["state"], "bad": 0} for part in parts]
            assert all(one == states[0] for one in states)
            state, begun = parts[0][-1]["state"], stop
        finally:
            for rank in ranks:
                rank.close()
    assert got == flat(ids_of(uninterrupted))
    assert met == set(map(str, corrupt(folder)))


def batches(rank: PeerProcess) -> list[dict]:
    return [said for said in rank.said if "ids" in said]
