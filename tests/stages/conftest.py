"""Crews of processes that carry out a plan together, over gloo, a hub or RabbitMQ."""

import itertools
from contextlib import contextmanager

import pytest
import torch
from tests.collectives.backend.crew import Crew

KINDS = ("gloo", "hub", "amqp")


@pytest.fixture(autouse=True, scope="session")
def _torch(tmp_path_factory):
    """One thread; and what optimizers load of the compiler has its folder where it may stay."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        if torch.cuda.is_available():
            torch.cuda.init()  # opens files that stay, at the first seed that is set
        parameter = torch.nn.Parameter(torch.zeros(1))
        torch.optim.SGD([parameter], lr=0.1).step()  # the first step loads half of torch
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=KINDS)
def new_url(request, tmp_path_factory):
    """Makes addresses of groups that nobody has used, for one kind of carrier."""
    numbers = itertools.count()
    if request.param == "gloo":
        folder = tmp_path_factory.mktemp("gloo")
        return lambda: f"file://{folder}/{next(numbers)}"
    if request.param == "hub":
        port = request.getfixturevalue("hub_port")
        return lambda: f"hub://127.0.0.1:{port}/stages-{next(numbers)}?insecure=1"
    broker = request.getfixturevalue("broker")
    return lambda: f"{broker.url()}?run=stages-{next(numbers)}"


@pytest.fixture
def crew_of(zygote, new_url):
    """A context manager: so many processes in one process group."""

    @contextmanager
    def make(world):
        with Crew(zygote, world) as made:
            made.call("tests.stages.programs", "enter", new_url(), world)
            yield made

    return make
