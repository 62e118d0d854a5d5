"""A hub, examined: TLS and its pin, token, run and protocol version, then a measurement."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from manyhands._version import __version__
from manyhands.core.address import HubAddress, host_port, is_loopback
from manyhands.core.errors import Malformed, WireError, WrongVersion
from manyhands.doctor import limits
from manyhands.doctor.limits import Budget
from manyhands.doctor.measure import check_link
from manyhands.doctor.network import check_dns, check_loopback, check_tcp, identify
from manyhands.doctor.report import (
    ADDRESS,
    Finding,
    Outcome,
    ok,
    problem,
    skip_all,
    skipped,
    warning,
)
from manyhands.links.base import new_peer
from manyhands.links.door import knock
from manyhands.links.hub import DOCTOR_NAME, Hub
from manyhands.links.messages import (
    HEADER_BYTES,
    SCHEMA,
    Bye,
    Dismissal,
    Header,
    Hello,
    Refusal,
    Terms,
    Welcome,
)
from manyhands.links.tls import wrap_client
from manyhands.wire.frames import VERSION, FrameReader, Limits

T = TypeVar("T")
_AGAIN = "use the join code that this hub prints now"
_CLOCK_S = 2.0  # a difference that a person would notice in two logs


def private_run() -> str:
    """A run that nobody else is in."""
    return f"doctor-{secrets.token_hex(6)}"


def examine_hub(address: HubAddress, *, seconds: float, budget: Budget) -> Iterator[Finding]:
    """Everything about the hub at that address, in the order in which a peer meets it."""
    rest = ["dns", "tcp", "tls", "token", "run", "protocol", "terms", "join", "clock offset"]
    yield check_hub_address(address)
    dns = budget.call("dns", limits.DNS_S, lambda s: check_dns(address.host, address.port, s))
    yield from dns.findings
    if dns.value is None:
        yield from skip_all(rest[1:], f"{address.host} was not found")
        return
    tcp = budget.call(
        "tcp",
        limits.TCP_S,
        lambda s: check_tcp(address.host, address.port, s, runs="manyhands hub"),
    )
    yield from tcp.findings
    if tcp.value is None:
        yield from skip_all(rest[2:], "the hub cannot be reached")
        return
    tls = budget.call(
        "tls",
        limits.TLS_S + limits.IDENTIFY_S,
        lambda s: check_tls(address, min(s, limits.TLS_S)),
    )
    yield from tls.findings
    if not tls.value:
        yield from skip_all(rest[3:], "nothing is said to a hub without pin and token")
        return
    yield from _examine_inside(address, seconds=seconds, budget=budget)


def _examine_inside(address: HubAddress, *, seconds: float, budget: Budget) -> Iterator[Finding]:
    """What shows once the connection can be trusted."""

    def ask(run: str) -> Outcome[str]:
        return budget.call(
            "protocol",
            limits.GREETING_S + limits.IDENTIFY_S,
            lambda s: check_greeting(address, run, min(s, limits.GREETING_S)),
        )

    run = private_run()
    greeting = ask(run)
    if greeting.value == _OTHER_RUN and address.run is not None:
        # The hub serves some runs only: we can but look at one of those, without taking part.
        run = address.run
        greeting = ask(run)
    yield from greeting.findings
    if greeting.value != _WELCOME:
        yield from skip_all(["join", "clock offset"], "the hub does not let this peer in")
        return
    if (door := knock(address, limits.TCP_S)) is not None:
        door.close()
        said = "the hub is on this machine: peers here use its door, so TLS is not in what follows"
        yield ok("door", said)
    inside = replace(address, run=run)
    link = budget.call(
        "join",
        limits.MEASURE_S + 2 * seconds,
        lambda s: check_link(inside, seconds=seconds, limit_s=s),
    )
    yield from link.findings


def check_hub_address(address: HubAddress) -> Finding:
    """Whether the address has what a peer needs to trust the hub and be trusted."""
    where = str(address)
    if address.insecure and not is_loopback(address.host):
        summary = f"{where}: insecure=1 is for loopback, {address.host} is another machine"
        return problem(ADDRESS, summary, "use the join code that `manyhands hub` prints")
    if address.insecure:
        return ok(ADDRESS, f"{where}, without TLS on loopback", insecure=True)
    lacks = [
        name
        for name, there in (("fingerprint", address.fingerprint), ("token", address.token))
        if not there
    ]
    if lacks:
        remedy = (
            "use the join code that `manyhands hub` prints, or set MANYHANDS_FINGERPRINT and "
            "MANYHANDS_TOKEN; on loopback ?insecure=1 does without"
        )
        return problem(ADDRESS, f"{where} has no {' and no '.join(lacks)}", remedy, lacks=lacks)
    return ok(ADDRESS, where, insecure=False)


# -- TLS ----------------------------------------------------------------------------------------


def check_tls(address: HubAddress, limit_s: float) -> Outcome[bool]:
    """Whether the hub shows the certificate that the address pins; the value: whether to go on."""
    if address.insecure:
        finding = skipped("tls", "insecure=1 asks for none")
        return Outcome(findings=(finding,), value=is_loopback(address.host))
    where = host_port(address.host, address.port)
    try:
        shown, version = _shown_certificate(address, limit_s)
    except (OSError, ValueError) as error:
        return Outcome(findings=(_no_tls(address, where, error, limit_s),))
    data: dict[str, object] = {"shown": shown, "expected": address.fingerprint, "version": version}
    if not address.fingerprint:
        summary = f"{where} shows certificate {shown[:16]}…, and the address pins none"
        remedy = "compare it with the fingerprint in the hub's own join code before you trust it"
        return Outcome(findings=(warning("tls", summary, remedy, **data),))
    if shown != address.fingerprint:
        summary = f"{where} shows certificate {shown[:16]}…, expected {address.fingerprint[:16]}…"
        remedy = f"{_AGAIN}; if it should not have changed, somebody may be in between"
        return Outcome(findings=(problem("tls", summary, remedy, **data),))
    finding = ok("tls", f"{version}, certificate {shown[:16]}… as pinned", **data)
    return Outcome(findings=(finding,), value=bool(address.token))


def _shown_certificate(address: HubAddress, limit_s: float) -> tuple[str, str]:
    """Fingerprint of the certificate, and the TLS version."""
    with (
        socket.create_connection((address.host, address.port), timeout=limit_s) as raw,
        wrap_client(raw) as sock,
    ):
        shown = sock.getpeercert(binary_form=True) or b""
        return hashlib.sha256(shown).hexdigest(), sock.version() or "TLS"


def _no_tls(address: HubAddress, where: str, error: Exception, limit_s: float) -> Finding:
    found = identify(address.host, address.port)
    if isinstance(error, TimeoutError):
        summary = f"{where} takes connections but did not answer within {limit_s:.0f} s"
    else:
        reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)
        summary = f"no TLS with {where}: {reason}"
    remedy = (
        f"{found} is on that port: check the port; a hub started with --insecure has no TLS, "
        "and its address says ?insecure=1"
    )
    return problem("tls", summary, remedy, found=found)


# -- the greeting -------------------------------------------------------------------------------

_WELCOME, _OTHER_RUN, _REFUSED = "welcome", "other run", "refused"


def check_greeting(address: HubAddress, run: str, limit_s: float) -> Outcome[str]:
    """Say Hello for that run, hear the answer, say Bye."""
    try:
        asked_s = time.time()
        answer = greet(replace(address, run=run), limit_s)
        answered_s = time.time()
    except (OSError, WireError) as error:
        return Outcome(findings=_no_answer(address, error, limit_s), value=_REFUSED)
    match answer:
        case Welcome():
            clock = judge_offset(answer.clock_s, asked_s, answered_s)
            return Outcome(findings=(*_welcomed(address, run, answer), clock), value=_WELCOME)
        case Refusal(code="run"):
            return Outcome(findings=_other_run(address, answer), value=_OTHER_RUN)
        case Refusal():
            return Outcome(findings=_refused(answer), value=_REFUSED)
        case _:
            reason = answer.reason if isinstance(answer, Dismissal) else type(answer).__name__
            finding = problem("protocol", f"the hub answered Hello with {reason}", _AGAIN)
            return Outcome(findings=(finding,), value=_REFUSED)


def judge_offset(hub_s: float, asked_s: float, answered_s: float) -> Finding:
    """How far the hub's clock is ahead of ours, as far as one question can tell."""
    offset_s = hub_s - (asked_s + answered_s) / 2
    unsure_s = (answered_s - asked_s) / 2
    data: dict[str, object] = {"offset_s": round(offset_s, 3), "unsure_s": round(unsure_s, 3)}
    summary = f"the hub's clock is {offset_s:+.3f} s from ours, give or take {unsure_s:.3f} s"
    if abs(offset_s) - unsure_s <= _CLOCK_S:
        return ok("clock offset", summary, **data)
    remedy = (
        "leases count on each machine's own clock and do not mind; logs that are compared, and "
        "certificates, do: sudo timedatectl set-ntp true"
    )
    return warning("clock offset", summary, remedy, **data)


def greet(address: HubAddress, limit_s: float) -> Header:
    """The hub's first frame. Raises OSError, WireError; TimeoutError after `limit_s` of silence."""
    assert address.run is not None
    hello = Hello(address.run, new_peer(DOCTOR_NAME), address.token, Terms(), __version__, None)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(
            socket.create_connection((address.host, address.port), timeout=limit_s)
        )
        if not address.insecure:
            sock = stack.enter_context(wrap_client(sock))
            shown = sock.getpeercert(binary_form=True) or b""
            # The token is said to nobody else, even if another hub took the place just now.
            if hashlib.sha256(shown).hexdigest() != address.fingerprint:
                raise Malformed("the certificate has changed since it was checked")
        sock.sendall(SCHEMA.encode(hello))
        reader = FrameReader(sock.recv_into, Limits(header_bytes=HEADER_BYTES, payload_bytes=0))
        first = reader.next()
        if first is None:
            raise ConnectionResetError("it hung up without a word")
        answer = SCHEMA.decode(first[0].kind, first[1])
        if isinstance(answer, Welcome):
            sock.sendall(SCHEMA.encode(Bye()))
        return answer


def _welcomed(address: HubAddress, run: str, welcome: Welcome) -> tuple[Finding, ...]:
    terms = welcome.terms
    token = (
        skipped("token", "insecure=1 asks for none")
        if address.insecure
        else ok("token", "it is the hub's")
    )
    private = run != address.run
    named = "" if address.run is None else f", run {address.run} is left alone"
    where = f"in a private run {run}{named}" if private else f"in run {run}, as a watching peer"
    yours, theirs = __version__, welcome.release
    summary = f"wire version {VERSION}; the hub is release {theirs}"
    data: dict[str, object] = {"wire": VERSION, "hub_release": theirs, "release": yours}
    protocol = ok("protocol", summary, **data)
    if theirs != yours:
        remedy = "not needed while the wire version is the same; equal releases are what is tested"
        protocol = warning("protocol", f"{summary}, this one {yours}", remedy, **data)
    return (
        token,
        ok("run", f"the test is made {where}", run=run, private=private),
        protocol,
        describe_terms(terms, private=private),
    )


def describe_terms(terms: Terms, *, private: bool) -> Finding:
    """The terms in force where the test is made."""
    whose = "the defaults, of the private run" if private else "of this run"
    return ok(
        "terms",
        f"beats of {terms.beat_s:g} s, leases of {terms.lease_s:g} s, parts of "
        f"{terms.part_bytes >> 10} KiB, windows of {terms.window_bytes >> 20} MiB: {whose}",
        beat_s=terms.beat_s,
        lease_s=terms.lease_s,
        grace_s=terms.grace_s,
        part_bytes=terms.part_bytes,
        window_bytes=terms.window_bytes,
        private=private,
    )


def _refused(refusal: Refusal) -> tuple[Finding, ...]:
    known = {
        "token": ("token", _AGAIN),
        "peers": ("run", "end peers that are not needed, or start a second hub"),
        "runs": ("run", "end runs that are not needed, or start a second hub"),
        "closing": ("protocol", "start it again: manyhands hub"),
    }
    check, remedy = known.get(refusal.code, ("protocol", "look at the hub's log"))
    finding = problem(check, refusal.message, refusal.hint or remedy, code=refusal.code)
    later = [name for name in ("token", "run", "protocol", "terms") if name != check]
    return finding, *skip_all(later, "the hub turned this peer away before")


def _other_run(address: HubAddress, refusal: Refusal) -> tuple[Finding, ...]:
    """The hub serves named runs only, and the one we asked for is none of them."""
    if address.run is None:
        summary, extra = "the hub serves certain runs only", "name one of them with --run; "
    else:
        summary, extra = refusal.message, "correct --run or the run in the address; "
    finding = problem("run", summary, f"{extra}{refusal.hint}", code=refusal.code)
    return ok("token", "it is the hub's"), finding, *skip_all(["terms"], "no run was joined")


def _no_answer(address: HubAddress, error: Exception, limit_s: float) -> tuple[Finding, ...]:
    where = host_port(address.host, address.port)
    upgrade = "type on both machines: python -m pip install --upgrade manyhands"
    if isinstance(error, WrongVersion):
        summary = f"this side speaks wire version {VERSION}, the hub {error.version}"
        data: dict[str, object] = {"wire": VERSION, "hub_wire": error.version}
        finding = problem("protocol", summary, upgrade, **data)
    elif isinstance(error, TimeoutError):
        found = identify(address.host, address.port)
        summary = f"{where} takes connections but did not answer within {limit_s:.0f} s"
        finding = problem("protocol", summary, f"{found} is on that port: is it a manyhands hub?")
    elif isinstance(error, WireError):
        found = identify(address.host, address.port)
        summary = f"{where} does not speak as a hub does: {error.message}"
        finding = problem("protocol", summary, f"{found} is on that port: check the port")
    else:
        found = identify(address.host, address.port)
        summary = f"{where} hung up before it answered: {error}"
        remedy = f"{found} is on that port; a hub of another wire version hangs up too: {upgrade}"
        finding = problem("protocol", summary, remedy)
    return finding, *skip_all(["token", "run", "terms"], "the hub gave no answer")


# -- a hub of our own ---------------------------------------------------------------------------


def examine_loopback(*, seconds: float, budget: Budget) -> Iterator[Finding]:
    """A raw copy, then a hub with TLS in this process and two peers at it."""
    raw_s = min(0.5, seconds / 4)
    raw = budget.call("loopback", limits.LOOPBACK_S, lambda _: check_loopback(raw_s))
    yield from raw.findings
    hub = budget.call(
        "own hub", limits.MEASURE_S + seconds, lambda s: check_own_hub(min(1.0, seconds / 2), s)
    )
    yield from hub.findings


def check_own_hub(seconds: float, limit_s: float) -> Outcome[object]:
    """Start a hub with TLS on loopback, join it twice, measure."""
    with Hub("127.0.0.1:0", door=False) as hub:
        inside = replace(hub.address, run=private_run())
        outcome = check_link(inside, seconds=seconds, limit_s=limit_s, prefix="own hub ")
    return Outcome(findings=outcome.findings, value=outcome.value)
