"""Make torch.distributed know `manyhands`. Loads nothing but what torch has loaded itself.

torch calls `register` at the end of its own import (its entry point group `torch.backends`), and
`import manyhands` calls it if torch was there first: either order works.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

_SCHEMES = ("hub", "amqp", "amqps", "local", "")  # the last: a join code is no URL
_NAME = "manyhands"


def register() -> None:
    """Idempotent."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, _NAME.upper()):
        return
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import (
        register_rendezvous_handler,  # pyright: ignore[reportUnknownVariableType]
    )

    backend: Any = dist.Backend  # torch gives no types for what is called here
    add_scheme: Any = register_rendezvous_handler  # pyright: ignore[reportUnknownVariableType]
    backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    for scheme in _SCHEMES:
        add_scheme(scheme, _meet)
    # From 2.15 on torch hooks a recorder into the backends inside a group. A group of ours has
    # none inside, so it must count as one that keeps records itself.
    self_recording: Any = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]())
    self_recording.add(_NAME)


def _meet(
    url: str, timeout: timedelta | None = None, **_: object
) -> Iterator[tuple[Any, int, int]]:
    """A rendezvous: everybody dials out to the meeting point."""
    from manyhands.collectives.backend.session import open_session
    from manyhands.core.address import redact

    url = url.replace('"', "").replace("'", "")  # a shell or a form may have left them on
    if not ("://" in url or url.startswith(("mh1-", "local:/"))):  # torch makes /// one slash
        given = redact(url.partition("?")[0])
        raise RuntimeError(
            f"init_method {given!r} is neither a URL nor a join code of manyhands\n"
            "hint: mh1-... as `manyhands hub` prints it, or hub://HOST:PORT/RUN, or "
            "amqps://USER:PASSWORD@HOST/VHOST?run=RUN"
        )
    from torch.distributed.constants import default_pg_timeout

    session = open_session(url, timeout or default_pg_timeout)
    yield session.store, session.rank, session.world


def _create(options: Any, backend_options: object) -> object:  # noqa: ANN401  (torch's own type)
    """A process group: the world's, or one of some of its ranks."""
    from manyhands.collectives.backend.group import create_group

    return create_group(options)
