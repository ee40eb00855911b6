"""Devices and links that are not at hand, by name, from their makers' figures; and this machine's own loopback.

Figures are peaks: what a program reaches is below. Sources, as of the writing:

- devices: NVIDIA's data sheets of A100 (80 GB SXM), H100 SXM and H200 SXM; peaks of dense products, without sparsity.
- NVLink: the same data sheets say 600, 900 and 1800 GB/s a GPU, both directions together; one direction is half of it.
- PCI Express: 16 and 32 GT/s a lane, 16 lanes, 128 of 130 bits (PCI-SIG, Base Specification 4.0 and 5.0).
- Ethernet and InfiniBand: the line's rate, 100 and 400 Gbit/s, in each direction.
- latencies: what NCCL's own tuning takes for a ring in its low-latency protocol (src/graph/tuning.cc at commit
  01afd20): 3.6 us for a collective to begin, and a step 0.47 us over NVLink, 1.0 us over PCI, 2.7 us over networks.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Final

from attrs import frozen

from intarsia_bench.limits import Limits

#: Of the measurement of the loopback.
_BYTES: Final = 32 << 20
_ROUND_TRIPS: Final = 200


@frozen
class Link:
    """How two ranks reach each other (Hockney 1994: a message takes latency + bytes / bandwidth).

    Attributes:
        bytes_per_s: in one direction, while the other is used as much.
        latency_s: of a message.
        start_s: that a collective takes before its first message.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    start_s: float = 0.0

    def message_s(self, num_bytes: float) -> float:
        """Return the seconds of one message between two ranks."""
        return self.start_s + self.latency_s + num_bytes / self.bytes_per_s

    def ring_s(self, num_bytes: float, ranks: int, rounds: int) -> float:
        """Return the seconds of a collective over a ring, as NCCL and gloo run those of large tensors.

        Args:
            num_bytes: of the whole tensor.
            ranks: in the ring; alone, nothing is sent.
            rounds: 2 of an all-reduce, 1 of a reduce-scatter or an all-gather: each is n - 1 messages of 1/n of it.
        """
        if ranks == 1:
            return 0.0
        step_s = self.latency_s + num_bytes / ranks / self.bytes_per_s
        return self.start_s + rounds * (ranks - 1) * step_s


_START_S, _NVLINK_S, _PCI_S, _NETWORK_S = 3.6e-6, 0.47e-6, 1.0e-6, 2.7e-6
_HOPPER: Final = {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12}

#: By name; `float32` without tensor cores, as torch runs it by default.
DEVICES: Final[dict[str, Limits]] = {
    "a100": Limits(2.039e12, {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}),
    "h100": Limits(3.35e12, _HOPPER),
    "h200": Limits(4.8e12, _HOPPER),
}

#: By name.
LINKS: Final[dict[str, Link]] = {
    "nvlink3": Link(300e9, _NVLINK_S, _START_S),
    "nvlink4": Link(450e9, _NVLINK_S, _START_S),
    "nvlink5": Link(900e9, _NVLINK_S, _START_S),
    "pcie4x16": Link(16e9 * 16 * 128 / 130 / 8, _PCI_S, _START_S),
    "pcie5x16": Link(32e9 * 16 * 128 / 130 / 8, _PCI_S, _START_S),
    "ethernet100g": Link(12.5e9, _NETWORK_S, _START_S),
    "infiniband400g": Link(50e9, _NETWORK_S, _START_S),
}


def loopback() -> Link:
    """Measure TCP over this machine's loopback, between two threads: what gloo's ranks have here, at most.

    Half of a round trip of one byte, the median; and the rate of the better of two transfers.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=30)
        far, _ = server.accept()
    with near, far:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far.settimeout(30)
        echo = threading.Thread(target=_echo, args=(far,), daemon=True)
        echo.start()
        trips = sorted(_exchange(near, 1) for _ in range(_ROUND_TRIPS))
        sent_s = min(_exchange(near, _BYTES) for _ in range(2))
        near.shutdown(socket.SHUT_WR)
        echo.join(30)
    return Link(bytes_per_s=_BYTES / sent_s, latency_s=trips[len(trips) // 2] / 2)


def _exchange(near: socket.socket, num_bytes: int) -> float:
    """Send a size and as many bytes; wait for one byte back. Return the seconds."""
    payload = bytes(num_bytes)
    begun = time.perf_counter()
    near.sendall(num_bytes.to_bytes(8, "little") + payload)
    if not near.recv(1):
        raise ConnectionError("the other end is gone")
    return time.perf_counter() - begun


def _echo(far: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    while len(header := far.recv(8, socket.MSG_WAITALL)) == 8:
        left = int.from_bytes(header, "little")
        while left:
            taken = far.recv_into(buffer, min(left, len(buffer)))
            if not taken:
                return
            left -= taken
        far.sendall(b"\0")
