"""Terms: how a job is trained, and which of its processes this one is. Values only; no torch.

Who submits a job looks at them first: what cannot be is said before anything waits for a slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manyhands.core.errors import UsageError

_LEAST_GRAIN, _MOST_GRAIN, _GRAINS = 8, 32, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """How a model is trained; the same in every process of a job."""

    name: str
    batch: int
    """Of all processes together."""
    epochs: int
    lr: float
    grain: int | None = None
    """Samples that one pass has, however many processes there are; None: as many as it gets.
    Layers that see their batch (normalisation), or chance (dropout), need it."""
    workers: int = 1
    """Threads of each process that read samples."""
    load: str | None = None
    """A folder whose newest checkpoint has the first weights."""
    save: str | None = None
    """A folder for checkpoints; if it has some of this training, it goes on from there."""
    seed: int = 0
    autocast: bool = False
    """Whether bfloat16 is used where torch thinks it good enough."""
    double: bool = False
    """Whether to compute in float64, so that two curves differ by nothing that rounding does:
    normalisation over few values makes much of the last bit of float32."""
    device: str | None = None
    """None: this slot's GPU, if there is one."""
    every: int = 10
    """Rounds from one line to the next."""

    def __post_init__(self) -> None:
        for name in ("batch", "epochs", "every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", hint="1 or more")
        if self.double and self.autocast:
            raise UsageError("float64 and bfloat16", hint="one of --double and --autocast")
        check_grain(self.batch, self.grain)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Which of a job's processes this one is."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    run: str | None = None
    """Where they meet; None: as the environment says, or nowhere, if this one is alone."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place:
        """As a job's environment has it, or torchrun's."""
        return cls(
            rank=int(environ.get("RANK", "0")),
            world=int(environ.get("WORLD_SIZE", "1")),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            run=environ.get("MANYHANDS_RUN"),
        )


def grain_of(batch: int) -> int:
    """A grain for this batch: an eighth of it, within bounds. Not a matter of how many slots."""
    return min(batch, max(_LEAST_GRAIN, min(_MOST_GRAIN, batch // _GRAINS)))


def check_grain(batch: int, grain: int | None) -> None:
    """Raises UsageError for one that cannot be, or leaves a single sample: it has no variance."""
    if grain is None:
        return
    if grain < 1:
        raise UsageError(f"a grain of {grain} samples", hint="1 or more")
    if grain > 1 and batch % grain == 1:
        raise UsageError(
            f"a global batch of {batch} in grains of {grain} leaves one with a single sample, "
            "which batch normalisation cannot use",
            hint=f"a batch of {batch - 1}, or another --grain",
        )


def check_split(batch: int, gpus: int, grain: int | None) -> None:
    """Raises UsageError if not every slot could have a part of each batch."""
    units = -(-batch // (grain or 1))
    if units >= gpus:
        return
    if grain is None or batch < 2 * gpus:
        hint = f"a global batch of at least {gpus if grain is None else 2 * gpus}, or fewer slots"
    else:
        hint = f"--grain {batch // gpus}, a larger batch, or fewer slots"
    kind = "samples" if grain is None else f"grains of {grain} samples"
    raise UsageError(
        f"a global batch of {batch} has {units} {kind}, which {gpus} slots cannot share", hint=hint
    )


def check_job(environ: Mapping[str, str], gpus: int, batch: int) -> None:
    """Raises UsageError if what was typed is not what the job has: `manyhands submit --gpus 4 --
    python vgg.py 2 16` would train otherwise than one of the two says.
    """
    world, given = environ.get("WORLD_SIZE", ""), environ.get("MANYHANDS_BATCH", "")
    if world and world != str(gpus):
        raise UsageError(
            f"the job has {world} slots, and its program was told of {gpus}",
            hint="one number for `submit --gpus` and for what follows the script",
        )
    if given and given != str(batch):
        raise UsageError(
            f"the job has a global batch of {given}, and its program was told of {batch}",
            hint="one number for `submit --batch`, or none, and for what follows the script",
        )


def absolute(place: str | None) -> str | None:
    """A folder as other working directories know it; URLs as they are."""
    return place if place is None or "://" in place else str(Path(place).absolute())
