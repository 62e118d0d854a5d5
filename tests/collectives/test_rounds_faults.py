"""Rounds over real links: peers that are killed, stopped, cut off, refused, or late.

Whatever happens, the oracle is one: the survivors' results are those of a single process, each
sample counted once, and equal rounds have equal chains (`rounds_kit.check_histories`).
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import pytest

from manyhands.collectives import messages as m
from manyhands.collectives.ranges import Ranges
from manyhands.core.address import parse_address
from manyhands.core.errors import LinkTimeout, PeerGone
from manyhands.core.peers import ViewNumber
from manyhands.links.base import LinkSettings, open_link
from manyhands.links.hub import Hub
from manyhands.testing.proxy import Proxy
from tests.collectives.chaos_links import play
from tests.collectives.rounds_kit import (
    BATCH,
    PATIENCE_S,
    STEADY,
    Crowd,
    Each,
    check_histories,
)
from tests.collectives.rounds_peer import PeerProcess, Zygote

NUM_ROUNDS = 8
_runs = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def zygote():
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)  # before the leak check of a test looks
def hub():
    with Hub("127.0.0.1:0", insecure=True) as made:
        yield made


@pytest.fixture(params=("hub", "amqp"), scope="module")
def url(request):
    if request.param == "amqp":
        return request.getfixturevalue("broker").url()
    return f"{request.getfixturevalue('hub').address}?insecure=1"


@pytest.fixture
def crew(zygote, url):
    """Starts peers of one run, `crew(name, **orders)`, and ends them."""
    with ExitStack() as stack:
        yield Crew(zygote, url, stack)


class Crew:
    """The peers of one run."""

    def __init__(self, zygote, url, stack) -> None:
        self._zygote, self._url, self._stack = zygote, url, stack
        self.run = f"rounds-{os.getpid()}-{next(_runs)}"
        self.peers: dict[str, PeerProcess] = {}

    def add(self, name, *points, url=None, terms=STEADY, **taker) -> PeerProcess:
        taker = {"num_rounds": NUM_ROUNDS} | taker
        peer = PeerProcess(
            self._zygote,
            name,
            url=url or self._url,
            run=self.run,
            points=points,
            terms=msgspec.to_builtins(terms),
            taker=taker,
        )
        self._stack.callback(peer.close)
        self.peers[name] = peer
        return peer

    def add_three(self, points=None, **options) -> list[PeerProcess]:
        """p0 is the founder and so the lead; `points` by name. All are members from round 2 on."""
        points = points or {}
        gate = {"what": "task", "round": 0, "then": "wait"}
        founder = self.add("p0", gate, *points.get("p0", ()), expect=3, **options)
        founder.until(lambda said: "task" in said)
        peers = [founder]
        for name in ("p1", "p2"):
            peers.append(self.add(name, *points.get(name, ()), expect=3, **options))
            # Its link is open: it misses nothing that is fanned out from now on. And it is before
            # the next one in the roster, which decides who owns what.
            peers[-1].until(lambda said: "incarnation" in said)
        founder.tell("go")
        return peers

    def expect_dead(self, *names) -> None:
        """These have died at their points."""
        for name in names:
            assert self.peers[name].wait() == -signal.SIGKILL, self.peers[name].report()

    def finish(self, *, dead=(), num_rounds=NUM_ROUNDS, lost=(), late=(), tolerance=0.0) -> None:
        """All but the dead finish the run, with nothing left running, and the oracle agrees."""
        for name, peer in self.peers.items():
            if name in dead:
                continue
            stopped = peer.until(lambda said: "stopped" in said)
            assert stopped["stopped"] == "finished", peer.report()
            assert peer.wait() == 0, peer.report()
            assert peer.said[-1] == {"threads": []}, peer.report()
            assert peer.history.rounds[-1] == num_rounds
            assert name in late or peer.history.rounds[0] == 0
        check_histories(
            [p.history for p in self.peers.values()],
            num_rounds,
            dead=dead,
            lost=lost,
            tolerance=tolerance,
        )


LARGEST = 3 * 16  # of a value in a mean: the pattern times what a sample gives

POINTS = {
    "computing": {"what": "task", "round": 4},
    "after its first part": {"what": "Part", "round": 4, "count": 1},
    "after four parts": {"what": "Part", "round": 4, "count": 4},
    "after its first sum": {"what": "Sum", "round": 4, "count": 1},
    "after a commit": {"what": "commit", "round": 4},
}


class TestKilled:
    @pytest.mark.parametrize("point", POINTS)
    @pytest.mark.parametrize("name", ["p0", "p2"], ids=["the lead and founder", "a member"])
    def test_one(self, crew, name, point):
        crew.add_three({name: [POINTS[point]]})
        crew.expect_dead(name)
        crew.finish(dead=[name])

    @pytest.mark.parametrize("point", ["after four parts", "after its first sum"])
    def test_one_of_those_who_round_what_they_send(self, crew, point):
        """Chains and states are one still, and no value is further off than two steps of int8."""
        crew.add_three({"p2": [POINTS[point]]}, wire="int8")
        crew.expect_dead("p2")
        crew.finish(dead=["p2"], tolerance=2 * LARGEST / 127)

    def test_another_in_the_cut(self, crew):
        """The second dies when it has told what it holds of the round that the first left."""
        crew.add_three(
            {"p2": [{"what": "Sum", "round": 4, "count": 2}], "p1": [{"what": "Status"}]}
        )
        crew.expect_dead("p2", "p1")
        crew.finish(dead=["p1", "p2"])

    @pytest.mark.parametrize("filler", ["lives", "dies"])
    def test_one_while_a_result_is_on_its_way(self, crew, filler):
        """A lead has committed, but its last result leaves when the others have answered a cut:
        they do not take it any more, and have to be filled in."""
        late = {"what": "Sum", "round": 4, "count": 3, "before": True, "then": "wait"}
        parts = {"what": "Part", "round": 4, "count": 4, "then": "say"}
        dies = [{"what": "Fill"}] if filler == "dies" else []
        lead, other, victim = crew.add_three(
            {
                "p0": [parts, late, *dies],
                "p1": [{"what": "Status", "then": "say"}],
                "p2": [{"what": "task", "round": 4, "then": "wait"}],
            }
        )
        lead.until(lambda said: said.get("at") == "Part")  # results would overtake them
        victim.until(lambda said: said.get("at") == "task")
        victim.tell("go")
        lead.until(lambda said: said.get("at") == "Sum")
        lead.until_round(4)
        assert 4 not in other.history.rounds
        victim.kill()
        other.until(lambda said: said.get("at") == "Status")
        lead.tell("go")
        if filler == "dies":
            crew.expect_dead("p0")
            crew.finish(dead=["p0", "p2"])
        else:
            crew.finish(dead=["p2"])
            verdict = other.until(lambda said: "settled" in said)
            assert verdict == {"settled": False, "target": 5, "filled": True}
            # It was not computed again: the samples are those of the three.
            again = next(one for one in other.history.committed if one["committed"] == 4)
            assert len(again["contributions"]) == 3

    def test_all_but_one_at_once(self, crew):
        """The last one goes on alone: with everybody's samples, and the lease asked for."""
        point = {"what": "Part", "round": 4, "count": 2}
        crew.add_three({"p0": [point], "p1": [point]})
        crew.expect_dead("p0", "p1")
        crew.finish(dead=["p0", "p1"])

    def test_the_founder_before_anybody_else_has_a_state(self, crew, url):
        """Nobody is left who can go on; whoever comes next starts a new generation in the open."""
        if url.startswith("amqp"):
            pytest.skip("a broker keeps no memory of a run whose peers are all gone")
        crew.add("p0", {"what": "task", "round": 0})
        crew.expect_dead("p0")
        other = crew.add("p1")
        other.until(lambda said: said.get("generation") == 0)
        crew.finish(dead=["p0"])


# The others are still there when one that was stopped wakes: a broker keeps no memory of a run
# whose peers are all gone, and may have closed the connection by which it would have been told.
STAY = {"what": "task", "round": 7, "then": "wait"}


class TestStopped:
    """SIGSTOP past the lease, then SIGCONT: it must find itself outside and commit nothing."""

    # One that a busy machine does not miss by itself: of three peers only one is to be outside.
    QUICK = msgspec.structs.replace(STEADY, lease_s=3.0)

    def test_while_it_computes(self, crew):
        gate = {"what": "task", "round": 4, "then": "wait"}
        lead, other, victim = crew.add_three({"p0": [STAY], "p2": [gate]}, terms=self.QUICK)
        victim.until(lambda said: said.get("at") == "task" and 3 in victim.history.rounds)
        victim.stop()
        other.until_round(6)
        victim.tell("go")
        victim.go_on()
        assert victim.until(lambda said: "stopped" in said)["stopped"] == "excluded"
        assert victim.history.rounds[-1] == 3
        lead.tell("go")
        crew.finish(dead=["p2"])

    def test_while_results_are_on_their_way_to_it(self, crew):
        """The round's results are in its socket when it wakes; its lease is over by then."""
        gate = {"what": "task", "round": 4, "then": "wait"}
        sent = {"what": "Part", "round": 4, "count": 2, "then": "say"}
        two_parts = (("float32", 50), ("float64", 50))  # of which the third peer owns none
        lead, _, victim = crew.add_three(
            {"p0": [gate, STAY], "p2": [sent]}, terms=self.QUICK, sizes=two_parts
        )
        lead.until(lambda said: said.get("at") == "task" and 3 in lead.history.rounds)
        victim.until(lambda said: said.get("at") == "Part")
        victim.stop()
        lead.tell("go")
        lead.until_round(6)
        assert len(lead.history.committed[4]["contributions"]) == 3
        victim.go_on()
        assert victim.until(lambda said: "stopped" in said)["stopped"] == "excluded"
        assert victim.history.rounds[-1] == 3
        lead.tell("go")
        crew.finish(dead=["p2"])


# -- peers that are threads -----------------------------------------------------------------------


@pytest.fixture
def crowd(url):
    with Crowd(url, f"rounds-{os.getpid()}-{next(_runs)}") as made:
        yield made


def finish(crowd, *names, num_rounds=NUM_ROUNDS, **options) -> None:
    """These (all) finish the run, and the oracle agrees."""
    crowd.finish(*names)
    for name in names or crowd.takers:
        history = crowd.histories[name]
        assert history.stopped["stopped"] == "finished", history.stopped
        assert num_rounds is None or history.rounds[-1] == num_rounds
    check_histories(list(crowd.histories.values()), num_rounds, **options)


def settled(crowd, name="p0") -> list[dict]:
    """The cuts that a peer has been through."""
    return [said for of, said in crowd.lines if of == name and "settled" in said]


def until_cut(crowd, before, name="p0") -> None:
    """Wait until that peer has seen one. If nothing was lost, all could finish without it."""
    deadline = time.monotonic() + PATIENCE_S
    while cut_of(crowd, name) == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def cut_of(crowd, name="p0") -> ViewNumber:
    return crowd.takers[name].rounds.view.cut


class TestNetwork:
    def test_connections_that_break(self, url, crowd):
        """Over a hub nobody notices; a broker loses the queue, which is a cut for all."""
        crowd.terms = msgspec.structs.replace(STEADY, grace_s=10.0)
        resumes = url.startswith("hub")
        cuts = range(2, 8) if resumes else [4]
        with through_proxy(url) as (proxy, via):
            for k in range(3):
                crowd.add(f"p{k}", url=via if k == 1 else None, expect=3, num_rounds=NUM_ROUNDS)
            cut: list[ViewNumber] = []

            def break_off(task) -> None:
                """While it computes, and while its contributions are on their way."""
                if task.round == 5 and not resumes:
                    until_cut(crowd, cut[0])
                if task.round in cuts:
                    cut.append(cut_of(crowd))
                    proxy.cut_after(20_000 * (task.round % 3 + 1))

            crowd.takers["p1"].before_task = break_off
            crowd.start()
            finish(crowd)
            assert proxy.num_cuts >= len(cuts)
            assert (len(settled(crowd)) == 1) == resumes  # the first active peer is a cut
            for taker in crowd.takers.values():
                taker.rounds.close()
                taker.link.close()

    def test_a_hub_that_restarts(self, tmp_path, url):
        if not url.startswith("hub"):
            pytest.skip("a broker restarts in the test below")
        hub = Hub("127.0.0.1:0", insecure=True, state=tmp_path / "hub")
        with ExitStack() as stack:
            hubs = [hub]
            stack.callback(lambda: hubs[-1].close())
            address = f"{hub.address}?insecure=1"

            def restart(task) -> None:
                if task.round == 4:
                    before = cut_of(crowd)
                    hubs[-1].close()
                    hubs.append(
                        Hub(f"127.0.0.1:{hub.address.port}", insecure=True, state=tmp_path / "hub")
                    )
                    until_cut(crowd, before)

            crowd = stack.enter_context(Crowd(address, "restarts"))
            crowd.begin(
                3, num_rounds=NUM_ROUNDS, before_task=Each((restart, *[lambda _: None] * 2))
            )
            finish(crowd)
            assert len(settled(crowd)) >= 2
            assert any((tmp_path / "hub").iterdir())  # what the second life went on from

    def test_a_broker_that_restarts(self, url, fresh_broker):
        if not url.startswith("amqp"):
            pytest.skip("a hub restarts in the test above")
        broker = fresh_broker()

        def restart(task) -> None:
            if task.round == 4:
                before = cut_of(crowd)
                broker.restart()
                until_cut(crowd, before)

        with Crowd(broker.url(), "restarts") as crowd:
            crowd.begin(
                3, num_rounds=NUM_ROUNDS, before_task=Each((restart, *[lambda _: None] * 2))
            )
            finish(crowd)
            assert len(settled(crowd)) >= 2

    def test_one_that_is_alone_asks_before_it_commits(self, url, crowd):
        """Its lease is still good for long, but it cannot know whether others have gone on."""
        with through_proxy(url) as (proxy, via):
            ready = threading.Event()

            def cut_off(task) -> None:
                if task.round == 4:
                    proxy.stall()
                    ready.set()

            crowd.add("p0", url=via, num_rounds=NUM_ROUNDS, before_task=cut_off)
            crowd.start()
            assert ready.wait(PATIENCE_S)
            time.sleep(0.5)  # nothing must happen, and nothing says so
            # Round 4 had begun, and the arbiter may have been heard since.
            assert crowd.histories["p0"].rounds in ([0, 1, 2, 3], [0, 1, 2, 3, 4])
            proxy.go()
            finish(crowd)
            crowd.takers["p0"].rounds.close()
            crowd.takers["p0"].link.close()

    def test_closing_one_that_is_cut_off_takes_no_time(self, url, crowd):
        with through_proxy(url) as (proxy, via):
            crowd.add("p0", url=via, num_rounds=None, before_task=lambda task: proxy.stall())
            crowd.start()
            crowd.until("p0", lambda said: "task" in said)
            begun = time.monotonic()
            crowd.takers["p0"].rounds.close()
            assert time.monotonic() - begun < STEADY.lease_s / 2  # the wait there could be: a lease
            crowd.finish()
            proxy.go()
            crowd.takers["p0"].link.close()


@contextmanager
def through_proxy(url):
    address = parse_address(url, run="any")
    with Proxy("127.0.0.1", address.port) as proxy:
        yield proxy, url.replace(f":{address.port}", f":{proxy.port}")


class TestComingAndGoing:
    def test_one_leaves(self, crowd):
        """In good order: no cut, nothing computed twice, and it has what the others have."""
        crowd.begin(3, num_rounds=NUM_ROUNDS)
        crowd.takers["p1"].after_commit = lambda round_: (
            crowd.takers["p1"].rounds.leave() if round_ == 3 else None
        )
        finish(crowd, "p0", "p2")
        crowd.finish("p1")
        assert crowd.histories["p1"].stopped["stopped"] == "left"
        assert crowd.histories["p1"].rounds[-1] < NUM_ROUNDS
        assert len(settled(crowd)) == 1

    def test_all_leave(self, crowd):
        """The run ends with an empty round, and everybody has the same history."""
        crowd.begin(3, num_rounds=None)
        for taker in crowd.takers.values():
            taker.after_commit = lambda round_, taker=taker: (
                taker.rounds.leave() if round_ == 4 else None
            )
        crowd.finish()
        reasons = {history.stopped["stopped"] for history in crowd.histories.values()}
        assert reasons <= {"finished", "left"}, crowd.histories
        check_histories(list(crowd.histories.values()), None)

    @pytest.mark.parametrize("brings", [False, True], ids=["with nothing", "with a useless state"])
    def test_one_joins_late(self, crowd, brings):
        """The state comes from a member, and what it misses meanwhile from the fan-outs."""
        crowd.begin(2, num_rounds=None)
        joined = threading.Event()

        def leave_together(round_: int) -> None:
            if "p2" in crowd.takers and len(crowd.takers["p2"].rounds.members) == 3:
                joined.set()
            if joined.is_set():
                for taker in crowd.takers.values():
                    taker.rounds.leave()

        crowd.until("p0", lambda said: said.get("committed", 0) >= 3)
        crowd.add("p2", num_rounds=None, brings=brings, after_commit=leave_together)
        crowd.start("p2")
        crowd.finish()
        assert joined.is_set()
        late = crowd.histories["p2"]
        assert late.rounds[0] > 3
        assert any(one["member"] for one in late.committed)
        assert len(settled(crowd)) == 1
        check_histories(list(crowd.histories.values()), None)


class Spoiler:
    """A link whose peer sends something else than it should."""

    def __init__(self, link, spoil) -> None:
        self._link, self._spoil = link, spoil

    def __getattr__(self, name):
        return getattr(self._link, name)

    def send(self, to, message, buffers=(), **options) -> None:
        word = m.decode(message)
        self._link.send(to, *self._spoil(word, message, buffers), **options)


def too_short(word, message, buffers):
    if isinstance(word, m.Part) and word.round == 4 and buffers:
        return message, [bytes(buffers[0])[:-8], *buffers[1:]]
    return message, buffers


def too_many(word, message, buffers):
    if isinstance(word, m.Part) and word.round == 4 and buffers:
        return message, [*buffers, b"more"]
    return message, buffers


class TestRefused:
    """A contribution that cannot be used costs its own samples, at everybody, and nothing else."""

    @pytest.mark.parametrize(
        "how",
        [{"spoil": (4, 8)}, {"wrap": too_short}, {"wrap": too_many}],
        ids=["not finite", "too short", "too long"],
    )
    def test_one_contribution(self, crowd, how):
        if "wrap" in how:
            spoil = how["wrap"]
            how = {"wrap": lambda link: Spoiler(link, spoil)}
        for k in range(3):
            crowd.add(f"p{k}", expect=3, num_rounds=NUM_ROUNDS, **(how if k == 1 else {}))
        crowd.start()
        finish(crowd, lost=range(6, 11))
        for name, history in crowd.histories.items():
            retry = crowd.until(name, lambda said: "retry" in said)
            assert retry == {"retry": 4, "refused": ((6, 11),)}
            assert history.committed[4]["quarantine"] == ((6, 11),)
            assert history.committed[4]["weight"] == BATCH - 5
            assert not any(one["quarantine"] for one in history.committed if one["committed"] != 4)

    def test_the_only_one(self, crowd):
        """Nothing is left of the round; it is committed all the same, and changes nothing."""
        crowd.begin(1, num_rounds=NUM_ROUNDS, spoil=(4, 8))
        finish(crowd, lost=range(BATCH))
        assert crowd.histories["p0"].committed[4]["weight"] == 0


class TestStranger:
    def test_garbage(self, crowd):
        """A peer of the run that knows the token and nothing else: it disturbs nobody."""
        crowd.begin(2, num_rounds=40)
        random.seed(7)
        own = [
            m.encode(m.Taken(ViewNumber(9, 9), 1 << 40)),
            m.encode(m.Want(3)),
            m.encode(m.Ask(1)),
        ]
        tag = m.Tag(ViewNumber(1 << 52, 1), 0)
        shares = (m.Share(5, Ranges.whole(3)),)
        own.append(m.encode(m.Part(3, tag, 200_000, Ranges.whole(3), weight=2.0)))
        own.append(m.encode(m.Part(3, tag, 1, Ranges.whole(3), weight=2.0)))
        own.append(m.encode(m.Sum(3, tag, 5, shares, squared_norm=float("nan"))))
        with open_link(
            crowd.url, run=crowd.run, name="stranger", settings=LinkSettings(terms=STEADY)
        ) as link:
            for turn in range(300):
                message = random.choice(own) if turn % 3 else random.randbytes(turn)
                if turn % 5 == 0:
                    message = message[: len(message) // 2]
                buffers = [random.randbytes(random.choice((0, 1, 100, 60_000)))] * (turn % 4 == 0)
                to = random.choice([None, *(taker.link.me for taker in crowd.takers.values())])
                with suppress(PeerGone, LinkTimeout):
                    link.send(to, message, buffers, timeout_s=5)
            finish(crowd, num_rounds=40)
        assert len(settled(crowd)) == 1


class TestChaos:
    def test_random_faults(self, zygote, url):
        """Kills, stops, departures and arrivals, as the dice fall; `make chaos` plays longer."""
        play(zygote, url, seed=3, seconds=8, num_faults=7)
