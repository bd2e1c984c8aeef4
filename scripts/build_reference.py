"""Writes docs/reference/cli.md from the help texts of the commands."""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(COLUMNS="100", NO_COLOR="1")  # before Click measures the terminal

import typer.main

from quantforge.cli.app import build_app

HEAD = "# The command line\n\nMade from the help texts by `make docs`.\n"


def reference() -> str:
    """The whole page."""
    root = typer.main.get_command(build_app())
    sections = [HEAD]
    collect(root, ["quantforge"], sections)
    return "\n".join(sections)


def collect(command: Any, path: list[str], sections: list[str]) -> None:
    """Appends the help of `command` (Click's), found under `path`, and of those below it."""
    context = command.make_context(" ".join(path), [], resilient_parsing=True)
    text = context.get_help()
    sections.append(f"## {' '.join(path)}\n\n```\n{text.strip()}\n```\n")
    for name, child in sorted(getattr(command, "commands", {}).items()):
        collect(child, [*path, name], sections)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference/cli.md")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(reference(), encoding="utf-8")
