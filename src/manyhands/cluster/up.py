"""A cluster that is up: coordinator, HTTP, hub, and the agents that it starts, in one process.

    store (its lock) ─► address ─► identity ─► hub ─► coordinator ─► server ─► agents ─► ready
    leaving: no agent is started any more ─► all are told to leave, with their jobs' graces ─►
             those of ours that did not are killed ─► server, coordinator, hub, store are closed

Everything that was started here is ended here, and nothing else. Agents that a user started stay
where they are and dial until there is a coordinator again.
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from manyhands.cluster.account import account_of
from manyhands.cluster.coordinator import Coordinator
from manyhands.cluster.crew import LAST_DELAY_S, Crew, Trouble
from manyhands.cluster.errors import ClusterError
from manyhands.cluster.hostfile import HostLine
from manyhands.cluster.hosts import Node
from manyhands.cluster.identity import (
    agents_of_root,
    moved_logs,
    open_identity,
    write_address,
)
from manyhands.cluster.job import PLACED
from manyhands.cluster.logs import Logs
from manyhands.cluster.relay import open_relay
from manyhands.cluster.remains import AGENTS
from manyhands.cluster.routes import Role
from manyhands.cluster.server import PORT, Server, listen
from manyhands.cluster.starters import (
    SSH,
    Errand,
    LocalStarter,
    SshStarter,
    Starter,
    python_command,
)
from manyhands.cluster.store import Store
from manyhands.core.address import host_port, is_loopback, split_host_port
from manyhands.core.errors import ManyhandsError, SettingsError
from manyhands.links.hub import Hub

STORE = "jobs.db"
READY_S = 60.0
"""For the agents of a hostfile to say hello, before `up` says who did not."""
LEASE_S = 15.0
_LOOK_S = 0.2
_HERE = frozenset({"here", "clearing"})


@dataclass(frozen=True, kw_only=True, slots=True)
class UpSettings:
    """What a cluster is to be. Paths are absolute."""

    state: Path
    logdir: Path
    bind: str = f"127.0.0.1:{PORT}"
    advertise: str | None = None
    """HOST[:PORT] by which others reach it; None: a guess."""
    hosts: tuple[HostLine, ...] = ()
    """Where agents are started; none: hosts come by themselves, with the join code."""
    lease_s: float = LEASE_S
    ssh: tuple[str, ...] = (SSH,)
    python: str = ""
    """With manyhands, on the hosts that ssh leads to; empty: the path of this one."""
    user: str | None = None
    """Whom jobs run as, where agents are root."""
    plain: bool = False
    """HTTP without TLS: on loopback, for programs that cannot do otherwise."""

    def __post_init__(self) -> None:
        far = [host.address for host in self.hosts if not is_loopback(_bare(host.address))]
        if self.is_local and far:
            raise SettingsError(
                f"agents at {', '.join(far)} cannot reach a coordinator at {self.bind}",
                hint=f"--bind 0.0.0.0:{PORT}, and --advertise HOST if they know this machine by "
                "another name than it thinks",
            )
        if self.is_local and self.advertise is not None:
            host, _ = split_host_port(self.advertise, PORT)
            if not is_loopback(host):
                raise SettingsError(
                    f"a coordinator at {self.bind} cannot be reached by the name {host}",
                    hint=f"--bind 0.0.0.0:{PORT}, or leave --advertise out",
                )
        if any(host.is_here for host in self.hosts):
            account_of(self.user)  # an agent would fail of it, and be tried again and again
        if not 1 <= self.lease_s <= 86400:
            raise SettingsError(
                f"a lease of {self.lease_s:g} s", hint="--lease: from 1 s to a day; 15 is usual"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(split_host_port(self.bind, PORT)[0])


class NoAgentCame(ManyhandsError):
    """A cluster without a host: nobody that was started has said hello."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Who is there when a cluster becomes ready."""

    nodes: tuple[Node, ...]
    missing: tuple[Trouble, ...]
    """Agents that have not come; they are tried again."""


class Up:
    """A cluster. Enter it, wait `until_ready`, then `until_stopped`, and `end` it.

    `say` gets lines for people, from any thread. Leaving the block without `end` kills: what is
    left is as after a power failure, and the next `up` makes the best of it.
    """

    def __init__(self, settings: UpSettings, *, say: Callable[[str], None]) -> None:
        self.settings = settings
        self._say = say
        self._stack = contextlib.ExitStack()
        self._news = threading.Condition()
        self._heard: frozenset[str] = frozenset()
        self._sent_away: frozenset[str] = frozenset()
        """Hosts whose agents, of an earlier `up`, are told to leave."""
        self._turnover_s = 0.0
        """For those, to be rid of their jobs, and for others to be started in their place: until
        they have left, these give up, and are started again after longer and longer delays."""
        self._stop_reason = ""
        self._is_stopping = False
        self._hurry = threading.Event()
        self._tell_crew: Callable[[], None] = lambda: None  # there is none yet
        self._rung = threading.Event()
        self._is_closing = False

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _open(self, stack: contextlib.ExitStack) -> None:
        settings = self.settings
        store = stack.enter_context(Store.open(settings.state / STORE))
        # Before anything is noted: where it cannot be, its hub's port is not to be another one.
        listening = stack.enter_context(listen(settings.bind))
        identity = open_identity(settings.state)
        self._fingerprint = identity.fingerprint
        self.logs = logs = Logs(settings.logdir)
        logs.claim(store.cluster)
        if before := moved_logs(settings.state, settings.logdir):
            self._say(f"logs of earlier jobs are in {before}, and shown with --logdir {before}")
        self.hub: Hub = stack.enter_context(
            open_relay(settings.bind, settings.advertise, settings.state, self._say)
        )
        code = self.hub.address.code()
        terms = {host.name: self._terms(host) for host in settings.hosts}
        self.coordinator = stack.enter_context(
            # An attempt that was ended may have left a state at the hub that nobody has any more:
            # the next one is a run of its own, and goes on from a checkpoint, if there are any. The
            # hub remembers runs for longer than a store may: its cluster's name is in theirs.
            Coordinator(
                store,
                lease_s=settings.lease_s,
                hub=lambda job, attempt: (code, f"job-{job}-{attempt}-{store.cluster}"),
                terms=terms,
                asked={host.name: host.num_slots for host in settings.hosts},
            )
        )
        self._sent_away = frozenset(
            node.name for node in self.coordinator.nodes() if node.state == "leaving"
        )
        if self._sent_away:
            placed = self.coordinator.jobs(states=PLACED)
            graces_s = [job.spec.grace_s for job in placed]
            self._turnover_s = max(graces_s, default=0.0) + LAST_DELAY_S
        for name in sorted(self._sent_away):
            self._say(
                f"host {name}: an earlier `up` started its agent, with other options; it is told "
                "to leave, and its jobs, which get their grace, begin again"
            )
        self.server = stack.enter_context(
            Server(
                self.coordinator,
                logs,
                identity,
                bind=settings.bind,
                listening=listening,
                plain=settings.plain,
                names=() if settings.advertise is None else (self.hub.address.host,),
                on_shutdown=lambda: self.stop("`manyhands down`"),
            )
        )
        write_address(settings.state, self.url, self.server.code(Role.USER, *self._shown()))
        self.crew = Crew(
            [self._errand(host) for host in settings.hosts],
            is_heard=lambda host: host in self._heard,
            say=self._say,
        )
        stack.enter_context(self.crew)
        self._tell_crew = self.crew.look
        watcher = threading.Thread(target=self._watch, name="up watch")
        watcher.start()
        stack.callback(watcher.join)
        stack.callback(self._stop_watching)

    # -- what it is called ----------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where this machine reaches it."""
        scheme = "http" if self.server.is_plain else "https"
        return f"{scheme}://{host_port(self.hub.near.host, self.server.port)}"

    @property
    def hub_at(self) -> str:
        """HOST:PORT where the ranks of jobs reach its hub."""
        return host_port(self.hub.address.host, self.hub.address.port)

    @property
    def join_code(self) -> str:
        """What lets agents of other machines in. It is a secret."""
        return self.server.code(Role.AGENT, *self._shown())

    def _shown(self) -> tuple[str, int]:
        """Where others reach it."""
        host, port = self.hub.address.host, self.server.port
        if self.settings.advertise is not None:
            host, port = split_host_port(self.settings.advertise, port)
        return host, port

    def _errand(self, host: HostLine) -> tuple[Starter, Errand]:
        settings = self.settings
        given = ["--name", host.name, "--origin", "up", "--terms", self._terms(host)]
        given += self._options(host)
        starter: Starter
        state = None
        if host.is_here:
            near, port = self.hub.near.host, self.server.port
            starter, code = LocalStarter(), self.server.code(Role.AGENT, near, port)
            state = settings.state / AGENTS / host.name
            if settings.user is not None:  # to whom that folder would be closed
                state = agents_of_root(self._fingerprint) / host.name
            given += ["--state", str(state)]
        else:
            command = python_command(settings.python) if settings.python else ()
            starter, code = SshStarter(ssh=settings.ssh, command=command), self.join_code
        log = settings.logdir / "agents" / f"{host.name}.log"
        return starter, Errand(
            name=host.name,
            address=host.address,
            arguments=tuple(given),
            code=code,
            log=log,
            state=state,
        )

    def _options(self, host: HostLine) -> list[str]:
        """Of its agent: all that makes a difference to jobs."""
        settings, given = self.settings, list[str]()
        if host.gpus:
            given += ["--gpus", ",".join(map(str, host.gpus))]
        elif host.slots is not None:
            given += ["--slots", str(host.slots)]
        if settings.user is not None:
            given += ["--user", settings.user]
        if host.is_here:
            # Ranks of other machines come to this one by the address that their agents use.
            given += ["--address", host.address if settings.is_local else self.hub.address.host]
        return given

    def _terms(self, host: HostLine) -> str:
        """The same for the same options: one that is left of an `up` that was killed may stay."""
        settings, way = self.settings, [""]
        if not host.is_here:  # as whom ssh goes in, jobs run
            way = [settings.python, host.address, *settings.ssh]
        text = shlex.join([*way, *self._options(host)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # -- its life -------------------------------------------------------------------------------

    def until_ready(self, timeout_s: float = READY_S) -> Ready | None:
        """Blocks until every agent that was started has said hello, or has failed to, or time is
        up (it is longer if others have to leave first). None: it was stopped before.

        Raises NoAgentCame if none has, though some were started.
        """
        wanted = [host.name for host in self.settings.hosts]
        timeout_s += self._turnover_s
        with self._news:
            self._news.wait_for(lambda: self._is_stopping or self._is_settled(wanted), timeout_s)
            if self._is_stopping:
                return None
        missing = self._missing(wanted, timeout_s)
        if wanted and len(missing) == len(wanted):
            raise NoAgentCame(
                "no agent has come:\n  " + "\n  ".join(str(one) for one in missing),
                hint=f"what agents said: {self.settings.logdir / 'agents'}",
            )
        return Ready(nodes=tuple(self.coordinator.nodes()), missing=missing)

    def stop(self, reason: str) -> None:
        """Have it end: from any thread, but not from a signal's handler."""
        with self._news:
            if not self._is_stopping:
                self._is_stopping, self._stop_reason = True, reason
            self._news.notify_all()

    def hurry(self) -> None:
        """It ends already, and is to end at once. As `stop`."""
        self._hurry.set()
        with self._news:
            self._news.notify_all()
        self._tell_crew()

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to end, or has failed."""
        return self._is_stopping

    def until_stopped(self) -> str:
        """Blocks until `stop`, `manyhands down`, or a failure; why. Raises what has failed."""
        with self._news:
            self._news.wait_for(lambda: self._is_stopping)
        if (failure := self.coordinator.failure) is not None:
            raise failure
        return self._stop_reason

    def end(self) -> list[str]:
        """Blocks until everything that was started here has ended; the graces of jobs count,
        unless it is told to `hurry`. What could not be ended as it should, for people. The rest,
        which can still be asked, is closed by leaving the block.
        """
        self.crew.stop_starting()
        self.crew.ask_unheard()
        troubles = self._dismiss()
        killed = self.crew.end(hurry=self._hurry)
        if not troubles and not killed:
            try:
                self.coordinator.forget_hosts()
            except ClusterError as error:
                troubles.append(f"hosts are still noted: {error.message}")
        return troubles + [f"the agent of {host} had to be killed" for host in killed]

    def _dismiss(self) -> list[str]:
        """All are told to leave; until they have, or it has to hurry."""
        troubles: list[str] = []
        is_done = threading.Event()

        def shut_down() -> None:
            try:
                self.coordinator.shut_down()
            except ClusterError as error:
                troubles.append(error.message)
            finally:
                with self._news:
                    is_done.set()
                    self._news.notify_all()

        thread = threading.Thread(target=shut_down, name="up down")
        thread.start()
        # Closing the coordinator ends the wait, however that came.
        self._stack.callback(thread.join)
        self._stack.callback(self.coordinator.close)
        with self._news:
            self._news.wait_for(lambda: is_done.is_set() or self._hurry.is_set())
        if not is_done.is_set():
            # Agents that hurry do not stay to report: the next `up` hears of it.
            far = [host.name for host in self.settings.hosts if not host.is_here]
            troubles += [f"{name} was told to end its jobs, and goes when it has" for name in far]
            return [*troubles, "jobs were not waited for: they begin again at the next `up`"]
        return troubles

    # -- who is there ---------------------------------------------------------------------------

    def _watch(self) -> None:
        """Keeps `_heard`: the coordinator calls listeners under its lock, where none may wait."""
        stop_listening = self.coordinator.listen(lambda changed: self._rung.set())
        try:
            while not self._is_closing:
                if self.coordinator.failure is not None:
                    self.stop("the coordinator has failed")
                states = {node.name: node.state for node in self.coordinator.nodes()}
                with self._news:
                    self._heard = frozenset(n for n, state in states.items() if state in _HERE)
                    self._sent_away &= {n for n, state in states.items() if state == "leaving"}
                    self._news.notify_all()
                self.crew.look()
                # With an end: that a host has reported, or is silent, need not ring.
                self._rung.wait(_LOOK_S)
                self._rung.clear()
        finally:
            stop_listening()

    def _stop_watching(self) -> None:
        self._is_closing = True
        self._rung.set()

    def _is_settled(self, wanted: list[str]) -> bool:
        # One that waits for another to leave, and gives up, is started again.
        troubled = {trouble.host for trouble in self.crew.troubles} - self._sent_away
        return all(name in self._heard or name in troubled for name in wanted)

    def _missing(self, wanted: list[str], waited_s: float) -> tuple[Trouble, ...]:
        known = {trouble.host: trouble for trouble in self.crew.troubles}
        return tuple(
            known.get(name)
            or Trouble(
                host=name,
                what=f"no word from its agent{self._process(name)} within {waited_s:g} s",
                remedy="can it reach this machine? --advertise HOST. Is it of an earlier `up`, at "
                "another address? Then it ends with its lease. Its log: "
                + str(self.settings.logdir / "agents" / f"{name}.log"),
            )
            for name in wanted
            if name not in self._heard
        )

    def _process(self, name: str) -> str:
        pid = self.crew.pid(name)
        return "" if pid is None else f" (process {pid} here)"


def _bare(address: str) -> str:
    return address.rpartition("@")[2]
