"""Process trees are ended as a whole, and nobody else is."""

from __future__ import annotations

import subprocess

from manyhands.testing.processes import end_tree, is_gone, tree_of

SLEEP = ["sleep", "1000"]


def test_a_tree_is_ended_with_its_descendants():
    command = ["sh", "-c", "sleep 1000 & echo; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        family = tree_of(process.pid)
        assert len(family) == 2
        end_tree(process, patience_s=0.0)
    assert all(is_gone(member) for member in family)


def test_whoever_has_the_id_of_one_that_was_waited_for_is_left_alone():
    ended = subprocess.Popen(["true"])
    ended.wait()
    stranger = subprocess.Popen(SLEEP)
    try:
        ended.pid = stranger.pid  # as the system may give it
        end_tree(ended, patience_s=0.0)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
