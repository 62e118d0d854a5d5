from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import socket
import ssl
import struct
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import trustme

from manyhands.core.errors import (
    LinkBroken,
    LinkClosed,
    LinkError,
    LinkTimeout,
    Oversized,
    Refused,
    UsageError,
)
from manyhands.links.amqp import channel as channel_module
from manyhands.links.amqp import frames
from manyhands.links.amqp.channel import AmqpChannel
from manyhands.links.amqp.login import AmqpLogin
from manyhands.links.stream import Stream
from manyhands.testing.broker import TlsFiles

MIB = 1 << 20
BODY_MAX = 131072 - frames.FRAME_BYTES
WAIT_S = 30.0


class Recorder:
    """A handler that keeps every event; bodies go into `room` if it fits, else into new memory."""

    def __init__(self, room=None, limit=8 * MIB):
        self.events = []
        self.room = room
        self.limit = limit
        self._new = threading.Condition()
        self._message = None

    def _note(self, *event):
        with self._new:
            self.events.append(event)
            self._new.notify_all()

    def wait(self, name, num=1, timeout_s=WAIT_S):
        def found():
            return [event for event in self.events if event[0] == name]

        with self._new:
            assert self._new.wait_for(lambda: len(found()) >= num, timeout_s), self.events[-3:]
        return found()[num - 1][1:]

    def on_delivery(self, consumer_tag, delivery_tag, redelivered, header, body_bytes):
        if body_bytes > self.limit:
            raise Oversized(f"{body_bytes} bytes")
        views = self.room or ([memoryview(bytearray(body_bytes))] if body_bytes else [])
        self._message = (consumer_tag, delivery_tag, redelivered, header, views)
        return views

    def on_body(self):
        self._note("message", *self._message)

    def on_bad_delivery(self, consumer_tag, delivery_tag, error):
        self._note("bad", consumer_tag, delivery_tag, error)

    def on_return(self, reply_code, reply_text, routing_key, header):
        self._note("return", reply_code, reply_text, routing_key, header)

    def on_confirm(self, tag, multiple, ok):
        self._note("confirm", tag, multiple, ok)

    def on_blocked(self, reason):
        self._note("blocked", reason)

    def on_unblocked(self):
        self._note("unblocked")

    def on_cancelled(self, consumer_tag):
        self._note("cancelled", consumer_tag)

    def on_end(self, error, reply_code):
        self._note("end", error, reply_code)


def login_to(broker, **fields):
    return AmqpLogin(
        **{"host": "127.0.0.1", "port": broker.ports.amqp, "user": "guest", "password": "guest"}
        | fields
    )


@contextlib.contextmanager
def serving(login, handler=None, setup=lambda _: None, *, heartbeat_s=60):
    """A channel with its reader thread running. Nobody beats: the broker must not miss it."""
    channel = AmqpChannel.open(login, handler or Recorder(), setup=setup, heartbeat_s=heartbeat_s)
    reader = threading.Thread(target=channel.serve)
    reader.start()
    try:
        yield channel
    finally:
        channel.close()
        reader.join(WAIT_S)
        assert not reader.is_alive()


def declare(queue, *, confirm=False):
    def setup(channel):
        channel.queue_declare(queue, exclusive=True, auto_delete=False)  # py-amqp's default: True
        if confirm:
            channel.confirm_select()

    return setup


@pytest.fixture
def queue():
    return f"q-{os.urandom(6).hex()}"


@pytest.fixture
def vhost(broker):
    name = f"v-{os.urandom(4).hex()}"
    broker.add_vhost(name)
    yield name
    broker.ctl("delete_vhost", name)


def joined(views):
    return b"".join(bytes(view) for view in views)


# -- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("header_bytes", [0, 300, 60 << 10])
def test_messages_arrive_whole_at_every_frame_boundary(broker, queue, header_bytes):
    seen = Recorder()
    header = random.randbytes(header_bytes)
    sizes = [0, 1, BODY_MAX - 1, BODY_MAX, BODY_MAX + 1, 2 * BODY_MAX, MIB]
    bodies = [random.randbytes(size) for size in sizes]
    with serving(login_to(broker), seen, declare(queue)) as channel:
        channel.consume(queue, "inbox", no_ack=True)
        for number, body in enumerate(bodies, start=1):
            assert channel.publish("", queue, header, [body] if body else []) == number
            tag, delivery, redelivered, got, views = seen.wait("message", number)
            assert (tag, delivery, redelivered) == ("inbox", number, False)
            assert got == header
            assert joined(views) == body


def test_buffers_and_targets_may_be_cut_anywhere(broker, queue):
    body = random.randbytes(3 * BODY_MAX + 17)
    cuts = [0, 5, 5, BODY_MAX - 1, BODY_MAX + 3, 3 * BODY_MAX, len(body)]
    buffers = [memoryview(body)[a:b] for a, b in itertools.pairwise(cuts)]
    memory = bytearray(len(body))
    edges = [0, BODY_MAX + 1, BODY_MAX + 2, 2 * BODY_MAX, len(body)]
    room = [memoryview(memory)[a:b] for a, b in itertools.pairwise(edges)]
    seen = Recorder(room=room)
    with serving(login_to(broker), seen, declare(queue)) as channel:
        channel.consume(queue, "inbox", no_ack=True)
        channel.publish("", queue, b"", buffers)
        views = seen.wait("message")[-1]
    assert views is room, "the body was read into the memory that was named"
    assert memory == body


def test_views_of_other_types_are_taken_as_bytes(broker, queue):
    numbers = memoryview(struct.pack("<4d", 1, 2, 3, 4)).cast("d")
    memory = bytearray(32)
    seen = Recorder(room=[memoryview(memory).cast("d")])
    with serving(login_to(broker), seen, declare(queue)) as channel:
        channel.consume(queue, "inbox", no_ack=True)
        channel.publish("", queue, b"", [numbers])
        seen.wait("message")
    assert memory == bytes(numbers)


def test_a_message_of_another_client_has_an_empty_header(broker, queue):
    amqp = pytest.importorskip("amqp")
    seen = Recorder()
    with serving(login_to(broker), seen, declare(queue)) as channel:
        channel.consume(queue, "inbox", no_ack=True)
        with amqp.Connection(f"127.0.0.1:{broker.ports.amqp}", login_method="PLAIN") as other:
            other.channel().basic_publish(
                amqp.Message("hello", content_type="text/plain", priority=1), routing_key=queue
            )
            other.channel().basic_publish(
                amqp.Message("more", application_headers={"a": {"b": [1, "x"]}, "h": "ours"}),
                routing_key=queue,
            )
            got = {joined(seen.wait("message", n)[-1]): seen.wait("message", n)[3] for n in (1, 2)}
    assert got == {b"hello": b"", b"more": b"ours"}


def test_a_header_that_fits_no_frame_is_refused_before_anything_is_written(broker, queue):
    seen = Recorder()
    with serving(login_to(broker), seen, declare(queue)) as channel:
        channel.consume(queue, "inbox", no_ack=True)
        with pytest.raises(Oversized, match="131072"):
            channel.publish("", queue, bytes(channel.frame_max), [b"x"])
        with pytest.raises(Oversized, match="255"):
            channel.publish("", "k" * 256, b"", [])
        assert channel.publish("", queue, b"fine", []) == 1
        assert seen.wait("message")[3] == b"fine"


def test_a_body_the_handler_refuses_is_skipped(broker, queue):
    seen = Recorder(limit=10)
    with serving(login_to(broker), seen, declare(queue)) as channel:
        channel.consume(queue, "inbox", no_ack=True)
        channel.publish("", queue, b"big", [bytes(3 * BODY_MAX)])
        channel.publish("", queue, b"small", [b"0123456789"])
        assert isinstance(seen.wait("bad")[2], Oversized)
        assert seen.wait("message")[3] == b"small"


def test_confirms_count_in_wire_order_from_many_threads(broker, queue):
    seen = Recorder()
    tags = {}

    def publish(channel, sender):
        for number in range(25):
            header = b"%d/%d" % (sender, number)
            channel.publish(
                "", queue, header, [bytes(1000)], on_tag=lambda t, h=header: tags.update({h: t})
            )

    with serving(login_to(broker), seen, declare(queue, confirm=True)) as channel:
        channel.consume(queue, "inbox", no_ack=True)
        threads = [threading.Thread(target=publish, args=(channel, s)) for s in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        seen.wait("message", 100)
        order = [event[4] for event in seen.events if event[0] == "message"]
        assert [tags[header] for header in order] == list(range(1, 101))
        confirmed = 0
        while confirmed < 100:
            confirmed = max((e[1] for e in seen.events if e[0] == "confirm"), default=0)
            time.sleep(0.01)
        assert all(event[3] for event in seen.events if event[0] == "confirm")


def test_a_mandatory_message_without_a_queue_comes_back(broker):
    seen = Recorder()
    setup = lambda channel: channel.confirm_select()  # noqa: E731
    with serving(login_to(broker), seen, setup) as channel:
        channel.publish("", "nobody", b"who", [bytes(2 * BODY_MAX)])
        channel.publish("", "nobody", b"never mind", [b"x"], mandatory=False)
        assert seen.wait("return") == (312, "NO_ROUTE", "nobody", b"who")
        seen.wait("confirm", 1)
        channel.publish("", "nobody", b"", [])
        assert seen.wait("return", 2) == (312, "NO_ROUTE", "nobody", b"")
    assert len([event for event in seen.events if event[0] == "return"]) == 2


def test_unacknowledged_messages_come_again_and_acknowledged_ones_do_not(broker, queue):
    def setup(channel):
        channel.queue_declare(queue, durable=True, auto_delete=False)
        channel.basic_qos(0, 2, False)

    first, second = Recorder(), Recorder()
    with serving(login_to(broker), first, setup) as channel:
        channel.consume(queue, "control", no_ack=False)
        for name in (b"a", b"b", b"c"):
            channel.publish("", queue, name, [])
        first.wait("message", 2)
        time.sleep(0.1)
        assert len(first.events) == 2, "prefetch 2 holds the third back"
        channel.ack(1)
        assert first.wait("message", 3)[3] == b"c"
    with serving(login_to(broker), second, setup) as channel:
        channel.consume(queue, "control", no_ack=False)
        assert second.wait("message", 2)[2:4] == (True, b"c")
        channel.ack(2, multiple=True)
        channel.cancel("control")
    broker.ctl("delete_queue", queue)


# -- bindings and consumers -----------------------------------------------------------------------


def test_bindings_change_while_messages_flow(broker, queue):
    exchange = f"x-{queue}"
    seen = Recorder()

    def setup(channel):
        channel.exchange_declare(exchange, "direct", durable=False, auto_delete=False)
        declare(queue)(channel)

    with serving(login_to(broker), seen, setup) as channel:
        channel.consume(queue, "inbox", no_ack=True)
        channel.bind(queue, exchange, "from.1")
        channel.publish(exchange, "from.1", b"bound", [b"x"])
        assert seen.wait("message")[3] == b"bound"
        channel.unbind(queue, exchange, "from.1")
        channel.publish(exchange, "from.1", b"unbound", [b"x"])
        assert seen.wait("return")[3] == b"unbound"
    with serving(login_to(broker), setup=lambda channel: channel.exchange_delete(exchange)):
        pass


def test_a_deleted_queue_ends_its_consumer_at_once(broker, queue):
    seen = Recorder()
    setup = lambda channel: channel.queue_declare(queue, durable=True, auto_delete=False)  # noqa: E731
    with serving(login_to(broker), seen, setup) as channel:
        channel.consume(queue, "inbox", no_ack=True)
        broker.ctl("delete_queue", queue)
        assert seen.wait("cancelled") == ("inbox",)
        channel.publish("", queue, b"late", [])
        assert seen.wait("return")[3] == b"late"


def test_a_cancelled_consumer_gets_nothing_more(broker, queue):
    seen = Recorder()
    with serving(login_to(broker), seen, declare(queue)) as channel:
        channel.consume(queue, "inbox", no_ack=True)
        channel.cancel("inbox")
        channel.publish("", queue, b"stays", [])
        time.sleep(0.1)
        channel.consume(queue, "again", no_ack=True)
        assert seen.wait("message")[0] == "again"


def test_the_reader_may_not_wait_for_itself(broker, queue):
    class Waits(Recorder):
        def on_body(self):
            channel.bind(queue, "amq.direct", "key")

    seen = Waits()
    channel = AmqpChannel.open(login_to(broker), seen, setup=declare(queue))
    failed = []

    def serve():
        try:
            channel.serve()
        except RuntimeError as error:
            failed.append(error)

    reader = threading.Thread(target=serve)
    reader.start()
    channel.consume(queue, "inbox", no_ack=True)
    channel.publish("", queue, b"", [])
    reader.join(WAIT_S)
    assert failed
    assert isinstance(seen.wait("end")[0], LinkBroken)
    with pytest.raises(LinkBroken, match="reader"):
        channel.publish("", queue, b"", [])


# -- ends -----------------------------------------------------------------------------------------


def test_an_error_of_the_channel_ends_it_with_its_reason(broker):
    seen = Recorder()
    with serving(login_to(broker), seen) as channel:
        channel.publish("no-such-exchange", "", b"", [b"x"])
        error, code = seen.wait("end")
        assert code == 404
        assert isinstance(error, Refused)
        assert error.code == "missing"
        assert "no-such-exchange" in str(error)
        with pytest.raises(Refused, match="no-such-exchange"):
            channel.publish("", "", b"", [])


def test_a_call_that_the_broker_refuses_raises_its_reason(broker, queue):
    with serving(login_to(broker), setup=declare(queue)) as channel:
        started = time.monotonic()
        with pytest.raises(Refused, match="no-such-exchange"):
            channel.bind(queue, "no-such-exchange", "key")
        assert time.monotonic() - started < WAIT_S / 2
        with pytest.raises(Refused):
            channel.consume(queue, "late", no_ack=True)


def test_connections_closed_by_the_operator_end_at_once(broker, vhost, queue):
    seen = Recorder()
    with serving(login_to(broker, vhost=vhost), seen, declare(queue)) as channel:
        broker.ctl("close_all_connections", "--vhost", vhost, "maintenance")
        error, code = seen.wait("end")
        assert code == 320
        assert isinstance(error, LinkBroken)
        assert "maintenance" in str(error)
        with pytest.raises(LinkBroken):
            channel.beat(timeout_s=1)


def test_close_ends_everything_once(broker, queue, monkeypatch):
    monkeypatch.setattr(channel_module, "_FAREWELL_S", WAIT_S)
    seen = Recorder()
    with serving(login_to(broker), seen, declare(queue)) as channel:
        started = time.monotonic()
        channel.close()
        channel.close()
        assert time.monotonic() - started < WAIT_S, "the broker said close-ok"
        error, code = seen.wait("end")
        assert isinstance(error, LinkClosed)
        assert code == 0
        with pytest.raises(LinkClosed):
            channel.publish("", queue, b"", [])
        with pytest.raises(LinkClosed):
            channel.bind(queue, "amq.direct", "key")
    assert [event[0] for event in seen.events] == ["end"]


def test_close_without_a_reader_and_from_the_handler(broker, queue):
    AmqpChannel.open(login_to(broker), Recorder(), setup=declare(queue)).close()

    class Closes(Recorder):
        def on_body(self):
            channel.close()

    seen = Closes()
    with serving(login_to(broker), seen, declare(queue)) as channel:
        channel.consume(queue, "inbox", no_ack=True)
        channel.publish("", queue, b"", [])
        assert isinstance(seen.wait("end")[0], LinkClosed)


def test_beats_keep_an_idle_connection(broker):
    seen = Recorder()
    with serving(login_to(broker), seen, heartbeat_s=1) as channel:
        assert channel.heartbeat_s == 1
        heard = channel.last_heard
        for _ in range(10):  # 5 s: a silent client is dropped after 3
            time.sleep(0.5)
            channel.beat(timeout_s=1)
        assert channel.last_heard > heard + 3, "the broker beats too"
        channel.beat(timeout_s=1)
    assert [type(event[1]) for event in seen.events] == [LinkClosed]


@contextlib.contextmanager
def beating(*channels):
    """Whatever else takes its time, the broker hears from these."""
    done = threading.Event()

    def beat():
        while not done.wait(0.3):
            for channel in channels:
                channel.beat(timeout_s=1)

    with ThreadPoolExecutor(1) as pool:
        beats = pool.submit(beat)
        try:
            yield
        finally:
            done.set()
        beats.result(WAIT_S)


def test_memory_alarm_then_the_broker_dies(fresh_broker, queue):
    broker = fresh_broker()
    sender, receiver = Recorder(), Recorder()
    with (
        serving(login_to(broker), receiver, declare(queue), heartbeat_s=1) as inbox,
        serving(login_to(broker), sender, heartbeat_s=1) as outbox,
    ):
        with beating(inbox, outbox):
            publish_in_a_memory_alarm(broker, inbox, outbox, sender, receiver, queue)
        broker.kill()
        for seen in (sender, receiver):
            error, code = seen.wait("end")  # nobody beats: it is not found out in another way
            assert isinstance(error, LinkBroken)
            assert code == 0


def publish_in_a_memory_alarm(broker, inbox, outbox, sender, receiver, queue):
    inbox.consume(queue, "inbox", no_ack=True)
    broker.set_memory_watermark(1)
    body = random.randbytes(MIB)

    def publish():
        for number in range(40):
            outbox.publish("", queue, b"%d" % number, [body])

    thread = threading.Thread(target=publish)
    thread.start()
    assert "memory" in sender.wait("blocked")[0]
    # Longer than the TCP_USER_TIMEOUT that py-amqp would set, and than the heartbeat's end.
    time.sleep(4.0)
    assert thread.is_alive(), "40 MiB do not fit into the buffers of a blocked connection"
    broker.set_memory_watermark(0.4)
    sender.wait("unblocked")
    assert joined(receiver.wait("message", 40)[-1]) == body
    thread.join(WAIT_S)


def test_close_wakes_a_publisher_that_the_broker_does_not_read(monkeypatch):
    # Two of these pass while it says goodbye in vain: little of what it may take in all.
    monkeypatch.setattr(channel_module, "_FAREWELL_S", 0.2)
    ours, theirs = socket.socketpair()
    seen = Recorder()
    channel = AmqpChannel(Stream(ours), seen, place="a deaf broker", frame_max=131072)
    reader = threading.Thread(target=channel.serve)
    reader.start()
    ended = []

    def publish():
        try:
            channel.publish("", "q", b"", [bytes(64 * MIB)])
        except LinkError as error:
            ended.append(error)

    publisher = threading.Thread(target=publish)
    publisher.start()
    time.sleep(0.2)
    channel.beat(timeout_s=0.1)  # no wait, no error: bytes are on their way
    with pytest.raises(LinkTimeout):
        channel.bind("q", "x", "k", timeout_s=0.1)
    started = time.monotonic()
    channel.close()
    assert time.monotonic() - started < 10
    publisher.join(WAIT_S)
    reader.join(WAIT_S)
    theirs.close()
    assert isinstance(ended[0], LinkClosed)
    assert isinstance(seen.wait("end")[0], LinkClosed)


# -- logging in -----------------------------------------------------------------------------------

SECRET = "correct horse battery staple"


def refused(login, setup=lambda _: None, timeout_s=WAIT_S):
    with pytest.raises(LinkError) as caught:
        AmqpChannel.open(login, Recorder(), setup=setup, timeout_s=timeout_s)
    assert SECRET not in str(caught.value) + repr(caught.value)
    return caught.value


def test_a_wrong_password_is_named_and_never_shown(broker, caplog):
    caplog.set_level(logging.DEBUG)
    login = login_to(broker, password=SECRET)
    error = refused(login)
    assert isinstance(error, Refused)
    assert error.code == "credentials"
    assert "guest" in str(error)
    assert SECRET not in repr(login) + str(login) + caplog.text


def test_a_good_password_is_never_shown_either(broker, queue, caplog):
    caplog.set_level(logging.DEBUG)
    broker.add_user(f"u-{queue}", SECRET)
    try:
        login = login_to(broker, user=f"u-{queue}", password=SECRET)
        with serving(login) as channel:
            assert SECRET not in repr(channel) + repr(vars(channel)) + caplog.text
    finally:
        broker.ctl("delete_user", f"u-{queue}")


def test_a_missing_or_forbidden_vhost_is_named(broker, vhost):
    error = refused(login_to(broker, vhost="nowhere"))
    assert isinstance(error, Refused)
    assert error.code == "vhost"
    assert "nowhere" in str(error)
    broker.ctl("clear_permissions", "--vhost", vhost, "guest")
    error = refused(login_to(broker, vhost=vhost))
    assert isinstance(error, Refused)
    assert error.code == "vhost"


def test_a_missing_permission_names_the_resource(broker, queue):
    broker.add_user(f"u-{queue}", SECRET, configure="^mine", write="^mine", read="^mine")
    login = login_to(broker, user=f"u-{queue}", password=SECRET)
    try:
        error = refused(login, declare(queue))
        assert isinstance(error, Refused)
        assert error.code == "permission"
        assert f"'{queue}'" in str(error)
        seen = Recorder()
        with serving(login, seen, declare(f"mine-{queue}")) as channel:
            channel.publish("amq.direct", "", b"", [b"x"])
            error, code = seen.wait("end")
            assert code == 403
            assert isinstance(error, Refused)
            assert error.code == "permission"
            assert "'amq.direct'" in str(error)
    finally:
        broker.ctl("delete_user", f"u-{queue}")


def test_declarations_that_the_broker_refuses(broker, queue):
    with serving(login_to(broker), setup=declare(queue)):
        error = refused(login_to(broker), declare(queue))
        assert isinstance(error, Refused)
        assert error.code == "locked"
    passive = lambda channel: channel.queue_declare(queue, passive=True)  # noqa: E731
    error = refused(login_to(broker), passive)
    assert isinstance(error, Refused)
    assert error.code == "missing"
    wrong = lambda channel: channel.exchange_declare("amq.direct", "fanout")  # noqa: E731
    error = refused(login_to(broker), wrong)
    assert isinstance(error, Refused)
    assert error.code == "precondition"


def test_errors_of_the_setup_itself_pass(broker):
    def setup(_channel):
        raise UsageError("mine")

    with pytest.raises(UsageError, match="mine"):
        AmqpChannel.open(login_to(broker), Recorder(), setup=setup)


def test_nobody_there():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        login = AmqpLogin(host="127.0.0.1", port=port, user="u", password=SECRET)
        error = refused(login)
    assert isinstance(error, LinkBroken)
    assert f"127.0.0.1:{port}" in str(error)
    assert error.hint


@contextlib.contextmanager
def fake_server(script):
    """A listener whose first visitor gets `script(connection)`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(8)
                script(connection)

        thread = threading.Thread(target=run)
        thread.start()
        yield AmqpLogin(host="127.0.0.1", port=listener.getsockname()[1], user="u", password=SECRET)
        thread.join(WAIT_S)


def start_frame():
    tables = struct.pack(">BBI", 0, 9, 0)
    offer = struct.pack(">I5sI5s", 5, b"PLAIN", 5, b"en_US")
    return frames.frame(frames.METHOD, 0, struct.pack(">HH", 10, 10) + tables + offer)


def tune_frame(frame_max):
    return frames.frame(frames.METHOD, 0, struct.pack(">HHHIH", 10, 30, 8, frame_max, 0))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"AMQP\x00\x01\x00\x00",
        struct.pack(">BHI", 1, 0, 0xFFFFFFFF),
        struct.pack(">BHI", 1, 0, 0x7FFFFFFF),
        frames.frame(1, 0, b"\x00\x0a\x00\x0a"),
        frames.frame(1, 7, b"\x00\x0a\x00\x0a"),
        frames.frame(2, 0, b"\x00\x0a\x00\x0a"),
        start_frame() + tune_frame(16),
        start_frame() + b"\xff" * 64,
    ],
)
def test_a_server_that_is_no_broker(answer):
    with fake_server(lambda connection: connection.sendall(answer)) as login:
        error = refused(login)
    assert isinstance(error, LinkBroken)


def test_a_server_that_drips_or_says_nothing_cannot_hold_the_login():
    pause_s = 0.2

    def drip(connection):
        for byte in start_frame():
            connection.sendall(bytes([byte]))
            time.sleep(pause_s)

    for script in (drip, lambda connection: connection.recv(1)):
        started = time.monotonic()
        with fake_server(script) as login:
            error = refused(login, timeout_s=0.5)
            assert isinstance(error, LinkTimeout)
            assert time.monotonic() - started < pause_s * len(start_frame()), "drips until then"


# -- bytes that are no AMQP -----------------------------------------------------------------------


def deliver(tag=b"inbox"):
    arguments = struct.pack(">B", len(tag)) + tag + struct.pack(">QB", 1, 0) + b"\x00\x03key"
    return frames.method(frames.Method.BASIC_DELIVER, arguments)


def content(body_bytes, properties=b"\x00\x00"):
    payload = struct.pack(">HHQ", 60, 0, body_bytes) + properties
    return frames.frame(frames.HEADER, 1, payload)


def body(data):
    return frames.frame(frames.BODY, 1, data)


def fed(data, handler):
    """Serve a channel on which exactly `data` arrives."""
    ours, theirs = socket.socketpair()
    theirs.sendall(data)
    theirs.shutdown(socket.SHUT_WR)
    with theirs:
        AmqpChannel(Stream(ours), handler, place="a fake", frame_max=131072).serve()
    name, error, code = handler.events[-1]
    assert name == "end"
    assert isinstance(error, LinkBroken)
    return error, code


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "without a word"),
        (b"\x01\x00", "without a word"),
        (b"HTTP/1.1 400", "not a frame"),
        (struct.pack(">BHI", 1, 1, 0xFFFFFFFF), "were agreed on"),
        (struct.pack(">BHI", 3, 1, 131072 - 7), "were agreed on"),
        (struct.pack(">BHI", 1, 2, 4), "channel 2"),
        (frames.frame(1, 1, b"\x00\x3c\x00\x3c")[:-1] + b"\x00", "end mark"),
        (frames.frame(1, 1, b"\x00"), "middle of a field"),
        (frames.frame(1, 1, b"\x00\x3c\x00\x3c"), "middle of a field"),
        (frames.frame(1, 1, b"\x00\x3c\x00\x63"), "60.99"),
        (frames.method(frames.Method.QUEUE_BIND_OK), "answers no question"),
        (content(3), "kind 2 where one of kind 1"),
        (body(b"abc"), "kind 3 where one of kind 1"),
        (deliver() + body(b"abc"), "kind 3 where one of kind 2"),
        (deliver() + content(3) + deliver(), "kind 1 where one of kind 3"),
        (deliver() + content(3) + body(b"abcd"), "3 are left"),
        (deliver() + content(3) + body(b""), "0 bytes where 3"),
        (deliver() + content(3) + body(b"ab"), "without a word"),
        (deliver() + frames.frame(frames.HEADER, 1, b"\x00\x3c"), "before its body size"),
        (deliver() + frames.frame(frames.HEADER, 1, struct.pack(">HHQH", 9, 0, 0, 0)), "class 9"),
    ],
)
def test_bytes_that_break_the_protocol(data, complaint):
    error, _ = fed(data, Recorder())
    assert complaint in str(error)


@pytest.mark.parametrize(
    "properties",
    [
        b"",
        b"\x20\x00",
        b"\x00\x01",
        b"\x20\x00" + struct.pack(">I", 0xFFFFFFFF),
        b"\x20\x00" + struct.pack(">I3sI", 7, b"\x01hS", 0xFFFFFFFF),
        b"\x20\x00" + struct.pack(">I", 5) + b"\x01a?\x00\x00",
        b"\x80\x00\xff",
    ],
)
def test_a_message_with_broken_properties_is_skipped_and_the_next_one_taken(properties):
    seen = Recorder()
    bad = deliver() + content(3, properties) + body(b"bad")
    if not properties:  # too short to say how long the body is: nothing to go on from
        assert "ends before" in str(fed(bad, seen)[0])
        return
    fed(bad + deliver(b"next") + content(4) + body(b"good"), seen)
    assert [event[0] for event in seen.events] == ["bad", "message", "end"]
    assert seen.events[1][1] == "next"


def test_heartbeats_and_connection_methods_may_come_inside_a_message():
    reason = frames.method(frames.Method.CONNECTION_BLOCKED, b"\x03low", channel=0)
    data = deliver() + frames.HEARTBEAT_FRAME + content(6) + body(b"abc")
    seen = Recorder()
    fed(data + frames.HEARTBEAT_FRAME + reason + body(b"def"), seen)
    assert [event[0] for event in seen.events] == ["blocked", "message", "end"]
    assert joined(seen.events[1][-1]) == b"abcdef"


def test_a_close_inside_a_message_is_heard():
    closing = struct.pack(">HB4sHH", 541, 4, b"oops", 0, 0)
    data = frames.method(frames.Method.CONNECTION_CLOSE, closing, channel=0)
    error, code = fed(deliver() + content(6) + body(b"abc") + data, Recorder())
    assert code == 541
    assert "oops" in str(error)


def test_no_size_that_the_far_side_names_is_allocated():
    huge = deliver() + content(1 << 62) + body(bytes(BODY_MAX))
    tracemalloc.start()
    try:
        error, _ = fed(huge, Recorder())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "without a word" in str(error)
    assert peak < 2 * MIB


def test_random_and_mutated_bytes_end_cleanly():
    valid = frames.HEARTBEAT_FRAME + deliver() + content(6) + body(b"abc") + body(b"def")
    valid += (
        frames.method(frames.Method.BASIC_ACK, struct.pack(">QB", 1, 0)) + deliver() + content(0)
    )
    for _ in range(1500):
        data = bytearray(valid)
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        fed(bytes(data[: random.randint(1, len(data))]), Recorder())
    for size in range(200):
        fed(random.randbytes(size), Recorder())


def test_a_handler_that_gives_the_wrong_room_fails_loudly():
    seen = Recorder(room=[memoryview(bytearray(2))])
    with pytest.raises(ValueError, match="other room"):
        fed(deliver() + content(3) + body(b"abc"), seen)
    assert seen.events[-1][0] == "end"


def test_an_answer_that_comes_too_late_does_not_answer_the_next_question():
    ours, theirs = socket.socketpair()
    channel = AmqpChannel(Stream(ours), Recorder(), place="a slow broker", frame_max=131072)
    reader = threading.Thread(target=channel.serve)
    reader.start()
    with pytest.raises(LinkTimeout, match="QUEUE_BIND_OK"):
        channel.bind("q", "x", "k", timeout_s=0.05)
    theirs.sendall(frames.method(frames.Method.QUEUE_BIND_OK))
    with pytest.raises(LinkTimeout, match="QUEUE_UNBIND_OK"):
        channel.unbind("q", "x", "k", timeout_s=0.2)
    theirs.sendall(frames.method(frames.Method.QUEUE_UNBIND_OK))
    theirs.close()
    reader.join(WAIT_S)
    channel.close()


# -- TLS ------------------------------------------------------------------------------------------


def test_tls_both_ways_at_once_and_certificates_checked(fresh_broker, queue, tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    files = TlsFiles(
        certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem", authority=tmp_path / "ca.pem"
    )
    certificate.cert_chain_pems[0].write_to_path(files.certificate)
    certificate.private_key_pem.write_to_path(files.key)
    authority.cert_pem.write_to_path(files.authority)
    broker = fresh_broker(tls=files)
    context = ssl.create_default_context(cafile=str(files.authority))
    login = login_to(broker, port=broker.ports.amqps, ssl_context=context)

    stranger = ssl.create_default_context(cadata=trustme.CA().cert_pem.bytes().decode())
    error = refused(login_to(broker, port=broker.ports.amqps, ssl_context=stranger))
    assert isinstance(error, LinkBroken)
    assert "certificate" in str(error)
    assert isinstance(refused(login_to(broker, ssl_context=context)), LinkBroken)
    assert isinstance(refused(login_to(broker, port=broker.ports.amqps)), LinkBroken)

    num_parts = 100
    numbers = random.randbytes(MIB + num_parts)
    wrong = []

    class Checks(Recorder):
        memory = None

        def on_delivery(self, consumer_tag, delivery_tag, redelivered, header, body_bytes):
            self.part = int(header)
            self.memory = self.memory or bytearray(MIB)
            return [memoryview(self.memory)]

        def on_body(self):
            if self.memory != numbers[self.part : self.part + MIB]:
                wrong.append(self.part)
            self._note("part", self.part)

    names = [f"{queue}-{side}" for side in (0, 1)]
    seen = [Checks(), Checks()]
    with (
        serving(login, seen[0], declare(names[0])) as left,
        serving(login, seen[1], declare(names[1])) as right,
    ):
        peers = (left, right)
        for peer, name in zip(peers, names, strict=True):
            peer.consume(name, "inbox", no_ack=True)

        def publish(side):
            for part in range(num_parts):
                view = memoryview(numbers)[part : part + MIB]
                peers[side].publish("", names[1 - side], b"%d" % part, [view])

        threads = [threading.Thread(target=publish, args=(side,)) for side in (0, 1)]
        for thread in threads:
            thread.start()
        for side in (0, 1):
            assert seen[side].wait("part", num_parts, timeout_s=60) == (num_parts - 1,)
        for thread in threads:
            thread.join(WAIT_S)
    assert wrong == []
