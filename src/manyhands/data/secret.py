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
_WORDS = frozenset(
    {"key", "secret", "token", "password", "passwd", "passphrase", "pwd", "signature", "sig"}
)
# They name where a secret is, and are none.
_PLACES = frozenset({"file", "path", "dir", "folder", "env", "name"})
# Values that gcsfs and its like take instead of a secret.
_NOT_SECRET = frozenset({"", "anon", "cloud", "google_default", "cache", "browser"})
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_QUERY = re.compile(r"([?&])([^\s?&#=]+)=[^\s&#]*")


def sounds_secret(name: str) -> bool:
    """Whether a field of this name holds a secret: `key`, `aws_secret_access_key`, `apiKey`."""
    words = [word.lower() for word in _WORD.findall(name)]
    return bool(_WORDS.intersection(words)) and words[-1] not in _PLACES


def secret_fields(table: Mapping[str, object], above: str = "") -> Iterator[str]:
    """The fields of a table, and of those in it, that hold a secret, by their dotted names."""
    for name, value in table.items():
        yield from _secrets_in(name, value, f"{above}{name}")


def hide(table: Mapping[str, object]) -> dict[str, object]:
    """The table with *** for every secret; for what is shown."""
    return {name: _hidden(name, value) for name, value in table.items()}


def _secrets_in(name: str, value: object, field: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from secret_fields(cast("Mapping[str, object]", value), f"{field}.")
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(cast("Sequence[object]", value)):
            yield from _secrets_in(name, item, f"{field}[{place}]")
    elif _is_secret(name, value):
        yield field


def _hidden(name: str, value: object) -> object:
    if isinstance(value, Mapping):
        return hide(cast("Mapping[str, object]", value))
    if isinstance(value, (list, tuple)):
        return [_hidden(name, item) for item in cast("Sequence[object]", value)]
    return "***" if _is_secret(name, value) else value


def _is_secret(name: str, value: object) -> bool:
    if isinstance(value, bool) or (isinstance(value, str) and value in _NOT_SECRET):
        return False
    return sounds_secret(name) or (isinstance(value, str) and _url_has_secret(value))


def _url_has_secret(text: str) -> bool:
    """Whether a URL, or one in a chain, has a password, or a key or signature in its query."""
    for url in text.split("::"):
        if "://" not in url:
            continue
        try:
            parts = urlsplit(url)
            if parts.password or any(sounds_secret(key) for key, _ in parse_qsl(parts.query)):
                return True
        except ValueError:
            continue  # no URL at all; the driver says so
    return False


def redacted(text: str) -> str:
    """Text without passwords and keys of the URLs in it; for messages."""
    return _QUERY.sub(_hidden_pair, redact(text))


def _hidden_pair(pair: re.Match[str]) -> str:
    return f"{pair[1]}{pair[2]}=***" if sounds_secret(pair[2]) else pair[0]
