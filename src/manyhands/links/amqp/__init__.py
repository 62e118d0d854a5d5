"""The AMQP link: peers that meet at a RabbitMQ broker.

    exchange mh.RUN (direct)
      key to.PEER    ─► inbox of PEER                       messages to one peer
      key view       ─► every inbox                         the arbiter's views
      key control    ─► queue mh.RUN.control                calls to the arbiter
      key from.PEER  ─► exchange mh.RUN.fan.X of every X    fan-outs of PEER
    exchange mh.RUN.fan.X (fanout) ─► inbox of X, or its watch queue while X is watching

Three connections: one reads the inbox, one publishes data (a broker short of memory stops reading
from publishers only), one is for calls and the arbiter's seat. Inboxes are exclusive: they go with
their connection and whatever was in them, so a reconnect is a cut, never a resumption.

Whoever joins later makes the bindings in both directions, on the arbiter's word and before its link
is open, so nobody can miss a fan-out of a peer that it sees in a view. Whoever's inbox was replaced
makes those towards itself, then asks for the cut (`AmqpCarrier`). The watch queue drops its oldest
messages instead of growing; sequence numbers turn that into a Gap.
"""

from manyhands.links.amqp.carrier import login_of, open_amqp

__all__ = ["login_of", "open_amqp"]
