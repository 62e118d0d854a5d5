"""Tensors: every dtype and layout arrives bit by bit, and no bad spec costs memory."""

from __future__ import annotations

import ctypes
import gc
import math
import socket
import threading
import tracemalloc
import warnings
import weakref

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.errors import Malformed, Oversized, Truncated, UsageError, WireError
from manyhands.wire import tensors
from manyhands.wire.frames import FrameReader, Limits, Schema, payload_size
from manyhands.wire.tensors import TensorSpec

from .fuzz import Tensors

LIMIT = 1 << 20
COMPLEX = {name for name, dtype in tensors.DTYPES.items() if dtype.is_complex}
GRAD = sorted({"float16", "bfloat16", "float32", "float64", "complex64", "complex128"})


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits: NaNs with payloads, infinities and denormals among them."""
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[bytes]:
    """The elements' bytes, in order, found one by one and not as bytes_of finds them."""
    size = tensor.element_size()
    places = [0]
    for dim, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = [place + index * stride for place in places for index in range(dim)]
    start = tensor.data_ptr()
    return [ctypes.string_at(start + place * size, size) for place in places]


LAYOUTS = {
    "empty": lambda dtype: noise(dtype, 0),
    "empty 2-d": lambda dtype: noise(dtype, 3, 0),
    "zero-dim": lambda dtype: noise(dtype),
    "1-d": lambda dtype: noise(dtype, 7),
    "3-d": lambda dtype: noise(dtype, 2, 3, 4),
    "offset": lambda dtype: noise(dtype, 7)[3:],
    "transposed": lambda dtype: noise(dtype, 3, 5).t(),
    "strided": lambda dtype: noise(dtype, 11)[1::3],
    "columns": lambda dtype: noise(dtype, 4, 6)[:, 1:3],
    "expanded": lambda dtype: noise(dtype, 3, 1).expand(3, 4),
    "zero-dim expanded": lambda dtype: noise(dtype).expand(2, 2),
    "channels last": lambda dtype: noise(dtype, 2, 5, 3, 3).permute(0, 3, 1, 2),
}


def test_the_dtypes_are_all_there():
    for name in (*GRAD, "complex32", "bool", "uint8", "uint16", "uint32", "uint64", "int8"):
        assert tensors.DTYPES[name] is getattr(torch, name)
    of_torch = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    missing = {str(dtype) for dtype in of_torch - set(tensors.DTYPES.values())}
    assert all(name.startswith(("torch.qint", "torch.quint")) for name in missing)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", tensors.DTYPES)
def test_round_trip(name, layout):
    tensor = LAYOUTS[layout](tensors.DTYPES[name])
    before = bits(tensor)
    spec, data = tensors.spec_of(tensor), tensors.bytes_of(tensor)
    assert spec == TensorSpec(name, tuple(tensor.shape))
    assert tensors.num_bytes(spec) == len(data)
    assert bytes(data) == b"".join(before)

    viewed = tensors.from_bytes(spec, bytearray(data))
    received = tensors.empty(spec, LIMIT)
    tensors.writable_bytes_of(received)[:] = data
    tensors.verify_received(received)
    for result in (viewed, received):
        assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
        assert result.is_contiguous()
        assert bits(result) == before


@pytest.mark.parametrize("name", GRAD)
def test_round_trip_of_what_requires_grad(name):
    leaf = noise(tensors.DTYPES[name], 3, 4).requires_grad_()
    for tensor in (leaf, torch.nn.Parameter(leaf), leaf.t(), leaf.clone()):
        data = tensors.bytes_of(tensor)
        assert bytes(data) == b"".join(bits(tensor))
        assert not tensors.from_bytes(tensors.spec_of(tensor), bytearray(data)).requires_grad


@pytest.mark.parametrize("name", sorted(COMPLEX))
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_lazily_conjugated_and_negated_tensors_are_sent_as_their_values(name):
    dtype = tensors.DTYPES[name]
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=dtype)
    conjugate = tensor.conj()
    assert conjugate.is_conj()
    expected = torch.tensor([1 - 2j, 3 + 4j], dtype=dtype)
    assert tensors.bytes_of(conjugate) == tensors.bytes_of(expected)
    assert conjugate.imag.is_neg()
    assert tensors.bytes_of(conjugate.imag) == tensors.bytes_of(expected.imag)
    for lazy in (conjugate, conjugate.imag):
        with pytest.raises(UsageError, match=r"not contiguous|lazily"):
            tensors.writable_bytes_of(lazy)


# --- memory ---------------------------------------------------------------------------------


def test_contiguous_tensors_are_not_copied_either_way():
    tensor = torch.zeros(4, dtype=torch.int32)
    view = tensors.bytes_of(tensor)
    tensor[0] = 5
    assert view[0] == 5
    tensors.writable_bytes_of(tensor)[4] = 9
    assert (view[4], tensor[1].item()) == (9, 9)
    assert view.readonly
    assert (view.format, view.ndim, len(view)) == ("B", 1, 16)

    buffer = bytearray(16)
    over = tensors.from_bytes(tensors.spec_of(tensor), buffer)
    over[3] = 7
    assert buffer[12] == 7


class Memory(ctypes.Array):
    """Memory that can be watched: torch drops it when nobody needs it."""

    _type_, _length_ = ctypes.c_ubyte, 16


def test_a_view_keeps_the_memory_alive_and_lets_it_go():
    for make in (tensors.bytes_of, tensors.writable_bytes_of):
        memory = Memory(*range(16))
        gone = weakref.ref(memory)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        del memory
        part = make(tensor)[4:8]
        tensor.data = torch.zeros(16, dtype=torch.uint8)
        del tensor
        gc.collect()
        assert gone() is not None
        assert bytes(part) == bytes(range(4, 8))
        del part
        gc.collect()
        assert gone() is None


def test_from_bytes_keeps_the_buffer_alive_and_lets_it_go():
    memory = Memory(*range(16))
    gone = weakref.ref(memory)
    tensor = tensors.from_bytes(TensorSpec("int64", (2,)), memoryview(memory))
    del memory
    gc.collect()
    assert gone() is not None
    del tensor
    gc.collect()
    assert gone() is None


def test_views_of_many_sizes_leave_nothing_behind():
    def make(sizes):
        for size in sizes:
            tensors.bytes_of(torch.empty(size, dtype=torch.uint8))
        gc.collect()
        return len(gc.get_objects())

    make(range(1, 100))
    assert abs(make(range(1000, 2000)) - make(range(2000, 3000))) < 100


@pytest.mark.parametrize("name", tensors.DTYPES)
def test_misaligned_and_read_only_buffers_are_copied(name):
    tensor = noise(tensors.DTYPES[name], 3, 2)
    spec, data = tensors.spec_of(tensor), bytes(tensors.bytes_of(tensor))
    shifted = memoryview(bytearray(b"\0" + data))[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [tensors.from_bytes(spec, shifted), tensors.from_bytes(spec, data)]
    for result in results:
        assert result.data_ptr() % result.element_size() == 0
        assert bits(result) == bits(tensor)


def test_a_receive_is_an_in_place_write_to_autograd():
    weight = torch.ones(3, requires_grad=True)
    doubled = (weight * weight).sum()
    tensors.writable_bytes_of(weight)[:] = tensors.bytes_of(torch.full((3,), 2.0))
    assert weight.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        doubled.backward()
    (weight * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4, 4, 4]


def test_tensors_made_in_inference_mode():
    with torch.inference_mode():
        tensor = torch.zeros(2)
    tensors.writable_bytes_of(tensor)[:] = tensors.bytes_of(torch.ones(2))
    assert tensor.tolist() == [1, 1]


@pytest.mark.parametrize("layout", ["transposed", "strided", "columns", "expanded"])
def test_only_contiguous_tensors_can_be_received_into(layout):
    with pytest.raises(UsageError, match=r"not contiguous\nhint: receive into .*copy_"):
        tensors.writable_bytes_of(LAYOUTS[layout](torch.float32))


class Wrapper(torch.Tensor):
    """Stands for DTensor and its like: a tensor in name, without memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


SPECIAL = [
    ("nested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ("sparse_coo", lambda: torch.eye(3).to_sparse()),
    ("sparse_csr", lambda: torch.eye(3).to_sparse_csr()),
    ("mkldnn", lambda: torch.ones(3).to_mkldnn()),
    ("quantized", lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
    ("meta", lambda: torch.empty(3, device="meta")),
    ("Wrapper", lambda: Wrapper(torch.ones(3))),
]


@pytest.mark.parametrize(("name", "make"), SPECIAL)
def test_tensors_without_plain_memory_are_refused_by_name(name, make):
    with warnings.catch_warnings():  # prototypes and deprecations of torch's own
        warnings.simplefilter("ignore")
        tensor = make()
    for refuse in (tensors.spec_of, tensors.bytes_of, tensors.writable_bytes_of):
        with pytest.raises(UsageError, match=name) as caught:
            refuse(tensor)
        assert caught.value.hint


def test_plain_subclasses_are_tensors_too():
    class Named(torch.Tensor):
        pass

    tensor = torch.ones(3).as_subclass(Named)
    assert tensors.bytes_of(tensor) == tensors.bytes_of(torch.ones(3))
    assert tensors.spec_of(torch.nn.Buffer(torch.ones(3))) == TensorSpec("float32", (3,))


# --- specs from outside ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (TensorSpec("float33", (1,)), Malformed),
        (TensorSpec("", ()), Malformed),
        (TensorSpec("Tensor", ()), Malformed),
        (TensorSpec("qint8", (1,)), Malformed),
        (TensorSpec("x" * 10_000, ()), Malformed),
        (TensorSpec("uint8", (-1,)), Malformed),
        (TensorSpec("uint8", (-1, -1)), Malformed),
        (TensorSpec("uint8", (0, -5)), Malformed),
        (TensorSpec("uint8", (1,) * 65), Malformed),
        (TensorSpec("uint8", (LIMIT + 1,)), Oversized),
        (TensorSpec("complex128", (LIMIT // 16 + 1,)), Oversized),
        (TensorSpec("float32", (2**61,)), Oversized),
        (TensorSpec("uint8", (2**62, 2**62)), Oversized),
        (TensorSpec("uint8", (2**32, 2**32)), Oversized),
        (TensorSpec("uint8", (0, 2**62, 2**62)), Oversized),
        (TensorSpec("uint8", (2**62, 2**62, 0)), Oversized),
        (TensorSpec("uint8", (0, 2**64)), Oversized),
        (TensorSpec("uint8", (2**63 - 1,) * 64), Oversized),
    ],
)
def test_bad_specs_are_refused_before_memory_is_taken(spec, error):
    tracemalloc.start()
    try:
        for refuse in (tensors.check, tensors.empty):
            with pytest.raises(error) as caught:
                refuse(spec, LIMIT)
            assert len(str(caught.value)) < 2048
        assert tracemalloc.get_traced_memory()[1] < LIMIT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [(0, 2**62), (2**62, 0), (0, 2**63 - 1), (2, 0, 2**61)])
def test_huge_shapes_without_elements(shape):
    for name in ("uint8", "complex32", "complex128"):
        tensor = tensors.empty(TensorSpec(name, shape), 0)
        assert tensor.shape == shape
        assert len(tensors.bytes_of(tensor)) == len(tensors.writable_bytes_of(tensor)) == 0
        assert tensors.spec_of(tensors.from_bytes(TensorSpec(name, shape), b"")).shape == shape


def test_shapes_that_cannot_be_received_cannot_be_sent():
    for tensor in (torch.empty(1).view((1,) * 65), torch.empty(2**62, 2, 0)):
        with pytest.raises(UsageError, match="cannot be sent"):
            tensors.spec_of(tensor)


def test_the_limit_is_the_largest_size_taken():
    assert tensors.empty(TensorSpec("int16", (5, 2)), 20).shape == (5, 2)
    with pytest.raises(Oversized, match="20 bytes; at most 19"):
        tensors.empty(TensorSpec("int16", (5, 2)), 19)


@given(
    st.sampled_from([*tensors.DTYPES, "nope"]),
    st.lists(
        st.integers(-1, 5) | st.sampled_from([2**31, 2**62, 2**63 - 1, 2**64]), max_size=5
    ).map(tuple),
)
def test_any_spec_is_made_or_refused(name, shape):
    spec = TensorSpec(name, shape)
    try:
        tensor = tensors.empty(spec, 10_000)
    except WireError:
        return
    assert tensors.spec_of(tensor) == spec
    assert len(tensors.bytes_of(tensor)) == tensors.num_bytes(spec) <= 10_000


@pytest.mark.parametrize(
    "value",
    [
        ["uint8"],
        ["uint8", [1], 2],
        [7, [1]],
        ["uint8", 1],
        ["uint8", [-1]],
        ["uint8", [1.5]],
        ["uint8", [True]],
        ["uint8", ["1"]],
        ["uint8", [2**63]],
        ["uint8", [1] * 65],
        ["x" * 33, [1]],
        {"dtype": "uint8", "shape": [1]},
        None,
    ],
)
def test_specs_that_break_the_schema(value):
    schema = Schema({1: Tensors})
    with pytest.raises(Malformed):
        schema.decode(1, msgspec.msgpack.encode([[value]]))


def test_specs_travel_in_headers():
    header = Tensors((TensorSpec("bfloat16", (2, 0)), TensorSpec("bool", ())))
    schema = Schema({1: Tensors})
    assert schema.decode(1, schema.encode(header)[16:]) == header


def test_bytes_of_another_size():
    spec = TensorSpec("int32", (2,))
    for size in range(8):
        with pytest.raises(Truncated):
            tensors.from_bytes(spec, bytearray(size))
    with pytest.raises(Malformed):
        tensors.from_bytes(spec, bytearray(9))
    with pytest.raises(Malformed):
        tensors.from_bytes(TensorSpec("int32", (0,)), b"x")


@pytest.mark.parametrize("byte", [2, 127, 128, 255])
def test_bools_other_than_0_and_1_are_refused(byte):
    data = bytearray(1000)
    data[777] = byte
    with pytest.raises(Malformed, match="bool"):
        tensors.from_bytes(TensorSpec("bool", (10, 100)), data)
    tensor = tensors.empty(TensorSpec("bool", (10, 100)), LIMIT)
    tensors.writable_bytes_of(tensor)[:] = data
    with pytest.raises(Malformed, match="bool"):
        tensors.verify_received(tensor)
    assert not tensor.any()


# --- several, over a socket -----------------------------------------------------------------


def test_pack_and_unpack_into():
    sent = [noise(torch.float32, 3, 2).t(), noise(torch.bool, 4), noise(torch.int64)]
    specs, buffers = tensors.pack(sent)
    targets = [torch.empty(2, 3), torch.empty(4, dtype=torch.bool), torch.tensor(0)]
    for buffer, view in zip(buffers, tensors.unpack_into(specs, targets), strict=True):
        view[:] = buffer
    assert [tensors.bytes_of(tensor) for tensor in targets] == buffers
    for wrong in (specs[:2], (*specs[:2], TensorSpec("int64", (1,)))):
        with pytest.raises(Malformed):
            tensors.unpack_into(wrong, targets)


def gather_send(sock: socket.socket, buffers: list[memoryview]) -> None:
    """All buffers in order, none of them copied or joined."""
    while buffers:
        sent = sock.sendmsg(buffers)
        while buffers and sent >= len(buffers[0]):
            sent -= len(buffers.pop(0))
        if buffers:
            buffers[0] = buffers[0][sent:]


def test_sending_and_receiving_take_no_memory():
    size = 8 << 20
    sent = [torch.randint(0, 256, (size,), dtype=torch.uint8).view(torch.bfloat16), torch.ones(3)]
    targets = [torch.zeros(size // 2, dtype=torch.bfloat16), torch.zeros(3)]
    pointers = [tensor.data_ptr() for tensor in targets]
    schema = Schema({1: Tensors})
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(20)
        right.settimeout(20)
        specs, buffers = tensors.pack(sent)
        head = memoryview(schema.encode(Tensors(specs), payload_size(buffers)))
        sender = threading.Thread(target=gather_send, args=(left, [head, *buffers]))
        tracemalloc.start()
        try:
            sender.start()
            reader = FrameReader(right.recv_into, Limits(payload_bytes=2 * size))
            frame = reader.next()
            assert frame is not None
            header = schema.decode(frame[0].kind, frame[1])
            reader.payload_into(tensors.unpack_into(header.specs, targets))
            assert tracemalloc.get_traced_memory()[1] < 256 << 10
        finally:
            tracemalloc.stop()
            sender.join()
    assert [tensor.data_ptr() for tensor in targets] == pointers
    assert [tensors.bytes_of(target) for target in targets] == buffers
