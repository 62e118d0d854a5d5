"""Description: what the peers of a run must have in common, as plain JSON, and how two differ.

Of packages only the release of manyhands must be the same: it is the language that peers speak.
torch's goes with the description and refuses nobody. It says how a peer rounds, as its device and
its number of threads do, and peers that round otherwise train together: each is of a class of
`arithmetic`, bits are compared within one, and classes get equal parameters by re-syncs. One line
says so where the releases differ.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

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
from manyhands.replica.options import Options, Place
from manyhands.replica.state import Stateful
from manyhands.wire.tensors import bytes_of

log = logging.getLogger(__name__)

_TORCH = str(torch.__version__)
_SHOWN = 8  # differences that an error lists
_LOOKED_AT = 16  # samples: every peer reads them before it joins, however long each takes
_FREE = ("manyhands", "epochs", "bad_gradients", "resync_every")  # after a resume
_DATA = ("data", "evaluation")
_TOLD = "torch"  # not compared
_NONE = object()
_UNKNOWN = "unknown since it was moved"  # a setting: it is compared with nothing
_RATES: WeakKeyDictionary[Optimizer, list[Any] | None] = WeakKeyDictionary()  # as first described


class Mismatch(ManyhandsError):
    """This peer trains something else than the others of its run, or than what it is to go on
    with. `differences` lists it.
    """

    def __init__(self, differences: Sequence[str], what: str, *, hint: str) -> None:
        shown = list(differences[:_SHOWN])
        if len(differences) > _SHOWN:
            shown.append(f"and {len(differences) - _SHOWN} more")
        super().__init__(
            f"this peer trains something else than {what}: {'; '.join(shown)}", hint=hint
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
        _TOLD: _TORCH,
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


def check_same(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raises Mismatch if a run's description is not this peer's."""
    if found := differences(_compared(theirs), _compared(mine)):
        hint = "start it with the run's script, data and options, or join another run"
        raise Mismatch(found, "the run it joined", hint=hint)


def check_saved(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raises Mismatch if what was saved is a state of something else than this peer trains."""
    if found := differences(_compared(resumable(saved, mine)), _compared(mine)):
        hint = "resume with the script, data and options that saved it, or begin in another place"
        raise Mismatch(found, "the one that was saved", hint=hint)


def _compared(description: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in description.items() if name != _TOLD}


def warn_of_torch(what: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """In a line, if a state that is taken comes from another torch than this peer's."""
    there, here = theirs.get(_TOLD), mine.get(_TOLD)
    if None not in (there, here) and there != here:  # None: saved by an earlier manyhands
        log.warning(
            "this peer has torch %s, and %s %s: they are the same up to rounding", here, what, there
        )


def resumable(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """A description that was saved, with what may be another after a resume as `mine` has it: the
    release, how long to train, what is done about what goes wrong, and settings of optimizers that
    only one of two releases of torch knows.
    """
    found = {
        **saved,
        **{name: mine[name] for name in _FREE},
        **{n: _with_policy(saved[n], mine[n]) for n in _DATA if n in saved and n in mine},
    }
    if len(saved["optimizers"]) == len(mine["optimizers"]):
        pairs = zip(saved["optimizers"], mine["optimizers"], strict=True)
        found["optimizers"] = [{k: old.get(k, new[k]) for k in new} for old, new in pairs]
    return found


def _with_policy(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Of a data set, with the policy about bad samples that this peer has, if it has one."""
    kept = {name: value for name, value in saved.items() if name != "bad"}
    return kept | {name: mine[name] for name in ("bad",) if name in mine}


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """Its class, the defaults it was made with, and what its groups have of their own."""
    defaults = {k: _plain(v) for k, v in optimizer.defaults.items()}
    return {
        "class": type(optimizer).__qualname__,
        "groups": [len(group["params"]) for group in optimizer.param_groups],
        **{k: v for k, v in defaults.items() if v is not _NONE},
        "own": _own(optimizer, defaults),
    }


def _own(optimizer: Optimizer, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that some group does not have by default: of each group, as it was before a
    schedule moved it.
    """
    found: dict[str, Any] = {}
    for name, default in defaults.items():
        if name == "lr":
            groups = _rates(optimizer)
        else:
            groups = [_plain(_unmoved(name, group, default)) for group in optimizer.param_groups]
        if groups is None:
            found[name] = _UNKNOWN
        elif _NONE not in groups and any(value != default for value in groups):
            found[name] = groups
    return found


def _rates(optimizer: Optimizer) -> list[Any] | None:
    """Of each group, as it was made; None if nothing tells: not every schedule keeps it, and a loop
    may set it by hand. An optimizer that was described before may have trained since, though some
    keep no state that shows it.
    """
    groups = optimizer.param_groups
    rates = [_plain(group.get("initial_lr", group["lr"])) for group in groups]
    kept = all("initial_lr" in group for group in groups) or not optimizer.state
    first = _RATES.setdefault(optimizer, rates if kept else None)
    return rates if rates == first else None


def _unmoved(name: str, group: Mapping[str, Any], default: object) -> object:
    if name in ("momentum", "betas") and "base_momentum" in group:
        return default  # a cycle moves it, and nothing says from where
    return group.get(name, default)


def _plain(value: object) -> Any:  # noqa: ANN401
    """A setting as JSON has it, also a number in a tensor; _NONE for what cannot be compared."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple):
        items = [_plain(item) for item in cast("tuple[object, ...]", value)]
        return _NONE if _NONE in items else items
    return value if isinstance(value, bool | int | float | str | None) else _NONE


def agreed(
    place: Place, options: Options, source: Source, things: Mapping[str, Stateful]
) -> dict[str, Any]:
    """What of the options must be the same at all peers: more of a description."""
    return {
        "batch": source.batch,
        "drop_last": source.drop_last,
        "shuffle": source.shuffle,
        "grain_size": options.grain_size,
        "epochs": options.epochs,
        "seed": place.seed,
        "wire": options.wire,
        "loss": options.loss,
        "bad_gradients": options.bad_gradients,
        "resync_every": options.resync_every,
        "state": sorted(things),
    }


def fingerprint_of(source: Source) -> str:
    """Of samples that the seed does not choose: the first, the last, and others spread evenly
    between them. Those that cannot be read are left out, whatever the policy: the data are the
    same. They are read each by itself: nobody says that several fit into memory, or one batch.
    """
    last = source.size - 1
    places = sorted({last * step // (_LOOKED_AT - 1) for step in range(_LOOKED_AT)})
    rules = None if source.rules is None else Rules(policy="skip")
    here = replace(source, shuffle=False, workers=Workers(), device=None, rules=rules)
    supply = supply_for(here, 0, lambda request: request)
    digest = hashlib.blake2b(digest_size=8)
    for place in places:
        for value in _leaves(supply.read(Request(0, (place,))).batch):
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
    """Equal for those that may be of one run."""
    data = msgspec.json.encode(_compared(description), order="sorted")
    return hashlib.blake2b(data, digest_size=16).digest()


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any], at: str = "") -> list[str]:
    """In words, the first level that differs: what the run has, what this peer has."""
    found: list[str] = []
    for key in (*theirs, *(k for k in mine if k not in theirs)):
        place = f"{at}{key}"
        a, b = theirs.get(key, _NONE), mine.get(key, _NONE)
        a, b = _by_number(a, b)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{place}.")  # pyright: ignore[reportUnknownArgumentType]
        elif a != b and _UNKNOWN not in (a, b):
            found.append(f"{place} is {_say(a)} there and {_say(b)} here")
    return found


def _by_number(a: Any, b: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Lists of as many mappings, optimizers say, as mappings: what differs is not all of them."""
    if isinstance(a, list) and isinstance(b, list):
        one, other = cast("list[Any]", a), cast("list[Any]", b)
        alike = len(one) == len(other)
        if alike and all(isinstance(item, Mapping) for item in (*one, *other)):
            return dict(enumerate(one)), dict(enumerate(other))
    return cast("Any", a), cast("Any", b)


def _say(value: Any) -> str:  # noqa: ANN401
    return "missing" if value is _NONE else str(value)[:120]
