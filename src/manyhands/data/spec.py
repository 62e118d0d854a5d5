"""Spec: how a data set is named, `name?key=value#sub/path`, and how a place inside a tree is.

The name is as it stands in Data.toml. Query and fragment are percent-decoded; the fragment is a
place inside the data set. Pure: nothing is looked up here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from manyhands.core.errors import UsageError

# A letter or digit of any script, then more of them, - and _; / and . only before one.
_NAME = re.compile(r"[^\W_](?:[-\w]|[/.](?=[^\W_]))*")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2}).{0,2}", re.DOTALL)
_SHOWN = 80  # characters of what a user typed


@dataclass(frozen=True, slots=True)
class Spec:
    """A data set, what its opener is told, and the place inside it that is meant."""

    name: str
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    fragment: str = ""


def parse_spec(text: str) -> Spec:
    """Read `name?key=value&key=value#sub/path`. Raises UsageError."""
    rest, _, fragment = text.partition("#")
    name, _, query = rest.partition("?")
    if (wrong := name_problem(name)) is not None:
        raise UsageError(
            f"{text[:_SHOWN]!r} names no data set: {wrong}",
            hint="write name, name#sub/path or name?key=value#sub/path; a folder or URL is given "
            "as dataset(name, path=...)",
        )
    pairs: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise UsageError(
                f"{text[:_SHOWN]!r}: {pair[:_SHOWN]!r} is no key=value",
                hint="write %26 and %3D for & and = in a value",
            )
        key = _decode(key, text)
        if key in pairs:
            raise UsageError(f"{text[:_SHOWN]!r}: {key[:_SHOWN]!r} is given twice")
        pairs[key] = _decode(value, text)
    inside = _decode(fragment, text)
    parts_of(inside)
    return Spec(name, pairs, inside)


def name_problem(name: str, version: int = 1) -> str | None:
    """What is wrong with a name in a Data.toml of this version, or None."""
    if not _NAME.fullmatch(name):
        return (
            f"{name[:_SHOWN]!r} is not made of letters, digits, '-' and '_', beginning with a "
            "letter or digit, where each '/' and '.' stands before a letter or digit"
        )
    if version == 0 and "/" in name:
        return f"{name[:_SHOWN]!r} has a '/', which data_config_version 0 does not allow"
    return None


def parts_of(path: str) -> tuple[str, ...]:
    """The names along a path inside a tree; '' is the tree itself. Raises UsageError.

    Paths go down only, with '/' between the names; one '/' at the end is allowed.
    """
    parts = tuple(path.removesuffix("/").split("/")) if path else ()
    if any(part in ("", ".", "..") or not _is_sayable(part) for part in parts):
        raise UsageError(
            f"{path[:_SHOWN]!r} is no path inside a data set",
            hint="write it like 'a/b.txt': no '/' at the beginning, no empty, '.' or '..' part",
        )
    return parts


def _is_sayable(name: str) -> bool:
    """Whether a file system can be asked for it; names that are no UTF-8 come as surrogates."""
    try:
        return b"\0" not in name.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False


def _decode(text: str, spec: str) -> str:
    if wrong := _BAD_ESCAPE.search(text):
        raise UsageError(
            f"{spec[:_SHOWN]!r}: {wrong[0]!r} is no percent-escape",
            hint="write %25 for the character %",
        )
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise UsageError(
            f"{spec[:_SHOWN]!r}: {text[:_SHOWN]!r} is not UTF-8 once its escapes are decoded"
        ) from None
