"""Fuzz the wire: hostile bytes against frames, headers and tensors.

    python -m tests.wire.fuzz --inputs 1000000 --seed 1

Each input is made from (seed, index) alone, so `--only INDEX` repeats one. What must hold for
every input: only WireErrors come out; the source is read at most once per byte, and once more at
its end; no allocation above a bound (tracemalloc on every 200th input, and the resident memory of
the whole run, which sees torch's memory too). A violation ends the run with the input in hex.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from manyhands.core.errors import WireError
from manyhands.wire import tensors
from manyhands.wire.frames import (
    MAGIC,
    PREFIX_BYTES,
    VERSION,
    FrameReader,
    Limits,
    Prefix,
    Schema,
    encode_prefix,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LIMITS = Limits(header_bytes=4 << 10, payload_bytes=16 << 10)
READ_AHEAD = 512
ALLOCATION_BOUND = 512 << 10
RSS_BOUND = 32 << 20
TRACE_EVERY = 200  # tracemalloc itself keeps about 1 KiB of each trace, which counts as growth
LONGEST_MESSAGE = 2048


class Strict(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Hello(Strict, frozen=True):
    token: str
    run: str
    name: str
    incarnation: int


class Data(Strict, frozen=True):
    sender: int
    to: int | None
    seq: int
    sizes: tuple[int, ...]
    message: bytes


class Credit(Strict, frozen=True):
    to: int
    num_bytes: int


class Tensors(Strict, frozen=True):
    specs: tuple[tensors.TensorSpec, ...]


Frame = tuple[msgspec.Struct, bytes]
SCHEMA: Schema[Any] = Schema({1: Hello, 2: Data, 3: Credit, 4: Tensors})


def _tensor_frame() -> Frame:
    values = (
        torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
        torch.tensor([True, False, True]),
        torch.tensor(3, dtype=torch.int64),
        torch.empty(0, 5, dtype=torch.bfloat16),
    )
    specs, buffers = tensors.pack(values)
    return Tensors(specs), b"".join(buffers)


FRAMES: tuple[Frame, ...] = (
    (Hello("token-0123456789", "run-1", "peer é", 7), b""),
    (Data(1, 2, 300, (4, 5), b"hello"), b"123456789"),
    (Data(1, None, 2**40, (), b""), b""),
    (Data(5, None, 1, (600, 1400), b"\x93\x01\x02\x03"), bytes(2000)),
    (Credit(3, 1 << 20), b""),
    _tensor_frame(),
)


# --- inputs ---------------------------------------------------------------------------------


class Mutator:
    """Makes the inputs: each method is one way to break valid frames."""

    def __init__(self, schema: Schema[Any], frames: Sequence[Frame]) -> None:
        self.schema = schema
        self.frames = frames
        self.kinds = sorted({self._encode(frame)[3] for frame in frames})
        self.ways: tuple[Callable[[random.Random], bytes], ...] = (
            self.valid,
            self.flipped,
            self.flipped,
            self.truncated,
            self.spliced,
            self.shuffled,
            self.lying,
            self.repacked,
            self.repacked,
            self.retagged,
            self.retagged,
            self.random_header,
            self.random_bytes,
            self.random_tensors,
        )

    def _encode(self, frame: Frame) -> bytes:
        header, payload = frame
        return self.schema.encode(header, len(payload)) + payload

    def _stream(self, rng: random.Random) -> bytearray:
        return bytearray(b"".join(map(self._encode, rng.choices(self.frames, k=rng.randint(1, 3)))))

    def _split(self, rng: random.Random) -> tuple[int, bytes, bytes]:
        """Kind, header and payload of one valid frame."""
        frame = rng.choice(self.frames)
        whole = self._encode(frame)
        return whole[3], whole[PREFIX_BYTES : len(whole) - len(frame[1])], frame[1]

    def valid(self, rng: random.Random) -> bytes:
        return bytes(self._stream(rng))

    def flipped(self, rng: random.Random) -> bytes:
        data = self._stream(rng)
        # Mostly among the first bytes: those of a payload may be anything.
        reach = len(data) if rng.random() < 0.2 else min(len(data), 80)
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(reach)] ^= 1 << rng.randrange(8)
        return bytes(data)

    def truncated(self, rng: random.Random) -> bytes:
        data = self._stream(rng)
        return bytes(data[: rng.randrange(len(data))])

    def spliced(self, rng: random.Random) -> bytes:
        left, right = self._stream(rng), self._stream(rng)
        return bytes(left[: rng.randrange(len(left))] + right[rng.randrange(len(right)) :])

    def shuffled(self, rng: random.Random) -> bytes:
        """A range removed, doubled or overwritten with noise."""
        data = self._stream(rng)
        start = rng.randrange(len(data))
        stop = min(len(data), start + rng.randint(1, 40))
        new = rng.choice((b"", data[start:stop] * 2, rng.randbytes(stop - start)))
        return bytes(data[:start] + new + data[stop:])

    def lying(self, rng: random.Random) -> bytes:
        """A prefix whose sizes are not those of what follows."""
        kind, header, payload = self._split(rng)
        sizes = [len(header), len(payload)]
        which = rng.randrange(2)
        top = 32 if which == 0 else 64
        near = sizes[which] + rng.randint(-3, 3)
        sizes[which] = rng.choice((0, near, 2 ** rng.randrange(top), 2**top - 1, 4096, 16384))
        return encode_prefix(kind, max(sizes[0], 0), max(sizes[1], 0)) + header + payload

    def repacked(self, rng: random.Random) -> bytes:
        """A header that is proper msgpack, of another form than the schema's."""
        kind, header, payload = self._split(rng)
        value = _changed(rng, msgspec.msgpack.decode(header))
        body = msgspec.msgpack.encode(value)
        if rng.random() < 0.3:
            kind = rng.choice(self.kinds)
        return encode_prefix(kind, len(body), len(payload)) + body + payload

    def retagged(self, rng: random.Random) -> bytes:
        """A header with some of its bytes replaced by msgpack tags that announce much."""
        kind, header, payload = self._split(rng)
        body = bytearray(header)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(body))
            body[at : at + rng.randint(0, 5)] = rng.choice(_TAGS) + rng.choice(_LENGTHS)
        if rng.random() < 0.1:  # deeper than any stack
            body = bytearray(rng.choice((b"\x91", b"\x81\xa1a")) * rng.choice((50, 1000)) + body)
        return encode_prefix(kind, len(body), len(payload)) + body + payload

    def random_header(self, rng: random.Random) -> bytes:
        kind, _, payload = self._split(rng)
        body = rng.randbytes(rng.randint(0, 60))
        return encode_prefix(kind, len(body), len(payload)) + body + payload

    def random_bytes(self, rng: random.Random) -> bytes:
        start = rng.choice((b"", MAGIC, MAGIC + bytes([VERSION]), MAGIC + bytes([VERSION, 2])))
        return start + rng.randbytes(rng.randint(0, 100))

    def random_tensors(self, rng: random.Random) -> bytes:
        """Specs of all kinds, right ones among them, with noise for their bytes."""
        specs = tuple(_random_spec(rng) for _ in range(rng.randint(1, 3)))
        size = _plausible_size(specs) if rng.random() < 0.7 else rng.randint(0, 300)
        payload = rng.randbytes(size) if rng.random() < 0.7 else bytes(size)
        return SCHEMA.encode(Tensors(specs), size) + payload


_TAGS = tuple(bytes([tag]) for tag in (*range(0xC0, 0xE0), 0x81, 0x8F, 0x91, 0x9F, 0xA1, 0xBF))
_LENGTHS = (b"", b"\xff", b"\x00\x01", b"\xff\xff", b"\x7f\xff\xff\xff", b"\xff" * 4, b"\xff" * 8)
_LEAVES: tuple[object, ...] = (
    *(None, True, -1, 0, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.5, float("nan")),
    *("", "x" * 300, "\x00\x1b[31m\n", b"", b"\xff" * 40, [], {}, {"a": 1}, {1: {2: [3]}}),
    *([[]] * 30, [2**62, 2**62, 0], ["float32", [2, 3]], msgspec.msgpack.Ext(5, b"12345")),
)


def _changed(rng: random.Random, value: object) -> object:
    """`value` with one change somewhere inside."""
    if not isinstance(value, list) or rng.random() < 0.1:
        return rng.choice(_LEAVES)
    items: list[object] = list(value)
    what = rng.random()
    if not items or what < 0.15:
        items.insert(rng.randint(0, len(items)), rng.choice(_LEAVES))
    elif what < 0.3:
        del items[rng.randrange(len(items))]
    elif what < 0.35:
        return dict(enumerate(items))
    else:
        at = rng.randrange(len(items))
        items[at] = _changed(rng, items[at])
    return items


_NAMES = (*tensors.DTYPES, "qint8", "float", "")
_DIMS = (0, 1, 1, 2, 2, 3, 7, 2**31, 2**62, 2**63 - 1)


def _random_spec(rng: random.Random) -> tensors.TensorSpec:
    dims = rng.choice(_DIMS), rng.choice(_DIMS)
    if rng.random() < 0.05:
        dims = (rng.choice((1, 2, -1)),) * rng.choice((63, 64, 65, 200))
    shape = dims[: rng.randint(0, 2)] if len(dims) == 2 else dims
    return tensors.TensorSpec(rng.choice(_NAMES), shape)


def _plausible_size(specs: Sequence[tensors.TensorSpec]) -> int:
    try:
        size = sum(tensors.num_bytes(spec) for spec in specs)
    except WireError:
        return 40
    return size if size <= LIMITS.payload_bytes else 40


# --- the receiver under test ----------------------------------------------------------------


@dataclass(slots=True)
class Source:
    """A stream of given bytes, in chunks of given sizes; counts its reads."""

    data: memoryview
    chunk: int
    at: int = 0
    reads: int = 0

    def recv_into(self, view: memoryview) -> int:
        assert len(view), "a read of nothing cannot end"
        self.reads += 1
        assert self.reads <= len(self.data) + 1, "more reads than bytes: this would hang"
        num = min(len(view), self.chunk, len(self.data) - self.at)
        view[:num] = self.data[self.at : self.at + num]
        self.at += num
        return num


def receive(schema: Schema[Any], data: bytes, rng: random.Random) -> int:
    """Take all frames of `data` as a link does; how many there were. Raises what that raises."""
    source = Source(memoryview(data), rng.choice((1, 3, 16, 100, 5000)) if data else 1)
    reader = FrameReader(source.recv_into, LIMITS, read_ahead=READ_AHEAD)
    count = 0
    while (frame := reader.next()) is not None:
        prefix, body = frame
        header = schema.decode(prefix.kind, body)
        _take_payload(reader, prefix, header, rng)
        count += 1
    return count


def _take_payload(reader: FrameReader, prefix: Prefix, header: object, rng: random.Random) -> None:
    if isinstance(header, Tensors):
        _take_tensors(reader, header.specs, rng)
    elif rng.random() < 0.5:
        reader.skip_payload()
    else:
        reader.payload_into([memoryview(bytearray(prefix.payload_bytes))])


def _take_tensors(
    reader: FrameReader, specs: Sequence[tensors.TensorSpec], rng: random.Random
) -> None:
    for spec in specs:
        tensors.check(spec, LIMITS.payload_bytes)
    if rng.random() < 0.5:
        received = [tensors.empty(spec, LIMITS.payload_bytes) for spec in specs]
        reader.payload_into([tensors.writable_bytes_of(tensor) for tensor in received])
        for tensor in received:
            tensors.verify_received(tensor)
    else:
        buffers = [bytearray(tensors.num_bytes(spec)) for spec in specs]
        reader.payload_into([memoryview(buffer) for buffer in buffers])
        received = [tensors.from_bytes(*pair) for pair in zip(specs, buffers, strict=True)]
    for tensor in received:  # use it: what was let through must be a tensor
        bytes(tensors.bytes_of(tensor))


# --- the run --------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """What came of a run."""

    inputs: int
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    ways: Counter[str] = field(default_factory=Counter[str])
    peak_traced: int = 0
    rss_growth: int = 0

    def __str__(self) -> str:
        rate = self.inputs / max(self.seconds, 1e-9)
        lines = [f"{self.inputs} inputs in {self.seconds:.1f} s, {rate:.0f}/s"]
        lines += [
            f"  {name:<14}{num:>9}  {num / self.inputs:6.1%}"
            for name, num in self.outcomes.most_common()
        ]
        lines.append(f"largest traced allocation of one input: {self.peak_traced >> 10} KiB")
        lines.append(f"resident memory grew by {self.rss_growth >> 10} KiB")
        return "\n".join(lines)


class Violation(AssertionError):
    """An input that the wire did not survive."""


def one(mutator: Mutator, seed: int, index: int, report: Report) -> None:
    """Make input `index`, feed it in, and count what came of it."""
    rng = random.Random((seed << 40) + index)
    way = rng.choice(mutator.ways)
    data = way(rng)
    traced, too_long = index % TRACE_EVERY == 0, False
    if traced:
        tracemalloc.start()
    try:
        outcome = "ok" if receive(mutator.schema, data, rng) else "nothing"
    except WireError as error:
        outcome = type(error).__name__
        too_long = len(str(error)) > LONGEST_MESSAGE
    except BaseException as error:
        raise Violation(f"seed {seed} index {index} {way.__name__}: {data.hex()}") from error
    finally:
        peak = tracemalloc.get_traced_memory()[1] if traced else 0
        tracemalloc.stop()
    if peak > ALLOCATION_BOUND or too_long:
        what = "a message of the sender's length" if too_long else f"{peak} bytes allocated"
        raise Violation(f"seed {seed} index {index}: {what}: {data.hex()}")
    report.peak_traced = max(report.peak_traced, peak)
    report.outcomes[outcome] += 1
    report.ways[f"{way.__name__}: {outcome}"] += 1


def run(
    inputs: int, seed: int, schema: Schema[Any] = SCHEMA, frames: Sequence[Frame] = FRAMES
) -> Report:
    """Feed `inputs` inputs, made from `frames` of `schema`. Raises Violation at the first flaw."""
    mutator, report = Mutator(schema, frames), Report(inputs)
    rss, start = _max_rss(), time.perf_counter()
    for index in range(inputs):
        one(mutator, seed, index, report)
    report.seconds = time.perf_counter() - start
    report.rss_growth = _max_rss() - rss
    if report.rss_growth > RSS_BOUND:
        raise Violation(f"seed {seed}: resident memory grew by {report.rss_growth} bytes")
    return report


def _max_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="repeat the one input with this index")
    parser.add_argument("--ways", action="store_true", help="also count per way of breaking")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only is not None:
        report = Report(1)
        one(Mutator(SCHEMA, FRAMES), arguments.seed, arguments.only, report)
    else:
        report = run(arguments.inputs, arguments.seed)
    print(report)
    if arguments.ways:
        for name, num in sorted(report.ways.items()):
            print(f"  {name:<32}{num:>9}")


if __name__ == "__main__":
    sys.exit(main())
