"""What things are called at the broker, and how they are declared there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BEGUN = "begun"


@dataclass(frozen=True)
class Names:
    """What things are called at the broker. All of it starts with `mh.RUN`."""

    run: str

    @property
    def exchange(self) -> str:
        return f"mh.{self.run}"

    @property
    def control(self) -> str:
        return f"mh.{self.run}.control"

    @property
    def begun(self) -> str:
        """An exchange that routes to the control queue by `BEGUN` once the run has an arbiter."""
        return f"mh.{self.run}.begun"

    def queue(self, kind: str, incarnation: int, life: int) -> str:
        """A queue of one peer; it cannot have its name back while the broker thinks it in use."""
        return f"mh.{self.run}.{kind}.{incarnation:x}.{life}"

    def fan(self, incarnation: int) -> str:
        """The exchange of what fans out to that peer."""
        return f"mh.{self.run}.fan.{incarnation:x}"


def to_key(incarnation: int) -> str:
    """Routing key of messages to that peer."""
    return f"to.{incarnation:x}"


def from_key(incarnation: int) -> str:
    """Routing key of fan-outs of that peer."""
    return f"from.{incarnation:x}"


def declare_exchange(channel: Any, names: Names) -> None:  # noqa: ANN401  (py-amqp has no types)
    """The run's exchange: it goes with the last queue that is bound to it."""
    channel.exchange_declare(names.exchange, "direct", durable=False, auto_delete=True)


def declare_control(channel: Any, names: Names, expires_s: int, max_calls: int) -> None:  # noqa: ANN401
    """The queue of calls, and the exchange of its mark, which goes with it."""
    channel.queue_declare(
        names.control,
        durable=True,
        auto_delete=False,
        arguments={
            "x-queue-type": "classic",
            "x-single-active-consumer": True,
            "x-expires": expires_s * 1000,
            "x-max-length": max_calls,
        },
    )
    channel.queue_bind(names.control, names.exchange, "control")
    # Durable like the queue: the mark must outlive a restart of the broker.
    channel.exchange_declare(names.begun, "direct", durable=True, auto_delete=True)
    channel.queue_bind(names.control, names.begun, "control")  # so that it is never without one


def declare_queue(channel: Any, name: str, max_bytes: int, overflow: str) -> None:  # noqa: ANN401
    """A queue of this connection's own, which goes with it."""
    # Bodies only count as bytes, and a message may be all header: where the oldest are dropped to
    # save memory, their number is bounded too. A fuse must not blow for a window of small ones.
    max_messages = max(16, max_bytes // (32 << 10)) if overflow == "drop-head" else 1 << 22
    channel.queue_declare(
        name,
        durable=False,
        exclusive=True,
        auto_delete=True,
        arguments={
            # Said aloud: a broker may be set up to make quorum queues of whatever says nothing.
            "x-queue-type": "classic",
            "x-max-length-bytes": max_bytes,
            "x-max-length": max_messages,
            "x-overflow": overflow,
        },
    )
