"""Finding a coordinator: argument > environment > state folder > default.

MANYHANDS_COORDINATOR   HOST:PORT, a URL of it, or a user code mhc1-...
MANYHANDS_TOKEN         the user token
MANYHANDS_FINGERPRINT   of its certificate
STATE                   address, token and certificate, as `manyhands up` left them

A state folder that is given is an argument: the environment, which may be about another cluster,
is not looked at. Where the address is the folder's, so are token and certificate: the variables for
them are those of hubs too. Plain HTTP is spoken on loopback, where somebody said so: a URL
http://..., or `manyhands up --plain` in STATE. Otherwise no token is shown to who cannot prove what
he is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from manyhands.cluster.code import PREFIX, Code, read_code
from manyhands.cluster.identity import ADDRESS, TOKEN, default_state, read_fingerprint, read_text
from manyhands.cluster.routes import Role
from manyhands.core.address import (
    check_fingerprint,
    host_port,
    is_loopback,
    redact,
    split_host_port,
)
from manyhands.core.errors import AddressError, NoMeetingPoint

PORT = 12347
_DEFAULT = f"127.0.0.1:{PORT}"


def find_coordinator(
    address: str | None = None,
    *,
    token: str | None = None,
    fingerprint: str | None = None,
    state: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Code:
    """Where the coordinator is and how to speak to it, as a user. Raises UsageError kinds."""
    environ = os.environ if environ is None else environ
    if state is None:
        state = default_state(environ)
    else:
        environ = {}
    given = address or environ.get("MANYHANDS_COORDINATOR") or ""
    if given.strip().startswith(PREFIX):
        code = read_code(given)
        if code.role is not Role.USER:
            raise AddressError(
                "this code lets agents join; it cannot submit jobs",
                hint="use it with `manyhands agent`; users have the token in the state folder",
            )
        return code
    noted = read_text(state / ADDRESS)
    if noted and not given:
        environ = {}
    host, port, scheme = _split(given or noted or _DEFAULT)
    if not scheme and noted and is_loopback(host) and _split(noted)[1] == port:
        scheme = _split(noted)[2]
    pin = check_fingerprint(fingerprint or environ.get("MANYHANDS_FINGERPRINT") or "")
    if not pin and scheme == "http" and not is_loopback(host):
        raise AddressError(
            f"http://{host_port(host, port)} would carry the token in the clear",
            hint="write https://, with MANYHANDS_FINGERPRINT",
        )
    token = token or environ.get("MANYHANDS_TOKEN") or read_text(state / TOKEN)
    if not token:
        if not given and not noted:
            raise NoMeetingPoint(
                f"no cluster was ever up with its state in {state}",
                hint="`manyhands up` starts one; elsewhere, MANYHANDS_COORDINATOR is its user code",
            )
        raise NoMeetingPoint(
            f"no token for the coordinator at {host_port(host, port)}",
            hint=f"is it up? `manyhands up` leaves one in {state}; or set MANYHANDS_COORDINATOR "
            "with MANYHANDS_TOKEN, and give no --state",
        )
    if not token.isascii() or not token.isprintable():
        raise AddressError("the token has characters that no token has", hint="copy it again")
    if not pin and scheme != "http":
        pin = read_fingerprint(state)
        if not pin:
            raise AddressError(
                f"nothing says which certificate the coordinator at {host_port(host, port)} has",
                hint="set MANYHANDS_COORDINATOR with MANYHANDS_FINGERPRINT, no --state; or use "
                "the user code that `manyhands up` leaves in its state folder, as the file `code`",
            )
    return Code(role=Role.USER, host=host, port=port, token=token, fingerprint=pin)


def _split(text: str) -> tuple[str, int, str]:
    """HOST, PORT and the scheme if one is said."""
    text = text.strip().strip("'\"")
    scheme, sign, rest = text.partition("://")
    if not sign:
        scheme, rest = "", text
    if scheme not in ("", "http", "https"):
        raise AddressError(
            f"{redact(text)!r} is not the address of a coordinator", hint="write HOST:PORT"
        )
    host, port = split_host_port(rest.removesuffix("/"), PORT)
    return ("127.0.0.1" if host == "0.0.0.0" else host), port, scheme
