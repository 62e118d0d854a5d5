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
    from torch.distributed.rendezvous import (
        register_rendezvous_handler,  # pyright: ignore[reportUnknownVariableType]
    )

    backend: Any = dist.Backend  # torch gives no types for what is called here
    add_scheme: Any = register_rendezvous_handler  # pyright: ignore[reportUnknownVariableType]
    backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    for scheme in _SCHEMES:
        add_scheme(scheme, _meet)


def _meet(
    url: str, timeout: timedelta | None = None, **_: object
) -> Iterator[tuple[Any, int, int]]:
    """A rendezvous: everybody dials out to the meeting point."""
    from manyhands.collectives.backend.session import open_session

    if "://" not in url and not url.startswith("mh1-"):
        raise RuntimeError(f"init_method {url!r} is neither a URL nor a join code of manyhands")
    from torch.distributed.constants import default_pg_timeout

    session = open_session(url, timeout or default_pg_timeout)
    yield session.store, session.rank, session.world


def _create(options: Any, backend_options: object) -> object:  # noqa: ANN401  (torch's own type)
    """A process group: the world's, or one of some of its ranks."""
    from manyhands.collectives.backend.group import create_group

    return create_group(options)
