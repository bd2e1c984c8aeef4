"""``quantforge recipes``: lists the shipped recipes, or prints one."""

from typing import Annotated

import typer

from quantforge.cli.options import JsonOption, QuietOption


def register(app: typer.Typer) -> None:
    @app.command(
        epilog="Examples:  quantforge recipes  |  quantforge recipes awq_w4a16 > mine.yaml"
    )
    def recipes(
        name: Annotated[str | None, typer.Argument(help="Recipe to print.")] = None,
        json_output: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        """List the shipped recipes, or print one as a start for your own."""
        import dataclasses

        from quantforge.console import Console
        from quantforge.recipe import load_recipe, recipe_names, recipe_path

        console = Console(json_output=json_output, quiet=quiet)
        if name is not None:
            recipe = load_recipe(name)
            console.result(
                dataclasses.asdict(recipe), recipe_path(name).read_text(encoding="utf-8").rstrip()
            )
            return
        found = [load_recipe(n) for n in recipe_names()]
        lines = [f"{r.source:<16} {r.description}" for r in found]
        console.result(
            {"recipes": [{"name": r.source, "description": r.description} for r in found]},
            "\n".join(lines),
        )
