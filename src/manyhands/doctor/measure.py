"""Measurements: two peers of this process send to each other through a meeting point.

They stay watching peers and address each other alone: in a run that is not theirs nobody waits for
them, no round counts them, and no message of theirs reaches anybody else.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass

from manyhands.core.address import Address
from manyhands.core.errors import LinkError, LinkTimeout, ManyhandsError
from manyhands.core.peers import PeerId, View
from manyhands.doctor.report import Finding, Outcome, ok, problem, skip_all, warning
from manyhands.links.base import Delivery, Link, LinkSettings, dial, new_peer
from manyhands.links.messages import Terms

NUM_PINGS = 50
_PING_S = 2.0  # for all of them: a far meeting point gets fewer
_SMALL_BYTES = 64 << 10
_SLOW_PART_S = 0.25  # a part that takes longer is sent in small ones
_JOIN_S = 5.0
_STAGES = ("join", "latency", "bandwidth")
_SAME_LINE = "both peers are on this machine, so up and down share its line"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a message and a stream of parts took, through the meeting point."""

    round_trip_s: float
    num_pings: int
    up_bps: float
    """Bytes a second until the meeting point had them all."""
    down_bps: float
    """Bytes a second until the other peer had them all."""
    num_bytes: int
    part_bytes: int
    join_s: float
    terms: Terms


def check_link(
    address: Address, *, seconds: float, limit_s: float, prefix: str = ""
) -> Outcome[Measured]:
    """Join, measure, leave; `prefix` tells the findings of several links apart."""
    try:
        measured = measure(address, seconds=seconds, deadline_s=time.monotonic() + limit_s)
    except _Failed as failed:
        error = failed.error
        remedy = error.hint or "look at the log of the meeting point for the other side of this"
        at = _STAGES.index(failed.stage)
        before = [ok(f"{prefix}{stage}", "it went well") for stage in _STAGES[:at]]
        finding = problem(f"{prefix}{failed.stage}", error.message, remedy, error=_kind(error))
        after = skip_all([f"{prefix}{stage}" for stage in _STAGES[at + 1 :]], "it comes after that")
        return Outcome(findings=(*before, finding, *after))
    joined = ok(
        f"{prefix}join",
        f"two peers joined run {address.run} in {measured.join_s * 1000:.0f} ms",
        run=address.run,
        ms=round(measured.join_s * 1000, 1),
    )
    return Outcome(findings=(joined, *judge(measured, prefix)), value=measured)


def judge(measured: Measured, prefix: str = "") -> tuple[Finding, ...]:
    """The findings about a measurement, against the terms it was made under."""
    return (
        _judge_latency(measured, f"{prefix}latency"),
        _judge_bandwidth(measured, f"{prefix}bandwidth"),
    )


def _judge_latency(measured: Measured, check: str) -> Finding:
    one_way_s, beat_s = measured.round_trip_s / 2, measured.terms.beat_s
    data: dict[str, object] = {
        "round_trip_ms": round(measured.round_trip_s * 1000, 3),
        "one_way_ms": round(one_way_s * 1000, 3),
        "messages": measured.num_pings,
    }
    text = (
        f"{one_way_s * 1000:.2f} ms from peer to peer, half of {measured.round_trip_s * 1000:.2f} "
        f"ms there and back (median of {measured.num_pings})"
    )
    if one_way_s > beat_s:
        remedy = (
            f"beats of {beat_s:g} s arrive late: use a meeting point closer by, or a longer lease: "
            f"join(lease_s={max(2 * measured.terms.lease_s, 20 * one_way_s):.0f})"
        )
        return warning(check, f"{text}: longer than a beat", remedy, **data)
    return ok(check, text, **data)


def _judge_bandwidth(measured: Measured, check: str) -> Finding:
    rate = min(measured.up_bps, measured.down_bps)
    part_s = measured.terms.part_bytes / rate if rate else float("inf")
    data: dict[str, object] = {
        "up_mb_per_s": round(measured.up_bps / 1e6, 2),
        "down_mb_per_s": round(measured.down_bps / 1e6, 2),
        "sent_bytes": measured.num_bytes,
        "part_bytes": measured.part_bytes,
        "shared_line": True,
    }
    text = (
        f"up {measured.up_bps / 1e6:,.1f} MB/s, down {measured.down_bps / 1e6:,.1f} MB/s "
        f"in parts of {measured.part_bytes >> 10} KiB; {_SAME_LINE}"
    )
    if part_s > measured.terms.lease_s / 4:
        lease_s = "a longer one" if rate == 0 else f"join(lease_s={8 * part_s:.0f})"
        remedy = (
            f"a part of {measured.terms.part_bytes >> 10} KiB takes {part_s:.1f} s of a lease of "
            f"{measured.terms.lease_s:g} s: use a faster line, or {lease_s}"
        )
        return warning(check, text, remedy, **data)
    return ok(check, text, **data)


class _Failed(Exception):
    """A stage of a measurement did not come to its end."""

    def __init__(self, stage: str, error: ManyhandsError) -> None:
        super().__init__(stage)
        self.stage, self.error = stage, error


@contextlib.contextmanager
def _stage(name: str) -> Generator[None]:
    try:
        yield
    except ManyhandsError as error:
        raise _Failed(name, error) from None


def _kind(error: ManyhandsError) -> str:
    return type(error).__name__


def measure(address: Address, *, seconds: float, deadline_s: float) -> Measured:
    """Latency, then bandwidth, by `deadline_s`. Raises _Failed, which says how far it got."""
    settings = LinkSettings(connect_s=min(_JOIN_S, _left(deadline_s)), outage_s=1.0)
    start = time.monotonic()
    with ExitStack() as stack:
        with _stage("join"):
            near = stack.enter_context(dial(address, new_peer("doctor-near"), settings))
            far = stack.enter_context(dial(address, new_peer("doctor-far"), settings))
            _wait_for(near, far.me, deadline_s)
        join_s = time.monotonic() - start
        echo = stack.enter_context(_Echo(far, near.me))
        with _stage("latency"):
            round_trip_s, num_pings = _ping(near, far.me, deadline_s)
        with _stage("bandwidth"):
            small_s = _round_trip(near, far.me, os.urandom(_SMALL_BYTES), deadline_s)
            part_bytes = min(near.terms.part_bytes, part_size(small_s - round_trip_s))
            up_bps, down_bps, num_bytes = _stream(near, echo, part_bytes, seconds, deadline_s)
        return Measured(
            round_trip_s=round_trip_s,
            num_pings=num_pings,
            up_bps=up_bps,
            down_bps=down_bps,
            num_bytes=num_bytes,
            part_bytes=part_bytes,
            join_s=join_s,
            terms=near.terms,
        )


class _Echo:
    """The far peer: sends pings back, counts parts."""

    def __init__(self, link: Link, to: PeerId) -> None:
        self.link = link
        self._to = to
        self._changed = threading.Condition()
        self._num_bytes, self._last_s = 0, 0.0
        self._thread = threading.Thread(target=self._serve, name="doctor echo", daemon=True)

    def __enter__(self) -> _Echo:
        self._thread.start()
        return self

    def __exit__(self, *_details: object) -> None:
        self.link.close()
        self._thread.join()

    def wait(self, num_bytes: int, deadline_s: float) -> tuple[int, float]:
        """Until so many bytes have come, or the deadline; how many there were and when the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_bytes >= num_bytes, _left(deadline_s))
            return self._num_bytes, self._last_s

    def _serve(self) -> None:
        with contextlib.suppress(LinkError):  # closed: the measurement is over
            while True:
                event = self.link.receive()
                if not isinstance(event, Delivery) or event.sender != self._to:
                    continue
                if event.message == b"ping":
                    self.link.send(self._to, b"pong")
                else:
                    with self._changed:
                        self._num_bytes += sum(view.nbytes for view in event.buffers)
                        self._last_s = time.monotonic()
                        self._changed.notify_all()


def _ping(link: Link, to: PeerId, deadline_s: float) -> tuple[float, int]:
    """Median seconds there and back, and of how many."""
    took: list[float] = []
    stop_s = min(time.monotonic() + _PING_S, deadline_s)
    while len(took) < NUM_PINGS and (not took or time.monotonic() < stop_s):
        took.append(_round_trip(link, to, b"", deadline_s))
    return statistics.median(took), len(took)


def _round_trip(link: Link, to: PeerId, payload: bytes, deadline_s: float) -> float:
    start = time.monotonic()
    link.send(to, b"ping", [payload] if payload else [], timeout_s=_left(deadline_s))
    _receive_until(link, lambda e: isinstance(e, Delivery) and e.sender == to, deadline_s)
    return time.monotonic() - start


def part_size(small_s: float) -> int:
    """1 MiB, unless, by the time 64 KiB took, a few of them would take too long."""
    return _SMALL_BYTES if small_s * 16 > _SLOW_PART_S else 1 << 20


def _stream(
    link: Link, echo: _Echo, part_bytes: int, seconds: float, deadline_s: float
) -> tuple[float, float, int]:
    """Bytes a second up and down, and how many were sent."""
    part = os.urandom(part_bytes)  # nothing on the way can make it smaller
    sent, start = 0, time.monotonic()
    while not sent or (time.monotonic() - start < seconds and time.monotonic() < deadline_s):
        link.send(echo.link.me, b"part", [part], timeout_s=_left(deadline_s))
        sent += part_bytes
    link.flush(timeout_s=_left(deadline_s))
    flushed_s = time.monotonic()
    got, last_s = echo.wait(sent, deadline_s)
    # What the other peer has, the meeting point had; its word that it has it may wait for a beat.
    up_s = min(flushed_s, last_s) if got >= sent else flushed_s
    return sent / (up_s - start), got / (last_s - start) if got else 0.0, sent


def _wait_for(link: Link, peer: PeerId, deadline_s: float) -> None:
    """Until this link's view has that peer: before it, it cannot be addressed."""
    _receive_until(
        link,
        lambda e: isinstance(e, View) and e.member(peer.incarnation) is not None,
        deadline_s,
    )


def _receive_until(link: Link, wanted: Callable[[object], bool], deadline_s: float) -> None:
    while not wanted(link.receive(timeout_s=_left(deadline_s))):
        pass


def _left(deadline_s: float) -> float:
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise LinkTimeout("end of the measurement", 0.0, hint="the line is slow: see --seconds")
    return left
