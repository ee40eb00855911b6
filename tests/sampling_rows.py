"""Rows and logits for tests of the sampler, without an engine."""

import torch

from intarsia.sampling.filters import candidates
from intarsia.sampling.settings import Settings
from intarsia.types import Entered, Row, SamplingDefaults, Want

VOCAB = 50


def enter(sampler, name, params, prompt=(1, 2, 3), choice=0, seed=None, answer=(), stop_ids=()):
    """Give a sampler a sequence, as an engine does; return its id."""
    sequence_id = (name, choice)
    sampler.enter(
        Entered(
            sequence_id=sequence_id,
            params=params.filled(SamplingDefaults()),
            seed=seed if seed is not None else params.seed or 0,
            token_ids=(*prompt, *answer),
            num_prompt=len(prompt),
            stop_ids=frozenset(stop_ids),
        )
    )
    return sequence_id


def row(sequence_id, prompt=(1, 2, 3), start=0, drafts=(), want=Want.LAST):
    """A row that runs all of a sequence's tokens."""
    ids = (*prompt, *drafts)
    return Row(sequence_id=sequence_id, token_ids=ids, start=start, num_drafts=len(drafts), want=want)


def random_logits(rows, vocab=VOCAB, seed=0, scale=3.0):
    """Normal logits (rows, vocab)."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def probabilities(logits, params):
    """The distribution that tokens are drawn from (L, V), float64."""
    found = torch.zeros(logits.shape, dtype=torch.float64)
    for some in candidates(logits, [Settings.of(p.filled(SamplingDefaults())) for p in params]):
        for i, one in enumerate(some.rows):
            ids = torch.arange(logits.shape[1]) if some.ids_LM is None else some.ids_LM[i]
            there = some.weights_LM[i] > 0
            found[one, ids[there]] = some.weights_LM[i][there] / some.weights_LM[i].sum()
    return found


def generate(params, logits_after, count, *, drafts=None, num_ids=VOCAB, processors=(), tokenizer=None, **entered):
    """Run a scripted model for `count` tokens or more; return the answer's ids and their logprobs.

    Args:
        logits_after: ids -> logits (V,); a function of them alone, as a model's are.
        drafts: answer so far -> guesses.
    """
    from intarsia.sampling import Sampler

    sampler = Sampler(num_ids, processors, tokenizer)
    sequence_id = enter(sampler, "a", params, **entered)
    entries = []
    num_prompt = len(entered.get("prompt", (1, 2, 3)))
    while len(known := list(sampler.token_ids(sequence_id))) - num_prompt < count:
        guesses = tuple(drafts(known[num_prompt:])) if drafts else ()
        logits = torch.stack([logits_after([*known, *guesses[:depth]]) for depth in range(len(guesses) + 1)])
        (result,) = sampler.choose([row(sequence_id, prompt=tuple(known), drafts=guesses)], logits.clone())
        assert result.error is None, result.error
        entries += result.logprobs
    return known[num_prompt:][:count], entries[:count]
