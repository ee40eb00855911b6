"""CUDA's virtual memory: addresses apart from the memory behind them, through `cuda.bindings`.

See "Virtual Memory Management" in NVIDIA's CUDA Driver API. Nothing here is imported, and no driver is looked for,
before something of it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from intarsia.errors import CompositionError, ExecutionError

if TYPE_CHECKING:
    import torch

#: Of a driver's answer: nothing is wrong; no memory is left.
_SUCCESS, _OUT_OF_MEMORY = 0, 2
#: What cuda-pathfinder raises where there is no such library; its text is several sentences.
_MISSING = "DynamicLibNotFoundError"


class VirtualMemory(Protocol):
    """One device's addresses and memory. Sizes and addresses are multiples of `granule`, in bytes.

    In this order: addresses are reserved; memory is created, mapped behind them, and may be accessed once that is set;
    it is unmapped before it is released, and addresses are freed when nothing is mapped behind them.
    """

    @property
    def granule(self) -> int:
        """The least that can be mapped."""
        ...

    def reserve(self, size: int) -> int:
        """Return the first of so many addresses. Raise ExecutionError where there are none."""
        ...

    def create(self, size: int) -> int:
        """Return a handle of memory that holds anything. Raise ExecutionError where there is none."""
        ...

    def map(self, address: int, size: int, handle: int) -> None:
        """Put all of a handle's memory behind addresses that have none."""
        ...

    def set_access(self, address: int, size: int) -> None:
        """Let the device read and write; all of the addresses have memory."""
        ...

    def unmap(self, address: int, size: int) -> None:
        """Take the memory of one `map` away from its addresses."""
        ...

    def release(self, handle: int) -> None:
        """Give memory back that is not mapped."""
        ...

    def free(self, address: int, size: int) -> None:
        """Give addresses back, all of one `reserve`."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all it was told: before memory is unmapped that it may still read."""
        ...

    def tensor(self, address: int, size: int) -> torch.Tensor:
        """Return addresses as a tensor of bytes, which owns nothing. Its first granule has memory while this runs."""
        ...


def ordinal(device: str) -> int:
    """Return the number of a device such as `cuda` or `cuda:1`."""
    return int(device.partition(":")[2] or 0)


def unavailable() -> str | None:
    """Return why no NVIDIA driver can be used, or None."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return f"cuda-bindings cannot be imported ({error}); it is installed with intarsia on Linux"
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:
        missing = type(error).__name__ == _MISSING
        why = "libcuda.so.1 is not on this machine" if missing else _first_line(error)
        return f"no NVIDIA driver can be loaded ({why}); install one that runs CUDA 12 or newer"
    return None if status == _SUCCESS else f"the NVIDIA driver cannot be used: {_named(driver, status)}"


def elsewhere(device: str) -> str:
    """Return where the engine runs that is not on a GPU, and why it could not, in words for the end of a reason."""
    import torch

    if torch.cuda.is_available():
        why = ""
    elif torch.version.cuda is None and torch.version.hip is None:
        why = ": the torch that is installed is built without CUDA"
    else:
        why = ": torch sees no GPU, nor a driver that works"
    return f"the engine runs on {device}{why}"


def require_driver() -> Any:
    """Return `cuda.bindings.driver`, ready for use.

    Raises:
        CompositionError: there is no driver that works; says what is missing.
    """
    reason = unavailable()
    if reason is not None:
        raise CompositionError(f"engine.device: an NVIDIA GPU is asked for, and {reason}", field="engine.device")
    from cuda.bindings import driver

    return driver


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _named(driver: Any, status: Any) -> str:
    """Return an error's name, such as CUDA_ERROR_NO_DEVICE, and its meaning."""
    _, name = driver.cuGetErrorName(status)
    _, text = driver.cuGetErrorString(status)
    return ": ".join(each.decode() if isinstance(each, bytes) else str(each) for each in (name, text) if each)


@frozen(eq=False)
class CudaMemory:
    """A GPU's. `ordinal` is torch's number of the device; the driver counts the same."""

    ordinal: int
    granule: int
    _driver: Any = field(repr=False)
    _properties: Any = field(repr=False)
    _access: Any = field(repr=False)

    def _call(self, doing: str, answer: tuple[Any, ...]) -> Any:
        """Return what a call brought; raise ExecutionError where the driver refuses."""
        status, *found = answer
        if status != _SUCCESS:
            hint = "; a smaller cache.memory leaves more to others" if status == _OUT_OF_MEMORY else ""
            raise ExecutionError(
                f"cache 'vmm': cuda:{self.ordinal} refuses to {doing}: {_named(self._driver, status)}{hint}"
            )
        return found[0] if found else None

    def reserve(self, size: int) -> int:
        """Return the first of so many addresses."""
        return int(self._call(f"reserve {size} bytes of addresses", self._driver.cuMemAddressReserve(size, 0, 0, 0)))

    def create(self, size: int) -> int:
        """Return a handle of memory on the device."""
        return int(self._call(f"give {size} bytes of memory", self._driver.cuMemCreate(size, self._properties, 0)))

    def map(self, address: int, size: int, handle: int) -> None:
        """Put all of a handle's memory behind addresses."""
        self._call(f"map {size} bytes", self._driver.cuMemMap(address, size, 0, handle, 0))

    def set_access(self, address: int, size: int) -> None:
        """Let the device read and write."""
        self._call(f"allow access to {size} bytes", self._driver.cuMemSetAccess(address, size, [self._access], 1))

    def unmap(self, address: int, size: int) -> None:
        """Take the memory away."""
        self._call(f"unmap {size} bytes", self._driver.cuMemUnmap(address, size))

    def release(self, handle: int) -> None:
        """Give memory back."""
        self._call("take memory back", self._driver.cuMemRelease(handle))

    def free(self, address: int, size: int) -> None:
        """Give addresses back."""
        self._call(f"take {size} bytes of addresses back", self._driver.cuMemAddressFree(address, size))

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        import torch

        torch.cuda.synchronize(self.ordinal)

    def tensor(self, address: int, size: int) -> torch.Tensor:
        """Return addresses as a tensor: torch asks the driver about the first, which so must have memory."""
        import torch

        device = torch.device("cuda", self.ordinal)
        tensor = torch.as_tensor(_Addresses(address, size), device=device)
        assert tensor.data_ptr() == address, "torch copied what it was to look at"
        return tensor


@frozen
class _Addresses:
    """Bytes on a GPU, as libraries hand them to each other (the CUDA array interface, version 3)."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}


def cuda_memory(ordinal: int) -> CudaMemory:
    """Return a GPU's memory.

    Raises:
        CompositionError: there is no driver, or this GPU's memory cannot be mapped.
    """
    driver = require_driver()
    properties, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    for location in (properties.location, access.location):
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    status, granule = driver.cuMemGetAllocationGranularity(properties, least)
    if status != _SUCCESS:
        raise CompositionError(
            f"cache: 'vmm' cannot map the memory of cuda:{ordinal}: {_named(driver, status)}", field="cache"
        )
    return CudaMemory(ordinal, int(granule), driver, properties, access)
