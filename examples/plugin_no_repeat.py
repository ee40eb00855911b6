"""A plugin in one file: a logits processor that never lets an answer say the same n tokens twice.

Run it: `python examples/plugin_no_repeat.py`. Here the module is passed to the engine of its own process. As a package
it is found by itself, through an entry point in its pyproject.toml::

    [project.entry-points.intarsia]
    no_repeat = "plugin_no_repeat"
"""

# ruff: noqa: ANN001, ANN201, ARG002 (types are left out, for README shows this too)
import sys

from attrs import field, frozen, validators

from intarsia import Provider, hookimpl
from intarsia.protocols import LogitsProcessor


@frozen(kw_only=True)
class NoRepeat(LogitsProcessor):
    size: int = field(default=3, validator=validators.ge(1))

    def open(self, params, num_prompt):
        return Answer(self.size, num_prompt)


@frozen
class Answer:
    size: int
    num_prompt: int

    def process(self, token_ids, logits_V):
        answer = token_ids[self.num_prompt :]
        last = answer[len(answer) - self.size + 1 :]
        for i in range(len(answer) - self.size + 1):
            if answer[i : i + self.size - 1] == last:
                logits_V[answer[i + self.size - 1]] = float("-inf")


@hookimpl
def provide_logits_processors():
    summary = "never the same n tokens twice in an answer"
    return [Provider(key="no_repeat", summary=summary, options=NoRepeat, build=lambda context: context.options)]


def main() -> None:
    """Answer with and without it."""
    from intarsia import Engine, SamplingParams

    params = SamplingParams(max_tokens=16, temperature=0)
    plugins = {"no_repeat": sys.modules[__name__]}
    for processors in ([], [{"use": "no_repeat", "size": 4}]):
        config = {"model": "smollm2", "logits_processors": processors}
        with Engine.from_config(config, plugins=plugins) as engine:
            print(f"--- logits_processors = {processors}")
            print(engine.generate("1, 2, 1, 2, 1, 2,", params)[0].text)


if __name__ == "__main__":
    main()
