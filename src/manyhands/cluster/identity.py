"""A cluster's identity: what its callers know it by, and what it knows them by.

    STATE/key.pem, cert.pem   pinned by its agents and users
    STATE/token               the users' token
    STATE/agent-token         the agents' token
    STATE/address             where it listens: https://127.0.0.1:12347
    STATE/code                a user code: all that users of other machines need
    STATE/logdir              where it keeps logs

Files that only their owner can read, written beside their place and renamed: a coordinator that is
killed while it makes them leaves none or all of one.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.cluster.logs import has_logs
from manyhands.cluster.routes import Role
from manyhands.core.errors import SettingsError
from manyhands.core.text import printable
from manyhands.links.tls import create_identity, fingerprint_of

TOKEN, AGENT_TOKEN, ADDRESS, CODE, LOGS, KEY, CERTIFICATE = (
    "token",
    "agent-token",
    "address",
    "code",
    "logdir",
    "key.pem",
    "cert.pem",
)
_HERE = ("localhost", "127.0.0.1", "::1")
_OF_ROOT = Path("/var/lib/manyhands")


def default_state(environ: Mapping[str, str] | None = None) -> Path:
    """Where a cluster keeps its state unless it is told otherwise."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "manyhands" / "cluster"


def default_agent_state(address: str, port: int, host: str, user: str | None) -> Path:
    """Where an agent keeps its state: one folder for each coordinator (its address and port) and
    name, so that agents of several clusters can share a machine, and machines a home.

    `user`: whom its jobs run as, if not the agent's own.
    """
    base = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "manyhands"
    if user is not None:
        base = _OF_ROOT  # a folder of root's own is closed to the user of the jobs
    return base / "agents" / re.sub(r"[^A-Za-z0-9.]", "-", f"{address}-{port}") / host


def agents_of_root(fingerprint: str) -> Path:
    """Where the agents of this machine that `up --user` starts keep their state, by host: one
    folder for each cluster, so that none that comes to the same address has another's.
    """
    return _OF_ROOT / "agents" / fingerprint[:32]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Key and certificate as PEM, and a token for each role."""

    key_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)
    tokens: dict[Role, str] = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, hex."""
        return fingerprint_of(self.certificate_pem)


def open_identity(state: Path) -> Identity:
    """The identity in this folder, made at the first time. One caller at a time (`up` holds the
    folder's lock). Raises SettingsError.
    """
    try:
        # One that was there stays as it is: it may be others' too. Every file is private.
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        key, certificate = _read(state / KEY), _read(state / CERTIFICATE)
        if not key or not certificate:
            key, certificate = create_identity("manyhands coordinator", _HERE)
            _write(state / KEY, key)
            _write(state / CERTIFICATE, certificate)
        tokens = {
            Role.USER: _token(state / TOKEN),
            Role.AGENT: _token(state / AGENT_TOKEN),
        }
    except OSError as error:
        raise SettingsError(
            f"a cluster cannot keep its identity in {state}: {error.strerror}",
            hint="name a folder of yours with --state",
        ) from None
    return Identity(key_pem=key, certificate_pem=certificate, tokens=tokens)


def write_address(state: Path, url: str, code: str = "") -> None:
    """Says to the users of this machine where the cluster is, and keeps a code for others."""
    _write(state / ADDRESS, url.encode() + b"\n")
    if code:
        _write(state / CODE, code.encode() + b"\n")


def moved_logs(state: Path, logdir: Path) -> str:
    """Remembers where logs are kept; where they were before, '' if they were here or nowhere."""
    try:
        before = os.fsdecode((state / LOGS).read_bytes())
    except FileNotFoundError:
        before = ""
    except OSError as error:
        raise _cannot(state / LOGS, "read", error) from None
    if before == str(logdir):
        return ""
    try:
        _write(state / LOGS, os.fsencode(logdir))
    except OSError as error:
        raise _cannot(state / LOGS, "written", error) from None
    return printable(before) if before and has_logs(Path(before)) else ""


def _cannot(path: Path, done: str, error: OSError) -> SettingsError:
    return SettingsError(
        f"{path} cannot be {done}: {error.strerror}",
        hint="look at the disk and the permissions of --state",
    )


def read_text(path: Path) -> str:
    """A file of the identity, '' where there is none. Raises SettingsError where it cannot be
    read.
    """
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or 'not text'}",
            hint="it belongs to whoever ran `manyhands up`, who has a user code for you (the file "
            "`code` beside it): set MANYHANDS_COORDINATOR to that, and give no --state",
        ) from None


def read_fingerprint(state: Path) -> str:
    """The fingerprint of the cluster of this folder, '' where there is none."""
    pem = read_text(state / CERTIFICATE)
    try:
        return fingerprint_of(pem.encode()) if pem else ""
    except ValueError:
        raise SettingsError(
            f"{state / CERTIFICATE} is not a certificate",
            hint="remove it and key.pem, and start the cluster again",
        ) from None


def _token(path: Path) -> str:
    token = (_read(path) or b"").decode("ascii", "replace").strip()
    if not token:
        token = secrets.token_urlsafe(24)
        _write(path, token.encode())
    elif len(token) < 16 or not token.isascii() or not token.isprintable():
        raise SettingsError(
            f"{path} has no token that can be used",
            hint="at least 16 printable characters; remove the file to have one made",
        )
    return token


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
