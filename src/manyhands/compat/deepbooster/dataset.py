"""Dataset: the samples of one JSONL file, read by their number; the file stays on the disk."""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset as TorchDataset

from manyhands.compat.deepbooster.errors import ChunkError
from manyhands.compat.deepbooster.lines import open_lines, sample_of, scan

Transformer = Callable[[Any], Any]


class Dataset(TorchDataset[tuple[Any, Any]]):
    """Line i as `(input, label)`, `input` (and, if asked for, `label`) put through `transformer`.

    All lines are checked at once: ChunkError names the broken ones. The file stays open, so that
    one that is written anew in the meantime does not mix with this one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        transformer: Transformer | None = None,
        apply_transformer_to_label: bool = False,
    ) -> None:
        self.path = Path(path)
        self._transformer = transformer
        self._to_label = apply_transformer_to_label
        self._starts, self._sizes = array("Q"), array("Q")
        self._numbers = array("Q")
        with open_lines(self.path) as file:
            for line in scan(file, self.path):
                self._starts.append(line.offset)
                self._sizes.append(len(line.text))
                self._numbers.append(line.number)
            self._file = os.dup(file.fileno())
        self.close = weakref.finalize(self, os.close, self._file)
        """Let go of the file. Idempotent; happens by itself when nobody has the Dataset."""

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        place = range(len(self))[index]
        text = os.pread(self._file, self._sizes[place], self._starts[place])
        try:
            sample, label = sample_of(text)
        except ValueError as error:
            raise ChunkError(f"{self.where(place)}: {error}; was the file changed?") from None
        return self._transform(sample), self._transform(label) if self._to_label else label

    def where(self, index: int) -> str:
        """The file and the line of a sample, as errors name it."""
        return f"{self.path}:{self._numbers[index]}"

    def _transform(self, value: Any) -> Any:  # noqa: ANN401
        if self._transformer is None:
            return value
        if isinstance(value, int | float) and _is_tensor_type(self._transformer):
            # To torch.Tensor a number is a size, and the values are whatever the memory held.
            return self._transformer([value]).reshape(())
        return self._transformer(value)


def _is_tensor_type(transformer: Transformer) -> bool:
    return transformer is torch.Tensor or isinstance(transformer, type(torch.FloatTensor))
