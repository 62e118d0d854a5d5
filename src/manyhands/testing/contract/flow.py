"""The contract of links: buffers, and the flow control that bounds everybody's memory."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec
import pytest

from manyhands.core.errors import (
    Oversized,
    PeerGone,
)
from manyhands.core.peers import PeerId, PeerState
from manyhands.links.base import Delivery, Gap, Link
from manyhands.links.messages import MAX_BUFFERS, MESSAGE_BYTES, Ready

if TYPE_CHECKING:
    from collections.abc import Sequence
from manyhands.testing.contract.kit import (
    PATIENCE_S,
    STEADY,
    Meeting,
    Reader,
    activate,
    fill,
    number_of,
    part_of,
    sealed,
    state_of,
    together,
)


class BuffersContract:
    """Where buffers go, and how large they may be."""

    def test_buffers_arrive_in_the_place_named_for_them(self, meeting: Meeting) -> None:
        """Exactly that memory, and fresh memory where no place is named."""
        memory = bytearray(3000)
        asked: list[tuple[PeerId, bytes, tuple[int, ...]]] = []

        def place(
            sender: PeerId, message: bytes, sizes: tuple[int, ...]
        ) -> Sequence[memoryview] | None:
            asked.append((sender, message, sizes))
            if message != b"placed":
                return None
            return [memoryview(memory)[:1000], memoryview(memory)[1000:]]

        one, two = meeting.open("one"), Reader(meeting.open("two", place=place))
        Reader(one).until_view(lambda view: two.link.me in view.peers())
        data = os.urandom(3000)
        one.send(two.link.me, b"placed", [data[:1000], data[1000:]])
        one.send(two.link.me, b"fresh", [b"x" * 10])
        placed, fresh = two.until_deliveries(2)
        assert memory == data
        assert all(buffer.obj is memory for buffer in placed.buffers)
        assert bytes(fresh.buffers[0]) == b"x" * 10
        fresh.buffers[0][:] = b"y" * 10  # it is the receiver's own
        assert asked == [(one.me, b"placed", (1000, 2000)), (one.me, b"fresh", (10,))]

    def test_sizes(self, meeting: Meeting) -> None:
        """Nothing, many buffers, the largest part, and more than that."""
        one, two = meeting.open("one"), Reader(meeting.open("two"))
        Reader(one).until_view(lambda view: two.link.me in view.peers())
        part = one.terms.part_bytes
        cases: list[tuple[bytes, list[bytes]]] = [
            (b"", []),
            (b"empty buffer", [b""]),
            (b"some empty", [b"", b"ab", b"", b"c"]),
            (b"many", [os.urandom(i % 50) for i in range(1000)]),
            (b"part", [os.urandom(part)]),
            (b"part in two", [os.urandom(part - 1), os.urandom(1)]),
            (b"m" * MESSAGE_BYTES, []),
            (b"m" * (MESSAGE_BYTES - 5 * MAX_BUFFERS), [b"12345678"] * MAX_BUFFERS),
        ]
        for message, buffers in cases:
            one.send(two.link.me, message, buffers)
        for (message, buffers), delivery in zip(
            cases, two.until_deliveries(len(cases)), strict=True
        ):
            assert delivery.message == message
            assert [bytes(buffer) for buffer in delivery.buffers] == buffers
            assert not delivery.fanout
        for message, buffers in (
            (b"", [b"x" * (part + 1)]),
            (b"m" * (MESSAGE_BYTES + 1), []),
            (b"", [b""] * (MAX_BUFFERS + 1)),
            (b"m" * MESSAGE_BYTES, [b""]),
        ):
            with pytest.raises(Oversized):
                one.send(two.link.me, message, buffers)
            with pytest.raises(Oversized):
                one.send(None, message, buffers)
        one.send(two.link.me, b"still here")
        assert two.until_deliveries(len(cases) + 1)[-1].message == b"still here"

    def test_nobody_sends_to_itself_or_to_the_gone(self, meeting: Meeting) -> None:
        """PeerGone names whom."""
        one, two = Reader(meeting.open("one")), meeting.open("two")
        one.until_view(lambda view: two.me in view.peers())
        with pytest.raises(PeerGone, match="one"):
            one.link.send(one.link.me, b"hello")
        two.close()
        one.until_without(two.me)
        with pytest.raises(PeerGone, match="two"):
            one.link.send(two.me, b"hello")


class FlowContract:
    """Flow control: a slow reader bounds everybody's memory."""

    def test_all_to_all_with_a_window_of_one_part(self, meeting: Meeting) -> None:
        """No deadlock, and every byte is right."""
        terms = msgspec.structs.replace(STEADY, window_bytes=32 << 10, part_bytes=32 << 10)
        readers = [Reader(meeting.open(f"p{i}", terms=terms)) for i in range(4)]
        activate(*readers)
        count = 25

        def send(link: Link, others: list[PeerId]) -> None:
            for i in range(count):
                for to in others:
                    message, data = sealed(i, 32 << 10)
                    link.send(to, message, [data], timeout_s=PATIENCE_S)
                message, data = sealed(i, 32 << 10)
                link.send(None, message, [data], timeout_s=PATIENCE_S)

        everybody = [reader.link.me for reader in readers]
        together(
            *(
                lambda r=r: send(r.link, [peer for peer in everybody if peer != r.link.me])
                for r in readers
            ),
            *(lambda r=r: r.until_deliveries(3 * 2 * count) for r in readers),
        )
        for reader in readers:
            streams: dict[tuple[PeerId, bool], list[int]] = defaultdict(list)
            for delivery in reader.deliveries:
                streams[delivery.sender, delivery.fanout].append(number_of(delivery))
            assert len(streams) == 6
            assert all(numbers == list(range(count)) for numbers in streams.values())

    def test_a_slow_reader_holds_back_those_who_send_to_it(self, meeting: Meeting) -> None:
        """And nobody else; what is under way to it is bounded."""
        one, slow, other = (Reader(meeting.open(name)) for name in ("one", "slow", "other"))
        activate(one, slow, other)
        part = STEADY.part_bytes
        sent, error = fill(one.link, slow.link.me)
        assert str(slow.link.me) in str(error)
        assert STEADY.window_bytes - part <= sent <= STEADY.window_bytes + part
        blocked = threading.Event()

        def send_more() -> None:
            blocked.set()
            one.link.send(slow.link.me, *part_of(part), timeout_s=PATIENCE_S)

        def others_go_on() -> None:
            blocked.wait()
            for _ in range(20):
                one.link.send(other.link.me, *part_of(part), timeout_s=PATIENCE_S)
                other.link.send(one.link.me, *part_of(part), timeout_s=PATIENCE_S)
                other.until_deliveries(len(other.deliveries) + 1)
                one.until_deliveries(len(one.deliveries) + 1)
            slow.until_deliveries(sent // part + 1)  # now it reads, and the sender goes on

        together(send_more, others_go_on)
        assert slow.link.me in one.views[-1].peers()

    def test_fan_out_waits_for_active_readers_only(self, meeting: Meeting) -> None:
        """A slow active reader holds it back, a watching one never does."""
        one, slow = Reader(meeting.open("one")), Reader(meeting.open("slow"))
        meeting.open("idle")
        activate(one, slow)
        part = STEADY.part_bytes
        sent, error = fill(one.link, None)
        assert "slow" in str(error)
        assert "idle" not in str(error)
        assert STEADY.window_bytes - part <= sent <= STEADY.window_bytes + part
        slow.link.close()
        one.until_without(slow.link.me)
        for _ in range(100):  # many windows, and nobody but a watching peer there
            one.link.send(None, *part_of(part), timeout_s=PATIENCE_S)

    @pytest.mark.parametrize("in_message", [False, True])
    def test_a_watching_peer_that_does_not_read_gets_a_gap(
        self, meeting: Meeting, in_message: bool
    ) -> None:
        """And takes no more than the agreed memory; whatever part of a message is large."""
        one, idle = Reader(meeting.open("one")), Reader(meeting.open("idle"))
        witness = Reader(meeting.open("witness"))
        activate(one)
        size = 32 << 10
        count = 5 * STEADY.watch_bytes // size
        for i in range(count):
            head = f"{i}:".encode()
            message, buffers = (
                (head + b"x" * size, []) if in_message else (head, [os.urandom(size)])
            )
            one.link.send(None, message, buffers, timeout_s=PATIENCE_S)
        # What is sent is on its way for a while. Only when another peer has what was sent last is
        # it certain that nothing of it comes after this one has begun to read; and over a broker,
        # where each has a queue of its own, only when the broker has put all of it into all queues.
        one.link.flush(PATIENCE_S)
        one.link.send(witness.link.me, b"end")
        witness.until_message(b"end")
        one.link.send(idle.link.me, b"end")
        idle.until_message(b"end")
        # To a watching peer, direct messages and fan-outs may come by different queues.
        if not idle.num_gaps:
            idle.until(lambda event: isinstance(event, Gap))
        got = [int(d.message.split(b":")[0]) for d in idle.deliveries if d.message != b"end"]
        assert idle.num_gaps >= 1
        # Over a broker: half of it waits for the reader, a quarter is on its way at most, and the
        # queue holds as much as is agreed.
        assert len(got) * size <= 2 * STEADY.watch_bytes
        assert got == sorted(set(got))
        # What it has is whole up to the gap.
        first_gap = next(i for i, event in enumerate(idle.events) if isinstance(event, Gap))
        before = [e for e in idle.events[:first_gap] if isinstance(e, Delivery) and e.fanout]
        assert len(before) == len(got[: len(before)])
        assert got[: len(before)] == list(range(len(before)))
        # It can still become active: it has seen all its gaps.
        idle.link.tell(Ready())
        idle.until_view(lambda view: state_of(view, idle.link.me) is PeerState.ACTIVE)

    def test_a_watching_peer_that_reads_gets_all(self, meeting: Meeting) -> None:
        """However much is fanned out."""
        one, fast = Reader(meeting.open("one")), Reader(meeting.open("fast"))
        activate(one)
        size = STEADY.watch_bytes // 32
        count = 200
        taken = threading.Semaphore(8)  # a reader as fast as the sender, on any machine
        told = 16  # a meeting point knows of this many the latest; with those 8, less than 31

        def send() -> None:
            for i in range(count):
                taken.acquire()
                message, data = sealed(i, size)
                one.link.send(None, message, [data], timeout_s=PATIENCE_S)

        def read() -> None:
            for i in range(count):
                fast.until_deliveries(i + 1)
                # What it has read it tells by beats, whose thread may not be given its turn for as
                # long as the other threads need to fan out all the memory that is agreed.
                if i % told == told - 1:
                    fast.link.renew_lease(PATIENCE_S)
                taken.release()

        together(send, read)
        assert [number_of(d) for d in fast.deliveries] == list(range(count))
        assert fast.num_gaps == 0
