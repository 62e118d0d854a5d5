"""What a boss and its workers say to each other, beside the tensors of the plan.

worker ── Offer ──► boss                     once they see each other
boss ── Build, Enter, Forward, ... ──► worker ── Done | Failed ──► boss     one at a time
boss ── Refuse | Dismiss ──► worker          it has no place, or nothing to do any more
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from manyhands.core.errors import Malformed
from manyhands.core.peers import PeerId
from manyhands.core.plan import ScheduleName
from manyhands.links.base import Delivery, Link, LinkSettings
from manyhands.stages.precision import Precision
from manyhands.stages.recipes import Recipe
from manyhands.wire.tensors import TensorSpec

T = TypeVar("T")
RUN = "bossman"
BOSS = "boss"  # the name of the boss, in that run and in every plan
SETTINGS = LinkSettings(outage_s=10.0)  # the hub is the boss's own: it does not come back
OPERATION_S = 1800.0  # for one tensor to come, while its sender lives
MEET_S = 60.0  # for all workers to enter a plan
_MARK = b"bossman"
_Id = Annotated[int, msgspec.Meta(ge=0)]
_Text = Annotated[str, msgspec.Meta(max_length=100_000)]


class Word(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="word"
):
    """What they have in common."""


class Offer(Word, frozen=True, tag="offer"):
    """A worker is here."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    device: _Text
    free_bytes: _Id | None
    release: _Text


class Refuse(Word, frozen=True, tag="refuse"):
    """The boss does not take this worker."""

    reason: _Text


class Dismiss(Word, frozen=True, tag="dismiss"):
    """The boss has finished."""


class Build(Word, frozen=True, tag="build"):
    """Make these layers, by their place in the plan, and forget what was there."""

    id: _Id
    layers: tuple[tuple[_Id, Recipe], ...]
    seed: int


class Enter(Word, frozen=True, tag="enter"):
    """Meet the others of this plan, with the layers that were built."""

    id: _Id
    run: str
    rank: _Id
    plan: str
    seed: int


class Optimize(Word, frozen=True, tag="optimize"):
    """Make an optimizer of your parameters."""

    id: _Id
    optimizer: Recipe


class Forward(Word, frozen=True, tag="forward"):
    """One batch; `keep` what its backward needs. `precision` as the boss's autocast has it."""

    id: _Id
    keep: bool
    precision: Precision | None


class Backward(Word, frozen=True, tag="backward"):
    """Of the last forward."""

    id: _Id


class Apply(Word, frozen=True, tag="apply"):
    """The optimizer's step."""

    id: _Id


class Step(Word, frozen=True, tag="step"):
    """Forward, backward and optimizer."""

    id: _Id
    microbatches: Annotated[int, msgspec.Meta(ge=1)]
    schedule: ScheduleName
    precision: Precision | None


class Mode(Word, frozen=True, tag="mode"):
    """As nn.Module.train."""

    id: _Id
    train: bool


class Clear(Word, frozen=True, tag="clear"):
    """Drop what is held for a backward, and give unused memory back."""

    id: _Id


class Describe(Word, frozen=True, tag="describe"):
    """Say what state your layers have."""

    id: _Id


class Fetch(Word, frozen=True, tag="fetch"):
    """Send it to the boss, in that order."""

    id: _Id


class Load(Word, frozen=True, tag="load"):
    """Take it from the boss, in that order."""

    id: _Id


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor of a layer's state: the layer's place in the plan, the tensor's name in it."""

    layer: _Id
    name: _Text
    spec: TensorSpec


class Done(Word, frozen=True, tag="done"):
    """A command was carried out."""

    id: _Id
    entries: tuple[Entry, ...] = ()


class Failed(Word, frozen=True, tag="failed"):
    """A command was not.

    `refused`: it asks for what this worker does not do; `error`: something raised it, here;
    `shared`: the boss and all others have the same error; `broken`: the others are gone.
    """

    id: _Id
    kind: Literal["refused", "error", "shared", "broken"]
    message: _Text
    hint: _Text | None = None
    traceback: _Text = ""
    ended: bool = False  # the plan is over for this worker


Command = (
    Build
    | Enter
    | Optimize
    | Forward
    | Backward
    | Apply
    | Step
    | Mode
    | Clear
    | Describe
    | Fetch
    | Load
)
ToWorker = Command | Refuse | Dismiss
Answer = Done | Failed
ToBoss = Answer | Offer
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_boss = msgspec.msgpack.Decoder(ToBoss)


def say(link: Link, to: PeerId, word: Word) -> None:
    """Raises what the link raises. Words may be longer than a message: they go as its buffer."""
    link.send(to, _MARK, [msgspec.msgpack.encode(word)])


def heard_by_worker(delivery: Delivery) -> ToWorker:
    """Raises Malformed for what no boss says."""
    return _decode(_to_worker, delivery)


def heard_by_boss(delivery: Delivery) -> ToBoss:
    """Raises Malformed for what no worker says."""
    return _decode(_to_boss, delivery)


def _decode(decoder: msgspec.msgpack.Decoder[T], delivery: Delivery) -> T:
    try:
        if delivery.message != _MARK or len(delivery.buffers) != 1:
            raise Malformed(f"{delivery.sender} says something else than boss and workers do")
        return decoder.decode(delivery.buffers[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(
            f"{delivery.sender} says what neither boss nor worker says: {error}"
        ) from None
