"""Cutting output into lines: what a user sees of several processes on one screen."""

from __future__ import annotations

import pytest

from manyhands.cli.lines import Lines


def shown(*chunks, seconds=0.0):
    """The lines of a stream that came in these chunks, `seconds` apart."""
    lines = Lines()
    seen = [line for i, chunk in enumerate(chunks) for line in lines.feed(chunk, i * seconds)]
    return seen + lines.finish()


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\ntwo\n"], [b"one", b"two"]),
        ([b"o", b"ne\nt", b"wo\n"], [b"one", b"two"]),
        ([b"one\n\n", b"\n"], [b"one", b"", b""]),
        ([b"no end"], [b"no end"]),
        ([b"dos\r\nlines\r\n"], [b"dos", b"lines"]),
        ([b"dos\r", b"\nlines\r", b"\n"], [b"dos", b"lines"]),
        ([b"\xff\x00\xfe\n"], [b"\xff\x00\xfe"]),
        ([b"\x1b[31mred\x1b[0m\n"], [b"\x1b[31mred\x1b[0m"]),
        ([b"up\x1b[", b"A\x1b[2Kand gone\n"], [b"upand gone"]),
        ([], []),
    ],
)
def test_lines(chunks, lines):
    assert shown(*chunks) == lines


def test_a_bar_that_is_drawn_fast_is_seen_first_and_last():
    pictures = [f"\r{i}%".encode() for i in range(101)]
    assert shown(*pictures, b"\n", b"done\n") == [b"0%", b"100%", b"done"]
    assert shown(*pictures) == [b"0%", b"100%"]


def test_a_bar_that_is_drawn_slowly_is_seen_every_few_seconds():
    pictures = [f"\r{i}%".encode() for i in range(101)]
    seen = shown(*pictures, b"\n", seconds=1.0)
    assert seen[0] == b"0%"
    assert seen[-1] == b"100%"
    assert 10 < len(seen) < 40


def test_a_bar_that_ends_in_a_carriage_return():
    assert shown(b"1%\r", b"2%\r", b"3%\r", b"\n") == [b"1%", b"3%"]


def test_what_has_no_end_is_cut_and_not_lost():
    seen = shown(*[b"x" * 10_000] * 20)
    assert len(seen) > 1
    assert b"".join(seen) == b"x" * 200_000
