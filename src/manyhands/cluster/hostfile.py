"""Hostfiles: which hosts a cluster has, and how many slots each gives.

    #address,gpu_idx           a comment; DeepPool's files begin with it
    127.0.0.1,0                one GPU of a host (or its CPU share 0, where there is no GPU)
    127.0.0.1,1                the same host: it gives two
    10.0.0.7,0-3               four
    ann@node1 slots=8          a host that gives eight slots
    node2                      a host that gives all it has

Pure: text in, hosts out, every line that cannot be used named at once. A comment is a line that
begins with `#` or `/`, or what follows ` #` on any line. An address is what ssh is given, so it
may name a user.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from manyhands.cluster.job import MAX_SLOTS, NAME
from manyhands.core.address import is_loopback
from manyhands.core.errors import SettingsError

FORMS = "ADDRESS,GPU or HOST [slots=N]"
_NAMES_OF_HERE = frozenset({"localhost", "::1"})
_LABELS = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\\-]*")
_MOST_LETTERS = 63  # of an address: with it begins the name of a host


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLine:
    """One host of the file, whatever the number of its lines."""

    address: str
    """Without brackets; a user before an `@` is ssh's."""
    name: str
    """What the cluster calls it."""
    gpus: tuple[int, ...] = ()
    """Those that it gives, in the order of the lines; none: they are not named."""
    slots: int | None = None
    """How many it gives; None: all it has."""
    line: int = 0
    """Where it is first named."""

    @property
    def num_slots(self) -> int | None:
        """How many slots it is to have; None: all it has."""
        return len(self.gpus) or self.slots

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return is_loopback(self.address)


class _Wrong(Exception):
    """What is wrong with a line, for the list of all that is."""


def read_hostfile(path: Path) -> tuple[HostLine, ...]:
    """The hosts of a file, in its order. Raises SettingsError: all that is wrong, by line."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SettingsError(
            f"cannot read the hostfile {path}: {error.strerror}", hint="--hostfile FILE"
        ) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise SettingsError(
            f"{path}:{line}: this is no text (UTF-8)", hint=f"one host a line: {FORMS}"
        ) from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, file: str = "hostfile") -> tuple[HostLine, ...]:
    """The hosts of this text; `file` is what errors call it. Raises SettingsError."""
    hosts: dict[str, HostLine] = {}
    wrong: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if (found := _parse(line, number)) is not None:
                hosts[found.address] = _joined(hosts, found)
        except _Wrong as problem:
            wrong.append(f"{file}:{number}: {problem}")
    wrong += [f"{file}:{text}" for text in _namesakes(hosts)]
    if not hosts and not wrong:
        wrong = [f"{file}: it names no host"]
    if wrong:
        more = f"{file} cannot be used:\n  " if len(wrong) > 1 else ""
        raise SettingsError(more + "\n  ".join(wrong), hint=f"one host a line: {FORMS}")
    return tuple(hosts.values())


def host_name(address: str) -> str:
    """What the cluster calls the host at an address: letters, digits, `.`, `_`, `-`."""
    host = address.rpartition("@")[2]
    if ":" in host:
        host = "ip6-" + host.replace("%", "-").replace(":", "-")
    return host


def _parse(line: str, number: int) -> HostLine | None:
    words = line.replace("\t", " ").partition(" #")[0].strip()
    if not words or words[0] in "#/":
        return None
    where, comma, which = words.partition(",")
    if comma:
        address = _address(where.strip())
        return HostLine(
            address=address, name=host_name(address), gpus=_gpus(which.strip()), line=number
        )
    where, *options = words.split()
    address = _address(where)
    return HostLine(
        address=address, name=host_name(address), slots=_slots(options, words), line=number
    )


def _joined(hosts: Mapping[str, HostLine], new: HostLine) -> HostLine:
    """One host of what an earlier line and this one say."""
    old = hosts.get(new.address)
    if old is None:
        return new
    if not new.gpus or not old.gpus:
        raise _Wrong(
            f"{new.address} is in line {old.line} already; only lines with a GPU each can be many"
        )
    if twice := sorted(set(old.gpus) & set(new.gpus)):
        raise _Wrong(f"GPU {twice[0]} of {new.address} is named twice (see line {old.line})")
    return HostLine(address=old.address, name=old.name, gpus=(*old.gpus, *new.gpus), line=old.line)


def _namesakes(hosts: Mapping[str, HostLine]) -> Iterator[str]:
    """Two users of one machine, say: the cluster could not tell them apart."""
    first: dict[str, HostLine] = {}
    for host in hosts.values():
        other = first.setdefault(host.name, host)
        if other is not host:
            yield (
                f"{host.line}: {host.address} and {other.address} (line {other.line}) "
                "are one host: name it once"
            )


def _address(text: str) -> str:
    user, at, host = text.rpartition("@")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if at and not _USER.fullmatch(user):
        raise _Wrong(f"{user!r} before the @ of {text!r} is no user name")
    if ":" in bare or bare != host:
        _check_v6(bare, text)
    elif not _LABELS.fullmatch(bare) or len(bare) > _MOST_LETTERS or ".." in bare:
        raise _Wrong(f"expected {FORMS}, but {text!r} is no address")
    elif re.fullmatch(r"[0-9.]+", bare):
        _check_v4(bare)
    bare = bare.lower()
    bare = "127.0.0.1" if bare in _NAMES_OF_HERE else bare
    if not re.fullmatch(NAME, host_name(bare)):  # a zone may be anything
        raise _Wrong(f"{text[:80]!r} cannot be made a host's name: {host_name(bare)[:80]!r}")
    return user + at + bare


def _check_v4(host: str) -> None:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise _Wrong(f"{host} is no IPv4 address") from None


def _check_v6(host: str, text: str) -> None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        if re.fullmatch(r"[^:]+:\d+", host):
            raise _Wrong(
                f"{text!r} has a port: where ssh listens belongs into ~/.ssh/config, "
                "or into --ssh 'ssh -p PORT'"
            ) from None
        raise _Wrong(f"{text!r} is no IPv6 address") from None


def _gpus(text: str) -> tuple[int, ...]:
    found = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", text)
    if found is None:
        raise _Wrong(f"expected a GPU after the comma, such as 0 or 0-3, got {text!r}")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise _Wrong(f"GPUs {text} are none: the first is above the last")
    if last >= MAX_SLOTS:
        raise _Wrong(f"GPU {last} is above {MAX_SLOTS - 1}")
    return tuple(range(first, last + 1))


def _slots(options: list[str], line: str) -> int | None:
    if not options:
        return None
    found = re.fullmatch(r"slots=([0-9]+)", "".join(options))
    if found is None:
        raise _Wrong(f"expected {FORMS}, got {line!r}")
    if not 1 <= len(found[1]) <= len(str(MAX_SLOTS)) or not 1 <= int(found[1]) <= MAX_SLOTS:
        raise _Wrong(f"slots={found[1][:20]} is not between 1 and {MAX_SLOTS}")
    return int(found[1])
