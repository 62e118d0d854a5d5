"""What a user may do at a broker: every permission a peer needs, tried on names of its own."""

# py-amqp has no types: what comes from it is Any, and goes no further than this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAny=false, reportExplicitAny=false

from __future__ import annotations

import contextlib
import re
import shlex
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import amqp

from manyhands.core.errors import LinkClosed, LinkError, Malformed, Refused, WireError
from manyhands.doctor.report import Finding, Outcome, Status, ok, problem, skip_all, skipped
from manyhands.links.amqp.channel import AmqpChannel
from manyhands.links.amqp.line import Deaf
from manyhands.links.amqp.login import AmqpLogin, run_errand
from manyhands.links.amqp.names import Names, declare_exchange, declare_queue

_BLOCKED_S = 0.3  # an alarm is told shortly after the first message, which may be confirmed before


class Right(NamedTuple):
    """A permission that a step needs: `kind` is one of RabbitMQ's three."""

    kind: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """One thing that a peer does at the broker, and the rights it takes."""

    does: str
    needs: tuple[Right, ...]
    act: Callable[[Any], object]


def check_rights(login: AmqpLogin, run: str, limit_s: float) -> Outcome[bool]:
    """Do each kind of thing a peer does, on names of a private run; then publish.

    One finding names every missing permission, another says whether an alarm blocks publishers.
    """
    names = Names(run)
    try:
        missing = missing_rights(login, names, limit_s / 2)
        answer = try_publish(login, names, limit_s / 2)
    except LinkError as error:
        remedy = error.hint or "the broker is overloaded or in an alarm: see rabbitmqctl status"
        finding = problem("permissions", error.message, remedy)
        return Outcome(findings=(finding, *skip_all(["alarm"], "the broker did not go along")))
    if isinstance(answer.error, Refused) and answer.error.code == "permission":
        missing.append(("publish", Right("write", names.exchange)))
    alarm = judge_alarm(answer)
    good = not missing and alarm.status is Status.OK
    return Outcome(findings=(judge_permissions(login, missing), alarm), value=good)


def missing_rights(login: AmqpLogin, names: Names, limit_s: float) -> list[tuple[str, Right]]:
    """What is refused, of everything but publishing: (what cannot be done, the right it takes).

    Raises what `run_errand` raises.
    """
    missing: list[tuple[str, Right]] = []

    def work(channel: Any) -> None:  # noqa: ANN401  (py-amqp has no types)
        for step in _steps(names):
            try:
                step.act(channel)
            except amqp.AccessRefused as error:  # the channel is open again: py-amqp sees to it
                missing.append((step.does, which_right(str(error.reply_text), step.needs)))
            except amqp.NotFound:
                pass  # follows from a declaration that was refused
        _tidy(channel, names)

    run_errand(login, work, timeout_s=limit_s)
    return missing


def _steps(names: Names) -> Sequence[_Step]:
    exchange, fan, queue = names.exchange, names.fan(1), names.queue("inbox", 1, 1)
    return (
        _Step(
            does="declare exchanges",
            needs=(Right("configure", exchange),),
            act=lambda channel: declare_exchange(channel, names),
        ),
        _Step(
            does="declare exchanges",
            needs=(Right("configure", fan),),
            act=lambda channel: channel.exchange_declare(
                fan, "fanout", durable=False, auto_delete=True
            ),
        ),
        _Step(
            does="declare queues",
            needs=(Right("configure", queue),),
            act=lambda channel: declare_queue(channel, queue, 1 << 20, "reject-publish"),
        ),
        _Step(
            does="bind queues",
            needs=(Right("write", queue), Right("read", exchange)),
            act=lambda channel: channel.queue_bind(queue, exchange, "view"),
        ),
        _Step(
            does="bind exchanges",
            needs=(Right("write", fan), Right("read", exchange)),
            act=lambda channel: channel.exchange_bind(fan, exchange, "from.1"),
        ),
        _Step(does="consume", needs=(Right("read", queue),), act=lambda c: c.basic_get(queue)),
    )


def _tidy(channel: Any, names: Names) -> None:  # noqa: ANN401
    """Leave nothing: what could not be declared cannot be deleted either."""
    for delete in (
        lambda: channel.queue_delete(names.queue("inbox", 1, 1)),
        lambda: channel.exchange_delete(names.fan(1)),
        lambda: channel.exchange_delete(names.exchange),
    ):
        with contextlib.suppress(amqp.AccessRefused, amqp.NotFound):
            delete()


def which_right(reply: str, needs: Sequence[Right]) -> Right:
    """Which of the rights of a step a refusal is about: RabbitMQ names the resource."""
    named = re.search(r"(?:queue|exchange) '([^']*)'", reply)
    return next((right for right in needs if named and right.name == named[1]), needs[0])


def judge_permissions(login: AmqpLogin, missing: Sequence[tuple[str, Right]]) -> Finding:
    """One finding that names every permission that is missing, and the line that grants them."""
    if not missing:
        return ok("permissions", "configure, write and read on mh.* names")
    kinds = sorted({right.kind for _, right in missing})
    cannot = ", ".join(dict.fromkeys(does for does, _ in missing))
    grant = " ".join("'^mh\\.'" for _ in range(3))
    remedy = (
        "on the broker, as its administrator: rabbitmqctl set_permissions "
        f"-p {shlex.quote(login.vhost)} {shlex.quote(login.user)} {grant} "
        "(configure, write, read; add what the user may do already, joined by |); if the user has "
        "rights for one run only, name it with --run"
    )
    return problem(
        "permissions",
        f"user {login.user} lacks {' and '.join(kinds)} on mh.* names and cannot {cannot}",
        remedy,
        missing=[
            {"step": does, "permission": right.kind, "name": right.name} for does, right in missing
        ],
    )


# -- publishing ---------------------------------------------------------------------------------


class Answer(Deaf):
    """How a broker answered the first message of a connection."""

    def __init__(self) -> None:
        self.heard = threading.Event()
        self.blocked: str | None = None
        self.error: LinkError | None = None
        self.confirmed = False

    def on_blocked(self, reason: str) -> None:
        self.blocked = reason
        self.heard.set()

    def on_confirm(self, tag: int, multiple: bool, ok: bool) -> None:
        self.confirmed = True
        self.heard.set()

    def on_end(self, error: LinkError, reply_code: int) -> None:
        if not isinstance(error, LinkClosed):
            self.error = error
        self.heard.set()

    def on_delivery(
        self,
        consumer_tag: str,
        delivery_tag: int,
        redelivered: bool,
        header: bytes,
        body_bytes: int,
    ) -> Sequence[memoryview]:
        raise Malformed("a delivery on a channel that consumes nothing")

    def on_body(self) -> None:
        pass

    def on_bad_delivery(self, consumer_tag: str, delivery_tag: int, error: WireError) -> None:
        pass


def try_publish(login: AmqpLogin, names: Names, limit_s: float) -> Answer:
    """Publish one message that reaches nobody; a broker in an alarm blocks whoever publishes.

    Raises what `AmqpChannel.open` raises.
    """

    def set_up(channel: Any) -> None:  # noqa: ANN401  (py-amqp has no types)
        queue = names.queue("inbox", 2, 1)
        with contextlib.suppress(amqp.AccessRefused, amqp.NotFound):
            declare_queue(channel, queue, 1 << 20, "reject-publish")
            declare_exchange(channel, names)
            # The exchange goes with its queue, the queue with the connection, even a blocked one.
            try:
                channel.queue_bind(queue, names.exchange, "view")
            except amqp.AccessRefused:
                channel.exchange_delete(names.exchange)
        channel.confirm_select()

    answer = Answer()
    channel = AmqpChannel.open(login, answer, setup=set_up, timeout_s=limit_s, heartbeat_s=0)
    thread = threading.Thread(target=channel.serve, name="doctor publish", daemon=True)
    thread.start()
    try:
        channel.publish(names.exchange, "nobody", b"", (), mandatory=False, timeout_s=limit_s)
        answer.heard.wait(limit_s / 2)
        if answer.confirmed and answer.blocked is None:
            answer.heard.clear()
            answer.heard.wait(_BLOCKED_S)
    except LinkError as error:
        answer.error = answer.error or error
    finally:
        channel.abort() if answer.blocked else channel.close()
        thread.join()
    return answer


def judge_alarm(answer: Answer) -> Finding:
    """The finding about a broker that blocked the connection, broke it, or did neither."""
    if answer.blocked is not None:
        remedy = (
            "free memory or disk on the broker, or raise vm_memory_high_watermark (disk_free_limit)"
            ": until then nothing can be sent; rabbitmqctl status shows which alarm it is"
        )
        summary = f"the broker takes no messages: {answer.blocked}"
        return problem("alarm", summary, remedy, blocked=answer.blocked)
    if isinstance(answer.error, Refused):  # for want of a permission, or of the exchange
        return skipped("alarm", "nothing could be published")
    if answer.error is not None:
        return problem("alarm", answer.error.message, answer.error.hint or "see the broker's log")
    if not answer.confirmed:
        remedy = "the broker is overloaded: see rabbitmqctl status"
        return problem("alarm", "the broker did not confirm a message in time", remedy)
    return ok("alarm", "no memory or disk alarm")
