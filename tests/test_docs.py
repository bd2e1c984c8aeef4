"""Commands in README and docs are ones that the real parser takes, and the reference is current."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main

from quantforge.cli.app import build_app
from quantforge.recipe import load_recipe, recipe_names

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if page.parent.name != "reference"]
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands_of(page: Path) -> list[str]:
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("quantforge ")]


EXAMPLES = [(page.name, line) for page in WRITTEN for line in commands_of(page)]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("page", "line"), EXAMPLES)
def test_a_documented_command_is_one_that_the_parser_takes(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    words = words[: words.index(">")] if ">" in words else words
    command: Any = typer.main.get_command(build_app())
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands") or words == ["--version"]
    command.make_context(page, words)


def test_the_readme_names_every_command() -> None:
    known = set(typer.main.get_command(build_app()).commands)  # type: ignore[attr-defined]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {name for name in known if f"`{name}" not in readme} == set()


def test_the_reference_is_made_from_the_help_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stored = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert load_script("build_reference").reference() == stored


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_parses_and_describes_itself(name: str) -> None:
    assert load_recipe(name).description


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [t for t in targets if not (page.parent / t).exists()] == []
