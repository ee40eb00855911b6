"""A step loop without a model: schedulers and allocators run against a cache that remembers what was written where.

Each slot of the simulated cache holds the prefix that its token ends. Before a row runs, every slot that it may read
is compared with the row's own tokens: a page shared wrongly, copied too late or reused too early is seen at once.
The next token is a function of all tokens before it, as a model's is: answers can be compared with solo runs.
"""

import hashlib

from attrs import define, field

from intarsia.types import Entered, RowResult, SamplingParams, Want


def next_token(token_ids):
    """What the simulated model says after these tokens: few different tokens, so that prefixes meet often."""
    return hashlib.blake2b(bytes(token_ids), digest_size=1).digest()[0] % 4


def answer(prompt, num_tokens):
    """What a solo run says."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


@define(eq=False)
class SimulatedSequence:
    """What the engine would own."""

    sequence_id: tuple[str, int]
    token_ids: list[int]
    max_total: int
    priority: int = 0
    salt: str = ""
    params: SamplingParams = field(factory=SamplingParams)
    seed: int = 0
    num_prompt: int = field(init=False)
    num_computed: int = field(default=0, init=False)
    cached_tokens: int | None = field(default=None, init=False)

    def __attrs_post_init__(self):
        self.num_prompt = len(self.token_ids)

    def entered(self):
        return Entered(
            sequence_id=self.sequence_id,
            params=self.params,
            seed=self.seed,
            token_ids=tuple(self.token_ids),
            num_prompt=self.num_prompt,
        )

    @property
    def output(self):
        return self.token_ids[self.num_prompt :]


@define(eq=False)
class Simulation:
    """Runs a scheduler's plans and checks each of them."""

    scheduler: object
    allocator: object
    layout: object
    max_tokens: int | None = None
    max_batch: int | None = None
    propose: object = None
    sequences: dict = field(factory=dict, init=False)
    finished: dict = field(factory=dict, init=False)
    slots: dict = field(factory=dict, init=False)
    host: dict = field(factory=dict, init=False)
    known: set = field(factory=set, init=False)
    log: list = field(factory=list, init=False)

    def add(self, name, prompt, num_tokens, *, choice=0, **more):
        sequence = SimulatedSequence((name, choice), list(prompt), len(prompt) + num_tokens, **more)
        self.scheduler.add(sequence)
        self.sequences[sequence.sequence_id] = sequence
        return sequence

    def cancel(self, sequence_id):
        self.scheduler.remove(sequence_id)
        self.sequences.pop(sequence_id, None)

    def step(self):
        plan = self.scheduler.plan()
        self.log.append(plan)
        self._check_plan(plan)
        for move in plan.moves:
            self._move(move)
        results = [self._run(row) for row in plan.rows]
        for row, result in zip(plan.rows, results, strict=True):
            sequence = self.sequences[row.sequence_id]
            if result.token_ids:
                sequence.token_ids += result.token_ids[: sequence.max_total - len(sequence.token_ids)]
                sequence.num_computed = len(sequence.token_ids) - 1
            else:
                sequence.num_computed = row.start + len(row.token_ids)
            self.allocator.commit(row.sequence_id, sequence.token_ids, sequence.num_computed)
        self.scheduler.update(plan, results)
        for row in plan.rows:
            sequence = self.sequences[row.sequence_id]
            if len(sequence.token_ids) >= sequence.max_total:
                self.scheduler.remove(row.sequence_id)
                self.finished[row.sequence_id] = self.sequences.pop(row.sequence_id)
        self.allocator.check_integrity()
        return plan

    def run(self, limit=10_000):
        """Step until all are finished; AssertionError after `limit` steps."""
        for _ in range(limit):
            if not self.sequences:
                return
            self.step()
        raise AssertionError(f"{list(self.sequences)} are not finished after {limit} steps")

    def _check_plan(self, plan):
        ids = [row.sequence_id for row in plan.rows]
        assert len(set(ids)) == len(ids), "a sequence has two rows"
        assert not set(ids) & set(plan.preempted), "a sequence is scheduled and preempted in one step"
        assert self.max_tokens is None or plan.num_tokens <= self.max_tokens
        assert self.max_batch is None or self.scheduler.num_running <= self.max_batch
        self.known -= set(plan.left)
        for sequence_id in plan.preempted:
            self.sequences[sequence_id].num_computed = 0
            self.known.discard(sequence_id)
        for entered in plan.entered:
            sequence = self.sequences[entered.sequence_id]
            assert entered.token_ids == tuple(sequence.token_ids) and entered.num_prompt == sequence.num_prompt
            self.known.add(entered.sequence_id)
        assert set(ids) <= self.known, "a row's sequence never entered"
        for row in plan.rows:
            self._check_row(row)

    def _check_row(self, row):
        sequence = self.sequences[row.sequence_id]
        if sequence.cached_tokens is None:
            sequence.cached_tokens = row.start
        known = list(sequence.token_ids)
        num_known = len(row.token_ids) - row.num_drafts
        assert num_known >= 1
        assert list(row.token_ids[:num_known]) == known[row.start : row.start + num_known]
        is_last = row.start + num_known == len(known)
        assert row.want is (Want.LAST if is_last else Want.NONE)
        assert is_last or not row.num_drafts
        assert row.start + len(row.token_ids) <= sequence.max_total

    def _place(self, group, pages, position):
        size = self.layout.page_size
        page = pages[position // size]
        assert page >= 0, "a row reads or writes a page that is gone"
        assert page < self.allocator.num_pages
        return group, page, position % size

    def _run(self, row):
        sequence = self.sequences[row.sequence_id]
        written = [*sequence.token_ids[: row.start], *row.token_ids]
        for group, (facts, pages) in enumerate(zip(self.layout.groups, row.pages, strict=True)):
            for position in range(row.start, len(written)):
                self.slots[self._place(group, pages, position)] = (sequence.salt, tuple(written[: position + 1]))
            first = 0 if facts.window is None else max(0, row.start - facts.window + 1)
            for position in range(first, len(written)):
                found = self.slots.get(self._place(group, pages, position))
                assert found is not None and found[1] == tuple(written[: position + 1]), (
                    f"{row.sequence_id} would read {found} at position {position}"
                )
                assert found[0] == sequence.salt, "a prefix crossed salts"
        if row.want is Want.NONE:
            return RowResult(sequence_id=row.sequence_id)
        drafts = row.token_ids[len(row.token_ids) - row.num_drafts :]
        accepted, context = [], written[: len(written) - row.num_drafts]
        for draft in (*drafts, None):
            accepted.append(next_token(context))
            context.append(accepted[-1])
            if accepted[-1] != draft:
                break
        wanted = row.drafts_wanted
        proposal = tuple(self.propose(context)[:wanted]) if self.propose is not None else ()
        return RowResult(sequence_id=row.sequence_id, token_ids=tuple(accepted), drafts=proposal)

    def _move(self, move):
        sources = self.host if move.kind == "swap_in" else self.slots
        targets = self.host if move.kind == "swap_out" else self.slots
        assert move.kind in ("copy", "swap_out", "swap_in")
        for slot in range(self.layout.page_size):
            source = sources.get((move.group, move.source, slot))
            target = (move.group, move.target, slot)
            if source is None:
                targets.pop(target, None)
            else:
                targets[target] = source
