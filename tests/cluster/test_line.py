"""The threads of an agent that talk with the office: when they may, and what their death means."""

from __future__ import annotations

import contextlib
import queue
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from manyhands.cluster.lease import Lease
from manyhands.cluster.ledger import Key
from manyhands.cluster.line import Broken, Line, Nudged, Reported, Wanted, Welcomed
from manyhands.cluster.messages import Hello, Holding, Phase, Status, Wants
from manyhands.cluster.uploads import Flooded, LogSettled, Uploads
from tests.cluster.offices import PATIENCE_S, FakeOffice
from tests.cluster.test_agent_parts import Clock

HELLO = Hello(version="1", host="h", agent="a", address="x", slots=(), pid=1)


class Events(queue.SimpleQueue):
    """What the threads told."""

    def next(self, *kinds: type) -> object:
        while not isinstance(event := self.get(timeout=PATIENCE_S), kinds):
            pass
        return event


@contextlib.contextmanager
def whole(made, office):
    """As `with made`, and its threads have ended then: they are daemons, for which an agent that
    goes does not wait long.
    """
    threads = made._threads if isinstance(made, Line) else [made._thread]
    try:
        with made:
            try:
                yield made
            finally:
                office.close()  # what waits for an answer has none
    finally:
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)


# The line


class Sleepy(FakeOffice):
    """It takes a while over one Status: one that comes when both threads wait for an answer."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lease_s=0.2)
        self._clock, self._asked, self._has_slept = clock, 0, False

    def wants(self, *arguments) -> Wants:
        self._asked += 1
        return super().wants(*arguments)

    def status(self, *arguments) -> None:
        super().status(*arguments)
        if self._asked > 1 and not self._has_slept:
            self._clock.now_s += 0.15
            self._has_slept = True


def test_nothing_is_said_for_an_agent_that_does_not_turn() -> None:
    """Its own thread hangs: the coordinator must not hear from the others that all is well."""
    clock, events = Clock(), Events()
    lease, office = Lease(clock), Sleepy(clock)
    with whole(Line(lambda: office, HELLO, lease, events.put), office) as line:
        events.next(Welcomed)
        line.report(1, Status(agent="a"))
        seen = {type(events.next(Reported, Wanted)) for _ in range(1)}
        while seen != {Reported, Wanted}:
            seen.add(type(events.next(Reported, Wanted)))
        events.next(Nudged)  # by the reporter: its turn comes by itself
        office.want()
        events.next(Nudged)  # by the listener, when its poll was answered
        said, until_s = len(office.statuses), lease.until_s
        news = Status(agent="a", holdings=(Holding(job=1, attempt=0, phase=Phase.READY),))
        line.report(1, news)
        line.turned()
        events.next(Reported)
        assert office.statuses[said:][0].holdings == news.holdings  # nothing before that
        numbers = [status.number for status in office.statuses]
        assert numbers == sorted(numbers)
        assert numbers[-1] > numbers[0] > 0
        assert until_s == pytest.approx(clock.now_s + 0.05)  # nor was the lease renewed


def test_a_session_that_is_renewed_begins_with_a_hello() -> None:
    events, office = Events(), FakeOffice()
    with whole(Line(lambda: office, HELLO, Lease(), events.put), office) as line:
        events.next(Welcomed)
        line.report(1, Status(agent="a"))
        assert events.next(Wanted).session == 1
        assert line.renew_session() == 1
        assert events.next(Welcomed).session == 2
        line.report(2, Status(agent="a"))
        office.want()  # the question of before is answered, and heard as that
        assert events.next(Wanted).session == 1
        assert events.next(Wanted).session == 2


@pytest.mark.parametrize("method", ["hello", "status", "wants"])
def test_a_thread_that_dies_is_told(method) -> None:
    events, office = Events(), FakeOffice()

    def breaks(*_: object) -> None:
        raise ZeroDivisionError

    setattr(office, method, breaks)
    with whole(Line(lambda: office, HELLO, Lease(), events.put), office) as line:
        if method != "hello":
            events.next(Welcomed)
            line.report(1, Status(agent="a"))
        assert isinstance(events.next(Broken).error, ZeroDivisionError)


# Uploads


class Connected:
    """A line that is always there."""

    def wait_connected(self, timeout_s: float | None = None) -> int:
        return 1

    def prove(self) -> bool:
        return True


class Chatter(FakeOffice):
    """Whatever is sent of the first job's log, there is another line when it is there."""

    def __init__(self, chatty: Path) -> None:
        super().__init__()
        self.chatty = chatty
        self.hello(HELLO)

    def send_log(self, host, agent, job, attempt, rank, offset, data) -> int:
        has = super().send_log(host, agent, job, attempt, rank, offset, data)
        if job == 1:
            with self.chatty.open("ab") as file:
                file.write(b"more\n")
        return has


def test_a_log_that_always_grows_keeps_no_other_waiting(tmp_path) -> None:
    chatty, quiet = tmp_path / "chatty", tmp_path / "quiet"
    chatty.write_bytes(b"first\n")
    quiet.write_bytes(b"done\n")
    events, office = Events(), Chatter(chatty)
    with whole(Uploads(lambda: office, Connected(), "h", "a", events.put), office) as uploads:
        uploads.add(Key("c", 1, 0), {0: chatty})
        office.wait_log(b"first")
        uploads.add(Key("c", 2, 0), {0: quiet})
        uploads.end(Key("c", 2, 0))
        assert events.next(LogSettled) == LogSettled(Key("c", 2, 0))
    assert office.logs[2, 0, 0] == b"done\n"


def test_a_log_that_was_dropped_is_not_sent(tmp_path) -> None:
    """Not even its rest: it may be of a cluster that is not there any more."""
    first, second = tmp_path / "first", tmp_path / "second"
    for log in (first, second):
        log.write_bytes(b"line\n")
    events, office = Events(), Chatter(first)
    with whole(Uploads(lambda: office, Connected(), "h", "a", events.put), office) as uploads:
        uploads.add(Key("c", 1, 0), {0: first})
        office.wait_log(b"line")
        uploads.drop(Key("c", 1, 0))
        size = len(office.logs[1, 0, 0])
        for job in (2, 3):  # a look that began before has ended by the second
            uploads.add(Key("c", job, 0), {0: second})
            uploads.end(Key("c", job, 0))
            assert events.next(LogSettled) == LogSettled(Key("c", job, 0))
    # One piece may have been on its way.
    assert len(office.logs[1, 0, 0]) <= size + len(b"more\n")


def test_a_log_that_takes_the_last_room_is_seen_and_cut_also_without_a_connection(
    tmp_path, monkeypatch
) -> None:
    full = SimpleNamespace(f_bavail=0, f_frsize=1)
    monkeypatch.setattr("manyhands.cluster.uploads.os.statvfs", lambda path: full)
    cut = threading.Event()
    monkeypatch.setattr(Uploads, "_cut", lambda uploads, upload: cut.set())
    log, key = tmp_path / "log", Key("c", 1, 0)
    log.write_bytes(b"x" * 2_000_000)
    events, office = Events(), FakeOffice()
    with whole(Line(lambda: office, HELLO, Lease(), events.put), office) as line:
        uploads = Uploads(lambda: office, line, "h", "a", events.put, reserve_bytes=1_000_000)
        with whole(uploads, office):  # nobody reports: it is welcome, and never connected
            uploads.add(key, {0: log})
            assert events.next(Flooded).key == key
            uploads.end(key)
            assert cut.wait(PATIENCE_S)
    assert office.chunks == []


def test_uploads_that_die_are_told(tmp_path) -> None:
    events = Events()

    class Breaks(Connected):
        def wait_connected(self, timeout_s: float | None = None) -> int:
            raise ZeroDivisionError

    office = FakeOffice()
    with whole(Uploads(lambda: office, Breaks(), "h", "a", events.put), office) as uploads:
        uploads.add(Key("c", 1, 0), {0: tmp_path / "log"})
        assert isinstance(events.next(Broken).error, ZeroDivisionError)
