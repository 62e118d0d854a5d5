"""DDP over a crew trains as one process on all the data does; ranks end bit for bit alike."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("check", "options"),
    [
        ("plain", {}),
        ("plain", {"gradient_as_bucket_view": True}),
        ("no_sync", {}),
        ("find_unused", {}),
        ("static_graph", {}),
        ("uneven_inputs", {}),
        ("fp16_hook", {}),
        ("own_hook", {}),
        ("power_sgd", {}),
        ("power_sgd_in_buckets", {}),
        ("batch_norm", {}),
        ("in_a_subgroup", {}),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(given),
)
def test_ddp(crew, check, options):
    digests = set(crew.call("ddp", check, **options).values()) - {None}
    assert len(digests) == 1


def test_sparse_gradients_are_refused(crew):
    crew.call("ddp", "sparse_gradients_are_refused")
