"""Recipes: a class as the name of its module and its own, and plain values as its arguments.

The one side describes what it wants, the other decides whether it makes it: only what is a proper
subclass of `base`, and defined in a package that it allows. Nothing is evaluated or unpickled; a
module is imported only if its name is in such a package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, cast

import msgspec

from manyhands.core.errors import UsageError

_SCALARS = (type(None), bool, int, float, str)
_LIST, _TUPLE = "list", "tuple"
_MAX_DEPTH = 32


class NotAllowed(UsageError):
    """A class that this side does not build, or arguments that are not plain values."""


class Recipe(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A class and its arguments, packed: lists say whether they were tuples."""

    module: str
    name: str
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"[:200]  # from outside, it may be of any length


def describe(kind: object, kwargs: Mapping[str, Any], base: type, said: str) -> Recipe:
    """`said` is what it is for, in words. Raises UsageError for what nobody could make of it."""
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise UsageError(
            f"{said} is {kind!r:.200}", hint=f"expected a class, of the kind of {_name(base)}"
        )
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise UsageError(
            f"{said}, {kind.__qualname__}, is defined in the program itself or in a function",
            hint="put it into a module that the workers have too, and start them with "
            "--allow MODULE",
        )
    packed = {name: _pack(value, f"{said}: {name}") for name, value in kwargs.items()}
    return Recipe(kind.__module__, kind.__qualname__, packed)


def resolve(recipe: Recipe, base: type, allowed: Sequence[str]) -> type:
    """The class itself. Raises NotAllowed with the reason, UsageError if it is not there."""
    path = [*recipe.module.split("."), *recipe.name.split(".")]
    if not all(part.isidentifier() and not part.startswith("__") for part in path):
        raise NotAllowed(f"{recipe} is not the name of a class")
    if not _within(recipe.module, allowed):
        raise NotAllowed(
            f"{recipe} is not in a package that this worker allows ({', '.join(allowed)})",
            hint=f"start the worker with --allow {path[0][:100]}, if you trust what is in it",
        )
    try:
        found: object = import_module(recipe.module)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"there is no {recipe} on this worker: {error}", hint="install it there, too"
        ) from None
    for part in recipe.name.split("."):
        found = getattr(found, part, None)
        if not isinstance(found, type):
            raise NotAllowed(f"{recipe} is not a class")
    kind = cast("type", found)
    if not issubclass(kind, base) or kind is base:
        raise NotAllowed(f"{recipe} is not a kind of {_name(base)}")
    # A module shows what it has imported, too: only a class by its own name is what it seems.
    if (kind.__module__, kind.__qualname__) != (recipe.module, recipe.name):
        raise NotAllowed(f"{recipe} is another name of {_name(kind)}: ask for it by its own")
    return kind


def arguments(recipe: Recipe) -> dict[str, Any]:
    """Its kwargs as they were. Raises NotAllowed for what `describe` does not make."""
    return {name: _unpack(value, recipe, 0) for name, value in recipe.kwargs.items()}


def _within(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _pack(value: object, said: str, depth: int = 0) -> Any:  # noqa: ANN401
    kind = type(value)
    if kind is int and not -(1 << 63) <= cast("int", value) < 1 << 63:
        raise UsageError(
            f"{said} is an integer of more than 64 bits",
            hint="smaller ones can be sent to a worker",
        )
    if kind in _SCALARS:
        return value
    if depth < _MAX_DEPTH:
        if kind in (list, tuple):
            items = cast("Sequence[object]", value)
            return [kind.__name__, *(_pack(item, said, depth + 1) for item in items)]
        if kind is dict and all(type(key) is str for key in cast("dict[object, object]", value)):
            pairs = cast("dict[str, object]", value).items()
            return {key: _pack(item, said, depth + 1) for key, item in pairs}
    raise UsageError(
        f"{said} is a {kind.__name__}",
        hint="arguments are plain values: numbers, strings, bools, None, and lists, tuples and "
        "dicts of these",
    )


def _unpack(value: Any, recipe: Recipe, depth: int) -> Any:  # noqa: ANN401  (as it came)
    kind = type(cast("object", value))
    if kind in _SCALARS:
        return value
    if depth < _MAX_DEPTH:
        if kind is list and value and value[0] in (_LIST, _TUPLE):
            made = [_unpack(item, recipe, depth + 1) for item in value[1:]]
            return tuple(made) if value[0] == _TUPLE else made
        if kind is dict and all(type(key) is str for key in value):
            return {key: _unpack(item, recipe, depth + 1) for key, item in value.items()}
    raise NotAllowed(f"{recipe} was given a {kind.__name__}, which is no plain value")
