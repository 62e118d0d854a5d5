"""A boss that says whatever it likes, to workers that are processes of their own."""

from dataclasses import replace

import msgspec

from manyhands.core.peers import View
from manyhands.links.base import Delivery, dial, new_peer
from manyhands.links.hub import Hub
from manyhands.links.messages import Ready
from manyhands.stages import commands as words
from manyhands.stages.recipes import Recipe

PATIENCE_S = 60.0


def linear(features=2, **more):
    kwargs = {"in_features": features, "out_features": features, **more}
    return Recipe("torch.nn.modules.linear", "Linear", kwargs)


def said(word):
    return msgspec.msgpack.encode(word)


class Tyrant:
    """Its workers come by themselves, to the port that is given."""

    def __init__(self, port, name=words.BOSS):
        self._hub = Hub(f"127.0.0.1:{port}", insecure=True)
        self.link = dial(replace(self._hub.near, run=words.RUN), new_peer(name), words.SETTINGS)
        self.link.tell(Ready())
        self.workers = []
        self._number = 0

    def __enter__(self):
        return self

    def __exit__(self, *details):
        self.link.close()
        self._hub.close()

    def num_in(self, run):
        """How many peers are in a run of its hub."""
        room = self._hub.room(run)
        return 0 if room is None else len(room.view.peers())

    def hear(self):
        """The next word, and who said it."""
        while True:
            event = self.link.receive(PATIENCE_S)
            if isinstance(event, Delivery):
                return words.heard_by_boss(event), event.sender

    def meet(self, number=1):
        """Offers, in the order in which they came."""
        offers = []
        while len(offers) < number:
            offer, sender = self.hear()
            assert isinstance(offer, words.Offer)
            self.workers.append(sender)
            offers.append(offer)
        return offers

    def shout(self, data, message=b"bossman"):
        """Bytes to the first worker, as they are."""
        self.link.send(self.workers[0], message, [data])

    def ask(self, kind, *details):
        """What the first worker answers."""
        self._number += 1
        words.say(self.link, self.workers[0], kind(self._number, *details))
        answer, sender = self.hear()
        assert sender == self.workers[0]
        assert answer.id == self._number
        return answer

    def build(self, *recipes):
        return self.ask(words.Build, tuple(enumerate(recipes)), 0)

    def is_served(self):
        """Whether the first worker still does its work."""
        return self.build(linear()) == words.Done(self._number)

    def dismiss(self):
        for worker in self.workers:
            words.say(self.link, worker, words.Dismiss())
        left = {worker.incarnation for worker in self.workers}
        while left:
            event = self.link.receive(PATIENCE_S)
            if isinstance(event, View):
                left &= {peer.incarnation for peer in event.peers()}
