"""The agent: the daemon of a host. It does what the coordinator wants, and says what it holds.

    office ──Wants──► Line ──► compare(wants, held) ──► Attempt ──► keeper ──► ranks
           ◄─Status──      ◄── holdings            ◄──         ◄──        ◄──
           ◄─logs─── Uploads ◄── rank-N.log

One thread decides and acts; `Line` and `Uploads` talk with the office meanwhile. Every fact it
must not lose is on its disk (`Ledger`) before it is acted on. The agent's death ends the ranks:
their keepers see it. The next agent in the same state folder first ends what is left even so.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from manyhands._version import __version__
from manyhands.cluster import keeper
from manyhands.cluster.account import account_of, check_way
from manyhands.cluster.attempt import (
    AGENT_STOPPED,
    KEEPER_PATIENCE_S,
    LEASE_ENDED,
    Attempt,
    order_of,
)
from manyhands.cluster.comparison import Deed, Verb, compare
from manyhands.cluster.environment import marks_of, of_user, rank_environments, scrubbed
from manyhands.cluster.lease import Lease
from manyhands.cluster.leaving import Leaving
from manyhands.cluster.ledger import AlreadyBegun, Key, Ledger
from manyhands.cluster.line import (
    Broken,
    Event,
    Line,
    Nudged,
    Rejected,
    Renewed,
    Reported,
    Wanted,
    Welcomed,
)
from manyhands.cluster.messages import Hello, Origin, Phase, Slot, Status, Want, Wants
from manyhands.cluster.office import Office
from manyhands.cluster.processes import Strays, end_marked, marked
from manyhands.cluster.rest import Rest
from manyhands.cluster.uploads import Flooded, LogSettled, Uploads
from manyhands.cluster.wake import Wake

log = logging.getLogger(__name__)

FAREWELL_S = 15.0
"""For the logs and the last Status to arrive, once an agent that leaves has no process."""
LOGS_S = 10.0
"""For the logs of an attempt that has ended to arrive, before its end is reported without them:
whoever hears that a job is over finds all that it wrote."""
FIRST_WELCOME_S = 60.0
"""For an agent that `up` started: by then `up` has answered, or is dead."""


class Agent:
    """The agent of one host. `run` is called once, in the main thread of a process of its own: it
    takes the process's signals, and every child that it did not have before is ended.

    `office` is called once by each thread. `address` is where processes of other hosts reach this
    one. `user`: whom ranks run as, for root. `secrets_` are values that no rank may have in its
    environment, beside join codes and all that is called MANYHANDS_*. Raises UsageError.
    """

    def __init__(
        self,
        office: Callable[[], Office],
        *,
        host: str,
        slots: Sequence[Slot],
        state: Path,
        address: str = "127.0.0.1",
        user: str | None = None,
        origin: Origin = Origin.USER,
        terms: str = "",
        secrets_: Sequence[str] = (),
    ) -> None:
        self._office, self._host, self._slots = office, host, tuple(slots)
        self._account, self._origin = account_of(user), origin
        self._ledger = Ledger(state, passable=self._account is not None)
        self._hello = Hello(
            version=__version__,
            host=host,
            agent=secrets.token_hex(8),
            address=address,
            slots=self._slots,
            pid=os.getpid(),
            origin=origin,
            terms=terms,
        )
        self._base = scrubbed(os.environ, secrets_)
        if self._account is not None:
            self._base = of_user(self._base, self._account.name, self._account.home)
        self._lease = Lease()
        self._attempts: dict[Key, Attempt] = {}
        self._wants = Wants(version=0)
        self._session = 0  # of which `_wants` are, once they came
        self._heard_session = 0
        self._cluster = ""
        self._leaving: Leaving | None = None
        self._reported: Status | None = None
        self._ended_s: dict[Key, float] = {}
        self._offered: set[Key] = set()  # attempts whose logs `Uploads` has
        self._rest = Rest(self._lease.now_s)
        self._void_session = 0  # nothing of it, or of one before, counts any more

    def run(self) -> str:
        """Serve until told to leave; why it left. No process of an attempt is left then.

        It leaves for a signal (the second one kills), when the cluster goes down, and, if `up`
        started it, when the coordinator is gone for a lease. Raises OfficeRefused when the
        coordinator does not take it, StateHeld, UsageError or OSError for a state folder that
        cannot be used.
        """
        keeper.hide_memory()
        keeper.adopt_orphans()
        self._strays = Strays()
        with self._ledger, Wake[Event | Flooded | LogSettled]() as self._wake:
            if self._account is not None:
                check_way(self._account, self._ledger.state / "work")
            self._hello = msgspec.structs.replace(self._hello, folder=self._ledger.id)
            self._end_left()
            if self._wake.stops:
                return AGENT_STOPPED  # before anybody is told that what was left has ended
            self._line = Line(self._office, self._hello, self._lease, self._wake.tell)
            self._uploads = Uploads(
                self._office, self._line, self._host, self._hello.agent, self._wake.tell
            )
            try:
                with self._uploads, self._line:
                    return self._serve()
            finally:
                self._close_all()

    # What was left by an agent before

    def _end_left(self) -> None:
        for key in self._ledger.left():
            marks = marks_of(key, self._host)
            keeper.signal_each(marked(marks), signal.SIGCONT)
            # Its keeper ends everything, also what has not our mark; unless it cannot.
            self._ledger.keeper_gone(key, KEEPER_PATIENCE_S)
            while (left := end_marked(marks, KEEPER_PATIENCE_S)) and not self._wake.stops:
                log.warning("%s: processes %s cannot be killed; waiting for them", key, left)
                self._wake.wait(self._lease.now_s() + KEEPER_PATIENCE_S)
            folder, record = self._ledger.folder(key), self._ledger.record(key)
            self._attempts[key] = Attempt.left(key, self._host, folder, record)
            log.info("%s was left here by an agent before this one", key)

    # The loop

    def _serve(self) -> str:
        first_s = self._lease.now_s() + FIRST_WELCOME_S
        while True:
            self._keep_lease()
            if not self._cluster and self._origin is Origin.UP and self._lease.now_s() >= first_s:
                return "no coordinator answered"
            self._act()
            self._say()
            if self._leaving is not None and self._may_go(self._leaving):
                if self._leaving.error is not None:
                    raise self._leaving.error
                return self._leaving.why
            self._line.turned()
            ready, events = self._wake.wait(self._next_s(first_s))
            self._keep_lease()  # before anything that is said or heard after a long sleep
            self._heed_signals()
            for attempt in ready:
                assert isinstance(attempt, Attempt)
                self._hear(attempt)
            self._bury_orphans()
            for event in events:
                self._take(event)

    def _next_s(self, first_s: float) -> float | None:
        times = [attempt.overdue_s for attempt in self._attempts.values()]
        times += [self._lease.until_s if self._lease.holds else None]
        times += [first_s if not self._cluster and self._origin is Origin.UP else None]
        times += [self._rest.until_s, self._leaving.until_s if self._leaving is not None else None]
        times += [
            self._ended_s[key] + LOGS_S
            for key, attempt in self._attempts.items()
            if self._is_held_back(attempt)
        ]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def _keep_lease(self) -> None:
        """End everything when it has lapsed (keepers do so by themselves), and begin anew."""
        now_s = self._lease.now_s()
        for attempt in self._attempts.values():
            if attempt.overdue_s is not None and now_s >= attempt.overdue_s:
                log.warning("%s: its keeper does not do as it is told, and is killed", attempt.key)
                attempt.kill_keeper()
        if not self._lease.lapsed:
            return
        alive = [a for a in self._attempts.values() if a.phase is not Phase.ENDED]
        # A keeper that hangs must be gone before the coordinator takes everything for ended.
        patience_s = min(KEEPER_PATIENCE_S, (self._lease.length_s or KEEPER_PATIENCE_S) / 4)
        for attempt in alive:
            if attempt.overdue_s is None or attempt.overdue_s > now_s + patience_s:
                log.warning("%s: %s", attempt.key, LEASE_ENDED)
                attempt.stop(0, now_s, why=LEASE_ENDED, patience_s=patience_s)
        if any(attempt.phase is not Phase.ENDED for attempt in alive):
            return
        self._lease.begin_again()
        # What was heard before the lapse may be on its way to another host by now.
        self._void_session = self._line.renew_session()
        self._session = self._heard_session = 0
        if self._origin is Origin.UP and self._leaving is None:
            self._leave("the coordinator did not answer for a lease", patient=False)
        if self._leaving is not None:
            self._leaving.until_s = now_s  # to say goodbye to nobody

    def _heed_signals(self) -> None:
        if self._wake.stops and (self._leaving is None or self._leaving.why != AGENT_STOPPED):
            self._leave(AGENT_STOPPED, patient=True)
        if self._wake.stops > 1 and self._leaving is not None and self._leaving.patient:
            self._leaving.patient = False
            self._leaving.until_s = self._lease.now_s()
            for attempt in self._attempts.values():
                attempt.stop(0, self._lease.now_s(), why=AGENT_STOPPED)

    def _leave(self, why: str, *, patient: bool, error: Exception | None = None) -> None:
        log.info("leaving: %s", why)
        self._leaving = Leaving(why, patient, error=error)

    def _may_go(self, leaving: Leaving) -> bool:
        """Whether nothing runs, and what is to be said has arrived or need not."""
        if any(attempt.phase is not Phase.ENDED for attempt in self._attempts.values()):
            return False
        now_s = self._lease.now_s()
        if leaving.until_s is None:
            leaving.until_s = now_s + (FAREWELL_S if leaving.patient and self._cluster else 0)
        if now_s >= leaving.until_s:
            return True
        mine = [attempt for key, attempt in self._attempts.items() if key.cluster == self._cluster]
        if any(self._is_held_back(attempt) for attempt in mine):
            return False
        if leaving.number is None:
            leaving.number = self._report()
        return leaving.number == 0 and all(attempt.held.log_settled for attempt in mine)

    # What comes in

    def _take(self, event: Event | Flooded | LogSettled) -> None:
        match event:
            case Welcomed(session, welcome) if session > self._void_session:
                if welcome.cluster != self._cluster:
                    self._session = 0
                    for key in self._attempts:  # their logs are not this one's to read
                        if key.cluster != welcome.cluster:
                            self._uploads.drop(key)
                self._heard_session, self._cluster = session, welcome.cluster
                self._offer_left()
                self._report()
            case Wanted(session, wants):
                if session == self._heard_session:
                    self._session, self._wants = session, wants
                    if wants.leave and self._origin is Origin.UP and self._leaving is None:
                        self._leave("the coordinator told it to leave", patient=True)
            case Reported(number):
                if self._leaving is not None and number >= (self._leaving.number or sys.maxsize):
                    self._leaving.number = 0
            case Renewed():
                until_s = self._lease.until_s
                for attempt in self._attempts.values():
                    if until_s is not None:
                        attempt.renew(until_s)
            case Rejected(error):
                if self._leaving is None:
                    self._leave(error.message, patient=False, error=error)
                else:
                    self._leaving.until_s = self._lease.now_s()  # nobody hears a farewell
            case Flooded(key, rank, why):
                if key in self._attempts:
                    log.warning("%s: %s", key, why)
                    self._attempts[key].fail(rank, why, self._lease.now_s())
            case LogSettled(key):
                if key in self._attempts:
                    self._attempts[key].log_settled = True
            case Broken(error):
                raise error
            case Welcomed() | Nudged():
                pass

    def _offer_left(self) -> None:
        """Logs of attempts that an agent before left, once it is known whose they are."""
        for key, attempt in self._attempts.items():
            if key.cluster == self._cluster and key not in self._offered:
                self._offer(attempt)

    def _offer(self, attempt: Attempt) -> None:
        self._offered.add(attempt.key)
        self._uploads.add(attempt.key, attempt.logs)
        if attempt.phase is Phase.ENDED:
            self._uploads.end(attempt.key)

    def _hear(self, attempt: Attempt) -> None:
        fd = attempt.fileno()
        if not attempt.hear():
            return
        self._wake.unwatch(fd)
        attempt.settle()
        if attempt.orphaned:
            log.warning("%s: its keeper was killed", attempt.key)
        else:
            self._note_end(attempt)

    def _note_end(self, attempt: Attempt) -> None:
        self._uploads.end(attempt.key)
        if attempt.never_ran:
            self._rest.begin()
        else:
            self._rest.forget()

    def _bury_orphans(self) -> None:
        """What killed keepers left: children of nobody's in this process. Kill it, wait for it."""
        orphaned = [attempt for attempt in self._attempts.values() if attempt.orphaned]
        kept = {attempt.keeper_pid for attempt in self._attempts.values()}
        if not orphaned or not self._strays.end(kept):
            return
        for attempt in orphaned:
            attempt.bury()
            self._note_end(attempt)

    # What goes out

    def _say(self) -> None:
        """Report if anything is other than it was reported."""
        if self._cluster and self._status() != self._reported:
            self._report()

    def _report(self) -> int:
        if not self._cluster:
            return 0
        self._reported = self._status()
        return self._line.report(self._heard_session, self._reported)

    def _status(self) -> Status:
        holdings = [
            msgspec.structs.replace(attempt.holding(), phase=Phase.RUNNING)
            if self._is_held_back(attempt)
            else attempt.holding()
            for key, attempt in self._attempts.items()
            if key.cluster == self._cluster
        ]
        rests = self._leaving is not None or self._rest.until_s is not None
        return Status(agent=self._hello.agent, holdings=tuple(holdings), rests=rests)

    def _is_held_back(self, attempt: Attempt) -> bool:
        """Whether its end is not told yet, because its logs are still on their way."""
        if attempt.phase is not Phase.ENDED or attempt.held.log_settled:
            return False
        now_s = self._lease.now_s()
        return now_s < self._ended_s.setdefault(attempt.key, now_s) + LOGS_S

    # What is done

    def _act(self) -> None:
        """Do what is missing, until nothing is."""
        if self._leaving is not None:
            why = AGENT_STOPPED if self._leaving.why == AGENT_STOPPED else ""
            for attempt in self._attempts.values():
                if not attempt.stopping and attempt.phase is not Phase.ENDED:
                    attempt.stop(self._grace_s(attempt), self._lease.now_s(), why=why)
            return
        self._end_foreign()
        if self._session == 0:
            return  # nobody has said yet what this coordinator wants
        # What was wanted before a connection broke may have been given to another host since.
        may_start = self._lease.holds and self._session == self._heard_session
        # An agent of a user's outlives a cluster that goes down, its jobs do not.
        stop = self._wants.leave
        wants = {
            (want.job, want.attempt): msgspec.structs.replace(want, stop=want.stop or stop)
            for want in self._wants.wants
        }
        while deeds := compare(
            list(wants.values()),
            {key[1:]: a.held for key, a in self._attempts.items() if key[0] == self._cluster},
            may_start=may_start,
        ):
            for deed in deeds:
                self._do(deed, wants.get(deed.key))

    def _end_foreign(self) -> None:
        """Attempts of a cluster that was at this address before have nobody who wants them."""
        for key, attempt in list(self._attempts.items()):
            if self._cluster and key.cluster != self._cluster and key in self._offered:
                if attempt.phase is Phase.ENDED:
                    self._forget(key)
                elif not attempt.stopping:
                    attempt.stop(self._grace_s(attempt), self._lease.now_s())

    def _grace_s(self, attempt: Attempt) -> float:
        task = self._ledger.task(attempt.key)
        return 0.0 if task is None else task.spec.grace_s

    def _do(self, deed: Deed, want: Want | None) -> None:
        key = Key(self._cluster, *deed.key)
        folder = self._ledger.folder(key)
        match deed.verb:
            case Verb.BEGIN:
                assert want is not None
                self._attempts[key] = self._begun(key, want)
            case Verb.DECLINE:
                self._attempts[key] = Attempt.declined(key, self._host, folder)
            case Verb.START:
                assert want is not None
                self._start(self._attempts[key], want)
            case Verb.STOP:
                attempt = self._attempts[key]
                attempt.stop(self._grace_s(attempt), self._lease.now_s())
            case Verb.FORGET:
                self._forget(key)

    def _begun(self, key: Key, want: Want) -> Attempt:
        """A new attempt that is ready, or one that says why it cannot be."""
        folder = self._ledger.folder(key)
        unknown = {index for _, index in want.task.ranks} - {slot.index for slot in self._slots}
        if unknown:
            return Attempt.lost(key, self._host, folder, f"there is no slot {min(unknown)} here")
        attempt = Attempt(key, self._host, folder)
        try:
            self._ledger.begin(key, want.task)
            if any(rank == 0 for rank, _ in want.task.ranks):
                attempt.reserve_port()
        except AlreadyBegun as error:
            return Attempt.lost(key, self._host, folder, str(error))
        except OSError as error:
            return self._unbegun(key, f"cannot be begun on this host: {error}")
        return attempt

    def _unbegun(self, key: Key, why: str) -> Attempt:
        log.warning("%s %s", key, why)
        self._rest.begin()
        return Attempt.lost(key, self._host, self._ledger.folder(key), why, never_ran=True)

    def _start(self, attempt: Attempt, want: Want) -> None:
        key, until_s = attempt.key, self._lease.until_s
        assert until_s is not None
        try:
            order = self._order(attempt, want, until_s)
            lock = self._ledger.keeper_lock(key)
            attempt.start(order, {**self._base, **marks_of(key, self._host)}, lock)
        except OSError as error:
            attempt.close()
            self._attempts[key] = self._unbegun(key, f"cannot be started on this host: {error}")
            return
        self._wake.watch(attempt.fileno(), attempt)
        self._offer(attempt)

    def _order(self, attempt: Attempt, want: Want, until_s: float) -> keeper.Order:
        account, marks = self._account, marks_of(attempt.key, self._host)
        owner, lease_s = None if account is None else account.owner, self._lease.length_s or 0.0
        workdir = want.task.spec.workdir or str(self._ledger.work_folder(attempt.key, owner))
        return order_of(
            want,
            rank_environments(self._base, sys.executable, marks, want, self._slots, lease_s),
            self._slots,
            folder=attempt.folder,
            workdir=workdir,
            lease_until_s=until_s,
            user=None if account is None else account.user,
        )

    def _forget(self, key: Key) -> None:
        self._uploads.drop(key)
        self._offered.discard(key)
        self._ended_s.pop(key, None)
        del self._attempts[key]
        try:
            self._ledger.forget(key)
        except OSError as error:
            log.warning("%s: its folder stays on the disk: %s", key, error)

    def _close_all(self) -> None:
        """However `_serve` ended: nothing may run without an agent."""
        for attempt in self._attempts.values():
            attempt.close()
        self._strays.end_all()
