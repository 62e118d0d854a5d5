"""Variables: named tensors that leave one layer and enter a later one, on any peer.

    class Down(nn.Module):
        def forward(self, x):
            mh.stash("skip", x)
            return self.pool(x)

    class Up(nn.Module):
        def forward(self, x):
            return torch.cat([self.up(x), mh.pop("skip")], 1)

A variable is given once and may be taken by several later layers; gradients of all of them are
summed where it came from. In a plan the runtime carries it to whoever takes it. A model that runs
in one process needs only `with mh.variables(): model(x)`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from manyhands.core.errors import UsageError

INPUTS = "the inputs"
"""Who gives the extra inputs, where for other variables a layer is named."""


class VariableError(UsageError):
    """A variable that is unknown, given twice, taken too early, or never taken."""


class Scope:
    """The variables of one microbatch at one place, and what its layers did with them."""

    def __init__(self, given: Mapping[str, Tensor] | None = None) -> None:
        self.values: dict[str, Tensor] = dict(given or {})
        self.layer = ""  # the one that runs, in words
        self.stashed: dict[str, str] = dict.fromkeys(self.values, INPUTS)  # name: by whom
        self.popped: dict[str, list[str]] = {}  # name: by whom
        self.whole: set[str] = set()
        self._versions: dict[str, int] = {}

    def stash(self, name: str, tensor: Tensor, *, whole: bool = False) -> None:
        """Raises VariableError when somebody else has given it already."""
        if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise VariableError(
                f"{self._who()} stashes a {type(tensor).__name__} as {name!r}",
                hint="variables are tensors: stash several under names of their own",
            )
        check_name(name, self._who())
        if name in self.stashed:
            by = self.stashed[name]
            before = "is an extra input" if by == INPUTS else f"{by} has stashed already"
            raise VariableError(
                f"{self._who()} stashes {name!r}, which {before}",
                hint="give each variable a name of its own",
            )
        self.stashed[name] = self._who()
        self.values[name] = tensor
        self._versions[name] = version_of(tensor)
        if whole:
            self.whole.add(name)

    def pop(self, name: str) -> Tensor:
        """Raises VariableError when no layer before has given it."""
        if name not in self.values:
            known = ", ".join(map(repr, self.values)) or "none"
            raise VariableError(
                f"{self._who()} pops {name!r}, which no layer before it has stashed",
                hint=f"there are: {known}; a variable must be stashed by an earlier layer",
            )
        self.popped.setdefault(name, []).append(self._who())
        value = self.look(name)
        self._versions.setdefault(name, version_of(value))  # of one that was given elsewhere
        return value

    def look(self, name: str) -> Tensor:
        """Raises VariableError when it was written to since it was stashed, or came here.

        Where the layer that writes is on another peer, it would write to a copy.
        """
        value = self.values[name]
        if name in self._versions and version_of(value) != self._versions[name]:
            by = self.stashed[name]
            given = f"the input {name!r} is given" if by == INPUTS else f"{by} stashes {name!r}"
            raise VariableError(
                f"{given}, and a later layer writes into that tensor",
                hint="use inplace=False there, or write into a clone of it",
            )
        return value

    def check(self) -> None:
        """Raises VariableError when any was written to: who takes it later may be elsewhere."""
        for name in self._versions:
            self.look(name)

    def _who(self) -> str:
        return self.layer or "a layer"


def check_name(name: object, who: str) -> None:
    """Raises VariableError for a name that cannot be one: those with # are the runtime's own."""
    if not isinstance(name, str) or not name or name.startswith("#"):
        raise VariableError(
            f"{who} give{'' if who == INPUTS else 's'} a variable the name {name!r}",
            hint="a text that is not empty and does not begin with #",
        )


def version_of(tensor: Tensor) -> int:
    """How often it was written to, its views too; torch does not count in inference mode."""
    return 0 if tensor.is_inference() else tensor._version  # pyright: ignore[reportPrivateUsage]


_scope: ContextVar[Scope | None] = ContextVar("manyhands variables", default=None)


class scoped:  # a class, since a generator would cost more in every microbatch
    """Layers that run in the block stash into and pop from this scope."""

    __slots__ = ("_before", "_scope")

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def __enter__(self) -> Scope:
        self._before = _scope.set(self._scope)
        return self._scope

    def __exit__(self, *_: object) -> None:
        _scope.reset(self._before)


@contextmanager
def variables() -> Generator[None]:
    """For a model that runs as one: inside the block `stash` and `pop` find each other.

    One block a forward; at its end the variables are forgotten.
    """
    with scoped(Scope()):
        yield


def stash(name: str, tensor: Tensor, *, whole: bool = False) -> None:
    """Give a tensor to later layers. Its dimension 0 are the rows of this layer's input.

    `whole`: it has no rows, but belongs to all of them (a mask, a position table): it is neither
    cut nor joined on its way, and must not depend on which rows this layer has seen.
    """
    _current(f"mh.stash({name!r})").stash(name, tensor, whole=whole)


def pop(name: str) -> Tensor:
    """Take a tensor that an earlier layer has stashed, any number of times."""
    return _current(f"mh.pop({name!r})").pop(name)


def _current(what: str) -> Scope:
    scope = _scope.get()
    if scope is None:
        raise VariableError(
            f"{what} outside of a plan",
            hint="a model that runs as one: `with mh.variables(): output = model(x)`",
        )
    return scope
