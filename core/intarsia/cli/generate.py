"""`intarsia generate`: answer one prompt, as a stream of text or as one JSON object."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING

import click

from intarsia.cli.answers import Figures, Printer, as_json
from intarsia.cli.loading import check_model, opened
from intarsia.cli.options import config_options, read_token_ids, sampling_options
from intarsia.cli.signals import Signals
from intarsia.cli.terminal import is_terminal, note, write
from intarsia.errors import ExecutionError
from intarsia.types import EngineConfig, Prompt, SamplingParams

if TYPE_CHECKING:
    from intarsia.engine import Engine


@click.command()
@click.argument("prompt", required=False)
@config_options
@click.option("--chat", is_flag=True, help="The prompt is a user's message, and the answer the assistant's.")
@click.option("--token-ids", callback=read_token_ids, metavar="IDS", help="A prompt of token ids, such as 1,2,3.")
@sampling_options("n", "ignore_eos", "logprobs", "prompt_logprobs")
@click.option("-n", type=int, default=1, metavar="N", help="Independent answers. [default: 1]")
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's end of sequence.")
@click.option(
    "--logprobs", type=int, metavar="K", help="Log-probabilities of each token and of the K likeliest; --json."
)
@click.option(
    "--prompt-logprobs",
    type=int,
    metavar="K",
    help="The same for each token of the prompt; --max-tokens 0 does only that.",
)
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--report", is_flag=True, help="Close with figures and the parts that ran, on stderr.")
@click.pass_obj
def generate(
    signals: Signals,
    *,
    prompt: str | None,
    config: EngineConfig,
    chat: bool,
    token_ids: tuple[int, ...] | None,
    params: SamplingParams,
    wants_json: bool,
    report: bool,
) -> None:
    """Answer PROMPT, or the text on stdin.

    The answer is written as it comes. A model without a tokenizer answers with token ids.
    """
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None and not wants_json:
            raise click.UsageError(f"--{name.replace('_', '-')} is shown with --json")
    check_model(config)
    asked = _read_prompt(prompt, token_ids, chat=chat)
    with opened(config, signals) as engine:
        figures, errors = _answer(engine, asked, params, wants_json=wants_json)
        parts = " ".join(f"{s.slot}={s.provider.key}" for s in engine.parts.selections)
        where = f"{engine.parts.engine.device} {engine.parts.engine.dtype}"
    if errors:
        raise ExecutionError(f"the answer ended with an error: {'; '.join(errors)}")
    if report:
        note(f"{figures}\nparts: {parts} on {where}")


def _read_prompt(text: str | None, token_ids: tuple[int, ...] | None, *, chat: bool) -> Prompt:
    """Return the one prompt that was given: as an argument, as ids, or on stdin."""
    if token_ids is not None:
        if text is not None:
            raise click.UsageError("PROMPT and --token-ids are both given; one is the prompt")
        if chat:
            raise click.UsageError("--chat takes a text, not --token-ids")
        return token_ids
    if text is None:
        if sys.stdin is None or is_terminal(sys.stdin):
            raise click.UsageError("no prompt is given: name PROMPT or --token-ids, or write it to stdin")
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise click.UsageError(f"the prompt on stdin is not UTF-8 text: {error}") from None
        # The line's end is the shell's, not the prompt's.
        text = text.removesuffix("\n").removesuffix("\r")
    return [{"role": "user", "content": text}] if chat else text


def _answer(engine: Engine, prompt: Prompt, params: SamplingParams, *, wants_json: bool) -> tuple[Figures, list[str]]:
    """Print the answer; return its figures, and what went wrong with its choices."""
    return _print_json(engine, prompt, params) if wants_json else _print_text(engine, prompt, params)


def _print_text(engine: Engine, prompt: Prompt, params: SamplingParams) -> tuple[Figures, list[str]]:
    printer = Printer(params.n, has_text=engine.parts.tokenizer is not None)
    with contextlib.closing(engine.stream(prompt, params)) as outputs:
        for output in outputs:
            printer.show(output)
    return Figures.of_outputs(printer.last), [output.error for output in printer.last if output.error]


def _print_json(engine: Engine, prompt: Prompt, params: SamplingParams) -> tuple[Figures, list[str]]:
    with contextlib.redirect_stdout(sys.stderr):
        completion = engine.generate([prompt], params)[0]
    write(json.dumps(as_json(completion), allow_nan=False) + "\n")
    return Figures.of_completion(completion), [choice.error for choice in completion.choices if choice.error]
