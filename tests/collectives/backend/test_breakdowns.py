"""An operation that breaks on one rank, by itself, is an error on all the others, at once, by name.

Ranks are threads of this process here, so that one of them can be broken at any point; what breaks
is what CUDA, the allocator or a codec would raise there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from manyhands.collectives.backend import member
from manyhands.collectives.backend import messages as words
from manyhands.collectives.backend.buffers import Buffers
from manyhands.collectives.backend.exchange import Exchange
from manyhands.collectives.backend.group import ManyhandsGroup
from manyhands.collectives.backend.operations import Maker
from manyhands.collectives.backend.session import Session
from manyhands.collectives.backend.store import Keeper, StoreTimeout
from manyhands.core.errors import UsageError
from manyhands.links.hub import Hub

WORLD, VICTIM = 3, 1
OTHERS = (0, 2)
TIMEOUT_S = 600.0  # of the group: nobody may wait for it
AT_ONCE = timedelta(seconds=30)  # compared with that, on a machine that is busy
LARGE = 600_000  # floats: each rank owns a part of their sum
_runs = itertools.count()


class Broken(RuntimeError):
    """What the device says."""


def give_out(*_) -> None:
    raise Broken("the device is lost")


@pytest.fixture(params=["local", "hub"])
def url(request):
    """Of a run that nobody has used."""
    run = f"breakdown-{next(_runs)}"
    if request.param == "local":
        yield f"local:///{run}"
        return
    with Hub("127.0.0.1:0", insecure=True) as hub:
        yield f"hub://127.0.0.1:{hub.address.port}/{run}?insecure=1"


@pytest.fixture
def groups(url):
    """One for each rank."""
    with ThreadPoolExecutor(WORLD) as pool:
        coming = [pool.submit(Session, url, rank, WORLD, TIMEOUT_S) for rank in range(WORLD)]
        sessions = [session.result() for session in coming]
        ranks, timeout = list(range(WORLD)), timedelta(seconds=TIMEOUT_S)
        yield [ManyhandsGroup(session, "all", ranks, timeout) for session in sessions]
        list(pool.map(Session.close, sessions))


def break_buffers(group, monkeypatch, **methods) -> None:
    """Give the tensors of this rank's operations these methods."""
    kind = type("BrokenBuffers", (Buffers,), methods)

    def make(stream_for):
        return (kind if stream_for.__self__ is group._session else Buffers)(stream_for)

    monkeypatch.setattr(member, "Buffers", make)


def break_exchange(group, spoil: Callable[[Exchange], object]) -> None:
    """Do that to each sum of this rank's before it starts."""

    class BrokenMaker(Maker):
        def all_reduce(self, flat, operator, wire="fp32") -> Exchange:
            made = Maker.all_reduce(self, flat, operator, wire)
            spoil(made)
            return made

    was = group._maker
    group._maker = BrokenMaker(was.members, was.me, was.pool, was.part_bytes)


def spoil_sending(made) -> None:
    for outgoing in made.outgoing:
        outgoing.prepare = give_out


def spoil_sums(made) -> None:
    for owned in made.owned.values():
        owned.finish = give_out


EARLY = {
    "built": lambda group, patch: break_buffers(group, patch, both=give_out),
    "recorded": lambda group, patch: break_buffers(group, patch, arrival=give_out),
    "fetched": lambda group, patch: break_buffers(group, patch, arrival=lambda _: give_out),
    "made": lambda group, _: break_exchange(group, give_out),
    "sent": lambda group, _: break_exchange(group, spoil_sending),
    "summed": lambda group, _: break_exchange(group, spoil_sums),
}
LATE = {  # when the others may have all they need
    "finished": lambda group, _: break_exchange(group, lambda made: made.last.append(give_out)),
    "put back": lambda group, patch: break_buffers(group, patch, put_back=give_out),
}


def begin(start) -> Callable[[], str]:
    """Start an operation; returns what waits for it and says what it, or its start, has raised."""
    try:
        work = start()
    except Broken as error:
        return lambda text=str(error): text

    def text() -> str:
        try:
            work.wait(AT_ONCE)
        except dist.DistBackendError as error:
            return str(error)
        return ""

    return text


def begin_sum(group) -> Callable[[], str]:
    return begin(lambda: group.allreduce([torch.ones(LARGE)]))


def check_named(text: str, what: str = "`all_reduce") -> None:
    assert f"rank {VICTIM} (rank-{VICTIM}" in text, text
    assert f"gave up: {what}" in text, text
    assert f"failed on rank {VICTIM}: Broken('the device is lost')" in text, text


@pytest.mark.parametrize("order", [(*OTHERS, VICTIM), (VICTIM, *OTHERS)], ids=["last", "first"])
@pytest.mark.parametrize("point", EARLY)
def test_everybody_is_told_at_once(groups, monkeypatch, point, order):
    EARLY[point](groups[VICTIM], monkeypatch)
    texts = {rank: begin_sum(groups[rank]) for rank in order}
    assert "the device is lost" in texts[VICTIM]()
    for rank in OTHERS:
        check_named(texts[rank]())
        assert texts[rank]().startswith(f"`all_reduce float32[{LARGE}]")


@pytest.mark.parametrize("point", LATE)
def test_also_when_they_need_nothing_more_of_it(groups, monkeypatch, point):
    LATE[point](groups[VICTIM], monkeypatch)
    texts = [begin_sum(group) for group in groups]
    assert "the device is lost" in texts[VICTIM]()
    for rank in OTHERS:  # an operation that has ended well has; then the next one is told
        check_named(texts[rank]() or begin(groups[rank].barrier)())


def test_one_of_a_pair(groups, monkeypatch):
    break_buffers(groups[VICTIM], monkeypatch, read=give_out)
    coming = begin(lambda: groups[0].recv([torch.zeros(5)], VICTIM))
    assert "the device is lost" in begin(lambda: groups[VICTIM].send([torch.ones(5)], 0))()
    check_named(coming(), "`send`")


def test_a_receive_that_has_taken_its_message(groups):
    """It is refused for its argument, but the message is gone: that concerns its sender."""
    work = groups[VICTIM].recv_anysource([torch.eye(3).to_sparse()])
    groups[0].send([torch.ones(9)], VICTIM)
    with pytest.raises(dist.DistBackendError, match="to_dense"):
        work.wait(AT_ONCE)
    text = begin(groups[0].barrier)()
    assert f"rank {VICTIM} (rank-{VICTIM}" in text, text
    assert "`recv` failed" in text, text


EMPTY, SOME = 0, 5
UNEQUAL = {  # what rank 0 gives nothing for, and the victim expects something of
    "send": (
        lambda group: group.send([torch.ones(EMPTY)], VICTIM),
        lambda group: group.recv([torch.ones(SOME)], 0),
    ),
    "broadcast": (
        lambda group: group.broadcast([torch.ones(EMPTY)], options(dist.BroadcastOptions, 0)),
        lambda group: group.broadcast([torch.ones(SOME)], options(dist.BroadcastOptions, 0)),
    ),
    "reduce": (
        lambda group: group.reduce([torch.ones(EMPTY)], options(dist.ReduceOptions, VICTIM)),
        lambda group: group.reduce([torch.ones(SOME)], options(dist.ReduceOptions, VICTIM)),
    ),
    "all_to_all": (
        lambda group: crossing(group, gives=[1, EMPTY, 1], takes=[1, 1, 1]),
        lambda group: crossing(group, gives=[1, 1, 1], takes=[SOME, 1, 1]),
    ),
}


def options(kind, root):
    made = kind()
    made.rootRank = root
    return made


def crossing(group, *, gives, takes):
    out, given = torch.ones(sum(takes)), torch.ones(sum(gives))
    return group.alltoall_base(out, given, takes, gives)


@pytest.mark.parametrize("what", UNEQUAL)
def test_nothing_where_something_is_expected(groups, what):
    """No data comes of it, and yet nobody waits for the timeout."""
    give, take = UNEQUAL[what]
    works = [give(groups[0]), take(groups[VICTIM])]
    with pytest.raises(dist.DistBackendError, match=r"rank 0 \(rank-0"):
        works[1].wait(AT_ONCE)


def test_nothing_where_nothing_is_expected(groups):
    nothing = torch.ones(EMPTY)
    works = [
        groups[0].send([nothing], VICTIM),
        groups[VICTIM].recv([nothing], 0),
        *(group.broadcast([nothing], options(dist.BroadcastOptions, 0)) for group in groups),
        *(group.reduce([nothing], options(dist.ReduceOptions, 1)) for group in groups),
        *(group.allreduce([nothing]) for group in groups),
        *(group._allgather_base(nothing, nothing) for group in groups),
        *(group._reduce_scatter_base(nothing, nothing) for group in groups),
        *(crossing(group, gives=[0] * 3, takes=[0] * 3) for group in groups),
    ]
    assert all(work.wait(AT_ONCE) for work in works)


def store_of(group):
    return group._session.store


def overflow(group) -> None:
    store_of(group).set("count", str(2**63 - 1))
    store_of(group).add("count", 1)


def outgrow(group) -> None:
    longest = group._session.team.link.terms.part_bytes
    store_of(group).append("log", bytes(longest))
    store_of(group).append("log", b"x")


REFUSED = {
    "sparse": (lambda group: group.allreduce([torch.eye(3).to_sparse()]), "to_dense"),
    "to itself": (lambda group: group.send([torch.ones(3)], VICTIM), "copy_"),
    "from itself": (lambda group: group.recv([torch.ones(3)], VICTIM), "copy_"),
    "from nobody": (
        lambda group: group.part_of([VICTIM]).recv_anysource([torch.ones(3)]),
        "this rank alone",
    ),
    "long key": (lambda group: store_of(group).set("k" * 5000, "x"), "5000 characters"),
    "no number": (
        lambda group: (store_of(group).set("\0" * 4000, "x"), store_of(group).add("\0" * 4000, 1)),
        "does not hold a number",
    ),
    "long expectation": (
        lambda group: store_of(group).compare_set("key", "x" * 70_000, "y"),
        "bytes to say it",
    ),
    "many long keys": (
        lambda group: store_of(group).check([f"{n:04000}" for n in range(20)]),
        "bytes to say it",
    ),
    "wide amount": (lambda group: store_of(group).add("count", 2**64), "64 bits"),
    "wide sum": (overflow, "64 bits"),
    "long value": (outgrow, "bytes, of at most"),
}


@pytest.mark.parametrize("rank", [0, VICTIM])
def test_a_keeper_forgets_whoever_asks_no_longer(groups, rank):
    """It gave up, or has left: a program that asks again and again is not to fill the memory."""
    keeper = groups[0]._session.keeper
    for _ in range(3):
        with pytest.raises(StoreTimeout):
            store_of(groups[rank]).wait(["never"], timedelta(milliseconds=10))
    store_of(groups[rank]).set("other", "value")  # it is behind what was said before
    assert not keeper._waiting


def test_a_keeper_forgets_whoever_has_left():
    keeper, answers = Keeper(1 << 20), []
    for asker in (1, 2):
        ask = words.Ask(7, "get", ("late",))
        keeper.ask(asker, ask, b"", lambda *answer, a=asker: answers.append((a, answer)))
    keeper.forget(1)
    keeper.ask(0, words.Ask(1, "set", ("late",)), b"now", lambda *_: None)
    assert answers == [(2, (0, b"now", ""))]


def test_the_largest_request_of_a_store(groups):
    """Whatever is not refused arrives."""
    store, refused = store_of(groups[VICTIM]), []
    for num_bytes in range(61_380, 61_450):
        try:
            assert store.compare_set("key", bytes(num_bytes), "new") == bytes(num_bytes)
        except UsageError:
            refused.append(num_bytes)
    assert 0 < len(refused) < 70
    assert refused == list(range(refused[0], 61_450))


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_call_is_its_own_error_still(groups, what):
    call, said = REFUSED[what]
    with pytest.raises(UsageError, match=said):
        call(groups[VICTIM])
    for text in [begin_sum(group) for group in groups]:
        assert text() == ""
