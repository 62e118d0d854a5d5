"""Nodes: what the nodes of a traced graph are, and which of them may be computed in another layer.

*plain*: no tensor: a size, a dtype, a number. *free*: computed from extra inputs, constants,
buffers and plain values alone. Both are cheap and are computed anew in whichever layer uses them,
so that a number of rows is that of the layer's own rows. All other values are computed once, in
their layer.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_PLAIN_ATTRIBUTES = _set("shape dtype device ndim layout itemsize nbytes requires_grad is_cuda")
_PLAIN_METHODS = _set(
    "size dim ndimension numel nelement stride item tolist element_size get_device is_contiguous "
    "is_floating_point is_complex is_signed"
)
_PLAIN_MODULES = _set("_operator builtins math")
_TUPLES = _set(
    "chunk split tensor_split hsplit vsplit dsplit unbind topk sort meshgrid unsafe_chunk "
    "unsafe_split split_with_sizes"
)
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "poisson", "rrelu", "gumbel")
_VIEWS = _set(
    "view view_as reshape reshape_as flatten unflatten ravel transpose permute movedim moveaxis "
    "swapaxes swapdims t squeeze unsqueeze expand expand_as broadcast_to narrow select unfold "
    "diagonal contiguous detach to type type_as float double half bfloat16 int long bool cpu cuda "
    "chunk split tensor_split hsplit vsplit dsplit unbind as_strided broadcast_tensors real imag "
    "atleast_1d atleast_2d atleast_3d dropout dropout1d dropout2d dropout3d alpha_dropout "
    "feature_alpha_dropout feature_dropout __getitem__ pos positive conj resolve_conj "
    "resolve_neg adjoint view_as_real view_as_complex unsafe_chunk unsafe_split split_with_sizes "
    "unsafe_split_with_sizes pin_memory"
)
"""They may give a tensor that is their input, or lies in its memory (dropout: in eval mode)."""


class Values(NamedTuple):
    """Nodes by what they are. `loose` do not depend on any input; `written` is what a node changes
    in place, and `storage` the nodes whose memory a node may share."""

    plain: frozenset[fx.Node]
    free: frozenset[fx.Node]
    loose: frozenset[fx.Node]
    written: dict[fx.Node, fx.Node]
    storage: dict[fx.Node, frozenset[fx.Node]]


def values_of(graph: fx.Graph, model: nn.Module) -> Values:
    """What each node is. `a += b` of plain values becomes `a + b`, which is the same for them."""
    first = next(node for node in graph.nodes if node.op == "placeholder")
    plain: set[fx.Node] = set()
    free: set[fx.Node] = set()
    loose: set[fx.Node] = set()
    written: dict[fx.Node, fx.Node] = {}
    storage: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op != "placeholder" and all(source in loose for source in sources):
            loose.add(node)
        if node.args and node.args[0] in plain:
            _out_of_place(node)
        storage[node] = frozenset({node})
        if _is_plain(node, plain):
            plain.add(node)
            continue
        changed = _written(node, model)
        if changed is not None:
            written[node] = changed
        movable = changed is None and not _is_bound(node)
        if movable and all(_is_free(source, first, plain, free, model) for source in sources):
            free.add(node)
        shared = [storage[source] for source in _storage(node, changed, model)]
        storage[node] = frozenset[fx.Node]().union(*shared) or storage[node]
    changed_storage = {base for node in written.values() for base in storage[node]}
    still = {node for node in free if not storage[node] & changed_storage}
    return Values(frozenset(plain), _closed(graph, still, free), frozenset(loose), written, storage)


def is_tuple(node: fx.Node, model: nn.Module) -> bool:
    """Whether a node is known to give several tensors, or one under a name."""
    if node.op == "call_module":
        return isinstance(_module(model, node), nn.RNNBase | nn.MultiheadAttention | nn.LSTMCell)
    return node.op in ("call_function", "call_method") and name_of(node) in _TUPLES


def name_of(node: fx.Node) -> str:
    """The name of what a node calls."""
    return str(getattr(node.target, "__name__", node.target))


def takes_item(node: fx.Node) -> bool:
    """Whether a node is `value[number]` or `value["name"]`."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[1], int | str)
        and not isinstance(node.args[1], bool)
    )


def _is_plain(node: fx.Node, plain: set[fx.Node]) -> bool:
    sources = node.all_input_nodes
    if node.op == "call_method":
        return node.args[0] in plain or node.target in _PLAIN_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[0] in plain or node.args[1] in _PLAIN_ATTRIBUTES
    if node.target in (len, torch.finfo, torch.iinfo) or name_of(node) in _PLAIN_METHODS:
        return True
    of_python = getattr(node.target, "__module__", None) in _PLAIN_MODULES
    return of_python and bool(sources) and all(source in plain for source in sources)


def _is_free(
    source: fx.Node,
    first: fx.Node,
    plain: set[fx.Node],
    free: set[fx.Node],
    model: nn.Module,
) -> bool:
    if source.op == "placeholder":
        return source is not first
    if source.op == "get_attr":
        return not isinstance(attribute(model, str(source.target)), nn.Parameter)
    return source in plain or source in free


def _is_bound(node: fx.Node) -> bool:
    """Whether a node must run where it is: it has parameters or a state, or draws at random."""
    if node.op not in ("call_function", "call_method"):
        return True
    drawn = cast("Any", node.kwargs.get("dropout_p", 0.0))
    return bool(drawn) or any(word in name_of(node) for word in _RANDOM)


def _closed(graph: fx.Graph, still: set[fx.Node], free: set[fx.Node]) -> frozenset[fx.Node]:
    """Free nodes all of whose free sources are free for good."""
    kept: set[fx.Node] = set()
    for node in graph.nodes:
        if node in still and all(s in kept or s not in free for s in node.all_input_nodes):
            kept.add(node)
    return frozenset(kept)


def _out_of_place(node: fx.Node) -> None:
    name = name_of(node)
    if getattr(node.target, "__module__", None) == "_operator" and _is_in_place(name):
        short = name[1:]
        node.target = getattr(operator, short if hasattr(operator, short) else f"{short}_")


def _is_in_place(operator_name: str) -> bool:
    return (
        hasattr(operator, f"__{operator_name}__")
        and operator_name[:1] == "i"
        and (hasattr(operator, operator_name[1:]) or hasattr(operator, f"{operator_name[1:]}_"))
    )


def _written(node: fx.Node, model: nn.Module) -> fx.Node | None:
    """The value that a node changes, if it changes one."""
    changed: object = None
    if node.op == "call_module" and getattr(_module(model, node), "inplace", False) is True:
        changed = next(iter((*node.args, *node.kwargs.values())), None)
    elif node.op == "call_method":
        if _writes(str(node.target)):
            changed = node.args[0]
    elif node.op == "call_function":
        changed = _written_by_function(node)
    return changed if isinstance(changed, fx.Node) else None


def _writes(name: str) -> bool:
    """Whether a method or function changes its first argument, by its name."""
    if name.startswith("__"):
        return name == "__setitem__" or _is_in_place(name.strip("_"))
    return name.endswith("_")


def _written_by_function(node: fx.Node) -> object:
    name = name_of(node)
    if "out" in node.kwargs:
        return node.kwargs["out"]
    if getattr(node.target, "__module__", None) == "_operator":
        return node.args[0] if name == "setitem" or _is_in_place(name) else None
    arguments = (*node.args, *node.kwargs.values())
    if _writes(name):
        return arguments[0]
    try:
        bound = inspect.signature(cast("Any", node.target)).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # a function of C: its in-place form has a name of its own
        return None
    return arguments[0] if bound.arguments.get("inplace") is True else None


def _storage(node: fx.Node, written: fx.Node | None, model: nn.Module) -> list[fx.Node]:
    """The sources whose memory a node's value may lie in; none for a tensor of its own."""
    if written is not None:
        return [written]
    sources = node.all_input_nodes
    if node.op == "call_module":
        module = _module(model, node)
        dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
        shares = (nn.Identity, nn.Flatten, nn.Unflatten, *dropouts, nn.FeatureAlphaDropout)
        known = type(module).__module__.startswith("torch.nn.modules")
        return sources if not known or isinstance(module, shares) else []
    if node.target in (getattr, operator.getitem) or name_of(node) in _VIEWS:
        return sources
    return []


def _module(model: nn.Module, node: fx.Node) -> nn.Module:
    return model.get_submodule(str(node.target))


def attribute(model: nn.Module, name: str) -> Any:  # noqa: ANN401
    """What is at a dotted name; None where there is nothing."""
    found: Any = model
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def in_order(graph: fx.Graph, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes in the order of their graph."""
    wanted = set(nodes)
    return [node for node in graph.nodes if node in wanted]
