"""ManyhandsGroup: a torch ProcessGroup over a team.

torch calls one method an operation; here each says which tensors are read and written and which
exchange moves them. Old and new names of an operation are both there: releases differ.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Work

from manyhands.collectives.backend.buffers import Buffers
from manyhands.collectives.backend.exchange import Exchange, Key
from manyhands.collectives.backend.operations import Maker
from manyhands.collectives.backend.session import Session
from manyhands.collectives.backend.store import MeetingStore
from manyhands.collectives.backend.work import Promise
from manyhands.collectives.reduction import Operator
from manyhands.core.errors import SettingsError, UsageError

_OPERATORS = {
    ReduceOp.SUM: Operator.SUM,
    ReduceOp.AVG: Operator.MEAN,
    ReduceOp.PRODUCT: Operator.PRODUCT,
    ReduceOp.MIN: Operator.MIN,
    ReduceOp.MAX: Operator.MAX,
    ReduceOp.BAND: Operator.AND,
    ReduceOp.BOR: Operator.OR,
    ReduceOp.BXOR: Operator.XOR,
}
Build = Callable[[Maker, Buffers], Callable[[], Exchange]]


def create_group(options: Any) -> ManyhandsGroup:  # noqa: ANN401  (torch's own type)
    """What torch calls for the world and for every group of some of its ranks."""
    store = options.store
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, MeetingStore) or not isinstance(store.owner, Session):
        raise SettingsError(
            'init_process_group("manyhands") was given no meeting point',
            hint='pass init_method="hub://HOST:PORT/RUN", "amqps://..." or a join code; '
            "rank and world_size may come from the environment",
        )
    session = store.owner
    ranks = list(options.global_ranks_in_group) or list(range(session.world))
    return ManyhandsGroup(session, str(options.group_id), ranks, options.timeout)


class ManyhandsGroup(dist.ProcessGroup):
    """Some ranks of a session, in order."""

    def __init__(
        self, session: Session, name: str, ranks: Sequence[int], timeout: timedelta
    ) -> None:
        self._session, self._ranks = session, tuple(ranks)
        self._place = self._ranks.index(session.rank)
        super().__init__(self._place, len(self._ranks))
        self._name, self._desc = name, "undefined"
        self._timeout_s = timeout.total_seconds()
        team = session.team
        self._maker = Maker(self._ranks, self._place, team.pool, team.link.terms.part_bytes)
        self._lock = threading.Lock()
        self._counters: dict[int, itertools.count[int]] = {}
        self._stream = _stream_of(name)

    # -- what torch asks of a group -------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        return "manyhands"

    def name(self) -> str:
        return "manyhands"

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return len(self._ranks)

    def getRank(self) -> int:  # noqa: N802
        return self._place

    def getSize(self) -> int:  # noqa: N802
        return len(self._ranks)

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *cuda]

    def _set_sequence_number_for_group(self) -> None:
        pass  # operations are numbered from the start

    def shutdown(self) -> None:
        """torch calls this from destroy_process_group: the world's group takes the link along."""
        if len(self._ranks) == self._session.world and self._is_world():
            self._session.close()

    def abort(self) -> None:
        self._session.close()

    def _is_world(self) -> bool:
        return self is getattr(self._session, "world_group", self)

    # -- sums -----------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:  # noqa: ANN401
        operator = _operator(opts)

        def build(maker: Maker, buffers: Buffers) -> Callable[[], Exchange]:
            flat = buffers.both(_only(tensors, "all_reduce"))
            return lambda: maker.all_reduce(flat, operator)

        return self._run(build, tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:  # noqa: ANN401
        return self._all([self.allreduce([tensor], opts) for tensor in tensors], tensors)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:  # noqa: ANN401
        operator, root = _operator(opts), int(opts.rootRank)

        def build(maker: Maker, buffers: Buffers) -> Callable[[], Exchange]:
            tensor = _only(tensors, "reduce")
            flat = buffers.both(tensor) if root == self._place else buffers.read(tensor)
            return lambda: maker.reduce(flat, root, operator)

        return self._run(build, tensors)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None  # noqa: ANN401
    ) -> Work:
        operator = _operator(opts)

        def build(maker: Maker, buffers: Buffers) -> Callable[[], Exchange]:
            out = buffers.write(_only(outputs, "reduce_scatter"))
            chunks = [buffers.read(chunk) for chunk in _only(inputs, "reduce_scatter")]
            self._check_chunks("reduce_scatter", chunks)
            _check_size("reduce_scatter output", out, chunks[self._place])
            return lambda: maker.reduce_scatter(chunks, out, operator)

        return self._run(build, outputs)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:  # noqa: ANN401
        operator = _operator(opts)

        def build(maker: Maker, buffers: Buffers) -> Callable[[], Exchange]:
            out, flat = buffers.write(output), buffers.read(given)
            chunks = self._chunks("reduce_scatter", flat, out.numel())
            return lambda: maker.reduce_scatter(chunks, out, operator)

        return self._run(build, output)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None  # noqa: ANN401
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self._reduce_scatter_base(o, i, opts) for o, i in pairs], outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # -- transfers ------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:  # noqa: ANN401
        root = int(opts.rootRank)

        def build(maker: Maker, buffers: Buffers) -> Callable[[], Exchange]:
            tensor = _only(tensors, "broadcast")
            flat = buffers.read(tensor) if root == self._place else buffers.write(tensor)
            return lambda: maker.broadcast(flat, root)

        return self._run(build, tensors)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None  # noqa: ANN401
    ) -> Work:
        def build(maker: Maker, buffers: Buffers) -> Callable[[], Exchange]:
            given = buffers.read(_only(inputs, "all_gather"))
            outs = [buffers.write(out) for out in _only(outputs, "all_gather")]
            self._check_chunks("all_gather", outs)
            return lambda: maker.all_gather(outs, given)

        return self._run(build, outputs)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:  # noqa: ANN401
        def build(maker: Maker, buffers: Buffers) -> Callable[[], Exchange]:
            flat, own = buffers.write(output), buffers.read(given)
            outs = self._chunks("all_gather", flat, own.numel())
            return lambda: maker.all_gather(outs, own)

        return self._run(build, output)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None  # noqa: ANN401
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self._allgather_base(o, i, opts) for o, i in pairs], outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None  # noqa: ANN401
    ) -> Work:
        # outputs[j][i]: what member j gave as its i-th.
        works = [
            self.allgather([[out[i] for out in outputs]], [given], opts)
            for i, given in enumerate(inputs)
        ]
        return self._all(works, outputs)

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any  # noqa: ANN401
    ) -> Work:
        root = int(opts.rootRank)

        def build(maker: Maker, buffers: Buffers) -> Callable[[], Exchange]:
            given = buffers.read(_only(inputs, "gather"))
            outs = [buffers.write(out) for group in outputs for out in group]
            if root == self._place:
                self._check_chunks("gather", outs)
            return lambda: maker.gather(outs, given, root)

        return self._run(build, outputs)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any  # noqa: ANN401
    ) -> Work:
        root = int(opts.rootRank)

        def build(maker: Maker, buffers: Buffers) -> Callable[[], Exchange]:
            out = buffers.write(_only(outputs, "scatter"))
            chunks = [buffers.read(chunk) for group in inputs for chunk in group]
            if root == self._place:
                self._check_chunks("scatter", chunks)
            return lambda: maker.scatter(out, chunks, root)

        return self._run(build, outputs)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None  # noqa: ANN401
    ) -> Work:
        def build(maker: Maker, buffers: Buffers) -> Callable[[], Exchange]:
            chunks = [buffers.read(chunk) for chunk in inputs]
            outs = [buffers.write(out) for out in outputs]
            self._check_chunks("all_to_all", chunks)
            self._check_chunks("all_to_all", outs)
            return lambda: maker.all_to_all(outs, chunks)

        return self._run(build, outputs)

    def alltoall_base(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,  # noqa: ANN401
    ) -> Work:
        def build(maker: Maker, buffers: Buffers) -> Callable[[], Exchange]:
            flat_out, flat_in = buffers.write(output), buffers.read(given)
            outs = self._splits("output", output, flat_out, output_splits)
            chunks = self._splits("input", given, flat_in, input_splits)
            return lambda: maker.all_to_all(outs, chunks)

        return self._run(build, output)

    all_to_all_single = alltoall_base

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Work:
        def build(maker: Maker, buffers: Buffers) -> Callable[[], Exchange]:
            flat = buffers.read(_only(tensors, "send"))
            return lambda: maker.send(flat, to)

        return self._run(build, tensors, stream=self._pair(self._place, to, tag))

    def recv(self, tensors: Sequence[Tensor], sender: int, tag: int = 0) -> Work:
        def build(maker: Maker, buffers: Buffers) -> Callable[[], Exchange]:
            flat = buffers.write(_only(tensors, "recv"))
            return lambda: maker.receive(flat, sender)

        return self._run(build, tensors, stream=self._pair(sender, self._place, tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        return _AnySource(self, tensors, tag)

    recvAnysource = recv_anysource  # noqa: N815

    def barrier(self, opts: Any = None) -> Work:  # noqa: ANN401
        return self._run(lambda maker, _: maker.barrier, [])

    # -- running --------------------------------------------------------------------------------

    def _run(self, build: Build, result: object, *, stream: int | None = None) -> Work:
        session = self._session
        buffers = Buffers(session.stream_for)
        make = build(self._maker, buffers)
        promise = Promise(buffers.device)
        key = self._next_key(self._stream if stream is None else stream)

        def done(error: BaseException | None) -> None:
            session.completer.put(lambda: finish(error))

        def finish(error: BaseException | None) -> None:
            if error is not None:
                return promise.break_(error)
            context = buffers.put_back()
            if context is None:
                return promise.keep(result)
            with context:  # so that whoever waits, waits for the copy too
                return promise.keep(result)

        def go() -> None:
            session.team.start(make(), key, self._timeout_s, done)

        arrival = buffers.arrival()
        if arrival is None:
            go()
        else:

            def go_later() -> None:
                arrival()
                go()

            session.completer.put(go_later)
        return promise.work

    def _all(self, works: Sequence[Work], result: object) -> Work:
        futures = [work.get_future() for work in works]
        promise = Promise(None)
        if not futures:
            promise.keep(result)
            return promise.work
        whole = torch.futures.collect_all(futures)

        def finish(done: torch.futures.Future[Any]) -> None:
            try:
                for future in done.value():
                    future.value()
            except Exception as error:  # noqa: BLE001  (it is handed on, not swallowed)
                promise.break_(error)
            else:
                promise.keep(result)

        whole.then(finish)
        return promise.work

    def _next_key(self, stream: int) -> Key:
        with self._lock:
            counter = self._counters.setdefault(stream, itertools.count())
            return Key(stream, next(counter))

    def _pair(self, sender: int, receiver: int, tag: int) -> int:
        """Messages of one pair and tag are numbered apart: their order is theirs alone."""
        return _stream_of(f"{self._name} {sender}>{receiver} {tag}")

    def _chunks(self, what: str, flat: Tensor, size: int) -> Sequence[Tensor]:
        num = len(self._ranks)
        if flat.numel() != size * num:
            raise UsageError(
                f"{what}: {flat.numel()} values for {num} ranks of {size} values each",
                hint=f"the large tensor must have {size * num} values",
            )
        return flat.split(size) if size else [flat] * num

    def _splits(
        self, what: str, tensor: Tensor, flat: Tensor, splits: Sequence[int]
    ) -> Sequence[Tensor]:
        num, rows = len(self._ranks), tensor.shape[0] if tensor.dim() else 0
        if not splits:
            if rows % num:
                raise UsageError(f"all_to_all: {what} of {rows} rows for {num} ranks, no splits")
            splits = [rows // num] * num
        if len(splits) != num or sum(splits) != rows:
            raise UsageError(f"all_to_all: {what} splits {list(splits)} for {rows} rows")
        width = flat.numel() // rows if rows else 0
        return flat.split([rows * width for rows in splits])

    def _check_chunks(self, what: str, chunks: Sequence[Tensor]) -> None:
        if len(chunks) != len(self._ranks):
            raise UsageError(f"{what}: {len(chunks)} tensors for {len(self._ranks)} ranks")


class _AnySource(Work):
    """A receive whose sender is known only when something has come."""

    def __init__(self, group: ManyhandsGroup, tensors: Sequence[Tensor], tag: int) -> None:
        super().__init__()
        self._found = threading.Event()
        self._work: Work | None = None
        self._source = -1
        streams: dict[int, int] = {}
        senders: dict[int, int] = {}
        with group._lock:  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            for sender in range(group.size()):
                stream = group._pair(sender, group.rank(), tag)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
                senders[stream] = sender
                counter = group._counters.setdefault(stream, itertools.count())  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
                streams[stream] = counter.__reduce__()[1][0]

        def take(stream: int) -> None:
            self._source = senders[stream]
            self._work = group.recv(tensors, self._source, tag)
            self._found.set()

        group._session.team.on_any(streams, take)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def wait(self, timeout: timedelta = timedelta(minutes=30)) -> bool:
        if not self._found.wait(timeout.total_seconds() or 1800):
            raise RuntimeError("nothing came from any rank")
        assert self._work is not None
        return self._work.wait()

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank


def _stream_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")


def _only(items: Sequence[Any], what: str) -> Any:  # noqa: ANN401
    if len(items) != 1:
        raise UsageError(f"{what} takes one tensor of each rank, not {len(items)}")
    return items[0]


def _check_size(what: str, one: Tensor, other: Tensor) -> None:
    if one.numel() != other.numel():
        raise UsageError(f"{what} has {one.numel()} values, not {other.numel()}")


def _operator(opts: Any) -> Operator:  # noqa: ANN401
    op = ReduceOp.SUM if opts is None else opts.reduceOp
    for known, operator in _OPERATORS.items():
        if op == known:
            return operator
    raise UsageError(f"{op} is not supported", hint=f"one of {', '.join(map(str, _OPERATORS))}")
