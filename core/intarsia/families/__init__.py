"""What families of models are written with: a checkpoint's config read with care, and names for its tensors.

A family is a `Family`: a function from a config to a `DecoderSpec`, and the `Names` of its checkpoints' tensors.
`docs/adding-a-family.md` shows one. Public; needs no torch.
"""

from intarsia.families.decoder import (
    ACTIVATIONS,
    attention,
    decoder,
    head_dim,
    is_tied,
    late_windows,
    mixture,
    mlp,
    num_layers,
    one_window,
    windows,
)
from intarsia.families.family import Family, provider
from intarsia.families.fields import MAX_DIM, MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, MAX_LEN, Fields
from intarsia.families.names import Names
from intarsia.families.rope import max_len, read_rope

__all__ = [
    "ACTIVATIONS",
    "MAX_DIM",
    "MAX_EXPERTS",
    "MAX_HEADS",
    "MAX_LAYERS",
    "MAX_LEN",
    "Family",
    "Fields",
    "Names",
    "attention",
    "decoder",
    "head_dim",
    "is_tied",
    "late_windows",
    "max_len",
    "mixture",
    "mlp",
    "num_layers",
    "one_window",
    "provider",
    "read_rope",
    "windows",
]
