"""The door: connections, with an end to every wait that uvicorn leaves open.

uvicorn bounds the time between two requests. It does not bound how long a connection may take to
send its first byte or the rest of its headers, nor how long it may leave an answer unread, nor how
many may do so; and it answers malformed requests in plain text. This does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from manyhands.cluster.desk import HttpError
from manyhands.cluster.gate import HEADERS, MADE_KNOWN, error_body
from manyhands.cluster.limits import HttpLimits

_COMPLAIN_S = 60.0
_log = logging.getLogger(__name__)


class Door:
    """Makes the protocol of each connection, and counts them. One event loop."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.most = limits.most_connections()
        self.num_connections = 0
        self.num_strangers = 0
        self._complained_s = -math.inf

    def full(self) -> str:
        """Why one who has just come, and is counted, cannot stay; '' if he can."""
        if self.num_connections > self.most:
            return f"{self.most} connections are open; descriptors (ulimit -n) bound that"
        if self.num_strangers > self.limits.strangers:
            return f"{self.limits.strangers} connections that have shown no token are open"
        return ""

    def complain(self, why: str, now_s: float) -> None:
        """Somebody was turned away: told once in a while, however many they are."""
        if now_s - self._complained_s >= _COMPLAIN_S:
            self._complained_s = now_s
            _log.warning("the coordinator turns callers away: %s", why)

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Protocol:
        """What uvicorn calls for each connection."""
        return _Connection(self, config, server_state, app_state, _loop)


class _Connection(H11Protocol):
    def __init__(
        self,
        door: Door,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        # uvicorn copies it into the scope of every request: the gate says there who is known.
        super().__init__(config, server_state, {**app_state, MADE_KNOWN: self._no_stranger}, _loop)
        self._door = door
        self._headers_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None
        self._is_stranger = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        door = self._door
        door.num_connections += 1
        door.num_strangers += 1
        super().connection_made(transport)
        if full := door.full():
            door.complain(full, self.loop.time())
            transport.abort()
            return
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.num_connections -= 1
        self._no_stranger()
        self._headers_due = _cancelled(self._headers_due)
        self._reading_due = _cancelled(self._reading_due)
        # uvicorn leaves this timer running after a reset.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_between_requests():
            self._expect_headers()
        super().data_received(data)
        if not self._is_between_requests():
            self._headers_due = _cancelled(self._headers_due)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_stranger:
            # One that stayed would have his place for as long as he asks again. TLS waits for him
            # to say goodbye, so that has an end too.
            self.transport.close()
            self._expect_headers()
        # A part of the next request may have come with the last one.
        if self._is_between_requests() and self.conn.trailing_data[0]:
            self._expect_headers()

    def shutdown(self) -> None:
        is_idle = self._is_between_requests()
        super().shutdown()
        if is_idle:
            # Nothing is under way. TLS would wait for a goodbye, which nobody there may read.
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Closing would wait for the same reader: the connection is dropped.
        self._reading_due = self._later(self._door.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._reading_due = _cancelled(self._reading_due)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn, where h11 has found the request malformed."""
        is_answering = self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE)
        if is_answering or not self._is_between_requests():
            # In the middle of an answer, or of a long poll: there is no place for another.
            self.transport.abort()
            return
        found = sys.exception()
        hint = found.error_status_hint if isinstance(found, h11.RemoteProtocolError) else 400
        status = 431 if hint == 431 else 400
        message = "the headers are too long" if status == 431 else "this is not an HTTP request"
        body = error_body(HttpError(status, "headers" if status == 431 else "request", message))
        headers = [
            *HEADERS,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=status, headers=headers)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Not worth a line in the log each: the request is answered as if it had not asked."""

    def _is_between_requests(self) -> bool:
        # There is none before the first request, whatever uvicorn's types say.
        return getattr(self.cycle, "response_complete", True)

    def _expect_headers(self) -> None:
        if self._headers_due is None:
            self._headers_due = self._later(self._door.limits.headers_s, self.transport.abort)

    def _later(self, delay_s: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, act)

    def _no_stranger(self) -> None:
        if self._is_stranger:
            self._is_stranger = False
            self._door.num_strangers -= 1


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
