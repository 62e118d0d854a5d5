"""What a hub remembers on disk, so that a restarted hub is the same hub.

    STATE/key.pem, cert.pem   its identity: peers have pinned it
    STATE/token               what peers must know
    STATE/runs/RUN.json       the newest view of each run

Files are written beside their place and renamed, readable by the owner only.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

import msgspec

from manyhands.core.errors import SettingsError
from manyhands.core.peers import NO_VIEW, View
from manyhands.links.tls import create_identity, fingerprint_of


class Journal:
    """A hub's memory; without a folder it forgets everything with the process."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock: int | None = None
        if folder is not None:
            try:
                (folder / "runs").mkdir(parents=True, exist_ok=True, mode=0o700)
                folder.chmod(0o700)
                self._lock = _lock(folder)
            except OSError as error:
                raise SettingsError(
                    f"a hub cannot keep its state in {folder}: {error.strerror}",
                    hint="name a folder of yours with --state",
                ) from None
        key, certificate = self._read("key.pem"), self._read("cert.pem")
        if key is None or certificate is None:
            key, certificate = create_identity()
            self._write("key.pem", key)
            self._write("cert.pem", certificate)
        token = self._read("token")
        if token is None:
            token = secrets.token_urlsafe(24).encode()
            self._write("token", token)
        self.key_pem, self.certificate_pem = key, certificate
        self.token = token.decode().strip()
        self.fingerprint = fingerprint_of(certificate)

    def close(self) -> None:
        """Let another hub have the folder. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def view(self, run: str) -> View | None:
        """The last view of a run, if there was one."""
        text = self._read(f"runs/{run}.json")
        if text is None:
            return None
        try:
            return msgspec.json.decode(text, type=View)
        except msgspec.DecodeError as error:
            raise SettingsError(
                f"the hub's record of run {run!r} cannot be read: {error}",
                hint=f"remove {self._folder}/runs/{run}.json; peers that come back restore it",
            ) from None

    def save_view(self, run: str, view: View) -> None:
        """Remember the newest view of a run."""
        # A run that never had an active peer has nothing that its peers could not tell again.
        if self._folder is not None and view.cut != NO_VIEW:
            # Not synced: a crash of the machine may lose it, and the next era makes up for that.
            self._write(f"runs/{run}.json", msgspec.json.encode(view), sync=False)

    def _read(self, name: str) -> bytes | None:
        if self._folder is None:
            return None
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def _write(self, name: str, data: bytes, *, sync: bool = True) -> None:
        if self._folder is None:
            return
        place = self._folder / name
        beside = place.with_name(f".{place.name}.{os.getpid()}")
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(place)


def _lock(folder: Path) -> int:
    """Two hubs with one identity would each tell their peers another truth."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SettingsError(
            f"another hub is using {folder}",
            hint="stop it, or give this one a folder of its own with --state",
        ) from None
    return descriptor
