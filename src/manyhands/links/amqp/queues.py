"""Plain queues at a broker, named by the user: made, bound to `amq.topic`, purged, looked at.

Runs need none of this: their queues come and go with their peers. It is for queues that people and
other programs post to, each bound to `amq.topic` by its own name. A queue that is there already is
taken as it is, however it was declared.
"""

# py-amqp has no types: what comes from it is Any, and goes no further than this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAny=false, reportExplicitAny=false

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import amqp
import amqp.spec

from manyhands.core.errors import Refused, UsageError
from manyhands.links.amqp.login import AmqpLogin, run_errand

TOPIC = "amq.topic"
ERRAND_S = 15.0  # for everything that is done at the broker in one go
_NAME_BYTES = 255  # AMQP's own limit


class QueueState(NamedTuple):
    """What the broker says of a queue."""

    name: str
    messages: int  # waiting; those that a consumer has not acknowledged are not counted
    consumers: int


def check_queue(name: str) -> str:
    """The name, if a queue can have it. Raises UsageError."""
    if not name.isprintable() or not 1 <= len(name.encode(errors="replace")) <= _NAME_BYTES:
        raise UsageError(
            f"{name[:80]!r} cannot name a queue", hint=f"1 to {_NAME_BYTES} bytes of printable text"
        )
    if name.startswith(("amq.", "mh.")):
        raise UsageError(
            f"queue {name!r} would be one of the broker's own, or of a run's",
            hint="take a name that begins with neither amq. nor mh.",
        )
    return name


def set_up(login: AmqpLogin, queues: Sequence[str]) -> list[str]:
    """Make those that are missing, bind all of them; which were made. Raises what log_in raises."""
    made: list[str] = []

    def errand(channel: Any) -> None:  # noqa: ANN401
        for queue in queues:
            if _look(channel, queue) is None:
                channel.queue_declare(
                    queue, durable=True, auto_delete=False, arguments={"x-queue-type": "classic"}
                )
                made.append(queue)
            channel.queue_bind(queue, TOPIC, queue)

    run_errand(login, errand, timeout_s=ERRAND_S)
    return made


def purge(login: AmqpLogin, queues: Sequence[str]) -> dict[str, int]:
    """How many messages each had. Raises Refused (`missing`) for one that is not there."""
    purged: dict[str, int] = {}

    def errand(channel: Any) -> None:  # noqa: ANN401
        missing = [queue for queue in queues if _look(channel, queue) is None]
        if missing:
            raise Refused(
                "missing",
                f"{login.place} has no queue {', '.join(missing)}: nothing was purged",
                hint="name those that are there, or make them: manyhands queues setup",
            )
        for queue in queues:
            purged[queue] = int(channel.queue_purge(queue))

    run_errand(login, errand, timeout_s=ERRAND_S)
    return purged


def look(login: AmqpLogin, queues: Sequence[str]) -> dict[str, QueueState | None]:
    """Each one's state; None for one that is not there."""
    found: dict[str, QueueState | None] = {}

    def errand(channel: Any) -> None:  # noqa: ANN401
        found.update((queue, _look(channel, queue)) for queue in queues)

    run_errand(login, errand, timeout_s=ERRAND_S)
    return found


def post(login: AmqpLogin, messages: Mapping[str, bytes]) -> None:
    """Post one message to each queue by way of `amq.topic`; returns when the broker has them all.

    Raises Refused (`missing`) if one is bound to no queue: `set_up` binds them.
    """
    lost: list[str] = []

    def on_return(_error: object, _exchange: str, queue: str, _message: object) -> None:
        lost.append(queue)

    def on_answer(method: object, *_tag: object) -> None:
        if method == amqp.spec.Basic.Nack:
            raise Refused("rejected", f"{login.place} rejected a message: is a queue full?")

    def errand(channel: Any) -> None:  # noqa: ANN401
        channel.confirm_select()
        channel.events["basic_return"].add(on_return)
        for queue, body in messages.items():
            # It outlives a restart of the broker.
            message = amqp.Message(body, delivery_mode=2)  # pyright: ignore[reportArgumentType]
            # What basic_publish does, but for a look at what has come in: it must not wait for
            # that, and our transport always waits.
            to = (0, TOPIC, queue, True, False)
            channel.send_method(amqp.spec.Basic.Publish, "Bssbb", to, message)
            channel.wait([amqp.spec.Basic.Ack, amqp.spec.Basic.Nack], callback=on_answer)

    run_errand(login, errand, timeout_s=ERRAND_S)
    if lost:
        raise Refused(
            "missing",
            f"no queue of {login.place} took the message for {', '.join(lost)}",
            hint="manyhands queues setup makes and binds them",
        )


def limited_user(vhost: str, user: str, queues: Sequence[str]) -> list[str]:
    """The rabbitmqctl lines that give a user the rights on these queues and on runs, no others."""
    own = "|".join(re.escape(queue) for queue in queues)
    configure = rf"^mh\.|^({own})$"
    rights = rf"^mh\.|^(amq\.topic|{own})$"
    words = ["-p", vhost, user, configure, rights, rights]
    return [
        f"rabbitmqctl add_user {shlex.quote(user)}",
        shlex.join(["rabbitmqctl", "set_permissions", *words]),
    ]


def _look(channel: Any, queue: str) -> QueueState | None:  # noqa: ANN401
    try:
        answer = channel.queue_declare(queue, passive=True)
    except amqp.NotFound:  # the channel is open again: py-amqp sees to it
        return None
    return QueueState(queue, int(answer.message_count), int(answer.consumer_count))
