"""A team on a link that the test holds in its hands: what happens between two steps of a thread."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from manyhands.collectives.backend import messages as words
from manyhands.collectives.backend import team as team_module
from manyhands.collectives.backend.exchange import GIVEN, Exchange, Key, Outgoing, Target, Wanted
from manyhands.collectives.backend.operations import Maker
from manyhands.collectives.backend.team import Team
from manyhands.collectives.reduction import Operator
from manyhands.core.errors import LinkBroken, LinkClosed, LinkTimeout
from manyhands.core.peers import Member, PeerId, PeerState, View, ViewNumber
from manyhands.links.base import Delivery
from manyhands.links.messages import Gone, Leaving, Terms
from manyhands.wire.tensors import bytes_of

PATIENCE_S = 10.0
GLIMPSE_S = 0.2  # for what must not happen
PEERS = tuple(PeerId(f"rank-{rank}", 100 + rank) for rank in range(3))
FIRST = ViewNumber(1, 1)
VIEW = View(FIRST, tuple(Member(peer, PeerState.ACTIVE, FIRST) for peer in PEERS))
KEY = Key(1, 0)
LARGE = 200_000  # floats: more than goes to everybody at once


class HeldLink:
    """Delivers what the test says, and writes down what is sent."""

    me, terms = PEERS[0], Terms()

    def __init__(self) -> None:
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.words: list[words.Word] = []
        self.confirming = threading.Event()
        self.confirming.set()
        self.broken = False
        self.answered_s = math.inf  # the time of the last sign of life
        self.told: list[type] = []
        self._closed = threading.Event()

    def send(self, to, message, buffers=(), *, timeout_s=600.0) -> None:
        if self.broken:
            raise LinkBroken("cut by the test")
        self.words.append(words.decode(message))

    def flush(self, timeout_s=600.0) -> None:
        end_s = time.monotonic() + timeout_s
        while not self.confirming.wait(0.05):
            if self._closed.is_set():
                raise LinkClosed("by this side")
            if time.monotonic() > end_s:
                raise LinkTimeout("the test", timeout_s)

    def tell(self, word) -> None:
        self.told.append(type(word))

    def lease_start_s(self) -> float:
        return self.answered_s

    def receive(self, timeout_s=600.0):
        try:
            event = self.events.get(timeout=timeout_s)
        except queue.Empty:
            raise LinkTimeout("anything", timeout_s) from None
        if event is None:
            raise LinkClosed("by the test")
        return event

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self.events.put(None)


class Held(Team):
    """Rank 0 of three."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue = queue.SimpleQueue()
        super().__init__(
            HeldLink(), PEERS, VIEW, other_words=lambda rank, word, _: self.heard.put((rank, word))
        )
        self.maker = Maker((0, 1, 2), 0, self.pool, self.link.terms.part_bytes)
        self.start_reading()

    def deliver(self, rank, word, buffer=None) -> None:
        """As a link does: ask where it goes, put it there, tell the reader."""
        message, buffers = words.encode(word), ()
        if buffer is not None:
            data = bytes_of(buffer)
            (target,) = self.place(PEERS[rank], message, (len(data),)) or [bytearray(len(data))]
            target[:] = data
            buffers = (target,)
        self.link.events.put(Delivery(PEERS[rank], message, buffers, fanout=False))

    def piece(self, rank, exchange, values, k=0) -> None:
        self.deliver(rank, words.Piece(*KEY, exchange.form, GIVEN, k), values)

    def see(self, *, without=(), order=(0, 1, 2)) -> None:
        """Another view."""
        roster = tuple(VIEW.roster[rank] for rank in order if rank not in without)
        self.link.events.put(View(ViewNumber(1, 9 - len(roster)), roster))

    def settle(self) -> None:
        """Everything that was delivered has been read."""
        self.deliver(1, words.Answer(7))
        while self.heard.get(timeout=PATIENCE_S)[1] != words.Answer(7):
            pass

    def begin(self, exchange, done) -> threading.Thread:
        def run() -> None:
            self.start(exchange, KEY, PATIENCE_S, done)

        thread = threading.Thread(target=run, name="user")
        thread.start()
        return thread


@pytest.fixture
def team():
    made = Held()
    yield made
    made.link.confirming.set()
    made.close()


class Ends(queue.SimpleQueue):
    """What an operation's `done` was called with."""

    @property
    def one(self):
        error = self.get(timeout=PATIENCE_S)
        assert self.empty()
        return error


def receiving(take, num=1) -> Exchange:
    """From rank 1: as many pieces of four bytes, each given to `take`."""
    made = Exchange("send float32[1]", (0, 1, 2), 0)
    for k in range(num):
        made.targets[1, GIVEN, k] = Target(4, take=take)
    return made


def end_of(team, exchange, *, leaver):
    """What it ends with: all data came early, `leaver` goes while rank 1's is put in place."""
    begun, go_on, ends = threading.Event(), threading.Event(), Ends()

    def take(block):
        begun.set()
        assert go_on.wait(PATIENCE_S)

    exchange.targets[1, GIVEN, 0] = Target(4, take=take)
    for rank in exchange.waits_for():
        team.piece(rank, exchange, torch.ones(1))
    team.settle()
    user = team.begin(exchange, ends.put)
    assert begun.wait(PATIENCE_S)
    team.deliver(leaver, words.Goodbye())
    assert team.heard.get(timeout=PATIENCE_S) == (leaver, words.Goodbye())
    go_on.set()
    user.join(PATIENCE_S)
    return ends.one


def test_a_goodbye_while_what_came_before_it_is_put_in_place(team):
    """Whoever gives and leaves is not missing, however long the copying takes."""
    assert end_of(team, team.maker.receive(torch.zeros(1), 1), leaver=1) is None


def test_nothing_is_put_in_place_once_the_error_is_told(team):
    ends, filled = Ends(), []
    exchange = receiving(filled.append)
    team.piece(1, exchange, torch.ones(1))
    team.settle()
    at_the_door, enter = threading.Event(), threading.Event()
    lock = team._adding

    class Door:
        """Keeps the user's thread waiting for the lock."""

        def __enter__(self):
            if threading.current_thread().name == "user":
                at_the_door.set()
                assert enter.wait(PATIENCE_S)
            return lock.__enter__()

        def __exit__(self, *error):
            return lock.__exit__(*error)

    team._adding = Door()
    user = team.begin(exchange, ends.put)
    assert at_the_door.wait(PATIENCE_S)
    team.link.broken = True
    team.send(1, words.Taken(0))
    error = ends.one
    assert "cut by the test" in str(error)
    enter.set()
    user.join(PATIENCE_S)
    assert filled == []
    assert ends.empty()


def test_the_link_is_closed_before_the_error_is_told(team):
    """Its thread may be writing into memory that is the user's again from then on."""
    open_when_told = Ends()
    exchange = team.maker.receive(torch.zeros(LARGE), 1)
    user = team.begin(exchange, lambda _: open_when_told.put(not team.link.closed))
    user.join(PATIENCE_S)
    team.see(without=(2,))
    assert open_when_told.one is False


def test_done_means_that_the_sums_are_on_their_way(team, monkeypatch):
    """A confirmation that comes at the worst moment does not end the operation before."""
    posted, seen = [], queue.SimpleQueue()
    post = team._courier.post
    monkeypatch.setattr(
        team._courier, "post", lambda letter, **how: (posted.append(letter), post(letter, **how))
    )

    class Telling(dict):
        def __delitem__(self, k):
            super().__delitem__(k)
            team.link.confirming.set()
            seen.put(ended.wait(GLIMPSE_S))

    ended = threading.Event()
    at_the_end = []

    def done(error):
        at_the_end.append((error, [words.decode(letter.message) for letter in posted]))
        ended.set()

    values = torch.ones(LARGE)
    exchange = team.maker.all_reduce(values, Operator.SUM)
    ((mine, _),) = exchange.owned.items()
    exchange.owned = Telling(exchange.owned)
    exchange.targets.clear()
    team.link.confirming.clear()
    extra = Outgoing(1, GIVEN, 999, 4, lambda: memoryview(bytes(4)), settled=False)
    exchange.outgoing.append(extra)
    team.start(exchange, KEY, PATIENCE_S, done)
    size = exchange.owned[mine].num_bytes // 4
    for rank in (1, 2):
        team.piece(rank, exchange, values[:size], k=mine)
    assert ended.wait(PATIENCE_S)
    ((error, said),) = at_the_end
    assert error is None
    assert any(isinstance(word, words.Piece) and word.step != GIVEN for word in said)
    assert seen.get(timeout=PATIENCE_S) is False


def test_what_is_expected_can_be_looked_at_while_it_arrives(team):
    """One thread asks for whom an operation waits, the reader crosses off what has come."""
    ends, arriving, looking = Ends(), threading.Event(), threading.Event()

    class Slow(dict):
        def __iter__(self):
            for key in super().__iter__():
                yield key
                if arriving.is_set() and not looking.is_set():
                    looking.set()
                    time.sleep(GLIMPSE_S)

    def take(block):
        arriving.set()
        assert looking.wait(PATIENCE_S)

    exchange = receiving(take, num=2)
    exchange.targets = Slow(exchange.targets)
    team.start(exchange, KEY, PATIENCE_S, ends.put)
    team.piece(1, exchange, torch.ones(1), k=1)
    assert arriving.wait(PATIENCE_S)
    team.on_any(Wanted(lambda: {Key(2, 0): 2}, lambda key: False, ends.put, math.inf))
    team.piece(1, exchange, torch.ones(1), k=0)
    assert ends.one is None


def test_whoever_has_what_it_needs_may_leave(team):
    """This rank still waits for another one: that the first has left is no error."""
    ends = Ends()
    given = [torch.ones(1) for _ in range(3)]
    outs = [torch.zeros(1) for _ in range(3)]
    exchange = team.maker.all_to_all(outs, given)
    team.start(exchange, KEY, PATIENCE_S, ends.put)
    team.piece(2, exchange, torch.full((1,), 2.0))
    team.deliver(2, words.Goodbye())
    team.settle()
    assert ends.empty()
    team.piece(1, exchange, torch.full((1,), 1.0))
    assert ends.one is None
    assert [float(out) for out in outs] == [1.0, 1.0, 2.0]


def test_it_may_leave_while_this_rank_is_still_starting(team):
    """Data has left for it, and it for home, before all that came early is in its place."""
    exchange = team.maker.all_to_all([torch.zeros(1)] * 3, [torch.ones(1)] * 3)
    assert end_of(team, exchange, leaver=2) is None


def test_nothing_is_for_one_that_has_left(team):
    ends = Ends()
    team.deliver(2, words.Goodbye())
    team.settle()
    team.start(team.maker.send(torch.ones(3), 2), KEY, PATIENCE_S, ends.put)
    assert "rank 2 (rank-2" in str(ends.one)


def test_whoever_is_waited_for_may_not(team):
    ends = Ends()
    exchange = team.maker.all_to_all([torch.zeros(1)] * 3, [torch.ones(1)] * 3)
    team.start(exchange, KEY, PATIENCE_S, ends.put)
    team.deliver(2, words.Goodbye())
    assert "rank 2 (rank-2" in str(ends.one)


def test_whoever_data_is_held_back_for_may_not(team):
    """It would be held for ever."""
    ends = Ends()
    team._accounts.sending[2].allowance = 0
    team.start(team.maker.send(torch.ones(3), 2), KEY, PATIENCE_S, ends.put)
    team.settle()
    assert ends.empty()
    team.deliver(2, words.Goodbye())
    assert "rank 2 (rank-2" in str(ends.one)


class Warned(logging.Handler):
    """What the team has warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: queue.SimpleQueue = queue.SimpleQueue()

    def emit(self, record) -> None:
        self.texts.put(record.getMessage())


@pytest.fixture
def warned(monkeypatch):
    """Of anything that waits, at once: what is waited for is asked, and not how long."""
    monkeypatch.setattr(team_module, "_STALL_S", 0.0)
    monkeypatch.setattr(team_module, "_TICK_S", 0.01)
    handler = Warned()
    team_module.log.addHandler(handler)
    yield handler
    team_module.log.removeHandler(handler)


def held_back(team) -> Exchange:
    """Rank 1 is at work on it, and rank 2 holds all that it is allowed."""
    team._accounts.sending[1].allowance = team._accounts.sending[2].allowance = 0
    team.deliver(1, words.Here(*KEY))
    team.settle()
    return team.maker.broadcast(torch.ones(3), 0)


def unconfirmed(team) -> Exchange:
    """All of it has left, and the meeting point says nothing."""
    team.link.confirming.clear()
    return team.maker.send(torch.ones(LARGE), 1)


AWAITED = [
    (lambda team: team.maker.receive(torch.ones(3), 2), "rank 2"),
    (held_back, "rank 2 to take what it sends"),
    (unconfirmed, "the meeting point to take what it sends"),
]


@pytest.mark.parametrize(("make", "awaited"), AWAITED, ids=["data", "a reader", "a hub"])
def test_who_is_waited_for_is_said(warned, team, make, awaited):
    """Also of an operation that nothing comes for."""
    exchange = make(team)
    team.start(exchange, KEY, PATIENCE_S, Ends().put)
    text = warned.texts.get(timeout=PATIENCE_S)
    assert text.startswith(f"`{exchange.form}` has waited")
    assert text.endswith(f"s for {awaited}")
    assert team.awaits(exchange) == awaited


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (AWAITED[0][0], "no data from rank 2 (rank-2"),
        (held_back, "what it sends was not taken by rank 2 (rank-2"),
        (unconfirmed, "what it sends was not taken by the meeting point"),
    ],
    ids=["data", "a reader", "a hub"],
)
def test_who_was_waited_for_until_the_end_is_said(team, monkeypatch, make, text):
    monkeypatch.setattr(team_module, "_TICK_S", 0.01)
    ends = Ends()
    team.start(make(team), KEY, 0.0, ends.put)
    assert text in str(ends.one)


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_data_that_nobody_expects(team, when):
    """It is an error, whenever it comes; it does not stay here for ever."""
    ends = Ends()
    outs = [torch.zeros(1), torch.zeros(1), torch.zeros(0)]
    exchange = team.maker.all_to_all(outs, [torch.ones(1)] * 3)

    def too_much():
        team.piece(2, exchange, torch.ones(1))

    if when == "before":
        too_much()
        team.settle()
    team.start(exchange, KEY, PATIENCE_S, ends.put)
    if when == "between":
        too_much()
    if when == "after":
        team.piece(1, exchange, torch.ones(1))
        team.piece(2, exchange, torch.ones(0))
        assert ends.one is None
        too_much()
    while not isinstance((said := team.heard.get(timeout=PATIENCE_S))[1], words.Failed):
        pass
    assert "rank 2" in said[1].reason
    assert "`all_to_all float32`" in said[1].reason
    assert "no bytes" in said[1].reason
    if when != "after":
        assert "no bytes" in str(ends.one)


def test_the_same_data_twice(team):
    """It must not be added twice, nor kept; whoever sends it is named."""
    ends = Ends()
    exchange = team.maker.all_reduce(torch.ones(5), Operator.SUM)
    team.start(exchange, KEY, PATIENCE_S, ends.put)
    for _ in range(2):
        team.piece(1, exchange, torch.ones(5))
    text = str(ends.one)
    assert "rank 1 (rank-1" in text
    assert "`all_reduce float32[5] sum` twice" in text


@pytest.mark.parametrize("kind", ["sum", "transfer"])
def test_bytes_that_are_no_values(team, kind):
    ends = Ends()
    mine = torch.zeros(5, dtype=torch.bool)
    if kind == "sum":
        exchange = team.maker.all_reduce(mine, Operator.SUM)
    else:
        exchange = team.maker.broadcast(mine, 1)
    team.start(exchange, KEY, PATIENCE_S, ends.put)
    team.piece(1, exchange, torch.full((5,), 2, dtype=torch.uint8))
    text = str(ends.one)
    assert "rank 1 (rank-1" in text
    assert f"sent for `{exchange.form}`" in text
    assert "other than 0 and 1" in text


def test_what_breaks_when_the_last_data_has_left(team):
    """On the thread that confirms it: no other would find out."""
    ends = Ends()

    def give_out():
        raise MemoryError("no more")

    exchange = team.maker.send(torch.ones(LARGE), 1)
    exchange.last.append(give_out)
    team.start(exchange, KEY, PATIENCE_S, ends.put)
    assert "failed on this rank: MemoryError('no more')" in str(ends.one)
    (said,) = [word.reason for word in team.link.words if isinstance(word, words.Failed)]
    assert said == f"`{exchange.form}` failed on rank 0: MemoryError('no more')"


def closing_s(team) -> float:
    start_s = time.monotonic()
    team.close()
    return time.monotonic() - start_s


@contextmanager
def closing(team):
    """It closes meanwhile; yields what fails unless it is still at it. By the end it has done."""
    thread = threading.Thread(target=team.close)
    thread.start()

    def waits() -> None:
        thread.join(GLIMPSE_S)
        assert thread.is_alive()

    yield waits
    thread.join(PATIENCE_S / 2)
    assert not thread.is_alive()


def test_closing_waits_for_a_meeting_point_that_answers(team):
    for rank in (1, 2):
        team.deliver(rank, words.Goodbye())
    team.see(without=(1, 2))
    team.link.confirming.clear()
    with closing(team) as waits:
        waits()
        team.link.confirming.set()
    assert team.link.told == [Leaving, Gone]
    assert words.Goodbye() in team.link.words


def test_closing_does_not_wait_for_one_that_is_silent(team):
    """What was sent may be lost: so this rank is not said to have left in peace."""
    team.link.confirming.clear()
    team.link.answered_s = time.monotonic() - Terms().lease_s
    assert closing_s(team) < team_module._PARTING_S / 2
    assert team.link.told == []


def test_the_first_member_leaves_last(team, monkeypatch):
    monkeypatch.setattr(team_module, "_LAST_S", PATIENCE_S)  # what ends its wait is no clock
    for rank in (1, 2):
        team.deliver(rank, words.Goodbye())
    team.settle()
    with closing(team) as waits:
        waits()
        team.see(without=(1,))
        waits()
        team.see(without=(1, 2))
    assert team.link.told == [Leaving, Gone]


def test_it_does_not_wait_for_those_who_stay(team, monkeypatch):
    monkeypatch.setattr(team_module, "_LAST_S", GLIMPSE_S)
    assert closing_s(team) < PATIENCE_S / 2
    assert team.link.told == [Leaving, Gone]


def test_a_member_that_is_not_the_first_leaves_at_once(team, monkeypatch):
    monkeypatch.setattr(team_module, "_LAST_S", PATIENCE_S)
    team.see(order=(1, 2, 0))
    team.settle()
    assert closing_s(team) < PATIENCE_S / 2
