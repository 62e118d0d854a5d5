"""Table: samples by number. What has a length and items is one: torch's map-style data sets too.

A sample that cannot be read raises BadSample, at every peer and every time: what is bad is the
data, not the moment. Whatever may go well at another time (a network, a disk) is raised as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.core.text import printable


class Table(Protocol):
    """Samples 0 to len - 1, each the same every time, from any thread and any process."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any:  # noqa: ANN401
        """The sample. Raises BadSample, and IndexError for one that is none."""
        ...

    def where(self, index: int) -> str:
        """The file of a sample and its place there, as messages name it."""
        ...


@runtime_checkable
class Composed(Protocol):
    """A table whose samples are those of others."""

    def drawn_from(self, index: int) -> tuple[Any, int]:
        """The table that a sample is of, and its number there."""
        ...


class BadSample(ManyhandsError):
    """One sample is broken: `where` it is, and the `reason`. The others can be used."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(printable(f"{where}: {reason}"))
        self.where = where
        self.reason = reason

    def __reduce__(self) -> tuple[type[BadSample], tuple[str, str]]:
        """It travels from worker processes."""
        return BadSample, (self.where, self.reason)


class Sequential(UsageError, TypeError):
    """A file that can be read from its beginning only was asked for a sample by its number.

    A TypeError too: that is what Python expects of things without a length.
    """


def says_where(table: Any) -> bool:  # noqa: ANN401
    """Whether it has a Table's `where`: a function of an index alone. That of tensors and of data
    frames is something else.
    """
    try:
        parameters = inspect.signature(table.where).parameters
    except (AttributeError, TypeError, ValueError):  # there is none, or it is not Python's
        return False
    return len(parameters) == 1


def is_trusted(table: Any, index: int) -> bool:  # noqa: ANN401
    """Whether the table that has this sample knows BadSample: one that says where its samples are
    also says which of them are bad.
    """
    while isinstance(table, Composed):
        table, index = table.drawn_from(index)
    return says_where(table)


def place_of(table: Any, index: int) -> str:  # noqa: ANN401
    """Where a sample of any table is; for those that do not say, which one it is."""
    return table.where(index) if says_where(table) else f"{type(table).__name__}[{index}]"


@contextmanager
def named(where: str | Callable[[], str]) -> Generator[None]:
    """What a user's function raises inside says of which sample; it is no other error by that."""
    try:
        yield
    except BadSample:
        raise
    except Exception as error:
        error.add_note(f"for the sample {where if isinstance(where, str) else where()}")
        raise
