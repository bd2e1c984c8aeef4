"""``quantforge recipes``: lists the shipped recipes, or prints one."""

from typing import Annotated

import typer

from quantforge.cli.options import JsonOption, QuietOption


def register(app: typer.Typer) -> None:
    @app.command(
        epilog="Examples:  quantforge recipes  |  quantforge recipes awq_w4a16 > mine.yaml"
    )
    def recipes(
        name: Annotated[
            str | None, typer.Argument(help="Recipe to print; a .yaml file too.")
        ] = None,
        json_output: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        """List the shipped recipes, or print one, merged with what it extends."""
        import dataclasses

        from quantforge.console import Console
        from quantforge.recipe import load_recipe, recipe_names

        console = Console(json_output=json_output, quiet=quiet)
        if name is not None:
            recipe = load_recipe(name)
            console.result(dataclasses.asdict(recipe), _text(name))
            return
        found = [load_recipe(n) for n in recipe_names()]
        lines = [f"{r.source:<16} {r.description}" for r in found]
        console.result(
            {"recipes": [{"name": r.source, "description": r.description} for r in found]},
            "\n".join(lines),
        )


def _text(name: str) -> str:
    """The file of a recipe as it is; of one that extends another, what the two come to."""
    import yaml

    from quantforge.recipe import load_document, recipe_path

    document = load_document(name)
    parent = document.pop("extends", None)
    if parent is None:
        return recipe_path(name).read_text(encoding="utf-8").rstrip()
    merged = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    return f"# {name}, merged with {parent}, which it extends\n{merged.rstrip()}"
