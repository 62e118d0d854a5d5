"""Starters: how `up` brings an agent to life on a host.

    this machine    a process in a session of its own
    elsewhere       ssh, as the user's own ssh would go there, and the same command at the far end

The join code, a secret, goes in by stdin: a command line and an environment can be read by others.
An agent is told to leave by its coordinator. When ssh dies, or `up` does, the agent lives on until
it is told so or its lease ends: a connection that breaks must not end a week of training.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from manyhands.cluster.holder import LOCK, Holder
from manyhands.core.errors import ManyhandsError, SettingsError

HELD = 75
"""The exit code (EX_TEMPFAIL) of an agent that found another one at work in its folder."""
SSH = "ssh"
_SSH_OPTIONS = (
    *("-o", "BatchMode=yes"),  # nobody is there to type a password
    *("-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=15"),
    *("-o", "ServerAliveCountMax=4"),
    "-T",
)
# Of several kinds: two of one kind may arrive as one, and some may be ignored (nohup).
_HURRY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TAIL_BYTES = 4096
_TAIL_LINES = 6
_SSH_FAILED = 255
_NO_PROGRAM = 127


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    """An agent to start."""

    name: str
    """Of the host, in the cluster."""
    address: str
    """For ssh, with the user if there is one; not used on this machine."""
    arguments: tuple[str, ...]
    """What follows `manyhands agent -`: nothing secret."""
    code: str = field(repr=False)
    """The join code: a secret."""
    log: Path
    """Where what it says is appended."""
    state: Path | None = None
    """The folder that it works in, where it is one of this machine."""


class Minded(Protocol):
    """A process on this machine that is an agent, or leads to one."""

    @property
    def pid(self) -> int:
        """Its id here."""
        ...

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Blocks until it ends; its exit code as subprocess has it. None if it did not in time."""
        ...

    def ask(self) -> None:
        """SIGTERM: it ends its jobs, each with its grace, and goes."""
        ...

    def hurry(self) -> None:
        """It ends its jobs at once, and goes."""
        ...

    def kill(self) -> None:
        """SIGKILL: what it ran on this machine notices, and ends at once."""
        ...


class Starter(Protocol):
    """A way to start agents."""

    def start(self, errand: Errand) -> Started:
        """Does not wait for it to do anything. Raises ManyhandsError: it cannot even be begun."""
        ...

    def adopt(self, errand: Errand) -> Minded | None:
        """The agent that works in its folder already, if it can be minded from here."""
        ...


class Started:
    """A child: Minded."""

    def __init__(
        self, process: subprocess.Popen[bytes], log: Path, begins: int, *, is_far: bool
    ) -> None:
        self._process, self._log, self._begins = process, log, begins
        self._is_far = is_far

    @property
    def pid(self) -> int:
        """Its id here."""
        return self._process.pid

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Blocks until it ends; None if it did not in time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def leaves_doubt(self, code: int) -> bool:
        """Whether an agent may be at work for its host though this has ended with `code`: it was
        ssh that died, or another agent was there already.
        """
        return code == HELD or (self._is_far and (code == _SSH_FAILED or code < 0))

    def ask(self) -> None:
        """SIGTERM: it ends its jobs, each with its grace, and goes."""
        self._process.terminate()

    def hurry(self) -> None:
        """Two signals mean: end the jobs at once, and go. ssh knows nothing of that: it ends."""
        for number in _HURRY:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL: what it ran on this machine notices, and ends at once."""
        self._process.kill()

    def last_words(self) -> tuple[str, ...]:
        """The last lines that it wrote, since it was started; none if its log cannot be read."""
        try:
            with self._log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._begins, end - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:  # somebody cleared it away: the agent is minded even so
            return ()
        return tuple([line for line in lines if line.strip()][-_TAIL_LINES:])


class Adopted:
    """An agent of this machine that an `up` before this one started: Minded.

    It is no child, so its exit code is not known: it ended, and that is all.
    """

    def __init__(self, holder: Holder) -> None:
        self._holder = holder

    @property
    def pid(self) -> int:
        """Its id here."""
        return self._holder.pid

    def wait(self, timeout_s: float | None = None) -> int | None:
        """0 when it has ended. By one thread, once."""
        if not self._holder.wait(timeout_s):
            return None
        self._holder.close()
        return 0

    def ask(self) -> None:
        self._holder.send(signal.SIGTERM)

    def hurry(self) -> None:
        for number in _HURRY:
            self._holder.send(number)

    def kill(self) -> None:
        self._holder.send(signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class LocalStarter:
    """Agents on this machine. They are no children of a terminal: Ctrl-C reaches `up` alone."""

    command: tuple[str, ...] = ()
    """What `manyhands` is; by default, this Python's."""

    def start(self, errand: Errand) -> Started:
        command = [*(self.command or python_command(sys.executable)), "agent", "-"]
        return _start([*command, *errand.arguments], errand, is_far=False)

    def adopt(self, errand: Errand) -> Adopted | None:
        holder = None if errand.state is None else Holder.of(errand.state / LOCK)
        return None if holder is None else Adopted(holder)


@dataclass(frozen=True, kw_only=True)
class SshStarter:
    """Agents on hosts that ssh leads to without a question."""

    ssh: tuple[str, ...] = (SSH,)
    command: tuple[str, ...] = ()
    """What `manyhands` is over there; by default, the same Python at the same path."""

    def start(self, errand: Errand) -> Started:
        command = [*(self.command or python_command(sys.executable)), "agent", "-"]
        remote = "exec " + shlex.join([*command, *errand.arguments])
        # The first of two values counts for ssh: what the user says comes before ours.
        options = _SSH_OPTIONS if Path(self.ssh[0]).name == SSH else ()
        return _start([*self.ssh, *options, errand.address, remote], errand, is_far=True)

    def adopt(self, errand: Errand) -> None:
        """It is not on this machine: the coordinator alone can tell it to leave."""


def python_command(python: str) -> tuple[str, ...]:
    """`manyhands` by the path of a Python. -P: a file of the user's in this folder is no module."""
    return (python, "-P", "-m", "manyhands")


def parse_ssh(text: str) -> tuple[str, ...]:
    """The words of --ssh. Raises SettingsError."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise SettingsError(f"--ssh {text!r}: {error}", hint="quote it as for a shell") from None
    if not words:
        raise SettingsError("--ssh is empty", hint="such as --ssh 'ssh -i KEY -p PORT'")
    return words


def why(errand: Errand, code: int, words: Sequence[str]) -> tuple[str, str]:
    """What became of an agent that ended with this code and these words, and the remedy."""
    said = "\n".join(words)
    by_hand = f"ssh {errand.address} true"
    if code == _SSH_FAILED and "host key verification failed" in said.lower():
        return "ssh does not know the host", f"type once, and answer: {by_hand}"
    if code == _SSH_FAILED and "permission denied" in said.lower():
        return "ssh was not let in", f"a key for it (ssh-copy-id {errand.address}); try: {by_hand}"
    if code == _SSH_FAILED:
        return "ssh did not get there", f"try: {by_hand}"
    if code in (_NO_PROGRAM, 126):
        return "there is no such Python", "--python PATH: where one with manyhands is, over there"
    if "No module named" in said:
        return "its Python has no manyhands", "install it there, or --python PATH of one that has"
    if code < 0:
        return f"it was killed by signal {-code}", f"its log: {errand.log}"
    return f"it ended with code {code}", f"its log: {errand.log}"


def _start(command: Sequence[str], errand: Errand, *, is_far: bool) -> Started:
    with _open_log(errand.log) as log:
        begins = log.seek(0, os.SEEK_END)
        try:
            process = subprocess.Popen(  # noqa: S603 - no shell on this side
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise ManyhandsError(
                f"cannot start {command[0]}: {error.strerror}", hint="--ssh 'COMMAND' for another"
            ) from None
    assert process.stdin is not None
    # One that is gone already reads nothing; what it died of is in its log and its exit code.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(errand.code.encode() + b"\n")
        process.stdin.flush()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    return Started(process, errand.log, begins, is_far=is_far)


def _environment() -> dict[str, str]:
    """Ours, less what is about this cluster or another one: an agent has its options."""
    return {key: value for key, value in os.environ.items() if not key.startswith("MANYHANDS_")}


def _open_log(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        raise SettingsError(
            f"cannot write the log {path}: {error.strerror}", hint="--logdir DIR that can be"
        ) from None
