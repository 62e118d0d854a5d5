"""Layers: a model as a list, in whichever of its forms it comes.

    nn.Sequential(...)                                     its children are the layers
    [(nn.Linear, {"in_features": 1, ...}, (32, 1)), ...]   built where the plan puts them
    cut(module, ["encoder.3", ...])                        a module, cut at named submodules

A layer takes what the one before it gave, and variables. It says which ones in the seeds' words
(attributes `dependencies` or `in_variables`, `out_variables`, `forward_order`; it then returns
`out, [(name, tensor), ...]`), or calls `mh.stash` and `mh.pop`. `whole_variables` are those of
`out_variables` that have no rows, as of `mh.stash(..., whole=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from manyhands.core.errors import UsageError
from manyhands.stages.chance import forked, seed_of, set_seed
from manyhands.stages.variables import Scope, VariableError

Carried = Tensor | tuple[Tensor, ...]
"""What one layer hands to the next."""


class Spec(NamedTuple):
    """A layer that is not built yet; dimension 0 of its shapes is advisory."""

    kind: Callable[..., nn.Module]
    kwargs: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...]

    def build(self, device: torch.device | str | None = None) -> nn.Module:
        """Raises UsageError when the class does not take these arguments."""
        try:
            with torch.device(device or "cpu"):
                made: object = self.kind(**self.kwargs)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{self._name} cannot be built with {dict(self.kwargs)!r}: {error}",
                hint="the second part of (class, kwargs, shape) are the arguments of the class",
            ) from error
        return _module(made, self._name)

    @property
    def _name(self) -> str:
        return getattr(self.kind, "__name__", repr(self.kind))

    def outline(self) -> nn.Module:
        """The layer with shapes and without values: it takes no memory.

        Raises what its class raises; RuntimeError or NotImplementedError if that looks at values.
        """
        # An argument `device` would come before the one that the block sets.
        kwargs = {name: "meta" if name == "device" else v for name, v in self.kwargs.items()}
        with forked(), torch.device("meta"):
            return _module(self.kind(**kwargs), self._name)


def _module(made: object, said: str) -> nn.Module:
    """What a class has made, if it can be a layer. Raises UsageError."""
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"{said} made a {type(made).__name__}",
            hint="the first part of (class, kwargs, shape) is a class of modules",
        )
    for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
        if is_lazy(tensor):
            raise UsageError(
                f"{said}: its {name} has no shape before the first input",
                hint="a plan must know it before: use nn.Linear(in, out) and the like, or run a "
                "lazy module once before",
            )
    return made


Model = nn.Sequential | Sequence[Any]
"""nn.Sequential, or a list of modules and of (class, kwargs, shape)."""


def specs_of(model: Model) -> list[nn.Module | Spec]:
    """The layers of a model, built or not. Raises UsageError for what is none."""
    if isinstance(model, nn.Sequential):
        children: list[Any] = list(model.children())
    elif isinstance(model, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        children = list(model)
    else:
        raise UsageError(
            f"a {type(model).__name__} cannot be taken apart",
            hint="a model is an nn.Sequential, a list of its layers in order, or what "
            "mh.cut(model, [names of submodules]) makes of it",
        )
    found = [_spec_of(index, child) for index, child in enumerate(children)]
    if not found:
        raise UsageError("this model has no layers", hint="a plan needs at least one")
    return found


def _spec_of(index: int, child: object) -> nn.Module | Spec:
    if isinstance(child, nn.Module | Spec):
        return child
    if isinstance(child, tuple | list):
        items = cast("Sequence[Any]", child)
        if len(items) in (2, 3) and callable(items[0]) and isinstance(items[1], Mapping):
            shapes = _shapes(index, items[2]) if len(items) == 3 else ()
            kind = cast("Callable[..., nn.Module]", items[0])
            return Spec(kind, cast("Mapping[str, Any]", items[1]), shapes)
    raise UsageError(
        f"layer {index} is {child!r}",
        hint="expected an nn.Module, or (class, kwargs, input shape)",
    )


def _shapes(index: int, given: Any) -> tuple[tuple[int, ...], ...]:  # noqa: ANN401
    """One shape, or a list of them: of the input, then of each variable. Raises UsageError."""
    items = list(cast("Sequence[Any]", given)) if isinstance(given, tuple | list) else [given]
    single = all(isinstance(item, int) for item in items)
    shapes: list[Any] = [given] if single else items
    for shape in shapes:
        sizes = cast("Sequence[Any]", shape) if isinstance(shape, tuple | list) else (None,)
        if not all(isinstance(size, int) for size in sizes):
            raise UsageError(
                f"layer {index} has the input shape {given!r:.200}",
                hint="whole numbers, (32, 512); or a list of such shapes, of the input and then "
                "of each variable",
            )
    return tuple(map(tuple, shapes))


def build(layer: nn.Module | Spec, index: int, *, seed: int, device: torch.device) -> nn.Module:
    """A layer on its device. What is built here gets the same values on whichever peer it is.

    Raises UsageError, which names it, for one that cannot be built or has no values.
    """
    if isinstance(layer, nn.Module):
        made = _module(layer, f"layer {index} ({type(layer).__name__})")
    else:
        with forked():
            set_seed(seed_of(seed, index))
            try:
                made = layer.build()  # on the CPU: its values do not depend on the device
            except UsageError as error:
                said = f"layer {index}: {error.message}"
                raise UsageError(said, hint=error.hint) from error.__cause__
    for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
        if tensor.is_meta and device.type != "meta":
            raise UsageError(
                f"layer {index} ({type(made).__name__}): its {name} is on the device meta, "
                "without values",
                hint="give the layer as (class, kwargs, input shape): it is built where the plan "
                "puts it, and nowhere else",
            )
    return made.to(device)


class Running:
    """A layer that can be run: a module, its place in the model, and its way with variables."""

    def __init__(self, module: nn.Module, index: int, name: str) -> None:
        self.module, self.index, self.name = module, index, name
        self.takes, self.gives, self._order = declared(module)
        self._silent = not self.takes and not self.gives
        self._whole = _names(module, "whole_variables")
        self.said = f"layer {index} ({name})"

    def run(self, carried: Carried, scope: Scope) -> Carried:
        """Raises what the module raises."""
        scope.layer = self.said
        if self._silent:
            result = self.module(carried)
        else:
            result = self._split_off(self.module(*self._given(carried, scope)), scope)
        return result if isinstance(result, Tensor) else self._checked(result)

    def _given(self, carried: Carried, scope: Scope) -> list[Carried]:
        values: dict[str, Carried] = {name: scope.pop(name) for name in self.takes}
        if self._order is None:
            return [carried, *values.values()]
        return [values.get(name, carried) for name in self._order]

    def _split_off(self, result: object, scope: Scope) -> object:
        pairs: list[tuple[str, Tensor]] = []
        if isinstance(result, tuple) and len(cast("tuple[Any, ...]", result)) == 2:
            out, second = cast("tuple[object, object]", result)
            if isinstance(second, list):
                result, pairs = out, cast("list[tuple[str, Tensor]]", second)
        names = [pair[0] for pair in pairs]
        if sorted(names) != sorted(self.gives):
            raise VariableError(
                f"{self.said} says out_variables={list(self.gives)} and returned {names}",
                hint="return `out, [(name, tensor), ...]` with every name of out_variables",
            )
        for name, tensor in pairs:
            scope.stash(name, tensor, whole=name in self._whole)
        return cast("object", result)

    def _checked(self, result: object) -> Carried:
        if isinstance(result, tuple | list):
            items = tuple(cast("Iterable[Any]", result))
            if items and all(isinstance(item, Tensor) for item in items):
                return items
        raise UsageError(
            f"{self.said} returned a {type(cast('object', result)).__name__}",
            hint="a layer of a plan returns a tensor or a tuple of tensors; stash all else",
        )


def declared(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...] | None]:
    """What a module says it takes and gives, and in which order its forward wants its inputs.

    In `forward_order` a name that is no variable stands for what the layer before gave.
    """
    takes = one_of(type(module).__name__, *(_names(module, word) for word in TAKES))
    gives = _names(module, "out_variables")
    order = _names(module, "forward_order")
    if not order:
        return takes, gives, None
    takes = takes or ordered(order)
    missing = [name for name in takes if name not in order]
    others = [name for name in order if name not in takes]
    if missing or len(others) > 1:
        raise VariableError(
            f"{type(module).__name__} has forward_order={list(order)} for variables {list(takes)}",
            hint="it names every variable, and one more: the place of the layer's input",
        )
    return takes, gives, order if others else ("x", *order)


def ordered(order: tuple[str, ...]) -> tuple[str, ...]:
    """The variables of a `forward_order` beside which nothing says what is taken."""
    return tuple(name for name in order if name not in ("x", "input", "out"))


TAKES = ("dependencies", "in_variables")
"""The two words for what a layer takes."""


def one_of(
    who: str, dependencies: tuple[str, ...], in_variables: tuple[str, ...]
) -> tuple[str, ...]:
    """The names of whichever is given. Raises VariableError where both are, and differ."""
    if dependencies and in_variables and dependencies != in_variables:
        raise VariableError(
            f"{who} has dependencies={list(dependencies)} and in_variables={list(in_variables)}",
            hint="these are two words for what a layer takes: use one of them",
        )
    return dependencies or in_variables


def _names(module: nn.Module, attribute: str) -> tuple[str, ...]:
    given = getattr(module, attribute, None)
    if given is None or not isinstance(given, list | tuple):
        return ()
    names = tuple(cast("Sequence[Any]", given))
    if not all(isinstance(name, str) for name in names):
        raise VariableError(
            f"{type(module).__name__}.{attribute} is {given!r}, not names",
            hint=f'a list of texts is expected: {attribute} = ["skip"]',
        )
    return cast("tuple[str, ...]", names)
