"""Locks: files that are locked from their first moment, where the file system has locks."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What a file system says that has none."""


def create_locked(path: Path, mode: int = 0o666) -> int:
    """A new file, open for writing and locked for its writer alone, as a descriptor; without a
    lock where there are none. Raises FileExistsError, and other OSErrors.
    """
    while True:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(file)
                raise
        if os.fstat(file).st_nlink:
            return file
        os.close(file)  # cleared between our two calls: a file without a lock has no writer
