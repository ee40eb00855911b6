"""Write docs/contracts.md: the claims of each contract suite, what it can be told, and the faults that it finds.

`python docs/contracts_page.py` writes it; with `--check` it writes nothing and exits 1 where the page is stale.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))

from generate import attributes_list, prose  # noqa: E402

from contracts import (  # noqa: E402
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
from intarsia.testing.allocators import AllocatorContract  # noqa: E402
from intarsia.testing.attention_backends import AttentionContract  # noqa: E402
from intarsia.testing.claims import claims  # noqa: E402
from intarsia.testing.commands import CommandContract  # noqa: E402
from intarsia.testing.drafters import DrafterContract  # noqa: E402
from intarsia.testing.executors import ExecutorContract  # noqa: E402
from intarsia.testing.frontends import FrontendContract  # noqa: E402
from intarsia.testing.kernels import KernelsContract  # noqa: E402
from intarsia.testing.loaders import LoaderContract  # noqa: E402
from intarsia.testing.logits_processors import LogitsProcessorContract  # noqa: E402
from intarsia.testing.model_families import FamilyContract  # noqa: E402
from intarsia.testing.quantizers import QuantizerContract  # noqa: E402
from intarsia.testing.runners import RunnerContract  # noqa: E402
from intarsia.testing.schedulers import SchedulerContract  # noqa: E402

#: Longer ones are left out: the code has them.
LONGEST_DEFAULT = 90

INTRO = """\
<!-- Written by docs/contracts_page.py from the code: change that, then run it. -->

# Contracts

`intarsia.testing` holds a suite for each kind of part that is named below. Subclass it, say whose provider it is, and
run pytest; `pip install "intarsia[testing]"` brings what the suites run with.

```python
from intarsia.testing.schedulers import SchedulerContract


class TestMine(SchedulerContract):
    def provider(self):
        return my_plugin.provide_schedulers()[0]
```

Each test is a claim that the part must keep; one that a part does not make, such as a limit that it has no option for,
is skipped with the reason. What a suite can be told stands below its claims: a subclass sets the attribute, as in
`ages = False`, or writes the method. The suites are tested in turn: parts that are broken on purpose stand below beside
the claim that finds them. The parts that come with Intarsia run under the same suites and keep their claims.

`intarsia plugins check NAME` runs the suites on a plugin that is installed, each part under that of its kind, in a
process of its own and from any folder; `--json` is for programs. A claim comes out as kept, skipped, broken, or untold:
the contract must be told something first. What that is the plugin says in a subclass, which it names under an entry
point, `slot.key`:

```toml
[project.entry-points."intarsia.contracts"]
"scheduler.mine" = "my_package.contract:Contract"
```

`intarsia plugins new NAME --kind scheduler` writes such a package, for any kind: with the entry points, a part that
works, its contract as a test, a README and a CI file.
"""

SUITES = (
    ("Schedulers", "intarsia.testing.schedulers", SchedulerContract, scheduler_faults.FAULTS),
    ("Cache allocators", "intarsia.testing.allocators", AllocatorContract, allocator_faults.FAULTS),
    ("Attention backends", "intarsia.testing.attention_backends", AttentionContract, attention_faults.FAULTS),
    ("Executors", "intarsia.testing.executors", ExecutorContract, executor_faults.FAULTS),
    ("Runners", "intarsia.testing.runners", RunnerContract, runner_faults.FAULTS),
    ("Kernels", "intarsia.testing.kernels", KernelsContract, kernel_faults.FAULTS),
    ("Quantizers", "intarsia.testing.quantizers", QuantizerContract, quantizer_faults.FAULTS),
    ("Drafters", "intarsia.testing.drafters", DrafterContract, drafter_faults.FAULTS),
    ("Commands", "intarsia.testing.commands", CommandContract, command_faults.FAULTS),
    ("Logits processors", "intarsia.testing.logits_processors", LogitsProcessorContract, processor_faults.FAULTS),
    ("Loaders", "intarsia.testing.loaders", LoaderContract, loader_faults.FAULTS),
    ("Model families", "intarsia.testing.model_families", FamilyContract, family_faults.FAULTS),
    ("Frontends", "intarsia.testing.frontends", FrontendContract, frontend_faults.FAULTS),
)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    titles = list(header)
    lines = [titles, ["---"] * len(titles), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def told(contract: type) -> list[tuple[str, str, str]]:
    """Return what a subclass of a contract can say, besides its provider: each name, its default and its meaning."""
    rows = []
    for each in contract.__mro__:
        for name, says in attributes_list(each.__doc__ or "").items():
            default = repr(getattr(contract, name))
            shown = f"`{default}`" if len(default) <= LONGEST_DEFAULT and "<" not in default else ""
            rows.append((f"`{name}`", shown, says))
        if each.__name__.endswith("Case"):
            rows += [(f"`{name}()`", default, says) for name, default, says in _methods(each)]
    return rows


def _methods(case: type) -> Iterator[tuple[str, str, str]]:
    """Return the methods that are for subclasses to write: those above the first heading, or all that must be."""
    above, heading, _ = inspect.getsource(case).partition("    # ---")
    for name in re.findall(r"^    def ([a-z]\w*)", above, flags=re.MULTILINE):
        member = inspect.getattr_static(case, name)
        method = member.fget if isinstance(member, property) else member
        missing = re.search(r"^        raise NotImplementedError", inspect.getsource(method), flags=re.MULTILINE)
        if name != "provider" and (heading or missing):
            yield name, "none: write it" if missing else "", prose(method.__doc__).split("\n\n")[0]


def page() -> str:
    """Return docs/contracts.md."""
    parts = [INTRO]
    for title, module, contract, faults in SUITES:
        parts.append(f"## {title}\n\n`{module}.{contract.__name__}`\n")
        parts.append(table(["claim", "says"], ([f"`{each.name}`", each.says] for each in claims(contract))))
        if can_say := told(contract):
            parts.append(table(["can be told", "default", "is"], can_say))
        parts.append(table(["planted fault", "found by"], ([fault.says, f"`{fault.claim}`"] for fault in faults)))
    return "\n".join(parts)


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is stale")
    path, text = DOCS / "contracts.md", page()
    if path.exists() and path.read_text("utf-8") == text:
        return 0
    if parser.parse_args().check:
        print("docs/contracts.md is stale: run `python docs/contracts_page.py`", file=sys.stderr)
        return 1
    path.write_text(text, "utf-8")
    print("docs/contracts.md written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
