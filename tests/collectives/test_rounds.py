"""The engine over links: averages that are right to the bit, sent before all of it is ready."""

from __future__ import annotations

import itertools
import os
import threading
import time

import pytest
import torch

from manyhands.collectives import events as e
from manyhands.collectives import instructions as i
from manyhands.collectives import messages as m
from manyhands.collectives.layout import Layout
from manyhands.collectives.mail import Mail
from manyhands.collectives.outcomes import Committed, Stopped, Task
from manyhands.collectives.pool import Pool
from manyhands.collectives.ranges import Ranges
from manyhands.collectives.results import form_of
from manyhands.collectives.rounds import Rounds
from manyhands.core.errors import LinkTimeout, UsageError
from manyhands.core.peers import PeerState
from manyhands.links.base import LinkSettings, open_link
from manyhands.links.hub import Hub
from manyhands.links.messages import Resign
from manyhands.wire.tensors import DTYPES, bytes_of
from tests.collectives.rounds_kit import BATCH, PATIENCE_S, STEADY, Crowd, check_histories

_runs = itertools.count()
WIRES = ("fp32", "fp16", "bf16", "int8")


@pytest.fixture(scope="module", autouse=True)  # before the leak check of a test looks
def hub():
    with Hub("127.0.0.1:0", insecure=True) as made:
        yield made


def address_of(kind, hub, request) -> str:
    if kind == "amqp":
        return request.getfixturevalue("broker").url()
    return "local://" if kind == "local" else f"{hub.address}?insecure=1"


@pytest.fixture(params=("hub", "amqp"), scope="module")  # as the hub
def url(request, hub):
    """Between machines; what is the engine's alone is tested with threads of one process."""
    return address_of(request.param, hub, request)


@pytest.fixture(params=("local", "hub", "amqp"), scope="module")
def every_url(request, hub):
    """With the links that codecs and their feedback are carried by: all of them."""
    return address_of(request.param, hub, request)


@pytest.fixture
def taken(monkeypatch) -> list:
    """The blocks that are in use."""
    blocks = []
    take, give = Pool.take, Pool.give

    def counted_take(pool, num_bytes):
        block = take(pool, num_bytes)
        blocks.append(block.view.obj)
        return block

    def counted_give(pool, block):
        blocks.remove(block.view.obj)
        give(pool, block)

    monkeypatch.setattr(Pool, "take", counted_take)
    monkeypatch.setattr(Pool, "give", counted_give)
    return blocks


def new_run() -> str:
    return f"averages-{os.getpid()}-{next(_runs)}"


# -- any tensors -----------------------------------------------------------------------------------


class Group:
    """Peers driven by hand from one thread: what each contributes is the test's choice."""

    def __init__(
        self, url, num, like, *, wrap=None, state=(0, b""), num_rounds=None, **options
    ) -> None:
        """All of them start from `state`; `options` are those of the engine."""
        self.url, self.like, self.run = url, like, new_run()
        self.num_rounds, self.first = num_rounds, state[0]
        self.links, self.engines = [], []
        self.peers = [self.add(like, wrap=wrap, **options) for _ in range(num)]
        self.places = {link.me.incarnation: place for place, link in enumerate(self.links)}
        for peer in self.peers:
            peer.start()
            peer.offer_state(*state)
            if peer is self.peers[0]:
                self.task(0)  # it is the founder
                self._tasks = {0: self._task}
        self._gather()

    def add(self, like, *, wrap=None, **options) -> Rounds:
        """An engine of this run, not started yet, that `round` does not know of."""
        mail, name = Mail(), f"p{len(self.engines)}"
        settings = LinkSettings(terms=STEADY, connect_s=PATIENCE_S)
        link = open_link(self.url, run=self.run, name=name, settings=settings, place=mail)
        self.links.append(link)
        engine = Rounds(
            wrap(link) if wrap else link,
            like,
            num_samples=lambda r: BATCH,
            num_rounds=self.num_rounds,
            mail=mail,
            **options,
        )
        self.engines.append(engine)
        return engine

    def __enter__(self):
        return self

    def __exit__(self, *details) -> None:
        for link in self.links:  # first: then nothing is waited for
            link.close()
        for engine in self.engines:
            engine.close()

    def next(self, place, kind, *, patience_s=PATIENCE_S):
        """The next outcome of that kind; what is told in between does not matter here."""
        while True:
            outcome = self.peers[place].next(patience_s)
            if isinstance(outcome, kind):
                return outcome
            assert not isinstance(outcome, Stopped | Task | Committed), outcome

    def task(self, place) -> Task:
        self._task = self.next(place, Task)
        return self._task

    def _gather(self) -> None:
        """Two rounds of the founder alone, so that all are members afterwards."""
        zeros = [torch.zeros_like(tensor) for tensor in self.like]
        for round_ in (self.first, self.first + 1):
            if round_ > self.first:
                deadline = time.monotonic() + PATIENCE_S
                while len(self.peers[0].view.peers(PeerState.ACTIVE)) < len(self.peers):
                    assert time.monotonic() < deadline
                    time.sleep(0.002)
                self.task(0)
            self.peers[0].contribute(self._task, zeros, weight=1.0)
            for place in range(len(self.peers)):
                committed = self.next(place, Committed)
                assert committed.round == round_
                committed.result.close()

    def round(self, contributions, weights):
        """One round: what each contributes. Returns each one's Committed."""
        for place, (tensors, weight) in enumerate(zip(contributions, weights, strict=True)):
            task = self.task(place)
            self.peers[place].contribute(task, tensors, weight=weight)
        return [self.next(place, Committed) for place in range(len(self.peers))]

    def results(self, committed):
        """What each one reads; all must be the same bits, and of one history."""
        read = []
        for one in committed:
            into = [torch.full_like(tensor, 7) for tensor in self.like]
            one.result.read_into(into)
            one.result.close()
            read.append(into)
        for other, one in zip(read[1:], committed[1:], strict=True):
            assert one.chain == committed[0].chain
            assert one.squared_norm == committed[0].squared_norm
            for left, right in zip(read[0], other, strict=True):
                assert bytes(bytes_of(left)) == bytes(bytes_of(right))
        return read[0]

    def order(self, committed):
        """Places in roster order: in which contributions are added."""
        return [self.places[share.peer] for share in committed.sums[0].contributions]


def random_like(like, seed) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    out = []
    for tensor in like:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            out.append(torch.randn(tensor.shape, generator=made, dtype=tensor.dtype))
        else:
            out.append(torch.randint(0, 2, tensor.shape, generator=made).to(tensor.dtype))
    return out


class TestAverages:
    @pytest.mark.parametrize("num", [1, 2, 3, 5])
    def test_the_mean_by_weight_is_that_of_one_process(self, url, num):
        like = [torch.empty(30_011), torch.empty(7, 11, dtype=torch.float64), torch.empty(1)]
        with Group(url, num, like) as group:
            for round_ in range(2):
                given = [random_like(like, 10 * round_ + k) for k in range(num)]
                weights = [float(k + round_) for k in range(num)]  # the first one's may be 0
                committed = group.round(given, weights)
                assert {one.weight for one in committed} == {sum(weights)}
                mean = group.results(committed)
                order = [k for k in group.order(committed[0]) if weights[k] > 0]
                for index, result in enumerate(mean):
                    expected = torch.zeros_like(result)
                    for place, k in enumerate(order):  # in roster order, in its own precision
                        expected = given[k][index] + 0 if place == 0 else expected + given[k][index]
                    if sum(weights):
                        expected /= sum(weights)
                    assert torch.equal(result, expected), (round_, index)
                exact = sum(g[1] for g, w in zip(given, weights, strict=True) if w)
                if sum(weights):
                    torch.testing.assert_close(mean[1], exact / sum(weights), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("wire", WIRES)
    def test_every_codec(self, every_url, wire):
        like = [torch.empty(40_000), torch.empty(300, dtype=torch.float64), torch.empty(5).half()]
        with Group(every_url, 3, like, wire=wire) as group:
            for round_ in range(2):
                given = [random_like(like, 10 * round_ + k) for k in range(3)]
                mean = group.results(group.round(given, [1.0, 2.0, 3.0]))
                largest = max(float(tensor.abs().max()) for one in given for tensor in one)
                # Of each contribution and of the result; int8 also sends what it owed.
                error = {"fp32": 1e-6, "fp16": 2**-10, "bf16": 2**-7, "int8": 2 / 127}[wire]
                for index, result in enumerate(mean):
                    expected = sum(one[index].double() for one in given) / 6
                    half = 2**-10 if result.dtype is torch.half else 0
                    far = (result.double() - expected).abs().max()
                    assert far <= max(error, half) * largest, (wire, index, far)

    def test_what_int8_leaves_out_is_sent_with_the_next_round(self, every_url):
        """Over many rounds the error does not grow: who sends, also a sum, keeps what it owes."""
        like = [torch.empty(5_000)]
        given = [random_like(like, k) for k in range(2)]
        exact = (given[0][0] + given[1][0]) / 2
        with Group(every_url, 2, like, wire="int8") as group:
            total = torch.zeros(5_000)
            for _ in range(20):
                total += group.results(group.round(given, [1.0, 1.0]))[0]
            step = max(float(one[0].abs().max()) for one in given) / 127
            # Each of the contribution and of the sum may be half a step late, once.
            assert (total - 20 * exact).abs().max() < 1.1 * step

    @pytest.mark.parametrize("weight", [1.0, 8.0])
    @pytest.mark.parametrize("num", [2, 4, 8])
    def test_what_is_far_below_a_step_of_int8_arrives_all_the_same(self, num, weight):
        """Senders have their steps in different rounds; in a mean each is too small for one."""
        generator = torch.Generator().manual_seed(num)
        small = torch.full((2048,), 0.01)
        small[::256] = 30.0  # one in each block, so that a step is 0.24
        total, exact = (torch.zeros(2048, dtype=torch.float64) for _ in range(2))
        with Group("local://", num, [torch.empty(2048)], wire="int8") as group:
            for _ in range(200):
                noise = 0.02 * torch.randn(num, 2048, generator=generator)
                given = [[weight * (small + noise[k])] for k in range(num)]
                exact += sum(one[0].double() for one in given) / (num * weight)
                total += group.results(group.round(given, [weight] * num))[0].double()
        # Half a step of the contributions, and half a one of the sum, where 2 would have to arrive.
        assert (total - exact).abs().max() < 1.2 * 0.24

    def test_what_int8_left_out_of_a_refused_sum_is_owed_by_nobody(self):
        """Here the attempt that counts adds up nothing, and so says nothing of what is owed."""
        like = [torch.empty(100_000)]
        with Group("local://", 3, like, wire="int8") as group:
            given = [[random_like(like, k)[0] * 1e30] for k in range(3)]
            for place, weight in enumerate([0.0, 1.0, 1.0]):
                given[place][0][0] = float("inf")  # in part 0; all others are finite
                group.peers[place].contribute(group.task(place), given[place], weight=weight)
            for place in range(3):
                assert group.next(place, i.Retry).refused
            committed = [group.next(place, Committed) for place in range(3)]
            assert [one.weight for one in committed] == [0.0] * 3
            assert not group.results(committed)[0].any()
            ones = [torch.ones(100_000)]
            (mean,) = group.results(group.round([ones] * 3, [1.0] * 3))
        assert (mean - 1).abs().max() < 0.02

    def test_a_part_that_gets_another_owner_at_a_cut_is_owed_by_nobody_else(self):
        """Its owner had begun to owe, and has no values of its own to send in that one's place."""
        go = threading.Event()

        def wait(link, word) -> None:
            if isinstance(word, m.Sum) and word.round == 2 and link.me == group.links[3].me:
                assert go.wait(PATIENCE_S)

        like = [torch.empty(100_000)]
        given = [random_like(like, k) for k in range(4)]
        with Group("local://", 4, like, wire="int8", wrap=lambda link: Slow(link, wait)) as group:
            parts = range(group.peers[0].layout.num_parts)
            added_up = [Watch(peer, e.Summed) for peer in group.peers[:3]]
            for place, weight in enumerate([0.0, 1.0, 1.0, 1.0]):
                group.peers[place].contribute(group.task(place), given[place], weight=weight)
            for place, watch in enumerate(added_up):
                of_four = set(parts[place::4])
                watch.until(lambda seen, mine=of_four: {event.sum.k for event in seen} == mine)
            group.links[3].close()
            go.set()
            for place, weight in enumerate([0.0, 1.0, 1.0]):
                while not isinstance(news := group.peers[place].next(PATIENCE_S), Task):
                    assert not isinstance(news, Stopped | Committed), news
                zeros = [torch.zeros(100_000)]
                group.peers[place].contribute(news, zeros, weight=weight)
            committed = [group.next(place, Committed) for place in range(3)]
            assert [one.weight for one in committed] == [4.0] * 3
            group.results(committed)
            residual = group.peers[0]._bank.feedback.residual
            owed = {k for k in parts if residual(k).any()}
        assert set(parts[::4]) - set(parts[::3])  # its own before the cut, and not after it
        assert owed == set(parts[::3])

    @pytest.mark.parametrize("wire", WIRES)
    def test_in_and_out_of_inference_mode(self, wire):
        with Group("local://", 2, [torch.empty(40_000)], wire=wire) as group:
            for inference in (True, False, False, True, False):
                with torch.inference_mode(inference):
                    given = [[torch.ones(40_000)] for _ in range(2)]
                    committed = group.round(given, [1.0, 1.0])
                    (mean,) = group.results(committed)
                assert float((mean - 1).abs().max()) < 0.02

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch's own word
    @pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e5m2, torch.float8_e4m3fn])
    def test_dtypes_that_torch_only_stores(self, dtype):
        wide = torch.complex64 if dtype.is_complex else torch.float32
        given = [[torch.arange(8).to(wide).to(dtype)] for _ in range(2)]
        with Group("local://", 2, [torch.empty(8, dtype=dtype)]) as group:
            (mean,) = group.results(group.round(given, [1.0, 1.0]))
        assert torch.equal(mean.to(wide), given[0][0].to(wide))

    def test_mixed_dtypes(self, url):
        like = [
            torch.empty(10),
            torch.empty(9, dtype=torch.int64),
            torch.empty(33, dtype=torch.bfloat16),
            torch.empty(0),
            torch.empty(3, dtype=torch.uint8),
            torch.empty(4, dtype=torch.complex64),
            torch.empty(5, dtype=torch.bool),
            torch.empty((), dtype=torch.float64),
            torch.empty(8, dtype=torch.uint16),
        ]
        with Group(url, 3, like) as group:
            given = [random_like(like, k) for k in range(3)]
            mean = group.results(group.round(given, [1.0, 1.0, 2.0]))
        for index, result in enumerate(mean):
            each = [one[index] for one in given]
            if result.dtype is torch.bool:
                expected = each[0] | each[1] | each[2]
            elif result.dtype is torch.bfloat16:
                expected = (sum(one.float() for one in each) / 4).bfloat16()
            elif result.dtype.is_floating_point or result.dtype.is_complex:
                expected = (each[0] + each[1] + each[2]) / 4
            else:  # a counter is added up, not averaged
                total = sum(one.to(torch.int64) for one in each)
                expected = total.to(result.dtype)
            assert torch.equal(result, expected), (index, result, expected)

    def test_many_tiny_tensors(self, url):
        """More than one message may have buffers."""
        like = [torch.empty(n % 3 + 1) for n in range(6_000)]
        with Group(url, 2, like) as group:
            given = [random_like(like, k) for k in range(2)]
            mean = group.results(group.round(given, [1.0, 1.0]))
        for index, result in enumerate(mean):
            assert torch.equal(result, (given[0][index] + given[1][index]) / 2)

    def test_values_without_a_norm(self, url):
        """Finite values whose squares are not: no reason to stop, or to refuse anything."""
        like = [torch.empty(4, dtype=torch.float64)]
        with Group(url, 2, like) as group:
            given = [[torch.full((4,), 1e200, dtype=torch.float64)] for _ in range(2)]
            committed = group.round(given, [1.0, 1.0])
            assert torch.equal(group.results(committed)[0], given[0][0])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
    def test_not_finite_ones_are_refused_or_shown(self, dtype):
        like = [torch.empty(10, dtype=dtype)]
        bad = [torch.full((10,), float("inf"), dtype=dtype)]
        good = [torch.ones(10, dtype=dtype)]
        with Group("local://", 2, like) as group:
            for place, tensors in enumerate([good, bad]):
                group.peers[place].contribute(group.task(place), tensors, weight=1.0)
            for place in range(2):
                assert group.next(place, i.Retry).refused == Ranges.of((8, 16))
            committed = [group.next(place, Committed) for place in range(2)]
            assert torch.equal(group.results(committed)[0], good[0])
        with Group("local://", 2, like, refuse=False) as group:  # as with a GradScaler
            committed = group.round([good, bad], [1.0, 1.0])
            assert not group.results(committed)[0].isfinite().any()

    def test_a_refusal_says_whose_it_was_and_which_tensor(self):
        like = [torch.empty(10), torch.empty(20), torch.empty(5, dtype=torch.float64)]
        given = [[torch.ones_like(tensor) for tensor in like] for _ in range(2)]
        given[1][1][7] = float("nan")
        given[1][2][0] = float("inf")
        with Group("local://", 2, like) as group:
            for place in range(2):
                group.peers[place].contribute(group.task(place), given[place], weight=1.0)
            for place in range(2):
                retry = group.next(place, i.Retry)
                guilty = group.links[1].me.incarnation
                assert retry.contributions == (m.Share(guilty, Ranges.of((8, 16))),)
                assert set(retry.faults) == {m.Fault(guilty, 1), m.Fault(guilty, 2)}

    @pytest.mark.parametrize("bad", [0, 1])
    def test_bytes_that_are_no_bool_are_refused_whoever_adds_them_up(self, bad):
        given = [[torch.zeros(10, dtype=torch.uint8)] for _ in range(2)]
        given[bad][0][3] = 2
        like = [torch.empty(10, dtype=torch.bool)]  # one part: the first peer owns it
        with Group("local://", 2, like) as group:
            for place in range(2):
                tensors = [given[place][0].view(torch.bool)]
                group.peers[place].contribute(group.task(place), tensors, weight=1.0)
            for place in range(2):
                refused = group.next(place, i.Retry).refused
                assert refused == Ranges.of((8 * bad, 8 * bad + 8))
            committed = [group.next(place, Committed) for place in range(2)]
            assert not group.results(committed)[0].any()

    def test_finite_ones_whose_mean_is_not_are_refused_or_shown(self):
        """The round ends without any samples, at all of them alike, and the run goes on."""
        like = [torch.empty(40_000), torch.empty(3)]
        large = [torch.ones(40_000), torch.full((3,), 3e38)]
        ones = [torch.ones(40_000), torch.ones(3)]
        with Group("local://", 2, like) as group:
            for place in range(2):
                group.peers[place].contribute(group.task(place), large, weight=1.0)
            for place in range(2):
                assert group.next(place, i.Retry).refused == Ranges.whole(BATCH)
            committed = [group.next(place, Committed) for place in range(2)]
            assert not any(tensor.any() for tensor in group.results(committed))
            assert committed[0].weight == 0
            assert committed[0].record.quarantine == Ranges.whole(BATCH)
            committed = group.round([ones, ones], [1.0, 1.0])
            assert torch.equal(group.results(committed)[1], ones[1])
        with Group("local://", 2, like, refuse=False) as group:
            assert group.results(group.round([large, large], [1.0, 1.0]))[1].isinf().all()

    def test_a_whole_run_without_faults(self, url):
        with Crowd(url, new_run()) as crowd:
            crowd.begin(4, num_rounds=12)
            crowd.finish()
            check_histories(list(crowd.histories.values()), 12)
            assert all(h.stopped["stopped"] == "finished" for h in crowd.histories.values())
            # Nobody noticed that others had finished: no cut but that of the first active peer.
            cuts = [name for name, said in crowd.lines if "settled" in said]
            assert cuts == ["p0"]


class TestContributing:
    LIKE = (torch.empty(40_000), torch.empty(40_000), torch.empty(40_000))

    def test_what_is_ready_leaves_before_all_is(self, url):
        """The owner holds the last tensors' parts while the sender still computes the first."""
        with Group(url, 2, self.LIKE) as group:
            came = Watch(group.peers[0], e.PartArrived)
            tensors = [torch.ones(40_000) for _ in range(3)]
            opened = group.peers[1].open_pass(group.task(1), tensors, weight=8.0)
            opened.ready(2)
            layout = group.peers[1].layout
            early = {k for k in range(layout.ready_from(2), layout.num_parts) if k % 2 == 0}
            assert early
            came.until(lambda seen: {event.part.k for event in seen} == early)
            tensors[0].fill_(3.0)  # not final yet: nobody has it
            tensors[1].fill_(3.0)
            opened.ready(1)
            opened.done()
            mine = [torch.full((40_000,), 5.0) for _ in range(3)]
            group.peers[0].contribute(group.task(0), mine, weight=8.0)
            committed = [group.next(place, Committed) for place in range(2)]
            values = [float(tensor[7]) for tensor in group.results(committed)]
            assert values == [8 / 16, 8 / 16, 6 / 16]
            # Each part came once, from each of the two.
            parts = sorted(event.part.k for event in came.seen if event.part.round == 2)
            assert parts == sorted(2 * [k for k in range(layout.num_parts) if k % 2 == 0])

    @pytest.mark.parametrize("wire", ["fp32", "int8"])
    def test_in_buckets_or_not_gives_the_same_bits(self, every_url, wire):
        results = []
        for buckets in (False, True):
            with Group(every_url, 2, self.LIKE, wire=wire) as group:
                for round_ in range(2):
                    for place in range(2):
                        tensors = random_like(self.LIKE, 10 * round_ + place)
                        task = group.task(place)
                        opened = group.peers[place].open_pass(task, tensors, weight=8.0)
                        for index in (2, 1, 0) if buckets else ():
                            opened.ready(index)
                        opened.done()
                    committed = [group.next(place, Committed) for place in range(2)]
                    results.append(group.results(committed))
        for left, right in zip(results[:2], results[2:], strict=True):
            assert all(map(torch.equal, left, right))

    def test_a_cut_between_ready_and_done(self, url):
        """What left counts for nothing; all of it is sent again, with the make-up share."""
        with Group(url, 3, self.LIKE) as group:
            tensors = [torch.full((40_000,), 1.0) for _ in range(3)]
            tasks = [group.task(place) for place in range(3)]
            assert [len(task.ranges) for task in tasks] == [6, 5, 5]
            opened = group.peers[0].open_pass(tasks[0], tensors, weight=6.0)
            opened.ready(1)
            group.peers.pop().close()  # it is gone, and its samples are shared out
            group.links[2].close()
            made_up = {}
            for place in range(2):
                made_up[place] = group.task(place)
            assert sum(len(task.ranges) for task in made_up.values()) == 5
            opened.done()
            group.peers[1].contribute(
                tasks[1], [torch.full((40_000,), 10.0) for _ in range(3)], weight=5.0
            )
            for place, task in made_up.items():
                more = [torch.full((40_000,), 100.0) for _ in range(3)]
                again = group.peers[place].open_pass(task, more, weight=float(len(task.ranges)))
                again.ready(0)  # it waits for the whole claim
                more[0].add_(1000.0)  # and is final only when it is done
                again.done()
            committed = [group.next(place, Committed) for place in range(2)]
            assert [one.weight for one in committed] == [16.0] * 2
            values = [float(tensor[7]) for tensor in group.results(committed)]
            assert values == [2211 / 16, 211 / 16, 211 / 16]

    def test_a_share_in_several_passes(self, url):
        with Group(url, 2, self.LIKE) as group:
            for place in range(2):
                task = group.task(place)
                for piece in task.ranges.pieces([3, 2, 3]):
                    tensors = [torch.full((40_000,), float(len(piece))) for _ in range(3)]
                    group.peers[place].contribute(
                        task, tensors, weight=float(len(piece)), ranges=piece
                    )
            committed = [group.next(place, Committed) for place in range(2)]
            assert [float(tensor[7]) for tensor in group.results(committed)] == [1.0] * 3

    def test_a_pass_that_is_never_done_did_not_happen(self, url):
        with Group(url, 2, self.LIKE) as group:
            for place in range(2):
                task = group.task(place)
                group.peers[place].open_pass(
                    task, [torch.full((40_000,), 99.0) for _ in range(3)], weight=8.0
                )
                group.peers[place].contribute(
                    task, [torch.full((40_000,), 8.0) for _ in range(3)], weight=8.0
                )
            committed = [group.next(place, Committed) for place in range(2)]
            assert committed[0].weight == 16
            assert [float(tensor[7]) for tensor in group.results(committed)] == [1.0] * 3

    def test_a_pass_of_which_parts_have_left_must_be_finished(self):
        with Group("local://", 2, self.LIKE) as group:
            task = group.task(0)
            tensors = [torch.ones(40_000) for _ in range(3)]
            group.peers[0].open_pass(task, tensors, weight=8.0).ready(1)
            with pytest.raises(UsageError, match="on their way"):
                group.peers[0].open_pass(task, tensors, weight=8.0)

    @pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 1e300])
    def test_a_weight_that_is_none(self, weight):
        with Group("local://", 1, self.LIKE) as group:
            task = group.task(0)
            with pytest.raises(UsageError, match="weight"):
                group.peers[0].contribute(task, list(self.LIKE), weight=weight)

    def test_a_late_contribution_to_an_old_round_is_dropped(self, url):
        with Group(url, 2, self.LIKE) as group:
            old = group.task(0)
            ones = [torch.ones(40_000) for _ in range(3)]
            group.peers[0].contribute(old, ones, weight=1.0)
            group.peers[1].contribute(group.task(1), ones, weight=1.0)
            for place in range(2):
                group.next(place, Committed).result.close()
            group.peers[0].contribute(old, ones, weight=1000.0)
            committed = group.round([ones, ones], [1.0, 1.0])
            assert committed[0].weight == 2.0

    def test_in_inference_mode(self):
        with Group("local://", 2, self.LIKE) as group:
            for _ in range(3):
                with torch.inference_mode():
                    ones = [torch.ones(40_000) for _ in range(3)]
                    committed = group.round([ones, ones], [1.0, 1.0])
                assert [one.weight for one in committed] == [2.0, 2.0]
                group.results(committed)


class Watch:
    """Events of a kind that reach an engine's machine, from now on."""

    def __init__(self, rounds, kind) -> None:
        self.seen, self._changed = [], threading.Condition()
        machine = rounds._machine
        handle = machine.handle

        def spy(event, *, lease):
            if isinstance(event, kind):
                with self._changed:
                    self.seen.append(event)
                    self._changed.notify_all()
            return handle(event, lease=lease)

        machine.handle = spy

    def until(self, wanted) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: wanted(self.seen), PATIENCE_S), self.seen


class Slow:
    """A link on which some messages wait."""

    def __init__(self, link, before) -> None:
        self._link, self._before = link, before
        self.told: list = []
        self.sent: list = []

    def __getattr__(self, name):
        return getattr(self._link, name)

    def tell(self, word) -> None:
        self.told.append(word)
        self._link.tell(word)

    def send(self, to, message, buffers=(), **options) -> None:
        word = m.decode(message)
        self._before(self, word)
        self.sent.append((word, b"".join(buffers)))
        self._link.send(to, message, buffers, **options)


class TestLeaving:
    def test_the_last_word_comes_after_the_last_results(self, url):
        """What is said to the arbiter is not behind what is sent to the others; and once the
        arbiter has heard that this peer is gone, nothing of it reaches anybody."""
        heard = []

        def wait(link, word) -> None:
            if isinstance(word, m.Sum) and word.round == 3:  # the closing one
                time.sleep(0.1)  # far longer than it takes to stop
                heard.extend(link.told)

        slow = []
        with Group(
            url,
            2,
            [torch.empty(3)],
            num_rounds=3,
            wrap=lambda link: slow.append(Slow(link, wait)) or slow[-1],
        ) as group:
            group.results(group.round([[torch.ones(3)]] * 2, [1.0, 1.0]))
            last = [group.next(place, Committed) for place in range(2)]
            group.results(last)
            for place in range(2):
                assert group.next(place, Stopped).reason is i.StopReason.FINISHED
        assert not [word for word in heard if isinstance(word, Resign)]
        assert all(isinstance(link.told[-1], Resign) for link in slow)

    def test_a_result_stays_until_it_has_left(self):
        """A lone member's round is stable at once; those who follow must still get what it was."""
        go = threading.Event()

        def wait(link, word) -> None:
            if isinstance(word, m.Sum) and word.round == 2:
                assert go.wait(PATIENCE_S)

        slow = []
        like = [torch.empty(5_000)]
        with Group(  # with a codec: what a lone member has as it is, it sends to nobody
            "local://",
            1,
            like,
            wrap=lambda link: slow.append(Slow(link, wait)) or slow[-1],
            wire="fp16",
        ) as group:
            for round_ in range(2, 9):
                group.results(group.round([[torch.full((5_000,), float(round_))]], [1.0]))
            go.set()
            assert group.peers[0]._courier.drain(PATIENCE_S)
        sums = {word.round: data for word, data in slow[0].sent if isinstance(word, m.Sum)}
        for round_ in range(2, 9):
            values = torch.frombuffer(bytearray(sums[round_]), dtype=torch.float16)
            assert (values == round_).all(), round_


class TestJoining:
    LIKE = (torch.empty(40_000), torch.empty(500), torch.empty(500, dtype=torch.int32))

    @pytest.mark.parametrize("brings", [True, False], ids=["own state", "no state"])
    @pytest.mark.parametrize(
        ("like", "wire"),
        [
            (LIKE, "bf16"),  # of as many bytes as the others'
            (LIKE, "int8"),
            (LIKE[:2], "fp16"),
            ((*LIKE, torch.empty(30_000)), "fp16"),
            ((LIKE[1], LIKE[0], LIKE[2]), "fp16"),
            ((*LIKE[:2], torch.empty(500)), "fp16"),
        ],
        ids=["halves", "int8", "fewer", "more", "other order", "other dtype"],
    )
    def test_a_peer_of_another_form_is_told_before_anything_is_lost(self, like, wire, brings):
        with Group("local://", 2, self.LIKE, wire="fp16") as group:
            ones = [torch.ones_like(tensor) for tensor in self.LIKE]
            stranger = group.add(like, wire=wire)
            stranger.start()
            if brings:
                stranger.offer_state(0, b"")
            for _ in range(4):
                committed = group.round([ones, ones], [1.0, 1.0])
                group.results(committed)
                assert [one.record.quarantine for one in committed] == [Ranges()] * 2
            while not isinstance(outcome := stranger.next(PATIENCE_S), Stopped):
                pass
            assert outcome.reason is i.StopReason.MISFIT
            assert form_of(group.peers[0].layout, "fp16") in outcome.text
            assert form_of(stranger.layout, wire) in outcome.text
            # It may take a moment until this one hears that the stranger is out.
            view = group.peers[0].outlook.wait_for_view(
                lambda view: len(view.peers(PeerState.ACTIVE)) <= 2, PATIENCE_S
            )
            others = view.peers(PeerState.ACTIVE)
            assert [peer.incarnation for peer in others] == list(group.places)

    def test_a_form_says_what_it_is_about(self):
        layout = Layout.of(self.LIKE, 64 << 10)
        form = form_of(layout, "bf16")
        assert form.startswith("wire='bf16', 3 tensors (40500 float32, 500 int32) in ")
        most = Layout(tuple((dtype, 10**14) for dtype in DTYPES.values()), layout.parts, 0)
        assert len(form_of(most, "bf16")) <= m.FORM_CHARS

    def test_another_run_goes_on_from_the_last_state_of_one_that_all_have_left(self, url):
        like = [torch.empty(3)]
        with Group(url, 2, like) as group:
            group.results(group.round([[torch.ones(3)]] * 2, [1.0, 1.0]))
            for peer in group.peers:
                peer.leave()
            deadline = time.monotonic() + PATIENCE_S
            while len(group.peers[0].view.peers(PeerState.LEAVING)) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            last = group.round([[torch.ones(3)]] * 2, [1.0, 1.0])[0]
            last.result.close()
            assert last.record.closing
        state = (last.round + 1, last.chain, last.record)
        with Group(url, 2, like, state=state) as group:
            committed = group.round([[torch.ones(3)], [torch.full((3,), 3.0)]], [1.0, 1.0])
            assert [one.round for one in committed] == [last.round + 3] * 2
            assert group.results(committed)[0].tolist() == [2.0] * 3

    def test_a_later_state_without_its_record(self):
        like = [torch.empty(3)]
        with Group("local://", 1, like) as group, pytest.raises(UsageError, match="record"):
            group.add(like).offer_state(3, b"chain")


class TestEngine:
    def test_each_part_leaves_before_the_next_is_added_up(self):
        """So that others can go on with it, and so that few results wait in memory."""
        with Group("local://", 1, [torch.empty(50_000)], wire="bf16") as group:
            seen = Watch(group.peers[0], e.PartArrived | e.Summed)
            group.results(group.round([[torch.ones(50_000)]], [1.0]))
            kinds = [type(event) for event in seen.seen]
            assert len(kinds) >= 6
            assert kinds == [e.PartArrived, e.Summed] * (len(kinds) // 2)

    def test_waiting_has_an_end(self):
        with Group("local://", 1, [torch.empty(3)]) as group:
            group.task(0)
            with pytest.raises(LinkTimeout, match="round 2"):
                group.next(0, Committed, patience_s=0.05)

    def test_closing_wakes_whoever_waits_and_says_so_again(self):
        with Group("local://", 1, [torch.empty(3)]) as group:
            group.task(0)
            timer = threading.Timer(0.05, group.peers[0].close)
            timer.start()
            while not isinstance(outcome := group.peers[0].next(PATIENCE_S), Stopped):
                pass
            timer.join()
            assert outcome == group.peers[0].next(0) == Stopped(None, "closed")

    def test_a_link_that_ends_is_the_last_word(self, url):
        with Group(url, 2, [torch.empty(3)]) as group:
            group.links[0].close()
            while not isinstance(outcome := group.peers[0].next(PATIENCE_S), Stopped):
                pass
            assert type(outcome.error).__name__ == "LinkClosed"

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    @pytest.mark.parametrize("where", ["reader", "courier"])
    def test_a_thread_that_fails_does_not_leave_the_user_waiting(self, where):
        like = [torch.ones(3), torch.ones(3, dtype=torch.float64)]  # the second owns the second
        with Group("local://", 2, like) as group:
            broken = group.peers[0]
            if where == "reader":
                broken.note = lambda parts: 1 / 0  # what a user's seam raises
            else:
                broken._bank.coded = lambda k: 1 / 0
            tasks = [group.task(place) for place in range(2)]
            group.peers[0].contribute(tasks[0], like, weight=8.0)
            group.peers[1].contribute(tasks[1], like, weight=8.0)
            while not isinstance(outcome := broken.next(PATIENCE_S), Stopped):
                pass
            assert "failed" in outcome.text

    def test_a_newcomer_whose_state_never_comes_keeps_a_bounded_part_of_what_it_hears(
        self, monkeypatch
    ):
        monkeypatch.setattr("manyhands.collectives.rounds.BEHIND_BYTES", 0)
        like = [torch.empty(40_000)]
        with Group("local://", 1, like) as group:
            run = group.links[0]._carrier._room.run
            mail = Mail()
            with open_link(
                "local://", run=run, settings=LinkSettings(terms=STEADY), place=mail
            ) as link:
                late = Rounds(link, like, num_samples=lambda r: BATCH, mail=mail)
                gaps = Watch(late, e.GapSeen)
                late.start()
                most = 0
                for _ in range(12):
                    group.results(group.round([[torch.ones(40_000)]], [1.0]))
                    most = max(most, len(late._shelf.sums))
                gaps.until(bool)
                assert most <= 4 * late.layout.num_parts
                late.close()

    def test_the_results_of_a_void_attempt_do_not_wait_for_the_next(self, taken):
        """Else each refusal would cost as much memory as a result, until the round is committed."""
        go = threading.Event()

        def wait(link, word) -> None:
            if isinstance(word, m.Part) and word.attempt.attempt == 1:
                assert go.wait(PATIENCE_S)

        like = [torch.empty(40_000)]
        good, bad = [torch.ones(40_000)], [torch.full((40_000,), float("nan"))]
        with Group("local://", 2, like, wrap=lambda link: Slow(link, wait)) as group:
            assert len(taken) == 2 * group.peers[0].layout.num_parts  # the result that each keeps
            for place, tensors in enumerate([good, bad]):
                group.peers[place].contribute(group.task(place), tensors, weight=1.0)
            for place in range(2):
                assert group.next(place, i.Retry).refused == Ranges.of((8, 16))
            # Nobody has the other's next contribution. What was kept of the round before went when
            # the first void result showed that all have it.
            assert not any(peer._shelf.sums for peer in group.peers)
            assert not taken
            go.set()
            group.results([group.next(place, Committed) for place in range(2)])

    @pytest.mark.parametrize("wire", ["fp32", "bf16"])
    def test_blocks_are_used_again(self, wire, taken):
        """Every block that was taken comes back, whatever it was taken for."""
        like = [torch.empty(n % 3 + 1) for n in range(300)] + [torch.empty(40_000)]
        with Group("local://", 2, like, wire=wire) as group:
            ones = [torch.ones_like(tensor) for tensor in like]
            for _ in range(5):
                group.results(group.round([ones, ones], [1.0, 1.0]))
            for peer in group.peers:
                assert peer._courier.drain(PATIENCE_S)
            # The last result of each is kept until the next round shows that all have it.
            kept = sum(len(peer._shelf._kept._blocks) for peer in group.peers)
            assert len(taken) == kept == 2 * group.peers[0].layout.num_parts
