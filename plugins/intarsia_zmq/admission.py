"""Who is next: fair between clients, by the tokens that they ask for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from attrs import define, field, frozen

from intarsia.errors import OverloadedError

T = TypeVar("T", bound=Hashable)

#: Ends of waiting from which the rate is taken for the hint of when to come again.
_RECENT = 64
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0
_FIRST_RETRY_S = 1.0


@frozen(kw_only=True)
class AdmissionLimits:
    """How much may wait.

    Attributes:
        waiting: requests, of all clients.
        waiting_of_client: requests of one client.
        quantum: tokens that a client may have admitted a turn. Small is fair over short times, large costs less.
    """

    waiting: int = 4096
    waiting_of_client: int = 256
    quantum: int = 512


@define(eq=False)
class _Queue(Generic[T]):
    """What one client waits for: priority -> item -> cost, the oldest first, and the tokens that it has saved."""

    levels: dict[int, dict[T, int]] = field(factory=dict)
    credit: int = 0

    def next(self) -> tuple[int, T, int]:
        """Return (priority, item, cost) of what this client wants first."""
        priority = max(self.levels)
        item, cost = next(iter(self.levels[priority].items()))
        return priority, item, cost

    def remove(self, priority: int, item: T) -> None:
        del self.levels[priority][item]
        if not self.levels[priority]:
            del self.levels[priority]


@define(eq=False)
class Admission(Generic[T]):
    """Requests that wait for the engine, in a queue a client.

    Deficit round robin (Shreedhar and Varghese 1996): each turn a client may have `quantum` tokens more admitted, and
    saves what is too little for its next request. So over time clients that always wait get as many tokens as one
    another, however many requests they have and however large. Within a client the higher priority is first, then the
    older; the priority of one client is nothing to another.

    Attributes:
        limits: how much may wait.
        clock: seconds, for the hint of when to come again.
    """

    limits: AdmissionLimits = field(factory=AdmissionLimits)
    clock: Callable[[], float] | None = None
    #: clients that wait, in the order of their turns
    _turns: deque[Hashable] = field(factory=deque, init=False)
    _queues: dict[Hashable, _Queue[T]] = field(factory=dict, init=False)
    #: item -> (its client, its priority)
    _places: dict[T, tuple[Hashable, int]] = field(factory=dict, init=False)
    #: whether the client at the front has had its quantum for this turn
    _served: bool = field(default=False, init=False)
    _admitted_at: deque[float] = field(factory=lambda: deque(maxlen=_RECENT), init=False)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def waiting(self, client: Hashable) -> int:
        """Return how many requests of a client wait."""
        queue = self._queues.get(client)
        return 0 if queue is None else sum(map(len, queue.levels.values()))

    def add(self, client: Hashable, item: T, cost: int, priority: int = 0) -> None:
        """Let a request wait.

        Args:
            client: whose it is.
            item: the request; no other that waits is equal to it.
            cost: tokens that it may take: prompt and answers.
            priority: within the client, higher first.

        Raises:
            OverloadedError: as many wait as may, of all or of this client; nothing has changed.
        """
        assert item not in self._places, f"{item!r} waits already"
        if len(self._places) >= self.limits.waiting:
            raise OverloadedError(f"{len(self)} requests wait, as many as may", retry_after_s=self._retry_after(1))
        waiting = self.waiting(client)
        if waiting >= self.limits.waiting_of_client:
            clients = len(self._queues)
            raise OverloadedError(
                f"{waiting} requests of yours wait, as many as may", retry_after_s=self._retry_after(clients)
            )
        queue = self._queues.get(client)
        if queue is None:
            queue = self._queues[client] = _Queue()
            self._turns.append(client)
        queue.levels.setdefault(priority, {})[item] = max(1, cost)
        self._places[item] = (client, priority)

    def next(self) -> T | None:
        """Return the request whose turn it is, which waits no more; None where none waits."""
        if not self._turns:
            return None
        passed = 0
        while True:
            client = self._turns[0]
            queue = self._queues[client]
            if not self._served:
                queue.credit += self.limits.quantum
                self._served = True
            priority, item, cost = queue.next()
            if cost <= queue.credit:
                queue.credit -= cost
                self._take(client, queue, priority, item)
                if self.clock is not None:
                    self._admitted_at.append(self.clock())
                return item
            self._turns.rotate(-1)
            self._served = False
            passed += 1
            if passed == len(self._turns):
                self._skip_rounds()
                passed = 0

    def remove(self, item: T) -> bool:
        """Let a request wait no more; return whether it did."""
        place = self._places.get(item)
        if place is None:
            return False
        client, priority = place
        self._take(client, self._queues[client], priority, item)
        return True

    def remove_client(self, client: Hashable) -> list[T]:
        """Let no request of a client wait any more; return those that did."""
        queue = self._queues.get(client)
        items = [item for level in queue.levels.values() for item in level] if queue is not None else []
        for item in items:
            self.remove(item)
        return items

    def _take(self, client: Hashable, queue: _Queue[T], priority: int, item: T) -> None:
        queue.remove(priority, item)
        del self._places[item]
        if not queue.levels:
            # Who waits for nothing saves nothing.
            if self._turns[0] == client:
                self._served = False
            self._turns.remove(client)
            del self._queues[client]

    def _skip_rounds(self) -> None:
        """Give every client at once the quanta of the rounds in which nobody could have had anything."""
        missing = min(queue.next()[2] - queue.credit for queue in self._queues.values())
        rounds = -(-missing // self.limits.quantum) - 1
        for queue in self._queues.values():
            queue.credit += rounds * self.limits.quantum

    def _retry_after(self, waits: int) -> float:
        """Return seconds in which so many requests are admitted, by the recent rate."""
        if self.clock is None or len(self._admitted_at) < 2:
            return _FIRST_RETRY_S
        seconds = self.clock() - self._admitted_at[0]
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, waits * seconds / (len(self._admitted_at) - 1)))
