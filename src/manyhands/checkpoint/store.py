"""Store: the checkpoints of a run, in a folder or behind a URL; the newest few are kept.

    round-000000000120-18a7...c3.safetensors   written first, under a name that nobody else uses
    round-000000000120-18a7...c3.json          written last: from here on the checkpoint counts

So a save that breaks off leaves what was there before, and several processes can save at once, the
same round too. Removing goes the other way round. Nothing is pickled and nothing evaluated.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from manyhands.checkpoint import manifest
from manyhands.checkpoint.folder import File, open_folder
from manyhands.checkpoint.manifest import Manifest
from manyhands.checkpoint.tensors import entries_of, read_tensors, write_tensors
from manyhands.checkpoint.tree import flatten, unflatten
from manyhands.core.errors import CheckpointError, Malformed, UsageError, WireError

log = logging.getLogger(__name__)

_NAME = re.compile(r"round-(\d{12,18})-([0-9a-f]{24})\.(json|safetensors)")
_MAX_ROUND = 10**18 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """The state of a run after `round` rounds.

    `about` is small and has no tensors; `tree` is what `state_dict()`s give. On loading its tensors
    are on the CPU, each with memory of its own: those that shared some when saved do not any more.
    """

    round: int
    chain: bytes
    about: Mapping[str, Any]
    tree: Any


class Place(NamedTuple):
    """Where a checkpoint lies. Places sort by age: by round, then by when they were written."""

    round: int
    token: str
    complete: bool  # its manifest is there

    @property
    def tensors(self) -> str:
        """The file that is written first."""
        return f"round-{self.round:012}-{self.token}.safetensors"

    @property
    def manifest(self) -> str:
        """The file that is written last."""
        return f"round-{self.round:012}-{self.token}.json"


class Broken(NamedTuple):
    """A checkpoint that was passed over, and why."""

    place: str
    reason: str


class Found(NamedTuple):
    """The newest whole checkpoint, if there is one; and the broken ones that are newer."""

    checkpoint: Checkpoint | None
    place: str | None
    broken: list[Broken]


class Store:
    """Checkpoints in a folder, given as path or as any URL of fsspec; `keep` rounds stay.

    Saving needs room for one more than are kept. Any thread, any number of processes.
    """

    def __init__(self, url: str | os.PathLike[str], *, keep: int = 3) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep} checkpoints", hint="at least one, the newest")
        self._folder, self._keep = open_folder(url), keep

    def places(self) -> list[Place]:
        """What is there, oldest first. Raises CheckpointError."""
        return _places_in(self._folder.sizes())

    def save(self, checkpoint: Checkpoint) -> str:
        """Write it, then remove those that are too old; returns where its manifest lies.

        Blocks until it would outlive a crash of the machine; the tensors are not copied, so leave
        them alone meanwhile. Raises CheckpointError when it could not be written: what was there
        before is untouched. Raises UsageError for a state that could be saved nowhere.
        """
        if not 0 <= checkpoint.round <= _MAX_ROUND:
            raise UsageError(f"a checkpoint of round {checkpoint.round}")
        about, state = flatten(dict(checkpoint.about), "about"), flatten(checkpoint.tree)
        if about.tensors:
            raise UsageError(f"{about.names[0]} is a tensor", hint="tensors belong into the tree")
        entries = entries_of(state.names, state.tensors)
        token = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        place = Place(checkpoint.round, token, complete=True)
        self._clear()
        with self._folder.draft(place.tensors) as file:
            seal = write_tensors(file, entries, state.tensors)
            file.finish()
            written = Manifest(
                round=checkpoint.round,
                chain=checkpoint.chain,
                about=about.shape,
                state=state.shape,
                tensors=entries,
                file=seal,
            )
            self._folder.put(place.manifest, manifest.encode(written))
        self._prune(place)
        return self._folder.locate(place.manifest)

    def load(self, round: int | None = None) -> Found:
        """The newest that is whole, or the one of this round. Raises CheckpointError when the
        folder cannot be listed; a checkpoint that cannot be read is a broken one.
        """
        broken: dict[Place, Broken] = {}
        while True:
            # Listed anew each time: others may save and remove while we read.
            sizes = self._folder.sizes()
            places = [p for p in _places_in(sizes) if round is None or p.round == round]
            left = [place for place in places if place not in broken]
            named = [broken[place] for place in reversed(places) if place in broken]
            if not left:
                return Found(None, None, named)
            place = left[-1]
            try:
                checkpoint = self._read(place, sizes)
            except (WireError, CheckpointError) as error:
                reason = error.message if error.hint is None else f"{error.message} ({error.hint})"
                broken[place] = Broken(self._folder.locate(place.manifest), reason)
            else:
                return Found(checkpoint, self._folder.locate(place.manifest), named)

    def _read(self, place: Place, sizes: Mapping[str, int]) -> Checkpoint:
        if not place.complete:
            raise Malformed("it has no manifest: saving broke off, or is under way")
        with self._folder.open(place.manifest) as file:
            written = manifest.decode(_read_all(file, manifest.MAX_BYTES + 1))
        if written.round != place.round:
            raise Malformed(f"its manifest is of round {written.round}")
        size = sizes.get(place.tensors)
        if size is None:
            raise Malformed("its tensor file is missing")
        if size != written.file.size:
            raise Malformed(f"its tensor file has {size} of {written.file.size} bytes")
        with self._folder.open(place.tensors) as file:
            tensors = read_tensors(file, written.tensors, written.file)
        about = unflatten(written.about, [])
        if not isinstance(about, dict):
            raise Malformed("its manifest is about nothing")
        return Checkpoint(
            round=written.round,
            chain=written.chain,
            about=cast("dict[str, Any]", about),
            tree=unflatten(written.state, tensors),
        )

    def _clear(self) -> None:
        """Remove what saves that broke off have left."""
        for place in self.places():
            if not place.complete:
                try:
                    self._folder.clear(place.tensors, place.manifest)
                except CheckpointError as error:
                    log.warning("the rest of a save that broke off stays: %s", error.message)

    def _prune(self, own: Place) -> None:
        """Remove all but the newest of each round that is kept; never what was just written.

        Of two that save the same round at once, each sees the same one as the newer.
        """
        places = [place for place in self.places() if place.complete]
        newest = {place.round: place for place in places}
        kept = {own, *(newest[round] for round in sorted(newest)[-self._keep :])}
        for place in places:
            if place not in kept:
                try:
                    self._folder.remove(place.manifest)
                    self._folder.remove(place.tensors)
                except CheckpointError as error:
                    log.warning("an old checkpoint stays: %s", error.message)


def _places_in(names: Mapping[str, int]) -> list[Place]:
    found: dict[tuple[int, str], bool] = {}
    for name in names:
        if match := _NAME.fullmatch(name):
            key = int(match[1]), match[2]
            found[key] = found.get(key, False) or match[3] == "json"
    return sorted(Place(round, token, complete) for (round, token), complete in found.items())


def _read_all(file: File, limit: int) -> bytes:
    pieces: list[bytes] = []
    while limit > 0 and (piece := file.read(min(limit, 1 << 20))):
        pieces.append(piece)
        limit -= len(piece)
    return b"".join(pieces)
