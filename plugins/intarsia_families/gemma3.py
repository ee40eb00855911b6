"""Gemma 3 with an image encoder (Gemma Team 2025): its text model, which `text_config` describes, alone."""

from __future__ import annotations

from attrs import evolve

from intarsia.families import Family, Fields, is_tied
from intarsia.types import DecoderSpec
from intarsia_families.gemma2 import NAMES
from intarsia_families.gemma3_text import read_text


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    text = fields.table("text_config")
    head = "language_model.lm_head.weight" if _SAVED.fits(tensor_names) else "lm_head.weight"
    # transformers 5 asks the whole config, 4 asked the text's.
    asked = fields if fields.has("tie_word_embeddings") else text
    return read_text("gemma3", text, tensor_names, tied=is_tied(asked, tensor_names, head=head))


_IGNORED = (*NAMES.ignored, "*vision_tower.*", "*multi_modal_projector.*")
#: What published checkpoints hold, and transformers writes.
_SAVED = evolve(
    NAMES,
    embed="language_model.model.embed_tokens",
    layer="language_model.model.layers.{}",
    norm="language_model.model.norm",
    head="language_model.lm_head",
    ignored=_IGNORED,
)
#: What transformers calls them from 4.52 on; tools that take its modules' names write these.
_LOADED = evolve(
    NAMES,
    embed="model.language_model.embed_tokens",
    layer="model.language_model.layers.{}",
    norm="model.language_model.norm",
    ignored=_IGNORED,
)

FAMILY = Family(_read, _SAVED, other_names=(_LOADED,), model_class="ForConditionalGeneration")
