"""What the tests of replicas have in common."""

import pytest

from manyhands.links.hub import Hub
from tests.replica.hands import new_zygote
from tests.replica.training import alone


@pytest.fixture(scope="session", autouse=True)
def _warmed_up():
    """The first step of an optimizer loads half of torch, which opens files of its own."""
    alone(1)


@pytest.fixture(scope="package", autouse=True)
def zygote(_warmed_up):
    made = new_zygote()
    yield made
    made.close()


@pytest.fixture(scope="package", autouse=True)  # before the leak check of a test looks
def hub():
    with Hub("127.0.0.1:0", insecure=True) as made:
        yield made


@pytest.fixture(params=("hub", "amqp"), scope="module")
def url(request):
    if request.param == "amqp":
        return request.getfixturevalue("broker").url()
    return f"{request.getfixturevalue('hub').address}?insecure=1"
