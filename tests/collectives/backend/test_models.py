"""Models in shards, in stages and on disk, against a single process."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    "check",
    [
        "fsdp",
        "fsdp_with_mixed_precision",
        "tensors",
        "tensor_parallel",
        "functional_collectives",
        "zero_redundancy",
    ],
)
def test_sharding(crew, check):
    crew.call("sharding", check)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_pipelining(crew, schedule):
    crew.call("pipelines", "train", schedule)


def test_pipelining_of_a_traced_model(crew):
    crew.call("pipelines", "traced")


def test_two_by_two(new_crew, tmp_path):
    """HSDP on a mesh, against one process."""
    with new_crew(4) as crew:
        crew.call("sharding", "hsdp")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_checkpoint_of_two_is_loaded_by_three(new_crew, new_url, tmp_path, asynchronous):
    folder = str(tmp_path / "checkpoint")
    with new_crew(2) as crew:
        crew.call("checkpoints", "save", folder, asynchronous=asynchronous)
    with new_crew(3) as crew:
        crew.call("checkpoints", "load_and_go_on", folder, 2)
