"""Reader: the samples of a batch, one after the other, and what is done about those that are bad.

It runs where the samples are read: in the user's thread, in a thread of its own, or in a worker
process, to which it is pickled.
"""

from __future__ import annotations

import gzip
from typing import Any

from torch.utils.data import (
    default_collate,  # pyright: ignore[reportUnknownVariableType]
)

from manyhands.core.errors import ManyhandsError
from manyhands.data.chance import Origin, begin_sample, end_sample, number_of
from manyhands.data.fetch import Marks, Rows, seed_all
from manyhands.data.memory import is_out_of_memory
from manyhands.data.quarantine import ATTEMPTS, Bad, Rules, replacement
from manyhands.data.source import Source
from manyhands.data.table import BadSample, is_trusted, named, place_of

# Packages that talk to others. What they raise is never about a sample.
_NETWORKS = frozenset({"aiohttp", "botocore", "httpcore", "httpx", "urllib3"})


class Reader:
    """`seed` is the run's. `alone`: no other thread of this process draws random numbers while a
    sample is read, so the process's generators can be the sample's too.
    """

    def __init__(self, source: Source, seed: int, *, alone: bool) -> None:
        self._table, self._seed = source.dataset, seed
        self._transform, self._collate = source.transform, source.collate
        self._policy = (source.rules or Rules()).policy
        self._size, self._number = source.size, source.number
        draws = _draws(source)
        self._seeds = alone and draws
        self.draws = draws or source.collate is not default_collate
        """Whether to read may draw random numbers: whether something of the user's is called."""

    def read(self, marks: Marks) -> Rows:
        """What can be read of these. Raises what reading raised, and BadSample if that is the
        policy.
        """
        samples: list[Any] = []
        bad: list[Bad] = []
        try:
            for position, number in zip(marks.positions, marks.numbers, strict=True):
                origin = Origin(self._seed, marks.epoch, position)
                try:
                    samples.append(self._sample(number, origin))
                except BadSample as error:
                    if self._policy == "raise":
                        raise
                    plain = BadSample(error.where, error.reason)  # without its frames
                    bad.append(Bad(position, plain))
                    if self._policy == "replace":
                        samples.append(self._other(origin))
        finally:
            end_sample()
        return Rows(self._collate(samples) if samples else None, len(samples), tuple(bad))

    def stand_in(self, marks: Marks) -> Any:  # noqa: ANN401
        """A batch of as many samples that can be read: these, or others."""
        samples: list[Any] = []
        try:
            for position, number in zip(marks.positions, marks.numbers, strict=True):
                origin = Origin(self._seed, marks.epoch, position)
                try:
                    samples.append(self._sample(number, origin))
                except BadSample:
                    samples.append(self._other(origin))
        finally:
            end_sample()
        return self._collate(samples)

    def _other(self, origin: Origin) -> Any:  # noqa: ANN401
        """In place of a bad one."""
        errors: list[str] = []
        seed = number_of(origin)
        for attempt in range(ATTEMPTS):
            number = self._number(replacement(seed, attempt, self._size).place)
            try:
                return self._sample(number, origin._replace(attempt=attempt))
            except BadSample as error:
                errors.append(error.message)
        raise ManyhandsError(
            f"{ATTEMPTS} other samples were tried in place of a bad one, and all are bad: "
            f"{errors[0]}; {errors[-1]}",
            hint="most of this data cannot be read: look at these files",
        )

    def _sample(self, number: int, origin: Origin) -> Any:  # noqa: ANN401
        begin_sample(origin)
        if self._seeds:
            seed_all(number_of(origin))
        raises = self._policy == "raise"
        sample = self._table[number] if raises else guarded(self._table, number)
        if self._transform is None:
            return sample
        with named(lambda: place_of(self._table, number)):
            return self._transform(sample)


def guarded(table: Any, number: int) -> Any:  # noqa: ANN401
    """A sample of any table. What a foreign one raises is BadSample, but for what the machine is to
    blame for.
    """
    try:
        return table[number]
    except BadSample:
        raise
    except Exception as error:
        if _is_of_the_machine(error) or is_trusted(table, number):
            raise
        where, what = place_of(table, number), str(error) or "no message"
        raise BadSample(where, f"{type(error).__name__}: {what}") from None


def _draws(source: Source) -> bool:
    """Whether a sample may draw random numbers. Of our own tables only what they call does."""
    table = source.dataset
    ours = type(table).__module__.startswith("manyhands.data.")
    plain = ours and getattr(table, "transform", table) is None and not getattr(table, "calls", ())
    return source.transform is not None or not plain


def _is_of_the_machine(error: Exception) -> bool:
    """A disk, a network or memory, that may do better at another time, or something of ours that
    is set up wrongly: nothing about the sample.

    Whoever reads by a network has OSErrors of its own kinds (time-outs, `urllib`'s, `requests`'),
    or errors that are none. About data there are three: a plain one without a number, as decoders
    raise it, gzip's, and Pillow's for what is no image.
    """
    if isinstance(error, OSError):
        torn = isinstance(error, gzip.BadGzipFile) or _is_no_image(error)
        return not torn and (type(error) is not OSError or error.errno is not None)
    own = isinstance(error, ManyhandsError) or is_out_of_memory(error)
    return own or _is_of_a_network(error)


def _is_no_image(error: OSError) -> bool:
    """By its name: Pillow need not be here."""
    return any(kind.__name__ == "UnidentifiedImageError" for kind in type(error).__mro__)


def _is_of_a_network(error: Exception) -> bool:
    return any(kind.__module__.partition(".")[0] in _NETWORKS for kind in type(error).__mro__)
