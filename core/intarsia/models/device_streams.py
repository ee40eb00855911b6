"""Two queues of a device's work: what it computes, and copies between its memory and the host's beside that.

What is launched on one queue runs in order; between the two only events order it. Streams and events are CUDA's terms;
on a CPU there is one queue, and what is launched has run when `launch` returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import torch
from attrs import define, field

from intarsia.errors import ExecutionError


class Queue(Enum):
    """A queue of work."""

    COMPUTE = "compute"  #: the stream that steps run on
    COPY = "copy"  #: a stream beside it


class DeviceStreams(Protocol):
    """A device's two queues. Single-threaded: whoever runs its steps calls it."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return so many bytes of host memory, uint8, which copies can reach beside the host; once.

        Raises:
            ExecutionError: there is not as much.
        """
        ...

    def launch(self, queue: Queue, work: Callable[[], object]) -> None:
        """Call `work`, whose tensor operations go to this queue."""
        ...

    def record(self, queue: Queue) -> Any:
        """Return an event that comes when all is done that is on a queue so far."""
        ...

    def wait(self, queue: Queue, event: Any) -> None:
        """Let what is launched on a queue from now on wait for an event."""
        ...

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Return the seconds between two events; None where the later has not come yet."""
        ...

    def close(self) -> None:
        """Wait for the copies, and give host memory back."""
        ...


@define(eq=False)
class HostQueue:
    """A CPU's: one queue, nothing waits."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return plain memory, which costs nothing before it is written to."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise _refused(num_bytes, error) from error

    def launch(self, queue: Queue, work: Callable[[], object]) -> None:
        """Do the work."""
        del queue
        work()

    def record(self, queue: Queue) -> float:
        """Return the time."""
        del queue
        return time.perf_counter()

    def wait(self, queue: Queue, event: float) -> None:
        """Do nothing: what was launched is over."""
        del queue, event

    def seconds(self, begin: float, end: float) -> float | None:
        """Return their difference."""
        return end - begin

    def close(self) -> None:
        """Do nothing: memory goes with its tensor."""


@define(eq=False)
class CudaStreams:
    """A GPU's: copies on a stream of their own, host memory locked in place, so that the device reads it by itself."""

    device: torch.device
    _copies: torch.cuda.Stream = field(init=False)
    _locked: torch.Tensor | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Lock memory in place. torch's own pinned memory would round up to a power of two."""
        assert self._locked is None, "host memory is given once"
        try:
            memory = torch.empty(num_bytes, dtype=torch.uint8)
            with torch.cuda.device(self.device):
                _check(_runtime().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        except RuntimeError as error:
            raise _refused(num_bytes, error) from error
        self._locked = memory
        return memory

    def launch(self, queue: Queue, work: Callable[[], object]) -> None:
        """Call `work` with this stream as the current one."""
        with torch.cuda.stream(self._stream(queue)):
            work()

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        return self._copies if queue is Queue.COPY else torch.cuda.current_stream(self.device)

    def record(self, queue: Queue) -> torch.cuda.Event:
        """Record an event that keeps the time."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream(queue))
        return event

    def wait(self, queue: Queue, event: torch.cuda.Event) -> None:
        """Let the stream wait; the host does not."""
        self._stream(queue).wait_event(event)

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Ask the events; the host does not wait."""
        return begin.elapsed_time(end) / 1e3 if end.query() else None  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Wait for the copies, and unlock the memory."""
        self._copies.synchronize()
        if self._locked is not None:
            with torch.cuda.device(self.device):
                _check(_runtime().cudaHostUnregister(self._locked.data_ptr()))
            self._locked = None


def _runtime() -> Any:
    """Return CUDA's runtime, as torch has loaded it."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(status: Any) -> None:
    """Raise RuntimeError where CUDA's runtime refuses."""
    if code := int(status):
        raise torch.cuda.CudaError(code)


def _refused(num_bytes: int, error: Exception) -> ExecutionError:
    first_line = str(error).strip().partition("\n")[0]
    return ExecutionError(
        f"cache.swap: {num_bytes} bytes of host memory cannot be had ({first_line}); a smaller size, or '0', which "
        "computes the tokens of preempted sequences again",
        field="cache.swap",
    )


def streams_of(device: torch.device) -> DeviceStreams:
    """Return the queues of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostQueue()
