"""An attempt, as the agent has it: ready, running under a keeper, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired

import msgspec

from manyhands.cluster import keeper
from manyhands.cluster.comparison import Held
from manyhands.cluster.devices import cores_of
from manyhands.cluster.job import Failure
from manyhands.cluster.ledger import End, Key, Record, decoded_record, read_record
from manyhands.cluster.messages import Holding, Phase, RankEnd, Slot, Want
from manyhands.cluster.words import words_of

KEEPER_PATIENCE_S = 10.0
"""For a keeper to be gone after everything under it was to be killed."""
FLOODED = 128 + signal.SIGXFSZ
"""The exit code of a rank whose log took the room that is not its to take."""
AGENT_STOPPED = "the agent was stopped"
AGENT_KILLED = "the agent was killed"
KEEPER_KILLED = "the keeper was killed"
LEASE_ENDED = "the lease ended: the coordinator did not answer"
_SCRIPT = os.path.abspath(keeper.__file__)


class Attempt:
    """One thread. `phase` is ENDED only when no process of it is left."""

    def __init__(self, key: Key, host: str, folder: Path) -> None:
        self.key, self._host, self.folder = key, host, folder
        self.phase = Phase.READY
        self.stopping = False
        self.orphaned = False
        """Its keeper was killed: what it had kept is the agent's now."""
        self.overdue_s: float | None = None
        """When a keeper that was told to end is to be gone."""
        self.never_ran = False
        """This host had no room for it, or for all its ranks."""
        self.log_settled = False
        self.logs: dict[int, Path] = {}
        self._own_will = ""
        self._lost = ""
        self._words: str | None = None
        self._port: socket.socket | None = None
        self._number = 0
        self._keeper: Popen[bytes] | None = None
        self._read = b""
        self._record = Record()

    @classmethod
    def lost(
        cls, key: Key, host: str, folder: Path, why: str, *, never_ran: bool = False
    ) -> Attempt:
        """One that cannot be begun."""
        attempt = cls(key, host, folder)
        attempt.never_ran = never_ran
        attempt._end(why)
        return attempt

    @classmethod
    def declined(cls, key: Key, host: str, folder: Path) -> Attempt:
        """One that was to end before it was begun."""
        return cls.lost(key, host, folder, "")

    @classmethod
    def left(cls, key: Key, host: str, folder: Path, record: Record) -> Attempt:
        """One of an agent before this one, of which nothing runs any more."""
        attempt = cls(key, host, folder)
        attempt._record = record
        by_itself = record.done and record.cause in ("", "failure")
        # By name: which ranks there were need not have been written.
        for log in folder.glob("rank-*.log"):
            attempt.logs[int(log.stem.removeprefix("rank-"))] = log
        attempt._end("" if by_itself else AGENT_KILLED)
        return attempt

    @property
    def held(self) -> Held:
        """For `compare`."""
        return Held(self.phase, self.stopping, self.log_settled or not self.logs)

    @property
    def keeper_pid(self) -> int | None:
        """While it lives, or is not waited for."""
        return None if self._keeper is None else self._keeper.pid

    def fileno(self) -> int:
        """The keeper's reports, for a selector. Only while it runs."""
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        return self._keeper.stdout.fileno()

    def reserve_port(self) -> None:
        """A free port for rank 0, kept from others until the attempt starts."""
        # Bound, not listening: a rank of another host that comes too early is refused, as by a rank
        # 0 that is not there yet, and tries again.
        self._port = socket.socket()
        self._port.bind(("", 0))
        self._number = self._port.getsockname()[1]

    def start(self, order: keeper.Order, environment: dict[str, str], lock: int) -> None:
        """Hand the order to a new keeper, with the lock (which is closed here). Raises OSError."""
        self._release_port()
        self.logs = {rank["rank"]: Path(rank["log"]) for rank in order["ranks"]}
        try:
            # In a file, not through the pipe: a keeper that does not read would keep us waiting.
            keeper.write_atomically(str(self.folder / keeper.ORDER), json.dumps(order).encode())
            with (self.folder / "keeper.log").open("ab") as errors:
                self._keeper = Popen(  # noqa: S603 (our own file)
                    [sys.executable, "-I", "-S", _SCRIPT, str(self.folder), str(lock)],
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=errors,
                    env=environment,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
        finally:
            os.close(lock)
        assert self._keeper.stdin is not None
        os.set_blocking(self._keeper.stdin.fileno(), False)
        os.set_blocking(self.fileno(), False)
        self.phase = Phase.RUNNING

    def stop(
        self,
        grace_s: float,
        now_s: float,
        *,
        why: str = "",
        patience_s: float | None = None,
    ) -> None:
        """`why`: the agent's own reason, where the coordinator does not want it. A keeper that is
        not done after `patience_s` more (KEEPER_PATIENCE_S) will be `overdue_s`.
        """
        self.stopping = True
        if self.phase is Phase.READY:
            self._end(why)
        elif self.phase is Phase.RUNNING:
            self._own_will = self._own_will or why
            self._tell(f"stop {grace_s!r}" if grace_s > 0 else "kill")
            overdue_s = now_s + grace_s + (patience_s or KEEPER_PATIENCE_S)
            self.overdue_s = min(self.overdue_s or overdue_s, overdue_s)

    def fail(self, rank: int, words: str, now_s: float) -> None:
        """This rank did what none may, and all are ended for it, at once."""
        if self.phase is not Phase.RUNNING:
            return
        if self._record.failed is None:
            self._words = words
            failed = End(rank=rank, exit_code=FLOODED, at_s=time.time())
            self._record = msgspec.structs.replace(self._record, failed=failed)
        self.stop(0, now_s)  # also one that has failed before, and has its grace: it is to end

    def renew(self, until_s: float) -> None:
        """The lease is another now."""
        if self.phase is Phase.RUNNING:
            self._tell(f"lease {until_s!r}")

    def hear(self) -> bool:
        """Read what the keeper says; whether it has said its last. Then `settle`."""
        while True:
            try:
                data = os.read(self.fileno(), 65536)
            except BlockingIOError:
                return False
            if not data:
                return True
            *lines, self._read = (self._read + data).split(b"\n")
            for line in lines:
                self.note(line)

    def note(self, line: bytes) -> None:
        """One line of the keeper's: a record, or a part of one (see `keeper`)."""
        if (record := decoded_record(line)) is not None:
            self._note(record)

    def settle(self) -> None:
        """The keeper is gone: take its word, or the lack of it."""
        assert self._keeper is not None
        self._close_pipes()
        self._keeper.wait()  # it has closed its end: it is dead, or about to be
        self._keeper = None
        on_disk = read_record(self._record_file())
        if on_disk.done or len(on_disk.ends) > len(self._record.ends):
            self._note(on_disk)
        if self._record.done:
            self._end(self._reason())
            self.never_ran = self._record.cause == "error"
        else:
            self.orphaned = True
            groups = on_disk.groups or self._record.groups  # parts of a record have none
            for group in groups if sys.platform != "linux" else ():
                keeper.signal_group(group, signal.SIGKILL)

    def bury(self) -> None:
        """What a killed keeper left is gone too."""
        assert self.orphaned
        self.orphaned = False
        self.never_ran = self._record == Record()  # it died before it had begun
        # One that broke by itself has said why in its log, which goes with the folder.
        said = words_of(self.folder / "keeper.log").splitlines()[-1:]
        self._end(self._reason() or ": ".join([KEEPER_KILLED, *said]))

    def kill_keeper(self) -> None:
        """It did not do as it was told: what it kept comes to the agent."""
        self.overdue_s = None
        if self._keeper is not None:
            self._keeper.kill()

    def close(self) -> None:
        """Give up the port; a keeper that runs kills all, and is waited for."""
        self._release_port()
        if self._keeper is not None:
            self._close_pipes()
            self._keeper.send_signal(signal.SIGCONT)
            try:
                self._keeper.wait(KEEPER_PATIENCE_S)
            except TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
            self._keeper = None

    def holding(self) -> Holding:
        """As it is reported."""
        failed = self._record.failed
        return Holding(
            job=self.key.job,
            attempt=self.key.attempt,
            phase=self.phase,
            port=self._number,
            ended=tuple(
                RankEnd(rank=end.rank, exit_code=end.exit_code, at_s=end.at_s)
                for end in self._record.ends
            ),
            failure=None
            if failed is None
            else Failure(
                rank=failed.rank,
                host=self._host,
                exit_code=failed.exit_code,
                words=self._words or "",
            ),
            lost=self._lost,
            free=self.never_ran or self._lost == AGENT_STOPPED,
        )

    def _reason(self) -> str:
        """Why the end says nothing about the command; empty if it does, or was wished for."""
        reasons = {
            "lease": LEASE_ENDED,
            "agent": AGENT_KILLED,
            "error": self._record.error,
            # Most likely the agent was asked as well, and will see it in a moment.
            "signal": self._own_will or AGENT_STOPPED,
            "stop": self._own_will,
        }
        return reasons.get(self._record.cause, "")

    def _note(self, record: Record) -> None:
        """What is known already stays: a record may be a part, or one from before."""
        known = {end.rank for end in self._record.ends}
        new = tuple(end for end in record.ends if end.rank not in known)
        failed = self._record.failed or record.failed
        self._record = msgspec.structs.replace(record, ends=self._record.ends + new, failed=failed)
        if record.failed is not None and self._words is None:
            self._words = words_of(self.folder / f"rank-{record.failed.rank}.log")

    def _record_file(self) -> bytes:
        try:
            return (self.folder / keeper.RECORD).read_bytes()
        except OSError:
            return b""

    def _end(self, lost: str) -> None:
        self._release_port()
        self.overdue_s = None
        # A rank that failed by itself did so whatever came after.
        self._lost = lost if self._record.failed is None else ""
        if self._record.failed is not None and self._words is None:
            self._note(self._record)
        self.phase = Phase.ENDED

    def _tell(self, line: str) -> None:
        if self._keeper is None:  # killed, and what it left is being ended
            return
        assert self._keeper.stdin is not None
        # A dead keeper is seen by its other pipe, one that does not read by `overdue_s`.
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._keeper.stdin.fileno(), line.encode() + b"\n")

    def _close_pipes(self) -> None:
        assert self._keeper is not None
        for pipe in (self._keeper.stdin, self._keeper.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _release_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None


def order_of(
    want: Want,
    environments: dict[int, dict[str, str]],
    slots: Sequence[Slot],
    *,
    folder: Path,
    workdir: str,
    lease_until_s: float,
    user: keeper.User | None,
) -> keeper.Order:
    """What the keeper is to run. `slots` are all of the host's."""
    by_index = {slot.index: slot for slot in slots}
    cores = {rank: cores_of(by_index[index]) for rank, index in want.task.ranks}
    command = list(want.task.spec.command)
    beside = os.path.join(os.path.dirname(sys.executable), command[0])
    is_ours = "/" not in command[0] and "PATH" not in want.task.spec.env
    if user is not None and is_ours and os.access(beside, os.X_OK):
        # It is meant, also if it is closed to the user: exec would take the next Python there is.
        command[0] = beside
    return keeper.Order(
        command=command,
        workdir=workdir,
        ranks=[
            keeper.Rank(
                rank=rank,
                environment=environment,
                cores=cores[rank],
                log=str(folder / f"rank-{rank}.log"),
            )
            for rank, environment in environments.items()
        ],
        grace_s=want.task.spec.grace_s,
        lease_until_s=lease_until_s,
        user=user,
    )
