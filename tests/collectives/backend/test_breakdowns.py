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
from manyhands.collectives.backend.buffers import Buffers
from manyhands.collectives.backend.exchange import Exchange
from manyhands.collectives.backend.group import ManyhandsGroup
from manyhands.collectives.backend.operations import Maker
from manyhands.collectives.backend.session import Session
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


def test_a_refused_call_is_its_own_error_still(groups):
    with pytest.raises(UsageError, match="to_dense"):
        groups[VICTIM].allreduce([torch.eye(3).to_sparse()])
    for text in [begin_sum(group) for group in groups]:
        assert text() == ""
