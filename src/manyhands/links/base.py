"""Link: how a peer talks to the others of its run, behind one Protocol.

    with open_link("hub://host:7799/shakes") as link:
        link.tell(Ready(...))                     to the arbiter
        link.send(None, b"hello", [buffer])       to everybody: uploaded once
        match link.receive(timeout_s=30):         messages and views, in order
            case Delivery(): ...
            case View(): ...
            case Gap(): ...

What every link promises (`manyhands.testing.contract` checks it):
- FIFO from each peer to each other (to a watching one: direct messages and fan-outs each), no
  doubles; a loss is followed by a cut (for an active peer)
  or by a Gap (for a watching one), never papered over.
- Views reach every peer in one order, numbered by one arbiter.
- A sender blocks when a reader is `window_bytes` behind; watching peers hold nobody up.
- Beats go on whatever the user's threads do; a dead peer is out after its lease, or at once when
  its connection is seen to close.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from manyhands.core.address import Address, AmqpAddress, HubAddress, LocalAddress
from manyhands.core.errors import AddressError
from manyhands.core.peers import PEER_NAME_HINT, PeerId, View, is_peer_name
from manyhands.core.settings import OUTAGE_S, find_meeting_point, find_outage
from manyhands.links.messages import Gone, Leaving, Ready, Resign, Terms
from manyhands.wire.frames import Buffer

DEFAULT_TIMEOUT_S = 600.0  # a wait that nobody put a number on; leases end earlier


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message from another peer. The buffers are writable memory of the receiver's own."""

    sender: PeerId
    message: bytes
    buffers: tuple[memoryview, ...]
    fanout: bool


@dataclass(frozen=True, slots=True)
class Gap:
    """Fan-outs for this watching peer are missing from here on: what it follows has a hole."""


Event = Delivery | View | Gap

Place = Callable[[PeerId, bytes, tuple[int, ...]], Sequence[memoryview] | None]
"""Asked, on the link's own thread, where the buffers of a message shall go: (sender, message,
sizes) -> writable byte views of these sizes, or None for fresh memory. It must not block, and may
be asked again for the same message after a reconnect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSettings:
    """What one peer may choose about its link."""

    terms: Terms = field(default_factory=Terms)
    """Leases, windows and sizes, for the case that this peer opens the run; else the run's hold."""
    connect_s: float = 5.0
    """For dialling, TLS and the handshake together."""
    outage_s: float = OUTAGE_S
    """How long to look for a meeting point that has gone away."""


class Link(Protocol):
    """See the module. All methods may be called from any thread."""

    @property
    def me(self) -> PeerId:
        """This peer."""
        ...

    @property
    def terms(self) -> Terms:
        """What the peers of the run agree on."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Bytes uploaded over the present connection, headers and beats included."""
        ...

    def send(
        self,
        to: PeerId | None,
        message: bytes,
        buffers: Sequence[Buffer] = (),
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Send to one peer, or to all others (None). Blocks while a reader's window is full.

        The buffers are sent from where they are: leave them unchanged until `flush` returns, or
        until an answer shows that the message has arrived. Raises PeerGone, LinkTimeout naming
        who was waited for, LinkClosed, LinkBroken, Excluded.
        """
        ...

    def receive(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Event:
        """The next message, view or gap. Raises LinkTimeout, LinkClosed, LinkBroken, Excluded."""
        ...

    def tell(self, word: Ready | Leaving | Gone | Resign) -> None:
        """Say something to the arbiter; its answer is a view."""
        ...

    def flush(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Return when all that was sent has reached the meeting point."""
        ...

    def lease_start_s(self) -> float:
        """`time.monotonic()` from which this peer's lease counts; -inf without one.

        It is the sending time of the last beat that was answered: the peer may act for the run
        until `terms.lease_s` after it.
        """
        ...

    def renew_lease(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Return when the meeting point has answered a beat that was sent after this call.

        For a peer that must know that it still takes part. Raises LinkTimeout, or what ended
        the link.
        """
        ...

    def close(self) -> None:
        """Leave and free everything. Idempotent; wakes whoever waits on this link."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def new_peer(name: str | None = None) -> PeerId:
    """A fresh incarnation; without a name, one that says where it runs and is not shared."""
    incarnation = secrets.randbelow((1 << 63) - 1) + 1
    if name is None:
        name = f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{incarnation & 0xFFF:03x}"
    if not is_peer_name(name):
        raise AddressError(f"peer name {name[:100]!r} cannot be used", hint=PEER_NAME_HINT)
    return PeerId(name, incarnation)


def open_link(
    url: str | None = None,
    *,
    run: str | None = None,
    name: str | None = None,
    settings: LinkSettings | None = None,
    place: Place | None = None,
) -> Link:
    """Join a run at the meeting point `url` (or join code); returns once a view shows this peer.

    What is left open comes from the environment or manyhands.toml (`core.settings`).
    Raises SettingsError, AddressError, Refused (and why), LinkBroken (no way there), LinkTimeout.
    """
    point = find_meeting_point(url, run=run, name=name, environ=os.environ)
    if point.address.run is None:
        raise AddressError(
            f"{point.address} names no run",
            hint="add ?run=NAME to it, pass run=, or set MANYHANDS_RUN",
        )
    settings = settings or LinkSettings(outage_s=find_outage(os.environ))
    return dial(point.address, new_peer(point.name), settings, place)


def dial(address: Address, me: PeerId, settings: LinkSettings, place: Place | None = None) -> Link:
    """`open_link` for those who know exactly where and who."""
    # Each kind of link is imported when it is first asked for: most peers use one.
    match address:
        case LocalAddress():
            from manyhands.links.local import open_local

            return open_local(address, me, settings, place)
        case HubAddress():
            from manyhands.links.hub_link import open_hub

            return open_hub(address, me, settings, place)
        case AmqpAddress():
            from manyhands.links.amqp import open_amqp

            return open_amqp(address, me, settings, place)
