"""Codes: a coordinator's address, fingerprint and one of its tokens in a word, `mhc1-...`.

The join code that `manyhands up` prints lets agents in; a user code, whoever submits jobs. Both are
secrets.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass, field

import msgspec

from manyhands.cluster.routes import Role
from manyhands.core.address import check_fingerprint, host_port, is_loopback
from manyhands.core.errors import AddressError

PREFIX = "mhc1-"
_HINT = f"copy the whole code again, from {PREFIX} to its last character"


@dataclass(frozen=True, kw_only=True)
class Code:
    """Everything that is needed to speak to a coordinator. Without fingerprint: no TLS."""

    role: Role
    host: str
    port: int
    token: str = field(repr=False)
    fingerprint: str = ""

    def __str__(self) -> str:
        return f"{'https' if self.fingerprint else 'http'}://{host_port(self.host, self.port)}"

    def pack(self) -> str:
        """The word. It is a secret."""
        body = msgspec.msgpack.encode(
            (self.role.value, self.host, self.port, bytes.fromhex(self.fingerprint), self.token)
        )
        sealed = body + zlib.crc32(body).to_bytes(4, "big")
        return PREFIX + base64.urlsafe_b64encode(sealed).decode().rstrip("=")


def read_code(text: str) -> Code:
    """Reads what `pack` made. Raises AddressError, which never quotes the code."""
    text = text.strip().strip("'\"")  # quotes stay on where a shell or a form does not take them
    if text.startswith("mh1-"):
        raise AddressError(
            "this is the join code of a hub, not of a cluster",
            hint=f"`manyhands up` prints the cluster's, {PREFIX}...",
        )
    if not text.startswith(PREFIX):
        raise AddressError("this is not a cluster's code", hint=f"it begins with {PREFIX}")
    packed = text[len(PREFIX) :]
    try:
        sealed = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise AddressError("the code has characters that no code has", hint=_HINT) from None
    body, check = sealed[:-4], sealed[-4:]
    if zlib.crc32(body).to_bytes(4, "big") != check:
        raise AddressError("the code is damaged or incomplete", hint=_HINT)
    try:
        role, host, port, pin, token = msgspec.msgpack.decode(
            body, type=tuple[Role, str, int, bytes, str]
        )
    except msgspec.DecodeError:
        raise AddressError("the code was made by another release", hint=_HINT) from None
    is_word = token.isascii() and token.isprintable() and " " not in token
    if not token or not is_word or not 0 < port < 65536 or not host.isprintable() or not host:
        raise AddressError("what is in the code cannot be used", hint=_HINT)
    if not pin and not is_loopback(host):
        raise AddressError(
            f"this code would have its token sent to {host_port(host, port)} in the clear",
            hint="`manyhands up --bind` speaks TLS there: use the code that it prints",
        )
    return Code(
        role=role, host=host, port=port, token=token, fingerprint=check_fingerprint(pin.hex())
    )
