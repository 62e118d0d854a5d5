"""How data sets and places inside them are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.errors import UsageError
from manyhands.data.spec import Spec, name_problem, parse_spec, parts_of

from .conftest import patient

VALID = [
    *("a_b", "a-b", "a1", "δεδομένα", "a/b", "a/b/c", "a-"),
    *("b_", "1", "a/1", "123", "12ab/34cd", "1-2-3", "x_-__"),
    *("a.b", "abc/def.ghi", "abc-def.ghi_jkl", "a.b.c", "a_.c", "foo__-.csv"),
]
INVALID = ["", "_a", "-a", "a b", "a/b/", "a//b", "/a", "a/-", "a/_b", ".a", "a.", "a..b", "a/.b"]
INVALID += ["a./b", "a.-", "a._b", "./a", "b/../a", "a\n", "a?b", "a#b", "a%20b", "a:b", "a\\b"]


@pytest.mark.parametrize("name", VALID)
def test_names_that_are_good(name):
    assert name_problem(name) is None
    assert (name_problem(name, version=0) is None) == ("/" not in name)
    assert parse_spec(name) == Spec(name)


@pytest.mark.parametrize("name", INVALID)
def test_names_that_are_not(name):
    assert name_problem(name) is not None
    assert name_problem(name, version=0) is not None


@pytest.mark.parametrize(
    ("text", "query", "fragment"),
    [
        ("n?a=b", {"a": "b"}, ""),
        ("n?a=b&c=d#x/y", {"a": "b", "c": "d"}, "x/y"),
        ("n#x%20y/%CE%B4%23", {}, "x y/δ#"),
        ("n?%61%26=%3D+%25", {"a&": "=+%"}, ""),
        ("n?a=", {"a": ""}, ""),
        ("n?a=b=c", {"a": "b=c"}, ""),
        ("n?#", {}, ""),
        ("n#a#b?c", {}, "a#b?c"),
        ("n#d/", {}, "d/"),
    ],
)
def test_query_and_fragment_are_decoded(text, query, fragment):
    assert parse_spec(text) == Spec("n", query, fragment)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no data set"),
        ("/data/imagenet", "path="),
        ("a b", "names no data set"),
        ("n?a", "no key=value"),
        ("n?=b", "no key=value"),
        ("n?a=1&a=2", "twice"),
        ("n#%zz", "percent-escape"),
        ("n#a%4", "percent-escape"),
        ("n?a=%", "percent-escape"),
        ("n#%ff", "UTF-8"),
        ("n#../secret", "no path inside"),
        ("n#%2E%2E/secret", "no path inside"),
        ("n#/etc", "no path inside"),
        ("n#a//b", "no path inside"),
        ("n#a%00b", "no path inside"),
    ],
)
def test_what_cannot_be_used_is_told(text, said):
    with pytest.raises(UsageError, match=said):
        parse_spec(text)


@patient
@given(st.text())
def test_any_text_is_a_spec_or_a_usage_error(text):
    try:
        parsed = parse_spec(text)
    except UsageError:
        return
    assert name_problem(parsed.name) is None
    assert ".." not in parts_of(parsed.fragment)


@patient
@given(st.from_regex(r"[a-z]{1,3}(\?[a-c=&%0-9A-F]{0,9})?(#[a-c./%0-9A-F]{0,9})?", fullmatch=True))
def test_what_is_nearly_a_spec_is_one_or_a_usage_error(text):
    try:
        parsed = parse_spec(text)
    except UsageError:
        return
    assert text.startswith(parsed.name)
    assert not parsed.fragment.startswith("/")


@patient
@given(st.text(st.characters(codec=None, categories=None), max_size=20))
def test_a_path_goes_down_only(path):
    try:
        parts = parts_of(path)
    except UsageError:
        return
    assert "/".join(parts) == path.removesuffix("/")
    assert not {"", ".", ".."}.intersection(parts)
