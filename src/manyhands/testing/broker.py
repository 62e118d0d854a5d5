"""Broker: a RabbitMQ node of its own, on loopback, in a temporary folder."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from manyhands.core.errors import ManyhandsError
from manyhands.testing.processes import end_tree, tree_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

HOST = "127.0.0.1"
INSTALL_LINE = "sudo apt-get install --no-install-recommends rabbitmq-server"
# Debian's /usr/sbin/rabbitmq-server changes user and folder; the script behind it does not.
DEBIAN_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
# Few schedulers that never spin: tests share two cores with the node.
LIGHT_VM = "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
LOOPBACK_DIST = "-kernel inet_dist_use_interface {127,0,0,1}"
STOP_PATIENCE_S = 10.0
CTL_TIMEOUT_S = 60.0
# Erlang repeats the cause of a failed start in several long reports.
LOG_TAIL_CHARS = 10_000


class BrokerError(ManyhandsError):
    """A test broker is missing, does not start, or refuses a command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """The PEM files an AMQPS listener presents."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """The loopback ports of one node."""

    amqp: int
    amqps: int
    dist: int
    epmd: int


class Broker:
    """A RabbitMQ node that nobody else uses: own folder, own ports, own epmd, loopback only.

    `with Broker() as broker:` starts and ends it. `stop` ends every process it started and
    removes `folder` with all that is in it; `kill` and `restart` keep the folder and the ports.
    The user guest/guest may do everything. `settings` are extra lines of rabbitmq.conf.
    It holds no thread, socket or file open in this process.
    """

    def __init__(
        self,
        *,
        folder: Path | None = None,
        tls: TlsFiles | None = None,
        settings: Mapping[str, str] | None = None,
        start_timeout_s: float = 90.0,
    ) -> None:
        self.ports = free_ports()
        self.node_name = f"manyhands-{secrets.token_hex(4)}@localhost"
        self._server = find_server()
        self._given_folder = folder
        self._folder: Path | None = None
        self._tls = tls
        self._settings = dict(settings or {})
        self._start_timeout_s = start_timeout_s
        self._node: subprocess.Popen[bytes] | None = None
        self._epmd: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<Broker {self.node_name} amqp={self.ports.amqp}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the node and returns when it speaks AMQP; on failure nothing is left behind."""
        if self._node is not None:
            raise BrokerError(f"{self!r} is already started", hint="use restart()")
        try:
            self._prepare_folder()
            self._start_epmd()
            self._start_node()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the node and its epmd, and removes the folder; a second call does nothing."""
        self._end_node(graceful=True)
        if self._epmd is not None:
            end_tree(self._epmd, patience_s=STOP_PATIENCE_S)
            self._epmd = None
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def kill(self) -> None:
        """Ends the node by SIGKILL, as a power cut would; `restart` brings it back."""
        self._end_node(graceful=False)

    def restart(self) -> None:
        """Ends the node if it still runs, and starts it again with the same ports and data."""
        if self._folder is None:
            raise BrokerError(f"{self!r} was never started", hint="call start() first")
        self._end_node(graceful=True)
        self._start_node()

    def process_ids(self) -> set[int]:
        """The ids of the node, its epmd and all their descendants."""
        roots = [process for process in (self._node, self._epmd) if process is not None]
        return {member.pid for root in roots for member in tree_of(root.pid)}

    def ctl(self, *arguments: str) -> str:
        """What `rabbitmqctl ARGUMENTS` prints for this node; BrokerError when it fails."""
        command = [str(self._server.with_name("rabbitmqctl")), "--quiet", *arguments]
        try:
            done = subprocess.run(
                command,
                env=self._environment(),
                cwd=self._require_folder(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CTL_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BrokerError(
                f"rabbitmqctl {arguments[0]} gave no answer within {CTL_TIMEOUT_S:g} s",
                hint=self._log_tail(),
            ) from None
        if done.returncode != 0:
            # Only the verb, and not what rabbitmqctl repeats: arguments may hold a password.
            answer = (done.stderr or done.stdout).partition("Arguments given:")[0]
            raise BrokerError(
                f"rabbitmqctl {arguments[0]} ended with code {done.returncode}: "
                + " ".join(answer.split())
            )
        return done.stdout

    def add_vhost(self, name: str) -> None:
        """Adds a virtual host in which guest may do everything."""
        self.ctl("add_vhost", name)
        self.ctl("set_permissions", "--vhost", name, "guest", ".*", ".*", ".*")

    def add_user(
        self,
        name: str,
        password: str,
        configure: str = ".*",
        write: str = ".*",
        read: str = ".*",
        vhost: str = "/",
    ) -> None:
        """Adds a user without a tag, whose rights in `vhost` are three regular expressions."""
        self.ctl("add_user", name, password)
        self.ctl("set_permissions", "--vhost", vhost, name, configure, write, read)

    def set_memory_watermark(self, limit: float) -> None:
        """Sets the memory limit, an int in bytes or a float as a part of all memory.

        1 raises the memory alarm at once; 0.4, the default of RabbitMQ, clears it.
        """
        words = ["absolute", str(limit)] if isinstance(limit, int) else [str(limit)]
        self.ctl("set_vm_memory_high_watermark", *words)

    def url(
        self, user: str = "guest", password: str = "guest", vhost: str = "/", host: str = HOST
    ) -> str:
        """The amqp:// address of this node for that user and virtual host."""
        return f"amqp://{_login(user, password)}@{host}:{self.ports.amqp}/{quote(vhost, safe='')}"

    def amqps_url(
        self, user: str = "guest", password: str = "guest", vhost: str = "/", host: str = HOST
    ) -> str:
        """The amqps:// address; the broker must have been made with `tls`."""
        if self._tls is None:
            raise BrokerError(
                "this broker has no AMQPS listener", hint="make it with Broker(tls=TlsFiles(...))"
            )
        return f"amqps://{_login(user, password)}@{host}:{self.ports.amqps}/{quote(vhost, safe='')}"

    def _require_folder(self) -> Path:
        if self._folder is None:
            raise BrokerError(f"{self!r} is not started", hint="call start() first")
        return self._folder

    def _prepare_folder(self) -> None:
        if self._given_folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="manyhands-broker-"))
        else:
            self._given_folder.mkdir(parents=True)
            self._folder = self._given_folder
        lines = [f"{key} = {value}" for key, value in self._configuration().items()]
        (self._folder / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
        (self._folder / "plugins").write_text("[].\n")
        # Empty, and named in the environment: /etc/rabbitmq must have no say here.
        (self._folder / "rabbitmq-env.conf").touch()

    def _configuration(self) -> dict[str, str]:
        conf = {
            "listeners.tcp.1": f"{HOST}:{self.ports.amqp}",
            "num_acceptors.tcp": "2",
            "log.console": "true",
            "log.file": "false",
            # A nearly full disk of a developer is not what the tests are about.
            "disk_free_limit.absolute": "1MB",
        }
        if self._tls is not None:
            conf |= {
                "listeners.ssl.1": f"{HOST}:{self.ports.amqps}",
                "num_acceptors.ssl": "2",
                "ssl_options.certfile": str(self._tls.certificate),
                "ssl_options.keyfile": str(self._tls.key),
                "ssl_options.cacertfile": str(self._tls.authority),
                "ssl_options.verify": "verify_none",
                "ssl_options.fail_if_no_peer_cert": "false",
            }
        return conf | self._settings

    def _environment(self) -> dict[str, str]:
        folder = self._require_folder()
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RABBITMQ_", "ERL_"))
        }
        return inherited | {
            "HOME": str(folder),  # where Erlang keeps its cookie
            "LC_ALL": "C.UTF-8",
            "ERL_EPMD_PORT": str(self.ports.epmd),
            "ERL_EPMD_ADDRESS": HOST,
            "RABBITMQ_NODENAME": self.node_name,
            "RABBITMQ_DIST_PORT": str(self.ports.dist),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "rabbitmq-env.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{LIGHT_VM} -start_epmd false {LOOPBACK_DIST}",
            "RABBITMQ_CTL_ERL_ARGS": f"+S 1:1 -start_epmd false {LOOPBACK_DIST}",
            # Any free port: the default is a range of eleven that all nodes would share.
            "RABBITMQ_CTL_DIST_PORT_MIN": "0",
            "RABBITMQ_CTL_DIST_PORT_MAX": "0",
            # Makes the script become the node (exec) instead of waiting beside it, so that
            # the process we started is the one we signal.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def _start_epmd(self) -> None:
        # Ours, in the foreground: the daemon Erlang would start outlives the node.
        self._epmd = self._spawn(
            [_require("epmd"), "-port", str(self.ports.epmd), "-address", HOST], "epmd.log"
        )
        self._wait_for(self._epmd, self.ports.epmd, "epmd", hello=b"")

    def _start_node(self) -> None:
        self._node = self._spawn([str(self._server)], "node.log")
        self._wait_for(self._node, self.ports.amqp, "RabbitMQ", hello=b"AMQP\x00\x00\x09\x01")
        if self._tls is not None:
            self._wait_for(self._node, self.ports.amqps, "RabbitMQ's TLS", hello=b"")

    def _spawn(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        folder = self._require_folder()
        with (folder / log).open("ab") as output:
            return subprocess.Popen(
                command,
                env=self._environment(),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C at the terminal is for the tests; they end the node themselves.
                start_new_session=True,
            )

    def _end_node(self, *, graceful: bool) -> None:
        if self._node is not None:
            end_tree(self._node, patience_s=STOP_PATIENCE_S if graceful else 0.0)
            self._node = None

    def _wait_for(
        self, process: subprocess.Popen[bytes], port: int, what: str, *, hello: bytes
    ) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while not answers(port, hello):
            if process.poll() is not None:
                raise BrokerError(
                    f"{what} ended with code {process.returncode} while it started",
                    hint=self._log_tail(),
                )
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"{what} did not answer on {HOST}:{port} within {self._start_timeout_s:g} s",
                    hint=self._log_tail(),
                )
            time.sleep(0.05)

    def _log_tail(self) -> str:
        text = ""
        for log in sorted(self._require_folder().glob("*.log")):
            text += f"\n--- {log.name}\n" + log.read_text(errors="replace")[-LOG_TAIL_CHARS:]
        return f"the end of its logs:{text}"


def answers(port: int, hello: bytes) -> bool:
    """Whether something listens there and, if `hello` is not empty, replies with an AMQP frame."""
    try:
        with socket.create_connection((HOST, port), timeout=2.0) as connection:
            connection.sendall(hello)
            # A method frame (type 1): Connection.Start. "AMQP" instead would be a refusal.
            return not hello or connection.recv(1) == b"\x01"
    except OSError:
        return False


def free_ports() -> Ports:
    """Four free loopback ports, different from each other.

    They lie below the range the system takes for outgoing connections: a client that redials
    while the node is down could otherwise be given the node's own port, and connect to itself.
    """
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    candidates = range(10_240, int(text.split()[0]))
    found: set[int] = set()
    while len(found) < 4:
        port = secrets.choice(candidates)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        found.add(port)
    amqp, amqps, dist, epmd = found
    return Ports(amqp=amqp, amqps=amqps, dist=dist, epmd=epmd)


def find_server() -> Path:
    """The script that runs a node as the present user; BrokerError with the remedy without one."""
    if DEBIAN_SERVER.exists():
        return DEBIAN_SERVER
    return Path(_require("rabbitmq-server"))


def _require(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise BrokerError(
            f"the tests run a RabbitMQ node of their own, and {program} is not installed",
            hint=f"type: {INSTALL_LINE}",
        )
    return path


def _login(user: str, password: str) -> str:
    return f"{quote(user, safe='')}:{quote(password, safe='')}"
