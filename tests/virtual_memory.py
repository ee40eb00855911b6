"""A device's virtual memory that holds each rule of CUDA's, on the CPU: breaking one is an AssertionError.

Addresses without memory hold the byte 0xFF: read as floats it is NaN, and written to it is found by `check`.
"""

import types

import torch

from intarsia.errors import ExecutionError
from intarsia.hookspecs import hookimpl
from intarsia.types import Provider
from intarsia_cuda.options import VmmOptions
from intarsia_cuda.vmm import VmmAllocator

POISON = 0xFF


class FakeMemory:
    """One device.

    Attributes:
        granule: bytes.
        limit: granules that the device has.
        peak: the most granules that were there at once.
        failing: name of a call that is refused from now on.
    """

    def __init__(self, granule=512, limit=10**9):
        self.granule, self.limit, self.peak, self.failing = granule, limit, 0, None
        self.reserved = {}  # address -> tensor
        self.handles = set()
        self.behind = {}  # address -> handle
        self.accessible = set()
        self.synchronized = True
        self.calls = []
        self._names = iter(range(1, 10**9))
        self._next = granule * 7

    def _begin(self, call, *sizes):
        self.calls.append(call)
        if self.failing == call:
            raise ExecutionError(f"the device refuses to {call}")
        assert all(size > 0 and size % self.granule == 0 for size in sizes), f"{call}: {sizes} in {self.granule}"

    def _bytes(self, address, size):
        """The tensor over a part of one reservation."""
        for begin, tensor in self.reserved.items():
            if begin <= address and address + size <= begin + len(tensor):
                return tensor[address - begin : address - begin + size]
        raise AssertionError(f"{size} bytes at {address} are not of one reservation")

    def _granules(self, address, size):
        return range(address, address + size, self.granule)

    def reserve(self, size):
        self._begin("reserve", size)
        address, self._next = self._next, self._next + size + self.granule
        self.reserved[address] = torch.full((size,), POISON, dtype=torch.uint8)
        return address

    def create(self, size):
        self._begin("create", size)
        assert size == self.granule, "a handle of many granules cannot be unmapped granule by granule"
        if len(self.handles) >= self.limit:
            raise ExecutionError("the device has no memory left")
        handle = next(self._names)
        self.handles.add(handle)
        self.peak = max(self.peak, len(self.handles))
        return handle

    def map(self, address, size, handle):
        self._begin("map", address, size)
        assert size == self.granule and handle in self.handles, "no such memory"
        assert handle not in self.behind.values(), "memory is mapped twice"
        assert address not in self.behind, "addresses have memory already"
        self._bytes(address, size).fill_(POISON)
        self.behind[address] = handle

    def set_access(self, address, size):
        self._begin("set_access", address, size)
        granules = self._granules(address, size)
        assert all(granule in self.behind for granule in granules), "access to what has no memory"
        for granule in granules:
            if granule not in self.accessible:
                self._bytes(granule, self.granule).fill_(POISON)  # what was written before is lost
        self.accessible.update(granules)
        self.synchronized = False

    def unmap(self, address, size):
        self._begin("unmap", address, size)
        assert address in self.behind and size == self.granule, "nothing is mapped there"
        held = self._bytes(address, size)
        assert self.synchronized or bool((held == POISON).all()), "a step may still read it"
        held.fill_(POISON)
        del self.behind[address]
        self.accessible.discard(address)

    def release(self, handle):
        self._begin("release")
        assert handle not in self.behind.values(), "memory is released while it is mapped"
        self.handles.remove(handle)

    def free(self, address, size):
        self._begin("free", address, size)
        assert len(self.reserved[address]) == size, "a part of a reservation is freed"
        assert not any(granule in self.behind for granule in self._granules(address, size)), "memory is behind it"
        del self.reserved[address]

    def synchronize(self):
        self.synchronized = True

    def tensor(self, address, size):
        assert address in self.accessible, "torch asks about the first address"
        return self._bytes(address, size)

    def check(self):
        """What has memory may be accessed; what has none was not written to; no memory is made and not mapped."""
        assert self.accessible == set(self.behind) and set(self.behind.values()) == self.handles
        for begin, tensor in self.reserved.items():
            for address in self._granules(begin, len(tensor)):
                if address not in self.behind:
                    assert bool((self._bytes(address, self.granule) == POISON).all()), "a write to no memory"

    def assert_clean(self):
        assert not self.reserved and not self.handles and not self.behind


def vmm_plugin(granule=512):
    """A device, and a plugin with the cache `vmm` over it, under the key `vmm_faked`."""
    memory = FakeMemory(granule)

    def build(context):
        return VmmAllocator.of(
            context.options,
            context.layout,
            max_tokens=context.engine.max_model_len,
            num_pages=context.num_pages,
            granule=memory.granule,
            open_memory=lambda: memory,
        )

    @hookimpl
    def provide_cache_allocators():
        return [Provider(key="vmm_faked", summary="faked", options=VmmOptions, build=build)]

    return memory, types.SimpleNamespace(__name__="vmm_faked", provide_cache_allocators=provide_cache_allocators)
