"""Hundreds of operations at once, in any order; a late rank's memory stays bounded."""

from __future__ import annotations

import pytest

MIB = 1 << 20
HELD = 64 * MIB  # what all others together may make a late rank hold
ON_THE_WAY = 64 * MIB  # windows, blocks to receive into, and what malloc rounds up


def test_hundreds_in_flight(crew):
    threads = crew.call("load", "hundreds_in_flight")
    assert max(threads.values()) < 40


@pytest.mark.parametrize(
    "check", ["every_kind_in_flight", "groups_in_any_order", "any_source_behind_a_flood"]
)
def test_at_once(crew, check):
    crew.call("load", check)


def test_a_late_rank(crew):
    """320 MB are under way before it begins."""
    *_, grown = crew.call("load", "late", 40, 1_000_000).values()
    assert grown < HELD + ON_THE_WAY


def test_nothing_is_kept(crew):
    for books in crew.call("load", "nothing_is_kept").values():
        assert not books


def test_a_large_sum_is_made_in_place(crew):
    """256 MB: not even a result of that size is taken besides, which any average may."""
    for rank, grown in crew.call("load", "large_sum", 256 * MIB).items():
        print(f"rank {rank} of {crew.world}: {grown / MIB:.0f} MiB")
        assert grown < HELD + ON_THE_WAY
