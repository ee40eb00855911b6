"""Perplexity and comparisons: numbers of transformers and of numpy, and each token scored once."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines import CACHE
from families import CASES, saved
from intarsia import forwarding, scoring
from intarsia.config import load_config
from intarsia.errors import CheckpointError, CompositionError, ConfigError, ExecutionError
from intarsia.forwarding import ComposedModel
from intarsia.hookspecs import hookimpl
from intarsia.scoring import compare, perplexity, windows
from intarsia.types import Provider
from models import tiny_llama, tiny_tokenizer
from smollm import smollm_transformers

BY_NAME = {case.name: case for case in CASES}
IDS = [(7 * i * i + 3 * i) % 256 for i in range(150)]


def silent(*_):
    pass


def loaded(path, **sections):
    config = {"model": str(path), "engine": {"dtype": "float32", "threads": 1}, "cache": CACHE} | sections
    model = ComposedModel.compose(load_config(config))
    model.start(silent)
    return model


@torch.no_grad()
def log_probabilities(model, ids, window, stride):
    """Return float64 log-probabilities (L, V) and the ids (L,) that they are for, by the loop of transformers' page.

    Its `target_ids[:, :-trg_len] = -100` scores what the window before did not; labels are shifted within a window, so
    that a window's own first token is never scored.
    """
    rows, targets, previous_end = [], [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        labels = [-100] * (previous_end - begin) + ids[previous_end:end]
        logits = model(torch.tensor([ids[begin:end]])).logits[0].double()
        for position, label in enumerate(labels[1:]):
            if label != -100:
                rows.append(logits[position].log_softmax(-1))
                targets.append(label)
        previous_end = end
        if end == len(ids):
            break
    return torch.stack(rows).numpy(), np.array(targets)


def nll(log_p, targets):
    return -log_p[np.arange(len(targets)), targets].mean()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("a"), layers=2)


@pytest.fixture(scope="module")
def other(tmp_path_factory, tiny):
    """A model that is near the first."""
    path, model = tiny_llama(tmp_path_factory.mktemp("b"), layers=2)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path)
    return path, model


# --- windows ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 300), st.integers(2, 50), st.integers(1, 50))
def test_every_token_is_scored_once_and_after_as_many_as_the_stride_leaves(num_tokens, window, stride):
    stride = min(stride, window)
    found = windows(num_tokens, window, stride)
    scored = [i for each in found for i in range(each.first, each.stop)]
    assert scored == sorted(set(scored))
    unscored = set(range(num_tokens)) - set(scored)
    assert unscored == ({0} & set(range(num_tokens)) if stride < window else set(range(0, num_tokens, stride)))
    for each in found:
        assert 0 < each.stop - each.start <= window
        assert each.start < each.first < each.stop
        assert each.start == 0 or each.first - each.start >= window - stride


def test_windows_of_eight_by_three_by_hand():
    spans = [(each.start, each.first, each.stop) for each in windows(13, 8, 3)]
    assert spans == [(0, 1, 8), (3, 8, 11), (6, 11, 13)]


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "stride"), [(150, 75), (400, 100), (64, 64), (64, 32), (33, 10), (2, 1), (2, 2)])
def test_perplexity_equals_transformers_in_strided_windows(tiny, window, stride):
    path, reference = tiny
    log_p, targets = log_probabilities(reference, IDS, window, stride)
    with loaded(path) as model:
        score = perplexity(model, IDS, window=window, stride=stride, progress=silent)
    assert score.num_tokens == len(targets)
    assert score.nll == pytest.approx(nll(log_p, targets), rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(nll(log_p, targets)), rel=1e-4)


def test_small_pieces_of_tokens_and_of_probabilities_change_nothing(tiny, monkeypatch):
    with loaded(tiny[0]) as model:
        whole = perplexity(model, IDS, window=64, stride=20, progress=silent)
        monkeypatch.setattr(forwarding, "_LOGITS", 1)
        monkeypatch.setattr(forwarding, "_FEWEST", 5)
        monkeypatch.setattr(forwarding, "_MOST", 7)
        monkeypatch.setattr(scoring, "_PROBABILITIES", 3 * 257)
        pieces = perplexity(model, IDS, window=64, stride=20, progress=silent)
    assert pieces.num_tokens == whole.num_tokens
    assert pieces.nll == pytest.approx(whole.nll, rel=1e-6)


@pytest.mark.parametrize(
    "sections",
    [
        {"cache": CACHE | {"use": "contiguous"}, "attention": "tiled"},
        {"kernels": "torch", "attention": "sdpa", "runner": "eager"},
        {"drafter": "ngram", "scheduler": "inflight"},
        {"plugins": {"allow": []}},
    ],
)
def test_perplexity_is_the_same_whatever_parts_run_the_model(tiny, sections):
    log_p, targets = log_probabilities(tiny[1], IDS, 64, 40)
    with loaded(tiny[0], **sections) as model:
        score = perplexity(model, IDS, window=64, stride=40, progress=silent)
    assert score.nll == pytest.approx(nll(log_p, targets), rel=1e-5)


@pytest.mark.parametrize("name", ["mistral", "gpt2", "gemma2", "qwen3_moe", "phi"])
def test_perplexity_of_other_families_equals_transformers(tmp_path, name):
    reference = saved(BY_NAME[name], tmp_path)
    log_p, targets = log_probabilities(reference, IDS, 48, 30)
    with loaded(tmp_path) as model:
        score = perplexity(model, IDS, window=48, stride=30, progress=silent)
    assert score.nll == pytest.approx(nll(log_p, targets), rel=1e-4)


def test_a_vocabulary_that_is_padded_counts_whole_as_in_transformers(tmp_path):
    path, reference = tiny_llama(tmp_path, layers=1, vocab=300)
    log_p, targets = log_probabilities(reference, IDS, 64, 32)
    with loaded(path) as model:
        assert model.parts.num_ids == 257
        score = perplexity(model, IDS, window=64, stride=32, progress=silent)
    assert score.nll == pytest.approx(nll(log_p, targets), rel=1e-5)


def test_smollm2_s_perplexity_equals_transformers():
    with loaded("smollm2", engine={"dtype": "float32", "max_model_len": 512}) as model:
        ids = model.encode("The tower of Hanoi is a puzzle of three rods and a number of disks. " * 3)
        ids += model.encode("Perplexity is exp of the mean negative log-likelihood of a token, such as this one. ") * 9
        ids = ids[:240]
        score = perplexity(model, ids, window=128, stride=64, progress=silent)
    assert score.num_tokens == len(ids) - 1 == 239
    log_p, targets = log_probabilities(smollm_transformers(torch.float32), ids, 128, 64)
    assert score.perplexity == pytest.approx(math.exp(nll(log_p, targets)), rel=1e-4)


def test_a_perplexity_that_no_float_holds_is_infinite():
    assert scoring.Score(nll=1e4, num_tokens=1).perplexity == math.inf


# --- comparisons ------------------------------------------------------------------------------------------------------


def test_a_comparison_equals_numpy_s_on_transformers_logits(tiny, other):
    a_LV, targets = log_probabilities(tiny[1], IDS, 64, 30)
    b_LV, _ = log_probabilities(other[1], IDS, 64, 30)
    with loaded(tiny[0]) as model, loaded(other[0]) as second:
        found = compare(model, second, IDS, window=64, stride=30, progress=silent)
    kl = (np.exp(a_LV) * (a_LV - b_LV)).sum(1)
    places = np.arange(len(targets))
    differences = a_LV[places, targets] - b_LV[places, targets]
    assert found.a.num_tokens == found.b.num_tokens == len(targets)
    assert found.a.nll == pytest.approx(nll(a_LV, targets), rel=1e-5)
    assert found.b.nll == pytest.approx(nll(b_LV, targets), rel=1e-5)
    assert kl.mean() > 0.01
    assert found.mean_kl == pytest.approx(kl.mean(), rel=1e-3)
    assert found.max_kl == pytest.approx(kl.max(), rel=1e-3)
    agreement = (a_LV.argmax(1) == b_LV.argmax(1)).mean()
    assert 0.2 < agreement < 1
    assert found.agreement == pytest.approx(agreement)
    assert found.log_ratio == pytest.approx(differences.mean(), rel=1e-3)
    assert found.log_ratio_error == pytest.approx(differences.std() / math.sqrt(len(targets)), rel=1e-3)


def test_a_model_is_not_apart_from_itself(tiny):
    with loaded(tiny[0]) as model, loaded(tiny[0]) as again:
        found = compare(model, again, IDS, window=64, stride=30, progress=silent)
    assert (found.mean_kl, found.max_kl, found.agreement, found.log_ratio, found.log_ratio_error) == (0, 0, 1, 0, 0)
    assert found.a == found.b


@pytest.mark.parametrize("sections", [{"quantizer": "int8"}, {"cache": CACHE | {"format": "int8"}}])
def test_a_quantized_model_or_cache_is_near_and_not_equal(tiny, sections):
    with loaded(tiny[0]) as model, loaded(tiny[0], **sections) as quantized:
        found = compare(model, quantized, IDS, window=64, stride=30, progress=silent)
    assert 0 < found.mean_kl < 0.05
    assert found.agreement > 0.8


def test_models_of_two_vocabularies_are_refused(tmp_path, tiny):
    path, _ = tiny_llama(tmp_path, layers=1, vocab=300)
    refused = pytest.raises(ConfigError, match="vocabularies of 257 and of 300 ids")
    with loaded(tiny[0]) as model, loaded(path) as second, refused:
        compare(model, second, IDS, window=64, stride=30, progress=silent)


# --- what cannot be scored --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "window", "stride", "message"),
    [
        (IDS, 513, 10, r"window: 513 is more than the 512 tokens of engine\.max_model_len"),
        (IDS, 1, 1, "window: 1 is too short"),
        (IDS, 64, 65, "stride: 65 is not from 1 to the window's 64 tokens"),
        (IDS, 64, 0, "stride: 0 is not from 1"),
        ([], 64, 32, "text: it has no token"),
        ([5], 64, 32, "text: it has one token, and nothing before it"),
    ],
)
def test_windows_and_texts_that_cannot_be_scored_are_refused(tiny, ids, window, stride, message):
    with loaded(tiny[0]) as model, pytest.raises(ConfigError, match=message):
        perplexity(model, ids, window=window, stride=stride, progress=silent)


def test_ids_beyond_the_vocabulary_are_refused_before_they_run(tmp_path, tiny):
    with loaded(tiny[0]) as model:
        for ids in ([1, 2, 257], [1, -1]):
            with pytest.raises(CheckpointError, match=rf"token id {ids[-1]}, and the model's vocabulary has 257 ids"):
                perplexity(model, ids, window=64, stride=32, progress=silent)
    path, _ = tiny_llama(tmp_path, layers=1, vocab=100)
    tiny_tokenizer().save_pretrained(path)
    model = ComposedModel.compose(load_config({"model": str(path), "engine": {"dtype": "float32"}, "cache": CACHE}))
    with pytest.raises(CheckpointError, match=r"tokenizer: .* vocabulary has 100 ids"):
        model.encode("é")


def test_a_model_without_a_tokenizer_reads_no_text(tmp_path):
    path, _ = tiny_llama(tmp_path, layers=1, vocab=100)
    with loaded(path) as model, pytest.raises(ConfigError, match="no tokenizer"):
        model.encode("a")


def test_logits_that_are_not_finite_are_refused(tmp_path):
    path, model = tiny_llama(tmp_path, layers=1)
    with torch.no_grad():
        model.lm_head.weight[7] = 3e38
    model.save_pretrained(path)
    with loaded(path) as broken, pytest.raises(ExecutionError, match="logits are not finite"):
        perplexity(broken, IDS, window=64, stride=32, progress=silent)


def test_an_executor_without_logits_of_every_token_is_refused_by_its_key(tiny):
    executor = SimpleNamespace(depth=1, start=silent, submit=silent, collect=silent, stop=silent)

    class Elsewhere:
        @hookimpl
        def provide_executors(self):
            return [Provider(key="elsewhere", summary="Runs nothing.", build=lambda context: executor)]

    config = load_config({"model": str(tiny[0]), "executor": "elsewhere", "cache": CACHE})
    with pytest.raises(CompositionError, match=r"executor: 'elsewhere' .* executor = 'local' does"):
        ComposedModel.compose(config, [Elsewhere()])


def test_a_cache_of_no_given_size_holds_one_sequence_beside_another_model(tiny):
    config = load_config({"model": str(tiny[0]), "engine": {"dtype": "float32"}})
    model = ComposedModel.compose(config, shares_device=True)
    assert model.parts.num_pages * 16 == model.parts.engine.max_model_len == 512
    assert ComposedModel.compose(config).parts.num_pages > model.parts.num_pages


def test_the_cache_is_free_again_after_a_reader_that_stops_early(tiny):
    with loaded(tiny[0]) as model:
        run = model.logits(IDS, 100)
        next(run)
        run.close()
        assert model.parts.cache.stats().used == 0
        assert sum(len(logits) for logits in model.logits(IDS, 100)) == 50
