"""Sums over a crew equal the sum in one process, bit for bit, on every rank."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    "check",
    [
        "all_reduce_every_dtype",
        "all_reduce_every_shape",
        "large_sums_stay_the_users",
        "what_has_no_meaning_is_refused",
        "reduce_to_each_root",
        "reduce_scatter_lists_and_tensors",
        "coalesced",
    ],
)
def test_sums(crew, check):
    crew.call("sums", check)


def test_all_ranks_end_with_the_same_bits(crew):
    digests = crew.call("sums", "all_reduce_every_size")
    assert len(set(digests.values())) == 1
