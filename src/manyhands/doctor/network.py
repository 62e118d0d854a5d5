"""The way to a meeting point, below any protocol of its own: DNS, TCP, what answers on a port."""

from __future__ import annotations

import socket
import threading
import time

from manyhands.core.address import host_port
from manyhands.doctor.limits import IDENTIFY_S
from manyhands.doctor.report import Finding, Outcome, ok, problem, warning

_PIECE = 1 << 20
_SLOW_LOOPBACK_MBPS = 100.0
_KNOWN = {
    b"HTTP": "a web server",
    b"AMQP": "an AMQP broker",
    b"SSH-": "an SSH server",
    b"\x15\x03": "a server that wants TLS",
    b"MH": "a manyhands hub without TLS",
}


def check_dns(host: str, port: int, limit_s: float) -> Outcome[tuple[str, ...]]:
    """The addresses of a host. `limit_s` is kept by the caller: the system's resolver has none."""
    del limit_s
    start = time.monotonic()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        finding = problem(
            "dns",
            f"{host} has no address: {reason}",
            "check the name for typing errors, and that this machine has a network and a resolver; "
            "an IP address in its place does without",
            host=host,
        )
        return Outcome(findings=(finding,))
    addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    took_ms = (time.monotonic() - start) * 1000
    summary = f"{host} is {', '.join(addresses)}" if addresses != (host,) else f"{host}, no name"
    finding = ok("dns", summary, addresses=list(addresses), ms=round(took_ms, 1))
    return Outcome(findings=(finding,), value=addresses)


def check_tcp(host: str, port: int, limit_s: float, *, runs: str) -> Outcome[float]:
    """Whether the port takes connections, and how fast; `runs` names what should be there."""
    where = host_port(host, port)
    start = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=limit_s):
            took_ms = (time.monotonic() - start) * 1000
    except OSError as error:
        return Outcome(findings=(_unreachable(where, error, limit_s, runs),))
    finding = ok("tcp", f"{where} answers in {took_ms:.1f} ms", ms=round(took_ms, 2))
    return Outcome(findings=(finding,), value=took_ms)


def _unreachable(where: str, error: OSError, limit_s: float, runs: str) -> Finding:
    if isinstance(error, ConnectionRefusedError):
        summary = f"nothing listens on {where}"
        remedy = f"start it there ({runs}), or correct the port; a firewall may refuse as well"
    elif isinstance(error, TimeoutError):
        summary = f"{where} did not answer within {limit_s:.0f} s"
        remedy = "is the machine up, and does no firewall on the way drop connections to this port?"
    else:
        summary = f"no way to {where}: {error.strerror or error}"
        remedy = "is this machine on the right network or VPN, and is the address right?"
    return problem("tcp", summary, remedy, error=type(error).__name__)


def identify(host: str, port: int, limit_s: float = IDENTIFY_S) -> str:
    """What seems to listen there, judged by its first bytes; for the text of a problem."""
    try:
        with socket.create_connection((host, port), timeout=limit_s) as sock:
            sock.settimeout(limit_s)
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            said = sock.recv(8)
    except TimeoutError:
        return "something that says nothing"
    except OSError:
        return "something that hangs up on strangers"
    if not said:
        return "something that hangs up on strangers"
    return next((name for start, name in _KNOWN.items() if said.startswith(start)), "a stranger")


def check_loopback(seconds: float) -> Outcome[float]:
    """A raw copy between two sockets of this machine: the most that any link here can reach."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(2.0)
        with socket.create_connection(listener.getsockname()[:2], timeout=2.0) as sender:
            receiver, _ = listener.accept()
            with receiver:
                receiver.settimeout(2.0)
                rate = _copy(sender, receiver, seconds)
    finding = ok("loopback", f"a raw TCP copy moves {rate:,.0f} MB/s", mb_per_s=round(rate, 1))
    if rate < _SLOW_LOOPBACK_MBPS:
        remedy = "this machine is very busy, or its CPU very slow: close what else runs"
        finding = warning("loopback", finding.summary, remedy, mb_per_s=round(rate, 1))
    return Outcome(findings=(finding,), value=rate)


def _copy(sender: socket.socket, receiver: socket.socket, seconds: float) -> float:
    num_bytes = 0

    def read() -> None:
        nonlocal num_bytes
        buffer = bytearray(_PIECE)
        while got := receiver.recv_into(buffer):
            num_bytes += got

    thread = threading.Thread(target=read, name="doctor copy", daemon=True)
    start = time.monotonic()
    thread.start()
    piece = bytes(_PIECE)
    while time.monotonic() - start < seconds:
        sender.sendall(piece)
    sender.shutdown(socket.SHUT_WR)
    thread.join()
    return num_bytes / (time.monotonic() - start) / 1e6
