"""Broker: from DeepBooster's `url_parameters` to an address."""

from __future__ import annotations

import warnings
from dataclasses import replace
from urllib.parse import urlsplit

from manyhands.core.address import AmqpAddress, is_loopback, parse_address
from manyhands.core.errors import AddressError


def broker_address(url: str) -> AmqpAddress:
    """The broker, without a run. `amqp://` to another machine is taken, with a warning."""
    address = parse_address(_allow_plain(url))
    if not isinstance(address, AmqpAddress):
        raise AddressError(
            f"{address} is no broker", hint="url_parameters='amqps://USER:PASSWORD@HOST/VHOST'"
        )
    if not address.tls and not is_loopback(address.host):
        warnings.warn(
            f"amqp:// to {address.host} sends the password, and all gradients, in the clear: "
            "whoever is on the way can read and change them. Use amqps:// if the broker has TLS",
            stacklevel=3,  # whoever makes the Trainer or Launcher
        )
    return replace(address, run=None)


def _allow_plain(url: str) -> str:
    text = url.strip().strip("'\"")
    try:
        parts = urlsplit(text)
    except ValueError:
        return url  # parse_address says what is wrong
    if parts.scheme != "amqp" or "insecure=" in parts.query:
        return url
    return text + ("&" if parts.query else "?") + "insecure=1"
