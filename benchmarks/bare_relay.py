"""The least a relay can do: sockets and copies, no windows, leases, resuming or checks.

What an average through any relay costs on this machine: peers send pieces of their tensor to those
who add them up, the relay passes each on as it comes, sums are sent once and copied by the relay.
Nothing to use: a peer that is slow holds up all others, one that dies hangs them.

    python benchmarks/bare_relay.py SIZE     prints its port, serves one run, ends with it
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import sys
import threading

_HEAD = struct.Struct("<iiii")  # to (-1: all others), from, piece, bytes
_RANK = struct.Struct("<i")
PIECE_BYTES = 2 << 20


def relay(size: int) -> None:
    """Pass on what `size` peers send until they are gone."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    socks: dict[int, socket.socket] = {}
    for _ in range(size):
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        socks[_RANK.unpack(_exactly(sock, _RANK.size))[0]] = sock
    locks = {rank: threading.Lock() for rank in socks}

    def serve(rank: int) -> None:
        memory = memoryview(bytearray(PIECE_BYTES))
        while head := _exactly(socks[rank], _HEAD.size):
            to, _, _, num_bytes = _HEAD.unpack(head)
            _fill(socks[rank], memory[:num_bytes])
            for other in socks if to < 0 else (to,):
                if other != rank:
                    with locks[other]:
                        socks[other].sendall(head)
                        socks[other].sendall(memory[:num_bytes])

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in socks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Pieces:
    """Who adds up what of a tensor, as one of its peers sees it."""

    def __init__(self, numel: int, rank: int, size: int) -> None:
        per_owner = -(-numel // size)
        most = PIECE_BYTES // 4
        self.all = [  # owner, start, stop
            (owner, start, min(start + most, (owner + 1) * per_owner, numel))
            for owner in range(size)
            for start in range(owner * per_owner, min(numel, (owner + 1) * per_owner), most)
        ]
        numbers = range(len(self.all))
        self.mine = [k for k in numbers if self.owner(k) == rank]
        """Those that this peer adds up."""
        self.contributions = [(k, p) for k in self.mine for p in range(size) if p != rank]
        """What comes for them, and from whom."""
        self.order = sorted(  # in which it sends the others
            (k for k in numbers if self.owner(k) != rank),
            key=lambda k: (self.owner(k) - rank) % size,
        )
        self.num_incoming = len(self.order) + len(self.contributions)

    def owner(self, k: int) -> int:
        return self.all[k][0]

    def numel(self, k: int) -> int:
        _, start, stop = self.all[k]
        return stop - start

    def cut(self, tensor, k: int):
        _, start, stop = self.all[k]
        return tensor[start:stop]


class BarePeer:
    """An average of fp32 through it, every piece summed in rank order."""

    def __init__(self, port: int, rank: int, size: int, numel: int) -> None:
        import torch

        self._rank, self._size = rank, size
        self._layouts: dict[int, tuple] = {}  # by how many numbers a tensor has
        self.take(torch.zeros(numel))
        self.bytes_sent = 0
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.sendall(_RANK.pack(rank))

    def take(self, tensor) -> None:
        """The tensor that is averaged from here on, in its own memory."""
        import torch

        self.tensor, numel = tensor, tensor.numel()
        self._memory = memoryview(tensor.numpy()).cast("B")
        if numel not in self._layouts:
            pieces = Pieces(numel, self._rank, self._size)
            came = {key: torch.empty(pieces.numel(key[0])) for key in pieces.contributions}
            self._layouts[numel] = pieces, came
        self._pieces, self._came = self._layouts[numel]

    def average(self) -> None:
        import torch

        ready: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        sender = threading.Thread(target=self._give, args=(ready,))
        sender.start()
        missing = dict.fromkeys(self._pieces.mine, self._size - 1)
        for _ in range(self._pieces.num_incoming):
            _, peer, k, _ = _HEAD.unpack(_exactly(self._sock, _HEAD.size))
            owner, start, stop = self._pieces.all[k]
            if owner != self._rank:
                _fill(self._sock, self._memory[4 * start : 4 * stop])
                continue
            came = self._came[k, peer]
            _fill(self._sock, memoryview(came.numpy()).cast("B"))
            missing[k] -= 1
            if not missing[k]:
                mine = self.tensor[start:stop]
                given = [mine if p == self._rank else self._came[k, p] for p in range(self._size)]
                total = given[0] + given[1]
                for values in given[2:]:
                    total += values
                torch.div(total, self._size, out=mine)
                ready.put(k)
        ready.put(None)
        sender.join()

    def _give(self, ready: queue.SimpleQueue[int | None]) -> None:
        """Contributions, and sums before them once they are there. Whoever reads never sends."""
        for k in self._pieces.order:
            while not ready.empty():
                self._send(-1, ready.get())
            self._send(self._pieces.owner(k), k)
        while (k := ready.get()) is not None:
            self._send(-1, k)

    def _send(self, to: int, k: int) -> None:
        _, start, stop = self._pieces.all[k]
        view = self._memory[4 * start : 4 * stop]
        self._sock.sendall(_HEAD.pack(to, self._rank, k, len(view)))
        self._sock.sendall(view)
        self.bytes_sent += len(view)


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = sock.recv(num_bytes, socket.MSG_WAITALL)
    return data if len(data) == num_bytes else b""


def _fill(sock: socket.socket, view: memoryview) -> None:
    while view:
        got = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if not got:
            os._exit(1)
        view = view[got:]


if __name__ == "__main__":
    relay(int(sys.argv[1]))
