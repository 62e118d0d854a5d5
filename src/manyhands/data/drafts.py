"""Drafts: files on their way to a name, at which they appear whole or not at all.

A draft is locked by its writer. The kernel drops a lock with its process: a draft without one is
left from a writer that was killed, and the next writer clears it.

A turn is for what takes long to write: of several processes that would write the same, one does,
and the others wait for it.
"""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from manyhands.core.locks import NO_LOCKS, create_locked

_LOOK_S = 0.05  # how often one that waits for its turn looks: there is no event to wait for


@dataclass(frozen=True, slots=True)
class Draft:
    """A file to write. Renamed, it is what it should be."""

    path: Path
    number: int
    """Of the open, locked file."""


@contextmanager
def drafting(
    folder: Path, name: str, mode: int = 0o666, *, clears: bool = True
) -> Generator[Draft]:
    """A new file in the folder, which is made; gone afterwards unless it was renamed. Its rights
    are those of `mode` that the user's mask leaves.

    What writers of this name have left that were killed is cleared; not so by `clears=False`, for
    whoever makes many and has just done it. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f".{glob.escape(name)}.*.draft") if clears else ():
        _clear(old)
    path = folder / f".{name}.{secrets.token_hex(8)}.draft"
    draft = Draft(path, create_locked(path, mode))
    try:
        yield draft
    finally:
        draft.path.unlink(missing_ok=True)
        os.close(draft.number)


@contextmanager
def turn(folder: Path, name: str, wait_s: float) -> Generator[None]:
    """Whoever else asks for a turn of this name in this folder waits until this one is over, or its
    process is. Look then whether what you wanted is there.

    Who has waited so long goes ahead, and so does everybody where there are no locks: a turn saves
    work, and nothing else depends on it. Raises nothing of its own.
    """
    path = folder / f".{name}.turn"
    number = _take_turn(path, wait_s)
    try:
        yield
    finally:
        if number is not None:
            with suppress(OSError):
                path.unlink()  # before the lock is gone: afterwards it might be another's
            os.close(number)


def _take_turn(path: Path, wait_s: float) -> int | None:
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not by a link: it would make a file wherever that leads.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            number = os.open(path, flags, 0o666)
        except OSError:
            return None  # whoever writes there will say what is wrong with it
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(number)
            if error.errno in NO_LOCKS:
                with suppress(OSError):
                    path.unlink()
                return None
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(_LOOK_S)
            continue
        if os.fstat(number).st_nlink:
            return number
        os.close(number)  # whoever had it before has removed it between our two calls


def _clear(draft: Path) -> None:
    try:
        number = os.open(draft, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # finished meanwhile, or another user's, who clears it
    try:
        # Held by a writer at work; or there are no locks here, and nobody can tell.
        with suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink()
    finally:
        os.close(number)
