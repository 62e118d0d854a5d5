"""Folders of a test that other users may pass through."""

from __future__ import annotations

import stat
from pathlib import Path


def open_to_all(folder: Path) -> None:
    """It, and what is closed around it: where tests run in several processes pytest has made
    one more folder above it.
    """
    for one in (folder, *folder.parents):
        mode = stat.S_IMODE(one.stat().st_mode)
        if not mode & stat.S_IXOTH:
            one.chmod(mode | 0o011)
