"""A real sshd on loopback: its own port, keys and settings, for whoever runs the tests."""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import shutil
import socket
import subprocess
from pathlib import Path

import psutil

from manyhands.testing.processes import is_gone, tree_of

INSTALL_LINE = "sudo apt-get install --no-install-recommends openssh-server"
PRIVSEP = Path("/run/sshd")  # Debian's sshd, as root, wants it; a service would have made it
TRIES = 5
WAIT_S = 60.0

CONFIG = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
LogLevel VERBOSE
SetEnv {environment}
"""


class Sshd:
    """`address` is what a hostfile would say; `command` is for --ssh."""

    def __init__(self, folder, environment):
        folder.mkdir()
        self.folder = folder
        self.program = shutil.which("sshd") or "/usr/sbin/sshd"
        assert Path(self.program).exists(), f"the tests need sshd; type: {INSTALL_LINE}"
        if os.getuid() == 0:
            PRIVSEP.mkdir(mode=0o755, exist_ok=True)
        self.address = f"{getpass.getuser()}@127.0.0.1"
        for name in ("host_key", "user_key"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", folder / name]
            subprocess.run(keygen, check=True, timeout=WAIT_S)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        self.environment = " ".join(shlex.quote(f"{k}={v}") for k, v in environment.items())
        for _ in range(TRIES):
            self.port = free_port()
            if self._listens():
                break
        else:
            raise AssertionError((folder / "sshd.log").read_text())
        kind, key = (folder / "host_key.pub").read_text().split()[:2]
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")

    def command(self, *, known_hosts="known_hosts", key="user_key"):
        return (
            *("ssh", "-F", "none", "-p", str(self.port), "-i", str(self.folder / key)),
            *("-o", "IdentitiesOnly=yes"),
            *("-o", f"UserKnownHostsFile={self.folder / known_hosts}"),
        )

    def _listens(self):
        config = self.folder / "sshd_config"
        config.write_text(
            CONFIG.format(port=self.port, folder=self.folder, environment=self.environment)
        )
        self.process = subprocess.Popen(
            [self.program, "-D", "-e", "-f", config], stderr=subprocess.PIPE
        )
        said = b""
        while line := self.process.stderr.readline():
            said += line
            if b"Server listening" in line:
                return True
        self.process.wait(WAIT_S)
        self.process.stderr.close()
        (self.folder / "sshd.log").write_bytes(said)
        return False

    def drop(self):
        """Cuts every connection, as a network does: both ends of ssh find out by themselves."""
        for one in tree_of(self.process.pid)[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.name().startswith("sshd"):
                    one.kill()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        family = tree_of(self.process.pid)
        self.process.terminate()
        self.process.wait(WAIT_S)
        self.process.stderr.close()
        psutil.wait_procs([one for one in family[1:] if not is_gone(one)], timeout=WAIT_S)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
