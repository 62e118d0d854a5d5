"""Dialling a hub: its door on this machine, or TCP and TLS with the pinned certificate; then the
greeting, within one deadline."""

from __future__ import annotations

import contextlib
import socket
from threading import Timer
from time import monotonic

from manyhands._version import __version__
from manyhands.core.address import HubAddress, host_port, is_loopback
from manyhands.core.errors import (
    AddressError,
    Excluded,
    LinkBroken,
    Malformed,
    Refused,
    WireError,
)
from manyhands.core.peers import PeerId
from manyhands.links.door import knock
from manyhands.links.messages import (
    HEADER_BYTES,
    SCHEMA,
    Dismissal,
    Hello,
    Refusal,
    Return,
    Terms,
    Welcome,
)
from manyhands.links.stream import Stream
from manyhands.links.tls import check_pin, wrap_client
from manyhands.wire.frames import FrameReader, Limits

DOOR_S = 0.5
"""For the hub to answer at its door. Somebody else may have taken its name, and say nothing: that
costs every dial so much. A hub that is too busy to answer is dialled by TCP.
"""


def check_security(address: HubAddress) -> None:
    """Raise AddressError unless the address has what a safe connection needs."""
    if address.insecure:
        if not is_loopback(address.host) and not address.exposed:
            raise AddressError(
                f"insecure=1 is for loopback; {address.host} is not on this machine",
                hint="use the join code that `manyhands hub` prints",
            )
    elif not (address.fingerprint and address.token):
        raise AddressError(
            f"{address} needs the hub's certificate fingerprint and token",
            hint="use the join code that `manyhands hub` prints, or set MANYHANDS_FINGERPRINT and "
            "MANYHANDS_TOKEN; on loopback ?insecure=1 does without",
        )


class Dialler:
    """Knows where the hub is and who calls; `stop` ends a call that is under way."""

    def __init__(self, address: HubAddress, me: PeerId, connect_s: float) -> None:
        self._address, self._me, self._connect_s = address, me, connect_s
        self._stream: Stream | None = None
        self._stopped = False

    @property
    def where(self) -> str:
        """The hub's host and port."""
        return host_port(self._address.host, self._address.port)

    def stop(self) -> None:
        """No more calls: what is being dialled is closed, from any thread."""
        self._stopped = True
        if self._stream is not None:
            self._stream.close()

    def greet(self, terms: Terms, back: Return | None) -> tuple[Stream, FrameReader, Welcome]:
        """Connect and say Hello. Raises Refused, Excluded, LinkBroken, LinkTimeout."""
        where = self.where
        stream: Stream | None = None
        try:
            by_door = knock(self._address, min(DOOR_S, self._connect_s / 2))
            deadline = monotonic() + self._connect_s  # whoever has the door takes nothing of it
            sock = by_door or self._connect(where)
            stream = self._stream = Stream(sock)
            if self._stopped:
                stream.close()
            # Nothing in a handshake may outlast its deadline, whatever the far side does.
            timer = Timer(max(0.0, deadline - monotonic()), stream.close)
            timer.start()
            try:
                return self._hello(stream, where, terms, back)
            finally:
                timer.cancel()
                timer.join()
        except BaseException:
            if stream is not None:
                stream.detach()
            raise

    def _connect(self, where: str) -> socket.socket:
        try:
            sock = socket.create_connection(
                (self._address.host, self._address.port), timeout=self._connect_s
            )
        except OSError as error:
            unknown = isinstance(error, socket.gaierror)
            raise LinkBroken(
                f"no hub at {where}: {error.strerror or error}",
                hint="is the host's name right, and known on this machine?"
                if unknown
                else "is `manyhands hub` running there, and is the port open?",
            ) from None
        if self._address.insecure:
            return sock
        try:
            secured = wrap_client(sock)
        except (OSError, ValueError) as error:
            raise LinkBroken(
                f"no TLS with {where}: {error}",
                hint="a hub started with --insecure has no TLS; is it a manyhands hub at all?",
            ) from None
        try:
            check_pin(secured, self._address.fingerprint)
        except Refused as refusal:
            # Tell the hub too, so that its log explains why nobody comes in. No secret is in it.
            with contextlib.suppress(OSError):
                secured.sendall(SCHEMA.encode(Refusal(refusal.code, refusal.message)))
            secured.close()
            raise
        return secured

    def _hello(
        self, stream: Stream, where: str, terms: Terms, back: Return | None
    ) -> tuple[Stream, FrameReader, Welcome]:
        assert self._address.run is not None
        hello = Hello(self._address.run, self._me, self._address.token, terms, __version__, back)
        stream.send([SCHEMA.encode(hello)])
        limits = Limits(header_bytes=HEADER_BYTES, payload_bytes=terms.part_bytes)
        reader = FrameReader(stream.recv_into, limits)
        hint = "is it a manyhands hub of this release, with TLS on both sides or on neither?"
        try:
            first = reader.next()
            answer = None if first is None else SCHEMA.decode(first[0].kind, first[1])
        except WireError as error:
            raise LinkBroken(
                f"no hub at {where}, something else answers: {error.message}", hint=hint
            ) from None
        if answer is None:
            raise LinkBroken(
                f"the hub at {where} said nothing for {self._connect_s:g} s or hung up",
                hint=hint,
            )
        match answer:
            case Welcome():
                reader.limits = Limits(
                    header_bytes=HEADER_BYTES, payload_bytes=answer.terms.part_bytes
                )
                return stream, reader, answer
            case Refusal():
                raise Refused(answer.code, answer.message, hint=answer.hint or None)
            case Dismissal():
                raise Excluded(answer.reason)
            case _:
                raise Malformed(f"expected Welcome, got {type(answer).__name__}")
