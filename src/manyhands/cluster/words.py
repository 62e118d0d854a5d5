"""Words: what a failed rank said last, short enough to be shown on top."""

from __future__ import annotations

import os
import re
from pathlib import Path

from manyhands.core.address import redact

MAX_WORDS_BYTES = 4096
_TAIL_BYTES = 1 << 16
_AFTER_BYTES = 2048  # of what follows the frames of a traceback: messages of several lines
_MOST_LINES = 20  # where there is no traceback
_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # put before each line by torch.distributed
_FIRST = "Traceback (most recent call last):"
_CLUSTER_CODE = re.compile(r"mhc1-[\w-]+", re.IGNORECASE)


def words_of(log: Path) -> str:
    """The last words in a log; empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read(_TAIL_BYTES)
            return last_words(tail if size <= _TAIL_BYTES else tail.partition(b"\n")[2] or tail)
    except OSError:
        return ""


def last_words(tail: bytes) -> str:
    """The last traceback in the tail of a log, else its last lines: at most MAX_WORDS_BYTES."""
    text = _RANK.sub("", tail.decode(errors="replace")).rstrip()
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.strip() == _FIRST]
    if starts:
        end = starts[-1] + 1
        while end < len(lines) and lines[end].startswith(" "):
            end += 1
        frames = "\n".join(lines[starts[-1] : end])
        after = "\n".join(lines[end:]).encode()[:_AFTER_BYTES].decode(errors="ignore")
        text = f"{frames}\n{after}".rstrip()
    else:
        text = "\n".join(lines[-_MOST_LINES:])
    # Secrets go before the cut: half of one is not recognised. The patterns take long for long
    # texts, so there is a cut before that too; the word that it falls into is left out.
    text = _CLUSTER_CODE.sub("mhc1-***", redact(_end_of(text, 2 * MAX_WORDS_BYTES)))
    return text.encode()[-MAX_WORDS_BYTES:].decode(errors="ignore")


def _end_of(text: str, max_bytes: int) -> str:
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    return re.sub(r"^\S*\s", "", data[-max_bytes:].decode(errors="ignore"))
