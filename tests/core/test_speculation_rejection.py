"""Verification by rejection: the output has the target's distribution, whatever drafts."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from intarsia import SamplingParams
from intarsia.sampling import Sampler, rejection
from intarsia.types import Row
from sampling_rows import enter, probabilities, random_logits, row

VOCAB = 8
#: Logits of the target after each token, and after the prompt (the last row); those of a drafter that half agrees.
TARGET = random_logits(VOCAB + 1, vocab=VOCAB, seed=3, scale=1.2)
DRAFTER = TARGET + random_logits(VOCAB + 1, vocab=VOCAB, seed=4, scale=0.9)


def after(known):
    """Which row of the tables follows these tokens: the prompt is one token, 1."""
    return VOCAB if len(known) == 1 else known[-1]


def conditional(known, params):
    """The target's distribution after these tokens, written out in numpy."""
    logits = TARGET[after(known)].double().numpy().copy()
    repetition = params.repetition_penalty or 1.0
    for token in set(known):
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in known[1:]:
        logits[token] -= params.frequency_penalty
    for token in set(known[1:]):
        logits[token] -= params.presence_penalty
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    logits[list(params.banned_token_ids)] = -np.inf
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if params.top_p is not None:
        p[order[np.cumsum(p[order]) - p[order] >= params.top_p]] = 0
    if params.top_k:
        p[order[params.top_k :]] = 0
    return p / p.sum()


def joint_of(params, length):
    """Token tuples -> their probability."""
    expected = {(): 1.0}
    for _ in range(length):
        expected = {
            (*ids, token): mass * p
            for ids, mass in expected.items()
            for token, p in enumerate(conditional([1, *ids], params))
            if p > 0
        }
    return expected


def propose(kind, sampler, ids, k, rng):
    """Return drafts of k ids for each sequence and what they were drawn from."""
    if kind == "certain":  # a drafter of its own mind, such as an n-gram's
        drafts = rng.integers(0, VOCAB, (len(ids), k)).tolist()
        return [tuple(draft) for draft in drafts], {}
    if kind == "likeliest":  # where what is accepted weighs most
        drafts = [()] * len(ids)
        for _ in range(k):
            drafts = [(*draft, int(TARGET[after([1, *draft])].argmax())) for draft in drafts]
        return drafts, {}
    if kind == "skewed":  # the draws of another temperature, with true probabilities, in float32
        q = torch.softmax(DRAFTER / 0.5, -1).numpy()
        drafts, given = [()] * len(ids), [[] for _ in ids]
        for _ in range(k):
            for i in range(len(ids)):
                row_q = q[after([1, *drafts[i]])]
                given[i].append(torch.from_numpy(row_q.copy()))
                drafts[i] = (*drafts[i], int(rng.choice(VOCAB, p=row_q.astype(float) / row_q.sum(dtype=float))))
        return drafts, {
            one: rejection.trusted(torch.stack(rows_q), VOCAB) for one, rows_q in zip(ids, given, strict=True)
        }
    # As a model that drafts does: from its own logits, as the request would choose.
    drafts, given = [()] * len(ids), []
    for _ in range(k):
        logits = torch.stack([DRAFTER[after([1, *draft])] for draft in drafts])
        draft = sampler.guess(ids, drafts, logits)
        given.append(draft.probabilities)
        drafts = [(*before, token) for before, token in zip(drafts, draft.token_ids, strict=True)]
    return drafts, {one: torch.stack([q[i] for q in given]) for i, one in enumerate(ids)}


def sample(params, kind, *, count, length, k, first_seed=0, batch=2500):
    """Count what a sampler that verifies by rejection says, over `length` tokens."""
    joint, num_drafted, num_accepted = Counter(), 0, 0
    rng = np.random.default_rng(5)
    for start in range(first_seed, first_seed + count, batch):
        sampler = Sampler(VOCAB, verify="rejection")
        ids = [enter(sampler, str(i), params, prompt=(1,), seed=start + i) for i in range(batch)]
        pending = ids
        while pending:
            drafts, given = propose(kind, sampler, pending, k, rng)
            known = [tuple(sampler.token_ids(one)) for one in pending]
            rows = [row(one, prompt=had, drafts=d) for one, had, d in zip(pending, known, drafts, strict=True)]
            logits = [
                TARGET[after([*had, *draft[:depth]])]
                for had, draft in zip(known, drafts, strict=True)
                for depth in range(k + 1)
            ]
            results = sampler.choose(rows, torch.stack(logits), given)
            num_drafted += k * len(rows)
            num_accepted += sum(len(result.token_ids) - 1 for result in results)
            pending = [one for one in pending if len(sampler.token_ids(one)) <= length]
        joint.update(tuple(list(sampler.token_ids(one))[1 : length + 1]) for one in ids)
    return joint, num_accepted / num_drafted


def p_value(joint, params, length):
    expected = joint_of(params, length)
    assert set(joint) <= set(expected), "a token that the request excludes was drawn"
    total = sum(joint.values())
    # Cells of fewer than five are put together, as the test's approximation asks.
    pairs = [(joint[ids], total * mass) for ids, mass in expected.items()]
    large = [pair for pair in pairs if pair[1] >= 5]
    small = [pair for pair in pairs if pair[1] < 5]
    if small:
        large.append((sum(o for o, _ in small), sum(e for _, e in small)))
    return chisquare([o for o, _ in large], [e for _, e in large]).pvalue


SETTINGS = {
    "temperature 0.7": SamplingParams(temperature=0.7),
    "temperature 1.3 and top-p": SamplingParams(temperature=1.3, top_p=0.8),
    "top-k, bias and a ban": SamplingParams(temperature=1, top_k=4, logit_bias={2: 0.5}, banned_token_ids=(5,)),
    "penalties": SamplingParams(
        temperature=1.3, top_p=0.8, presence_penalty=0.8, frequency_penalty=0.4, repetition_penalty=1.3
    ),
}


KINDS = ("certain", "skewed", "model")
#: Each drafter and each setting, once.
SOME = list(zip(SETTINGS, ("model", "skewed", "certain", "model"), strict=True))


@pytest.mark.parametrize(("name", "kind"), SOME)
def test_two_tokens_together_have_the_targets_distribution(name, kind):
    """X03: of a vocabulary of 8, k = 3."""
    joint, accepted = sample(SETTINGS[name], kind, count=5_000, length=2, k=3)
    assert p_value(joint, SETTINGS[name], 2) > 1e-3
    assert 0.02 < accepted < 0.98, "both ways of the rule are taken"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_two_tokens_have_the_distribution_with_each_drafter_and_setting(name, kind):
    joint, _ = sample(SETTINGS[name], kind, count=20_000, length=2, k=3, first_seed=10**5)
    assert p_value(joint, SETTINGS[name], 2) > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "kind"), SOME)
def test_three_tokens_together_have_the_targets_distribution(name, kind):
    joint, _ = sample(SETTINGS[name], kind, count=40_000, length=3, k=3, first_seed=10**6)
    assert p_value(joint, SETTINGS[name], 3) > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("error", [1.0, 0.98, 1.02])
def test_an_error_of_two_percent_in_the_rule_is_seen(monkeypatch, error):
    """The same test, on a rule that accepts a little too seldom or too often, fails.

    At a low temperature, where drafts of the likeliest token carry about half of the distribution.
    """
    numbers = rejection._numbers

    def wrong(guesses, purpose):
        found = numbers(guesses, purpose)
        return found / error if purpose == rejection.ACCEPT else found

    params = SamplingParams(temperature=0.3)
    monkeypatch.setattr(rejection, "_numbers", wrong)
    joint, _ = sample(params, "likeliest", count=100_000, length=2, k=2, first_seed=10**6)
    assert (p_value(joint, params, 2) > 1e-3) == (error == 1)


def test_a_wrong_rule_is_seen_in_short_runs_too(monkeypatch):
    """Drawing again from p in place of max(p - q, 0), the classic mistake."""
    monkeypatch.setattr(rejection, "_replacements", lambda p, q, numbers: replaced(p, p * 0, numbers))
    params = SETTINGS["temperature 0.7"]
    joint, _ = sample(params, "model", count=2_500, length=2, k=2)
    assert p_value(joint, params, 2) < 1e-6


replaced = rejection._replacements


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_distributions_are_those_that_plain_draws_have():
    logits = random_logits(60, vocab=300, seed=8)
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, typical_p=y)
        for t, k, p, m, y in [(1, 0, 1, 0, 1), (0.3, 5, 1, 0, 1), (2, 0, 0.7, 0, 1), (1, 90, 0.9, 0.01, 0.6)]
    ] * 15
    before = logits.clone()
    from intarsia.sampling.settings import Settings
    from intarsia.types import SamplingDefaults

    found = rejection.distributions(logits, [Settings.of(p.filled(SamplingDefaults())) for p in params])
    torch.testing.assert_close(found, probabilities(logits, params), rtol=1e-12, atol=0)
    assert torch.equal(logits, before)


def test_target_probabilities_and_drafts_are_not_modified_in_place():
    """X03."""
    params = SamplingParams(temperature=0.9, top_p=0.8, seed=3)
    sampler = Sampler(VOCAB, verify="rejection")
    one = enter(sampler, "a", params, prompt=(1,))
    q = torch.softmax(DRAFTER[:2].double(), -1)
    given, logits = {one: q.clone()}, TARGET[:3].clone()
    sampler.choose([row(one, prompt=(1,), drafts=(2, 3))], logits, given)
    assert torch.equal(given[one], q) and torch.equal(logits, TARGET[:3])


def outcome(seed, *, others=(), drafts=(2, 3), name="a"):
    """What one sequence says in a batch."""
    sampler = Sampler(VOCAB, verify="rejection")
    params = SamplingParams(temperature=1.2)
    ids = [enter(sampler, str(other), params, prompt=(1,), seed=other) for other in others]
    mine = enter(sampler, name, params, prompt=(1,), seed=seed)
    rows = [row(one, prompt=(1,), drafts=(4,)) for one in ids] + [row(mine, prompt=(1,), drafts=drafts)]
    tables = [TARGET[[VOCAB, 4]]] * len(ids) + [TARGET[[VOCAB, *drafts]]]
    given = {mine: torch.softmax(DRAFTER[[VOCAB, *drafts[:-1]]].double(), -1)} if drafts else {}
    return sampler.choose(rows, torch.cat(tables), given)[-1].token_ids


def test_an_outcome_depends_on_its_own_seed_and_drafts_alone():
    for seed in range(200):
        assert outcome(seed) == outcome(seed, others=(7, 8, 9)) == outcome(seed, name="b")
    assert len({outcome(seed) for seed in range(200)}) > 5


def test_a_row_without_drafts_draws_what_plain_decoding_draws():
    plain = Sampler(VOCAB)
    params = SamplingParams(temperature=1.2)
    for seed in range(50):
        one = enter(plain, "a", params, prompt=(1,), seed=seed)
        (expected,) = plain.choose([row(one, prompt=(1,))], TARGET[[VOCAB]].clone())
        assert outcome(seed, drafts=()) == expected.token_ids


def test_a_greedy_row_is_verified_by_equality():
    best = int(TARGET[VOCAB].argmax())
    following = int(TARGET[best].argmax())
    for draft in range(VOCAB):
        sampler = Sampler(VOCAB, verify="rejection")
        one = enter(sampler, "a", SamplingParams(temperature=0), prompt=(1,))
        given = {one: torch.full((1, VOCAB), 1 / VOCAB, dtype=torch.float64)}
        (result,) = sampler.choose([row(one, prompt=(1,), drafts=(draft,))], TARGET[[VOCAB, draft]], given)
        assert result.token_ids == ((best, following) if draft == best else (best,))


def test_certain_drafts_are_accepted_as_often_as_under_equality():
    counts = {}
    for verify in ("equal", "rejection"):
        sampler = Sampler(VOCAB, verify=verify)
        params = SamplingParams(temperature=1.1)
        ids = [enter(sampler, str(i), params, prompt=(1,), seed=i) for i in range(4_000)]
        rows: list[Row] = [row(one, prompt=(1,), drafts=(6,)) for one in ids]
        results = sampler.choose(rows, TARGET[[VOCAB, 6]].repeat(len(ids), 1))
        counts[verify] = sum(len(result.token_ids) == 2 for result in results)
    p = conditional([1], SamplingParams(temperature=1.1))[6]
    for count in counts.values():
        assert chisquare([count, 4_000 - count], [4_000 * p, 4_000 * (1 - p)]).pvalue > 1e-3


@pytest.mark.parametrize(
    "bad",
    [
        torch.full((2, VOCAB), float("nan")),
        torch.full((2, VOCAB), -1.0),
        torch.zeros(2, VOCAB),
        torch.ones(2, VOCAB - 1),
        torch.ones(VOCAB),
        torch.full((2, VOCAB), float("inf")),
    ],
    ids=["nan", "negative", "zero", "narrow", "flat", "inf"],
)
def test_what_are_no_probabilities_are_not_trusted(bad):
    assert rejection.trusted(bad, VOCAB) is None


def test_probabilities_of_ids_that_no_token_has_are_left_out():
    found = rejection.trusted(torch.tensor([[1.0, 1.0, 2.0, 4.0]]), 3)
    assert found.tolist() == [[0.25, 0.25, 0.5]]


def test_a_draft_that_its_drafter_calls_impossible_counts_as_certain():
    """Else it would be accepted wherever the target can say it."""
    params = SamplingParams(temperature=1.1)
    sampler = Sampler(VOCAB, verify="rejection")
    ids = [enter(sampler, str(i), params, prompt=(1,), seed=i) for i in range(4_000)]
    q = torch.full((1, VOCAB), 1 / 7, dtype=torch.float64)
    q[0, 6] = 0
    rows = [row(one, prompt=(1,), drafts=(6,)) for one in ids]
    results = sampler.choose(rows, TARGET[[VOCAB, 6]].repeat(len(ids), 1), dict.fromkeys(ids, q))
    joint = Counter(result.token_ids[:1] for result in results)
    assert p_value(joint, params, 1) > 1e-3
