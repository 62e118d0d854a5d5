"""Hooks: means that travel in fewer bytes, alone and as DDP wants them."""

# No postponed annotations: DDP compares those of a hook with types.

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from manyhands.collectives.backend.buffers import Buffers
from manyhands.collectives.backend.exchange import Exchange
from manyhands.collectives.backend.member import Make, Member
from manyhands.collectives.backend.operations import Maker
from manyhands.collectives.backend.work import Promise
from manyhands.collectives.codecs import codec_for, within
from manyhands.collectives.reduction import Operator, arithmetic_for
from manyhands.core.errors import UsageError

Hook = Callable[[dist.ProcessGroup | None, GradBucket], Future[Tensor]]

_WIRES = ("bf16", "fp16")


def compressed(wire: str) -> Hook:
    """A communication hook for DDP: gradients travel as `wire`, "bf16" or "fp16".

        ddp.register_comm_hook(None, manyhands.compressed("bf16"))

    Its state is the process group of that DDP; None is the world. Gradients are averaged as without
    a hook: contributions are rounded to travel, added up in fp32, and their mean is rounded. All
    ranks end with the same bits. Gradients that are as narrow already go as they are. What is too
    large for fp16 becomes inf. Raises UsageError: here for another wire, in `backward` for a group
    of another backend.
    """
    if wire == "int8":
        raise UsageError(
            "int8 is too coarse for gradients unless what it rounds off is added to the next ones, "
            "which this hook does not do",
            hint="take 'bf16', or torch's PowerSGD hook; rounds carry int8 that way",
        )
    if wire not in _WIRES:
        raise UsageError(
            f"gradients cannot travel as {wire!r}",
            hint=f"take one of {', '.join(map(repr, _WIRES))}; without a hook they go as they are",
        )

    def hook(state: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        return average(bucket.buffer(), wire, state).get_future()

    return hook


def average(tensor: Tensor, wire: str = "fp32", group: dist.ProcessGroup | None = None) -> Promise:
    """`tensor` := its mean over the group (None: the world), sent with the codec of that name.

    A collective: all members call it alike. Its future's value is `tensor`. Raises UsageError for
    a codec that there is not, a dtype that has no mean, a group of another backend.
    """
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, Member):
        kind = "there is no process group" if found is None else f"this group is of {found.name()}"
        raise UsageError(
            f"only the manyhands backend compresses what it sends; {kind}",
            hint='call init_process_group("manyhands", ...), or pass a group of that backend (with '
            "register_comm_hook: as its state); for others there are torch's own hooks",
        )

    def build(maker: Maker, buffers: Buffers) -> Make:
        flat = buffers.both(tensor)
        arithmetic_for(Operator.MEAN, flat.dtype)  # or it says why not
        narrowed = not codec_for(wire, flat.dtype).raw

        def make() -> Exchange:
            if narrowed and wire == "fp16":
                _overflow(flat, torch.float16)
            return maker.all_reduce(flat, Operator.MEAN, wire)

        return make

    return found._run("all_reduce", build, tensor)  # pyright: ignore[reportPrivateUsage]


@torch.no_grad()
def _overflow(flat: Tensor, narrow: torch.dtype) -> None:
    """What is too large for `narrow` becomes inf, as in any torch backend: GradScaler looks for it.

    The codec would send the largest number instead.
    """
    if not within(flat, torch.finfo(narrow).max):
        rounded = flat.to(narrow)
        flat.copy_(torch.where(rounded.isinf(), rounded.to(flat.dtype), flat))
