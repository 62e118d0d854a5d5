"""A line: one AMQP connection that is dialled again when it breaks.

It owns the thread that reads from the connection. Whoever uses the line is told when it is up and
when it is down, and hears of everything else as a `Handler` of the channel.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable

from manyhands.core.errors import LinkBroken, LinkError, ManyhandsError, Refused
from manyhands.links.amqp.channel import AmqpChannel, Handler
from manyhands.links.amqp.login import AmqpLogin, Setup
from manyhands.links.passing import passes

log = logging.getLogger(__name__)
_OUTAGE_HINT = "is the broker running? open the link again when it is; what was under way is lost"
_REDIAL_S = 0.1  # the first pause between two attempts; it doubles up to one second
_RACES_S = (0.02, 0.05, 0.1)  # the pauses after each lost race with one who leaves


class Line:
    """`open` dials once, in the caller's thread; then a thread of its own keeps the line up."""

    def __init__(
        self,
        name: str,
        login: AmqpLogin,
        handler: Handler,
        *,
        setup: Setup,
        up: Callable[[AmqpChannel], None],
        down: Callable[[], None],
        failed: Callable[[LinkError], None],
        connect_s: float,
        outage_s: float,
        heartbeat_s: int,
    ) -> None:
        self._name, self._login, self._handler, self._setup = name, login, handler, setup
        self._up, self._down, self._failed = up, down, failed
        self._connect_s, self._outage_s, self._heartbeat_s = connect_s, outage_s, heartbeat_s
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.channel: AmqpChannel | None = None

    def open(self) -> None:
        """Raises what `AmqpChannel.open` raises."""
        self.channel = self._first_dial()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the line. Idempotent."""
        self._closing.set()
        channel = self.channel
        if channel is not None:
            channel.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def beat(self) -> None:
        """Keep the connection alive, and give it up when the broker has long been silent."""
        channel = self.channel
        if channel is None:
            return None
        if time.monotonic() - channel.last_heard > 2 * channel.heartbeat_s > 0:
            return channel.abort()
        with contextlib.suppress(LinkError):  # its reader knows
            channel.beat(timeout_s=self._connect_s)
        return None

    def _first_dial(self) -> AmqpChannel:
        for pause_s in _RACES_S:
            try:
                return self._dial()
            except Refused as error:
                if error.code != "missing":
                    raise
            # The last one of a run took along what it shares, just as we declared it.
            self._closing.wait(pause_s)
        return self._dial()

    def _dial(self) -> AmqpChannel:
        return AmqpChannel.open(
            self._login,
            self._handler,
            setup=self._setup,
            timeout_s=self._connect_s,
            heartbeat_s=self._heartbeat_s,
        )

    def _run(self) -> None:
        try:
            self._keep_up()
        except ManyhandsError as error:
            self._give_up(error if isinstance(error, LinkError) else LinkBroken(error.message))
        except Exception as error:  # of a handler, and so perhaps of the user's `place`
            log.exception("%s failed", self._name)
            why = f"what arrived could not be handled: {type(error).__name__}: {error}"
            self._give_up(LinkBroken(why))
        finally:
            if self.channel is not None:
                self.channel.close()  # it came up while the line was being closed

    def _give_up(self, error: LinkError) -> None:
        if not self._closing.is_set():
            self._failed(error)

    def _keep_up(self) -> None:
        lost_s = time.monotonic()  # when it was last up
        while not self._closing.is_set():
            channel = self.channel
            assert channel is not None
            error = self._serve(channel)
            self.channel = None
            if self._closing.is_set():
                return
            log.info("%s: %s; dialling again", self._name, error or channel.ended)
            self._down()
            if error is None:
                lost_s = time.monotonic()
            else:
                self._bear(error, lost_s)
                self._closing.wait(_REDIAL_S)
            self.channel = self._redial(lost_s)
            log.info("%s: back", self._name)

    def _serve(self, channel: AmqpChannel) -> Exception | None:
        """Read until the connection ends; returns why `up` failed, if it did."""
        errors: list[Exception] = []

        def start() -> None:
            try:
                self._up(channel)
            except Exception as error:  # noqa: BLE001  (the line's own thread raises it)
                errors.append(error)
                channel.abort()

        # `up` asks questions that only a reading thread can answer, so it runs beside it.
        starter = threading.Thread(target=start, name=f"{self._name} up", daemon=True)
        starter.start()
        try:
            channel.serve()
        finally:
            starter.join()
        return errors[0] if errors else None

    def _redial(self, lost_s: float) -> AmqpChannel:
        pause_s = _REDIAL_S
        log.warning("%s lost %s and dials again", self._name, self._login.place)
        while not self._closing.is_set():
            try:
                return self._dial()
            except LinkError as error:
                self._bear(error, lost_s)
            self._closing.wait(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
            pause_s = min(1.0, 2 * pause_s)
        raise LinkBroken("closed while looking for the broker")

    def _bear(self, error: Exception, lost_s: float) -> None:
        """Raise it, unless it may pass and there is time for that."""
        if not passes(error):
            raise error
        if time.monotonic() > lost_s + self._outage_s:
            raise LinkBroken(
                f"{self._login.place} was not found again within {self._outage_s:g} s: "
                f"{error.message}",
                hint=_OUTAGE_HINT,
            ) from None


class Deaf:
    """A `Handler` that minds nothing; lines override what concerns them."""

    def on_return(self, reply_code: int, reply_text: str, routing_key: str, header: bytes) -> None:
        pass

    def on_confirm(self, tag: int, multiple: bool, ok: bool) -> None:
        pass

    def on_blocked(self, reason: str) -> None:
        pass

    def on_unblocked(self) -> None:
        pass

    def on_cancelled(self, consumer_tag: str) -> None:
        pass

    def on_end(self, error: LinkError, reply_code: int) -> None:
        pass
