"""Tensors and objects arrive as they were sent, whatever their size, dtype, tag and group."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    "check",
    [
        "broadcast",
        "all_gather",
        "wrong_sizes_are_refused",
        "gather_and_scatter",
        "all_to_all",
        "objects",
        "barriers",
    ],
)
def test_transfers(crew, check):
    crew.call("transfers", check)


@pytest.mark.parametrize(
    "check",
    [
        "send_and_receive",
        "tags_in_any_order",
        "batched",
        "any_source",
        "any_source_beside_a_named_one",
        "works_tell_how_they_stand",
    ],
)
def test_pairs(crew, check):
    crew.call("pairs", check)


@pytest.mark.parametrize(
    "check",
    [
        "every_group",
        "local_synchronization",
        "another_order",
        "pairs_in_groups",
        "another_backend",
        "what_torch_asks_of_a_group",
        "store",
    ],
)
def test_groups(crew, check):
    crew.call("groups", check)
