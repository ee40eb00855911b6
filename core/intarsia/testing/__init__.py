"""What tests of engines and plugins need, shipped in the wheel.

`scripted` is a plugin whose runner says given ids in turn: text, stops, streams and speculation become exact.
`prompt_logits` reads the logits of a prompt's every position.

Contracts, as tests to inherit, one module a kind of part: `suites` lists them. They run with what
`pip install "intarsia[testing]"` brings.
"""

from intarsia.testing import scripted
from intarsia.testing.logits import poison_cache, prompt_logits

__all__ = ["poison_cache", "prompt_logits", "scripted"]
