"""AMQP channels: one connection with one channel, whose messages never leave the caller's memory.

    log_in (py-amqp)        connect, TLS, login, declarations
      └─ AmqpChannel        takes the socket over
           publish ───────► one gathering write out of the caller's buffers
           serve   ◄─────── header first; the handler names the memory the body is read into

Libraries join a body into one bytes object on either side; this path does not copy it at all
(docs/decisions/0003-amqp-data-path.md). One thread runs `serve` and calls the handler; any thread
may call the rest. Methods with an answer (`bind`, `unbind`, `consume`, `cancel`) wait for that
thread to read it, so they are not for the handler itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from manyhands.core.errors import (
    LinkBroken,
    LinkClosed,
    LinkError,
    LinkTimeout,
    Malformed,
    WireError,
)
from manyhands.links.amqp import frames
from manyhands.links.amqp.frames import Method
from manyhands.links.amqp.login import AmqpLogin, Setup, log_in, refusal
from manyhands.links.amqp.reader import FrameReader
from manyhands.links.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from manyhands.wire.frames import Buffer

_FAREWELL_S = 1.0  # for the closing handshake


class Handler(Protocol):
    """What happens on a channel, told by the thread in `serve`; it must not wait for long.

    A WireError from `on_delivery` discards that body (in bounded memory) and comes back as
    `on_bad_delivery`. Any other exception ends the connection and leaves `serve`.
    """

    def on_delivery(
        self,
        consumer_tag: str,
        delivery_tag: int,
        redelivered: bool,
        header: bytes,
        body_bytes: int,
    ) -> Sequence[memoryview]:
        """A message comes: writable views of `body_bytes` in all, into which its body is read."""
        ...

    def on_body(self) -> None:
        """The body of the last `on_delivery` is complete (at once when it has none)."""
        ...

    def on_bad_delivery(self, consumer_tag: str, delivery_tag: int, error: WireError) -> None:
        """A message was discarded; acknowledge it if its queue wants that."""
        ...

    def on_return(self, reply_code: int, reply_text: str, routing_key: str, header: bytes) -> None:
        """No queue took this mandatory message of ours (its confirm comes after this)."""
        ...

    def on_confirm(self, tag: int, multiple: bool, ok: bool) -> None:
        """The broker took or refused message `tag`, or all up to it."""
        ...

    def on_blocked(self, reason: str) -> None:
        """The broker stops reading from this connection: publishing will wait."""
        ...

    def on_unblocked(self) -> None:
        """The broker reads again."""
        ...

    def on_cancelled(self, consumer_tag: str) -> None:
        """The queue of this consumer is gone."""
        ...

    def on_end(self, error: LinkError, reply_code: int) -> None:
        """The connection has ended; once, and last. `reply_code` is AMQP's, 0 if it gave none."""
        ...


class _Call:
    """A method of ours that waits for its answer."""

    def __init__(self, answer: Method) -> None:
        self.answer = answer
        self.error: LinkError | None = None
        self.done = threading.Event()


class AmqpChannel:
    """An open channel. `open`, then a thread in `serve`, then everything else; `close` ends it."""

    def __init__(
        self, stream: Stream, handler: Handler, *, place: str, frame_max: int, heartbeat_s: int = 0
    ) -> None:
        self.frame_max = frame_max
        self.heartbeat_s = heartbeat_s  # agreed with the broker: call `beat` at half of it
        self._stream = stream
        self._handler = handler
        self._place = place
        self._writing = threading.Lock()  # held for a whole message: tags follow the wire's order
        self._published = 0
        self._calls: deque[_Call] = deque()
        self._blocked = False
        self._closing = False
        self._serving: int | None = None  # the thread in `serve`
        self._ended: LinkError | None = None
        self._end_code = 0
        self._served = threading.Event()
        self._reader = FrameReader(stream, self._on_method, place=place, frame_max=frame_max)

    @classmethod
    def open(
        cls,
        login: AmqpLogin,
        handler: Handler,
        *,
        setup: Setup,
        timeout_s: float = 10.0,
        heartbeat_s: int = 10,
    ) -> AmqpChannel:
        """Log in, let `setup` declare on py-amqp's channel, take the socket over.

        Raises what `log_in` raises. `setup` must not consume or publish: use the methods here.
        """
        opened = log_in(login, setup, timeout_s=timeout_s, heartbeat_s=heartbeat_s)
        return cls(
            Stream(opened.sock),
            handler,
            place=login.place,
            frame_max=opened.frame_max,
            heartbeat_s=opened.heartbeat_s,
        )

    @property
    def ended(self) -> LinkError | None:
        """Why the connection has ended, if it has."""
        return self._ended

    @property
    def last_heard(self) -> float:
        """When the last byte came from the broker."""
        return self._stream.heard_s

    @property
    def bytes_sent(self) -> int:
        """Bytes written to the broker so far."""
        return self._stream.bytes_sent

    def __repr__(self) -> str:
        state = "open" if self._ended is None else "ended"
        return f"<AmqpChannel to {self._place}, {state}>"

    # -- writing ----------------------------------------------------------------------------------

    def publish(
        self,
        exchange: str,
        routing_key: str,
        header: bytes,
        buffers: Sequence[Buffer],
        *,
        mandatory: bool = True,
        timeout_s: float | None = None,
        on_tag: Callable[[int], object] | None = None,
    ) -> int:
        """Write one message; its number on this channel, which is the tag of its confirm.

        Returns when the system has taken the last byte, so the buffers are free again. It waits
        while the broker does not read, for as long as the connection lives unless `timeout_s` says
        otherwise. A confirm can be read before this returns: `on_tag` is called before the write.
        Raises Oversized (nothing was written), or why the connection ended, or LinkTimeout, after
        which the connection is closed.
        """
        pieces = frames.publish(
            exchange, routing_key, header, buffers, mandatory=mandatory, frame_max=self.frame_max
        )
        with self._turn(timeout_s):
            tag = self._published + 1
            if on_tag is not None:
                on_tag(tag)
            self._published = tag
            self._stream.send(pieces, timeout_s=timeout_s)
        return tag

    def ack(self, delivery_tag: int, *, multiple: bool = False) -> None:
        """Acknowledge a delivery. It waits behind a publish that is being written."""
        with self._turn(None):
            self._stream.send([frames.ack(delivery_tag, multiple)])

    def beat(self, *, timeout_s: float) -> None:
        """Send a heartbeat, unless bytes are on their way anyhow or the broker reads none."""
        if self._blocked or not self._writing.acquire(blocking=False):
            return
        with self._held_turn():
            self._stream.send([frames.HEARTBEAT_FRAME], timeout_s=timeout_s)

    def bind(self, queue: str, exchange: str, routing_key: str, *, timeout_s: float = 10.0) -> None:
        """Bind a queue; it takes messages from here on."""
        self._call(frames.bind(queue, exchange, routing_key), Method.QUEUE_BIND_OK, timeout_s)

    def unbind(
        self, queue: str, exchange: str, routing_key: str, *, timeout_s: float = 10.0
    ) -> None:
        """Undo `bind`; no error if there was none."""
        self._call(frames.unbind(queue, exchange, routing_key), Method.QUEUE_UNBIND_OK, timeout_s)

    def bind_exchange(
        self, destination: str, source: str, routing_key: str, *, timeout_s: float = 10.0
    ) -> None:
        """What exchange `source` routes by that key goes to exchange `destination` too."""
        request = frames.bind_exchange(destination, source, routing_key)
        self._call(request, Method.EXCHANGE_BIND_OK, timeout_s)

    def delete_exchange(self, exchange: str, *, timeout_s: float = 10.0) -> None:
        """Delete an exchange; no error if there is none."""
        self._call(frames.delete_exchange(exchange), Method.EXCHANGE_DELETE_OK, timeout_s)

    def delete_queue(self, queue: str, *, timeout_s: float = 10.0) -> None:
        """Delete a queue; no error if there is none."""
        self._call(frames.delete_queue(queue), Method.QUEUE_DELETE_OK, timeout_s)

    def consume(
        self,
        queue: str,
        consumer_tag: str,
        *,
        no_ack: bool,
        exclusive: bool = False,
        timeout_s: float = 10.0,
    ) -> None:
        """Start a consumer: its messages come as `on_delivery`."""
        request = frames.consume(queue, consumer_tag, no_ack=no_ack, exclusive=exclusive)
        self._call(request, Method.BASIC_CONSUME_OK, timeout_s)

    def cancel(self, consumer_tag: str, *, timeout_s: float = 10.0) -> None:
        """End a consumer; nothing is delivered to it after this."""
        self._call(frames.cancel(consumer_tag), Method.BASIC_CANCEL_OK, timeout_s)

    def _call(self, request: bytes, answer: Method, timeout_s: float) -> None:
        if self._serving == threading.get_ident():
            raise RuntimeError("the thread in serve() cannot wait for an answer it has to read")
        deadline = time.monotonic() + timeout_s
        call = _Call(answer)
        with self._turn(timeout_s):
            # Answers come in the order of the requests; one given up on keeps its place.
            self._calls.append(call)
            self._stream.send([request], timeout_s=timeout_s)
        if not call.done.wait(max(0.0, deadline - time.monotonic())):
            raise LinkTimeout(f"{answer.name} from {self._place}", timeout_s)
        if call.error is not None:
            raise call.error.with_traceback(None)

    def _turn(self, timeout_s: float | None) -> contextlib.AbstractContextManager[None]:
        """Wait for the right to write, at most `timeout_s`."""
        if timeout_s is None:
            self._writing.acquire()
        elif not self._writing.acquire(timeout=timeout_s):
            raise LinkTimeout(f"turn to write to {self._place}", timeout_s)
        return self._held_turn()

    @contextlib.contextmanager
    def _held_turn(self) -> Generator[None]:
        try:
            if self._ended is not None:
                raise self._ended.with_traceback(None)
            yield
        except LinkBroken as broken:
            why = self._ended or (self._closed_here() if self._closing else broken)
            raise why.with_traceback(None) from None
        except BaseException:  # a timeout, Ctrl-C: it may have stopped in the middle of a frame
            self._stream.close()
            raise
        finally:
            self._writing.release()

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye, for a second at most, and close the socket. Idempotent, from any thread.

        Wakes whoever waits in `publish`; `serve` ends with `on_end(LinkClosed)`, and deliveries
        may come until it does.
        """
        if self._closing:
            return
        self._closing = True
        self._say(frames.CONNECTION_CLOSE)
        waits = self._serving not in (None, threading.get_ident())
        if waits:
            self._served.wait(_FAREWELL_S)  # for close-ok, which ends serve()
        self._stream.close()
        if waits:
            self._served.wait(_FAREWELL_S)
        elif self._serving is None:
            self._finish(self._closed_here())

    def _closed_here(self) -> LinkError:
        return LinkClosed(f"the connection to {self._place} was closed here")

    def abort(self) -> None:
        """Break the connection off: `serve` ends as if the network had."""
        self._stream.close()

    def _say(self, last_words: bytes) -> None:
        """Write if it can be done soon: nobody depends on it."""
        with contextlib.suppress(LinkError), self._turn(_FAREWELL_S):
            self._stream.send([last_words], timeout_s=_FAREWELL_S)

    def _finish(self, error: LinkError) -> LinkError:
        """Wake everyone who waits, give the descriptor back once nobody uses it; why it ended."""
        if self._closing:
            error = self._closed_here()
        self._ended = error
        self._stream.close()
        with self._writing:
            self._stream.detach()
        for call in self._calls:
            call.error = error
            call.done.set()
        self._served.set()
        return error

    # -- reading ----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Read until the connection ends, calling the handler; the last call is `on_end`."""
        self._serving = threading.get_ident()
        error: LinkError = LinkBroken(f"the reader of {self._place} failed")
        try:
            while True:
                self._on_method(frames.decode_method(self._reader.payload(frames.METHOD)))
        except LinkError as ended:
            error = ended
        except WireError as broken:
            error = LinkBroken(f"{self._place} broke the AMQP protocol: {broken}")
        finally:
            self._handler.on_end(self._finish(error), self._end_code)

    def _on_method(self, said: frames.Incoming) -> None:
        match said:
            case frames.Deliver():
                self._on_deliver(said)
            case frames.Confirm():
                self._handler.on_confirm(*said)
            case frames.Return():
                payload = self._reader.payload(frames.HEADER)
                body_bytes, flags = frames.decode_content(payload)
                self._reader.discard(body_bytes)
                self._handler.on_return(*said, frames.decode_header(payload, flags))
            case frames.Ok(method):
                self._on_answer(method)
            case frames.Cancelled(consumer_tag):
                self._handler.on_cancelled(consumer_tag)
            case frames.Blocked(reason):
                self._blocked = True
                self._handler.on_blocked(reason)
            case frames.Unblocked():
                self._blocked = False
                self._handler.on_unblocked()
            case frames.Closed(reply_code, reply_text, answer):
                self._end_code = reply_code
                self._say(answer)
                raise refusal(reply_code, reply_text, self._place)

    def _on_answer(self, method: Method) -> None:
        if method is Method.CONNECTION_CLOSE_OK and self._closing:
            raise self._closed_here()
        if not self._calls or self._calls[0].answer is not method:
            raise Malformed(f"{method.name} answers no question")
        self._calls.popleft().done.set()

    def _on_deliver(self, message: frames.Deliver) -> None:
        payload = self._reader.payload(frames.HEADER)
        body_bytes, flags = frames.decode_content(payload)
        try:
            header = frames.decode_header(payload, flags)
            targets = self._handler.on_delivery(*message, header, body_bytes)
        except WireError as error:
            self._reader.discard(body_bytes)
            self._handler.on_bad_delivery(message.consumer_tag, message.delivery_tag, error)
            return
        if sum(view.nbytes for view in targets) != body_bytes:
            raise ValueError(f"on_delivery gave other room than the {body_bytes} bytes of the body")
        self._reader.body(targets, body_bytes)
        self._handler.on_body()
