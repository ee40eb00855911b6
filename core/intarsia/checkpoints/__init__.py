"""What loaders of Hugging Face folders are written with: their files read as untrusted input. Public.

`open_tensors` lists the tensors of a `ModelFolder` by name, `read_config` and its like read its JSON files, and
`FolderCheckpoint` is a folder that is open. Needs no torch to import.
"""

from intarsia.checkpoints.checkpoint import FolderCheckpoint
from intarsia.checkpoints.folder import (
    ModelFolder,
    parse_object,
    read_config,
    read_index,
    read_sampling,
    read_tokenizer,
)
from intarsia.checkpoints.safetensors import FLOATS, INDEX, SINGLE, SafetensorsTensor, open_tensors

__all__ = [
    "FLOATS",
    "INDEX",
    "SINGLE",
    "FolderCheckpoint",
    "ModelFolder",
    "SafetensorsTensor",
    "open_tensors",
    "parse_object",
    "read_config",
    "read_index",
    "read_sampling",
    "read_tokenizer",
]
