"""Trainers as real processes at a real broker, compared with one process."""

from __future__ import annotations

import pytest

from tests.compat.deepbooster.crew import check_close, random_lines, train_alone, write_chunk


@pytest.fixture(autouse=True)
def _first(context, broker):
    """Before the leak check of a test looks."""


def chunks_for(folder, *nums):
    chunks = [random_lines(100 + k, num) for k, num in enumerate(nums)]
    for k, lines in enumerate(chunks):
        write_chunk(folder / f"chunk{k}.jsonl", lines)
    return chunks


def test_unequal_chunks_are_weighted_by_lines(new_crew, tmp_path):
    chunks = chunks_for(tmp_path, 3, 1, 0)
    with new_crew(3) as crew:
        crew.ignite(0, 1)  # before they start: it counts
        trainers = [crew.start(k) for k in range(3)]
        crew.ignite(2)
        results = [trainer.result() for trainer in trainers]
        for trainer in trainers:
            trainer.end()
        expected = train_alone(crew.options(0), chunks, 2)
    for report, weights in results:
        assert weights == results[0][1]  # to the bit
        assert report == {"epochs": 2, "steps": 6, "lost": (), "skipped": ()}
    check_close(results[0][1], expected)
