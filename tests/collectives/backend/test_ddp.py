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
        ("uneven_inputs", {"by_method": True}),
        ("stopped_by_the_first_to_end", {}),
        ("fp16_hook", {}),
        ("own_hook", {}),
        ("power_sgd", {}),
        ("power_sgd_in_buckets", {}),
        ("power_sgd_of_full_rank", {}),
        ("batch_norm", {}),
        ("in_a_subgroup", {}),
        ("compressed", {"wire": "bf16", "tolerance": 1e-2}),
        ("compressed", {"wire": "fp16", "tolerance": 1e-3}),
        ("no_sync", {"wire": "bf16", "tolerance": 1e-2}),
        ("in_a_subgroup", {"wire": "bf16", "tolerance": 1e-2}),
    ],
    ids=lambda given: given if isinstance(given, str) else given.get("wire", "-".join(given)),
)
def test_ddp(crew, check, options):
    digests = set(crew.call("ddp", check, **options).values()) - {None}
    assert len(digests) == 1


def test_compression_by_another_backend_is_refused(crew):
    crew.call("ddp", "another_backend_is_refused")


def test_sparse_gradients_are_refused(crew):
    crew.call("ddp", "sparse_gradients_are_refused")
