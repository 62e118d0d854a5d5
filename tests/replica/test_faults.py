"""The same run when the network is cut, and when the meeting point itself goes down."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest

from manyhands.core.address import parse_address
from manyhands.links.hub import Hub
from manyhands.testing.proxy import Proxy
from tests.replica.hands import Hands, members, until_members, until_round

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks


@contextmanager
def through_proxy(url):
    port = parse_address(url, run="any").port
    with Proxy("127.0.0.1", port) as proxy:
        yield proxy, url.replace(f":{port}", f":{proxy.port}")


@contextmanager
def hub_process(state, port=0):
    """The `manyhands hub` command: what can be killed with -9. And what it says of itself."""
    place = ("--bind", f"127.0.0.1:{port}", "--state", str(state))
    with subprocess.Popen(
        [sys.executable, "-m", "manyhands", "hub", "--json", *place],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.terminate()
            process.wait(30)


class TestNetwork:
    def test_connections_that_break(self, zygote, url):
        """The peer is back before anybody could miss it: it takes part in every round."""
        with (
            through_proxy(url) as (proxy, via),
            # It has all the time it may need on a busy machine.
            Hands(zygote, url, epochs=10, linger_s=0.05, terms={"grace_s": 10.0}) as hands,
        ):
            first, second = (hands.join(min_peers=3) for _ in range(2))
            broken = hands.join(min_peers=3, url=via)
            until_members(first, 3)
            for round_ in (6, 14, 22):
                until_round(broken, round_)
                proxy.cut()
            hands.finish()
            assert proxy.num_cuts == 3
            for hand in (first, second):
                since = members(hand).index(3)
                assert set(members(hand)[since:]) == {3}, hands.report()

    @pytest.mark.parametrize("how", ["in silence", "in the open"])
    def test_cut_off_for_longer_than_its_lease(self, zygote, url, how):
        """The others go on; it finds itself outside, and comes back by itself."""
        with (
            through_proxy(url) as (proxy, via),
            Hands(zygote, url, lease_s=2.0, epochs=24, linger_s=0.1) as hands,
        ):
            first = hands.join()
            until_round(first, 1)
            far = hands.join(url=via)
            together = until_members(first, 2)
            if how == "in silence":
                proxy.stall()
            else:
                proxy.refuse()
                proxy.cut()
            alone = until_members(first, 1, after=together)
            proxy.accept()
            proxy.go()
            until_members(first, 2, after=alone)
            hands.finish()
            assert max(said["round"] for said in far.said if "round" in said) > alone

    def test_put_out_in_a_round_that_it_then_does_alone(self, zygote, hub):
        """What it has said of its share before is said again, and counts once."""
        at_forward = {"what": "forward", "round": 5}
        with Hands(zygote, f"{hub.address}?insecure=1", shares="equal", min_peers=2) as hands:
            first = hands.join({**at_forward, "then": "wait"})
            second = hands.join({**at_forward, "then": "say"})
            second.until(lambda _: sum("at" in said for said in second.said) == 3)
            room = hub.room(hands.run)
            peer = next(line.peer for line in room.view.roster if line.peer.name == second.name)
            room.dismiss(peer, "it was silent")
            second.until(lambda _: sum("dialed" in said for said in second.said) == 2)
            first.kill()
            hands.finish(first)


class TestMeetingPoint:
    def test_a_hub_that_restarts(self, zygote, tmp_path):
        with ExitStack() as stack:
            hub = stack.enter_context(Hub("127.0.0.1:0", state=tmp_path / "hub"))
            code = hub.address.code()
            hands = stack.enter_context(Hands(zygote, code, epochs=12, linger_s=0.05))
            first, *_ = hands.start(3)
            until_members(first, 3)
            hub.close()
            again = Hub(f"127.0.0.1:{hub.address.port}", state=tmp_path / "hub")
            stack.enter_context(again)
            assert again.address == hub.address  # and so the token and the certificate
            hands.finish()

    def test_a_hub_killed_in_the_middle_of_a_round(self, zygote, tmp_path):
        """With -9: nothing of the round that it carried is said to it again but by the peers."""
        with ExitStack() as stack:
            process, said = stack.enter_context(hub_process(tmp_path))
            hands = stack.enter_context(Hands(zygote, said["code"], grain=None))  # a single pass
            held = {"what": "backward", "round": 5, "then": "wait"}
            told = {"what": "backward", "round": 5, "then": "say"}
            *others, last = (hands.join(p, min_peers=3) for p in (told, told, held))
            for hand in hands.all:
                hand.until(lambda said: said.get("at") == "backward")
            process.kill()
            process.wait()
            _, again = stack.enter_context(hub_process(tmp_path, port=said["port"]))
            assert again["code"] == said["code"]
            last.tell("go")
            hands.finish()
            for hand in others:
                assert max(said["round"] for said in hand.said if "round" in said) > 5

    def test_a_broker_that_restarts(self, zygote, fresh_broker):
        broker = fresh_broker()
        with Hands(zygote, broker.url(), epochs=12, linger_s=0.05) as hands:
            first, *_ = hands.start(3)
            until_members(first, 3)
            broker.restart()
            hands.finish()
