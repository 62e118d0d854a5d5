"""Numbers of tensors against Python's integers; which tensors of a state there are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.replica.arithmetic import arithmetic_of
from manyhands.replica.fingerprint import Tensors, number_of, terms_of

WORDS = {1: torch.int8, 2: torch.int16}
SIZES = [0, 1, 255, 256, 257, 4096, 4097, 65536, 65537, 3 * 65536 + 300]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool]


def fingerprint(tensor: torch.Tensor) -> int:
    return number_of(terms_of(tensor))


def expected(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().reshape(-1)
    words = flat.view(WORDS.get(flat.element_size(), torch.int32)).tolist()
    return sum(word * (2 * i + 1) for i, word in enumerate(words)) % (1 << 64)


def values(size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return (torch.randn(size, generator=generator) * 1e4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_number_is_that_of_the_words(size, dtype):
    tensor = values(size, dtype)
    assert fingerprint(tensor) == expected(tensor)


def test_bits_count_and_not_values():
    """-0.0 == 0.0, and NaN is not even NaN."""
    assert fingerprint(torch.zeros(3)) != fingerprint(-torch.zeros(3))
    assert fingerprint(torch.full((9,), torch.nan)) == fingerprint(torch.full((9,), torch.nan))


def test_elements_count_in_their_order_wherever_they_lie():
    tensor = values(600 * 70, torch.float32).view(600, 70)
    there = tensor.t().contiguous().t()
    assert not there.is_contiguous()
    assert fingerprint(there) == fingerprint(tensor)
    shifted = torch.cat([torch.zeros(1, dtype=torch.bfloat16), tensor.flatten().bfloat16()])[1:]
    assert fingerprint(shifted) == fingerprint(tensor.bfloat16())


@pytest.mark.parametrize("place", [0, 4095, 65535, 65536, 65536 + 256, 100_000])
def test_every_place_counts(place):
    tensor = values(100_001, torch.float32)
    other = tensor.clone()
    other[place] = torch.nextafter(other[place], torch.tensor(torch.inf))
    assert fingerprint(other) != fingerprint(tensor)
    other[place], other[place - 1] = tensor[place - 1], tensor[place]
    assert fingerprint(other) != fingerprint(tensor)


class TestTensors:
    def test_all_of_a_state(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters())
        tensors = Tensors(model, [optimizer])
        bare = [name for name, _ in tensors.every(1, 0)]
        assert bare[:2] == ["0.weight", "0.bias"]
        assert bare[-1] == "1.num_batches_tracked"
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        names = [name for name, _ in tensors.every(1, 0)]
        assert set(names) - set(bare) == {
            f"{name}.{what}"
            for name, _ in model.named_parameters()
            for what in ("step", "exp_avg", "exp_avg_sq")
        }

    def test_each_is_in_one_of_so_many_shares(self):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)), nn.BatchNorm1d(2))
        tensors = Tensors(model, [])
        shares = [[name for name, _ in tensors.every(64, first)] for first in range(64)]
        whole = [name for name, _ in tensors.every(1, 0)]
        assert sorted(name for share in shares for name in share) == sorted(whole)
        assert max(map(len, shares)) == 2

    def test_a_buffer_that_is_another_tensor_now(self):
        model = nn.BatchNorm1d(2)
        tensors = Tensors(model, [])
        model.running_mean = torch.full((2,), 7.0)
        assert dict(tensors.every(1, 0))["running_mean"] is model.running_mean


class TestArithmetic:
    def test_the_same_every_time(self):
        cpu = torch.device("cpu")
        assert arithmetic_of(cpu) == arithmetic_of(cpu)

    def test_tiny_numbers_that_become_zero(self):
        before = arithmetic_of(torch.device("cpu"))
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot")
        try:
            assert arithmetic_of(torch.device("cpu")) != before
        finally:
            torch.set_flush_denormal(False)
