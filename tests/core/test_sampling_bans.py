"""What is banned is never chosen: ids, words however they are cut, and the end before min_tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinNewTokensLengthLogitsProcessor, NoBadWordsLogitsProcessor

from intarsia.sampling import Sampler
from intarsia.sampling.words import Vocabulary, Words
from intarsia.types import SamplingParams
from sampling_rows import VOCAB, enter, generate, random_logits, row
from smollm import smollm_tokenizer


class Pieces:
    """A tokenizer of given pieces, in bytes; b"" is a special token."""

    def __init__(self, *pieces):
        self.pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
        self.read = 0

    def token_bytes(self, token_id):
        self.read += 1
        return self.pieces[token_id]

    def text(self, ids):
        return b"".join(self.pieces[token] for token in ids)


def logits_after(ids, vocab=VOCAB):
    return random_logits(1, vocab=vocab, seed=sum((i + 1) * token for i, token in enumerate(ids)) % 2**31)[0]


# --- ids --------------------------------------------------------------------------------------------------------------


def test_banned_ids_are_transformers_bad_words_of_one_token_and_no_bias_brings_them_back():
    banned = [3, 17, 44]
    logits = random_logits(1)
    logits[0, banned] += 20
    expected = NoBadWordsLogitsProcessor([[token] for token in banned])(torch.tensor([[1, 2, 3]]), logits.clone())
    sampler = Sampler(VOCAB)
    params = SamplingParams(temperature=0, banned_token_ids=banned, logit_bias={17: 10000, VOCAB + 5: 3})
    found = logits.clone()
    (result,) = sampler.choose([row(enter(sampler, "a", params))], found)
    assert torch.equal(found, expected)
    assert result.token_ids == (int(expected.argmax()),)


def test_ids_that_no_token_has_disturb_nothing():
    sampler = Sampler(VOCAB)
    params = SamplingParams(
        temperature=0, banned_token_ids=[VOCAB, 10**9], logit_bias={VOCAB: 9.0, 10**9: 9.0}, min_tokens=2
    )
    sequence_id = enter(sampler, "a", params, stop_ids=(VOCAB, 10**9))
    logits = torch.cat([random_logits(1), torch.full((1, 14), 3.0)], dim=1)
    expected = logits.clone()
    (result,) = sampler.choose([row(sequence_id)], logits)
    assert torch.equal(logits, expected)
    assert result.token_ids == (int(expected[0, :VOCAB].argmax()),)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_with_everything_banned_is_its_own_error(temperature):
    sampler = Sampler(VOCAB)
    ids = [
        enter(sampler, "a", SamplingParams(temperature=temperature, banned_token_ids=range(VOCAB))),
        enter(sampler, "b", SamplingParams(temperature=temperature)),
    ]
    results = sampler.choose([row(i) for i in ids], random_logits(2))
    assert "no token is allowed" in results[0].error and results[0].token_ids == ()
    assert results[1].error is None and len(results[1].token_ids) == 1


# --- min_tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_nothing_that_ends_the_answer_comes_before_min_tokens(min_tokens, drafted):
    """S07: the bias wants the end at once."""
    stops = (2, 0, 19)
    params = SamplingParams(temperature=0, min_tokens=min_tokens, max_tokens=32, logit_bias={2: 100, 0: 60, 19: 30})
    drafts = (lambda answer: [2, 2, 2] if len(answer) % 2 else [7, 2]) if drafted else None
    answer, _ = generate(params, logits_after, min_tokens + 1, drafts=drafts, stop_ids=stops)
    assert not set(answer[:min_tokens]) & set(stops)
    assert answer[min_tokens] == 2


def test_min_tokens_forbids_what_transformers_forbids():
    params = SamplingParams(temperature=0, min_tokens=5)
    processor = MinNewTokensLengthLogitsProcessor(3, 5, [2, 9])
    for num_answer in (0, 4, 5, 6):
        sampler = Sampler(VOCAB)
        answer = [7] * num_answer
        sequence_id = enter(sampler, "a", params, answer=answer, stop_ids=(2, 9))
        logits = random_logits(1)
        expected = processor(torch.tensor([[1, 2, 3, *answer]]), logits.clone())
        sampler.choose([row(sequence_id, prompt=(1, 2, 3, *answer))], logits)
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("temperature", [0, 1])
def test_where_only_the_end_may_follow_the_answer_ends_before_min_tokens(temperature):
    sampler = Sampler(VOCAB)
    banned = [token for token in range(VOCAB) if token not in (2, 9)]
    params = SamplingParams(temperature=temperature, min_tokens=5, banned_token_ids=banned, seed=1)
    ids = [enter(sampler, "a", params, stop_ids=(2, 9)), enter(sampler, "b", params, stop_ids=(2,))]
    logits = random_logits(1).repeat(2, 1)
    logits[:, 2] = logits[:, 9] + 20
    results = sampler.choose([row(i) for i in ids], logits)
    # The first may end alone; the second may go on with 9, so that it may not end.
    assert [result.token_ids for result in results] == [(2,), (9,)]


# --- words ------------------------------------------------------------------------------------------------------------

#: Letters in every cut, a token without bytes (9), and two characters in parts.
LETTERS = Pieces(
    *("a", "b", "ab", "aab", "ba", "bb", "aa", "c", "abc", b""),
    *(b"\xf0\x9f", b"\x98\x80", "\u00e9", b"\xc3", b"\xa9"),
)
WORDS = ["a", "ab", "aab", "abab", "bb", "cab", "\u00e9", "\U0001f600", "b\u00e9"]


@settings(deadline=None, max_examples=200)
@given(
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
    answer=st.lists(st.integers(0, 14), max_size=8),
)
def test_exactly_the_tokens_that_complete_a_word_are_forbidden(words, answer):
    vocabulary = Vocabulary.of(LETTERS, 15)
    words = [word.encode() for word in words]
    clean = []
    for token in answer:  # an answer that has kept to the rule so far
        if not any(word in LETTERS.text([*clean, token]) for word in words):
            clean.append(token)
    for split in range(len(clean) + 1):
        state = Words(vocabulary, tuple(vocabulary.word(word.decode()) for word in words))
        for token in clean[:split]:
            state.extend([token])
        found = {int(i) for ids in state.forbidden(clean[split:]) for i in ids}
        assert found == {t for t in range(15) if any(word in LETTERS.text([*clean, t]) for word in words)}


@settings(deadline=None, max_examples=60)
@given(
    words=st.lists(st.text("abc\u00e9\U0001f600", min_size=1, max_size=4), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 1.0]),
    guesses=st.lists(st.integers(0, 14), max_size=30),
)
def test_no_answer_holds_a_banned_word_with_drafts_or_without(words, seed, temperature, guesses):
    params = SamplingParams(temperature=temperature, banned_words=words, seed=seed)

    def logits(ids):
        """9, which has no bytes, is always left."""
        scores = logits_after([seed, *ids], vocab=15)
        scores[9] -= 3
        return scores

    plain, _ = generate(params, logits, 30, num_ids=15, tokenizer=LETTERS)
    assert not any(word.encode() in LETTERS.text(plain) for word in words)
    drafts = lambda answer: guesses[len(answer) : len(answer) + 4]  # noqa: E731
    assert generate(params, logits, 30, num_ids=15, tokenizer=LETTERS, drafts=drafts)[0] == plain
    again, _ = generate(params, logits, 30, num_ids=15, tokenizer=LETTERS, answer=plain[:11])
    assert again == plain


def test_the_prompt_may_hold_and_begin_a_banned_word():
    params = SamplingParams(temperature=0, banned_words=["ab"])
    sampler = Sampler(15, (), LETTERS)
    sequence_id = enter(sampler, "a", params, prompt=(2, 0))
    logits = torch.zeros(1, 15)
    logits[0, 1] = 5.0
    (result,) = sampler.choose([row(sequence_id, prompt=(2, 0))], logits)
    assert result.token_ids == (1,)


def test_a_vocabulary_is_read_once_and_only_where_words_are_banned():
    tokenizer = Pieces(*(chr(97 + i % 26) for i in range(VOCAB)))
    sampler = Sampler(VOCAB, (), tokenizer)
    enter(sampler, "a", SamplingParams())
    assert tokenizer.read == 0
    for name in "bcd":
        enter(sampler, name, SamplingParams(banned_words=[f"{name}x"]))
    assert tokenizer.read == VOCAB


def test_banned_words_without_a_tokenizer_end_that_sequence_and_say_why():
    sampler = Sampler(VOCAB)
    ids = [enter(sampler, "a", SamplingParams(banned_words=["ab"])), enter(sampler, "b", SamplingParams())]
    results = sampler.choose([row(i) for i in ids], random_logits(2))
    assert "banned_words" in results[0].error and not results[0].token_ids
    assert results[1].error is None


def test_many_words_leave_a_bounded_index():
    vocabulary = Vocabulary.of(LETTERS, 15)
    for i in range(1000):
        vocabulary.word(f"word {i}")
    assert len(vocabulary._words) <= 256


def test_a_word_longer_than_any_answer_costs_little_and_bans_nothing():
    vocabulary = Vocabulary.of(LETTERS, 15)
    word = vocabulary.word("ab" * 500_000)
    assert len(word.enders) <= 3 and len(word.holders_N) == 0


def test_with_a_real_vocabulary_every_cut_of_a_word_is_found():
    tokenizer = smollm_tokenizer()
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size)
    ids_of = {piece: token for token, piece in enumerate(vocabulary.tokens) if piece}

    def cuts(text):
        """Every way to cut a text into tokens."""
        if not text:
            return [[]]
        heads = [text[:size] for size in range(1, len(text) + 1) if text[:size] in ids_of]
        return [[ids_of[head], *rest] for head in heads for rest in cuts(text[len(head) :])]

    for word in ("Paris", " of the", "\U0001f600", "caf\u00e9"):
        state = Words(vocabulary, (vocabulary.word(word),))
        state.extend(tokenizer.encode("We say "))
        ways = cuts(word.encode())
        assert len(ways) > 1
        for *before, last in ways:
            assert last in {int(token) for ids in state.forbidden(before) for token in ids}
        assert ids_of[b"We"] not in {int(token) for ids in state.forbidden(()) for token in ids}
