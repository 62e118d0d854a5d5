"""Post: what this peer sends about rounds. Contributions that would swamp a reader wait here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import RLock

from manyhands.collectives import messages as m
from manyhands.collectives.bank import Bank
from manyhands.collectives.courier import Courier, Letter
from manyhands.collectives.flow import Sending, allowance_of
from manyhands.collectives.instructions import Begin
from manyhands.collectives.pool import Block, Pool
from manyhands.core.peers import PeerId, View, ViewNumber

AHEAD_BYTES = 64 << 20  # contributions that wait at an owner, of all members together

Buffers = Sequence[memoryview]


class Post:
    """The engine's `lock` guards it; letters take it when their turn has come.

    `aside` carries what goes to peers outside the round: one that does not read must not hold up
    those who do.
    """

    def __init__(
        self,
        courier: Courier,
        aside: Courier,
        bank: Bank,
        pool: Pool,
        part_bytes: int,
        lock: RLock,
    ) -> None:
        self._courier, self._aside, self._lock = courier, aside, lock
        self._bank, self._pool = bank, pool
        self._part_bytes = part_bytes
        self._names: dict[int, PeerId] = {}
        self._attempt: Begin | None = None
        self._accounts: dict[tuple[ViewNumber, int], Sending] = {}
        self._held: deque[tuple[int, m.Part]] = deque()

    def see(self, view: View) -> None:
        """These can be written to."""
        self._names.update({line.peer.incarnation: line.peer for line in view.roster})

    def name_of(self, peer: int) -> PeerId | None:
        """What the views call a peer; None for one that never was in any."""
        return self._names.get(peer)

    def begin(self, begin: Begin) -> int:
        """What waits for earlier attempts will not be sent. Returns the allowance of a sender.

        All members compute it from the same attempt: a reader that told what it uses by a larger
        measure than its senders have would keep them waiting for good.
        """
        self._attempt, cut = begin, begin.attempt.cut
        allowance = self._allowance()
        self._accounts = {key: a for key, a in self._accounts.items() if key[0] >= cut}
        for account in self._accounts.values():
            account.allowance = allowance
        self._held = deque(held for held in self._held if self._is_wanted(held[1]))
        return allowance

    def send(self, to: int | None, message: m.AnyMessage, buffers: Buffers = ()) -> None:
        """To one peer, or to all others. The buffers must stay until it has arrived."""
        self._send(to, message, buffers, None)

    def send_result(self, to: int | None, message: m.Sum | m.Fill, block: Block) -> None:
        """A result. Its block is not used again before it has left: the round may be stable, and
        the block free, as soon as all members have it, and a lone member has nobody to wait for.
        """
        if not block.view:
            self._send(to, message, (), None)
            return
        self._send(to, message, [block.view], self._pool.hold(block))

    def send_part(self, to: int, part: m.Part) -> None:
        """A contribution, with what the bank holds of it; as soon as its owner can take it."""
        account = self._account(part.attempt.cut, to)
        if account.may_send():
            self._post_part(to, part, account)
        else:
            self._held.append((to, part))

    def taken(self, sender: int, cut: ViewNumber, total: int) -> None:
        """That peer has put to use so much of what it was sent since the cut."""
        account = self._accounts.get((cut, sender))
        if account is not None:
            account.taken = max(account.taken, total)
            self._send_held()

    def tell_taken(self, to: int, cut: ViewNumber, total: int) -> None:
        """So much of what that peer has sent since the cut is put to use here."""
        self.send(to, m.Taken(cut, total))

    def _is_wanted(self, part: m.Part) -> bool:
        begin = self._attempt
        return begin is not None and (part.round, part.attempt) == (begin.round, begin.attempt)

    def _account(self, cut: ViewNumber, to: int) -> Sending:
        return self._accounts.setdefault((cut, to), Sending(self._allowance()))

    def _allowance(self) -> int:
        others = 1 if self._attempt is None else len(self._attempt.members) - 1
        return allowance_of(AHEAD_BYTES, others, self._part_bytes)

    def _send_held(self) -> None:
        held, self._held = self._held, deque()
        for to, part in held:
            self.send_part(to, part)

    def _post_part(self, to: int, part: m.Part, account: Sending) -> None:
        num_bytes = self._bank.num_bytes(part.k)
        account.sent += num_bytes
        if not num_bytes:
            self._send(to, part, (), None)
            return
        leave: list[Callable[[], None]] = []

        def buffers() -> Buffers | None:
            """Encoded when it leaves, so that few copies wait; not at all after a cut."""
            with self._lock:
                if self._bank.empty or not self._is_wanted(part):
                    return None
                views, left = self._bank.coded(part.k)
            leave.append(left)
            return views

        def sent() -> None:
            for left in leave:
                left()

        self._send(to, part, buffers, sent if self._bank.copies(part.k) else None)

    def _courier_for(self, to: int | None, message: m.AnyMessage) -> Courier:
        members = () if self._attempt is None else self._attempt.members
        inside = to is None or to in members or isinstance(message, m.Status)
        return self._courier if inside else self._aside

    def _send(
        self,
        to: int | None,
        message: m.AnyMessage,
        buffers: Buffers | Callable[[], Buffers | None],
        sent: Callable[[], None] | None,
    ) -> None:
        address = None if to is None else self._names.get(to)
        if to is not None and address is None:
            if sent is not None:
                sent()
            return  # never seen in a view: nobody waits for what it is told
        part = isinstance(message, m.Part)
        letter = Letter(address, m.encode(message), buffers, sent, hurry=False)
        self._courier_for(to, message).post(letter, urgent=not part)
