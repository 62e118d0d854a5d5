"""Profile: what each layer of a model costs, measured on the device that it shall run on.

    costs = profile_layers([("0", lambda: nn.Linear(8, 64)), ("1", nn.ReLU)], x[:microbatch])

Layers are built one after another, run on what the one before gave, and let go: the whole net is
never in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.planner.cost import LayerCost, Variable

Carried = Tensor | tuple[Tensor, ...]
"""What one layer hands to the next."""

Variables = Mapping[str, Tensor]


class Ran(NamedTuple):
    """A layer's output, the variables that it gives, and those that it takes."""

    output: Carried
    gives: Variables = MappingProxyType({})
    takes: Variables = MappingProxyType({})


Run = Callable[[nn.Module, Carried, Variables], Ran]
"""From a layer, its input and all variables given so far."""


def plain_run(module: nn.Module, carried: Carried, _: Variables) -> Ran:
    """A layer that knows no variables."""
    return Ran(module(carried))


def profile_layers(
    layers: Iterable[tuple[str, Callable[[], nn.Module]]],
    inputs: Carried,
    *,
    run: Run = plain_run,
    device: torch.device | str = "cpu",
    repeats: int = 5,
    optimizer_tensors: int = 2,
) -> tuple[LayerCost, ...]:
    """Measure each layer, given by its name and by how it is built; `inputs` is one microbatch.

    Times are medians over `repeats`, after a run that is not counted. `optimizer_tensors` is how
    many tensors of its own the optimizer has for each parameter: 2 for Adam, 1 for SGD with
    momentum. Random states, gradients, buffers and the device of a layer are afterwards as they
    were. Raises UsageError, which names the layer, when one cannot be built or run.
    """
    if repeats < 1:
        raise UsageError(f"repeats={repeats}", hint="each layer is measured at least once")
    device = _usable(device)
    costs: list[LayerCost] = []
    arrived = _Arrived(_detached(inputs, device), {}, frozenset())
    rng_devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=rng_devices),  # pyright: ignore[reportUnknownMemberType]
        torch.enable_grad(),
    ):
        for index, (name, build) in enumerate(layers):
            said = f"layer {index} ({name})"
            with _named(f"{said} cannot be built"):
                module = build()
            shapes = " and ".join(str(tuple(t.shape)) for t in _tensors(arrived.carried))
            with _named(f"{said} cannot be run on {shapes}"), _borrowed(module, device):
                cost, arrived = _measure(
                    name, module, arrived, run, device, repeats, optimizer_tensors
                )
            del module  # before the next one is built
            costs.append(cost)
    if not costs:
        raise UsageError("this model has no layers")
    return tuple(costs)


class _Arrived(NamedTuple):
    """What a layer finds, detached. `saved`: places in `carried` that the layer before keeps."""

    carried: Carried
    variables: dict[str, Tensor]
    saved: frozenset[int]


def _measure(
    name: str,
    module: nn.Module,
    arrived: _Arrived,
    run: Run,
    device: torch.device,
    repeats: int,
    optimizer_tensors: int,
) -> tuple[LayerCost, _Arrived]:
    kept, leaves = _Kept(module), _leaves(module, arrived)
    entering = _entering(arrived.carried)
    with kept.watch():
        output, given, taken = run(module, entering, arrived.variables)
    _check_output(output)
    ends = _ends(output, given)
    _backward(ends, [torch.ones_like(t) for t in ends], leaves)  # the first one may be slow
    activation_bytes = kept.num_bytes(
        without=[t for place, t in enumerate(_tensors(entering)) if place in arrived.saved]
    )
    saved = frozenset(place for place, tensor in enumerate(_tensors(output)) if kept.has(tensor))
    after = _Arrived(
        _detached(output, device),
        {**arrived.variables, **{key: _detach(value, device) for key, value in given.items()}},
        saved,
    )
    trainable = [p for p in module.parameters() if p.requires_grad]
    gradient_bytes = _num_bytes(trainable)
    gives, takes = _crossing(given, kept), _crossing(taken, kept)
    del output, given, taken, ends, entering, kept  # the timed runs have the memory to themselves
    forward_s, backward_s = _times(module, arrived, run, device, repeats, leaves)
    cost = LayerCost(
        name=name,
        forward_s=forward_s,
        backward_s=backward_s,
        parameter_bytes=_num_bytes([*module.parameters(), *module.buffers()]),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_tensors * gradient_bytes,
        activation_bytes=activation_bytes,
        output_bytes=_num_bytes(_tensors(after.carried)),
        input_bytes=_num_bytes(_tensors(arrived.carried)),
        gives=gives,
        takes=takes,
    )
    return cost, after


def _crossing(variables: Variables, kept: _Kept) -> tuple[Variable, ...]:
    return tuple(
        Variable(name, _num_bytes([tensor]), kept.has(tensor)) for name, tensor in variables.items()
    )


def _check_output(output: object) -> None:
    items = cast("Iterable[object]", output if isinstance(output, tuple | list) else (output,))
    for item in items:
        if not isinstance(item, Tensor):
            raise TypeError(f"it returned a {type(item).__name__}, not a tensor or a tuple of them")


def _usable(device: torch.device | str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {str(device)!r} cannot be used: {error}") from error


def _times(
    module: nn.Module,
    arrived: _Arrived,
    run: Run,
    device: torch.device,
    repeats: int,
    leaves: list[Tensor],
) -> tuple[float, float]:
    forwards: list[float] = []
    backwards: list[float] = []
    for _ in range(repeats):
        entering = _entering(arrived.carried)
        with _timed(device, forwards):
            output, given, _ = run(module, entering, arrived.variables)
        ends = _ends(output, given)
        ones = [torch.ones_like(tensor) for tensor in ends]
        with _timed(device, backwards):
            _backward(ends, ones, leaves)
    return median(forwards), median(backwards)


@contextmanager
def _timed(device: torch.device, into: list[float]) -> Generator[None]:
    """Adds the seconds that the block takes on the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    start = perf_counter()
    yield
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    into.append(perf_counter() - start)


def _ends(output: Carried, given: Variables) -> list[Tensor]:
    """Where a layer's backward starts."""
    return [tensor for tensor in (*_tensors(output), *given.values()) if tensor.requires_grad]


def _backward(ends: list[Tensor], gradients: list[Tensor], leaves: list[Tensor]) -> None:
    """Gradients of everything that a layer takes, which nobody keeps."""
    if ends and leaves:
        torch.autograd.grad(ends, leaves, gradients, allow_unused=True)


def _leaves(module: nn.Module, arrived: _Arrived) -> list[Tensor]:
    """All that a layer may have to give gradients for."""
    found = (*_tensors(arrived.carried), *arrived.variables.values(), *module.parameters())
    return [tensor for tensor in found if tensor.requires_grad]


def _entering(carried: Carried) -> Carried:
    """Copies, whose gradients flow back: a layer may work in place."""
    return carried.clone() if isinstance(carried, Tensor) else tuple(t.clone() for t in carried)


def _tensors(carried: Carried) -> tuple[Tensor, ...]:
    return (carried,) if isinstance(carried, Tensor) else tuple(carried)


def _detached(carried: Carried, device: torch.device) -> Carried:
    if isinstance(carried, Tensor):
        return _detach(carried, device)
    return tuple(_detach(tensor, device) for tensor in carried)


def _detach(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Each tensor once, though a module may know it under two names."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


class _Kept:
    """What autograd keeps of a forward, by storage: a view costs nothing beside its base."""

    def __init__(self, module: nn.Module) -> None:
        self._own = {_place(t) for t in (*module.parameters(), *module.buffers())}
        # The storages themselves: an address is only told apart while what it is of is there.
        self._storages: dict[int, torch.UntypedStorage] = {}

    @contextmanager
    def watch(self) -> Generator[None]:
        """Forwards in the block are looked at."""
        with torch.autograd.graph.saved_tensors_hooks(self._see, _as_it_was):
            yield

    def _see(self, tensor: Tensor) -> Tensor:
        if _place(tensor) not in self._own:
            self._storages[_place(tensor)] = tensor.untyped_storage()
        return tensor

    def has(self, tensor: Tensor) -> bool:
        return _place(tensor) in self._storages

    def num_bytes(self, *, without: Iterable[Tensor]) -> int:
        left_out = {_place(tensor) for tensor in without}
        return sum(s.nbytes() for place, s in self._storages.items() if place not in left_out)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _as_it_was(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _borrowed(module: nn.Module, device: torch.device) -> Generator[None]:
    """In the block a module is on the device; then where it was, its buffers as they were."""
    home = next((t.device for t in (*module.parameters(), *module.buffers())), device)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to(device)
    try:
        yield
    finally:
        module.to(home)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in before:
                    buffer.copy_(before[name])


@contextmanager
def _named(what: str) -> Generator[None]:
    """What a layer raises, with its name."""
    try:
        yield
    except ManyhandsError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UsageError(
            f"{what}: {error}",
            hint="the first layer gets the inputs, each later one what the one before it returned",
        ) from error
