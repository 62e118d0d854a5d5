"""Variables: what the layers of a model say that they give and take, before any is built. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from manyhands.compat.bossman.layers import wrapped_linear
from manyhands.stages.layers import TAKES, Spec, one_of, ordered
from manyhands.stages.variables import VariableError


class Variable(NamedTuple):
    """Layers by their place in the model. What no layer gives is an extra input of `forward`.

    `taken_by` are those that say so before they run; with `mh.pop` there may be others.
    """

    given_by: int | None
    taken_by: tuple[int, ...]


def variables_of(specs: Sequence[Spec]) -> dict[str, Variable]:
    """By name. Raises VariableError for one that is given twice, taken too early, or never, and for
    a layer that names what it takes in two ways.

    Names are those in a layer's arguments, else those of its class. What it takes and gives by
    `mh.pop` and `mh.stash` is looked at with the first batch, on the workers.
    """
    given: dict[str, int] = {}
    taken: dict[str, list[int]] = {}
    for index, spec in enumerate(specs):
        for name in _names(spec, "out_variables"):
            if name in given:
                raise VariableError(
                    f"{_said(specs, index)} gives {name!r}, which {_said(specs, given[name])} "
                    "gives already",
                    hint="give each variable a name of its own",
                )
            given[name] = index
        takes = one_of(_said(specs, index), *(_names(spec, word) for word in TAKES))
        for name in takes or ordered(_names(spec, "forward_order")):
            taken.setdefault(name, []).append(index)
    for name, giver in given.items():
        takers = taken.get(name)
        if not takers and any(map(_may_pop, specs[giver + 1 :])):
            continue
        if not takers:
            raise VariableError(
                f"{_said(specs, giver)} gives {name!r}, and no layer takes it",
                hint="leave it out, or name it among the dependencies of the layer that needs it",
            )
        if takers[0] <= giver:
            raise VariableError(
                f"{_said(specs, takers[0])} takes {name!r}, which {_said(specs, giver)} gives",
                hint="a variable comes from an earlier layer",
            )
    names = [*given, *(name for name in taken if name not in given)]
    return {name: Variable(given.get(name), tuple(taken.get(name, ()))) for name in names}


def _said(specs: Sequence[Spec], index: int) -> str:
    return f"layer {index} ({getattr(specs[index].kind, '__name__', specs[index].kind)})"


def _may_pop(spec: Spec) -> bool:
    """Whether it may take what it does not name before it runs: torch's own layers do not."""
    module = getattr(spec.kind, "__module__", "")
    return not module.startswith("torch.nn.") and spec.kind is not wrapped_linear


def _names(spec: Spec, word: str) -> tuple[str, ...]:
    given: Any = spec.kwargs.get(word) or getattr(spec.kind, word, ())
    if not isinstance(given, list | tuple):
        return ()
    return tuple(name for name in given if isinstance(name, str))  # pyright: ignore[reportUnknownVariableType]
