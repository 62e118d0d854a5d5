"""Reduction: the owner's sum of one part, in roster order whatever order contributions come in.

The order makes the result a function of the contributions alone: not of the network, and not of
which member owns the part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyhands.core.errors import UsageError

if TYPE_CHECKING:
    from manyhands.collectives.codecs import Codec


class Operator(Enum):
    """How two contributions become one."""

    SUM = "sum"
    MEAN = "mean"  # the sum, divided by the number of contributions at the end
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AND = "and"  # bitwise
    OR = "or"
    XOR = "xor"


_FUNCTIONS: dict[Operator, Callable[..., Tensor]] = {
    Operator.SUM: torch.add,
    Operator.MEAN: torch.add,
    Operator.PRODUCT: torch.mul,
    Operator.MIN: torch.minimum,
    Operator.MAX: torch.maximum,
    Operator.AND: torch.bitwise_and,
    Operator.OR: torch.bitwise_or,
    Operator.XOR: torch.bitwise_xor,
}
_BITWISE = (Operator.AND, Operator.OR, Operator.XOR)
_ORDERED = (Operator.MIN, Operator.MAX)

# torch has no arithmetic for these; bit for bit, sums and products are those of the signed ones.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What is done to values of one dtype: in which dtype they are read, and added."""

    operator: Operator
    dtype: torch.dtype  # of the values as they are read
    total_dtype: torch.dtype  # of the running total

    @property
    def narrow(self) -> bool:
        """Whether the total has more bits than the values."""
        return self.total_dtype is not self.dtype

    def fold(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """out := left combined with right. `out` may be one of them."""
        _FUNCTIONS[self.operator](left, right, out=out)


def arithmetic_for(operator: Operator, dtype: torch.dtype) -> Arithmetic:
    """Raises UsageError where the operator has no meaning for the dtype."""
    floating = dtype.is_floating_point
    if operator in _BITWISE and (floating or dtype.is_complex):
        raise _refused(operator, dtype, "it works on integers and booleans")
    if operator in _ORDERED and (dtype.is_complex or dtype in _SIGNED):
        raise _refused(operator, dtype, "convert to a dtype that torch can compare")
    if operator is Operator.MEAN and not (floating or dtype.is_complex):
        raise _refused(operator, dtype, "average floating point numbers, or sum and divide")
    if dtype.itemsize < 4 and floating:
        arithmetic = Arithmetic(operator, dtype, torch.float32)
    elif dtype is torch.complex32:
        arithmetic = Arithmetic(operator, dtype, torch.complex64)
    else:
        plain = _SIGNED.get(dtype, dtype)
        arithmetic = Arithmetic(operator, plain, plain)
    if not _exists(arithmetic):
        raise _refused(operator, dtype, "torch only stores them: convert to numbers")
    return arithmetic


@cache
def _exists(arithmetic: Arithmetic) -> bool:
    """Whether torch has it, tried out: it has dtypes (bits8, int4, ...) that it only stores.

    Which ones, differs from release to release.
    """
    bits = torch.zeros(arithmetic.dtype.itemsize, dtype=torch.uint8, device="cpu")
    try:
        total = bits.view(arithmetic.dtype).to(arithmetic.total_dtype)
        arithmetic.fold(total, total, total)
    except NotImplementedError:
        return False
    return True


def _refused(operator: Operator, dtype: torch.dtype, hint: str) -> UsageError:
    return UsageError(f"{operator.value} of {dtype} tensors is not defined", hint=hint)


@dataclass(slots=True)
class Contribution:
    """One member's values of a part: plain, or as bytes of a codec. `release` frees its memory.

    `final`: the total may end in its memory, and does if nothing else is given for it.
    """

    values: Tensor
    coded: bool
    release: Callable[[], None]
    final: bool = False


class PartSum:
    """Takes contributions as they come and adds them in roster order into `total`.

    `memory` gives what the total is made in, when there is something to add: flat, of the
    arithmetic's total dtype. Contributions then stay intact, but for one that is `final`: if it is
    plain, and first or second, it takes the total, which saves a copy. Without `memory` their own
    is used, and one of them is `final`; none may be coded or narrow. `codec` reads those that are
    `coded`, which only SUM and MEAN can be. A mean is not divided here. Not thread-safe.
    """

    __slots__ = (
        *("_arithmetic", "_codec", "_first", "_home", "_memory", "_next", "_num", "_waiting"),
        "total",
    )

    def __init__(
        self,
        num: int,
        arithmetic: Arithmetic,
        codec: Codec,
        memory: Callable[[], Tensor] | None = None,
    ) -> None:
        self._num, self._arithmetic, self._codec, self._memory = num, arithmetic, codec, memory
        self._waiting: dict[int, Contribution] = {}
        self._first: Contribution | None = None
        self._next = 0
        self._home: Contribution | None = None  # whose memory the total is in
        self.total: Tensor

    @property
    def complete(self) -> bool:
        """Whether every member's contribution is in `total`."""
        return self._next == self._num

    def missing(self) -> list[int]:
        """The members, by place in the roster, whose contribution has not come."""
        return [i for i in range(self._next, self._num) if not self.has(i)]

    def has(self, member: int) -> bool:
        """Whether that member's contribution has come."""
        return member < self._next or member in self._waiting

    def offer(self, member: int, contribution: Contribution) -> bool:
        """Take one; returns `complete`. A member's second one is released, and a UsageError."""
        if self.has(member):
            contribution.release()
            raise UsageError(f"member {member} has contributed to this sum already")
        self._waiting[member] = contribution
        while (turn := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            self._fold(turn)
        return self.complete

    def drop(self) -> None:
        """Forget everything: this sum is not wanted any more."""
        for held in (*self._waiting.values(), self._first, self._home):
            if held is not None:
                held.release()
        self._waiting.clear()
        self._first = self._home = None

    def _fold(self, turn: Contribution) -> None:
        plain = self._is_plain(turn)
        if self._next == 1:
            following = self._waiting.get(1)
            if self._num > 1 and (plain or (following is not None and self._is_home(following))):
                self._first = turn  # read once, together with the second
                return
            self.total = self._room(turn)
            self._load(turn)
        elif self._first is not None:
            first, self._first = self._first, None
            self.total = self._room(turn, first)
            if plain and not first.coded:
                self._arithmetic.fold(first.values, turn.values, self.total)
            elif self._home is first:
                self._add(turn)
            elif self._home is turn:
                self._add(first)
            else:
                self._load(first)
                self._add(turn)
            self._release(first)
        else:
            self._add(turn)
        self._release(turn)

    def _is_plain(self, turn: Contribution) -> bool:
        return not (turn.coded or self._arithmetic.narrow)

    def _is_home(self, turn: Contribution) -> bool:
        return turn.final and self._is_plain(turn)

    def _room(self, *turns: Contribution) -> Tensor:
        home = next((turn for turn in turns if self._is_home(turn)), None)
        if home is None and self._memory is not None:
            return self._memory()
        self._home = turns[0] if home is None else home
        return self._home.values

    def _release(self, turn: Contribution) -> None:
        if turn is not self._home:
            turn.release()

    def _load(self, turn: Contribution) -> None:
        if turn.coded:
            self._codec.decode(turn.values, self.total)
        else:
            self.total.copy_(turn.values)

    def _add(self, turn: Contribution) -> None:
        if turn.coded:
            self._codec.add(turn.values, self.total)
        elif self._arithmetic.narrow:
            values = turn.values.to(self.total.dtype)
            self._arithmetic.fold(self.total, values, self.total)
        elif turn.final and self._home is not None:
            self._arithmetic.fold(self.total, turn.values, turn.values)
            self.total = turn.values
            self._home.release()
            self._home = turn
        else:
            self._arithmetic.fold(self.total, turn.values, self.total)
