"""A RabbitMQ broker, examined: login, permissions, alarms, then a measurement."""

# py-amqp has no types: what comes from it is Any, and goes no further than this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAny=false, reportExplicitAny=false

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from manyhands.core.address import AmqpAddress, check_run, is_loopback
from manyhands.core.errors import AddressError, LinkError, Refused
from manyhands.doctor import limits
from manyhands.doctor.certificate import check_certificate
from manyhands.doctor.hub import describe_terms
from manyhands.doctor.limits import Budget
from manyhands.doctor.measure import check_link
from manyhands.doctor.network import check_dns, check_tcp, identify
from manyhands.doctor.permissions import check_rights
from manyhands.doctor.report import (
    ADDRESS,
    Finding,
    Outcome,
    Status,
    ok,
    problem,
    skip_all,
    warning,
)
from manyhands.links.amqp.login import AmqpLogin, run_errand

MIN_RABBITMQ = (3, 10)
_CHECKS = ["dns", "tcp", "tls", "credentials", "vhost", "server", "limits", "permissions", "alarm"]
_NO_CLOCK = (
    "not measured: AMQP carries no clock of the broker; leases count on each machine's own, so a "
    "difference between two machines does no harm"
)


def private_run(address: AmqpAddress) -> str:
    """A run that nobody else is in; under the name of the run, if it has one.

    Permissions may be limited to the names of one run, which all begin with `mh.RUN`.
    """
    name = f"doctor-{secrets.token_hex(6)}"
    if address.run is not None:
        with contextlib.suppress(AddressError):  # a long name leaves no room for ours
            check_run(f"{address.run}.{name}")
            return f"{address.run}.{name}"
    return name


def examine_broker(address: AmqpAddress, *, seconds: float, budget: Budget) -> Iterator[Finding]:
    """Everything about the broker at that address, in the order in which a peer meets it."""
    after = [*_CHECKS, "join", "clock offset"]
    yield from check_broker_address(address)
    dns = budget.call("dns", limits.DNS_S, lambda s: check_dns(address.host, address.port, s))
    yield from dns.findings
    if dns.value is None:
        yield from skip_all(after[1:], f"{address.host} was not found")
        return
    tcp = budget.call(
        "tcp", limits.TCP_S, lambda s: check_tcp(address.host, address.port, s, runs="RabbitMQ")
    )
    yield from tcp.findings
    if tcp.value is None:
        yield from skip_all(after[2:], "the broker cannot be reached")
        return
    tls = budget.call(
        "tls",
        limits.TLS_S + limits.IDENTIFY_S,
        lambda s: check_certificate(address, min(s, limits.TLS_S)),
    )
    yield from tls.findings
    if tls.value is None:
        yield from skip_all(after[3:], "no password is told to a broker that is not trusted")
        return
    login = login_for(address, tls.value)
    yield from _examine_inside(address, login, seconds=seconds, budget=budget)


def _examine_inside(
    address: AmqpAddress, login: AmqpLogin, *, seconds: float, budget: Budget
) -> Iterator[Finding]:
    """What shows once the password may be said."""
    logged_in = budget.call(
        "credentials",
        limits.LOGIN_S + limits.IDENTIFY_S,
        lambda s: check_login(login, min(s, limits.LOGIN_S)),
    )
    yield from logged_in.findings
    if logged_in.value is None:
        yield from skip_all(["permissions", "alarm", "join", "clock offset"], "no login")
        return
    run = private_run(address)
    rights = budget.call("permissions", limits.RIGHTS_S, lambda s: check_rights(login, run, s))
    yield from rights.findings
    if not rights.value:
        yield from skip_all(["join", "clock offset"], "the problems above come first")
        return
    inside = replace(address, run=run)
    link = budget.call(
        "join",
        limits.MEASURE_S + 2 * seconds,
        lambda s: check_link(inside, seconds=seconds, limit_s=s),
    )
    yield from link.findings
    if link.value is not None:
        yield describe_terms(link.value.terms, private=True)
    yield Finding(check="clock offset", status=Status.SKIPPED, summary=_NO_CLOCK)


def check_broker_address(address: AmqpAddress) -> tuple[Finding, ...]:
    """What can be said of the address before anything is dialled."""
    if address.user == "guest" and not is_loopback(address.host):
        remedy = (
            "make a user: rabbitmqctl add_user NAME, then rabbitmqctl set_permissions "
            f"-p {shlex.quote(address.vhost)} NAME '^mh\\.' '^mh\\.' '^mh\\.'"
        )
        summary = f"{address}: RabbitMQ lets guest in from its own machine only"
        return (warning(ADDRESS, summary, remedy, tls=address.tls),)
    if not address.tls and not is_loopback(address.host):
        remedy = "use amqps:// where others can listen in"
        summary = f"{address} sends the password in the clear, as insecure=1 allows"
        return (warning(ADDRESS, summary, remedy, tls=False),)
    return (ok(ADDRESS, str(address), tls=address.tls),)


def login_for(address: AmqpAddress, context: ssl.SSLContext | bool) -> AmqpLogin:
    """The login at that address with the TLS context that was found to work."""
    return AmqpLogin(
        host=address.host,
        port=address.port,
        user=address.user,
        password=address.password,
        vhost=address.vhost,
        ssl_context=context if isinstance(context, ssl.SSLContext) else None,
    )


# -- login --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """What a broker says of itself, and what was agreed with it.

    `heartbeat_s` is what it proposes; a link asks for less, and the smaller one holds.
    """

    product: str
    version: str
    frame_max: int
    channel_max: int
    heartbeat_s: int


def check_login(login: AmqpLogin, limit_s: float) -> Outcome[Server]:
    """Log in and out again."""
    try:
        server = ask_server(login, limit_s)
    except Refused as refusal:
        return Outcome(findings=_refused(login, refusal))
    except LinkError as error:
        found = identify(login.host, login.port)
        remedy = f"{found} is on that port; {error.hint or 'is it RabbitMQ?'}"
        finding = problem("credentials", error.message, remedy, found=found)
        later = skip_all(["vhost", "server", "limits"], "no login")
        return Outcome(findings=(finding, *later))
    return Outcome(
        findings=(
            ok("credentials", f"user {login.user} is let in", user=login.user),
            ok("vhost", f"{login.vhost} is there", vhost=login.vhost),
            judge_server(server),
            judge_limits(server),
        ),
        value=server,
    )


def ask_server(login: AmqpLogin, limit_s: float) -> Server:
    """What the broker says of itself. Raises what `log_in` raises."""
    found: list[Server] = []

    def look(channel: Any) -> None:  # noqa: ANN401  (py-amqp has no types)
        connection = channel.connection
        properties = cast("dict[str, object]", connection.server_properties)
        found.append(
            Server(
                product=_text(properties.get("product")),
                version=_text(properties.get("version")),
                frame_max=int(connection.frame_max),
                channel_max=int(connection.channel_max),
                heartbeat_s=int(connection.server_heartbeat or 0),
            )
        )

    run_errand(login, look, timeout_s=limit_s)
    return found[0]


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "unknown")


def judge_server(server: Server) -> Finding:
    """Whether this broker is one that the link is made for."""
    data: dict[str, object] = {"product": server.product, "version": server.version}
    text = f"{server.product} {server.version}"
    if server.product != "RabbitMQ":
        remedy = "the AMQP link is made for RabbitMQ: exchange bindings and single active consumers"
        return warning("server", f"{text} is not RabbitMQ", remedy, **data)
    digits = re.match(r"(\d+)\.(\d+)", server.version)
    if digits is None or (int(digits[1]), int(digits[2])) < MIN_RABBITMQ:
        remedy = "upgrade the broker to RabbitMQ 3.10 or newer"
        return warning("server", f"{text} is older than what is tested", remedy, **data)
    return ok("server", text, **data)


def judge_limits(server: Server) -> Finding:
    """What was agreed at login."""
    return ok(
        "limits",
        f"frames of {server.frame_max >> 10} KiB, {server.channel_max} channels a connection, "
        f"heartbeat at most {server.heartbeat_s} s; each peer uses 3 connections",
        frame_max=server.frame_max,
        channel_max=server.channel_max,
        heartbeat_s=server.heartbeat_s,
    )


def _refused(login: AmqpLogin, refusal: Refused) -> tuple[Finding, ...]:
    if refusal.code == "vhost":
        vhost, user = shlex.quote(login.vhost), shlex.quote(login.user)
        remedy = (
            "check the path of the URL (a hosted broker often has the user's name there); on the "
            f"broker: rabbitmqctl add_vhost {vhost}, then rabbitmqctl set_permissions -p {vhost} "
            f"{user} '^mh\\.' '^mh\\.' '^mh\\.'"
        )
        return (
            ok("credentials", f"user {login.user} is let in", user=login.user),
            problem("vhost", refusal.message, remedy, vhost=login.vhost),
            *skip_all(["server", "limits"], "no vhost"),
        )
    user = shlex.quote(login.user)
    remedy = f"check user and password; on the broker: rabbitmqctl change_password {user}"
    if login.user == "guest" and not is_loopback(login.host):
        remedy = "guest may come from the broker's own machine only: use another user"
    return (
        problem("credentials", refusal.message, remedy, user=login.user),
        *skip_all(["vhost", "server", "limits"], "no login"),
    )
