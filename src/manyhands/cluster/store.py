"""The store: all jobs, their histories, and the hosts, in one SQLite file.

    STATE/jobs.db        WAL, synchronous=FULL: what `write` has returned from survives a power cut
    STATE/jobs.db.lock   held by the coordinator that has it

One writer. The lock keeps a second coordinator out; for disks where locks do not work, every
transaction checks the generation, which every opening counts up, so that the older one is fenced.
Reads have a connection of their own, and do not wait for a write.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import msgspec

from manyhands.cluster.errors import (
    Fenced,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreHeld,
    StoreRefused,
)
from manyhands.cluster.job import Job, State, Step
from manyhands.cluster.jobs import Changes, HostRow

T = TypeVar("T")
APPLICATION_ID = 0x6D684A31  # "mhJ1"
SCHEMA_VERSION = 1
_SCHEMA = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
    """CREATE TABLE jobs (
        id INTEGER PRIMARY KEY, key TEXT, state TEXT NOT NULL, is_over INTEGER NOT NULL,
        value BLOB NOT NULL
    )""",
    "CREATE UNIQUE INDEX jobs_by_key ON jobs (key) WHERE key IS NOT NULL",
    "CREATE INDEX jobs_live ON jobs (id) WHERE is_over = 0",
    "CREATE INDEX jobs_by_state ON jobs (state, id)",
    """CREATE TRIGGER over_is_over BEFORE UPDATE ON jobs WHEN OLD.is_over
    BEGIN SELECT RAISE(ABORT, 'a job that is over cannot change'); END""",
    """CREATE TABLE steps (
        job INTEGER NOT NULL, seq INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
        at_s REAL NOT NULL, PRIMARY KEY (job, seq)
    ) WITHOUT ROWID""",
    "CREATE TABLE hosts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
)
BUSY_S = 2.0
"""For somebody else who has the file locked (a shell, a backup): leases must not end meanwhile."""
_LIST = "SELECT value, id FROM jobs"
_LIST_STATE = "SELECT value, id FROM jobs WHERE state = ?"
_LAST_STEP = """
SELECT max(at_s) FROM steps WHERE job IN (SELECT id FROM jobs WHERE is_over = 0)
"""
_PUT_JOB = """
INSERT INTO jobs (id, key, state, is_over, value) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET state = excluded.state, is_over = excluded.is_over,
    value = excluded.value
"""


class Loaded(NamedTuple):
    """What a coordinator begins with."""

    jobs: Sequence[Job]
    """Those that are not over."""
    hosts: Sequence[HostRow]
    next_id: int


class Store:
    """See the module. Thread-safe; made by `open`, a context manager."""

    def __init__(self, path: Path, lock: int, writer: sqlite3.Connection, generation: int) -> None:
        self.path = path
        self._lock_file: int | None = lock
        self._writer = writer
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._list_lock = threading.Lock()
        self.generation = generation
        found = writer.execute("SELECT value FROM meta WHERE name = 'cluster'").fetchone()
        self.cluster: str = found[0]
        """The identity of this store, for ever."""
        self._reader = _connect(path)
        # Long lists have a connection of their own: who looks for one job must not wait for them.
        self._lister = _connect(path)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Take the store at this path; it is made if there is none.

        Raises StoreHeld if another coordinator has it, StoreError if it cannot be used.
        """
        path = Path(path)
        try:
            lock = _lock(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be used: {error.strerror}") from None
        with contextlib.ExitStack() as on_error:
            on_error.callback(os.close, lock)
            with _told(path):
                writer = _connect(path)
                on_error.callback(writer.close)
                store = cls(path, lock, writer, _prepare(path, writer))
            on_error.pop_all()
            return store

    def close(self) -> None:
        """Let another have it. Idempotent."""
        with self._write_lock, self._read_lock, self._list_lock:
            if self._lock_file is not None:
                self._lister.close()
                self._reader.close()
                self._writer.close()
                os.close(self._lock_file)
                self._lock_file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, changes: Changes) -> None:
        """All of it, and on disk when this returns; or nothing, and an error.

        Raises StoreFull, StoreBusy, StoreRefused, Fenced, StoreError.
        """
        encode = msgspec.json.encode
        jobs = [
            (job.id, job.key or None, job.state.value, job.is_over, encode(job))
            for job in changes.jobs
        ]
        steps = [
            (step.job, step.seq, step.state.value, step.reason, step.at_s) for step in changes.steps
        ]
        hosts = [(row.hello.host, encode(row)) for row in changes.hosts]
        with self._write_lock, _told(self.path), _transaction(self._open(self._writer)) as writer:
            self._check_generation(writer)
            writer.executemany(_PUT_JOB, jobs)
            writer.executemany("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", steps)
            writer.executemany("INSERT OR REPLACE INTO hosts VALUES (?, ?)", hosts)
            writer.executemany("DELETE FROM hosts WHERE name = ?", [(n,) for n in changes.gone])

    def check(self) -> None:
        """Raises Fenced if another coordinator has taken it over since."""
        with self._write_lock, _told(self.path):
            self._check_generation(self._open(self._writer))

    def offset_s(self, boot: str, offset_s: float, now_s: float) -> float:
        """Between a clock that counts from the start of the machine, and the epoch: the same for
        all coordinators of one `boot`. The first one gives it, and the time `now_s` of that clock.
        What is not over does not happen before what has happened to it: the machine's idea of the
        date may be older than that.
        """
        with self._write_lock, _told(self.path), _transaction(self._open(self._writer)) as writer:
            self._check_generation(writer)
            meta = dict(writer.execute("SELECT name, value FROM meta").fetchall())
            if boot and meta.get("boot") == boot:
                return meta["offset_s"]
            [last_s] = writer.execute(_LAST_STEP).fetchone()
            if last_s is not None:
                offset_s = max(offset_s, last_s - now_s)
            changed = [("boot", boot), ("offset_s", offset_s)]
            writer.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", changed)
            return offset_s

    def load(self) -> Loaded:
        """What is not over, all hosts, and the number of the next job."""
        jobs = self._query("SELECT value FROM jobs WHERE is_over = 0 ORDER BY id", (), _to_job)
        hosts = self._query(
            "SELECT value FROM hosts ORDER BY name",
            (),
            lambda row: msgspec.json.decode(row[0], type=HostRow),
        )
        [last] = self._query("SELECT coalesce(max(id), 0) FROM jobs", (), lambda row: int(row[0]))
        return Loaded(jobs, hosts, last + 1)

    def job(self, id: int) -> Job | None:
        """The job of this number, over or not."""
        if not 0 < id < 2**63:
            return None
        return next(iter(self._query("SELECT value FROM jobs WHERE id = ?", (id,), _to_job)), None)

    def by_key(self, key: str) -> Job | None:
        """The job that was submitted with this key, over or not."""
        found = self._query("SELECT value FROM jobs WHERE key = ?", (key,), _to_job)
        return found[0] if found else None

    def jobs(self, states: Collection[State] = (), limit: int | None = None) -> Sequence[Job]:
        """The newest first; with `states`, those in one of them."""
        wanted = sorted(state.value for state in set(states))
        sql = f"{_LIST} ORDER BY id DESC LIMIT ?"
        if wanted:
            one = f"SELECT * FROM ({_LIST_STATE} ORDER BY id DESC LIMIT ?)"  # noqa: S608 - constants
            sql = f"{' UNION ALL '.join([one] * len(wanted))} ORDER BY id DESC LIMIT ?"
        most = -1 if limit is None else limit
        parameters = (*(value for state in wanted for value in (state, most)), most)
        with self._list_lock, _told(self.path):
            rows = self._open(self._lister).execute(sql, parameters).fetchall()
        with _told(self.path):
            return [_to_job(row) for row in rows]

    def history(self, id: int) -> Sequence[Step]:
        """Everything that happened to a job, in order; nothing if there is no such job."""
        if not 0 < id < 2**63:
            return []
        return self._query(
            "SELECT seq, state, reason, at_s FROM steps WHERE job = ? ORDER BY seq",
            (id,),
            lambda row: Step(job=id, seq=row[0], state=State(row[1]), reason=row[2], at_s=row[3]),
        )

    def _query(
        self,
        sql: str,
        parameters: tuple[object, ...],
        make: Callable[[sqlite3.Row], T],
    ) -> list[T]:
        with self._read_lock, _told(self.path):
            rows = self._open(self._reader).execute(sql, parameters).fetchall()
        with _told(self.path):
            return [make(row) for row in rows]

    def _open(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        if self._lock_file is None:
            raise StoreError(f"{self.path} has been closed")
        return connection

    def _check_generation(self, writer: sqlite3.Connection) -> None:
        found = _generation(writer)
        if found != self.generation:
            raise Fenced(self.path, own=self.generation, found=found)


def _to_job(row: sqlite3.Row) -> Job:
    return msgspec.json.decode(row[0], type=Job)


def _lock(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(descriptor, 20, 0).strip()
        os.close(descriptor)
        raise StoreHeld(path, int(text) if text.isdigit() else None) from None
    except BaseException:
        os.close(descriptor)
        raise
    with contextlib.suppress(OSError):  # who has it is a courtesy; the disk may be full
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _connect(path: Path) -> sqlite3.Connection:
    # The file is made here, and not by SQLite, so that nobody else can ever read it.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    # Transactions are ours to begin and end; each connection has a lock of ours.
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)


def _prepare(path: Path, writer: sqlite3.Connection) -> int:
    """Check that it is ours, make it if it is empty, and count the generation up; which is ours."""
    version, found = _pragma(writer, "user_version"), _pragma(writer, "application_id")
    is_empty = writer.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if not (is_empty and version == found == 0):
        if found != APPLICATION_ID:
            raise StoreError(
                f"{path} is a database, but not a store of jobs",
                hint="name another folder with --state",
            )
        if version != SCHEMA_VERSION:
            raise StoreError(
                f"{path} was written by another version of manyhands: its schema is {version}, "
                f"and this one knows {SCHEMA_VERSION}",
                hint="use that version, or another folder with --state",
            )
        [damage] = writer.execute("PRAGMA quick_check(1)").fetchone()
        if damage != "ok":
            raise _damaged(path, damage)
    if writer.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise StoreError(f"{path} cannot have a write-ahead log: is its disk a network's?")
    writer.execute("PRAGMA synchronous = FULL")
    with _transaction(writer):
        if is_empty:
            for statement in _SCHEMA:
                writer.execute(statement)
            writer.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            meta = [("generation", 0), ("cluster", secrets.token_hex(8))]
            writer.executemany("INSERT INTO meta VALUES (?, ?)", meta)
        # Read in the same transaction: two that open it at once must not have the same.
        count = "UPDATE meta SET value = value + 1 WHERE name = 'generation' RETURNING value"
        [[generation]] = writer.execute(count).fetchall()
    return generation


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


def _generation(connection: sqlite3.Connection) -> int:
    return connection.execute("SELECT value FROM meta WHERE name = 'generation'").fetchone()[0]


def _damaged(path: Path, what: object) -> StoreError:
    return StoreError(
        f"{path} is damaged or not a store of jobs: {what}",
        hint="put a copy of it in its place, or move it away: the cluster then begins anew",
    )


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Generator[sqlite3.Connection]:
    """Immediate: nobody else can write between what is read in it and what is written."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite may have rolled it back itself
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def _told(path: Path) -> Generator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
            raise StoreFull(path) from None
        if error.sqlite_errorcode == sqlite3.SQLITE_IOERR_WRITE:
            # It does not tell a quota that is used up from a disk that fails. Nothing was kept,
            # as little as on a full disk; what cannot be synced is another error.
            raise StoreFull(path, str(error)) from None
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StoreBusy(path) from None
        raise StoreError(f"{path} cannot be used: {error}") from None
    except sqlite3.IntegrityError as error:
        raise StoreRefused(f"{path} refuses the change: {error}") from None
    except (sqlite3.DatabaseError, msgspec.DecodeError) as error:
        raise _damaged(path, error) from None
    except OSError as error:
        raise StoreError(f"{path} cannot be used: {error.strerror}") from None
