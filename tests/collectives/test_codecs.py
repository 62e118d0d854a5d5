"""Codecs: what arrives, to the bit; what is lost, within its bound; and that it comes later."""

from __future__ import annotations

import hashlib
import math
import struct
import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyhands.collectives import codecs
from manyhands.collectives.codecs import BLOCK, Codec, accumulator_of, codec_for
from manyhands.collectives.feedback import Feedback
from manyhands.core.errors import Malformed, UsageError
from manyhands.wire.tensors import DTYPES

if torch.cuda.is_available():
    torch.ones(1, device="cuda")  # opens the driver's descriptors for good: blame no test

NAMES = ("fp32", "fp16", "bf16", "int8")
LOSSY = NAMES[1:]
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST = {"fp16": 65504.0, "bf16": float.fromhex("0x1.fep+127")}
FLOAT_MAX = torch.finfo(torch.float32).max
UNSUMMABLE = {
    name
    for name, dtype in DTYPES.items()
    if name.startswith(("float4", "bits")) or (name[-1] in "1234567" and name[-2] == "t")
}
GOLDEN = {
    "fp32": "db403c22694335a1",
    "fp16": "db20d765f9bb0cff",
    "bf16": "65d10e7c979464b2",
    "int8": "0baeafa8bd5b0bc6",
}
INF, NAN = math.inf, math.nan

any_float = st.floats(width=32)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def wire_for(codec: Codec, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((codec.num_bytes(numel, dtype),), 0xA5, dtype=torch.uint8)


def encoded(codec: Codec, values: Tensor) -> Tensor:
    wire = wire_for(codec, values.numel(), values.dtype)
    codec.encode(values, wire)
    return wire


def decoded(codec: Codec, wire: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.full((numel,), 123, dtype=dtype)
    codec.decode(wire, values)
    return values


def arrived(name: str, values: Tensor) -> Tensor:
    codec = codec_for(name, values.dtype)
    return decoded(codec, encoded(codec, values), values.numel(), values.dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype is not right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def noise(dtype: torch.dtype, numel: int) -> Tensor:
    """Random bits: NaNs with payloads, infinities and denormals among them."""
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return (raw & 1 if dtype is torch.bool else raw).view(dtype)


def rows_of(values: Tensor) -> list[Tensor]:
    return list(values.split(BLOCK)) if values.numel() else []


# -- names ------------------------------------------------------------------------------------


def test_an_unknown_name_is_answered_with_those_there_are():
    for find in (codecs.find_codec, lambda name: codec_for(name, torch.int64)):
        with pytest.raises(UsageError) as caught:
            find("fp8")
        assert all(repr(name) in str(caught.value) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_has_the_name_it_was_found_by(name):
    assert codecs.find_codec(name).name == name
    assert codecs.find_codec(name).raw is (name == "fp32")


def test_lossy_codecs_serve_only_wider_floats():
    served = {
        name: {which for which, dtype in DTYPES.items() if not codec_for(name, dtype).raw}
        for name in NAMES
    }
    assert served == {
        "fp32": set(),
        "fp16": {"float32", "float64"},
        "bf16": {"float32", "float64"},
        "int8": {"float32", "float64", "float16", "bfloat16"},
    }


# -- raw --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 600])
def test_raw_values_arrive_bit_by_bit(dtype, numel):
    values = noise(DTYPES[dtype], numel)
    into = noise(DTYPES[dtype], numel)
    for codec in (codec_for("fp32", values.dtype), codecs.find_codec("fp32")):
        wire = encoded(codec, values)
        assert torch.equal(wire, values.view(torch.uint8))  # the memory itself
        codec.decode(wire, into)
        assert same_bits(into, values)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - UNSUMMABLE))
def test_raw_values_add_up(dtype):
    kind = DTYPES[dtype]
    codec, wide = codec_for("fp32", kind), accumulator_of(kind)
    ones = torch.ones(600).to(kind) if not kind.is_complex else torch.zeros(0)
    if kind.is_complex:
        ones = torch.ones(1200).to(codecs._STAND_INS[kind]).view(kind)
    total = torch.zeros(600 * wide.itemsize, dtype=torch.uint8).view(wide)
    for _ in range(3):
        codec.add(encoded(codec, ones), total)
    expected = 1 if kind is torch.bool else 3
    if kind.is_complex:
        assert total.tolist() == [3 + 3j] * 600
    else:
        assert total.tolist() == [expected] * 600


@pytest.mark.parametrize("dtype", sorted(UNSUMMABLE))
def test_what_torch_cannot_add_is_refused(dtype):
    codec, values = codec_for("fp32", DTYPES[dtype]), noise(DTYPES[dtype], 8)
    total = torch.zeros(8) if dtype.startswith("float4") else noise(DTYPES[dtype], 8)
    with pytest.raises(UsageError, match=dtype):
        codec.add(encoded(codec, values), total)


def test_unsigned_sums_wrap_as_unsigned_numbers_do():
    codec = codec_for("fp32", torch.uint16)
    total = torch.tensor([65535, 32767, 0], dtype=torch.int32).to(torch.uint16)
    codec.add(encoded(codec, total.clone()), total)
    assert total.tolist() == [65534, 65534, 0]


@pytest.mark.parametrize("name", HALVES)
def test_a_narrow_part_is_added_in_float32_and_its_total_rounded_once(name):
    codec = codec_for("fp32", HALVES[name])
    assert codec.raw
    small = torch.full((600,), 2.0**-9).to(HALVES[name])
    total = torch.zeros(600)
    codec.add(encoded(codec, torch.ones(600).to(HALVES[name])), total)
    for _ in range(8):  # each alone would be lost beside 1.0 in bfloat16
        codec.add(encoded(codec, small), total)
    assert total.tolist() == [1 + 8 * 2.0**-9] * 600
    wire = torch.empty(1200, dtype=torch.uint8)
    total[7], total[8], total[9] = FLOAT_MAX, -INF, NAN
    codec.encode(total, wire)
    result = decoded(codec, wire, 600, HALVES[name])
    assert result[0] == 1 + 8 * 2.0**-9
    assert result[7] == LARGEST[name]
    assert result[8] == -INF
    assert result[9].isnan()
    assert torch.equal(decoded(codec, wire, 600).to(HALVES[name]).nan_to_num(), result.nan_to_num())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_total_of_float8_saturates_too(dtype):
    codec, wire = codec_for("fp32", DTYPES[dtype]), torch.empty(4, dtype=torch.uint8)
    codec.encode(torch.tensor([1.5, 1e9, -1e9, NAN]), wire)
    result = wire.view(DTYPES[dtype]).float().tolist()
    largest = torch.finfo(DTYPES[dtype]).max
    assert result[:3] == [1.5, largest, -largest]
    assert math.isnan(result[3])


def test_a_bool_that_is_neither_is_refused():
    codec, wire = codec_for("int8", torch.bool), torch.tensor([0, 1, 2], dtype=torch.uint8)
    with pytest.raises(Malformed):
        codec.decode(wire.clone(), torch.zeros(3, dtype=torch.bool))
    with pytest.raises(Malformed):
        codec.add(wire.clone(), torch.zeros(3, dtype=torch.bool))


# -- casts ------------------------------------------------------------------------------------


def nearest_half(name: str, value: float) -> int:
    """The bits of a finite float32 rounded, found by other means than torch's."""
    if name == "fp16":
        try:
            return struct.unpack("<H", struct.pack("<e", value))[0]
        except OverflowError:
            return 0xFBFF if value < 0 else 0x7BFF
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return rounded - 1 if rounded & 0x7FFF == 0x7F80 else rounded


def bits16(wire: Tensor) -> list[int]:
    return [bits & 0xFFFF for bits in wire.view(torch.int16).tolist()]


@pytest.mark.parametrize("name", HALVES)
@given(values=st.lists(finite, max_size=70))
def test_casts_round_to_nearest_even(name, values):
    wire = encoded(codecs.find_codec(name), torch.tensor(values))
    assert bits16(wire) == [nearest_half(name, value) for value in values]


@pytest.mark.parametrize("name", HALVES)
def test_casts_round_ties_to_even_and_saturate(name):
    codec = codecs.find_codec(name)
    ulp = {"fp16": 2.0**-10, "bf16": 2.0**-7}[name]
    ties = torch.tensor([1 + ulp / 2, 1 + 3 * ulp / 2, -1 - ulp / 2])
    assert arrived(name, ties).tolist() == [1, 1 + 2 * ulp, -1]
    largest = LARGEST[name]
    edge = torch.tensor([largest, FLOAT_MAX, -FLOAT_MAX, largest * (1 + 2.0**-13)])
    assert arrived(name, edge).tolist() == [largest, largest, -largest, largest]
    assert codec.max_error >= largest * (ulp / 4)


@pytest.mark.parametrize("name", HALVES)
def test_casts_of_float64_are_off_by_half_a_unit(name):
    values = torch.empty(5000, dtype=torch.float64).uniform_(1, 10) * torch.logspace(-3, 3, 5000)
    wrong = (arrived(name, values) - values).abs() / values.abs()
    half = {"fp16": 2.0**-11, "bf16": 2.0**-8}[name]
    assert half / 4 < wrong.max() <= half * (1 + 2.0**-12)
    far = torch.tensor([1e300, -1e300, INF, -INF, 5e-324], dtype=torch.float64)
    assert arrived(name, far).tolist() == [LARGEST[name], -LARGEST[name], INF, -INF, 0]


@pytest.mark.parametrize("name", HALVES)
def test_what_is_not_finite_stays_what_it_is_wherever_it_stands(name):
    quiet = {"fp16": 0x7E00, "bf16": 0x7FC0}[name]
    infinity = {"fp16": 0x7C00, "bf16": 0x7F80}[name]
    payload = torch.tensor([-4194303], dtype=torch.int32).view(torch.float32)  # a negative NaN
    for place in range(75):  # in vectors and in what is left of them
        values = torch.ones(75)
        for value, expected in ((INF, infinity), (-INF, infinity | 0x8000), (payload, quiet)):
            values[place] = value
            wire = encoded(codecs.find_codec(name), values)
            assert bits16(wire)[place] == expected
            assert set(bits16(wire)[:place] + bits16(wire)[place + 1 :]) == {
                nearest_half(name, 1.0)
            }


@pytest.mark.parametrize("name", HALVES)
def test_a_sum_that_overflows_is_no_reason_to_touch_a_value(name):
    values = torch.full((1000,), LARGEST[name] / 2)
    values[3] = -0.0
    assert same_bits(arrived(name, values), values)


@pytest.mark.parametrize("name", HALVES)
def test_all_16_bit_values_decode_exactly_and_encode_to_themselves(name):
    codec = codecs.find_codec(name)
    wire = torch.arange(-32768, 32768).to(torch.int16).view(torch.uint8)
    values = decoded(codec, wire, 65536)
    if name == "fp16":
        exact = [struct.unpack("<e", struct.pack("<H", b))[0] for b in bits16(wire)]
    else:
        exact = [struct.unpack("<f", struct.pack("<I", b << 16))[0] for b in bits16(wire)]
    exact = torch.tensor(exact)
    number = ~exact.isnan()
    assert torch.equal(values[number].view(torch.int32), exact[number].view(torch.int32))
    assert values[~number].isnan().all()
    again = encoded(codec, values).view(torch.int16)
    assert torch.equal(again[number], wire.view(torch.int16)[number])
    # The one exception to idempotence: NaNs no encoder of ours makes, which lose their payload.
    assert torch.equal(
        encoded(codec, decoded(codec, again.view(torch.uint8), 65536)), again.view(torch.uint8)
    )


# -- int8 -------------------------------------------------------------------------------------


def to_float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def reference_int8(values: list[float]) -> bytes:
    """The wire of float32 values, in Python's arithmetic."""
    scales, steps = b"", b""
    for start in range(0, len(values), 256):
        block = values[start : start + 256]
        if not all(map(math.isfinite, block)):
            scales += struct.pack("<I", 0x7FC00000)
            steps += bytes(len(block))
            continue
        scale = to_float32(max(map(abs, block)) * to_float32(1 / 127))
        scale = min(max(scale, 2.0**-126), float.fromhex("0x1.0204p+121"))
        fraction, exponent = math.frexp(scale)
        scale = math.ldexp(math.floor(fraction * 2**17 + 0.5), exponent - 17)
        scales += struct.pack("<f", scale)
        inverse = to_float32(1 / scale)
        steps += struct.pack(f"{len(block)}b", *(round(to_float32(v * inverse)) for v in block))
    return scales + steps


@given(st.lists(any_float, max_size=12), st.sampled_from([1, 3, 90]))
def test_int8_is_the_same_in_other_arithmetic(values, times):
    wire = encoded(codecs.find_codec("int8"), torch.tensor(values * times, dtype=torch.float32))
    assert bytes(wire.tolist()) == reference_int8(values * times)


def test_int8_on_the_wire():
    values = torch.tensor([127.0, -1.0, 0.5, 1.5, 63.49, -127.0])
    wire = bytes(encoded(codecs.find_codec("int8"), values).tolist())
    assert wire == struct.pack("<f", 1.0) + struct.pack("6b", 127, -1, 0, 2, 63, -127)


def bound(block: Tensor) -> float:
    """Half a scale; 17 bits of it, and the product with its inverse, cost a little more."""
    return max(float(block.abs().max()) / 254 * (1 + 2.0**-15), 2.0**-127)


def test_int8_tails_of_every_length():
    codec = codecs.find_codec("int8")
    for numel in range(601):
        values = torch.randn(numel) * 10 ** torch.empty(numel).uniform_(-2, 2)
        assert codec.num_bytes(numel, torch.float32) == numel + 4 * math.ceil(numel / 256)
        result = arrived("int8", values)
        for was, came in zip(rows_of(values), rows_of(result), strict=True):
            assert (came - was).abs().max() <= bound(was), numel
            assert came.abs()[was.abs().argmax()] == came.abs().max(), numel
        total = torch.randn(numel)
        expected = total + result
        codec.add(encoded(codec, values), total)
        assert same_bits(total, expected), numel


@given(st.lists(finite, min_size=1, max_size=40), st.integers(0, 300))
def test_int8_errors_are_bounded_for_any_finite_values(values, padding):
    given_values = torch.tensor([0.0] * padding + values)
    result = arrived("int8", given_values)
    assert result.isfinite().all()
    for was, came in zip(rows_of(given_values), rows_of(result), strict=True):
        assert (came.double() - was.double()).abs().max() <= bound(was)


def test_int8_uses_its_whole_range_and_rounds_to_nearest():
    values = torch.arange(-127, 128).float() * 0.37
    codec = codecs.find_codec("int8")
    wire = encoded(codec, values)
    assert wire[4:].view(torch.int8).tolist() == list(range(-127, 128))
    off = torch.tensor([127.0, 2.49, 2.51, -2.49, -2.51, 2.5, 3.5])
    assert arrived("int8", off).tolist() == [127, 2, 3, -2, -3, 2, 4]
    # Nearly 5.5 scales: a quotient would round to 5, the product with the inverse to 6.
    tie = torch.tensor([float.fromhex("0x1.61a4f6p+7"), float.fromhex("0x1.ea173ep+2")])
    assert encoded(codec, tie)[4:].tolist() == [127, 6]


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("place", [0, 255, 256, 511, 512, 599])
def test_int8_what_is_not_finite_breaks_its_block_only(bad, place):
    values = torch.randn(600)
    expected = arrived("int8", values)
    values[place] = bad
    result = arrived("int8", values)
    for k, (was, came) in enumerate(zip(rows_of(expected), rows_of(result), strict=True)):
        if k == place // BLOCK:
            assert came.isnan().all()
        else:
            assert same_bits(was, came)
    codec = codecs.find_codec("int8")
    first = encoded(codec, values)
    assert torch.equal(encoded(codec, decoded(codec, first, 600)), first)


def test_int8_zeros_denormals_and_the_largest():
    denormal = 2.0**-149
    assert same_bits(arrived("int8", torch.zeros(600)), torch.zeros(600))
    assert same_bits(arrived("int8", torch.tensor([-0.0])), torch.zeros(1))
    tiny = torch.tensor([denormal, -190 * denormal, 2.0**-126, -(2.0**-120), 0.0])
    assert (arrived("int8", tiny) - tiny).abs().max() <= 2.0**-127
    only = torch.tensor([5 * denormal, -190 * denormal])
    assert arrived("int8", only).tolist() == [0, 0]
    huge = torch.tensor([FLOAT_MAX, -FLOAT_MAX, 0.0])
    result = arrived("int8", huge)
    assert result.isfinite().all()
    assert (result / huge)[:2].sub(1).abs().max() < 2.0**-15
    many = torch.full((600,), FLOAT_MAX)  # the scales are finite, their sum need not be
    assert arrived("int8", many).isfinite().all()


def test_int8_of_float64():
    values = torch.randn(600, dtype=torch.float64)
    result = arrived("int8", values)
    for was, came in zip(rows_of(values), rows_of(result), strict=True):
        assert 0 < (came - was).abs().max() <= bound(was)
    far = torch.tensor([1e300, -1e300, 1e38, 0.0], dtype=torch.float64)
    assert arrived("int8", far).isfinite().all()
    assert FLOAT_MAX >= arrived("int8", far)[0] == -arrived("int8", far)[1] > 3.4e38
    assert arrived("int8", torch.tensor([1e300, INF], dtype=torch.float64)).isnan().all()
    assert arrived("int8", torch.tensor([5e-324], dtype=torch.float64)).tolist() == [0]
    # Finer than float32: a total of float64 keeps all of it.
    total = torch.full((1,), 2.0**40, dtype=torch.float64)
    codec = codecs.find_codec("int8")
    codec.add(encoded(codec, torch.tensor([127 * 2.0**-10], dtype=torch.float64)), total)
    assert total.item() == 2.0**40 + 127 * 2.0**-10


@pytest.mark.parametrize("dtype", HALVES.values())
def test_int8_of_halves(dtype):
    values = torch.randn(600).to(dtype)
    result = arrived("int8", values)
    for was, came in zip(rows_of(values.float()), rows_of(result.float()), strict=True):
        assert 0 < (came - was).abs().max() <= bound(was) + 2.0**-8 * was.abs().max()
    codec = codec_for("int8", dtype)
    total = torch.full((3,), FLOAT_MAX)  # what many halves add up to
    result = decoded(codec, encoded(codec, total), 3, dtype)
    assert result.isfinite().all()
    assert result[0] == torch.finfo(dtype).max


@given(st.binary(min_size=4 * 2 + 257, max_size=4 * 2 + 257))
def test_int8_takes_any_bytes(data):
    codec = codecs.find_codec("int8")
    wire = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    scales = struct.unpack("<2f", data[:8])
    steps = struct.unpack("257b", data[8:])
    result = decoded(codec, wire, 257, torch.float64).tolist()
    for k, (step, value) in enumerate(zip(steps, result, strict=True)):
        exact = step * scales[k // 256]
        assert value == exact or (math.isnan(value) and math.isnan(exact))


def test_int8_does_not_rely_on_denormals():
    values = torch.cat([torch.zeros(256), torch.randn(300), torch.full((300,), 2.0**-125)])
    expected = encoded(codecs.find_codec("int8"), values)
    result = arrived("int8", values)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        assert torch.equal(encoded(codecs.find_codec("int8"), values), expected)
        assert same_bits(arrived("int8", values), result)
    finally:
        torch.set_flush_denormal(False)


# -- all of them ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [32, 64])
@given(data=st.data(), times=st.sampled_from([1, 2, 40]))
def test_what_was_decoded_encodes_to_the_same_bytes(name, width, data, times):
    values = data.draw(st.lists(st.floats(width=width), max_size=20))
    tensor = torch.tensor(values * times, dtype=DTYPES[f"float{width}"])
    codec = codec_for(name, tensor.dtype)
    wire = encoded(codec, tensor)
    again = encoded(codec, decoded(codec, wire, tensor.numel(), tensor.dtype))
    assert torch.equal(again, wire)


@pytest.mark.parametrize("name", NAMES)
@given(values=st.lists(any_float, max_size=20), times=st.sampled_from([1, 2, 40]))
def test_finite_values_stay_finite_and_others_do_not_hide(name, values, times):
    tensor = torch.tensor(values * times, dtype=torch.float32)
    result = arrived(name, tensor)
    for was, came in zip(rows_of(tensor), rows_of(result), strict=True):
        if was.isfinite().all():
            assert came.isfinite().all()
        assert not came[~was.isfinite()].isfinite().any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1, -1])
def test_adding_is_decoding_and_adding(name, dtype, sign):
    codec, wide = codec_for(name, dtype), accumulator_of(dtype)
    for numel in (0, 1, 31, 256, 600, 5000):
        values = (torch.randn(numel) * 10 ** torch.empty(numel).uniform_(-3, 3)).to(dtype)
        wire = encoded(codec, values)
        total = torch.randn(numel, dtype=wide) * 1000
        expected = total + sign * decoded(codec, wire, numel, wide)
        codec.add(wire, total, sign=sign)
        assert same_bits(total, expected)
        codec.encode(total, wire)  # the total travels as well


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", [512, 1024, 1025, 1700])
def test_large_parts_are_worked_on_in_pieces(name, numel, monkeypatch):
    codec, values, total = codecs.find_codec(name), torch.randn(numel), torch.randn(numel)
    wire, sums = encoded(codec, values), total.clone()
    codec.add(wire, sums)
    monkeypatch.setattr(codecs, "_PIECE", 2 * BLOCK)
    assert torch.equal(encoded(codec, values), wire)
    assert same_bits(decoded(codec, wire, numel), arrived(name, values))
    codec.add(wire, total)
    assert same_bits(total, sums)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_outside_the_wire_and_the_values_is_written(name):
    codec, numel = codecs.find_codec(name), 300
    size = codec.num_bytes(numel, torch.float32)
    memory, space = torch.full((size + 16,), 0xA5, dtype=torch.uint8), torch.zeros(numel + 2)
    codec.encode(torch.randn(numel), memory[8:-8])
    assert set(memory[:8].tolist() + memory[-8:].tolist()) == {0xA5}
    codec.decode(memory[8:-8], space[1:-1])
    codec.add(memory[8:-8], space[1:-1])
    assert space[0] == space[-1] == 0
    assert space[1:-1].count_nonzero() > numel / 2


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_not_recorded(name):
    codec, values = codecs.find_codec(name), torch.randn(300, requires_grad=True)
    wire = encoded(codec, values)
    with torch.no_grad():
        before = values.clone()
    codec.decode(wire, values)
    codec.add(wire, values)
    assert values.is_leaf
    assert same_bits(values.detach(), 2 * arrived(name, before))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("act", ["encode", "decode", "add"])
def test_tensors_of_another_kind_are_refused(name, act):
    codec, values = codecs.find_codec(name), torch.randn(300)
    wire = encoded(codec, values)

    def call(wire: Tensor, values: Tensor) -> None:
        getattr(codec, act)(*((values, wire) if act == "encode" else (wire, values)))

    for bad in (wire[:-1], torch.cat([wire, wire[:4]]), wire.view(torch.int8), wire.view(1, -1)):
        with pytest.raises(UsageError):
            call(bad, values)
    for bad in (values.view(3, 100), torch.randn(600)[::2], torch.randn(299)):
        with pytest.raises(UsageError):
            call(wire, bad)
    call(wire, values)


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_codec_does_not_touch_integers(name):
    codec = codecs.find_codec(name)
    with pytest.raises(UsageError, match="codec_for"):
        encoded(codec, torch.arange(300))


def test_a_raw_codec_of_one_dtype_does_not_take_another():
    codec = codec_for("fp32", torch.bfloat16)
    for values in (torch.zeros(8, dtype=torch.float16), torch.zeros(8, dtype=torch.float64)):
        with pytest.raises(UsageError, match="for a part of"):
            codec.encode(values, torch.empty(16, dtype=torch.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_two_threads_at_once_get_the_bytes_of_one(name):
    codec = codecs.find_codec(name)
    parts = [torch.randn(40_000 + 77 * k) for k in range(2)]
    expected = [(encoded(codec, part), arrived(name, part)) for part in parts]
    wrong: list[int] = []
    together = threading.Barrier(2)

    def work(k: int) -> None:
        total = torch.empty_like(parts[k])
        together.wait()
        for _ in range(50):
            wire = encoded(codec, parts[k])
            total.zero_()
            codec.add(wire, total)
            same = torch.equal(wire, expected[k][0]) and torch.equal(total, expected[k][1])
            if not same:
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_are_those_of_every_machine(name):
    """Of any bits, so NaNs and denormals too; the digests were the same with and without AVX."""
    words = torch.arange(30_001) * 6364136223846793005 + 1442695040888963407
    values = (words >> 29).to(torch.int32).view(torch.float32)
    values[15_000:] = (words[15_000:] >> 40).float() / 2**23  # and numbers like gradients
    wire = encoded(codecs.find_codec(name), values)
    digest = hashlib.sha256(bytes(wire.tolist())).hexdigest()[:16]
    assert digest == GOLDEN[name]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_gpu_makes_the_same_bytes(name, dtype):
    codec, wide = codec_for(name, dtype), accumulator_of(dtype)
    values = noise(dtype, 100_001)
    values[:50_000] = torch.randn(50_000).to(dtype)
    wire = encoded(codec, values)
    far = torch.empty_like(wire, device="cuda")
    codec.encode(values.cuda(), far)
    assert torch.equal(far.cpu(), wire)
    total = torch.randn(100_001, dtype=wide)
    there = total.cuda()
    codec.add(far, there)
    codec.add(wire, total)
    assert torch.equal(there.cpu().nan_to_num(7), total.nan_to_num(7))
    came = torch.empty_like(values, device="cuda")
    codec.decode(far, came)
    here = decoded(codec, wire, values.numel(), dtype)
    assert torch.equal(came.cpu().nan_to_num(7), here.nan_to_num(7))


# -- feedback ---------------------------------------------------------------------------------


class Owing(Feedback):
    """Remembers what was encoded, as a bank does."""

    def __init__(self, name: str, parts: Sequence[tuple[int, torch.dtype]]) -> None:
        super().__init__(name, parts)
        self._given: dict[int, Tensor] = {}

    def encode(self, k: int, values: Tensor, wire: Tensor) -> None:
        super().encode(k, values, wire)
        self._given[k] = values.clone()

    def commit(self) -> None:
        super().commit(self._given.__getitem__)


def feedback_wire(feedback: Owing, k: int, values: Tensor) -> Tensor:
    wire = wire_for(feedback._codecs[k], values.numel(), values.dtype)
    feedback.encode(k, values, wire)
    return wire


def drift(name: str, rounds: int, *, feed: bool) -> float:
    """How far the sum of what arrives is from the sum of what was given, in errors of one round."""
    generator = torch.Generator().manual_seed(5)
    steady = torch.randn(600, generator=generator)
    codec, feedback = codecs.find_codec(name), Owing(name, [(600, torch.float32)])
    given_sum, came_sum = torch.zeros(600, dtype=torch.float64), torch.zeros(600).double()
    worst = 0.0
    for _ in range(rounds):
        values = steady + 0.01 * torch.randn(600, generator=generator)
        wire = feedback_wire(feedback, 0, values) if feed else encoded(codec, values)
        feedback.commit()
        given_sum += values
        came_sum += decoded(codec, wire, 600)
        for whole, row in zip(rows_of(given_sum - came_sum), rows_of(values), strict=True):
            unit = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 254}[name]
            worst = max(worst, float(whole.abs().max() / (row.abs().max() * unit)))
    return worst


@pytest.mark.parametrize("name", LOSSY)
def test_what_was_left_out_arrives_later(name):
    assert drift(name, 200, feed=True) < 1.5
    assert drift(name, 200, feed=False) > 6  # and without feedback it does not


def is_kept(residual: Tensor, wanted: Tensor) -> bool:
    """To a 2^16th of the largest of each block, and a little for scales that are rounded up."""
    return all(
        (kept - row).abs().max() <= 1.01 * 2**-16 * row.abs().max()
        for kept, row in zip(rows_of(residual), rows_of(wanted), strict=True)
    )


@pytest.mark.parametrize("name", LOSSY)
def test_the_residual_is_what_did_not_arrive(name):
    feedback, values = Owing(name, [(600, torch.float32)]), torch.randn(600)
    for _ in range(3):
        sent = values + feedback.residual(0)
        came = decoded(codecs.find_codec(name), feedback_wire(feedback, 0, values), 600)
        feedback.commit()
        assert is_kept(feedback.residual(0), sent - came)
        assert (sent - came).count_nonzero() > 300
        wire = encoded(codecs.find_codec(name), values + feedback.residual(0))
        assert torch.equal(feedback_wire(feedback, 0, values), wire)


def test_what_is_kept_in_16_bits_does_not_add_up():
    """Of 5000 rounds of the same values, of which each leaves the same out, all but one round's
    error has arrived: what is lost of residuals is of either sign.
    """
    feedback, values = Owing("int8", [(600, torch.float32)]), torch.randn(600)
    came = torch.zeros(600, dtype=torch.float64)
    for _ in range(5000):
        came += decoded(codecs.find_codec("int8"), feedback_wire(feedback, 0, values), 600)
        feedback.commit()
    for owed, row in zip(rows_of(5000 * values.double() - came), rows_of(values), strict=True):
        assert owed.abs().max() < 1.1 * row.abs().max() / 254


@pytest.mark.parametrize("exponent", [-149, -126, -100, 0, 100, 120])
def test_residuals_of_all_magnitudes_are_kept(exponent):
    values = torch.randn(600, dtype=torch.float64).clamp(-4, 4)
    values = (values * 2.0**exponent).float()
    values[100] = 0.0
    wire = wire_for(codecs.KEPT, 600, torch.float32)
    codecs.KEPT.encode(values, wire)
    came = decoded(codecs.KEPT, wire, 600)
    for kept, row in zip(rows_of(came), rows_of(values), strict=True):
        step = 1.01 * 2**-15 * row.abs().max().double()
        assert (kept.double() - row).abs().max() <= max(float(step) / 2, 2.0**-127)
    assert came[100] == 0.0


@pytest.mark.parametrize("name", LOSSY)
def test_encoding_an_attempt_twice_gives_the_same_bytes(name):
    feedback, values = Owing(name, [(600, torch.float32)]), torch.randn(600)
    first = feedback_wire(feedback, 0, values)
    assert torch.equal(feedback_wire(feedback, 0, values), first)
    feedback.commit()
    second = feedback_wire(feedback, 0, values)
    assert not torch.equal(second, first)
    assert torch.equal(feedback_wire(feedback, 0, values), second)


@pytest.mark.parametrize("name", LOSSY)
def test_an_abandoned_attempt_has_not_happened(name):
    parts = [(600, torch.float32), (300, torch.float64)]
    feedback, twin = Owing(name, parts), Owing(name, parts)
    first, second = torch.randn(600), torch.randn(300, dtype=torch.float64)
    for each in (feedback, twin):
        feedback_wire(each, 0, first)
        each.commit()
    before = feedback.residual(0)
    feedback_wire(feedback, 0, first * 3)
    feedback_wire(feedback, 1, second)
    assert feedback.residual(1).count_nonzero() == 0  # pending is not yet
    feedback.abandon()
    feedback.commit()  # of nothing
    assert same_bits(feedback.residual(0), before)
    assert feedback.residual(1).count_nonzero() == 0
    for k, values in enumerate((first, second)):
        assert torch.equal(feedback_wire(feedback, k, values), feedback_wire(twin, k, values))


def test_another_try_replaces_what_is_pending():
    feedback, twin = (Owing("int8", [(600, torch.float32)]) for _ in range(2))
    feedback_wire(feedback, 0, torch.randn(600))
    again = torch.randn(600)
    feedback_wire(feedback, 0, again)
    feedback.commit()
    feedback_wire(twin, 0, again)
    twin.commit()
    assert same_bits(feedback.residual(0), twin.residual(0))


def test_a_part_that_is_absent_keeps_its_residual():
    feedback = Owing("int8", [(600, torch.float32)] * 2)
    for k in range(2):
        feedback_wire(feedback, k, torch.randn(600))
    feedback.commit()
    before = [feedback.residual(k) for k in range(2)]
    feedback_wire(feedback, 1, torch.randn(600))
    feedback.commit()
    feedback.commit()
    assert same_bits(feedback.residual(0), before[0])
    assert not same_bits(feedback.residual(1), before[1])


def test_an_encoding_that_fails_leaves_nothing_pending():
    feedback, values = Owing("int8", [(600, torch.float32)]), torch.randn(600)
    feedback_wire(feedback, 0, values)
    with pytest.raises(UsageError):
        feedback.encode(0, values * 2, torch.empty(5, dtype=torch.uint8))
    feedback.commit()
    assert feedback.residual(0).count_nonzero() == 0
    with pytest.raises(UsageError, match="part 0 of 600"):
        feedback_wire(feedback, 0, torch.randn(1))


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("first", [True, False])
def test_what_is_not_finite_leaves_the_residual_as_it_was(name, bad, first):
    feedback, codec = Owing(name, [(600, torch.float32)]), codecs.find_codec(name)
    before = torch.zeros(600)
    if not first:
        feedback_wire(feedback, 0, torch.randn(600))
        feedback.commit()
        before = feedback.residual(0)
    values = torch.randn(600)
    values[300] = bad
    sent = values + before
    came = decoded(codec, feedback_wire(feedback, 0, values), 600)
    feedback.commit()
    lost = ~came.isfinite()
    assert lost.sum() == (256 if name == "int8" else 1)
    assert is_kept(feedback.residual(0), torch.where(lost, before, sent - came))


def test_what_saturation_cut_off_does_not_pile_up():
    feedback = Owing("fp16", [(3, torch.float32)])
    values = torch.tensor([1e6, -66000.0, 1.0001])
    for _ in range(5):
        feedback_wire(feedback, 0, values)
        feedback.commit()
    assert feedback.residual(0).abs().max() <= 16
    assert feedback.residual(0)[2] != 0
    came = decoded(codecs.find_codec("fp16"), feedback_wire(feedback, 0, torch.ones(3)), 3)
    assert came.tolist() == pytest.approx([1, 1, 1], abs=0.01)


@pytest.mark.parametrize("name", LOSSY)
def test_a_residual_does_not_make_a_finite_value_infinite(name):
    feedback, codec = Owing(name, [(300, torch.float32)]), codecs.find_codec(name)
    large = torch.full((300,), FLOAT_MAX)
    large[::2] = float.fromhex("0x1.fd7ffep+127")  # both codecs round it down by nearly half a unit
    feedback_wire(feedback, 0, large)
    feedback.commit()
    for _ in range(3):
        came = decoded(codec, feedback_wire(feedback, 0, torch.full((300,), FLOAT_MAX)), 300)
        feedback.commit()
        assert came.isfinite().all()
        assert feedback.residual(0).isfinite().all()


def test_parts_that_need_no_feedback_cost_no_memory():
    raw = [(1000, torch.float32), (1000, torch.int64), (1000, torch.bfloat16)]
    for name, parts in (("fp32", raw), ("bf16", raw[1:])):
        feedback = Owing(name, parts)
        for k, (numel, dtype) in enumerate(parts):
            values = noise(dtype, numel)
            assert torch.equal(feedback_wire(feedback, k, values), values.view(torch.uint8))
        feedback.commit()
        assert feedback.num_bytes == 0


def test_memory_is_half_an_accumulator():
    feedback = Owing("int8", [(1000, torch.float32), (1000, torch.bfloat16), (9, torch.float32)])
    assert feedback.num_bytes == 0
    values = [torch.randn(1000), torch.randn(1000).bfloat16()]
    residual, room = 2000 + 4 * 4, 4000
    for _ in range(3):
        for _ in range(2):
            for k in range(2):
                feedback_wire(feedback, k, values[k])
                assert feedback.num_bytes <= 2 * residual + 2 * room
            feedback.abandon()
        for k in range(2):
            feedback_wire(feedback, k, values[k])
            assert feedback.num_bytes <= 2 * residual + 2 * room
        feedback.commit()
    assert feedback.num_bytes == 2 * residual + 2 * room


def sent_sum(feedback: Feedback, total: Tensor, k: int = 0) -> Tensor:
    """As an owner does."""
    codec = codecs.find_codec("int8")
    total = total.clone()
    assert feedback.compensate(k, total)
    wire = encoded(codec, total)
    codec.add(wire, total, sign=-1)
    feedback.owe(k, total)
    return decoded(codec, wire, total.numel(), total.dtype)


def test_what_is_left_out_of_a_sum_is_in_the_next():
    feedback, total = Owing("int8", [(600, torch.float32)]), torch.randn(600)
    came = torch.zeros(600, dtype=torch.float64)
    for _ in range(200):
        came += sent_sum(feedback, total)
        feedback.commit()
    for owed, row in zip(rows_of(200 * total.double() - came), rows_of(total), strict=True):
        assert owed.abs().max() < 1.1 * row.abs().max() / 254
    assert (came - 200 * total).abs().max() > 0


def test_a_sum_of_an_attempt_that_does_not_count_owes_nothing():
    feedback, total = Owing("int8", [(600, torch.float32)]), torch.randn(600)
    sent_sum(feedback, total)
    feedback.commit()
    before, num_bytes = feedback.residual(0), feedback.num_bytes
    for _ in range(3):
        sent_sum(feedback, torch.randn(600))
        feedback.abandon()
        feedback.commit()
        assert same_bits(feedback.residual(0), before)
    assert feedback.num_bytes <= num_bytes + codecs.KEPT.num_bytes(600, torch.float32)


def test_memory_of_sums_is_that_of_the_parts_that_are_owned_now():
    """Each round another half of them, as shares change."""
    numel, kept = 600, codecs.KEPT.num_bytes(600, torch.float32)
    feedback = Owing("int8", [(numel, torch.float32)] * 8)
    for number in range(6):
        before = [feedback.residual(k) for k in range(8)]
        for k in range(number % 4, number % 4 + 4):
            sent_sum(feedback, torch.randn(numel), k)
        feedback.abandon()
        assert all(same_bits(feedback.residual(k), before[k]) for k in range(8))
        for k in range(number % 4, number % 4 + 4):
            sent_sum(feedback, torch.randn(numel), k)
        feedback.commit()
        assert feedback.num_bytes <= (8 + 4) * kept
    for _ in range(2):  # who owns nothing any more keeps what the next round may want
        feedback.commit()
    assert feedback.num_bytes <= (8 + 4) * kept


@pytest.mark.parametrize("sums_last", [True, False])
def test_of_sum_and_contribution_the_last_one_counts(sums_last):
    """A part that gets another owner between two attempts."""
    feedback, twin = (Owing("int8", [(600, torch.float32)]) for _ in range(2))
    values, total = torch.randn(600), torch.randn(600)
    for each in (feedback, twin):  # something is owed before
        feedback_wire(each, 0, values)
        each.commit()
    calls = [lambda each: feedback_wire(each, 0, values), lambda each: sent_sum(each, total)]
    for call in calls if sums_last else calls[::-1]:
        call(feedback)
    calls[sums_last](twin)
    feedback.commit()
    twin.commit()
    assert same_bits(feedback.residual(0), twin.residual(0))


@pytest.mark.parametrize("bad", [INF, -INF, NAN, 3e38])
def test_a_sum_at_the_edge_of_its_dtype_leaves_the_residual_as_it_was(bad):
    feedback, total = Owing("int8", [(600, torch.float32)]), torch.randn(600)
    sent_sum(feedback, total)
    feedback.commit()
    before = feedback.residual(0)
    total[5] = bad
    kept = total.clone()
    assert not feedback.compensate(0, total)
    assert same_bits(total.nan_to_num(7), kept.nan_to_num(7))
    feedback.commit()
    assert same_bits(feedback.residual(0), before)


def test_threads_feed_back_different_parts_at_once():
    parts = [(20_000 + k, torch.float32) for k in range(4)]
    feedback, twin = Owing("int8", parts), Owing("int8", parts)
    values = [torch.randn(numel) for numel, _ in parts]
    wires: dict[int, list[Tensor]] = {k: [] for k in range(4)}
    rounds = threading.Barrier(2, action=feedback.commit)

    def work(mine: tuple[int, ...]) -> None:
        for _ in range(10):
            for k in mine:
                wires[k].append(feedback_wire(feedback, k, values[k]))
            rounds.wait()

    threads = [threading.Thread(target=work, args=(mine,)) for mine in ((0, 1), (2, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for turn in range(10):
        for k in range(4):
            assert torch.equal(feedback_wire(twin, k, values[k]), wires[k][turn])
        twin.commit()
