"""Piece: a piece of a model that was cut, as a layer of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from manyhands.stages.nodes import attribute
from manyhands.stages.trace import CutError


class Piece(nn.Module):
    """A layer that runs a piece of a model's graph on that model's own submodules and parameters.

    They are the original objects under their original names. `whole_variables` are those of
    `out_variables` that have no rows.
    """

    def __init__(
        self,
        graph: fx.Graph,
        dependencies: Sequence[str],
        out_variables: Sequence[str],
        whole_variables: Sequence[str],
    ) -> None:
        super().__init__()
        self.dependencies = tuple(dependencies)
        self.out_variables = tuple(out_variables)
        self.whole_variables = tuple(whole_variables)
        self._run = _compiled(graph)

    def forward(self, carried: Any, *variables: Tensor) -> Any:  # noqa: ANN401
        """What the layer before gave, and the tensors of `dependencies`, in their order."""
        return self._run(self, carried, *variables)

    def extra_repr(self) -> str:
        """The variables."""
        return f"dependencies={self.dependencies}, out_variables={self.out_variables}"


def _compiled(graph: fx.Graph) -> Callable[..., Any]:
    """The graph as a function of (module, carried, *variables).

    Only the function of fx's module is used: its attributes would collide with a model's (`graph`).
    """
    module = fx.GraphModule(nn.Module(), fx.Graph())
    module.graph = graph
    return type(module).forward


def furnish(
    piece: Piece, model: nn.Module, names: Sequence[str], constants: Mapping[str, Tensor]
) -> None:
    """Puts what a graph refers to into its piece: submodules, parameters, buffers, modes.

    Raises CutError when a name of the model is one that a piece uses itself.
    """
    found = {
        name: constants[name] if name in constants else attribute(model, name) for name in names
    }
    # Submodules come first, outer ones before inner ones: what is inside is there then.
    for name in sorted(found, key=lambda name: (not isinstance(found[name], nn.Module), len(name))):
        _place(piece, model, name, found[name])
    piece.training = model.training


def _place(piece: Piece, model: nn.Module, name: str, value: Any) -> None:  # noqa: ANN401
    *path, last = name.split(".")
    if (path or [last])[0] in vars(piece) and name != "training":
        raise CutError(
            f"the model has an attribute {(path or [last])[0]!r}, which layers have too",
            hint="rename it",
        )
    place: nn.Module = piece
    source = model
    for step in path:
        source = getattr(source, step)
        inner = getattr(place, step, None)
        if inner is source:
            return  # a submodule that is here as a whole
        if inner is None:
            inner = nn.Module()
            inner.training = source.training
            place.add_module(step, inner)
        place = inner
    if isinstance(value, nn.Module):
        place.add_module(last, value)
    elif isinstance(value, nn.Parameter):
        place.register_parameter(last, value)
    elif isinstance(value, Tensor):
        # Tensors that are no state of the model are none of the layer, but follow it to its device.
        place.register_buffer(last, value, persistent=last in source.state_dict(keep_vars=True))
    elif last != "training":
        setattr(place, last, value)
