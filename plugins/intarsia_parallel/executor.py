"""Plans run by several ranks: rank 0 sends each plan to all, every rank runs its share, the last stage chooses.

On rank 0 the engine calls `start`, `submit` and `collect`; its own share runs in a thread, so that a rank which hangs
in the middle of a step never holds up the engine itself. On every other rank `follow` runs what rank 0 sends. Ranks are
started by rank 0 on this machine, or by torchrun on one or several.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from attrs import define, evolve, field

from intarsia.errors import ExecutionError, IntarsiaError
from intarsia.protocols import ExecutorContext, Progress
from intarsia.types import BatchPlan, SequenceId, Share, StepResult
from intarsia_parallel.assembly import assemble, place_of
from intarsia_parallel.channel import Listener, new_token
from intarsia_parallel.checksums import Ledger
from intarsia_parallel.partition import ParallelPartition
from intarsia_parallel.pipeline import Pipeline
from intarsia_parallel.plans import pack_plan, pack_result, read_result
from intarsia_parallel.ranks import spawn
from intarsia_parallel.rendezvous import Meeting, is_launched, join_meeting, open_meeting
from intarsia_parallel.watching import Peer, Watch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

#: How often progress is shown while weights load.
_PROGRESS_S: Final = 0.1
#: How long rank 0's own thread has to end once the others have.
_JOIN_S: Final = 10.0


@define(eq=False)
class ParallelExecutor:
    """Shares a model out between ranks; on rank 0 the engine's executor."""

    context: ExecutorContext
    _watch: Watch | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _plans: SimpleQueue[tuple[int, bytes, BatchPlan] | None] = field(factory=SimpleQueue, init=False)
    _meeting: Meeting | None = field(default=None, init=False)
    #: of the store, where this process runs it: what waits for the store ends with it
    _server: TCPStore | None = field(default=None, init=False)
    _pipeline: Pipeline | None = field(default=None, init=False)
    _progress: tuple[str, int, int] | None = field(default=None, init=False)
    _step: int = field(default=0, init=False)
    #: steps in flight: number, whether rows run, and what of their results is an error already
    _open: deque[tuple[int, bool, Mapping[SequenceId, str]]] = field(factory=deque, init=False)

    @property
    def share(self) -> Share:
        """What this rank holds."""
        assert self.context.partition is not None, "composition asks for a partition first"
        return self.context.partition.share

    @property
    def depth(self) -> int:
        """As many steps as there are stages; a sequence is in one of them at a time.

        It says nothing of `ResolvesPending`: the first stage embeds ids that the last one chooses, so that a row whose
        id is pending could not begin before the step in front of it has left the last stage. Stages are filled by
        other sequences, by further chunks of prompts, and by the microbatches of each step.
        """
        return self.share.stages

    # --- the engine's side --------------------------------------------------------------------------------------------

    def start(self, progress: Progress) -> None:
        """Start the other ranks, or wait for them; load this one's share; return once all are ready.

        Raises:
            IntarsiaError: a rank failed, or did not come in time; names it.
        """
        if self.share.rank != 0:
            raise ExecutionError(
                f"this is rank {self.share.rank}, and engines run on rank 0; here, run `intarsia follow`, or start all "
                "ranks by `torchrun ... -m intarsia_parallel.rank`"
            )
        options, size = self.context.options, self._size
        if is_launched():
            self._meeting = join_meeting(size, options.start_timeout_s)
        else:
            self._meeting, self._server = open_meeting(size, options.start_timeout_s)
        self._watch = self._open_watch(self._meeting)
        self._watch.start()
        self._thread = threading.Thread(target=self._run, name="intarsia-rank-0", daemon=True)
        self._thread.start()
        while not self._watch.wait_until(self._is_ready, _PROGRESS_S):
            if self._progress is not None:
                progress(*self._progress)

    def submit(self, plan: BatchPlan) -> None:
        """Send a plan to all ranks; returns at once.

        Raises:
            IntarsiaError: a rank has failed.
        """
        assert self._watch is not None, "start() comes first"
        assert len(self._open) < self.depth, "more steps in flight than `depth`"
        self._step += 1
        packed = pack_plan(plan)
        self._watch.send("plan", self._step, plan=packed.data)
        self._plans.put((self._step, packed.data, plan))
        self._open.append((self._step, bool(plan.rows), packed.refused))

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight.

        Raises:
            IntarsiaError: a rank failed, which ends the engine; names it.
        """
        assert self._watch is not None, "start() comes first"
        step, has_rows, refused = self._open.popleft()
        if not has_rows:
            self._watch.check()
            return StepResult()
        result = read_result(self._watch.take_result(step))
        if not refused:
            return result
        rows = (evolve(row, error=refused.get(row.sequence_id, row.error)) for row in result.rows)
        return evolve(result, rows=tuple(rows))

    def check(self) -> None:
        """Raise where a rank has failed, even with nothing in flight."""
        if self._watch is not None:
            self._watch.check()

    def figures(self, timeout_s: float = 10.0) -> list[Mapping[str, Any]]:
        """Return where each rank's time went, and what it sent, by rank; no step must be in flight."""
        assert self._watch is not None and self._pipeline is not None, "start() comes first"
        found = self._watch.ask_figures(timeout_s) | {0: self._pipeline.figures()}
        return [found[rank] for rank in sorted(found)]

    def stop(self) -> None:
        """End the other ranks, and free this one's share."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        self._plans.put(None)
        self._server = None
        if self._thread is not None:
            # Where a rank of another machine hangs, the thread waits for it as long as its group's timeout: it dies
            # with this process, and what it holds is freed then.
            self._thread.join(_JOIN_S)
            self._thread = None
        self._meeting = None
        self._open.clear()

    # --- rank 0's own share -------------------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        assert self.context.partition is not None
        return len(self.context.partition.shares)

    def _open_watch(self, meeting: Meeting) -> Watch:
        options = self.context.options
        assert self.context.partition is not None
        listener = Listener(meeting.host, new_token(), options.timeout_s)
        meeting.announce(host=meeting.host, port=listener.port, token=listener.token, timeout_s=options.timeout_s)
        port = None if self._server is None else self._server.port
        return Watch(
            peers={share.rank: Peer(share.rank, place_of(share)) for share in self.context.partition.shares[1:]},
            listener=listener,
            timeout_s=options.timeout_s,
            start_timeout_s=options.start_timeout_s,
            spawn=None if port is None else lambda rank: spawn(rank, meeting.size, port),
            greeting=self._greeting,
        )

    def _greeting(self, rank: int) -> dict[str, Any]:
        """Return what another rank composes: the same config, settled where ranks could settle it otherwise."""
        context = self.context
        config = deepcopy(dict(context.config))
        engine = context.engine
        # The device's kind: which of them is a matter of the rank.
        settled = {"device": engine.device.split(":")[0], "dtype": engine.dtype, "max_model_len": engine.max_model_len}
        config["engine"] = {**config["engine"], **settled}
        config["executor"] = {**config["executor"], "use": "parallel", "rank": rank}
        config["cache"] = {**config["cache"], "memory": context.pinned_memory}
        config["frontend"] = []
        return {"config": config, "num_pages": context.num_pages}

    def _is_ready(self) -> bool:
        return self._pipeline is not None and self._watch is not None and self._watch.are_ready()

    def _note_progress(self, what: str, done: int, total: int) -> None:
        self._progress = what, done, total

    def _run(self) -> None:
        """Load this rank's share, and run what is planned; what goes wrong is the watch's to tell."""
        watch, meeting = self._watch, self._meeting
        assert watch is not None and meeting is not None
        try:
            pipeline = assemble(self.context, meeting, self._note_progress)
            self._pipeline = pipeline
            watch.notify()
            ledger, every = Ledger(), self.context.options.check_every
            while (taken := self._plans.get()) is not None:
                step, data, plan = taken
                ledger.note(data, plan)
                result = pipeline.step(plan)
                if result is not None:
                    watch.put_result(step, pack_result(result))
                if every and step % every == 0:
                    watch.put_checksum(step, ledger.checksum())
        except IntarsiaError as error:
            watch.fail(type(error)(f"rank 0 ({place_of(self.share)}) failed: {error}", field=error.field))
        except RuntimeError as error:  # of torch: a neighbour may be its cause
            watch.suspect(ExecutionError(f"rank 0 ({place_of(self.share)}) failed: {type(error).__name__}: {error}"))
        except Exception as error:
            watch.fail(ExecutionError(f"rank 0 ({place_of(self.share)}) failed: {type(error).__name__}: {error}"))
        finally:
            if self._pipeline is not None:
                self._pipeline.stop()
                self._pipeline = None
            # The partition lives as long as the engine's parts, and a group listens as long as somebody holds it.
            partition = self.context.partition
            assert isinstance(partition, ParallelPartition)
            partition.tensor.connect(None)


def build(context: ExecutorContext) -> ParallelExecutor:
    """Make the executor; nothing is started yet."""
    return ParallelExecutor(context)
