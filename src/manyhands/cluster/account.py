"""Account: the user whom the ranks of a host run as, if not the agent's own."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path
from typing import NamedTuple

from manyhands.cluster.keeper import User
from manyhands.core.errors import UsageError


class Account(NamedTuple):
    """Another user than the agent's."""

    name: str
    home: str
    user: User

    @property
    def owner(self) -> tuple[int, int]:
        """For chown."""
        return self.user["uid"], self.user["gid"]


def account_of(name: str | None) -> Account | None:
    """None for the agent's own. Raises UsageError: no such user, or not ours to become."""
    if name is None:
        return None
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise UsageError(
            f"there is no user {name!r} on this host",
            hint="--user NAME: one for whom `id NAME` has an answer; or leave it out",
        ) from None
    if entry.pw_uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        raise UsageError(
            f"only root can run jobs as another user ({name}), and this agent is not root",
            hint=f"start the agent as {name} or as root, or leave --user out",
        )
    groups = os.getgrouplist(name, entry.pw_gid)
    return Account(name, entry.pw_dir, User(uid=entry.pw_uid, gid=entry.pw_gid, groups=groups))


def check_way(account: Account, folder: Path) -> None:
    """Raise UsageError unless the user may pass through to `folder` (which need not exist)."""
    for parent in reversed(folder.absolute().parents):
        if parent.exists() and not _may_pass(account, parent.stat()):
            raise UsageError(
                f"jobs of {account.name} could not reach {folder}: {parent} is closed to them",
                hint="give the agent a state folder that they can reach: --state /var/lib/...",
            )


def _may_pass(account: Account, found: os.stat_result) -> bool:
    uid, _ = account.owner
    if found.st_uid == uid:
        return bool(found.st_mode & stat.S_IXUSR)
    if found.st_gid in account.user["groups"]:
        return bool(found.st_mode & stat.S_IXGRP)
    return bool(found.st_mode & stat.S_IXOTH)
