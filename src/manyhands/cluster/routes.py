"""The routes: one table, from which both the server and its OpenAPI document are made."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from manyhands.cluster import desk
from manyhands.cluster.hosts import Node
from manyhands.cluster.job import Job, Step
from manyhands.cluster.messages import Hello, Status, Wants, Welcome


class Role(enum.StrEnum):
    """Whose token."""

    USER = "user"
    AGENT = "agent"


class Body(enum.Enum):
    """Bodies that are not JSON."""

    BYTES = "application/octet-stream"
    NONE = ""
    DOCUMENT = "application/json"


Kind = type[msgspec.Struct] | object
"""A msgspec type, `list[...]` of one, or a Body."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    does: str
    """The name of the method of `Api` that answers it."""
    summary: str
    role: Role | None
    """Whose token it takes; None: that of either."""
    answers: Mapping[int, Kind]
    parts: type[msgspec.Struct] = desk.NoParts
    query: type[msgspec.Struct] = desk.NoParts
    body: Kind = Body.NONE
    errors: tuple[int, ...] = ()
    """Beside those that every route can give."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the answer: name -> what it says."""


LOG_HEADERS = {
    "X-Attempt": "The attempt that the bytes are of.",
    "X-Next-Offset": "Where to go on reading.",
    "X-Ended": "true: that was all, nothing more is written to this log.",
}

ROUTES = (
    Route(
        method="GET",
        path="/openapi.json",
        does="document",
        summary="This document",
        role=None,
        answers={200: Body.DOCUMENT},
    ),
    Route(
        method="GET",
        path="/v1/info",
        does="info",
        summary="Who answers, in which version",
        role=Role.USER,
        answers={200: desk.Info},
    ),
    Route(
        method="POST",
        path="/v1/jobs",
        does="submit",
        summary="Submit a job; a key makes it safe to repeat",
        role=Role.USER,
        body=desk.Submission,
        answers={201: Job, 200: Job},
        errors=(409, 422),
    ),
    Route(
        method="GET",
        path="/v1/jobs",
        does="jobs",
        summary="Jobs, the newest first",
        role=Role.USER,
        query=desk.JobsQuery,
        answers={200: list[Job]},
    ),
    Route(
        method="GET",
        path="/v1/jobs/{id}",
        does="job",
        summary="A job as it is now",
        role=Role.USER,
        parts=desk.JobParts,
        answers={200: Job},
        errors=(404,),
    ),
    Route(
        method="GET",
        path="/v1/jobs/{id}/history",
        does="history",
        summary="Every step of a job, with reason and time",
        role=Role.USER,
        parts=desk.JobParts,
        answers={200: list[Step]},
        errors=(404,),
    ),
    Route(
        method="POST",
        path="/v1/jobs/{id}/cancel",
        does="cancel",
        summary="End a job; one that is over stays as it is",
        role=Role.USER,
        parts=desk.JobParts,
        answers={200: Job},
        errors=(404, 409),
    ),
    Route(
        method="GET",
        path="/v1/jobs/{id}/wait",
        does="wait",
        summary="The job when it is over, or as it is when the time is up",
        role=Role.USER,
        parts=desk.JobParts,
        query=desk.WaitQuery,
        answers={200: Job},
        errors=(404,),
    ),
    Route(
        method="GET",
        path="/v1/jobs/{id}/logs",
        does="read_log",
        summary="A piece of what a rank wrote; held back until there is something to say",
        role=Role.USER,
        parts=desk.JobParts,
        query=desk.LogQuery,
        answers={200: Body.BYTES},
        errors=(404,),
        headers=LOG_HEADERS,
    ),
    Route(
        method="GET",
        path="/v1/nodes",
        does="nodes",
        summary="The hosts",
        role=Role.USER,
        answers={200: list[Node]},
    ),
    Route(
        method="POST",
        path="/v1/shutdown",
        does="shut_down",
        summary="Take the cluster down",
        role=Role.USER,
        answers={202: desk.Down},
    ),
    Route(
        method="POST",
        path="/v1/agents",
        does="hello",
        summary="An agent comes, or comes back",
        role=Role.AGENT,
        body=Hello,
        answers={200: Welcome},
        errors=(409, 422),
    ),
    Route(
        method="POST",
        path="/v1/agents/{host}/status",
        does="status",
        summary="Everything that an agent holds",
        role=Role.AGENT,
        parts=desk.HostParts,
        body=Status,
        answers={204: Body.NONE},
        errors=(404, 409, 422),
    ),
    Route(
        method="GET",
        path="/v1/agents/{host}/wants",
        does="wants",
        summary="What an agent is to hold; held back until it is newer than `seen`",
        role=Role.AGENT,
        parts=desk.HostParts,
        query=desk.WantsQuery,
        answers={200: Wants},
        errors=(404, 409),
    ),
    Route(
        method="PUT",
        path="/v1/agents/{host}/logs/{job}/{attempt}/{rank}",
        does="append_log",
        summary="A piece of a log, at an offset; a repeated piece changes nothing",
        role=Role.AGENT,
        parts=desk.LogParts,
        query=desk.AppendQuery,
        body=Body.BYTES,
        answers={200: desk.LogPlace},
        errors=(404, 409, 507),
    ),
)
