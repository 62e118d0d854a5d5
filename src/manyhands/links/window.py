"""Credit windows and stream numbers: what may be in flight, and what has been lost. Pure.

A sender may have `window_bytes` under way to each peer, plus one message: it sends while its
balance is above zero, so a message larger than the window still goes, alone. The reader returns
credit as *sequence numbers it has taken*, not as bytes: a credit that arrives twice or covers a
lost message does no harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass
class _Outstanding:
    """What one peer has not taken yet: (sequence number, bytes), oldest first."""

    direct: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    fanout: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    num_bytes: int = 0

    def take(self, queue: deque[tuple[int, int]], seq: int) -> None:
        while queue and queue[0][0] <= seq:
            self.num_bytes -= queue.popleft()[1]


class SendWindows:
    """The sender's side: who may be sent to, and the numbers of the next messages."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self._out: dict[int, _Outstanding] = {}
        self._fanout_seq = 0
        self._direct_seq: dict[int, int] = {}

    def forget(self, peers: Collection[int]) -> None:
        """These are gone for good."""
        self._out = {i: out for i, out in self._out.items() if i not in peers}
        self._direct_seq = {i: seq for i, seq in self._direct_seq.items() if i not in peers}

    def reset(self) -> None:
        """After a cut: what was under way may be lost, and nobody waits for it any more."""
        self._out.clear()

    def waiting_for(self, peers: Iterable[int]) -> list[int]:
        """Those of `peers` whose window is used up."""
        return [i for i in peers if i in self._out and self._out[i].num_bytes >= self.window_bytes]

    def debit(self, to: int | None, peers: Collection[int], num_bytes: int) -> int:
        """Count a message to `to` (None: fan-out to `peers`); returns its sequence number."""
        if to is None:
            self._fanout_seq += 1
            seq = self._fanout_seq
        else:
            seq = self._direct_seq[to] = self._direct_seq.get(to, 0) + 1
        for peer in peers:
            out = self._out.setdefault(peer, _Outstanding())
            (out.fanout if to is None else out.direct).append((seq, num_bytes))
            out.num_bytes += num_bytes
        return seq

    def credit(self, peer: int, direct_seq: int, fanout_seq: int) -> None:
        """`peer` has taken everything up to these numbers."""
        out = self._out.get(peer)
        if out is not None:
            out.take(out.direct, direct_seq)
            out.take(out.fanout, fanout_seq)


class ReceiveWindows:
    """The reader's side: when a sender is due its credit back."""

    def __init__(self, window_bytes: int) -> None:
        self._due_bytes = max(1, window_bytes // 2)
        self._taken: dict[int, list[int]] = {}  # sender -> [direct seq, fan-out seq, bytes unsaid]

    def take(
        self, sender: int, *, fanout: bool, seq: int, num_bytes: int
    ) -> tuple[int, int] | None:
        """The reader took a message; returns the credit to send now, if it is due."""
        taken = self._taken.setdefault(sender, [0, 0, 0])
        taken[fanout] = max(taken[fanout], seq)
        taken[2] += num_bytes
        if taken[2] < self._due_bytes:
            return None
        taken[2] = 0
        return taken[0], taken[1]

    def forget(self, peers: Collection[int]) -> None:
        """These are gone for good."""
        self._taken = {i: taken for i, taken in self._taken.items() if i not in peers}


@dataclass
class StreamCheck:
    """Notices doubles and holes in what each sender sends."""

    _last: dict[tuple[int, bool], tuple[int, int]] = field(
        default_factory=dict[tuple[int, bool], tuple[int, int]]
    )  # stream -> (sequence number, epoch)
    _epoch: int = 0

    def is_new(self, sender: int, *, fanout: bool, seq: int) -> bool:
        """Whether this message has not arrived before."""
        last, _ = self._last.get((sender, fanout), (0, 0))
        return seq > last

    def arrived(self, sender: int, *, fanout: bool, seq: int) -> bool:
        """A new message has arrived whole; returns whether something is missing before it.

        Direct messages start at 1; fan-outs start wherever the reader came in.
        """
        last, epoch = self._last.get((sender, fanout), (seq - 1 if fanout else 0, 0))
        self._last[sender, fanout] = (seq, self._epoch)
        return seq != last + 1 and epoch == self._epoch

    def forgive(self) -> None:
        """A loss is known to everybody: each stream may go on anywhere. Doubles stay doubles."""
        self._epoch += 1

    def forget(self, peers: Collection[int]) -> None:
        """These are gone for good; a sender whom no view has shown yet is not."""
        self._last = {key: seen for key, seen in self._last.items() if key[0] not in peers}
