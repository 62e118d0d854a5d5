"""Data sets to be found: real files, and Data.toml files as DataSets.jl's users write them."""

from __future__ import annotations

import base64
import os

import pytest
from hypothesis import HealthCheck, settings

CONTENT = {
    "hello.txt": b"Hello\n",
    "d/a.bin": bytes(range(256)) * 5,
    "d/e/empty": b"",
    "d.txt": b"sorts before what is in d\n",
    "d/\N{GREEK SMALL LETTER DELTA} #%?.txt": b"an odd name\n",
}
"""What the tree of every driver holds."""


@pytest.fixture(autouse=True)
def _nowhere(tmp_path, monkeypatch):
    """No Data.toml of the developer's is found, and nothing is written to their home."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith(("XDG_", "AWS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("JULIA_DATASETS_PATH", raising=False)
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def folder(tmp_path):
    """The content as files."""
    return write_tree(tmp_path / "content")


def write_tree(root):
    for name, data in CONTENT.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def embedded():
    """The content as the table that TomlDataStorage has."""
    table = {}
    for name, data in CONTENT.items():
        *folders, last = name.split("/")
        inner = table
        for part in folders:
            inner = inner.setdefault(part, {})
        inner[last] = base64.b64encode(data).decode()
    return table


def config(storage, name="content", **more):
    """What a Data.toml with one entry holds."""
    entry = {"name": name, "uuid": "b498f769-a7f6-4f67-8d74-40b770398f26", "storage": storage}
    return {"data_config_version": 1, "datasets": [entry | more]}


# A machine that is busy with other things makes no example wrong.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
