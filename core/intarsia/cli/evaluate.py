"""`intarsia eval`: what compositions cost in quality."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import evolve, frozen

from intarsia.cli.loading import check_model, loading
from intarsia.cli.measuring import model_options, text_option
from intarsia.cli.signals import Signals
from intarsia.cli.terminal import show, write
from intarsia.config import load_config
from intarsia.errors import ConfigError
from intarsia.types import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

    from intarsia.corpora import Text
    from intarsia.forwarding import ComposedModel
    from intarsia.scoring import Comparison, Score

#: Tokens of a window where none is asked for, if the model takes as many.
_WINDOW = 1024


@click.group("eval")
def evaluate() -> None:
    """Measure what compositions cost in quality."""


@frozen(kw_only=True)
class _Asked:
    """What is measured: one composition by its name, or two."""

    configs: dict[str, EngineConfig]
    text: Text
    tokens: int
    window: int | None
    stride: int | None


@evaluate.command()
@model_options
@text_option("Python's help topics")
@click.option(
    "--tokens",
    type=click.IntRange(0),
    default=16384,
    metavar="N",
    help="How many of its first tokens; 0 is all. [default: 16384]",
)
@click.option(
    "--window", type=int, metavar="N", help=f"Tokens seen at once. [default: {_WINDOW}, or the model's fewer]"
)
@click.option("--stride", type=int, metavar="N", help="Tokens between windows. [default: half a window]")
@click.option("--vs", multiple=True, metavar="PATH=VALUE", help="Of a second composition, to compare. Repeatable.")
@click.option(
    "--compare",
    nargs=2,
    metavar="A B",
    help="Compare two compositions, each an engine.toml or a PATH=VALUE such as quantizer=int8.",
)
@click.option("--json", "wants_json", is_flag=True, help="Print a JSON object.")
@click.pass_obj
def perplexity(
    signals: Signals,
    *,
    config: EngineConfig,
    text_file: Path | None,
    tokens: int,
    window: int | None,
    stride: int | None,
    vs: tuple[str, ...],
    compare: tuple[str, str] | None,
    wants_json: bool,
) -> None:
    """Score a text by MODEL: exp of the mean negative log-likelihood of a token.

    Windows overlap, and each scores the tokens that the one before did not. Of two compositions, their KL divergence
    and how often they agree on the likeliest token are told too; both see the same tokens.
    """
    configs = _configs(config, vs, compare)
    for each in configs.values():
        check_model(each)
    with signals.held():
        import intarsia.scoring  # noqa: F401  Python breaks imports off badly
        from intarsia.corpora import evaluation_text, read_text
    text = evaluation_text() if text_file is None else read_text(text_file)
    report = _run(_Asked(configs=configs, text=text, tokens=tokens, window=window, stride=stride))
    if wants_json:
        write(json.dumps(report, indent=2, allow_nan=False) + "\n")
    else:
        show(_models(report["models"]))
        show(_facts(report))


def _configs(config: EngineConfig, vs: tuple[str, ...], compare: tuple[str, str] | None) -> dict[str, EngineConfig]:
    """Return what is measured, by name."""
    if vs and compare:
        raise click.UsageError("--vs and --compare are both given; each names the second composition")
    if vs:
        return {"as given": config, " ".join(vs): load_config(config, vs)}
    if compare is None:
        return {"as given": config}
    if compare[0] == compare[1]:
        raise click.UsageError(f"--compare: {compare[0]!r} is given twice")
    return {side: _side(config, side) for side in compare}


def _side(config: EngineConfig, side: str) -> EngineConfig:
    """Return one side of a comparison: the config with one value changed, or a file's with -m and -o on top."""
    path = Path(side)
    if "=" in side and not path.is_file():
        return load_config(config, [side])
    params = click.get_current_context().params
    if params["file"] is not None:
        raise click.UsageError(f"-c and --compare {side} both name a config file; -o is what both sides can share")
    loaded = load_config(path, params["overrides"])
    return evolve(loaded, model=evolve(loaded.model, use=config.model.use)) if config.model.use else loaded


# --- running ----------------------------------------------------------------------------------------------------------


def _run(asked: _Asked) -> dict[str, Any]:
    """Compose, check, load and score."""
    from intarsia import scoring
    from intarsia.forwarding import ComposedModel

    # What plugins print is not a part of the answer.
    with contextlib.ExitStack() as stack, loading() as progress, contextlib.redirect_stdout(sys.stderr):
        share = len(asked.configs) > 1
        models = [
            stack.enter_context(ComposedModel.compose(config, shares_device=share)) for config in asked.configs.values()
        ]
        ids, window, stride = _prepare(models, asked)
        for model in models:
            model.start(progress)
        begun = time.perf_counter()
        score = partial(scoring.perplexity, token_ids=ids, window=window, stride=stride, progress=progress)
        compare = partial(scoring.compare, token_ids=ids, window=window, stride=stride, progress=progress)
        comparison = compare(models[0], models[1]) if share else None
        scores = [score(models[0])] if comparison is None else [comparison.a, comparison.b]
        report = {
            "text": asked.text.source,
            "tokens": len(ids),
            "scored": scores[0].num_tokens,
            "window": window,
            "stride": stride,
            "windows": len(scoring.windows(len(ids), window, stride)),
            "seconds": round(time.perf_counter() - begun, 3),
            "models": [
                _about(name, config, model, score)
                for (name, config), model, score in zip(asked.configs.items(), models, scores, strict=True)
            ],
        }
    return report if comparison is None else report | {"comparison": _compared(comparison)}


def _prepare(models: list[ComposedModel], asked: _Asked) -> tuple[list[int], int, int]:
    """Return the text's ids, the window and the stride, checked before any weights load."""
    from intarsia.scoring import check_windows

    encoded = [model.encode(asked.text.content) for model in models]
    if any(ids != encoded[0] for ids in encoded):
        raise ConfigError("compare: the models' tokenizers read the text as different tokens; it takes one tokenizer")
    ids = encoded[0][: asked.tokens or None]
    longest = min(model.parts.engine.max_model_len or _WINDOW for model in models)
    window = min(_WINDOW, longest) if asked.window is None else asked.window
    stride = max(1, window // 2) if asked.stride is None else asked.stride
    for model in models:
        check_windows(model, len(ids), window, stride)
    return ids, window, stride


def _about(name: str, config: EngineConfig, model: ComposedModel, score: Score) -> dict[str, Any]:
    parts = model.parts
    return {
        "name": name,
        "model": config.model.use,
        "perplexity": score.perplexity if math.isfinite(score.perplexity) else None,
        "nll": score.nll,
        "weight_bytes": parts.weight_bytes,
        "cache_bytes_per_token": parts.layout.token_bytes,
        "device": parts.engine.device,
        "dtype": parts.engine.dtype,
        "parts": {
            slot: [each.provider.key for each in parts.selections if each.slot == slot]
            for slot in dict.fromkeys(each.slot for each in parts.selections)
        },
    }


def _compared(comparison: Comparison) -> dict[str, float]:
    return {
        "mean_kl": comparison.mean_kl,
        "max_kl": comparison.max_kl,
        "top1_agreement": comparison.agreement,
        "log_ratio": comparison.log_ratio,
        "log_ratio_error": comparison.log_ratio_error,
    }


# --- showing ----------------------------------------------------------------------------------------------------------


def _models(models: list[dict[str, Any]]) -> Table:
    """Return what is known of each model, a column each."""
    columns = _grid(len(models))
    if len(models) > 1:
        columns.add_row("", *(_text(model["name"]) for model in models))
    columns.add_row("perplexity", *(_perplexity(model["perplexity"]) for model in models))
    columns.add_row("nll", *(f"{model['nll']:.5f}" for model in models))
    columns.add_row("weights", *(f"{model['weight_bytes'] / 1e6:.1f} MB" for model in models))
    columns.add_row("runs on", *(f"{model['device']} {model['dtype']}" for model in models))
    return columns


def _facts(report: dict[str, Any]) -> Table:
    """Return what is known of all of them."""
    facts = _grid(1)
    if comparison := report.get("comparison"):
        ratio, error = comparison["log_ratio"], comparison["log_ratio_error"]
        facts.add_row("B / A", f"{math.exp(min(ratio, 700)):.5f} in perplexity, standard error {100 * error:.3f}%")
        facts.add_row("KL(A || B)", f"mean {comparison['mean_kl']:.6f}, max {comparison['max_kl']:.4f}")
        facts.add_row("top token", f"the same for {100 * comparison['top1_agreement']:.2f}%")
    facts.add_row("tokens", _text(f"{report['tokens']} of {report['text']}, {report['scored']} scored"))
    facts.add_row("windows", f"{report['windows']} of {report['window']} tokens, {report['stride']} apart")
    facts.add_row("seconds", f"{report['seconds']:.1f}")
    return facts


def _grid(columns: int) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True, min_width=len("perplexity"))
    for _ in range(columns):
        grid.add_column(overflow="fold")
    return grid


def _perplexity(value: float | None) -> str:
    return "beyond any float" if value is None else f"{value:.4f}"


def _text(value: str) -> Any:
    """A name can hold square brackets: no markup."""
    from rich.text import Text

    return Text(value)
