"""Carrier: what moves the bytes of a plan: a torch process group, whichever backend it has.

Peers are ranks of the group. What goes from one peer to another is received in the order in which
it was sent, so nothing needs a tag: NCCL has none.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core.errors import LinkBroken, LinkError, UsageError
from manyhands.stages.errors import PlanBroken

_HEAD_BYTES = 512
_MOST_BYTES = 64 << 20  # of what one peer says to all: plans, errors, what a stage gives


class Pending(Protocol):
    """Something on its way."""

    def wait(self) -> None:
        """Returns when it is done; raises what its backend raises."""
        ...


class Carrier(Protocol):
    """The seam between the runtime and a transport. A link that has failed is a LinkError."""

    rank: int
    size: int
    words_on: torch.device  # where small tensors of the runtime itself must be

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Leave the tensor alone until it is done."""
        ...

    def receive(self, tensor: Tensor, sender: int) -> Pending:
        """Into a contiguous tensor."""
        ...

    def prepare(self, peers: Iterable[Sequence[int]], pairs: Iterable[tuple[int, int]]) -> None:
        """Groups of peers that will sum, pairs that will send: all peers call it alike."""
        ...

    def sum(self, tensor: Tensor, peers: Sequence[int]) -> Pending:
        """Over these peers, in place."""
        ...

    def spread(self, tensor: Tensor, root: int, peers: Sequence[int]) -> Pending:
        """From `root` to these peers, of which it is one, in place."""
        ...

    def say(self, words: bytes | None, root: int) -> bytes:
        """What `root` says to everybody; the others pass None."""
        ...

    def give_up(self, reason: str) -> None:
        """This peer cannot go on: the others hear why, if there is a way to tell them.

        Else they hear of it when this process ends.
        """
        ...


def carrier_for(group: dist.ProcessGroup | Carrier | None, device: torch.device) -> Carrier:
    """Over this group; without one, over the default group; if there is none, nobody else."""
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        return AloneCarrier()
    return GroupCarrier(group, device) if isinstance(group, dist.ProcessGroup) else group


class GroupCarrier:
    """Over a torch process group.

    `lines`: whether each direction between two peers has a group of its own; None is as the
    backend needs it.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, lines: bool | None = None
    ) -> None:
        self._group: Any = group
        self.rank, self.size = group.rank(), group.size()
        self._backend = group.name().lower()
        self._device = device
        # gloo moves what is in the memory of the machine, NCCL what is in that of the device.
        self._staged = device.type != "cpu" and "gloo" in self._backend
        self._as_bytes = "nccl" in self._backend  # it does not know all types, int16 for one
        self.words_on = device if "nccl" in self._backend else torch.device("cpu")
        # What NCCL does between two ranks waits in one queue for both directions: a send that is
        # not taken yet would hold up what comes back. A group for each direction does not.
        self._wants_lines = "nccl" in self._backend if lines is None else lines
        self._everybody = tuple(range(self.size))
        self._groups: dict[tuple[int, ...], Any] = {self._everybody: group}
        self._lines: dict[tuple[int, int], Any] = {}

    def prepare(self, peers: Iterable[Sequence[int]], pairs: Iterable[tuple[int, int]]) -> None:
        for wanted in sorted({_key(ranks) for ranks in peers if len(ranks) > 1}):
            if wanted not in self._groups:
                self._groups[wanted] = self._new_group(wanted)
        if self._wants_lines:
            for pair in sorted(set(pairs)):
                if pair not in self._lines:
                    self._lines[pair] = self._new_group(tuple(sorted(pair)))
                    self._open_line(*pair)

    def _open_line(self, source: int, target: int) -> None:
        """NCCL connects two ranks at their first message, and both wait there.

        Here all lines are opened in one order, so nobody waits in a circle.
        """
        word = torch.zeros(1, device=self.words_on)
        if self.rank == source:
            self.send(word, target).wait()
        elif self.rank == target:
            self.receive(word, source).wait()

    def _new_group(self, ranks: tuple[int, ...]) -> Any:  # noqa: ANN401
        if self._group is not dist.group.WORLD:
            part_of = getattr(self._group, "part_of", None)
            if part_of is None:
                raise UsageError(
                    f"this plan needs a group of peers {list(ranks)}, which torch makes only from "
                    "the default group",
                    hint="call init_process_group for these peers, and pass no group",
                )
            return part_of(ranks)
        with _linked():
            return dist.new_group(list(ranks))  # pyright: ignore[reportUnknownMemberType]

    def send(self, tensor: Tensor, to: int) -> Pending:
        tensor = self._sendable(tensor.detach().contiguous())
        if self._staged:
            tensor = tensor.cpu()
        line = self._lines.get((self.rank, to))
        with _linked():
            if line is not None:
                return _Kept(line.send([tensor], _other(self.rank, to), 0), tensor)
            return _Kept(self._group.send([tensor], to, 0), tensor)

    def receive(self, tensor: Tensor, sender: int) -> Pending:
        target = torch.empty_like(tensor, device="cpu") if self._staged else self._sendable(tensor)
        line = self._lines.get((sender, self.rank))
        with _linked():
            if line is not None:
                work = line.recv([target], _other(self.rank, sender), 0)
            else:
                work = self._group.recv([target], sender, 0)
        return _Staged(work, target, tensor) if self._staged else _Kept(work, target)

    def _sendable(self, tensor: Tensor) -> Tensor:
        """The same memory, as the backend can move it."""
        return tensor.view(-1).view(torch.uint8) if self._as_bytes else tensor

    def sum(self, tensor: Tensor, peers: Sequence[int]) -> Pending:
        target = tensor.cpu() if self._staged else tensor
        with _linked():
            work = self._groups[_key(peers)].allreduce([target])
        return _Staged(work, target, tensor) if self._staged else _Kept(work, target)

    def spread(self, tensor: Tensor, root: int, peers: Sequence[int]) -> Pending:
        target = tensor.cpu() if self._staged else tensor
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = _key(peers).index(root), 0
        with _linked():
            work = self._groups[_key(peers)].broadcast([target], options)
        return _Staged(work, target, tensor) if self._staged else _Kept(work, target)

    def say(self, words: bytes | None, root: int) -> bytes:
        if self.size == 1:
            assert words is not None
            return words
        # Most of what is said is short: its length and its beginning are one message.
        head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
        if words is not None:
            start = (len(words).to_bytes(8) + words)[:_HEAD_BYTES]
            head[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        start = self._tell(head, root)
        length = int.from_bytes(start[:8])
        if length > _MOST_BYTES:
            raise LinkBroken(
                f"rank {root} speaks of {length} bytes: at most {_MOST_BYTES} are taken"
            )
        missing = length - (_HEAD_BYTES - 8)
        if missing <= 0:
            return start[8 : 8 + length]
        rest = torch.zeros(missing, dtype=torch.uint8)
        if words is not None:
            rest = torch.frombuffer(bytearray(words[-missing:]), dtype=torch.uint8)
        return start[8:] + self._tell(rest, root)

    def _tell(self, tensor: Tensor, root: int) -> bytes:
        tensor = tensor.to(self.words_on)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        with _linked():
            self._group.broadcast([tensor], options).wait()
        return bytes(cast("list[int]", tensor.tolist()))  # pyright: ignore[reportUnknownMemberType]

    def give_up(self, reason: str) -> None:
        tell = getattr(self._group, "give_up", None)  # torch's own groups have no such thing
        if tell is not None:
            tell(reason)


class AloneCarrier:
    """One peer: nothing to carry."""

    rank, size, words_on = 0, 1, torch.device("cpu")

    def send(self, tensor: Tensor, to: int) -> Pending:
        raise AssertionError("one peer has nobody to send to")

    def receive(self, tensor: Tensor, sender: int) -> Pending:
        raise AssertionError("one peer has nobody to receive from")

    def prepare(self, peers: Iterable[Sequence[int]], pairs: Iterable[tuple[int, int]]) -> None:
        pass

    def sum(self, tensor: Tensor, peers: Sequence[int]) -> Pending:
        return _Done()

    def spread(self, tensor: Tensor, root: int, peers: Sequence[int]) -> Pending:
        return _Done()

    def say(self, words: bytes | None, root: int) -> bytes:
        assert words is not None
        return words

    def give_up(self, reason: str) -> None:
        pass


@contextmanager
def _linked() -> Generator[None]:
    """What a backend raises is about the link; gloo's errors are plain RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        text, _, _ = str(error).partition("\nhint: ")  # whoever runs a plan has a better one
        # What a backend says of its link is all said; another error's traceback is needed.
        said = isinstance(error, dist.DistBackendError)
        raise LinkBroken(text) from (None if said else error)


@contextmanager
def exchanging() -> Generator[None]:
    """For those who use a plan's group themselves: what its link raises ends the plan."""
    try:
        with _linked():
            yield
    except LinkError as error:
        raise PlanBroken(error.message) from error


def _key(peers: Sequence[int]) -> tuple[int, ...]:
    """torch sorts the ranks of a group."""
    return tuple(sorted(peers))


def _other(rank: int, peer: int) -> int:
    """A peer's place in a group of the two."""
    return int(peer > rank)


class _Done:
    def wait(self) -> None:
        pass


class _Kept:
    """Keeps the tensor alive as long as its bytes are needed."""

    def __init__(self, work: Any, tensor: Tensor) -> None:  # noqa: ANN401
        self._work, self._tensor = work, tensor

    def wait(self) -> None:
        with _linked():
            self._work.wait()


class _Staged:
    """From the memory of the machine to that of the device, when it has come."""

    def __init__(self, work: Any, source: Tensor, target: Tensor) -> None:  # noqa: ANN401
        self._work, self._source, self._target = work, source, target

    def wait(self) -> None:
        with _linked():
            self._work.wait()
        with torch.no_grad():
            self._target.copy_(self._source)
