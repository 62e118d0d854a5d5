"""Scalars: numbers that travel with a round, and come back the same to all peers.

Most are means over the samples of the round. A word is no mean but one peer's: that of the first of
the roster that has said one. They are the only numbers that all peers have in common: what steers a
loop (early stopping, a plateau) must be one of these.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple, SupportsFloat

import msgspec

from manyhands.collectives.messages import NOTES_BYTES, Part, SelfReport
from manyhands.core.errors import Malformed, UsageError
from manyhands.replica.deviation import Compared, compare
from manyhands.replica.news import Bulletin, News, gather

_NAME_BYTES = 64
_MOST = 64  # scalars of a round: their lines fit into a message
_Name = Annotated[str, msgspec.Meta(max_length=_NAME_BYTES)]


class Total(NamedTuple):
    """A weighted sum, and the weight."""

    sum: float = 0.0
    weight: float = 0.0

    def plus(self, other: Total) -> Total:
        return Total(self.sum + other.sum, self.weight + other.weight)


class Key(NamedTuple):
    """`late`: of the round before; it was said after that round had closed here."""

    name: _Name
    late: bool


class Line(NamedTuple):
    """One scalar in a message."""

    name: _Name
    late: bool
    sum: float
    weight: float


class Said(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The scalars of one peer's report, and its news."""

    lines: tuple[Line, ...]
    words: dict[_Name, float]
    news: Bulletin | None = None


class Notes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the reports of all members come to: which tensors anybody used, the scalars, who has
    not the bits that it should have, and what peers tell.
    """

    used: bytes
    lines: tuple[Line, ...]
    words: dict[_Name, float]
    compared: Compared
    news: tuple[Bulletin, ...] = ()


_SAID = msgspec.msgpack.Decoder(Said)
_NOTES = msgspec.msgpack.Decoder(Notes)
_ENCODE = msgspec.msgpack.Encoder().encode


class Scalars:
    """One peer's part in them. The engine reads the report; all else is the user's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = -1
        self._round = -1  # that `used` and `now` are of; `late` is of the one before
        self._used: list[bool] = []
        self._said: dict[str, list[SupportsFloat]] = {}  # of the pass under way
        self._now: dict[str, Total] = {}
        self._late: dict[str, Total] = {}
        self._words: dict[str, float] = {}  # that no record has brought back yet
        self._reported: dict[str, float] = {}  # those of them that the newest report has
        self._reported_in = -1  # its round: without samples, perhaps one that is yet to come here
        self.known: dict[str, tuple[int, float]] = {}  # by name: the newest round, and its mean
        self.agreed: dict[str, tuple[int, float]] = {}  # the same of words
        self.latest: dict[str, float] = {}  # the means of the last round, or evaluation
        self.compared = Compared()  # of the newest round
        self.news = News()

    # -- what is said ---------------------------------------------------------------------------

    def say(self, name: str, value: SupportsFloat) -> None:
        """A mean over the samples of the pass under way. It becomes a number when that has ended:
        a GPU may still compute it.
        """
        _check(self._said, name)
        self._said.setdefault(name, []).append(value)

    def say_after(self, name: str, value: float, weight: float, *, closed: bool) -> None:
        """The same of a pass whose backward is done. `closed`: its round is, and it comes late."""
        if weight <= 0:
            return  # it may be no number
        with self._lock:
            _add(self._late if closed else self._now, name, Total(value * weight, weight))

    def give_word(self, name: str, value: float) -> None:
        """It goes with this peer's next report, samples or not."""
        with self._lock:
            _check(self._words, name)
            self._words[name] = value

    def restart(self) -> None:
        """With another engine, whose generations are others: no pass so far counts."""
        with self._lock:
            self._generation = -1

    def begin_pass(self, round_: int) -> None:
        """Nothing is said of it yet."""
        self._said = {}
        with self._lock:
            if round_ != self._round:
                if round_ != self._round + 1:
                    self._late = {}
                self._round, self._used, self._now = round_, [], {}

    def end_pass(self, generation: int, weight: float, used: Sequence[bool]) -> None:
        """It is about to be contributed; what was said of passes that do not count is void."""
        with self._lock:
            if generation != self._generation:
                self._generation, self._used, self._now = generation, [], {}
            before = self._used or [False] * len(used)
            self._used = [a or b for a, b in zip(before, used, strict=True)]
            if weight > 0:
                for name, values in self._said.items():
                    total = sum(map(float, values))
                    _add(self._now, name, Total(total * weight, len(values) * weight))
            self._said = {}

    # -- seams of the engine --------------------------------------------------------------------

    def report(self, round_: int, report: SelfReport) -> SelfReport:
        """What this peer says with part 0. Without samples it says so before its turn comes."""
        with self._lock:
            words = self._reported = dict(self._words)
            self._reported_in = round_
            if round_ != self._round:
                said = _fitting(Said((), words, self.news.report()))
                return msgspec.structs.replace(report, scalars=said)
            lines = [Line(n, False, *t) for n, t in self._now.items()]
            lines += [Line(n, True, *t) for n, t in self._late.items()]
            said = _fitting(Said(tuple(lines), words, self.news.report()))
            return msgspec.structs.replace(report, used=_pack(self._used), scalars=said)

    def note(self, parts: Sequence[Part]) -> bytes:
        """What the lead makes of everybody's; `parts` are in the order of the roster."""
        used = 0
        totals: defaultdict[Key, Total] = defaultdict(Total)
        words: dict[str, float] = {}
        news: list[Bulletin] = []
        for part in parts:
            if part.report is None:
                continue
            # One whose samples were refused has none any more: nothing that it said counts. (The
            # samples of an evaluation have no weight, and do count.)
            counts = bool(part.ranges)
            used |= int.from_bytes(part.report.used, "little") if counts else 0
            try:
                said = _SAID.decode(part.report.scalars)
            except msgspec.DecodeError:
                continue  # no number of a peer's that speaks another language
            words = {**said.words, **words}
            news += [] if said.news is None else [said.news]
            for line in (line for line in said.lines if counts or line.late):
                key = Key(line.name, line.late)
                totals[key] = totals[key].plus(Total(line.sum, line.weight))
        lines = tuple(Line(*key, *total) for key, total in totals.items())
        compared = compare([part.report.fingerprint for part in parts if part.report is not None])
        bits = used.to_bytes(-(-used.bit_length() // 8), "little")
        return _fitting(Notes(bits, lines, words, compared, gather(news)))

    # -- what has come of it --------------------------------------------------------------------

    def pass_by(self, round_: int, notes: bytes) -> None:
        """A round that no loop knows of: what was said late, and words, wait for the next one.

        Raises Malformed.
        """
        with self._lock:
            if self._round == round_ - 1:
                self._round, self._used, self._now = round_, [], {}
        found = _decode(round_, notes)
        self.compared = found.compared
        self.news.hear(found.news)

    def committed(self, round_: int, notes: bytes, num_tensors: int) -> list[bool]:
        """Take in the means; returns which tensors anybody used. Raises Malformed."""
        with self._lock:
            self._late = {}
            if self._reported_in == self._round:
                # What was said since, without samples after the report has gone, is for the next.
                heard, self._reported = self._reported, {}
                self._words = {n: w for n, w in self._words.items() if heard.get(n) is not w}
        self.latest = {}
        if not notes:
            return [True] * num_tensors
        found = _decode(round_, notes)
        self.compared = found.compared
        self.news.hear(found.news)
        for name, late, total, weight in found.lines:
            mean = total / weight if weight else math.nan
            self.known[name] = (round_ - 1 if late else round_, mean)
            if not late:
                self.latest[name] = mean
        for name, word in found.words.items():
            self.agreed[name] = (round_, word)
        used = int.from_bytes(found.used, "little")
        return [bool(used >> i & 1) for i in range(num_tensors)]


def _fitting(said: Said | Notes) -> bytes:
    """As bytes. News that find no room wait for another round."""
    data = _ENCODE(said)
    if len(data) <= NOTES_BYTES:
        return data
    empty = None if isinstance(said, Said) else ()
    return _ENCODE(msgspec.structs.replace(said, news=empty))


def _decode(round_: int, notes: bytes) -> Notes:
    try:
        return _NOTES.decode(notes)
    except msgspec.DecodeError as error:
        raise Malformed(f"the notes of round {round_} are none: {error}") from None


def _add(totals: dict[str, Total], name: str, more: Total) -> None:
    _check(totals, name)
    totals[name] = totals.get(name, Total()).plus(more)


def _check(among: Mapping[str, object], name: str) -> None:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise UsageError(f"a scalar is called {name!r}", hint="give it a name in UTF-8") from None
    if not 0 < size <= _NAME_BYTES:
        raise UsageError(f"a scalar's name has 1 to {_NAME_BYTES} bytes in UTF-8, not {size}")
    if name not in among and len(among) >= _MOST:
        raise UsageError(f"more than {_MOST} scalars in one round", hint="average fewer")


def _pack(bits: Sequence[bool]) -> bytes:
    number = sum(1 << i for i, bit in enumerate(bits) if bit)
    return number.to_bytes(-(-number.bit_length() // 8), "little")
