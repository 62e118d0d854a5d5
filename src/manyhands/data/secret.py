"""Secret: what must not stand in a Data.toml, found by how it is called.

A Data.toml is read by many, committed and copied; keys and passwords belong to the environment or
to a profile. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast
from urllib.parse import parse_qsl, urlsplit

from manyhands.core.address import redact

REMEDY = (
    "keys and passwords do not live in a Data.toml: take them out, and give them in the "
    "environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what the file system reads) "
    'or in a profile of ~/.aws (profile = "...")'
)
# Whatever is in a table of such a name is a secret: a session's cookie, the two halves of a login.
_WHOLE = frozenset({"auth", "authorization", "credential", "credentials", "cookie", "cookies"})
_WORDS = _WHOLE | {
    *("key", "secret", "token", "password", "passwd", "passphrase", "pwd", "signature", "sig"),
}
_PHRASES = ("connection string", "conn string", "conn str")  # Azure's has a key in it
# They name where a secret is, or of which kind, and are none.
_PLACES = frozenset({"file", "path", "dir", "folder", "env", "name", "type", "method", "mode"})
# Values that gcsfs and its like take instead of a secret.
_NOT_SECRET = frozenset({"", "anon", "cloud", "google_default", "cache", "browser"})
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_QUERY = re.compile(r"([?&])([^\s?&#=]+)=[^\s&#]*")
# Of a web server there are no users: what stands before its name is a token.
_WEB_USER = re.compile(r"(https?://)[^\s/@:?#]+@")


def sounds_secret(name: str) -> bool:
    """Whether a field of this name holds a secret: `key`, `aws_secret_access_key`, `apiKey`."""
    words = _words_of(name)
    said = bool(_WORDS.intersection(words)) or any(p in " ".join(words) for p in _PHRASES)
    return said and words[-1] not in _PLACES


def secret_fields(table: Mapping[str, object], above: str = "") -> Iterator[str]:
    """The fields of a table, and of those in it, that hold a secret, by their dotted names."""
    for name, value in table.items():
        yield from _secrets_in(name, value, f"{above}{name}", within=False)


def hide(table: Mapping[str, object]) -> dict[str, object]:
    """The table with *** for every secret; for what is shown."""
    return {name: _hidden(name, value, within=False) for name, value in table.items()}


def _secrets_in(name: str, value: object, field: str, *, within: bool) -> Iterator[str]:
    """`within`: all that is in the table that has it is secret."""
    if isinstance(value, Mapping):
        below = within or _is_whole(name)
        for inner, item in cast("Mapping[str, object]", value).items():
            yield from _secrets_in(inner, item, f"{field}.{inner}", within=below)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(cast("Sequence[object]", value)):
            yield from _secrets_in(name, item, f"{field}[{place}]", within=within)
    elif _is_secret(name, value, within=within):
        yield field


def _hidden(name: str, value: object, *, within: bool) -> object:
    if isinstance(value, Mapping):
        below, table = within or _is_whole(name), cast("Mapping[str, object]", value)
        return {inner: _hidden(inner, item, within=below) for inner, item in table.items()}
    if isinstance(value, (list, tuple)):
        return [_hidden(name, item, within=within) for item in cast("Sequence[object]", value)]
    return "***" if _is_secret(name, value, within=within) else value


def _is_secret(name: str, value: object, *, within: bool) -> bool:
    if isinstance(value, bool) or (isinstance(value, str) and value in _NOT_SECRET):
        return False
    if within and not _PLACES.intersection(_words_of(name)[-1:]):
        return True
    return sounds_secret(name) or (isinstance(value, str) and _url_has_secret(value))


def _is_whole(name: str) -> bool:
    return sounds_secret(name) and bool(_WHOLE.intersection(_words_of(name)))


def _words_of(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def _url_has_secret(text: str) -> bool:
    """Whether a URL, or one in a chain, has a password, a token before the name of a web server,
    or a key or signature in its query.
    """
    for url in text.split("::"):
        if "://" not in url:
            continue
        try:
            parts = urlsplit(url)
            if parts.password or any(sounds_secret(key) for key, _ in parse_qsl(parts.query)):
                return True
            if parts.username and parts.scheme in ("http", "https"):
                return True
        except ValueError:
            continue  # no URL at all; the driver says so
    return False


def redacted(text: str) -> str:
    """Text without passwords and keys of the URLs in it; for messages."""
    return _QUERY.sub(_hidden_pair, _WEB_USER.sub(r"\1***@", redact(text)))


def _hidden_pair(pair: re.Match[str]) -> str:
    return f"{pair[1]}{pair[2]}=***" if sounds_secret(pair[2]) else pair[0]
