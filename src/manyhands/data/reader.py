"""Reader: the samples of a batch, one after the other, and what is done about those that are bad.

It runs where the samples are read: in the user's thread, in a thread of its own, or in a worker
process, to which it is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manyhands.core.errors import ManyhandsError
from manyhands.data.chance import begin_sample, end_sample
from manyhands.data.fetch import Rows, Spot, seed_all
from manyhands.data.quarantine import ATTEMPTS, Rules, replacement
from manyhands.data.source import Source
from manyhands.data.table import BadSample, named, place_of


class Reader:
    """`alone`: no other thread of this process draws random numbers while a sample is read, so the
    process's generators can be the sample's too.
    """

    def __init__(self, source: Source, *, alone: bool) -> None:
        self._table, self._size = source.dataset, source.size
        self._transform, self._collate = source.transform, source.collate
        self._policy = (source.rules or Rules()).policy
        self._number = source.number
        self._seeds = alone and _draws(source)
        # One that says where its samples are also says which of them are bad.
        self._says = hasattr(source.dataset, "where")

    def read(self, spots: Sequence[Spot]) -> Rows:
        """What can be read of these. Raises what reading raised, and BadSample if that is the
        policy.
        """
        samples: list[Any] = []
        bad: list[BadSample] = []
        for spot in spots:
            try:
                samples.append(self._sample(spot))
            except BadSample as error:
                if self._policy == "raise":
                    raise
                bad.append(BadSample(error.where, error.reason))  # without the frames it came from
                if self._policy == "replace":
                    samples.append(self._other(spot))
        return Rows(self._collate(samples) if samples else None, len(samples), tuple(bad))

    def stand_in(self, spots: Sequence[Spot]) -> Any:  # noqa: ANN401
        """A batch of as many samples that can be read: these, or others."""
        return self._collate([self._sample_or_other(spot) for spot in spots])

    def _sample_or_other(self, spot: Spot) -> Any:  # noqa: ANN401
        try:
            return self._sample(spot)
        except BadSample:
            return self._other(spot)

    def _other(self, spot: Spot) -> Any:  # noqa: ANN401
        """In place of a bad one."""
        errors: list[str] = []
        for attempt in range(ATTEMPTS):
            try:
                return self._sample(Spot(*replacement(spot.seed, attempt, self._size)))
            except BadSample as error:
                errors.append(error.message)
        raise ManyhandsError(
            f"{ATTEMPTS} other samples were tried in place of a bad one, and all are bad: "
            f"{errors[0]}; {errors[-1]}",
            hint="most of this data cannot be read: look at these files",
        )

    def _sample(self, spot: Spot) -> Any:  # noqa: ANN401
        number = self._number(spot.place)
        begin_sample(spot.seed)
        if self._seeds:
            seed_all(spot.seed)
        try:
            sample = self._item(number)
            if self._transform is None:
                return sample
            with named(place_of(self._table, number)):
                return self._transform(sample)
        finally:
            end_sample()

    def _item(self, number: int) -> Any:  # noqa: ANN401
        if self._says or self._policy == "raise":
            return self._table[number]
        try:
            return self._table[number]
        except BadSample:
            raise
        except Exception as error:
            if _is_of_the_machine(error):
                raise
            where, what = place_of(self._table, number), str(error) or "no message"
            raise BadSample(where, f"{type(error).__name__}: {what}") from None


def _draws(source: Source) -> bool:
    """Whether reading may draw random numbers. Of our own tables only a transform does."""
    ours = type(source.dataset).__module__.startswith("manyhands.data.")
    plain = ours and getattr(source.dataset, "transform", source.dataset) is None
    return source.transform is not None or not plain


def _is_of_the_machine(error: Exception) -> bool:
    """A disk, a network or memory, that may do better at another time: nothing about the sample."""
    return isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno is not None
    )
