"""Structured output in tests: requests, processors of a small vocabulary, and answers drawn token by token."""

import json
import random

import torch

from intarsia.text import Tokenizer
from intarsia.types import SamplingParams, TokenizerSpec
from intarsia_structured.compiler import Compiler
from intarsia_structured.options import StructuredOptions
from intarsia_structured.processor import StructuredOutput, vocabulary_of
from models import TOKENIZER_SIZE, tiny_tokenizer

KEY = "structured_output"
#: The byte-level tokenizer's end, and a token of text, which is the end of some models besides.
EOS = TOKENIZER_SIZE - 1
TEXT_EOS = 255
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}


def ask(kind, value, **params):
    """Return the parameters of a request for a structure."""
    return SamplingParams(logits_processors={KEY: {kind: value}}, **params)


def byte_tokenizer(eos_ids=(EOS,)):
    """Return the tokenizer of the tiny models: an entry a byte, and an end."""
    return Tokenizer.from_spec(TokenizerSpec(definition=tiny_tokenizer().backend_tokenizer.to_str(), eos_ids=eos_ids))


def processor_of(eos_ids=(EOS,), tokenizer=None, num_ids=TOKENIZER_SIZE, **options):
    """Return the processor of a model with this tokenizer."""
    options = StructuredOptions(**options)
    return StructuredOutput(options, Compiler(vocabulary_of(tokenizer or byte_tokenizer(eos_ids), num_ids), options))


def opened(processor, params, num_prompt=0):
    """Prepare and open, as an engine does."""
    future = processor.prepare(params)
    if future is not None:
        future.result()
    return processor.open(params, num_prompt)


def allowed(sequence, ids, size=TOKENIZER_SIZE):
    """Return the ids that may follow; never none."""
    logits = torch.zeros(size)
    sequence.process(ids, logits)
    left = logits.isfinite().nonzero().flatten().tolist()
    assert left, f"nothing may follow {ids}"
    return left


def drawn(sequence, seed, eos_ids=(EOS,), most=300, prefer=()):
    """Draw an answer evenly from what is allowed, some ids preferred; return its ids, and whether it ended."""
    draws, ids = random.Random(seed), []
    while len(ids) < most:
        choices = allowed(sequence, ids)
        one = draws.choice([each for each in choices if each in prefer] or choices)
        if one in eos_ids:
            return ids, True
        ids.append(one)
    return ids, False


def text_of(ids):
    """Return the text of the byte tokenizer's ids, which must be valid UTF-8."""
    tokenizer = byte_tokenizer()
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def loads(text):
    """Read JSON strictly: nothing that Python's reader takes besides."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)
