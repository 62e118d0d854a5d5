"""Book: which contributions and results a peer holds, by attempt. Heads only, no values.

The runtime has the values under the same keys; whatever the book drops is reported, so that the
two stay in step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from manyhands.collectives.messages import Part, Record, Sum, Tag, encode
from manyhands.collectives.ranges import Ranges

CHAIN_BYTES = 32


class Key(NamedTuple):
    """One attempt at one round."""

    round: int
    attempt: Tag


class Contribution(NamedTuple):
    """A Part that came, and whether its values can be used."""

    part: Part
    refused: bool


class Result(NamedTuple):
    """A Sum that came, and the digest of its values."""

    sum: Sum
    digest: bytes


class Kept(NamedTuple):
    """The result of the last committed round, for those who lack it.

    Empty for a round that this peer was alone in: nobody can be sent that.
    """

    key: Key
    results: Mapping[int, Result]


class Book:
    """See the module. Handlers are idempotent because nothing is filed twice."""

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._parts: dict[Key, dict[int, dict[int, Contribution]]] = {}
        self._sums: dict[Key, dict[int, Result]] = {}
        self._chains: dict[tuple[bytes, Key], bytes] = {}
        self.concluded: Key | None = None  # attempt that one result, of part 0, is all of

    def add_part(self, sender: int, part: Part, *, refused: bool) -> bool:
        """File a contribution; False if it is there already."""
        attempt = self._parts.setdefault(Key(part.round, part.attempt), {})
        box = attempt.setdefault(part.k, {})
        if sender in box:
            return False
        box[sender] = Contribution(part, refused)
        return True

    def add_sum(self, sum_: Sum, digest: bytes) -> bool:
        """File a result; False if it is there already."""
        attempt = self._sums.setdefault(Key(sum_.round, sum_.attempt), {})
        if sum_.k in attempt:
            return False
        attempt[sum_.k] = Result(sum_, digest)
        return True

    def conclude(self, sum_: Sum, digest: bytes) -> None:
        """File the one result of an attempt whose values nobody can be sent."""
        self.concluded = Key(sum_.round, sum_.attempt)
        self._sums[self.concluded] = {0: Result(sum_, digest)}

    def contributions(self, key: Key, k: int) -> Mapping[int, Contribution]:
        """The contributions to one part, by sender."""
        return self._parts.get(key, {}).get(k, {})

    def results(self, key: Key) -> Mapping[int, Result]:
        """The results of an attempt, by part."""
        return self._sums.get(key, {})

    def mask(self, key: Key) -> int:
        """The parts of an attempt that are held: bit k for part k."""
        if self.complete(key):
            return (1 << self._num_parts) - 1
        return sum(1 << k for k in self.results(key))

    def attempts(self, round_: int) -> list[Tag]:
        """The attempts at a round of which a result is held."""
        return [key.attempt for key in self._sums if key.round == round_]

    def newest_round(self) -> int:
        """The newest round of which a result is held; -1 if there is none."""
        return max((key.round for key in self._sums), default=-1)

    def complete(self, key: Key) -> bool:
        """Whether all parts of an attempt are held."""
        held = self._sums.get(key, ())
        return len(held) == self._num_parts or (bool(held) and key == self.concluded)

    def record(self, key: Key) -> Record | None:
        """The record of an attempt, once its part 0 is held."""
        first = self._sums.get(key, {}).get(0)
        return first.sum.record if first else None

    def records(self, round_: int) -> list[Record]:
        """The records that are held for a round, of whatever attempt."""
        found = (self.record(Key(round_, tag)) for tag in self.attempts(round_))
        return [record for record in found if record is not None]

    def refused(self, key: Key) -> Ranges:
        """What the held results of an attempt refuse."""
        return Ranges.union(result.sum.refused for result in self.results(key).values())

    def chain_after(self, chain: bytes, key: Key) -> bytes:
        """The chain after a complete attempt. It covers the heads, so the record too, and values.

        Two attempts never lead to one chain, even with the same values: their records differ, and
        peers that act on different records must not take each other for equal.
        """
        known = self._chains.get((chain, key))
        if known is None:
            digest = hashlib.blake2b(chain, digest_size=CHAIN_BYTES)
            results = self._sums[key]
            for k in range(len(results)):
                for piece in (encode(results[k].sum), results[k].digest):
                    digest.update(len(piece).to_bytes(4, "little"))
                    digest.update(piece)
            known = self._chains[chain, key] = digest.digest()
        return known

    def drop_parts(self, wanted: Callable[[Key], bool]) -> list[Key]:
        """Forget the contributions to unwanted attempts; returns those attempts."""
        dropped = [key for key in self._parts if not wanted(key)]
        for key in dropped:
            del self._parts[key]
        return dropped

    def drop_sums(self, wanted: Callable[[Key], bool]) -> list[Key]:
        """Forget the results of unwanted attempts; returns those attempts."""
        dropped = [key for key in self._sums if not wanted(key)]
        for key in dropped:
            del self._sums[key]
        if self.concluded in dropped:
            self.concluded = None
        if dropped:
            self._chains.clear()
        return dropped
