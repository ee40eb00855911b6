"""How ranks find each other: torch's own stores, torchrun's or one that rank 0 makes on loopback.

Process groups are made here without a default group, so that the engine is a guest in its process: a program may have
groups of its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import msgpack  # type: ignore[import-untyped]
from attrs import field, frozen

from intarsia.errors import ConfigError, ExecutionError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore
    from torch.distributed import ProcessGroup

LOOPBACK: Final = "127.0.0.1"
#: Where rank 0 says how to reach it.
_CONTROL: Final = "intarsia/control"


@frozen
class Meeting:
    """Where ranks meet.

    Attributes:
        rank, size: this one, and how many there are.
        host: this machine's address, as the others reach it.
        store: shared by all ranks.
    """

    rank: int
    size: int
    host: str
    store: Store = field(repr=False)

    def announce(self, **facts: Any) -> None:
        """Say how rank 0 is reached."""
        self.store.set(_CONTROL, msgpack.packb(facts).hex())

    def control(self) -> dict[str, Any]:
        """Wait for what rank 0 announces.

        Raises:
            ExecutionError: it announces nothing in time.
        """
        try:
            said = self.store.get(_CONTROL)
        except RuntimeError as error:
            raise ExecutionError(f"rank {self.rank}: rank 0 does not say how to reach it: {error}") from None
        facts: dict[str, Any] = msgpack.unpackb(bytes.fromhex(said.decode()))
        return facts

    def group(self, name: str, ranks: Sequence[int], device: str, timeout_s: float) -> ProcessGroup:
        """Make a process group of some ranks, this one among them; each of them calls it, with the same arguments.

        Args:
            name: unique among the groups of these ranks.
            ranks: in the order of their numbers within the group.
            device: of the tensors: gloo on CPUs, NCCL on NVIDIA GPUs.
            timeout_s: how long one of its operations may take.
        """
        import torch
        from torch.distributed import PrefixStore, ProcessGroup  # type: ignore[attr-defined]

        store, place = PrefixStore(f"intarsia/{name}", self.store), ranks.index(self.rank)
        kind = torch.device(device).type
        if kind == "cuda":
            from torch.distributed import ProcessGroupNCCL

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001 - there is no other way
            backend: Any = ProcessGroupNCCL(store, place, len(ranks), nccl)
            backend_type = ProcessGroup.BackendType.NCCL
        else:
            backend, backend_type = self._gloo(store, place, len(ranks), timeout_s), ProcessGroup.BackendType.GLOO
        group = ProcessGroup(store, place, len(ranks))
        group._set_default_backend(backend_type)  # noqa: SLF001
        group._register_backend(torch.device(kind), backend_type, backend)  # noqa: SLF001
        return group

    def _gloo(self, store: Store, place: int, size: int, timeout_s: float) -> Any:
        """Make gloo's backend on this host's address: by itself it would take that of the host's name."""
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        options._devices = [ProcessGroupGloo.create_device(hostname=self.host)]  # noqa: SLF001
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        return ProcessGroupGloo(store, place, size, options)


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or whoever sets the same variables, started this process as one of several."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return False
    return number_of(environment, "WORLD_SIZE") > 1


def open_meeting(size: int, timeout_s: float) -> tuple[Meeting, TCPStore]:
    """Make a store on loopback, for ranks that this process starts; return its server too, with which it ends."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # A socket of our own, since torch would listen on all addresses.
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    timeout = timedelta(seconds=timeout_s)
    server = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),
    )
    # Apart from the server, so that whoever waits here hears of its end.
    store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return Meeting(0, size, LOOPBACK, store), server


def join_meeting(size: int | None, timeout_s: float, environment: Mapping[str, str] = os.environ) -> Meeting:
    """Join the ranks that torchrun, or rank 0, started.

    Args:
        size: how many ranks the config asks for; None takes what the environment says.
        timeout_s: how long to wait for the others.
        environment: as torchrun sets it.

    Raises:
        ConfigError: the environment is not as torchrun leaves it, or has another number of ranks.
        ExecutionError: nobody is there in time.
    """
    from torch.distributed.rendezvous import rendezvous

    rank, world = number_of(environment, "RANK"), number_of(environment, "WORLD_SIZE")
    if size is not None and world != size:
        raise ConfigError(
            f"executor: tp x pp is {size}, and {world} ranks were started; start {size}, "
            f"such as by torchrun --nproc-per-node {size}",
            field="executor.tp",
        )
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError) as error:
        raise ExecutionError(f"rank {rank} cannot join the others: {error}") from None
    is_alone_here = environment.get("LOCAL_WORLD_SIZE") == str(world)
    master = environment.get("MASTER_ADDR", LOOPBACK)
    host = LOOPBACK if is_alone_here else _address_towards(master, number_of(environment, "MASTER_PORT"))
    return Meeting(rank, world, host, store)


def number_of(environment: Mapping[str, str], name: str) -> int:
    """Return a number that torchrun sets.

    Raises:
        ConfigError: it is none.
    """
    value = environment.get(name, "")
    if not value.isdecimal():
        raise ConfigError(f"{name}: the environment has {value!r}, not the number that torchrun sets there", field=name)
    return int(value)


def _address_towards(host: str, port: int) -> str:
    """Return the address of this machine from which a host is reached; sends nothing."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
