"""Source: what of a user's loader counts, and what cannot work, refused by name."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    default_collate,  # pyright: ignore[reportUnknownVariableType]
)
from torch.utils.data.distributed import DistributedSampler

from manyhands.core.errors import UsageError
from manyhands.data.order import Order, Ordered, Positions
from manyhands.data.quarantine import Rules

_REMEDY = "give a map-style Dataset (with __len__ and __getitem__), or a DataLoader over one"


@dataclass(frozen=True, kw_only=True)
class Workers:
    """How samples are read, as the user's loader says it. It changes no value of a batch."""

    num: int = 0
    kind: str = "process"  # or "thread"
    prefetch: int = 2  # passes that each of them reads ahead
    pin_memory: bool = False
    timeout_s: float = 0.0
    init: Callable[[int], None] | None = None
    context: Any = None


class Sourced(ABC):
    """A loader that says itself what of it counts."""

    @property
    @abstractmethod
    def source(self) -> Source:
        """Raises UsageError if peers cannot share it out."""
        ...


@dataclass(frozen=True, kw_only=True)
class Source:
    """The samples of a run in the order of their numbers, and how many make a round."""

    dataset: Any
    batch: int
    collate: Callable[[list[Any]], Any] = default_collate  # pyright: ignore[reportUnknownVariableType]
    shuffle: bool = True
    drop_last: bool = False
    chosen: Sequence[int] | None = None  # only these of the data set, by number
    workers: Workers = Workers()
    rules: Rules | None = None  # about bad samples; None: of a DataLoader, which knows none
    transform: Callable[[Any], Any] | None = None  # of a sample
    device: Any = None  # where batches are to be
    seed: int | None = None  # that the loader was given; None: none

    @property
    def size(self) -> int:
        """How many samples an epoch has."""
        return len(self.dataset if self.chosen is None else self.chosen)

    def number(self, place: int) -> int:
        """The number in the data set of the sample at this place."""
        return place if self.chosen is None else int(self.chosen[place])

    @property
    def order_digest(self) -> str | None:
        """Of the order that the data set has of its own; None if it has none, or does not say."""
        if self.chosen is None and isinstance(self.dataset, Ordered):
            return getattr(self.dataset, "order_digest", None)
        return None

    def order(self, seed: int, epoch: int) -> Positions:
        """Which place comes when in an epoch. A table may have an order of its own."""
        if self.chosen is None and isinstance(self.dataset, Ordered):
            return self.dataset.order_of_epoch(epoch)
        return Order(self.size, seed=seed, epoch=epoch, shuffle=self.shuffle)

    @classmethod
    def of(cls, data: Any, global_batch: int | None = None) -> Source:  # noqa: ANN401
        """From a loader, torch's or ours, or from a data set with `global_batch`. Raises
        UsageError.

        The batch size of a loader is that of a whole round, whoever takes part.
        """
        if isinstance(data, Sourced):
            source = data.source
            batch = source.batch if global_batch is None else global_batch
            return replace(source, batch=check_batch(batch))
        if not issubclass(type(data), DataLoader):
            if global_batch is None:
                raise UsageError(
                    f"a {type(data).__name__} has no batch size",
                    hint="give a DataLoader with its batch_size; to train on, global_batch=N "
                    "beside it does too",
                )
            return cls(dataset=check_dataset(data), batch=check_batch(global_batch))
        dataset = check_dataset(data.dataset)
        if data.batch_size is None:
            raise UsageError(
                _unbatched(data), hint="give the DataLoader a batch_size, that of a whole round"
            )
        return cls(
            dataset=dataset,
            batch=check_batch(data.batch_size if global_batch is None else global_batch),
            collate=data.collate_fn,
            drop_last=data.drop_last,
            workers=Workers(
                num=data.num_workers,
                prefetch=data.prefetch_factor or 2,
                pin_memory=data.pin_memory,
                timeout_s=data.timeout,
                init=data.worker_init_fn,
                context=data.multiprocessing_context,
            ),
            **_order_of(data.sampler),
        )


def _order_of(sampler: Any) -> dict[str, Any]:  # noqa: ANN401
    # Of torch's samplers only themselves: a class made from one has an order of its own.
    match sampler:
        case DistributedSampler():
            raise UsageError(
                "a DistributedSampler shares the samples out, and so does the run",
                hint="give the DataLoader shuffle=True or False and no sampler",
            )
        case RandomSampler() if (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler.num_samples == len(sampler.data_source)
        ):
            return {"shuffle": True}
        case SequentialSampler() if type(sampler) is SequentialSampler:
            return {"shuffle": False}
        case SubsetRandomSampler() if type(sampler) is SubsetRandomSampler:
            return {"shuffle": True, "chosen": sampler.indices}
        case _ if hasattr(sampler, "__getitem__") and hasattr(sampler, "__len__"):
            return {"shuffle": False, "chosen": sampler}
        case _:
            raise UsageError(
                f"a {type(sampler).__name__} says only in its own time which sample comes next; "
                "the peers of a run must know beforehand",
                hint="use shuffle=True, a torch.utils.data.Subset, or a sampler with __len__ and "
                "__getitem__",
            )


def check_dataset(dataset: Any) -> Any:  # noqa: ANN401
    """It, if its samples have numbers. Raises UsageError."""
    name = type(dataset).__name__
    if issubclass(type(dataset), IterableDataset):
        raise UsageError(
            f"{name} is an IterableDataset: its samples have no numbers, and "
            "nobody could take over those of a peer that dies",
            hint=_REMEDY,
        )
    if not issubclass(type(dataset), Dataset) and not hasattr(dataset, "__getitem__"):
        raise UsageError(f"a {name} is no data set", hint=_REMEDY)
    try:
        size = len(dataset)
    except UsageError:
        raise  # it says why
    except TypeError:
        raise UsageError(f"{name} does not know its length", hint=_REMEDY) from None
    if size < 1:
        raise UsageError(f"{name} is empty", hint="at least one sample is needed")
    return dataset


def check_whole(name: str, value: object) -> int:
    """A plain int, of numpy's too: a state has what JSON has. Raises UsageError."""
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise UsageError(
            f"{name}={value!r}", hint="a whole number (256 // 2 is one, 256 / 2 is none)"
        ) from None


def check_batch(batch: int) -> int:
    """It, if it is one. Raises UsageError."""
    batch = check_whole("batch_size", batch)
    if batch < 1:
        raise UsageError(f"a global batch of {batch} samples", hint="at least one")
    return batch


def _unbatched(data: Any) -> str:  # noqa: ANN401
    if data.batch_sampler is None:
        return "a DataLoader with batch_size=None"
    return f"a DataLoader whose batches a {type(data.batch_sampler).__name__} makes up"
