"""The pages are a site: Sphinx makes it without a warning, and what leads nowhere is one."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
INDEX = "# Pages\n\n## Begin\n\n- [Here](here.md): first\n"
HERE = "# Here\n\n## A heading `of_names`\n\n[folder](../examples/one), [up](#a-heading-of_names), [file](plain.txt)\n"


def build(root, out):
    """Build a site as `make docs` does; return the ended process."""
    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("SITE := "))
    options = line.partition("-m ")[2].split()
    options = [str(out / option) if option.startswith("build/") else option for option in options]
    return subprocess.run([sys.executable, "-m", *options], cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture
def small(tmp_path):
    """Return the root of a small project: its pages, configured as ours."""
    root = tmp_path / "project"
    for name, text in (("index.md", INDEX), ("here.md", HERE), ("plain.txt", "plain\n")):
        (root / "docs").mkdir(parents=True, exist_ok=True)
        (root / "docs" / name).write_text(text)
    (root / "examples/one").mkdir(parents=True)
    (root / "examples/one/README.md").write_text("# One\n")
    index = root / "docs/index.md"
    index.write_text(INDEX + "- [One](../examples/one/README.md)\n")
    shutil.copy(ROOT / "docs/conf.py", root / "docs")
    (root / "pyproject.toml").write_text('[project]\nversion = "1"\n')
    return root


@pytest.mark.slow
def test_the_site_is_made_without_a_warning_and_of_every_page(tmp_path):
    built = build(ROOT, tmp_path)
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    site = tmp_path / "build/docs"
    for page in (*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*/README.md"), ROOT / "CHANGELOG.md"):
        assert (site / page.relative_to(ROOT)).with_suffix(".html").exists(), page.name
    for page in site.rglob("*.html"):
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text()):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / unquote(target)).exists(), f"{page.name}: {target}"


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(small, tmp_path):
    assert build(small, tmp_path).returncode == 0
    page = (tmp_path / "build/docs/docs/here.html").read_text()
    assert not re.findall(r'(?:src|<link[^>]*href)="(?:https?:)?//[^"]*', page)
    assert 'href="../examples/one/README.html"' in page
    (anchor,) = re.findall('href="#([^"]+)"[^>]*>(?:<[^>]*>)*up<', page)
    assert f'id="{anchor}"' in page


@pytest.mark.slow
@pytest.mark.parametrize(
    "page, text, words",
    [
        ("here.md", "[gone](gone.md)\n", "'gone.md'"),
        ("here.md", "[gone](#gone)\n", "'gone'"),
        ("index.md", "\n[gone](here.md#gone)\n", "gone"),
        ("other.md", "# Other\n", "isn't included in any toctree"),
        ("here.md", "```python\n(\n$$\n```\n", "highlighting"),
    ],
    ids=["page", "anchor", "anchor-elsewhere", "unlisted", "unreadable"],
)
def test_what_leads_nowhere_fails_the_build(small, tmp_path, page, text, words):
    path = small / "docs" / page
    path.write_text((path.read_text() if path.exists() else "") + "\n" + text)
    built = build(small, tmp_path)
    assert built.returncode != 0
    assert words in built.stderr
