"""The package as a user gets it: the wheel, its command, what an import loads."""

from __future__ import annotations

import email
import inspect
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import manyhands

ROOT = Path(__file__).parent.parent
# Rooms that are about tensors, and the test kit, which needs the `testing` extra.
# Of collectives, what decides (the machine, its messages, its verdicts) is not among them.
MAY_LOAD_TORCH = (
    *("manyhands.wire.tensors", "manyhands.testing", "manyhands.cli.demo_peer"),
    "manyhands.cli.demo_alone",
    *("manyhands.checkpoint.", "manyhands.data.", "manyhands.replica.", "manyhands.trainer."),
    *("manyhands.planner.profile", "manyhands.stages."),
    *("manyhands.worker.servant", "manyhands.worker.workshop"),
    *(
        f"manyhands.compat.bossman.{name}"
        for name in ("boss", "cost", "crew", "deal", "entries", "layers")
    ),
    "manyhands.compat.bossman.variables",
    "manyhands.compat.fluxdistributed.",
    *(f"manyhands.compat.deeppool.{name}" for name in ("models", "tables", "training")),
    *(
        f"manyhands.compat.deepbooster.{name}"
        for name in ("dataset", "learner", "trainer", "training")
    ),
    *(
        f"manyhands.collectives.{name}"
        for name in (
            *("adder", "alone", "backend.arguments", "backend.buffers", "backend.exchange"),
            *("backend.failure", "backend.group", "backend.hooks", "backend.member"),
            *("backend.open", "backend.operations", "backend.session", "backend.store"),
            "backend.team",
            *("backend.work", "bank"),
            *(
                "codecs",
                "feedback",
                "layout",
                "mail",
                "outlook",
                "passes",
                "pool",
                "post",
                "reduction",
                "results",
            ),
            *("rounds", "shelf", "staging", "threads"),
        )
    ),
)


def run(*command, **arguments):
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **arguments
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(code):
    return run(sys.executable, "-c", code)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (built,) = folder.glob("manyhands-*.whl")
    return built


def test_wheel_has_types_licence_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(info))
    assert "manyhands/py.typed" in names
    assert "manyhands/data/example.toml" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Version"] == manyhands.__version__
    assert {name.split("/")[0] for name in names} == {"manyhands", info.split("/")[0]}


@pytest.mark.timeout(600)  # torch is downloaded and unpacked
def test_wheel_installs_into_an_empty_environment(wheel, tmp_path):
    environment = tmp_path / "empty"
    run(sys.executable, "-m", "venv", environment)
    # The lock keeps the versions, torch's above all: without it pip takes the newest of each.
    run(
        *(environment / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check"),
        *("--no-cache-dir", "-c", ROOT / "requirements-dev.lock", wheel),
    )
    bare = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = environment / "bin" / "manyhands"
    said = run(command, "--version", env=bare, cwd=tmp_path)
    assert said == f"manyhands {manyhands.__version__}\n"
    assert "Usage: manyhands" in run(command, "--help", env=bare, cwd=tmp_path)
    assert run(environment / "bin" / "python", "-m", "manyhands", "--version", cwd=tmp_path) == said
    run(environment / "bin" / "python", "-m", "pip", "check", "--disable-pip-version-check")


def test_import_loads_no_torch():
    assert python("import sys, manyhands; print('torch' in sys.modules)") == "False\n"


def test_no_module_of_the_control_plane_loads_torch():
    code = f"""
import importlib, pkgutil, sys, manyhands
for module in pkgutil.walk_packages(manyhands.__path__, "manyhands."):
    if not module.name.startswith({MAY_LOAD_TORCH!r}) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        assert "torch" not in sys.modules, module.name
        print(module.name)
"""
    # walk_packages imports the packages themselves: testing/__init__.py too must stay light.
    assert "manyhands.cli.main" in python(code).split()


def test_help_loads_no_torch():
    code = """
import sys
sys.argv = ["manyhands", "--help"]
from manyhands.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""
    assert "Usage: manyhands" in python(code)


def test_all_is_what_is_there():
    for name in manyhands.__all__:
        assert getattr(manyhands, name) is not None
    there = {
        name
        for name in dir(manyhands)
        if not name.startswith("_")
        and name not in {"annotations", "import_module", "TYPE_CHECKING"}
        and not inspect.ismodule(getattr(manyhands, name))
    }
    assert there | {"__version__"} == set(manyhands.__all__)
    assert len(manyhands.__all__) == len(set(manyhands.__all__))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = manyhands.nonsense
