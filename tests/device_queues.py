"""A device's two queues on the CPU, whose work is done late and in any order that queues and events allow.

A wait that is missing lets a copy run before, or after, what it must not overtake: some order then shows it.
"""

import torch
from attrs import define, field

from intarsia.models.device_streams import Queue


@define(eq=False)
class Event:
    """Comes when the work before it is done."""

    has_come: bool = False
    when: int = -1


@define(eq=False)
class LateQueues:
    """Queues whose work waits until `run`.

    Attributes:
        choose: of 2 queues that could go on, 0 or 1.
        ignored: a queue that does not wait, as a faulty caller would have it.
        order: queue of each work done.
    """

    choose: object
    ignored: object = None
    is_closed: bool = False
    order: list = field(factory=list)
    _queues: dict = field(factory=lambda: {queue: [] for queue in Queue})
    _now: int = 0

    def host_memory(self, num_bytes):
        return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)

    def launch(self, queue, work):
        self._queues[queue].append(("work", work))

    def record(self, queue):
        event = Event()
        self._queues[queue].append(("record", event))
        return event

    def wait(self, queue, event):
        if queue is not self.ignored:
            self._queues[queue].append(("wait", event))

    def seconds(self, begin, end):
        return end.when - begin.when if end.has_come else None

    def close(self):
        self.run()
        self.is_closed = True

    def _can_go_on(self, queue):
        waiting = self._queues[queue]
        return bool(waiting) and (waiting[0][0] != "wait" or waiting[0][1].has_come)

    def run(self, most=10**9):
        """Do so much of the work, or all."""
        while most > 0:
            ready = [queue for queue in Queue if self._can_go_on(queue)]
            if not ready:
                assert not any(self._queues.values()), "each queue waits for the other"
                return
            queue = ready[self.choose() % len(ready)] if len(ready) > 1 else ready[0]
            kind, what = self._queues[queue].pop(0)
            self._now += 1
            if kind == "work":
                what()
                self.order.append(queue)
                most -= 1
            elif kind == "record":
                what.has_come, what.when = True, self._now
