"""A cluster that is up: coordinator, HTTP, hub, and the agents that it starts, in one process.

    store (lock) ─► identity ─► hub ─► coordinator ─► server ─► agents ─► ready
    leaving: no agent is started any more ─► all are told to leave, with their jobs' graces ─►
             those of ours that did not are killed ─► server, coordinator, hub, store are closed

Everything that was started here is ended here, and nothing else. Agents that a user started stay
where they are and dial until there is a coordinator again.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from manyhands.cluster.code import Code
from manyhands.cluster.coordinator import Coordinator
from manyhands.cluster.crew import Crew, Trouble
from manyhands.cluster.desk import Changed
from manyhands.cluster.hostfile import HostLine
from manyhands.cluster.hosts import Node
from manyhands.cluster.identity import Identity, open_identity, write_address
from manyhands.cluster.logs import Logs
from manyhands.cluster.routes import Role
from manyhands.cluster.server import PORT, Server
from manyhands.cluster.starters import Errand, LocalStarter, SshStarter, Starter, python_command
from manyhands.cluster.store import Store
from manyhands.core.address import host_port, is_loopback, split_host_port
from manyhands.core.errors import LinkError, ManyhandsError, SettingsError
from manyhands.links.hub import Hub, HubLimits

STORE = "jobs.db"
READY_S = 60.0
"""For the agents of a hostfile to say hello, before `up` says who did not."""
LEASE_S = 15.0
_HUB_LIMITS = HubLimits(peers=4096, runs=1024, handshakes=256)
EVERYWHERE = frozenset({"0.0.0.0", "::"})


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
    ssh: tuple[str, ...] = ("ssh",)
    python: str = ""
    """With manyhands, on the hosts that ssh leads to; empty: this one's path."""
    user: str | None = None
    """Whom jobs run as, where agents are root."""

    def __post_init__(self) -> None:
        host, _ = split_host_port(self.bind, PORT)
        if is_loopback(host) and (far := [one.address for one in self.hosts if not _reaches(one)]):
            raise SettingsError(
                f"agents at {', '.join(far)} cannot reach a coordinator at {self.bind}",
                hint="--bind 0.0.0.0:12347, and --advertise HOST if they know this machine by "
                "another name",
            )
        if not 1 <= self.lease_s <= 86400:
            raise SettingsError(
                f"a lease of {self.lease_s:g} s", hint="--lease: from 1 s to a day; 15 is usual"
            )


def _reaches(host: HostLine) -> bool:
    return is_loopback(host.address.rpartition("@")[2])


class NoAgentCame(ManyhandsError):
    """A cluster without a host: nobody that was started has said hello."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Who is there when a cluster becomes ready."""

    nodes: tuple[Node, ...]
    missing: tuple[Trouble, ...]
    """Agents that have not come; they are tried again."""


class Up:
    """A running cluster. Enter it, wait with `until_ready`, end it with `end`.

    `say` gets lines for people, from any thread. `on_shutdown` is called, once and at once, when
    somebody asks over HTTP that it go down: it is the caller who then calls `end`. Leaving the
    block without `end` kills: what is left is as after a power failure, and comes back.
    """

    def __init__(
        self,
        settings: UpSettings,
        *,
        say: Callable[[str], None],
        on_shutdown: Callable[[], None],
    ) -> None:
        self.settings = settings
        self._say, self._on_shutdown = say, on_shutdown
        self._stack = contextlib.ExitStack()
        self._changed = threading.Event()
        self._heard: frozenset[str] = frozenset()
        self._watching = True
        self._news = threading.Condition()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def _open(self, stack: contextlib.ExitStack) -> None:
        settings = self.settings
        store = stack.enter_context(Store.open(settings.state / STORE))
        identity = open_identity(settings.state)
        logs = Logs(settings.logdir)
        self.hub = stack.enter_context(open_hub(settings))
        self.coordinator = stack.enter_context(
            Coordinator(store, lease_s=settings.lease_s, hub=self._run_of)
        )
        self.server = stack.enter_context(
            Server(
                self.coordinator,
                logs,
                identity,
                bind=settings.bind,
                names=() if settings.advertise is None else (self.hub.address.host,),
                on_shutdown=self._on_shutdown,
            )
        )
        write_address(settings.state, self.server.url)
        self.join_code = self._code(identity, far=True)
        near = self._code(identity, far=False)
        self.crew = Crew(
            [self._errand(host, near) for host in settings.hosts],
            is_heard=lambda host: host in self._heard,
            say=self._say,
        )
        watcher = threading.Thread(target=self._watch, name="up watch")
        stack.callback(self.coordinator.listen(self._notice))
        watcher.start()
        stack.callback(watcher.join)
        stack.callback(self._stop_watching)
        stack.enter_context(self.crew)

    def until_ready(self, timeout_s: float = READY_S) -> Ready:
        """Blocks until every agent of the hosts has said hello, or has failed to, or time is up.

        Raises NoAgentCame if none has, though some were started.
        """
        wanted = [host.name for host in self.settings.hosts]

        def is_settled() -> bool:
            troubled = {trouble.host for trouble in self.crew.troubles}
            return all(name in self._heard or name in troubled for name in wanted)

        with self._news:
            self._news.wait_for(is_settled, timeout_s)
        missing = self._missing(wanted, timeout_s)
        if wanted and len(missing) == len(wanted):
            raise NoAgentCame(
                "no agent has said hello:\n  " + "\n  ".join(map(str, missing)),
                hint="see the logs of the agents under " + str(self.settings.logdir / "agents"),
            )
        return Ready(nodes=tuple(self.coordinator.nodes()), missing=missing)

    def end(self, hurry: threading.Event) -> list[str]:
        """Blocks until everything that was started here has ended; `hurry` does not wait for jobs'
        graces. Returns what could not be ended as it should, for people.
        """
        self.crew.stop_starting()
        left = self._dismiss(hurry)
        killed = self.crew.end(hurry=hurry)
        self._stack.close()
        return left + [f"the agent of {host} was killed" for host in killed]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
