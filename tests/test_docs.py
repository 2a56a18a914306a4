"""What the documents say is so: links lead somewhere, files and names exist, and commands whose
output is shown print it."""

from __future__ import annotations

import importlib
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kilter.cli import main
from kilter.home import home

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/README.md"]
ROOMS = {path.name for base in (ROOT, ROOT / "kilter") for path in base.iterdir() if path.is_dir()}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def anchors(page: Path) -> set[str]:
    """What links to a page's headings end in."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
                for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| \[[^]]*\]\((\S+)\)", index, flags=re.MULTILINE))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


@pages
def test_files_are_there(page: Path) -> None:
    """Paths in backticks, of this repository's folders or, shorter, of the package's."""
    for code in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")):
        for path in re.findall(r"(?<![\w/.:~$}-])([\w-]+/[\w./-]*)", code):
            if path.split("/")[0] in ROOMS:
                assert (ROOT / path).exists() or (ROOT / "kilter" / path).exists(), code


def found(name: str) -> Any:
    """The module, or what a module holds, that a dotted name names."""
    parts, owner = name.split("."), ""
    for part in parts:  # the longest prefix that is a module
        path = ROOT.joinpath(*owner.split("."), part) if owner else ROOT / part
        if not path.is_dir() and not path.with_suffix(".py").is_file():
            break
        owner = f"{owner}.{part}" if owner else part
    thing: Any = importlib.import_module(owner)
    for part in parts[owner.count(".") + 1:]:
        thing = getattr(thing, part)
    return thing


@pages
def test_names_are_there(page: Path) -> None:
    """`kilter.room.name`, and the modules of `python -m bench.name`."""
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(r"\bkilter(?:\.[A-Za-z_]\w*)+", text)):
        assert found(name) is not None
    for name in re.findall(r"python -m (bench(?:\.\w+)+)", text):
        assert ROOT.joinpath(*name.split(".")).with_suffix(".py").is_file(), name


def shown(command: str) -> str:
    """What the README shows under a command."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"^```\n\$ (.*?)^```", text, re.DOTALL | re.MULTILINE)
              if block.startswith(command)]
    assert len(blocks) == 1
    return blocks[0].partition("\n")[2]


@pytest.mark.parametrize("command", [
    'kilter chat smollm2-135m -p "What is the capital of France?"',
    'kilter generate smollm2-135m -p "Paris is" -p "Water boils at" --max-tokens 8 --json',
    "kilter inspect smollm2-135m", "kilter plan"])
def test_the_readme_shows_what_is_printed(command: str, smollm2: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    code = main(shlex.split(command)[1:])
    out, err = capsys.readouterr()
    printed = out if code == 0 else err
    assert printed.replace(str(home()), "~/.cache/kilter") == shown(command)
