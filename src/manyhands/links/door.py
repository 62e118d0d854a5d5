"""The hub's side door: peers of its own machine come in by a Unix socket instead of TCP.

Half the kernel's work, and nothing to encrypt: the kernel hands the bytes from one process to the
other. The name says which hub is meant (where it listens, and its certificate) and in which network
namespace of which machine it is, so whoever dials a proxy, another machine or another hub finds no
door and goes round by the front; nor can an answer be passed on from elsewhere. Anybody may take a
name that is free; so the hub first shows what it would show in TLS, that it has the key of the
certificate that peers pin. Only then does a peer say who it is.

    peer                                hub
    32 random bytes                 ->
                                    <-  certificate, signature of (name of the door, those bytes)
    Hello, and so on, as over TLS   ->

Linux only: its abstract names belong to the network namespace, as loopback does, and vanish with
the process that holds them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import load_der_x509_certificate, load_pem_x509_certificate

from manyhands.core.address import HubAddress, host_port

log = logging.getLogger(__name__)
_NONCE_BYTES = 32
_LENGTHS = struct.Struct(">HH")  # of certificate and signature
_LONGEST = 4096  # of either
_SIGNED_BY = ec.ECDSA(hashes.SHA256())
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Porter:
    """Answers for one hub at its doors."""

    def __init__(self, key_pem: bytes, certificate_pem: bytes) -> None:
        key = serialization.load_pem_private_key(key_pem, password=None)
        self._key = cast("ec.EllipticCurvePrivateKey", key)  # as `tls.create_identity` makes them
        certificate = load_pem_x509_certificate(certificate_pem)
        self._certificate = certificate.public_bytes(serialization.Encoding.DER)

    def answer(self, sock: socket.socket) -> None:
        """Show the one who has knocked that this is the hub. Raises OSError."""
        said = _signed(sock.getsockname(), _exactly(sock, _NONCE_BYTES))
        signature = self._key.sign(said, _SIGNED_BY)
        lengths = _LENGTHS.pack(len(self._certificate), len(signature))
        sock.sendall(lengths + self._certificate + signature)


def open_doors(addresses: Iterable[HubAddress]) -> list[socket.socket]:
    """Listening sockets for peers of this machine that dial one of these; fewer, or none, where it
    cannot be. Nothing depends on them: who finds no door dials TCP."""
    doors: list[socket.socket] = []
    for address in addresses if sys.platform == "linux" else ():
        try:
            name = _name(address)
            if all(door.getsockname() != name for door in doors):
                doors.append(_listen(name))
        except OSError as error:  # a sandbox may forbid it
            if error.errno == errno.EADDRINUSE:
                log.warning("another process has the name of this hub's door: peers here dial TCP")
    return doors


def knock(address: HubAddress, timeout_s: float) -> socket.socket | None:
    """A connection by the door of the hub that is meant; None if there is none, or another one."""
    if sys.platform != "linux" or address.insecure:
        return None
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        # Nobody may listen, too many may wait, a sandbox may forbid it.
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        deadline = time.monotonic() + timeout_s
        sock.settimeout(timeout_s)
        sock.connect(_name(address))
        if _is_meant(sock, address, deadline):
            stack.pop_all()
            return sock
    return None


def is_by_door(sock: socket.socket) -> bool:
    """Whether a connection came by a door."""
    return sock.family == socket.AF_UNIX


def whence(sock: socket.socket) -> tuple[str, int]:
    """Who came by the door, for logs: its process."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return "process", _CREDENTIALS.unpack(raw)[0]


def _listen(name: bytes) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    try:
        door.bind(name)
        door.listen(128)
    except BaseException:
        door.close()
        raise
    return door


def _is_meant(sock: socket.socket, address: HubAddress, deadline: float) -> bool:
    """Whether who listens has the key of the certificate that the address pins. Raises OSError."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(nonce)
    lengths = _LENGTHS.unpack(_exactly(sock, _LENGTHS.size, deadline))
    if max(lengths) > _LONGEST:
        return False
    certificate, signature = (_exactly(sock, length, deadline) for length in lengths)
    if hashlib.sha256(certificate).hexdigest() != address.fingerprint:
        return False
    key = load_der_x509_certificate(certificate).public_key()
    try:
        cast("ec.EllipticCurvePublicKey", key).verify(
            signature, _signed(_name(address), nonce), _SIGNED_BY
        )
    except InvalidSignature:
        return False
    return True


def _signed(name: bytes, nonce: bytes) -> bytes:
    """With the name: an answer at one door is none at another, whoever passes it on."""
    return b"manyhands door " + name + nonce


def _exactly(sock: socket.socket, num_bytes: int, deadline: float | None = None) -> bytes:
    """All of them by then, however slowly they come. Raises OSError."""
    data = b""
    while len(data) < num_bytes:
        if deadline is not None:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError("a knock took too long")
            sock.settimeout(left_s)
        more = sock.recv(num_bytes - len(data))
        if not more:
            raise ConnectionResetError("hung up within a knock")
        data += more
    return data


def _name(address: HubAddress) -> bytes:
    host = "127.0.0.1" if address.host == "localhost" else address.host
    what = f"{address.fingerprint} {host_port(host, address.port)} {_here()}"
    return b"\0manyhands.hub." + hashlib.sha256(what.encode()).hexdigest().encode()


def _here() -> str:
    """The namespace in which a name has one owner. With it in the name, who has taken that name in
    another one gets no answer for it from the hub. Raises OSError.
    """
    space = os.stat("/proc/thread-self/ns/net")
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {space.st_dev} {space.st_ino}"
