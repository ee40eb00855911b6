"""The example plugin under the contract of logits processors."""

import importlib.util
from pathlib import Path
from typing import ClassVar

from intarsia.testing.logits_processors import LogitsProcessorContract

PATH = Path(__file__).parents[2] / "examples/plugin_no_repeat.py"


class TestNoRepeat(LogitsProcessorContract):
    options: ClassVar = {"size": 2}

    def provider(self):
        spec = importlib.util.spec_from_file_location("plugin_no_repeat", PATH)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.provide_logits_processors()[0]
