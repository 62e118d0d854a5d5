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
# Beside a storage an entry has what its owner likes: eos_token, primary_key. These mean one thing.
_CLEAR_WORDS = frozenset(
    {
        *("password", "passwd", "passphrase", "pwd", "secret", "secrets"),
        *("auth", "authorization", "credential", "credentials", "cookie", "cookies"),
    }
)
_CLEAR_PHRASES = (
    *_PHRASES,
    *("api key", "access key", "secret key", "private key", "account key"),
    *("session key", "signing key", "encryption key", "storage key", "subscription key"),
    *("shared key", "aws key", "gcp key", "wandb key"),
    *("api token", "access token", "auth token", "bearer token", "refresh token"),
)
# A token of text has one of these before it; any other is somebody's: hf_token, session_token.
_OF_TEXT = frozenset(
    {
        *("eos", "bos", "sos", "eot", "sot", "eod", "eom", "boi", "eoi", "boa", "eoa", "nl"),
        *("pad", "padding", "unk", "unknown", "oov", "sep", "separator", "cls", "mask", "masked"),
        *("start", "begin", "end", "stop", "first", "last", "prefix", "middle", "suffix", "fim"),
        *("special", "additional", "extra", "added", "control", "blank", "space", "newline"),
        *("empty", "null", "sentinel", "placeholder", "delimiter", "boundary", "turn", "think"),
        *("image", "img", "picture", "vision", "audio", "speech", "video", "text", "word"),
        *("language", "lang", "task", "sentence", "document", "doc", "speaker", "class", "label"),
        *("max", "min", "num", "per"),
    }
)
# They name where a secret is, of which kind, or how many, and are none.
_PLACES = frozenset(
    {
        *("file", "path", "dir", "folder", "env", "url", "uri", "name"),
        *("type", "method", "mode", "scheme", "count"),
    }
)
# Values that gcsfs and its like take instead of a secret.
_NOT_SECRET = frozenset({"", "anon", "cloud", "google_default", "cache", "browser"})
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
# Two words that people write as one.
_TOGETHER = re.compile(
    "(api|access|account|auth|bearer|client|private|refresh|sas|secret|session|shared|signing|storage)"
    "(key|secret|token)(id)?"
)
_QUERY = re.compile(r"([?&])([^\s?&#=]+)=[^\s&#]*")
# Of a web server there are no users: what stands before its name is a token.
_WEB_USER = re.compile(r"(https?://)[^\s/@:?#]+@")


def sounds_secret(name: str) -> bool:
    """Whether a field of this name holds a secret: `key`, `aws_secret_access_key`, `apiKey`."""
    words = _words_of(name)
    said = bool(_WORDS.intersection(words)) or any(p in " ".join(words) for p in _PHRASES)
    return said and words[-1] not in _PLACES


def is_clear(name: str) -> bool:
    """Whether a field of this name holds a secret wherever it stands: `api_key`, and not `key`."""
    words = _words_of(name)
    whole = " ".join(words)
    phrase = any(f" {p} " in f" {whole} " for p in _CLEAR_PHRASES)
    said = phrase or _is_token(words) or bool(_CLEAR_WORDS.intersection(words))
    return said and words[-1] not in _PLACES


def _is_token(words: Sequence[str]) -> bool:
    """Whether they name a token that lets somebody in, and none of text; a number may follow."""
    *before, last = [word for word in words if not word.isdigit()] or [""]
    return last == "token" and not _OF_TEXT.intersection(before[-1:])


def secret_fields(table: Mapping[str, object], *, beside: bool = False) -> Iterator[str]:
    """The fields of a table, and of those in it, that hold a secret, by their dotted names.

    `beside` a storage only what is clear counts: names that mean nothing else.
    """
    for name, value in table.items():
        yield from _secrets_in(name, value, name, within=False, beside=beside)


def hide(table: Mapping[str, object], *, beside: bool = False) -> dict[str, object]:
    """The table with *** for every secret; for what is shown."""
    return {
        name: _hidden(name, value, within=False, beside=beside) for name, value in table.items()
    }


def _secrets_in(
    name: str, value: object, field: str, *, within: bool, beside: bool
) -> Iterator[str]:
    """`within`: all that is in the table that has it is secret."""
    if isinstance(value, Mapping):
        below = within or _is_whole(name, beside=beside)
        for inner, item in cast("Mapping[str, object]", value).items():
            yield from _secrets_in(inner, item, f"{field}.{inner}", within=below, beside=beside)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(cast("Sequence[object]", value)):
            yield from _secrets_in(name, item, f"{field}[{place}]", within=within, beside=beside)
    elif _is_secret(name, value, within=within, beside=beside):
        yield field


def _hidden(name: str, value: object, *, within: bool, beside: bool) -> object:
    if isinstance(value, Mapping):
        below = within or _is_whole(name, beside=beside)
        table = cast("Mapping[str, object]", value)
        return {i: _hidden(i, item, within=below, beside=beside) for i, item in table.items()}
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[object]", value)
        return [_hidden(name, item, within=within, beside=beside) for item in items]
    return "***" if _is_secret(name, value, within=within, beside=beside) else value


def _is_secret(name: str, value: object, *, within: bool, beside: bool) -> bool:
    if isinstance(value, bool) or (isinstance(value, str) and value in _NOT_SECRET):
        return False
    if within and not _PLACES.intersection(_words_of(name)[-1:]):
        return True
    said = is_clear(name) if beside else sounds_secret(name)
    return said or (isinstance(value, str) and _url_has_secret(value))


def _is_whole(name: str, *, beside: bool) -> bool:
    said = is_clear(name) if beside else sounds_secret(name)
    return said and bool(_WHOLE.intersection(_words_of(name)))


def _words_of(name: str) -> list[str]:
    words: list[str] = []
    for word in map(str.lower, _WORD.findall(name)):
        two = _TOGETHER.fullmatch(word)
        words += [word] if two is None else [part for part in two.groups() if part]
    return words


def _url_has_secret(text: str) -> bool:
    """Whether a URL, or one in a chain, has a password, a token before the name of a web server,
    or a key or signature in its query.
    """
    for url in text.split("::"):
        if "://" not in url:
            continue
        try:
            parts = urlsplit(url)
            asked = [key for key, _ in parse_qsl(parts.query)]
            if parts.password or any(sounds_secret(key) for key in asked):
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
