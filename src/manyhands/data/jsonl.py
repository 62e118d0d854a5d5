"""JSONL: a JSON value a line, each line a sample, read in any order from the plain file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from manyhands.data.index import Found
from manyhands.data.records import Records, is_blank, numbered


class JsonlTable(Records):
    """The lines of a .jsonl file that are not blank: what `transform` makes of their values.

    `source` is a path or a blob. Where each line begins is found once, and kept in a file beside
    it (see `index`); after that any line costs the same. Lines may end in CR LF, the last one need
    not end, and NaN and Infinity are numbers, as Python writes them. A line that is no JSON is a
    sample too: it raises BadSample with file and line. A .jsonl.gz can only be iterated over.
    """

    kind = "jsonl"

    def __init__(
        self,
        source: Any,  # noqa: ANN401
        *,
        transform: Callable[[Any], Any] | None = None,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(source, transform=transform, index=index)

    def scan(self, lines: Iterable[bytes]) -> Iterator[Found]:
        return (found for found in numbered(lines, self.place) if not is_blank(found[2]))

    def parse(self, text: bytes) -> Any:  # noqa: ANN401
        try:
            return json.loads(text.decode())  # as bytes, it would guess at the encoding
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8: {error.reason} in byte {error.start}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None
