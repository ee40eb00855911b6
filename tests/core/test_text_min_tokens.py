"""Stop texts and min_tokens: what the first tokens complete is let pass, whatever is held back and however ids come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia import SamplingParams
from intarsia.text import TextStream, Tokenizer
from intarsia.types import TokenizerSpec
from models import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte."""
    return Tokenizer.from_spec(TokenizerSpec(definition=tiny_tokenizer().backend_tokenizer.to_str(), eos_ids=(256,)))


def expected(text, stops, include, min_tokens):
    """Return the text, and how many bytes of it are run: the first stop text that a later byte completes ends it."""
    for end in range(1, len(text) + 1):
        num_bytes = len(text[:end].encode())
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if num_bytes > min_tokens and ending:
            return text[: end if include else end - max(map(len, ending))], num_bytes
    return text, None


TEXTS = st.text("aab\u00e9\U0001f600\n", max_size=24)
STOPS = st.lists(st.text("ab\u00e9\n", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, stops=STOPS, include=st.booleans(), min_tokens=st.integers(0, 20), data=st.data())
def test_only_stop_texts_completed_after_min_tokens_count(tokenizer, text, stops, include, min_tokens, data):
    ids = tokenizer.encode(text) if text else []
    wanted, num_ids = expected(text, stops, include, min_tokens)
    stream = TextStream.open(tokenizer, SamplingParams(stop=stops, include_stop=include, min_tokens=min_tokens))
    said, done, kept = "", 0, None
    while done < len(ids) and kept is None:
        size = data.draw(st.integers(1, 5))
        part, kept = stream.push(ids[done : done + size])
        said += part
        done += size if kept is None else kept
    if kept is None:
        said += stream.finish()
    assert (said, done if stream.stopped else None) == (wanted, num_ids)


def test_a_stop_text_that_was_let_pass_can_begin_the_next(tokenizer):
    stream = TextStream.open(tokenizer, SamplingParams(stop=["aa"], min_tokens=2))
    assert stream.push(tokenizer.encode("aaab")) == ("a", 3)
