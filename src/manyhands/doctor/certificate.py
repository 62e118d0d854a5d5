"""The certificate of a broker: whether this machine trusts it, and if not, why."""

from __future__ import annotations

import datetime
import socket
import ssl
from typing import NamedTuple

from cryptography import x509

from manyhands.core.address import AmqpAddress, host_port
from manyhands.doctor.network import identify
from manyhands.doctor.report import Finding, Outcome, ok, problem, skipped, warning

_SOON_DAYS = 14
# OpenSSL's verify codes (x509_vfy.h).
_NOT_YET, _EXPIRED = 9, 10
_UNKNOWN_AUTHORITY = frozenset({2, 18, 19, 20, 21, 27})
_OTHER_HOST = frozenset({62, 64})


class Shown(NamedTuple):
    """What a certificate says."""

    subject: str
    issuer: str
    names: tuple[str, ...]
    ends: datetime.datetime


def check_certificate(address: AmqpAddress, limit_s: float) -> Outcome[ssl.SSLContext | bool]:
    """A TLS handshake as the link would make it; the value is its context, True without TLS."""
    if not address.tls:
        return Outcome(findings=(skipped("tls", "amqp:// has none"),), value=True)
    try:
        context = ssl.create_default_context(cafile=address.ca_file)
    except OSError as error:
        summary = f"ca_file={address.ca_file} cannot be read: {error.strerror or error}"
        remedy = "name a PEM file with the certificate of the broker's authority"
        return Outcome(findings=(problem("tls", summary, remedy),))
    where = host_port(address.host, address.port)
    try:
        version = _shake_hands(address, context, limit_s)
    except ssl.SSLCertVerificationError as error:
        shown = look_at(address, limit_s)
        return Outcome(findings=(explain(address, error.verify_code, error.verify_message, shown),))
    except (OSError, ValueError) as error:
        return Outcome(findings=(_no_tls(address, where, error, limit_s),))
    return Outcome(findings=(_trusted(version, look_at(address, limit_s)),), value=context)


def _shake_hands(address: AmqpAddress, context: ssl.SSLContext, limit_s: float) -> str:
    with (
        socket.create_connection((address.host, address.port), timeout=limit_s) as raw,
        context.wrap_socket(raw, server_hostname=address.host) as sock,
    ):
        return sock.version() or "TLS"


def look_at(address: AmqpAddress, limit_s: float) -> Shown | None:
    """The certificate that is shown, whoever signed it; nothing is sent over this connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((address.host, address.port), timeout=limit_s) as raw,
            context.wrap_socket(raw, server_hostname=address.host) as sock,
        ):
            return read(sock.getpeercert(binary_form=True) or b"")
    except (OSError, ValueError):
        return None


def read(der: bytes) -> Shown:
    """What a certificate says. Raises ValueError for what is none."""
    certificate = x509.load_der_x509_certificate(der)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        listed = tuple(str(name.value) for name in names)
    except x509.ExtensionNotFound:
        listed = ()
    return Shown(
        certificate.subject.rfc4514_string(),
        certificate.issuer.rfc4514_string(),
        listed,
        certificate.not_valid_after_utc,
    )


def _trusted(version: str, shown: Shown | None) -> Finding:
    if shown is None:
        return ok("tls", f"{version}, certificate trusted", version=version)
    days = (shown.ends - datetime.datetime.now(datetime.UTC)).days
    data: dict[str, object] = {"version": version, "issuer": shown.issuer, "days_left": days}
    if days < _SOON_DAYS:
        remedy = "renew the broker's certificate: no new connection is possible after that"
        return warning("tls", f"the certificate ends in {days} days", remedy, **data)
    summary = f"{version}, certificate of {shown.issuer} trusted, {days} days left"
    return ok("tls", summary, **data)


def explain(address: AmqpAddress, code: int, message: str, shown: Shown | None) -> Finding:
    """The finding for a certificate that OpenSSL turned down with this verify code."""
    data: dict[str, object] = {"verify_code": code, "verify_message": message}
    if shown is not None:
        data |= {"issuer": shown.issuer, "subject": shown.subject, "names": list(shown.names)}
    issuer = "its authority" if shown is None else f"its authority ({shown.issuer})"
    if code in _UNKNOWN_AUTHORITY:
        given = "the system's authorities" if address.ca_file is None else address.ca_file
        summary = f"the certificate is signed by {issuer}, unknown to {given}"
        remedy = "get that authority's certificate and add ?ca_file=FILE.pem to the address"
    elif code in _OTHER_HOST:
        names = ", ".join(shown.names) if shown and shown.names else "another host"
        summary = f"the certificate is for {names}, not for {address.host}"
        remedy = "use one of these names in the address, or have a certificate made for this one"
    elif code == _EXPIRED:
        ended = "" if shown is None else f" on {shown.ends:%Y-%m-%d}"
        summary = f"the certificate has expired{ended}"
        remedy = "renew the broker's certificate, and check the clock of this machine"
    elif code == _NOT_YET:
        summary = "the certificate is not valid yet"
        remedy = "check the clock of this machine: sudo timedatectl set-ntp true"
    else:
        summary = f"the certificate is turned down: {message}"
        remedy = "look at it: openssl s_client -showcerts -connect HOST:PORT"
    return problem("tls", summary, remedy, **data)


def _no_tls(address: AmqpAddress, where: str, error: Exception, limit_s: float) -> Finding:
    found = identify(address.host, address.port)
    if isinstance(error, TimeoutError):
        summary = f"{where} takes connections but did not answer within {limit_s:.0f} s"
    else:
        reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)
        summary = f"no TLS with {where}: {reason}"
    remedy = f"{found} is on that port: RabbitMQ has TLS on 5671, and plain AMQP on 5672"
    return problem("tls", summary, remedy, found=found)
