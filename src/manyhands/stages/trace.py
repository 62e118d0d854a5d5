"""Trace: the forward of a module as a graph of its operations, true in train and in eval mode.

torch.fx runs `forward` once with stand-ins for tensors and notes what happens to them. What it
would note wrongly or not at all (a branch on a value, a random number, `no_grad`, an attribute that
`forward` sets) is refused here, with the place and the remedy: `leaves`, submodules that are not
looked into but called.
"""

from __future__ import annotations

import inspect
import operator
import random
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from manyhands.core.errors import UsageError

Leaf = str | type[nn.Module]
"""A submodule to keep whole, by name, or all of a class."""

_FACTORIES = (
    "arange",
    "empty",
    "eye",
    "finfo",
    "full",
    "iinfo",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "zeros",
)
"""Functions of torch that take sizes and dtypes, and do not know what a stand-in for one is."""

_IN_PLACE = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("lshift", "rshift", "and", "or", "xor"),
)
"""Python's operators that have a form with `=`."""


class CutError(UsageError):
    """A model that cannot be cut as asked."""


class Call(NamedTuple):
    """A submodule that was called: before which node, and whether it was looked into."""

    name: str
    node: fx.Node
    whole: bool


class Trace(NamedTuple):
    """The graph, the calls in order, and tensors that forward made from nothing, by name."""

    graph: fx.Graph
    calls: tuple[Call, ...]
    constants: dict[str, Any]


def trace(model: nn.Module, leaves: Sequence[Leaf], inputs: Sequence[str]) -> Trace:
    """The model's forward, with its required arguments and those that `inputs` names.

    The model is left as it was. Raises CutError.
    """
    _check(model, leaves)
    given = _given(model, inputs)
    modes = [module.training for module in model.modules()]
    try:
        training, evaluating = (_traced(model, leaves, given, mode) for mode in (True, False))
    finally:
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode
    _join(model, training, evaluating)
    nodes = training.positions
    calls = tuple(Call(name, nodes[at], whole) for name, at, whole in training.calls)
    return Trace(training.graph, calls, training.constants)


class _Value(fx.Proxy):
    """A stand-in that also notes what happens in place; fx would note `a += b` as `a = a + b`."""

    def __setitem__(self, key: object, value: object) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


def _noted(name: str) -> Callable[[_Value, Any], fx.Proxy]:
    target = getattr(operator, f"i{name}")

    def in_place(self: _Value, other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return in_place


for _name in _IN_PLACE:
    setattr(_Value, f"__i{_name}__", _noted(_name))


class _Tracer(fx.Tracer):
    """fx's, with the checks of this module; `path` and `failed` say where it is and got stuck."""

    proxy_buffer_attributes = True  # else what is computed from a buffer becomes a constant

    def __init__(self, leaves: Sequence[Leaf], given: Sequence[str]) -> None:
        functions = tuple(getattr(torch, name) for name in _FACTORIES)
        super().__init__(autowrap_functions=functions)
        self._whole = {leaf for leaf in leaves if isinstance(leaf, str)}
        self._kinds = tuple(leaf for leaf in leaves if not isinstance(leaf, str))
        self._given = given
        self._context = _context()
        self.called: list[tuple[str, int, bool]] = []
        self.path: list[str] = [""]
        self.paths: dict[fx.Node, str] = {}
        self.failed: str | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        named = module_qualified_name in self._whole or isinstance(m, self._kinds)
        return named or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        name = self.path_of_module(m)
        whole = self.is_leaf_module(m, name)
        self.called.append((name, len(self.graph.nodes), whole))
        if not whole:
            _check_hooks(m, name)
        self.path.append(name)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or name
            raise
        finally:
            self.path.pop()

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,
        concrete_args: object = None,
    ) -> tuple[Any, list[Any]]:
        """Arguments that are not given keep their defaults; fx would make inputs of all."""
        values: list[Any] = [self.root]
        named: dict[str, Any] = {}
        for parameter in _parameters(root_fn):
            if parameter.name in self._given:
                value = self.create_proxy("placeholder", parameter.name, (), {})
            else:
                value = parameter.default
            if parameter.kind is parameter.KEYWORD_ONLY:
                named[parameter.name] = value
            else:
                values.append(value)

        def called(*args: Any) -> Any:  # noqa: ANN401
            return root_fn(*args, **named)

        return called, values

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:  # noqa: ANN401
        if _in_function():
            raise CutError("it calls a torch.autograd.Function, whose backward a trace loses")
        if _context() != self._context:
            raise CutError("it runs under no_grad, inference_mode or autocast, which a trace loses")
        node = super().create_node(*args, **kwargs)
        self.paths[node] = self.path[-1]
        return node


class _Traced(NamedTuple):
    graph: fx.Graph
    positions: list[fx.Node]
    calls: list[tuple[str, int, bool]]
    constants: dict[str, Any]
    paths: dict[fx.Node, str]


def _traced(
    model: nn.Module, leaves: Sequence[Leaf], given: Sequence[str], training: bool
) -> _Traced:
    for module in model.modules():
        module.training = training  # not train(): a module may do more there
    tracer = _Tracer(leaves, given)
    before = [(name, module, dict(vars(module))) for name, module in named_modules(model).items()]
    drawn, changed = random.getstate(), dict[str, Any]()
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        state = torch.get_rng_state()
        try:
            with _recorded(tracer):
                graph = tracer.trace(model)
        except Exception as error:
            raise _refusal(model, tracer, error) from error
        finally:
            changed = _taken_back(before)
            same = random.getstate() == drawn and torch.equal(state, torch.get_rng_state())
            random.setstate(drawn)
    if not same:
        raise CutError(
            f"the forward of {_said(model, '')} draws random numbers that a trace would fix",
            hint="draw them with a module such as nn.Dropout, or in a submodule that is kept "
            "whole: leaves=[its name or class]",
        )
    used = {node.target for node in graph.nodes if node.op == "get_attr"}
    constants = {name: changed.pop(name) for name in list(changed) if name in used}
    for name in changed:
        where, _, attribute = name.rpartition(".")
        raise CutError(
            f"the forward of {_said(model, where)} sets self.{attribute}, which a trace does once",
            hint=_leaf_hint(where),
        )
    for name, value in constants.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise CutError(
                f"the forward of {_said(model, '')} computes {name}, of shape "
                f"{list(value.shape)}, from parameters that it does not take as self.name",
                hint="take each parameter as an attribute, or keep the part whole with leaves=",
            )
    return _Traced(graph, list(graph.nodes), tracer.called, constants, tracer.paths)


def _taken_back(before: list[tuple[str, nn.Module, dict[str, Any]]]) -> dict[str, Any]:
    """What forward has set on modules, by name; they are as before then.

    fx keeps tensors of its own on the model too.
    """
    changed: dict[str, Any] = {}
    for name, module, attributes in before:
        for key, value in vars(module).items():
            if key not in attributes or attributes[key] is not value:
                changed[f"{name}.{key}" if name else key] = value
        vars(module).clear()
        vars(module).update(attributes)
    return changed


@contextmanager
def _recorded(tracer: _Tracer) -> Generator[None]:
    """Inside, torch's factories note a call with stand-ins instead of failing on it."""
    originals = {name: getattr(torch, name) for name in _FACTORIES}
    try:
        for name, original in originals.items():
            setattr(torch, name, _recording(tracer, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _recording(tracer: _Tracer, original: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if _has_proxy((args, kwargs)):
            return tracer.create_proxy("call_function", original, args, kwargs)
        return original(*args, **kwargs)

    return function


def _has_proxy(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_proxy, cast("dict[Any, Any]", value).values()))
    if isinstance(value, tuple | list):
        return any(map(_has_proxy, cast("Sequence[Any]", value)))
    return isinstance(value, fx.Proxy)


def _context() -> tuple[object, ...]:
    """What changes the meaning of operations and is not in a graph."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")),
    )


_APPLY = cast("Any", torch.autograd.Function).apply.__code__


def _in_function() -> bool:
    """Whether the forward of an autograd.Function runs: fx would note what is inside it."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False


class _Differ(Exception):
    """Two arguments that are not the same in both modes, and do not follow the mode."""


def _join(model: nn.Module, training: _Traced, evaluating: _Traced) -> None:
    """Makes the graph of training one of both modes; arguments that are the mode are looked up."""
    places = [
        {node: place for place, node in enumerate(t.positions)} for t in (training, evaluating)
    ]
    for node, other in zip(training.positions, evaluating.positions, strict=False):
        where = training.paths.get(node, "")

        def mode(node: fx.Node = node, where: str = where) -> fx.Node:
            with training.graph.inserting_before(node):
                return training.graph.get_attr(f"{where}.training" if where else "training")

        try:
            if (node.op, node.target) != (other.op, other.target):
                raise _Differ
            args, kwargs = _joined(
                (node.args, node.kwargs), (other.args, other.kwargs), places, mode
            )
        except _Differ:
            raise CutError(
                f"{_said(model, where)} does something else in eval mode than in training: "
                f"{_call(node)} there, {_call(other)} here",
                hint="put it into a module that knows its mode (nn.Dropout), or "
                + _leaf_hint(where),
            ) from None
        node.args, node.kwargs = args, kwargs
    if len(training.positions) != len(evaluating.positions):
        raise CutError(
            f"{_said(model, '')} does not do the same in training and in eval mode",
            hint=_leaf_hint(""),
        )
    for name, value in training.constants.items():
        if isinstance(value, Tensor) and not torch.equal(value, evaluating.constants[name]):
            raise CutError(
                f"the forward of {_said(model, '')} makes another {name} whenever it runs",
                hint="make it in a submodule that is kept whole: leaves=[its name or class]",
            )


def _joined(
    value: Any,  # noqa: ANN401
    other: Any,  # noqa: ANN401
    places: list[dict[fx.Node, int]],
    mode: Callable[[], fx.Node],
) -> Any:  # noqa: ANN401
    """One argument for both modes. Raises _Differ."""
    if value is True and other is False:
        return mode()
    if type(value) is not type(other):
        raise _Differ
    if isinstance(value, fx.Node):
        same = places[0].get(value) == places[1].get(other)
    elif isinstance(value, tuple | list):
        if len(cast("Sequence[Any]", value)) != len(other):
            raise _Differ
        pairs = zip(cast("Sequence[Any]", value), other, strict=True)
        items = [_joined(mine, its, places, mode) for mine, its in pairs]
        return tuple(items) if isinstance(value, tuple) else items
    elif isinstance(value, dict):
        mine = cast("dict[Any, Any]", value)
        if list(mine) != list(other):
            raise _Differ
        return {key: _joined(mine[key], other[key], places, mode) for key in mine}
    elif isinstance(value, slice):
        mine, its = cast("Any", value), other
        ends = ((mine.start, mine.stop, mine.step), (its.start, its.stop, its.step))
        start, stop, step = _joined(*ends, places, mode)
        return slice(start, stop, step)
    else:
        same = bool(value == other)
    if not same:
        raise _Differ
    return value


def _call(node: fx.Node) -> str:
    name = getattr(node.target, "__name__", str(node.target))
    return f"{name}{node.args}"


def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    """Of a forward, without self; *args and **kwargs stay empty."""
    all_of = list(inspect.signature(forward).parameters.values())[1:]
    return [p for p in all_of if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _given(model: nn.Module, inputs: Sequence[str]) -> list[str]:
    """The arguments that are inputs: the first, all without a default, and those that are named."""
    parameters = _parameters(type(model).forward)
    names = [p.name for p in parameters]
    if not parameters:
        raise CutError(f"the forward of {_said(model, '')} takes no input by name")
    for name in inputs:
        if name not in names:
            raise CutError(
                f"the forward of {_said(model, '')} has no argument {name!r}",
                hint=f"there are: {', '.join(names)}",
            )
    required = [p.name for p in parameters if p.default is p.empty]
    return [name for name in names if name == names[0] or name in required or name in inputs]


def _check(model: nn.Module, leaves: Iterable[Leaf]) -> None:
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CutError(f"cut takes an nn.Module, not a {type(model).__name__}")
    if "forward" in vars(model):
        raise CutError(
            f"this {type(model).__name__} has a forward of its own, not that of its class",
            hint="cut it before it is wrapped",
        )
    _check_hooks(model, "")
    names = list(named_modules(model))
    for leaf in leaves:
        if not isinstance(leaf, str | type):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise CutError(
                f"leaves has a {type(leaf).__name__}", hint="give names of submodules, or classes"
            )
        if isinstance(leaf, str) and leaf not in names:
            raise CutError(
                f"leaves={leaf!r}: {_said(model, '')} has no such submodule",
                hint=f"there are: {few(names[1:])}",
            )


def _check_hooks(module: nn.Module, name: str) -> None:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind) for kind in kinds):
        raise CutError(
            f"{_named(name, module)} has hooks, which a trace loses",
            hint="remove them before the cut and add them to the layers; or " + _leaf_hint(name),
        )


def _refusal(model: nn.Module, tracer: _Tracer, error: Exception) -> CutError:
    """What went wrong in forward, with its place and the remedy."""
    where = tracer.failed or ""
    if isinstance(error, CutError) and error.hint is not None:
        return error
    own = {str(Path(torch.__file__).parent), str(Path(__file__))}
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(frame.filename.startswith(folder) for folder in own)
    ]
    line = ""
    if frames:
        line = f", {Path(frames[-1].filename).name}:{frames[-1].lineno} `{frames[-1].line}`"
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return CutError(
        f"{_said(model, where)} cannot be traced{line}: {reason[:300]}", hint=_leaf_hint(where)
    )


def _leaf_hint(where: str) -> str:
    if where:
        return f"keep this submodule whole: leaves=[{where!r}]"
    return (
        "move the part that cannot be traced into a submodule, and keep that whole: "
        "leaves=[its name or class]"
    )


def _said(model: nn.Module, where: str) -> str:
    return _named(where, model.get_submodule(where))


def _named(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"{name!r} ({kind})" if name else f"the model ({kind})"


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """All modules, the model first, under all of their names."""
    found = cast("Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))
    return dict(found)


def few(names: Sequence[str]) -> str:
    """Names in words, not too many of them."""
    listed = ", ".join(map(repr, names[:20]))
    return listed + (f" and {len(names) - 20} more" if len(names) > 20 else "") or "none"
