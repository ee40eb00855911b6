"""The contract suites are tested: each planted fault is found by the claim that speaks of it."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from contracts import (
    allocator_faults,
    attention_faults,
    command_faults,
    drafter_faults,
    executor_faults,
    family_faults,
    frontend_faults,
    kernel_faults,
    loader_faults,
    processor_faults,
    quantizer_faults,
    runner_faults,
    scheduler_faults,
)
from contracts.planted import failure
from intarsia.testing.allocators import AllocatorContract
from intarsia.testing.attention_backends import AttentionContract
from intarsia.testing.claims import claims
from intarsia.testing.commands import CommandContract
from intarsia.testing.drafters import DrafterContract
from intarsia.testing.executors import ExecutorContract
from intarsia.testing.frontends import FrontendContract
from intarsia.testing.kernels import KernelsContract
from intarsia.testing.loaders import LoaderContract
from intarsia.testing.logits_processors import LogitsProcessorContract
from intarsia.testing.model_families import FamilyContract
from intarsia.testing.quantizers import QuantizerContract
from intarsia.testing.runners import RunnerContract
from intarsia.testing.schedulers import SchedulerContract

ROOT = Path(__file__).parents[2]
KINDS = {
    "schedulers": (SchedulerContract, scheduler_faults),
    "allocators": (AllocatorContract, allocator_faults),
    "attention": (AttentionContract, attention_faults),
    "executors": (ExecutorContract, executor_faults),
    "runners": (RunnerContract, runner_faults),
    "kernels": (KernelsContract, kernel_faults),
    "quantizers": (QuantizerContract, quantizer_faults),
    "drafters": (DrafterContract, drafter_faults),
    "commands": (CommandContract, command_faults),
    "logits_processors": (LogitsProcessorContract, processor_faults),
    "loaders": (LoaderContract, loader_faults),
    "model_families": (FamilyContract, family_faults),
    "frontends": (FrontendContract, frontend_faults),
}
PLANTED = [
    pytest.param(planted.contract, fault, id=f"{kind}-{fault.part.__name__}")
    for kind, (_, planted) in KINDS.items()
    for fault in planted.FAULTS
]


SOUND = [
    pytest.param(kind, part, id=f"{kind}-{part.__name__}")
    for kind, (_, planted) in KINDS.items()
    for part in getattr(planted, "SOUND", ())
]


@pytest.mark.parametrize(("contract", "fault"), PLANTED)
def test_a_planted_fault_is_found_by_its_claim(contract, fault):
    found = failure(contract(fault.part), fault.claim)
    assert found is not None, f"{fault.claim} does not see: {fault.says}"
    assert found, "the claim fails, and does not say why"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "part"), SOUND)
def test_what_faults_are_planted_in_keeps_every_claim(kind, part):
    contract, planted = KINDS[kind]
    for claim in claims(contract):
        with contextlib.suppress(pytest.skip.Exception):
            assert failure(planted.contract(part), claim.name) is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_claim_finds_a_fault(kind):
    contract, planted = KINDS[kind]
    assert {claim.name for claim in claims(contract)} == {fault.claim for fault in planted.FAULTS}


@pytest.mark.parametrize("kind", KINDS)
def test_faults_have_names_of_their_own(kind):
    says = [fault.says for fault in KINDS[kind][1].FAULTS]
    assert len(set(says)) == len(says)


def test_the_page_of_contracts_is_current():
    command = [sys.executable, ROOT / "docs/contracts_page.py", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
