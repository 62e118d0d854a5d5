"""Offline: what the files have that wandb has written without a network.

Of a process that was killed wandb loses what it had not written yet. So how far a run has come is
read from its files, and not from what was sent. They are logs as LevelDB has them, behind seven
bytes of wandb's own: blocks with pieces, one or several of which are a record.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from glob import escape
from pathlib import Path
from typing import Any

from manyhands.observe.base import load

_HEAD_BYTES = 7  # of a file
_BLOCK_BYTES = 32 << 10
_PIECE = struct.Struct("<IHB")  # checksum, size and kind of what follows
_PADDING, _WHOLE, _LAST = 0, 1, 4  # kinds; others are followed by more of the same record


def last_step(folder: Path, id: str, axis: str) -> int:
    """The greatest value of `axis` in the files of this run; -1 if there is none."""
    name = escape(id)
    files = folder.glob(f"offline-run-*-{name}/run-{name}.wandb")
    return max((step for file in files for step in _steps_in(file, axis)), default=-1)


def rows_in(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, up to where it was cut off."""
    proto = load("wandb.proto.wandb_internal_pb2").Record
    for data in records_in(file.read_bytes()):
        record = proto()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}


def records_in(data: bytes) -> Iterator[bytes]:
    """The records of a log that were written to their end."""
    at, record = _HEAD_BYTES, b""
    while at + _PIECE.size <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _PIECE.size:  # no piece begins so late in a block
            at += left
            continue
        _, size, kind = _PIECE.unpack_from(data, at)
        if kind == _PADDING:
            at += left
            continue
        at += _PIECE.size
        if at + size > len(data):
            return
        record += data[at : at + size]
        at += size
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""


def _steps_in(file: Path, axis: str) -> Iterator[int]:
    for row in rows_in(file):
        step = row.get(axis)
        if isinstance(step, int):
            yield step
