"""What an NVIDIA GPU is: facts for the roofline, for tile choices and for people, through `cuda.core`."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from intarsia_cuda.driver import ordinal, require_driver

#: A memory clock's cycles carry two transfers: HBM and GDDR are double data rate.
_TRANSFERS = 2


@frozen(kw_only=True)
class DeviceFacts:
    """One GPU. Sizes are in bytes.

    Attributes:
        capability: the compute capability, such as (9, 0).
        num_sms: streaming multiprocessors.
        shared_per_block: shared memory that a block can have if it asks for it.
        shared_per_sm: shared memory of a multiprocessor.
        registers_per_sm: 32-bit registers of a multiprocessor.
        l2_bytes: the last cache before memory.
        bytes_per_s: of memory at its peak, clock x bus width; None where the driver does not tell.
        total_bytes: memory.
        free_bytes: memory that can be taken now.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_per_block: int
    shared_per_sm: int
    registers_per_sm: int
    l2_bytes: int
    bytes_per_s: float | None
    total_bytes: int
    free_bytes: int

    def line(self) -> str:
        """Return the facts in one line."""
        speed = "unknown" if self.bytes_per_s is None else f"{self.bytes_per_s / 1e12:.2f} TB/s"
        major, minor = self.capability
        return (
            f"{self.name}: compute capability {major}.{minor}, {self.num_sms} SMs, "
            f"shared memory {self.shared_per_block >> 10} KiB a block and {self.shared_per_sm >> 10} KiB an SM, "
            f"L2 {self.l2_bytes >> 20} MiB, "
            f"memory {self.total_bytes / 2**30:.1f} GiB ({self.free_bytes / 2**30:.1f} free), peak bandwidth {speed}"
        )


def device_facts(device: str = "cuda") -> DeviceFacts:
    """Return what a device such as `cuda:1` is.

    Raises:
        CompositionError: there is no driver that works, or no such device.
    """
    require_driver()
    import torch
    from cuda.core import Device

    found = Device(ordinal(device))
    free_bytes, total_bytes = torch.cuda.mem_get_info(torch.device(device))
    return _facts(found, free_bytes, total_bytes)


def _facts(device: Any, free_bytes: int, total_bytes: int) -> DeviceFacts:
    properties = device.properties
    return DeviceFacts(
        name=device.name,
        capability=(properties.compute_capability_major, properties.compute_capability_minor),
        num_sms=properties.multiprocessor_count,
        shared_per_block=properties.max_shared_memory_per_block_optin,
        shared_per_sm=properties.max_shared_memory_per_multiprocessor,
        registers_per_sm=properties.max_registers_per_multiprocessor,
        l2_bytes=properties.l2_cache_size,
        bytes_per_s=_bandwidth(properties.memory_clock_rate, properties.global_memory_bus_width),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
    )


def _bandwidth(kilohertz: int, bits: int) -> float | None:
    """Return bytes a second; newer drivers say 0 where they do not tell."""
    if kilohertz <= 0 or bits <= 0:
        return None
    return kilohertz * 1e3 * _TRANSFERS * bits / 8
