"""Cut: one module as a list of layers, cut before named submodules.

    layers = cut(model, at=["encoder.3", "decoder"])

What a layer needs of the one before it is carried; what it needs of earlier ones, and the extra
inputs of the model's forward, are variables. What crosses a cut has the rows of the batch in its
dimension 0, unless it depends on no input at all.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from torch import fx, nn

from manyhands.stages.nodes import Values, in_order, is_tuple, takes_item, values_of
from manyhands.stages.piece import Piece, furnish
from manyhands.stages.trace import Call, CutError, Leaf, Trace, few, named_modules, trace


def cut(
    model: nn.Module,
    at: Sequence[str],
    *,
    leaves: Sequence[Leaf] = (),
    inputs: Sequence[str] = (),
) -> list[nn.Module]:
    """The layers of a model: a new one begins where each submodule in `at` is called.

    They hold the model's own submodules and parameters, under their names. The forward is traced
    with torch.fx; `leaves` are submodules (names or classes) that are called as they are and not
    looked into, as all of torch.nn are. A leaf must not change its inputs in place.

    The first argument of forward is what is carried into the first layer. Further ones without a
    default are variables, named after the argument, that the caller gives; those with a default
    keep it, unless `inputs` names them. Raises CutError.
    """
    traced = trace(model, leaves, inputs)
    starts = _starts(model, at, traced.calls)
    pieces = _Pieces(model, traced, starts)
    _check_layers(pieces, at)
    _check_output(pieces)
    _check_writes(pieces)
    parts = [_part(pieces, index) for index in range(pieces.count)]
    _keep_unused(model, parts)
    return list(parts)


def _starts(model: nn.Module, at: Sequence[str], calls: Sequence[Call]) -> list[fx.Node]:
    """The nodes before which to cut. Raises CutError for names that are no place to cut at."""
    if isinstance(at, str):
        raise CutError(f"at={at!r} is one string", hint=f"give a list of names: at=[{at!r}]")
    called = [call.name for call in calls]
    for name in at:
        _check_name(model, name, calls)
    if len(set(at)) < len(at):
        twice = next(name for name in at if list(at).count(name) > 1)
        raise CutError(f"at names {twice!r} twice")
    ordered = sorted(at, key=called.index)
    if ordered != list(at):
        raise CutError(
            f"at={list(at)} is not the order in which forward calls them",
            hint=f"that is: {ordered}",
        )
    return [calls[called.index(name)].node for name in at]


def _check_name(model: nn.Module, name: str, calls: Sequence[Call]) -> None:
    called = [call.name for call in calls]
    times = called.count(name)
    there = f"forward calls, in this order: {few(list(dict.fromkeys(called)))}"
    if times == 1:
        return
    if times > 1:
        raise CutError(
            f"{name!r} is called {times} times: where to cut is not clear",
            hint=f"name a submodule that is called once; {there}",
        )
    modules = named_modules(model)
    if name not in modules or not name:
        near = difflib.get_close_matches(name, called, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise CutError(
            f"the model ({type(model).__name__}) has no submodule {name!r}", hint=meant + there
        )
    leaf = next((c.name for c in calls if c.whole and name.startswith(f"{c.name}.")), None)
    if leaf is not None:
        raise CutError(
            f"{name!r} is inside {leaf!r} ({type(modules[leaf]).__name__}), which is kept whole",
            hint=f"cut before {leaf!r}, or write its forward as a module of your own; {there}",
        )
    first = next(other for other, module in modules.items() if module is modules[name])
    if first != name and first in called:
        raise CutError(f"{name!r} is the same module as {first!r}", hint=f"write {first!r}")
    raise CutError(
        f"{name!r} ({type(modules[name]).__name__}) is never called by forward", hint=there
    )


class _Pieces:
    """Which node runs in which layer, and what each layer takes and gives."""

    def __init__(self, model: nn.Module, traced: Trace, starts: Sequence[fx.Node]) -> None:
        self.model, self.graph, self.constants = model, traced.graph, traced.constants
        self.count = len(starts) + 1
        self.values: Values = values_of(traced.graph, model)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.input, self.extras = placeholders[0], placeholders[1:]
        self.home = self._homes(starts)
        self.own: list[set[fx.Node]] = []  # what each layer computes for itself
        self.enters: list[set[fx.Node]] = []
        for index in range(self.count):
            self._look(index)
        self.names = self._names()
        self.takes = [self._taken(index) for index in range(self.count)]

    def _homes(self, starts: Sequence[fx.Node]) -> dict[fx.Node, int]:
        home: dict[fx.Node, int] = {}
        index = 0
        for node in self.graph.nodes:
            while index < len(starts) and starts[index] is node:
                index += 1
            home[node] = 0 if node.op == "placeholder" else index
        for node in self.graph.nodes:
            # An item of a tuple is taken where the tuple is: tensors cross, tuples do not.
            if takes_item(node) and not self.is_local(node):
                source = cast("fx.Node", node.args[0])
                items_only = all(takes_item(user) for user in source.users)
                if items_only and not self.is_local(source) and source not in self.extras:
                    home[node] = home[source]
        return home

    def is_local(self, node: fx.Node) -> bool:
        """Whether each layer that uses a node has it for itself."""
        return node.op == "get_attr" or node in self.values.plain or node in self.values.free

    def nodes(self, index: int) -> list[fx.Node]:
        """Those that run in this layer and in no other."""
        return [
            node
            for node in self.graph.nodes
            if self.home[node] == index and node.op != "placeholder" and not self.is_local(node)
        ]

    def _look(self, index: int) -> None:
        """Finds what a layer needs: extra inputs and values of other layers, and what it has."""
        entering: set[fx.Node] = set()
        own: set[fx.Node] = set()
        todo = [source for node in self.nodes(index) for source in node.all_input_nodes]
        while todo:
            node = todo.pop()
            if node in self.extras:
                entering.add(node)
            elif self.is_local(node):
                todo += [] if node in own else node.all_input_nodes
                own.add(node)
            elif self.home[node] != index:
                entering.add(node)
        self.enters.append(entering)
        self.own.append(own)

    def _names(self) -> dict[fx.Node, str]:
        """Of variables: that of the argument, or of the node."""
        names = {node: str(node.target) for node in self.extras}
        crossing = in_order(self.graph, set[fx.Node]().union(*self.enters) - names.keys())
        for node in crossing:
            name = str(node.target) if node.op == "placeholder" else node.name
            while name in names.values():
                name += "_"
            names[node] = name
        return names

    def is_carried(self, node: fx.Node, index: int) -> bool:
        """Whether a layer gets a value from the one before it; if not, it is a variable."""
        whole = node in self.values.loose
        return node not in self.extras and self.home[node] == index - 1 and not whole

    def carried(self, index: int) -> list[fx.Node]:
        """What layer `index` gets of the one before it."""
        if index == 0:
            return [self.input]
        found = [node for node in self.enters[index] if self.is_carried(node, index)]
        return in_order(self.graph, found)

    def _taken(self, index: int) -> list[fx.Node]:
        """The variables of a layer."""
        found = [node for node in self.enters[index] if not self.is_carried(node, index)]
        return in_order(self.graph, found)

    def gives(self, index: int) -> list[fx.Node]:
        """The variables that come from a layer."""
        later = {node for taken in self.takes[index + 1 :] for node in taken}
        here = [n for n in later if n not in self.extras and self.home[n] == index]
        return in_order(self.graph, here)


def _check_layers(pieces: _Pieces, at: Sequence[str]) -> None:
    """Raises CutError for a layer that does nothing, or that would be given no tensor."""
    for index in range(pieces.count):
        if pieces.count == 1 or any(node.op != "output" for node in pieces.nodes(index)):
            continue
        names = ["the beginning", *map(repr, at), "the end"]
        raise CutError(
            f"nothing is computed between {names[index]} and {names[index + 1]}",
            hint=f"leave {names[index] if index else names[1]} out of at",
        )
    for index in range(1, pieces.count):
        for node in pieces.enters[index]:
            alone = pieces.carried(index) == [node] and node not in pieces.gives(index - 1)
            if is_tuple(node, pieces.model) and not alone:
                raise CutError(
                    f"{node.name!r} is a tuple and is used after the cut at {at[index - 1]!r}",
                    hint="only tensors cross a cut: take its items apart before it "
                    "(`a, b = ...`), or cut elsewhere",
                )


def _check_output(pieces: _Pieces) -> None:
    """Raises CutError unless the model returns a tensor or a tuple of them."""
    result = next(n for n in pieces.graph.nodes if n.op == "output").args[0]
    said = f"the model ({type(pieces.model).__name__}) returns"
    hint = "return a tensor or a tuple of tensors"
    if isinstance(result, fx.Node) and isinstance(result.target, type):
        raise CutError(f"{said} a {result.target.__name__}", hint=hint)
    if isinstance(result, dict):
        keys = list(cast("dict[Any, Any]", result))
        raise CutError(f"{said} a dict with {keys}", hint=hint)
    items = cast("Sequence[Any]", result) if isinstance(result, tuple | list) else (result,)
    for place, item in enumerate(items):
        if not isinstance(item, fx.Node):
            raise CutError(f"{said} {item!r} as item {place}", hint=hint)
        if item in pieces.values.plain:
            raise CutError(f"{said} {item.name!r}, which is no tensor, as item {place}", hint=hint)


def _check_writes(pieces: _Pieces) -> None:
    """Raises CutError when a value is changed in one layer and read as it was or is in another."""
    for node, target in pieces.values.written.items():
        where = pieces.home[node]
        for base in pieces.values.storage[target]:
            if base.op == "get_attr" and base.target in pieces.constants:
                raise CutError(
                    f"{node.name!r} changes a tensor in place that forward makes: a trace makes it "
                    "once, forward each time",
                    hint="write it without changing it, or make it like an input: x.new_zeros(...)",
                )
            readers = [
                index
                for index in range(pieces.count)
                if index != where and base in pieces.own[index]
            ]
            shared = [n for n in pieces.enters[where] if base in pieces.values.storage[n]]
            later = [
                n
                for index in range(where + 1, pieces.count)
                for n in pieces.enters[index]
                if base in pieces.values.storage[n]
                and (n in pieces.extras or pieces.home[n] < where)
            ]
            if readers or len(shared) > 1 or later:
                raise CutError(
                    f"{node.name!r} changes {base.name!r} in place in layer {where}, and another "
                    "layer has a copy of it, or a view",
                    hint="write it without changing its input (inplace=False, `a = a + b` for "
                    "`a += b`), or cut elsewhere",
                )


class _Writer(NamedTuple):
    """A graph of one layer that is being written."""

    pieces: _Pieces
    graph: fx.Graph
    known: dict[fx.Node, fx.Node]

    def copy(self, node: fx.Node) -> fx.Node:
        """The node in this graph; what a layer has for itself is computed here."""
        if node not in self.known:
            for source in node.all_input_nodes:
                self.copy(source)
            self.known[node] = self.graph.node_copy(node, lambda source: self.known[source])
        return self.known[node]


def _part(pieces: _Pieces, index: int) -> Piece:
    """One layer."""
    writer = _Writer(pieces, fx.Graph(), {})
    takes, gives = pieces.takes[index], pieces.gives(index)
    incoming = _entry(writer, index, takes)
    here = {*pieces.nodes(index), *pieces.own[index]}
    for node in in_order(pieces.graph, here):
        if node.op not in ("output", "get_attr"):
            writer.copy(node)
    if index == pieces.count - 1:
        result = next(n for n in pieces.graph.nodes if n.op == "output").args[0]
        out: Any = fx.map_arg(result, writer.copy)
    else:
        out = _exit(writer, index, gives, incoming)
    names = [pieces.names[node] for node in gives]
    if gives:
        out = (out, [(pieces.names[node], writer.copy(node)) for node in gives])
    writer.graph.output(out)
    whole = [pieces.names[node] for node in gives if node in pieces.values.loose]
    part = Piece(writer.graph, [pieces.names[node] for node in takes], names, whole)
    used = [str(n.target) for n in writer.graph.nodes if n.op in ("get_attr", "call_module")]
    furnish(part, pieces.model, list(dict.fromkeys(used)), pieces.constants)
    return part


def _entry(writer: _Writer, index: int, takes: Sequence[fx.Node]) -> fx.Node:
    """Writes what comes in; returns what is carried in, or the first of it."""
    pieces, graph = writer.pieces, writer.graph
    names = [pieces.names[node] for node in takes]
    carried = pieces.carried(index)
    name = "carried"
    while name in names:
        name += "_"
    incoming = graph.placeholder(name)
    for node, variable in zip(takes, names, strict=True):
        writer.known[node] = graph.placeholder(variable)
    if len(carried) == 1:
        writer.known[carried[0]] = incoming
    for place, node in enumerate(carried if len(carried) > 1 else ()):
        writer.known[node] = graph.call_method("__getitem__", (incoming, place))
    here = [n for n in pieces.values.written if pieces.home[n] == index]
    changed = {base for n in here for base in pieces.values.storage[pieces.values.written[n]]}
    for node in [*carried, *takes]:
        # The input of the model is changed as the model would; others may have it still.
        if (node is not pieces.input or index) and pieces.values.storage[node] & changed:
            writer.known[node] = graph.call_method("clone", (writer.known[node],))
    return writer.known[carried[0]] if carried else incoming


def _exit(writer: _Writer, index: int, gives: Sequence[fx.Node], incoming: fx.Node) -> Any:  # noqa: ANN401
    """What is carried to the next layer. It must be something: there are rows to be counted."""
    pieces = writer.pieces
    carried = pieces.carried(index + 1)
    if not carried:
        carried = [node for node in gives if node not in pieces.values.loose][:1]
    if not carried:
        return incoming
    copies = [writer.copy(node) for node in carried]
    return copies[0] if len(copies) == 1 else tuple(copies)


def _keep_unused(model: nn.Module, parts: Sequence[Piece]) -> None:
    """What forward never uses goes to the last layer: together they have the whole state."""
    held = {id(t) for part in parts for t in (*part.parameters(), *part.buffers())}
    state = (*model.named_parameters(), *model.named_buffers())
    furnish(parts[-1], model, [name for name, t in state if id(t) not in held], {})
