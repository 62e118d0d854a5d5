"""Parts: how a flat tensor is cut, and who adds up which piece."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """Elements [start, stop) of the flat tensor, added up by the `owner`-th member."""

    k: int
    start: int
    stop: int
    owner: int


_ALIGN = 64  # elements: every part but the last ends at a boundary that vector units like


def cut_parts(numel: int, itemsize: int, num_owners: int, part_bytes: int) -> tuple[Part, ...]:
    """Parts of at most `part_bytes` and of nearly one size, the same number for every owner.

    Part k belongs to member k mod n. None is empty: a small tensor has fewer parts than owners.
    """
    if numel == 0:
        return ()
    most = max(1, part_bytes // itemsize)
    turns = -(-numel // (num_owners * most))  # parts of each owner
    size = -(-numel // (num_owners * turns))
    size = min(most, -(-size // _ALIGN) * _ALIGN)
    return tuple(
        Part(k, start, min(start + size, numel), k % num_owners)
        for k, start in enumerate(range(0, numel, size))
    )
