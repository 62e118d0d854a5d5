"""Whole lines of what a process writes, for a screen that it shares with others."""

from __future__ import annotations

import math
import re

_BAR_S = 5.0  # between two pictures of one progress bar
_LINE_BYTES = 1 << 16  # more without an end is cut: it is no text
_MOVES = re.compile(rb"\x1b\[[0-9;]*[A-HJKSTf]")  # of the cursor: where others write, too


class Lines:
    """Cuts a stream into lines; bytes that are no text pass as they are.

    A progress bar draws over itself after a carriage return: of its pictures one every few
    seconds becomes a line, and the last one.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._drawn_s = -math.inf

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """The lines that are complete with `data`, without their ends."""
        *whole, rest = _MOVES.sub(b"", self._rest + data).split(b"\n")
        lines = [_last_picture(line) for line in whole]
        # What ends in a carriage return may go on with a line feed: it is not drawn over yet.
        end = b"\r" * rest.endswith(b"\r")
        before, _, current = rest.removesuffix(end).rpartition(b"\r")
        picture, rest = before.rpartition(b"\r")[2], current + end
        if picture.strip() and now_s >= self._drawn_s + _BAR_S:
            lines.append(picture)
            self._drawn_s = now_s
        if len(rest) > _LINE_BYTES:
            lines.append(rest)
            rest = b""
        self._rest = rest
        return lines

    def finish(self) -> list[bytes]:
        """The last line, if the stream ended within it."""
        rest, self._rest = _last_picture(self._rest), b""
        return [rest] if rest else []


def _last_picture(line: bytes) -> bytes:
    return line.removesuffix(b"\r").rpartition(b"\r")[2]
