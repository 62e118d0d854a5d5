"""kill -9 of anything, as the dice fall; `make chaos` plays longer."""

from __future__ import annotations

import pytest

from tests.cluster import chaos


@pytest.mark.timeout(900)  # more than all that it waits for itself
def test_no_job_is_lost_none_runs_twice_and_nothing_is_left(tmp_path):
    played = chaos.play(tmp_path, seed=20261116, seconds=12.0)
    assert set(played.counts) >= set(chaos.DECK)
    assert played.jobs
