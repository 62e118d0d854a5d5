"""A hub and a broker to meet at, and crews of processes that meet there."""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager

import pytest

from tests.collectives.backend.crew import Crew

_runs = itertools.count()
KINDS = ("hub", "amqp")


@pytest.fixture(scope="session", params=KINDS)
def kind(request):
    """The kind of meeting point."""
    return request.param


@pytest.fixture(scope="session")
def new_url(kind, request):
    """Makes addresses of runs that nobody has used."""
    if kind == "hub":
        port = request.getfixturevalue("hub_port")
        return lambda: f"hub://127.0.0.1:{port}/run-{os.getpid()}-{next(_runs)}?insecure=1"
    broker = request.getfixturevalue("broker")
    return lambda: f"{broker.url()}?run=run-{os.getpid()}-{next(_runs)}"


@pytest.fixture(scope="session", params=(2, 3))
def world(request):
    """The number of processes."""
    return request.param


@pytest.fixture(scope="session")
def shared_crew(zygote, new_url, world):
    """A crew for all tests with this meeting point and size, until one of them breaks it."""
    made = Crew(zygote, world)
    try:
        made.join(new_url())
        yield made
    except BaseException:
        made.close()
        raise
    made.close(checked=not made.broken)


@pytest.fixture
def crew(shared_crew, zygote, new_url, world):
    """The shared crew, or once that is broken, one of the test's own."""
    if not shared_crew.broken:
        yield shared_crew
        return
    with Crew(zygote, world) as made:
        yield made.join(new_url())


@pytest.fixture
def new_crew(zygote, new_url):
    """A context manager: a crew of the test's own, that may come to harm."""

    @contextmanager
    def make(world, *, env=None, **options):
        with Crew(zygote, world, env=env) as made:
            yield made.join(new_url(), **options)

    return make
