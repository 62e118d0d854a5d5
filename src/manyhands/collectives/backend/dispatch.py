"""Dispatch: the pieces that leave, at once or when their readers have use for them (`flow`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manyhands.collectives.backend import messages as words
from manyhands.collectives.backend.failure import blaming
from manyhands.collectives.courier import Letter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from manyhands.collectives.backend.exchange import Exchange, Outgoing
    from manyhands.collectives.courier import Courier
    from manyhands.collectives.flow import Sending
    from manyhands.core.peers import PeerId


class Dispatch:
    """Not thread-safe: whoever calls holds the team's lock.

    `settled` is called on a thread of the courier's, without that lock, when a piece of an
    exchange that somebody waits for has left.
    """

    def __init__(
        self,
        roster: Sequence[PeerId],
        courier: Courier,
        accounts: Mapping[int, Sending],
        settled: Callable[[Exchange], None],
    ) -> None:
        self._roster, self._courier, self._accounts = roster, courier, accounts
        self._settled = settled
        self._held: list[tuple[Exchange, Outgoing]] = []

    def add(self, exchange: Exchange, pieces: Sequence[Outgoing]) -> None:
        """They belong to this exchange from now on, and leave when they may."""
        for outgoing in pieces:
            exchange.unsettled += not outgoing.settled
            self._push(exchange, outgoing)

    def push_held(self) -> Sequence[Exchange]:
        """Some reader has use for more. Returns whose pieces may have left."""
        held, self._held = self._held, []
        for exchange, outgoing in held:
            self._push(exchange, outgoing)
        return list(dict.fromkeys(exchange for exchange, _ in held))

    def holds(self, exchange: Exchange) -> bool:
        """Whether a piece of it has not left."""
        return any(held is exchange for held, _ in self._held)

    def waiting(self) -> Iterator[tuple[Exchange, Sequence[int]]]:
        """The pieces that have not left: of which exchange, for which ranks."""
        for exchange, outgoing in self._held:
            yield exchange, exchange.readers_of(outgoing)

    def late(self, exchange: Exchange) -> list[int]:
        """The ranks for which pieces of it are held back."""
        held = (exchange.readers_of(piece) for other, piece in self._held if other is exchange)
        return sorted({rank for ranks in held for rank in ranks if not self._may(exchange, rank)})

    def clear(self) -> None:
        """Nothing leaves any more."""
        self._held.clear()

    def _push(self, exchange: Exchange, outgoing: Outgoing) -> None:
        readers = exchange.readers_of(outgoing)
        if all(self._may(exchange, rank) for rank in readers):
            self._post(exchange, outgoing, readers)
        else:
            self._held.append((exchange, outgoing))

    def _may(self, exchange: Exchange, rank: int) -> bool:
        return rank in exchange.shown or self._accounts[rank].may_send()

    def _post(self, exchange: Exchange, outgoing: Outgoing, readers: Sequence[int]) -> None:
        for rank in readers:
            self._accounts[rank].sent += outgoing.num_bytes
        word = words.Piece(*exchange.key, exchange.form, outgoing.step, outgoing.k)
        message = words.encode(word)
        # The meeting point copies to all of a run; to some of them, each is written to.
        to_all = outgoing.to is None and len(exchange.members) == len(self._roster)
        addresses = [None] if to_all else [self._roster[rank] for rank in readers]
        left = len(addresses)
        prepared: list[memoryview] = []

        def buffers() -> Sequence[memoryview]:
            if not prepared:
                with blaming(exchange):
                    prepared.append(outgoing.prepare())
            return prepared

        def sent() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                if outgoing.release is not None:
                    outgoing.release()
                if not outgoing.settled:
                    self._settled(exchange)

        confirm = sent if outgoing.release is not None or not outgoing.settled else None
        # Of a tensor's sums the last one asks for all.
        hurry = not outgoing.settled and not (outgoing.urgent and exchange.owned)
        for address in addresses:
            letter = Letter(address, message, buffers, confirm, hurry=hurry)
            self._courier.post(letter, urgent=outgoing.urgent)
