"""Tree: what `state_dict()` gives, as plain JSON and a list of tensors, and back.

Nothing is pickled and nothing evaluated: a tree is made of dicts, lists, tuples, Counters (as
MultiStepLR has), texts, numbers, bytes, None and tensors. Anything else is refused by its place.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from manyhands.core.errors import Malformed, UsageError

Json = Any
"""None, bool, int, float, str, or a list whose first element says what the rest is.

JSON has no infinity, and its readers differ in integers of more than 64 bits: these are texts, so
that every number comes back to the bit.
"""

_PLAIN = (type(None), bool, int, float, str)
_MAX_DEPTH = 64


class Flat(NamedTuple):
    """A tree whose tensors are numbered: `shape` says where each of `tensors` belongs."""

    shape: Json
    tensors: list[Tensor]
    names: list[str]  # of the tensors: their places in the tree


def flatten(tree: Any, place: str = "state") -> Flat:  # noqa: ANN401
    """The tree in two halves. The tensors are those of the tree, not copies. Raises UsageError."""
    flat = Flat([], [], [])
    return flat._replace(shape=_shape_of(tree, place, flat, 0))


def _shape_of(value: Any, place: str, flat: Flat, depth: int) -> Json:  # noqa: ANN401
    if depth > _MAX_DEPTH:
        raise UsageError(
            f"{place[:80]}... is nested more than {_MAX_DEPTH} deep",
            hint="does it contain itself? make the state flatter",
        )
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise UsageError(
                f"{place} is a tensor of layout {value.layout}", hint="only dense ones can be saved"
            )
        flat.tensors.append(value.detach())
        flat.names.append(place)
        return ["tensor", len(flat.tensors) - 1]
    if type(value) is float and not math.isfinite(value):
        return ["float", struct.pack(">d", value).hex()]
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return ["int", f"{value:x}"]
    if type(value) in _PLAIN:
        return value
    if isinstance(value, bytes):
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        items = [
            [_key_of(key, place), _shape_of(item, f"{place}.{key}", flat, depth + 1)]
            for key, item in cast("Mapping[Any, Any]", value).items()
        ]
        return [kind, *items]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        items = [
            _shape_of(item, f"{place}.{number}", flat, depth + 1)
            for number, item in enumerate(cast("Sequence[Any]", value))
        ]
        return [kind, *items]
    raise UsageError(
        f"{place} is a {type(value).__qualname__}, which cannot be saved without pickling it",
        hint="let its state_dict() give tensors, numbers, texts, lists, tuples and dicts of these",
    )


def _key_of(key: Any, place: str) -> str | int:  # noqa: ANN401
    if type(key) in (str, int):
        return key
    raise UsageError(
        f"{place} has a {type(key).__qualname__} as key", hint="only texts and integers can be keys"
    )


def unflatten(shape: Json, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401
    """The tree with these tensors in it. Raises Malformed for what no tree is."""
    used: set[int] = set()
    tree = _value_of(shape, tensors, used, 0)
    if len(used) != len(tensors):
        raise Malformed(f"{len(tensors)} tensors came for a state of {len(used)}")
    return tree


def _value_of(shape: Json, tensors: Sequence[Tensor], used: set[int], depth: int) -> Any:  # noqa: ANN401
    if type(shape) in _PLAIN:
        return shape
    if depth > _MAX_DEPTH or not isinstance(shape, list) or not shape:
        raise Malformed("a state is nested too deeply, or not of the shape of one")
    kind, *items = cast("list[Json]", shape)
    make = _MAKERS.get(kind) if isinstance(kind, str) else None
    if make is not None:
        return make(items, lambda inner: _value_of(inner, tensors, used, depth + 1))
    if kind == "tensor" and len(items) == 1 and type(items[0]) is int:
        number = items[0]
        if 0 <= number < len(tensors) and number not in used:
            used.add(number)
            return tensors[number]
    raise Malformed(f"a state has a part of no known kind: {_start_of(kind)!r}")


def _start_of(kind: Json) -> str:
    """For a message; a list is not quoted, it may be nested without end."""
    return kind[:80] if isinstance(kind, str) else type(kind).__name__


def _dict_of(items: list[Json], inner: Callable[[Json], Any]) -> dict[str | int, Any]:
    made: dict[str | int, Any] = {}
    for item in items:
        pair = cast("list[Json]", item) if isinstance(item, list) else []
        if len(pair) != 2 or type(pair[0]) not in (str, int):
            raise Malformed("a state has a dict whose items are none")
        made[pair[0]] = inner(pair[1])
    return made


def _bytes_of(items: list[Json], inner: Callable[[Json], Any]) -> bytes:
    try:
        (text,) = items
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError):
        raise Malformed("a state has bytes that are none") from None


def _number_of(items: list[Json], read: Callable[[str], float]) -> float:
    try:
        (text,) = items
        return read(text)
    except (TypeError, ValueError, struct.error):
        raise Malformed("a state has a number that is none") from None


def _float_of(text: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(text))
    return value


_MAKERS: dict[str, Callable[[list[Json], Callable[[Json], Any]], Any]] = {
    "dict": _dict_of,
    "counter": lambda items, inner: Counter(_dict_of(items, inner)),
    "list": lambda items, inner: [inner(item) for item in items],
    "tuple": lambda items, inner: tuple(inner(item) for item in items),
    "bytes": _bytes_of,
    "float": lambda items, inner: _number_of(items, _float_of),
    "int": lambda items, inner: _number_of(items, lambda text: int(text, 16)),
}
