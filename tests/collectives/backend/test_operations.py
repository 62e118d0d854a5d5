"""What operations are made of, where that can be tested without members."""

from __future__ import annotations

import pytest
import torch

from manyhands.collectives.backend.operations import _divide


@pytest.mark.parametrize("num", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_a_mean_has_the_bits_of_a_division(num, dtype):
    values = torch.randn(3, 1000, dtype=dtype)
    values[1] *= 1e-38  # some become subnormal
    values[2] *= 1e38
    pairs = torch.view_as_real(values) if dtype.is_complex else values
    expected = (pairs / num).view(torch.uint8)
    _divide(values, num)
    assert torch.equal(pairs.view(torch.uint8), expected)
