"""Plain: brokers as DeepBooster's users name them, also those elsewhere that have no TLS."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from manyhands.core.address import AmqpAddress, is_loopback, parse_address
from manyhands.core.errors import AddressError


def read_broker(url: str) -> tuple[AmqpAddress, str | None]:
    """The broker, without a run; and what to warn its user of. Raises AddressError."""
    address = parse_address(_allow_plain(url))
    if not isinstance(address, AmqpAddress):
        hint = "give amqps://USER:PASSWORD@HOST/VHOST"
        raise AddressError(f"{address} is no broker", hint=hint)
    warning = None
    if not address.tls and not is_loopback(address.host):
        warning = (
            f"amqp:// to {address.host} sends the password, and all gradients, in the clear: "
            "whoever is on the way can read and change them. Use amqps:// if the broker has TLS"
        )
    return replace(address, run=None), warning


def _allow_plain(url: str) -> str:
    text = url.strip().strip("'\"")
    try:
        parts = urlsplit(text)
    except ValueError:
        return url  # parse_address says what is wrong
    if parts.scheme != "amqp" or "insecure=" in parts.query:
        return url
    return text + ("&" if parts.query else "?") + "insecure=1"
