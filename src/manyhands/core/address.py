"""Addresses: where the peers of a run meet, as URLs and join codes.

    local:///RUN                                     inside one process
    hub://HOST:PORT/RUN                              our relay
    amqp(s)://USER:PASSWORD@HOST:PORT/VHOST?run=RUN  RabbitMQ
    mh1-...[?run=RUN]                                address, fingerprint, token (and run) in a word

Secrets are kept out of `repr` and of `redact()`ed text; they are in `HubAddress.code()` by intent.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import zlib
from dataclasses import dataclass, field, replace
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import msgspec

from manyhands.core.errors import AddressError

HUB_PORT = 7799
_CODE = "mh1-"
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class LocalAddress:
    """A room inside this process."""

    run: str | None = None

    def __str__(self) -> str:
        return f"local:///{self.run or ''}"


@dataclass(frozen=True, kw_only=True)
class HubAddress:
    """A hub. Without `insecure`, peers insist on TLS with this very certificate and on a token."""

    host: str
    port: int = HUB_PORT
    run: str | None = None
    token: str = field(default="", repr=False)
    fingerprint: str = ""  # SHA-256 of the certificate, hex
    insecure: bool = False
    exposed: bool = False  # insecure beyond loopback: asked for in so many words, never by an URL

    def __str__(self) -> str:
        return f"hub://{host_port(self.host, self.port)}/{self.run or ''}"

    def code(self) -> str:
        """The join code: everything a peer needs to come in. It is a secret."""
        body = msgspec.msgpack.encode(
            (self.host, self.port, bytes.fromhex(self.fingerprint), self.token, self.run)
        )
        sealed = body + zlib.crc32(body).to_bytes(4, "big")
        return _CODE + base64.urlsafe_b64encode(sealed).decode().rstrip("=")


@dataclass(frozen=True, kw_only=True)
class AmqpAddress:
    """A RabbitMQ virtual host."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    vhost: str = "/"
    run: str | None = None
    tls: bool = True
    ca_file: str | None = None  # trust this authority instead of the system's

    def __str__(self) -> str:
        scheme = "amqps" if self.tls else "amqp"
        return f"{scheme}://{self.user}:***@{host_port(self.host, self.port)}/{self.vhost}"


Address = LocalAddress | HubAddress | AmqpAddress


def parse_address(text: str, *, run: str | None = None) -> Address:
    """Read a URL or a join code; `run`, when given, must not contradict the one it names."""
    text = text.strip().strip("'\"")  # quotes stay on where a shell or a form does not take them
    address = _parse_code(text) if text.startswith(_CODE) else _parse_url(text)
    if run is not None:
        if address.run is not None and address.run != run:
            raise AddressError(
                f"the address names run {address.run!r}, the caller {run!r}", hint="name it once"
            )
        address = replace(address, run=run)
    if address.run is not None:
        check_run(address.run)
    return address


def check_run(run: str) -> None:
    """Raise AddressError unless `run` can name a run."""
    if not _RUN.fullmatch(run):
        raise AddressError(
            f"run name {run[:80]!r} cannot be used",
            hint="1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
        )


def host_port(host: str, port: int) -> str:
    """`host:port`, with the brackets an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str, default_port: int) -> tuple[str, int]:
    """Read `HOST`, `HOST:PORT`, `[V6]:PORT` or `:PORT` (all interfaces)."""
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port
    except ValueError:
        raise AddressError(f"{text!r} has no valid port", hint="write HOST:PORT") from None
    if any(sign in text for sign in "/?#@"):
        raise AddressError(f"{redact(text)!r} is more than a host", hint="write HOST:PORT")
    return parts.hostname or "0.0.0.0", default_port if port is None else port


def is_loopback(host: str) -> bool:
    """Whether traffic to `host` stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def redact(text: str) -> str:
    """`text` without passwords of URLs, tokens and join codes; for logs and reports."""
    # Greedy: an unquoted / or @ in a password is the user's mistake, and still a password.
    text = re.sub(r"(\w+://[^\s:/@]*):\S*@", r"\1:***@", text)
    text = re.sub(r"([\w.+-]+):(?!//)\S*@", r"\1:***@", text)  # not quite a URL
    text = re.sub(r"([?&](?:token|password)=)[^\s&#]*", r"\1***", text)
    text = re.sub(r"(Bearer )\S+", r"\1***", text, flags=re.IGNORECASE)
    # A hub's join code, and a cluster's.
    return re.sub(r"(mhc?1-)[\w-]+", r"\1***", text, flags=re.IGNORECASE)


def _parse_url(text: str) -> Address:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        # Without Python's own words: they quote what follows a colon, and it may be a password.
        raise AddressError(
            f"{redact(text)!r} is not an address: its host or port cannot be read",
            hint="write %2F, %40 and %3A for the characters / @ : in a password",
        ) from None
    if (parts.hostname or "").startswith(_CODE):
        raise AddressError(
            f"a join code is a whole address, without {parts.scheme}:// before it",
            hint=f"give the code alone, or {_CODE}...?run=RUN",
        )
    query = _query(parts, text)
    if parts.scheme == "local":
        return LocalAddress(run=_path(parts) or query.get("run"))
    if not parts.hostname or parts.scheme not in ("hub", "amqp", "amqps"):
        raise AddressError(
            f"expected an address, got {redact(text)!r}",
            hint="local:///RUN, hub://HOST:PORT/RUN, amqps://USER:PASSWORD@HOST/VHOST?run=RUN, "
            "or a join code mh1-... as `manyhands hub` prints it",
        )
    insecure = query.get("insecure") in ("1", "true")
    if parts.scheme == "hub":
        return HubAddress(
            host=parts.hostname,
            port=HUB_PORT if port is None else port,
            run=_path(parts) or query.get("run"),
            token=query.get("token", ""),
            fingerprint=check_fingerprint(query.get("fingerprint", "")),
            insecure=insecure,
        )
    tls = parts.scheme == "amqps"
    if not tls and not insecure and not is_loopback(parts.hostname):
        raise AddressError(
            f"amqp:// to {parts.hostname} would send the password in the clear",
            hint="use amqps://, or add ?insecure=1 if the network between is yours",
        )
    return AmqpAddress(
        host=parts.hostname,
        port=(5671 if tls else 5672) if port is None else port,
        user=unquote(parts.username or "guest"),
        password=unquote(parts.password or "guest"),
        # As everywhere with RabbitMQ: no path and "/" mean the default virtual host "/".
        vhost=unquote(parts.path[1:]) or "/",
        run=query.get("run"),
        tls=tls,
        ca_file=query.get("ca_file"),
    )


def _query(parts: SplitResult, text: str) -> dict[str, str]:
    known = {
        "local": {"run"},
        "hub": {"run", "token", "fingerprint", "insecure"},
        "amqp": {"run", "insecure"},
        "amqps": {"run", "insecure", "ca_file"},
    }.get(parts.scheme, set())
    query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    unknown = sorted(set(query) - known)
    if known and unknown:
        raise AddressError(
            f"{redact(text)!r} has unknown options {', '.join(unknown)}",
            hint=f"{parts.scheme}:// takes {', '.join(sorted(known))}",
        )
    return query


def _path(parts: SplitResult) -> str | None:
    return unquote(parts.path.strip("/")) or None


def check_fingerprint(text: str) -> str:
    """A SHA-256 fingerprint as lower-case hex without colons; '' stays ''."""
    plain = text.replace(":", "").lower()
    if plain and not re.fullmatch(r"[0-9a-f]{64}", plain):
        raise AddressError(
            f"fingerprint {text[:80]!r} is not a SHA-256 digest", hint="64 hexadecimal digits"
        )
    return plain


def _parse_code(text: str) -> HubAddress:
    hint = "copy the whole code again, from mh1- to its last character"
    packed, _, options = text[len(_CODE) :].partition("?")
    query = {key: values[-1] for key, values in parse_qs(options).items()}
    if query.keys() - {"run"}:
        unknown = ", ".join(sorted(query.keys() - {"run"}))
        raise AddressError(f"a join code takes no option {unknown}", hint=f"{_CODE}...?run=RUN")
    try:
        sealed = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise AddressError("the join code has characters that no code has", hint=hint) from None
    body, check = sealed[:-4], sealed[-4:]
    if zlib.crc32(body).to_bytes(4, "big") != check:
        raise AddressError("the join code is damaged or incomplete", hint=hint)
    try:
        host, port, pin, token, run = msgspec.msgpack.decode(
            body, type=tuple[str, int, bytes, str, str | None]
        )
    except msgspec.DecodeError:
        raise AddressError("the join code was made by another release", hint=hint) from None
    return HubAddress(
        host=host,
        port=port,
        run=query.get("run", run),
        token=token,
        fingerprint=check_fingerprint(pin.hex()),
        insecure=not pin,
    )
