"""Crews of processes that carry out a plan together, over gloo, a hub or RabbitMQ."""

from contextlib import contextmanager

import pytest
import torch
from tests.collectives.backend.conftest import _runs, hub_port, zygote  # noqa: F401  (fixtures)
from tests.collectives.backend.crew import Crew

KINDS = ("gloo", "hub", "amqp")


@pytest.fixture(autouse=True, scope="session")
def _torch(tmp_path_factory):
    """One thread; and what optimizers load of the compiler has its folder where it may stay."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        parameter = torch.nn.Parameter(torch.zeros(1))
        torch.optim.SGD([parameter], lr=0.1).step()  # the first step loads half of torch
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=KINDS)
def carried_by(request):
    """What carries the bytes."""
    return request.param


@pytest.fixture
def crew_of(carried_by, request, tmp_path):
    """A context manager: so many processes in one process group."""
    maker = request.getfixturevalue("zygote")
    number = next(_runs)

    @contextmanager
    def make(world, **options):
        with Crew(maker, world) as made:
            if carried_by == "gloo":
                where = f"file://{tmp_path}/meet-{next(_runs)}"
                made.call("tests.stages.programs", "enter_gloo", where, world)
                yield made
                return
            if carried_by == "hub":
                port = request.getfixturevalue("hub_port")
                url = f"hub://127.0.0.1:{port}/stages-{number}-{next(_runs)}?insecure=1"
            else:
                broker = request.getfixturevalue("broker")
                url = f"{broker.url()}?run=stages-{number}-{next(_runs)}"
            yield made.join(url, **options)

    return make
