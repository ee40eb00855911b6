"""The driver: with none there, one clear error; with one, each call and its refusal."""

import enum
import types

import pytest
import torch

from intarsia.errors import CompositionError, ExecutionError
from intarsia_cuda import device, driver
from intarsia_cuda.device import DeviceFacts, device_facts
from intarsia_cuda.driver import CudaMemory, cuda_memory, ordinal, unavailable

HAS_DRIVER = unavailable() is None


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100


class Recorder:
    """What stands for `cuda.bindings.driver`: notes calls and answers them."""

    def __init__(self, **answers):
        self.calls, self.answers = [], answers

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            if name in ("cuGetErrorName", "cuGetErrorString"):
                return Status.CUDA_SUCCESS, str(Status(arguments[0]).name).encode() if name.endswith("Name") else b"why"
            return self.answers.get(name, (Status.CUDA_SUCCESS,))

        return call


def memory(**answers):
    recorder = Recorder(**answers)
    return CudaMemory(1, 2 << 20, recorder, "properties", "access"), recorder


@pytest.mark.skipif(HAS_DRIVER, reason="a driver is here")
def test_without_a_driver_one_error_says_what_is_missing():
    for call in (lambda: cuda_memory(0), lambda: device_facts("cuda:0")):
        with pytest.raises(
            CompositionError, match=r"engine.device: an NVIDIA GPU is asked for, and .*driver"
        ) as caught:
            call()
        assert "\n" not in str(caught.value) and caught.value.field == "engine.device"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ImportError("no module"), "cuda-bindings cannot be imported"),
        (RuntimeError("Failed to dlopen libcuda.so.1\nmore"), r"no NVIDIA driver can be loaded \(Failed to dlopen"),
    ],
)
def test_what_is_missing_is_said_in_one_line(monkeypatch, error, says):
    import cuda.bindings

    def fail(*_):
        raise error

    fake = types.ModuleType("cuda.bindings.driver")
    if isinstance(error, RuntimeError):
        fake.cuInit = fail
        monkeypatch.setattr(cuda.bindings, "driver", fake)
    else:
        monkeypatch.setattr(cuda.bindings, "driver", fake)
        monkeypatch.delattr(cuda.bindings, "driver")
        monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    reason = unavailable()
    assert reason is not None and "\n" not in reason
    assert __import__("re").search(says, reason)


def test_a_driver_that_has_no_device_is_named_by_its_error(monkeypatch):
    import cuda.bindings

    monkeypatch.setattr(cuda.bindings, "driver", Recorder(cuInit=(Status.CUDA_ERROR_NO_DEVICE,)))
    assert unavailable() == "the NVIDIA driver cannot be used: CUDA_ERROR_NO_DEVICE: why"


def test_each_call_reaches_the_driver_in_its_form():
    device_memory, recorder = memory(
        cuMemAddressReserve=(Status.CUDA_SUCCESS, 4096), cuMemCreate=(Status.CUDA_SUCCESS, 7)
    )
    assert device_memory.reserve(8) == 4096 and device_memory.create(8) == 7
    device_memory.map(4096, 8, 7)
    device_memory.set_access(4096, 8)
    device_memory.unmap(4096, 8)
    device_memory.release(7)
    device_memory.free(4096, 8)
    assert recorder.calls == [
        ("cuMemAddressReserve", 8, 0, 0, 0),
        ("cuMemCreate", 8, "properties", 0),
        ("cuMemMap", 4096, 8, 0, 7, 0),
        ("cuMemSetAccess", 4096, 8, ["access"], 1),
        ("cuMemUnmap", 4096, 8),
        ("cuMemRelease", 7),
        ("cuMemAddressFree", 4096, 8),
    ]


def test_a_refusal_names_the_device_the_size_and_the_drivers_error():
    refused, _ = memory(cuMemCreate=(Status.CUDA_ERROR_OUT_OF_MEMORY, None))
    with pytest.raises(ExecutionError, match=r"cuda:1 refuses to give 64 bytes .*OUT_OF_MEMORY: why; a smaller"):
        refused.create(64)


def test_a_device_whose_memory_cannot_be_mapped_is_refused_before_anything_loads(monkeypatch):
    from cuda.bindings import driver as real

    recorder = Recorder(cuMemGetAllocationGranularity=(Status.CUDA_ERROR_NO_DEVICE, None))
    for name in dir(real):
        if name.startswith("CU") and not callable(getattr(Recorder, name, None)):
            setattr(recorder, name, getattr(real, name))
    monkeypatch.setattr(driver, "require_driver", lambda: recorder)
    with pytest.raises(CompositionError, match="'vmm' cannot map the memory of cuda:3: CUDA_ERROR_NO_DEVICE"):
        cuda_memory(3)
    recorder.answers["cuMemGetAllocationGranularity"] = (Status.CUDA_SUCCESS, 2 << 20)
    opened = cuda_memory(3)
    assert (opened.ordinal, opened.granule) == (3, 2 << 20)
    assert opened._properties.location.id == opened._access.location.id == 3
    assert opened._properties.type == real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    assert opened._access.flags == real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE


@pytest.mark.parametrize(("name", "number"), [("cuda", 0), ("cuda:0", 0), ("cuda:12", 12)])
def test_devices_are_numbered_as_torch_numbers_them(name, number):
    assert ordinal(name) == torch.device(name).index if ":" in name else ordinal(name) == number


# --- device facts -----------------------------------------------------------------------------------------------------

#: As the driver tells of an H200.
H200 = {
    "compute_capability_major": 9,
    "compute_capability_minor": 0,
    "multiprocessor_count": 132,
    "max_shared_memory_per_block_optin": 232448,
    "max_shared_memory_per_multiprocessor": 233472,
    "max_registers_per_multiprocessor": 65536,
    "l2_cache_size": 50 << 20,
    "memory_clock_rate": 3201000,
    "global_memory_bus_width": 6144,
}


def facts(**changes):
    found = types.SimpleNamespace(name="NVIDIA H200", properties=types.SimpleNamespace(**(H200 | changes)))
    return device._facts(found, 138 << 30, 140 << 30)


def test_facts_are_the_drivers_and_bandwidth_is_clock_times_bus():
    found = facts()
    assert found == DeviceFacts(
        name="NVIDIA H200",
        capability=(9, 0),
        num_sms=132,
        shared_per_block=232448,
        shared_per_sm=233472,
        registers_per_sm=65536,
        l2_bytes=50 << 20,
        bytes_per_s=3.201e9 * 2 * 768,
        total_bytes=140 << 30,
        free_bytes=138 << 30,
    )
    assert found.line() == (
        "NVIDIA H200: compute capability 9.0, 132 SMs, shared memory 227 KiB a block and 228 KiB an SM, L2 50 MiB, "
        "memory 140.0 GiB (138.0 free), peak bandwidth 4.92 TB/s"
    )


@pytest.mark.parametrize("untold", ["memory_clock_rate", "global_memory_bus_width"])
def test_bandwidth_that_the_driver_does_not_tell_is_unknown(untold):
    found = facts(**{untold: 0})
    assert found.bytes_per_s is None and found.line().endswith("peak bandwidth unknown")


def test_every_fact_that_is_read_is_one_of_cuda_cores():
    from cuda.core import _device

    assert all(hasattr(_device.DeviceProperties, name) for name in H200)
