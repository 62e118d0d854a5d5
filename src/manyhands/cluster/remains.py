"""Remains: agents of this machine that an `up` which was killed has left at work.

    STATE/agents/HOST/lock                            held by the agent
    /var/lib/manyhands/agents/FINGERPRINT/HOST/lock   with --user; of STATE/cert.pem

Agents that users started themselves are not among them. Where there is no /proc none is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from manyhands.cluster.holder import LOCK, Holder
from manyhands.cluster.identity import agents_of_root, read_fingerprint
from manyhands.cluster.messages import Origin

AGENTS = "agents"
"""In the state folder of a cluster: its agents of this machine, by host."""


class Remains:
    """The agents of a cluster whose coordinator is gone. Leaving the block lets go of them."""

    def __init__(self, state: Path) -> None:
        self._holders = [holder for lock in _locks(state) if (holder := _agent_of(lock))]

    def __enter__(self) -> Remains:
        return self

    def __exit__(self, *error: object) -> None:
        for holder in self._holders:
            holder.close()

    def __len__(self) -> int:
        return len(self._holders)

    def end(self, limit_s: float) -> bool:
        """Asks them to leave, with the graces of their jobs; blocks. Whether all have in time."""
        for holder in self._holders:
            holder.send(signal.SIGTERM)
        end_s = time.monotonic() + limit_s
        return all(holder.wait(max(0.0, end_s - time.monotonic())) for holder in self._holders)


def _locks(state: Path) -> Iterator[Path]:
    yield from state.glob(f"{AGENTS}/*/{LOCK}")
    if fingerprint := read_fingerprint(state):
        yield from agents_of_root(fingerprint).glob(f"*/{LOCK}")


def _agent_of(lock: Path) -> Holder | None:
    holder = Holder.of(lock)
    if holder is None:
        return None
    words: list[bytes] = []
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{holder.pid}/cmdline").read_bytes().split(b"\0")
    given = dict(pairwise(words))
    where = Path(os.fsdecode(given.get(b"--state", b""))).resolve()
    # What a lock says need not be of now: the process itself has to say that it works there.
    if given.get(b"--origin") == Origin.UP.value.encode() and where == lock.parent.resolve():
        return holder
    holder.close()
    return None
