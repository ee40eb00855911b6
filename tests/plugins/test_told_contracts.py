"""What Intarsia ships for `intarsia plugins check`: contracts of parts that are there, and plugins that keep them."""

import importlib.metadata
import json

import pytest
import torch

from intarsia.cli import run
from intarsia.plugins import Registry
from intarsia.testing.suites import GROUP, SUITES, contract_of, part_name
from intarsia.types import PluginsOptions

OURS = importlib.metadata.distribution("intarsia").entry_points
PLUGINS = sorted(entry.name for entry in OURS.select(group="intarsia"))
#: A cheap claim of each kind of part that all of ours make.
CLAIMS = {
    "loader": "test_what_was_written_is_read",
    "family": "test_each_tensor_is_read_once_and_none_is_passed_over",
    "quantizer": "test_parts_are_the_parts_of_the_whole",
    "kernels": "test_no_rows_give_no_rows",
    "attention": "test_large_scores_do_not_overflow",
    "cache": "test_moves_are_told_once",
    "runner": "test_no_slot_is_written_but_the_tokens_own",
    "drafter": "test_it_stops_twice",
    "logits_processors": "test_only_its_own_row_is_changed",
    "scheduler": "test_waiting_outlives_higher_priorities",
    "executor": "test_results_are_in_the_order_of_the_rows",
    "frontend": "test_a_stream_is_the_whole_answer",
    "commands": "test_help_exits_0",
}
#: Parts that no machine without an NVIDIA GPU can try, and one that does not promise what is asked.
SKIPPED = {"kernels.cuda", "cache.vmm", "runner.cuda_graph", "kernels.cusparselt", "scheduler.static"}
if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
    SKIPPED.add("kernels.onednn")


@pytest.fixture(scope="module")
def offers():
    found = Registry.discover(PluginsOptions(allow=tuple(PLUGINS))).all_offers()
    return {part_name(offer): offer for offer in found if offer.plugin.distribution == "intarsia"}


@pytest.mark.parametrize("entry", OURS.select(group=GROUP), ids=lambda entry: entry.name)
def test_every_contract_that_is_shipped_loads_and_is_of_a_part_that_is_offered(entry, offers):
    offer = offers[entry.name]
    contract = contract_of(offer)
    assert contract is entry.load()
    own = contract().provider()
    assert (own.key, own.summary, own.options) == (
        entry.name.partition(".")[2],
        offer.provider.summary,
        offer.provider.options,
    )
    assert entry.module.rpartition(".")[2] == "contract"


def test_every_kind_of_part_has_its_cheap_claim():
    assert list(CLAIMS) == list(SUITES)


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS)
def test_each_plugin_of_ours_passes_its_check(plugin, offers, capsys):
    parts = [name for name, offer in offers.items() if offer.plugin.name == plugin]
    claims = {CLAIMS[part.partition(".")[0]] for part in parts}
    assert claims
    code = run(["plugins", "check", plugin, "--json", *(word for claim in claims for word in ("--claim", claim))])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    results = {part["part"]: part["claims"] for part in json.loads(out)["parts"]}
    assert list(results) == parts
    for part, [claim] in results.items():
        assert claim["outcome"] == ("skipped" if part in SKIPPED else "kept"), (part, claim)
        assert bool(claim["message"]) == (part in SKIPPED)


@pytest.mark.slow
def test_a_part_for_another_machine_does_not_fail_its_plugin_and_a_plugin_of_such_parts_says_why(capsys):
    assert run(["plugins", "check", "sparse"]) == 0
    assert "kernels.cusparselt 0 kept, 21 skipped" in " ".join(capsys.readouterr().out.split())
    assert run(["plugins", "check", "cuda"]) == 1
    out, err = capsys.readouterr()
    assert "it is for NVIDIA GPUs" in " ".join(out.split())
    assert "nothing of plugin 'cuda' can be tried here: kernels.cuda, cache.vmm, runner.cuda_graph" in err
