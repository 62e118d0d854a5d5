"""Manifest: the JSON half of a checkpoint. It says what the tensor file must be, to the bit."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import xxhash

from manyhands.checkpoint.tensors import Entry, Seal
from manyhands.checkpoint.tree import Json
from manyhands.core.errors import Malformed, UsageError, WrongVersion

VERSION = 1
MAX_BYTES = 64 << 20
_VERSION, _DIGEST = "manyhands_checkpoint", "manifest_digest"  # keys beside those of a Manifest


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything of a checkpoint but the values of its tensors; `about` and `state` are trees."""

    round: Annotated[int, msgspec.Meta(ge=0)]
    chain: bytes
    about: Json
    state: Json
    tensors: list[Entry]
    file: Seal


def encode(manifest: Manifest) -> bytes:
    """As JSON with a digest of its own. Raises UsageError when there is too much of it."""
    body = {_VERSION: VERSION, **msgspec.to_builtins(manifest)}
    text = _text_of({**body, _DIGEST: xxhash.xxh3_128_hexdigest(_text_of(body))})
    if len(text) > MAX_BYTES:
        raise UsageError(
            f"what is no tensor in this state makes {len(text)} bytes of JSON",
            hint=f"at most {MAX_BYTES} are taken: keep large data in tensors",
        )
    return text


def decode(text: bytes) -> Manifest:
    """Raises Malformed, and WrongVersion for what a newer release wrote."""
    if len(text) > MAX_BYTES:
        raise Malformed(f"its manifest has more than {MAX_BYTES} bytes")
    try:
        body = json.loads(text)
        version = body.pop(_VERSION)
        if type(version) is int and version > VERSION:
            raise WrongVersion(
                f"it is of format {version}, this release reads up to {VERSION}",
                version=version,
                hint="update manyhands",
            )
        digest = body.pop(_DIGEST)
        if digest != xxhash.xxh3_128_hexdigest(_text_of({_VERSION: version, **body})):
            raise Malformed("its manifest was changed: the digest is another")
        return msgspec.convert(body, Manifest)
    # Not JSON, no object, without a version or digest, deeper than any state, not a Manifest.
    except (
        *(ValueError, AttributeError, TypeError, KeyError, RecursionError),
        msgspec.ValidationError,
    ) as error:
        raise Malformed(f"its manifest cannot be read: {str(error)[:200]}") from None


def _text_of(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
