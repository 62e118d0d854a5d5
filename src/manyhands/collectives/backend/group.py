"""ManyhandsGroup: a torch ProcessGroup over a team.

torch calls one method an operation; here each says which tensors are read and written and which
exchange moves them. Old and new names of an operation are both there: releases differ.
"""

# torch passes arguments by position, and its stubs differ from release to release in their names.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from manyhands.collectives.backend.arguments import (
    check_each,
    equal_chunks,
    only,
    operator_of,
    place_of,
    split_chunks,
)
from manyhands.collectives.backend.buffers import Buffers
from manyhands.collectives.backend.exchange import Key, Wanted
from manyhands.collectives.backend.member import Build, Make, Member
from manyhands.collectives.backend.operations import Maker
from manyhands.collectives.backend.session import Session
from manyhands.collectives.backend.store import MeetingStore
from manyhands.collectives.backend.work import Promise
from manyhands.core.errors import SettingsError, UsageError


def create_group(options: Any) -> ManyhandsGroup:  # noqa: ANN401  (torch's own type)
    """What torch calls for the world and for every group of some of its ranks."""
    store = options.store
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, MeetingStore) or not isinstance(store.owner, Session):
        raise SettingsError(
            'init_process_group("manyhands") was given no meeting point',
            hint='pass init_method=os.environ["MANYHANDS_URL"], or a join code, or "amqps://..."; '
            "rank and world_size may come from the environment",
        )
    session = store.owner
    ranks = list(options.global_ranks_in_group) or list(range(session.world))
    group = ManyhandsGroup(session, str(options.group_id), ranks, options.timeout)
    if session.world_group is None:
        session.world_group = group  # torch makes it first
    return group


class ManyhandsGroup(Member):
    """Some ranks of a session, in order."""

    def part_of(self, ranks: Sequence[int]) -> ManyhandsGroup | None:
        """A group of some of this one's ranks, None where this rank is not among them.

        All ranks of this group call it, in one order; it ends with the session.
        """
        chosen = [self._ranks[rank] for rank in ranks]
        if self._session.rank not in chosen:
            return None
        timeout = timedelta(seconds=self._timeout_s)
        return ManyhandsGroup(self._session, f"{self._name} {list(ranks)}", chosen, timeout)

    # -- sums -----------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Promise:  # noqa: ANN401
        def build(maker: Maker, buffers: Buffers) -> Make:
            flat = buffers.both(only(tensors, "all_reduce"))
            operator = operator_of(opts, flat.dtype)
            return lambda: maker.all_reduce(flat, operator)

        return self._run("all_reduce", build, tensors, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Promise:  # noqa: ANN401
        return self._all([self.allreduce([tensor], opts) for tensor in tensors], tensors)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Promise:  # noqa: ANN401
        root = place_of(int(opts.rootRank), self.size())

        def build(maker: Maker, buffers: Buffers) -> Make:
            tensor = only(tensors, "reduce")
            flat = buffers.both(tensor) if root == self._place else buffers.read(tensor)
            operator = operator_of(opts, flat.dtype)
            return lambda: maker.reduce(flat, root, operator)

        return self._run("reduce", build, tensors, opts)

    def reduce_scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: Any = None,  # noqa: ANN401
    ) -> Promise:
        def build(maker: Maker, buffers: Buffers) -> Make:
            out = buffers.write(only(outputs, "reduce_scatter"))
            chunks = [buffers.read(chunk) for chunk in only(inputs, "reduce_scatter")]
            operator = operator_of(opts, out.dtype)
            check_each("reduce_scatter", chunks, self.size(), like=out, sizes=False)
            if out.numel() != chunks[self._place].numel():
                raise UsageError(
                    f"reduce_scatter: an output of {out.numel()} values for a chunk of "
                    f"{chunks[self._place].numel()}"
                )
            return lambda: maker.reduce_scatter(chunks, out, operator)

        return self._run("reduce_scatter", build, outputs, opts)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Promise:  # noqa: ANN401
        def build(maker: Maker, buffers: Buffers) -> Make:
            out, flat = buffers.write(output), buffers.read(given)
            operator = operator_of(opts, out.dtype)
            chunks = equal_chunks("reduce_scatter", flat, out, self.size())
            return lambda: maker.reduce_scatter(chunks, out, operator)

        return self._run("reduce_scatter", build, output, opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ANN401
    ) -> Promise:
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self._reduce_scatter_base(o, i, opts) for o, i in pairs], outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # -- transfers ------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Promise:  # noqa: ANN401
        root = place_of(int(opts.rootRank), self.size())

        def build(maker: Maker, buffers: Buffers) -> Make:
            tensor = only(tensors, "broadcast")
            flat = buffers.read(tensor) if root == self._place else buffers.write(tensor)
            return lambda: maker.broadcast(flat, root)

        return self._run("broadcast", build, tensors, opts)

    def allgather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ANN401
    ) -> Promise:
        def build(maker: Maker, buffers: Buffers) -> Make:
            given = buffers.read(only(inputs, "all_gather"))
            outs = [buffers.write(out) for out in only(outputs, "all_gather")]
            check_each("all_gather", outs, self.size(), like=given)
            return lambda: maker.all_gather(outs, given)

        return self._run("all_gather", build, outputs, opts)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Promise:  # noqa: ANN401
        def build(maker: Maker, buffers: Buffers) -> Make:
            flat, own = buffers.write(output), buffers.read(given)
            outs = equal_chunks("all_gather", flat, own, self.size())
            return lambda: maker.all_gather(outs, own)

        return self._run("all_gather", build, output, opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ANN401
    ) -> Promise:
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self._allgather_base(o, i, opts) for o, i in pairs], outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ANN401
    ) -> Promise:
        # outputs[j][i]: what member j gave as its i-th.
        works = [
            self.allgather([[out[i] for out in outputs]], [given], opts)
            for i, given in enumerate(inputs)
        ]
        return self._all(works, outputs)

    def gather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any,  # noqa: ANN401
    ) -> Promise:
        root = place_of(int(opts.rootRank), self.size())

        def build(maker: Maker, buffers: Buffers) -> Make:
            given = buffers.read(only(inputs, "gather"))
            outs = [buffers.write(out) for group in outputs for out in group]
            if root == self._place:
                check_each("gather", outs, self.size(), like=given)
            return lambda: maker.gather(outs, given, root)

        return self._run("gather", build, outputs, opts)

    def scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: Any,  # noqa: ANN401
    ) -> Promise:
        root = place_of(int(opts.rootRank), self.size())

        def build(maker: Maker, buffers: Buffers) -> Make:
            out = buffers.write(only(outputs, "scatter"))
            chunks = [buffers.read(chunk) for group in inputs for chunk in group]
            if root == self._place:
                check_each("scatter", chunks, self.size(), like=out)
            return lambda: maker.scatter(out, chunks, root)

        return self._run("scatter", build, outputs, opts)

    def alltoall(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ANN401
    ) -> Promise:
        def build(maker: Maker, buffers: Buffers) -> Make:
            chunks = [buffers.read(chunk) for chunk in inputs]
            outs = [buffers.write(out) for out in outputs]
            self._check_crossing(outs, chunks)
            return lambda: maker.all_to_all(outs, chunks)

        return self._run("all_to_all", build, outputs, opts)

    def alltoall_base(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,  # noqa: ANN401
    ) -> Promise:
        def build(maker: Maker, buffers: Buffers) -> Make:
            flat_out, flat_in = buffers.write(output), buffers.read(given)
            outs = split_chunks("output", output, flat_out, output_splits, self.size())
            chunks = split_chunks("input", given, flat_in, input_splits, self.size())
            self._check_crossing(outs, chunks)
            return lambda: maker.all_to_all(outs, chunks)

        return self._run("all_to_all", build, output, opts)

    all_to_all_single = alltoall_base

    def _check_crossing(self, outs: Sequence[Tensor], chunks: Sequence[Tensor]) -> None:
        check_each("all_to_all inputs", chunks, self.size(), sizes=False)
        own = chunks[self._place]
        check_each("all_to_all outputs", outs, self.size(), like=own, sizes=False)
        if outs[self._place].numel() != own.numel():
            raise UsageError(
                f"all_to_all: this rank gives itself {own.numel()} values and takes "
                f"{outs[self._place].numel()}",
                hint="what one rank sends to another, that one must receive",
            )

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Promise:
        def build(maker: Maker, buffers: Buffers) -> Make:
            flat = buffers.read(only(tensors, "send"))
            return lambda: maker.send(flat, to)

        return self._run("send", build, tensors, stream=self._pair(self._place, to, tag))

    def recv(self, tensors: Sequence[Tensor], sender: int, tag: int = 0) -> Promise:
        stream = self._pair(sender, self._place, tag)
        return self._run("recv", self._receiving(tensors, sender), tensors, stream=stream)

    def _receiving(self, tensors: Sequence[Tensor], sender: int) -> Build:
        def build(maker: Maker, buffers: Buffers) -> Make:
            flat = buffers.write(only(tensors, "recv"))
            return lambda: maker.receive(flat, sender)

        return build

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Promise:
        """From whoever sends first: what a sender has for `recv`s that wait is not taken."""
        tensor: Tensor = only(tensors, "recv")
        if self.size() == 1:
            raise UsageError("recv from any rank, in a group of this rank alone")
        device = tensor.device if tensor.is_cuda else None
        promise = Promise(device, about=lambda: "`recv` from any rank")
        senders = {
            self._pair(sender, self._place, tag): sender
            for sender in range(self.size())
            if sender != self._place
        }

        def keys() -> dict[Key, int]:
            with self._lock:
                return {
                    Key(stream, self._next.get(stream, 0)): self._ranks[sender]
                    for stream, sender in senders.items()
                }

        def take(key: Key) -> bool:
            sender = senders.get(key.stream)
            if sender is None or not self._claim(key):
                return False
            promise.source = sender
            self._session.completer.put(lambda: receive(key, sender))
            return True

        def receive(key: Key, sender: int) -> None:
            try:
                work = self._run("recv", self._receiving(tensors, sender), tensors, key=key)
            except Exception as error:  # noqa: BLE001  (it is handed on, not swallowed)
                promise.break_(error)
            else:
                self._hand_on(work.get_future(), promise, tensors)

        def fail(error: BaseException) -> None:
            self._session.completer.put(lambda: promise.break_(error))

        deadline_s = time.monotonic() + self._timeout_s
        self._session.team.on_any(Wanted(keys, take, fail, deadline_s))
        return promise

    recvAnysource = recv_anysource

    def barrier(self, opts: Any = None) -> Promise:  # noqa: ANN401
        return self._run("barrier", lambda maker, _: maker.barrier, [], opts)
