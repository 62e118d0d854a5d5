"""Lengths of time as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.cli.duration import parse_duration, show_duration
from manyhands.core.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("0.5", 0.5),
        ("30m", 1800),
        ("2h", 7200),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("1:30:00", 5400),
        ("2:05", 125),
        ("90:00", 5400),
        ("1d", 86400),
        (" 2H ", 7200),
    ],
)
def test_what_people_write(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-5",
        "soon",
        "5x",
        "1:60:00",
        "1:00:60",
        "1:2:3:4",
        "inf",
        "nan",
        "9" * 30,
        "9" * 5000,
        "9" * 5000 + ":00",
        "9" * 5000 + ":00:00",
        "9" * 5000 + "h",
        "\u0665s",
    ],
)
def test_what_is_no_time(text):
    with pytest.raises(SettingsError, match="a limit") as caught:
        parse_duration(text, what="a limit")
    assert "1:30:00" in caught.value.hint


def test_what_is_too_little_or_too_much_says_what_would_do():
    assert parse_duration("0", zero=True) == 0
    assert parse_duration("1d", most_s=86400.0) == 86400
    with pytest.raises(SettingsError, match="a limit is 0; it has to be more than 0, and at most"):
        parse_duration("0", what="a limit")
    with pytest.raises(SettingsError, match="a grace is 2d; it has to be from 0, and at most 1d"):
        parse_duration("2d", what="a grace", zero=True, most_s=86400.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (-3, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3725, "1h02m"), (180000, "2d02h")],
)
def test_what_they_read(seconds, text):
    assert show_duration(seconds) == text


@given(st.integers(1, 59))
def test_what_is_shown_can_be_typed(seconds):
    assert parse_duration(show_duration(seconds)) == seconds


@given(st.text(alphabet="0123456789.:dhms ", max_size=12))
def test_any_text_is_a_time_or_an_error(text):
    try:
        assert parse_duration(text) > 0
    except SettingsError:
        return
