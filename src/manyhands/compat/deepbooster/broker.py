"""Broker: from DeepBooster's `url_parameters` to an address."""

from __future__ import annotations

import warnings

from manyhands.core.address import AmqpAddress
from manyhands.links.amqp.plain import read_broker


def broker_address(url: str) -> AmqpAddress:
    """The broker, without a run. `amqp://` to another machine is taken, with a warning."""
    address, warning = read_broker(url)
    if warning is not None:
        warnings.warn(warning, stacklevel=3)  # whoever makes the Trainer or Launcher
    return address
