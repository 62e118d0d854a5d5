"""Traces: the tracebacks of programs that were interrupted, as one line each."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANK = re.compile(rb"\[rank\d+\]: ")  # put before each line by torch.distributed
_FIRST = b"Traceback (most recent call last):"
_LAST = b"KeyboardInterrupt"
_MOST_LINES = 1000  # what is longer is no traceback, and would be held without end


class Traces:
    """Passes lines on; of a traceback that ends in a Ctrl-C, where the program was.

    Many copies of one program would fill a screen with what nobody asked for. Other tracebacks
    pass as they are, once their last line is there.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []

    def feed(self, lines: Iterable[bytes]) -> list[bytes]:
        """What is to be shown, now that these lines have come."""
        shown: list[bytes] = []
        for line in lines:
            bare = _bare(line)
            if not self._held and bare != _FIRST:
                shown.append(line)
            elif len(self._held) < _MOST_LINES and (not self._held or bare.startswith(b" ")):
                self._held.append(line)
            else:
                held, self._held = self._held, []
                shown += [_brief(held)] if bare.strip() == _LAST else [*held, line]
        return shown

    def finish(self) -> list[bytes]:
        """What is left, if the stream ended within a traceback."""
        held, self._held = self._held, []
        return held


def _bare(line: bytes) -> bytes:
    prefix = _RANK.match(line)
    return line if prefix is None else line[prefix.end() :]


def _brief(held: list[bytes]) -> bytes:
    lines = [_bare(line).strip() for line in held]
    frames = [line for line in lines if line.startswith(b'File "')]
    places = b" ... ".join(dict.fromkeys([*frames[:1], *frames[-1:]]))
    return b"interrupted: " + (places or _LAST)
