"""`manyhands queues` as a user runs it, at a real broker."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from itertools import count

import pytest

from manyhands.core.address import parse_address
from manyhands.links.amqp import login_of
from manyhands.links.amqp.queues import post

_numbers = count()


@pytest.fixture(autouse=True)
def _first(broker):
    """Before the leak check of a test looks."""


@pytest.fixture
def names():
    mark = f"{os.getpid()}-{next(_numbers)}"
    return [f"start.1+{mark}", f"test 1-{mark}"]


def queues(*words, **environ):
    done = subprocess.run(
        [sys.executable, "-m", "manyhands", "queues", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | environ,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_setup_list_purge(broker, names):
    url = broker.url()
    code, out, err = queues("list", "--url", url, names[0])
    assert (code, out) == (1, f"{names[0]}: is not there\n")
    assert "manyhands queues setup" in err
    code, _, err = queues("list", "--url", url, "a b;c", "ü")
    assert code == 1
    assert "manyhands queues setup 'a b;c' 'ü' --url URL" in err  # to be pasted
    code, out, err = queues("setup", "--json", "--url", url, *names)
    assert (code, err) == (0, "")
    assert json.loads(out) == {"made": names, "bound": names, "user": []}
    post(login_of(parse_address(url)), {names[0]: b"one"})  # by amq.topic: they are bound
    code, out, _ = queues("setup", names[0], MANYHANDS_URL=url)  # changes nothing
    assert (code, out) == (0, f"{names[0]}: was there, bound to amq.topic\n")
    code, out, _ = queues("list", "--json", "--url", url, *names)
    assert (code, json.loads(out)[names[0]]["messages"]) == (0, 1)
    code, out, err = queues("purge", "--url", url, *names, "mistyped")
    assert (code, out) == (1, "")
    assert "no queue mistyped: nothing was purged" in err
    assert "manyhands queues setup" in err
    code, out, _ = queues("purge", "--url", url, *names)
    assert out == f"{names[0]}: 1 message purged\n{names[1]}: 0 messages purged\n"
    code, out, _ = queues("list", "--url", url, names[0])
    assert (code, out) == (0, f"{names[0]}: 0 messages, 0 consumers\n")


def test_a_user_with_these_rights_only(broker, names):
    """The lines that are printed do what they say."""
    user = f"limited-{names[0]}"
    code, out, _ = queues("setup", "--url", broker.url(), "--user", user, *names)
    assert code == 0
    add, grant = [shlex.split(line) for line in out.splitlines() if "rabbitmqctl" in line]
    broker.ctl(*add[1:], "password")
    broker.ctl(*grant[1:])
    theirs = broker.url(user, "password")
    assert queues("setup", "--url", theirs, *names)[0] == 0
    post(login_of(parse_address(theirs)), {names[0]: b"one"})
    assert queues("purge", "--url", theirs, *names)[0] == 0
    code, _, err = queues("setup", "--url", theirs, f"{names[0]}-other")
    assert code == 1
    assert "set_permissions" in err
    assert "password@" not in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["setup", "--url", "hub://127.0.0.1/r", "q"], "is no broker"),
        (["purge", "--url", "amqp://127.0.0.1", "mh.run.control"], "neither amq. nor mh."),
    ],
)
def test_what_cannot_be(words, text):
    code, _, err = queues(*words)
    assert code == 2
    assert text in err
    assert "secret" not in err


def test_a_broker_without_tls_elsewhere_is_warned_of():
    """As the trainers do: what they are given works here too. There is nobody at that name."""
    code, out, err = queues("setup", "--url", "amqp://u:secret@nobody.invalid", "q")
    assert (code, out) == (1, "")
    assert err.startswith("warning: amqp:// to nobody.invalid sends the password")
    assert "secret" not in err
