"""Flow: how far a member may run ahead of another. Pure.

Whoever is slow must hold what the fast ones send it. Link windows do not bound that: a reader takes
messages at once, so that no operation waits behind another one's data. So each sender has an
*allowance* for each reader: bytes that the reader has not yet put to use. Beyond it a message is
held back by its sender, unless the reader has *shown* that it is at work on that very operation.

    sender                                   reader
    sent - taken < allowance, or shown?  ──► holds bytes until its own operation starts
    held otherwise                       ◄── Taken(total), a quarter of the allowance at a time
                                         ◄── Here(operation), when it holds half and waits for more

A reader that holds nothing says nothing. One that waits for held-back data holds at least three
quarters of the sender's allowance (all but what it has not told), so it does say Here: no deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_LEAST_BYTES = 1 << 20  # of an operation's sender, however many there are


def allowance_of(total_bytes: int, num_others: int, piece_bytes: int, *, least: int = 1) -> int:
    """Of each of so many senders, if all together may make a reader hold `total_bytes`.

    A sender that is just below it sends one more piece, so a byte is enough to go on with. From
    where one piece of each is more than the total, that is what the reader holds.
    """
    return max(least, total_bytes // max(1, num_others) - piece_bytes + 1)


@dataclass(slots=True)
class Sending:
    """One sender's account with one reader."""

    allowance: int
    sent: int = 0
    taken: int = 0

    def may_send(self) -> bool:
        """Whether a message for an operation that the reader has not shown may leave."""
        return self.sent - self.taken < self.allowance


@dataclass(slots=True)
class Receiving:
    """One reader's account with one sender."""

    allowance: int
    came: int = 0
    used: int = 0
    told: int = 0

    @property
    def full(self) -> bool:
        """Whether so much waits here that the sender may be holding back."""
        return self.came - self.used >= self.allowance // 2

    def resize(self, allowance: int) -> int | None:
        """The sender has another allowance from now on; returns the total to tell, if it is due."""
        self.allowance = allowance
        return self.use(0)

    def use(self, num_bytes: int) -> int | None:
        """These bytes have been put to use; returns the total to tell the sender, if it is due."""
        self.used += num_bytes
        if self.used - self.told < self.allowance // 4:
            return None
        self.told = self.used
        return self.used


@dataclass(slots=True)
class Accounts:
    """All accounts of one member, by the other's place in the roster."""

    num: int
    total_bytes: int  # what all senders together may make this member hold
    piece_bytes: int  # of the largest message
    sending: dict[int, Sending] = field(default_factory=dict[int, Sending])
    receiving: dict[int, Receiving] = field(default_factory=dict[int, Receiving])

    def __post_init__(self) -> None:
        # Many small operations may be under way, whose results nobody waits for one by one.
        allowance = allowance_of(
            self.total_bytes, self.num - 1, self.piece_bytes, least=_LEAST_BYTES
        )
        for member in range(self.num):
            self.sending[member] = Sending(allowance)
            self.receiving[member] = Receiving(allowance)
