"""Slots: GPUs by NVML, CPU shares elsewhere."""

from __future__ import annotations

import types

import pytest

from manyhands.cluster.devices import (
    Gpu,
    cores_of,
    cpu_shares,
    find_slots,
    format_cores,
    nvml_gpus,
)
from manyhands.cluster.messages import Kind, Slot
from manyhands.core.errors import ManyhandsError, UsageError

TWO = [Gpu("GPU-aa11", "H200"), Gpu("GPU-bb22", "H200")]


def found(number=None, *, gpus=(), variable=None, **options):
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    return find_slots(
        number, environment=environment, find_gpus=lambda: list(gpus), cores=range(8), **options
    )


def devices(slots) -> list[str]:
    return [slot.device for slot in slots]


def test_every_gpu_is_a_slot() -> None:
    assert found(gpus=TWO) == (
        Slot(0, Kind.GPU, "GPU-aa11", "H200"),
        Slot(1, Kind.GPU, "GPU-bb22", "H200"),
    )


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("1", ["GPU-bb22"]),
        ("1,0", ["GPU-bb22", "GPU-aa11"]),
        ("GPU-aa", ["GPU-aa11"]),
        ("0,7,1", ["GPU-aa11"]),  # CUDA stops at the first that is none
        ("0,0", ["GPU-aa11"]),
        ("MIG-123,0", ["MIG-123", "GPU-aa11"]),
    ],
)
def test_the_agents_own_choice_is_respected(variable, expected) -> None:
    assert devices(found(gpus=TWO, variable=variable)) == expected


@pytest.mark.parametrize("variable", ["", "-1", "GPU-"])  # the last names both, so none
def test_hidden_gpus_leave_the_cpus(variable) -> None:
    assert [slot.kind for slot in found(gpus=TWO, variable=variable)] == [Kind.CPU]


def test_a_hostfile_names_gpus_by_number() -> None:
    assert devices(found(gpus=TWO, gpu_indices=[1])) == ["GPU-bb22"]
    assert devices(found(gpu_indices=[0, 1, 2, 3])) == ["0-1", "2-3", "4-5", "6-7"]


def test_fewer_may_be_offered_and_not_more() -> None:
    assert devices(found(1, gpus=TWO)) == ["GPU-aa11"]
    with pytest.raises(UsageError, match="3 slots were asked for, and this host has 2 GPUs"):
        found(3, gpus=TWO)
    with pytest.raises(UsageError, match="GPU 2 was asked for, and this host has 2"):
        found(gpus=TWO, gpu_indices=[0, 2])
    with pytest.raises(UsageError, match="named twice"):
        found(gpus=TWO, gpu_indices=[1, 1])
    with pytest.raises(UsageError, match="not 0"):
        found(0)


def test_shares_are_even_and_contiguous() -> None:
    assert devices(found()) == ["0-7"]
    assert devices(found(3)) == ["0-1", "2-4", "5-7"]
    assert devices(cpu_shares(2, [0, 1, 8, 9, 10])) == ["0-1", "8-10"]


def test_more_slots_than_cores_are_pinned_to_none() -> None:
    shares = cpu_shares(3, [4, 5])
    assert devices(shares) == ["", "", ""]
    assert shares[0].name == "any of 2 cores"


@pytest.mark.parametrize("cores", [[], [3], [0, 1, 2], [0, 2, 3, 9]])
def test_cores_as_text_and_back(cores) -> None:
    assert cores_of(Slot(0, Kind.CPU, format_cores(cores))) == cores


class FakeNvml(types.SimpleNamespace):
    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):
        pass

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.open = error, False

    def nvmlInit(self) -> None:
        if self.error is not None:
            raise self.error
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return b"GPU-%d" % handle

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "H200"


def test_nvml_is_asked_and_closed() -> None:
    nvml = FakeNvml()
    assert nvml_gpus(lambda name: nvml) == [Gpu("GPU-0", "H200"), Gpu("GPU-1", "H200")]
    assert not nvml.open


@pytest.mark.parametrize("kind", ["NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"])
def test_no_driver_is_no_gpu(kind) -> None:
    assert nvml_gpus(lambda name: FakeNvml(getattr(FakeNvml, kind)())) == []


def test_a_driver_that_fails_is_not_taken_for_none() -> None:
    with pytest.raises(ManyhandsError, match="does not answer: GPU is lost"):
        nvml_gpus(lambda name: FakeNvml(FakeNvml.NVMLError("GPU is lost")))


def missing(name: str) -> None:
    raise ImportError(name)


def test_a_driver_without_a_way_to_ask_it_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("manyhands.cluster.devices._DRIVER", str(tmp_path))
    with pytest.raises(UsageError, match="pip install nvidia-ml-py"):
        nvml_gpus(missing)
    monkeypatch.setattr("manyhands.cluster.devices._DRIVER", str(tmp_path / "none"))
    assert nvml_gpus(missing) == []
