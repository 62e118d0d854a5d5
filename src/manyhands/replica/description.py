"""Description: what the peers of a run must have in common, as plain JSON, and how two differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import torch
from torch.optim import Optimizer

from manyhands._version import __version__
from manyhands.core.errors import ManyhandsError
from manyhands.data.fetch import Request
from manyhands.data.quarantine import Rules
from manyhands.data.source import Source, Workers
from manyhands.data.supply import supply_for
from manyhands.replica.gradients import Named
from manyhands.wire.tensors import bytes_of

_SHOWN = 8  # differences that an error lists
_FREE = ("epochs", "bad_gradients", "resync_every")  # after a resume
_DATA = ("data", "evaluation")


class Mismatch(ManyhandsError):
    """This peer trains something else than the others of its run. `differences` lists it."""

    def __init__(self, differences: Sequence[str]) -> None:
        shown = list(differences[:_SHOWN])
        if len(differences) > _SHOWN:
            shown.append(f"and {len(differences) - _SHOWN} more")
        super().__init__(
            "this peer trains something else than the run it joined: " + "; ".join(shown),
            hint="start it with the run's script, data and options, or join another run",
        )
        self.differences = tuple(differences)


def describe(
    parameters: Sequence[Named],
    buffers: Sequence[Named],
    optimizers: Sequence[Optimizer],
    source: Source,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """All of it."""
    return {
        "manyhands": __version__,
        "parameters": {name: _form(tensor) for name, tensor in parameters},
        "buffers": {name: _form(tensor) for name, tensor in buffers},
        "optimizers": [_settings(optimizer) for optimizer in optimizers],
        "data": describe_data(source),
        **options,
    }


def describe_data(source: Source) -> dict[str, Any]:
    """Of a data set, and what is done about bad samples where that is known."""
    found: dict[str, Any] = {"samples": source.size, "fingerprint": fingerprint_of(source)}
    if source.order_digest is not None:
        found["order"] = source.order_digest
    return found if source.rules is None else found | {"bad": source.rules.policy}


def resumable(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """A description that was saved, with what may be another after a resume as `mine` has it: how
    long to train, and what is done about what goes wrong.
    """
    return {
        **saved,
        **{name: mine[name] for name in _FREE},
        **{n: _with_policy(saved[n], mine[n]) for n in _DATA if n in saved and n in mine},
    }


def _with_policy(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Of a data set, with the policy about bad samples that this peer has, if it has one."""
    kept = {name: value for name, value in saved.items() if name != "bad"}
    return kept | {name: mine[name] for name in ("bad",) if name in mine}


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """Its class, and the defaults it was made with: schedules may have moved the groups since."""
    plain, defaults = (bool, int, float, str, type(None)), optimizer.defaults
    return {
        "class": type(optimizer).__qualname__,
        "groups": [len(group["params"]) for group in optimizer.param_groups],
        **{k: v for k, v in defaults.items() if isinstance(v, plain)},
        **{
            k: list(cast("tuple[Any, ...]", v)) for k, v in defaults.items() if isinstance(v, tuple)
        },
    }


def fingerprint_of(source: Source) -> str:
    """Of three samples that the seed does not choose: first, middle, last. Those that cannot be
    read are left out, whatever the policy: the data are the same.
    """
    places = sorted({0, source.size // 2, source.size - 1})
    rules = None if source.rules is None else Rules(policy="skip")
    here = replace(source, shuffle=False, workers=Workers(), device=None, rules=rules)
    supply = supply_for(here, 0, lambda request: request)
    digest = hashlib.blake2b(digest_size=8)
    for value in _leaves(supply.read(Request(0, tuple(places))).batch):
        digest.update(value)
    return digest.hexdigest()


def _leaves(value: Any) -> Iterator[bytes]:  # noqa: ANN401
    """What a batch is made of, as bytes; of things that have none, only their kind."""
    if isinstance(value, torch.Tensor):
        yield _form(value).encode()
        yield bytes(bytes_of(value.detach().cpu()))
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            yield str(key).encode()
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in cast("Sequence[Any]", value):
            yield from _leaves(item)
    elif isinstance(value, str | bytes | bool | int | float):
        yield repr(value).encode()
    else:
        yield type(value).__name__.encode()


def digest_of(description: Mapping[str, Any]) -> bytes:
    """Equal for equal ones."""
    data = msgspec.json.encode(description, order="sorted")
    return hashlib.blake2b(data, digest_size=16).digest()


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any], at: str = "") -> list[str]:
    """In words, the first level that differs: what the run has, what this peer has."""
    found: list[str] = []
    for key in (*theirs, *(k for k in mine if k not in theirs)):
        place = f"{at}{key}"
        a, b = theirs.get(key, _NONE), mine.get(key, _NONE)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{place}.")  # pyright: ignore[reportUnknownArgumentType]
        elif a != b:
            found.append(f"{place} is {_say(a)} there and {_say(b)} here")
    return found


_NONE = object()


def _say(value: Any) -> str:  # noqa: ANN401
    return "missing" if value is _NONE else str(value)[:120]
