"""Flag before environment before file before default."""

from __future__ import annotations

import pytest

from manyhands.core.address import AmqpAddress, HubAddress
from manyhands.core.errors import AddressError, SettingsError
from manyhands.core.settings import find_meeting_point, find_outage

PIN = "ab" * 32


def find(tmp_path, url=None, *, run=None, name=None, toml=None, **environ):
    file = tmp_path / "manyhands.toml"
    if toml is not None:
        file.write_text(toml)
    return find_meeting_point(url, run=run, name=name, environ=environ, file=file)


def test_the_order_of_precedence(tmp_path):
    toml = 'url = "hub://file:1"\nrun = "of-file"\nname = "f"'
    env = {"MANYHANDS_URL": "hub://env:2", "MANYHANDS_RUN": "of-env", "MANYHANDS_NAME": "e"}
    flag = find(tmp_path, "hub://flag:3", run="of-flag", name="x", toml=toml, **env)
    assert (flag.address.host, flag.address.run, flag.name) == ("flag", "of-flag", "x")
    from_env = find(tmp_path, toml=toml, **env)
    assert (from_env.address.host, from_env.address.run, from_env.name) == ("env", "of-env", "e")
    from_file = find(tmp_path, toml=toml)
    assert (from_file.address.host, from_file.address.run) == ("file", "of-file")


def test_an_address_that_names_its_run_beats_a_default(tmp_path):
    found = find(tmp_path, "hub://h:1/mine", MANYHANDS_RUN="other")
    assert found.address.run == "mine"
    with pytest.raises(AddressError, match=r"'mine'.*'other'"):
        find(tmp_path, "hub://h:1/mine", run="other")


def test_secrets_come_from_the_environment(tmp_path):
    found = find(tmp_path, "hub://h:1/r", MANYHANDS_TOKEN="t0ken", MANYHANDS_FINGERPRINT=PIN)
    assert isinstance(found.address, HubAddress)
    assert (found.address.token, found.address.fingerprint) == ("t0ken", PIN)
    assert "t0ken" not in repr(found)
    amqp = find(tmp_path, "amqp://u:p@localhost/?run=r", MANYHANDS_TOKEN="t0ken")
    assert isinstance(amqp.address, AmqpAddress)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        (None, ("no meeting point", "MANYHANDS_URL")),
        ("url = ", ("not valid TOML",)),
        ('uri = "hub://h"', ("unknown keys: uri", "url, run, name")),
        ("url = 5", ("url must be text",)),
        ('token = "secret"', ("unknown keys: token",)),
    ],
)
def test_errors_name_the_file_and_the_remedy(tmp_path, toml, words):
    with pytest.raises(SettingsError) as caught:
        find(tmp_path, toml=toml)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_how_long_a_meeting_point_is_looked_for_is_a_number_of_seconds():
    assert find_outage({}) == find_outage({"MANYHANDS_OUTAGE": ""}) == 60.0
    assert find_outage({"MANYHANDS_OUTAGE": "0.5"}) == 0.5
    for wrong in ("a while", "-1", "inf", "nan"):
        with pytest.raises(SettingsError, match="MANYHANDS_OUTAGE"):
            find_outage({"MANYHANDS_OUTAGE": wrong})
