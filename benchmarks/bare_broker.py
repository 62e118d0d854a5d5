"""The least a client of RabbitMQ can do: what an average through any broker costs on this machine.

Peers publish pieces of their tensor to the queue of whoever adds them up, and sums to a fan-out
exchange, straight out of their memory, and read what comes straight into it. No confirms, windows,
leases, numbers or checks: nothing to use, one that dies hangs the others.
"""

from __future__ import annotations

import os
import queue
import struct
import sys
import threading

from bare_relay import Pieces

from manyhands.core.address import parse_address
from manyhands.links.amqp import login_of
from manyhands.links.amqp.channel import AmqpChannel

_HEAD = struct.Struct("<ii")  # from, piece
_ROUND_S = 60.0  # no round of any size takes so long


class BareBrokerPeer:
    """An average in fp32 or bf16, every piece summed in rank order, in fp32."""

    def __init__(self, url: str, run: str, rank: int, size: int, numel: int, wire: str) -> None:
        import torch
        import torch.distributed as dist

        self._rank, self._size = rank, size
        self.tensor = torch.zeros(numel)
        # What travels: the tensor itself, or a copy of it in bf16.
        self._coded = self.tensor if wire == "fp32" else self.tensor.bfloat16()
        self.bytes_sent = 0
        self._pieces = Pieces(numel, rank, size)
        self._came = {
            key: torch.empty(self._pieces.numel(key[0]), dtype=self._coded.dtype)
            for key in self._pieces.contributions
        }
        self._incoming: tuple[int, int] | None = None
        self._reset()
        self._queues = [f"bare-{run}-{r}" for r in range(size)]
        login = login_of(parse_address(f"{url}?run={run}"))
        # Without heartbeats: nobody would send them while others have their turn.
        self._out = AmqpChannel.open(login, self, setup=self._declare, heartbeat_s=0)
        self._in = AmqpChannel.open(login, self, setup=self._declare_queue, heartbeat_s=0)
        for channel in (self._out, self._in):
            threading.Thread(target=channel.serve, daemon=True).start()
        dist.barrier()  # all exchanges are there
        for other in (name for name in self._queues if name != self._queues[rank]):
            self._in.bind(self._queues[rank], other, "")
        self._in.consume(self._queues[rank], "bare", no_ack=True)
        dist.barrier()  # all listen

    def _declare(self, channel) -> None:
        channel.exchange_declare(
            self._queues[self._rank], "fanout", durable=False, auto_delete=True
        )

    def _declare_queue(self, channel) -> None:
        channel.queue_declare(self._queues[self._rank], exclusive=True, auto_delete=True)

    def _reset(self) -> None:
        self._ready: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._missing = dict.fromkeys(self._pieces.mine, self._size - 1)
        self._left = self._pieces.num_incoming
        self._all_here = threading.Event()

    def average(self) -> None:
        """Whoever calls sends; what comes is read, and added up, by the channel's thread."""
        for k in self._pieces.order:
            while not self._ready.empty():
                self._send_sum(self._ready.get())
            self._encode(k)
            self._send("", self._queues[self._pieces.owner(k)], k)
        for _ in range(len(self._pieces.mine) - self._num_sent):
            self._send_sum(self._ready.get(timeout=_ROUND_S))
        if not self._all_here.wait(_ROUND_S):
            raise TimeoutError(f"{self._left} pieces did not come")
        self._num_sent = 0
        self._reset()

    _num_sent = 0

    def _send_sum(self, k: int) -> None:
        self._num_sent += 1
        self._send(self._queues[self._rank], "", k)

    def _encode(self, k: int) -> None:
        if self._coded is not self.tensor:
            self._pieces.cut(self._coded, k).copy_(self._pieces.cut(self.tensor, k))

    def _send(self, exchange: str, key: str, k: int) -> None:
        view = _bytes_of(self._pieces.cut(self._coded, k))
        self._out.publish(exchange, key, _HEAD.pack(self._rank, k), [view], mandatory=False)
        self.bytes_sent += len(view)

    # -- the channel's thread -----------------------------------------------------------------

    def on_delivery(self, consumer_tag, delivery_tag, redelivered, header, body_bytes):
        peer, k = self._incoming = _HEAD.unpack(header)
        mine = self._pieces.owner(k) == self._rank
        return [_bytes_of(self._came[k, peer] if mine else self._pieces.cut(self._coded, k))]

    def on_body(self) -> None:
        import torch

        _, k = self._incoming
        values = self._pieces.cut(self.tensor, k)
        if self._pieces.owner(k) != self._rank:
            if self._coded is not self.tensor:
                values.copy_(self._pieces.cut(self._coded, k))
        else:
            self._missing[k] -= 1
            if not self._missing[k]:
                given = [values if p == self._rank else self._came[k, p] for p in range(self._size)]
                total = given[0] + given[1]
                for more in given[2:]:
                    total += more
                torch.div(total, self._size, out=values)
                if self._coded is not self.tensor:
                    self._encode(k)
                    values.copy_(self._pieces.cut(self._coded, k))
                self._ready.put(k)
        self._left -= 1
        if not self._left:
            self._all_here.set()

    def on_end(self, *what) -> None:
        """Nothing of this is expected, and nobody could go on."""
        print("the broker:", *what, file=sys.stderr, flush=True)
        os._exit(1)

    on_bad_delivery = on_return = on_confirm = on_blocked = on_unblocked = on_cancelled = on_end


def _bytes_of(tensor) -> memoryview:
    import torch

    return memoryview(tensor.view(torch.uint8).numpy())
