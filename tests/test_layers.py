"""Imports go downwards only; the quantizer and the runtime never meet; heavy imports stay lazy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "quantforge"
KERNELS = ROOT / "kernels" / "quantforge_kernels"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "progress", "background"),
    ("registry", "resources", "page"),
    ("schemes",),
    ("qtensor",),
    ("recipe", "device", "precision", "memory", "stopwatch"),
    ("checkpoint",),
    ("models",),
    ("calibration", "runtime"),
    ("methods", "evaluation", "serving"),
    ("plan", "convert", "report"),
    ("allocation",),
    ("estimate", "fingerprint", "sensitivity"),
    ("resume",),
    ("capacity",),
    ("quantizer",),
    ("pipeline",),
    ("console",),
    ("cli",),
    ("__main__",),
)
"""Parts of quantforge, lowest first. A part may import itself and what lies on lower floors."""

QUANTIZER = {
    "calibration",
    "methods",
    "plan",
    "allocation",
    "estimate",
    "fingerprint",
    "sensitivity",
    "resume",
    "capacity",
    "quantizer",
    "pipeline",
}
RUNTIME = {"runtime", "evaluation", "serving"}

MAY_IMPORT_KERNELS = {
    "qtensor",
    "models",
    "calibration",
    "methods",
    "fingerprint",
    "runtime",
    "cli",
}
"""Besides the parts above models that hold ops: qtensor, which shares the rounding reference, and
fingerprint, which hashes the code."""

ONLY_IN_TESTS = {"transformers", "compressed_tensors", "accelerate", "tests", "pytest"}

TERMINAL = {"rich", "typer", "click"}

HEAVY = {"torch", "transformers", "datasets", "gguf", "tokenizers", "fastapi", "uvicorn", "numpy"}


def modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def part_of(path: Path) -> str:
    """``models`` for quantforge/models/loader.py; empty for quantforge/__init__.py."""
    first = path.relative_to(PACKAGE).parts[0]
    name = first.removesuffix(".py")
    return "" if name == "__init__" else name


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of modules that a file imports anywhere, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> set[str]:
    return set(imported(ast.parse(path.read_text(encoding="utf-8"))))


def parts_imported(path: Path) -> set[str]:
    names = (name.split(".") for name in imports_of(path))
    return {n[1] for n in names if n[0] == "quantforge" and len(n) > 1 and n[1] != "__version__"}


def floor(part: str) -> int:
    return next(i for i, parts in enumerate(FLOORS) if part in parts)


def test_every_part_has_a_floor() -> None:
    parts = {part_of(path) for path in modules(PACKAGE)} - {""}
    assert parts - {part for parts in FLOORS for part in parts} == set()


def test_imports_go_downwards_only() -> None:
    upward = [
        f"{path.relative_to(ROOT)} imports quantforge.{other}"
        for path in modules(PACKAGE)
        for other in sorted(parts_imported(path))
        if part_of(path) and other != part_of(path) and floor(other) >= floor(part_of(path))
    ]
    assert upward == []


def test_quantizer_and_runtime_never_import_each_other() -> None:
    crossing = [
        f"{path.relative_to(ROOT)} imports quantforge.{other}"
        for path in modules(PACKAGE)
        for other in sorted(parts_imported(path))
        if {part_of(path), other} & QUANTIZER and {part_of(path), other} & RUNTIME
    ]
    assert crossing == []


def test_the_console_is_imported_by_the_command_line_only() -> None:
    users = {part_of(path) for path in modules(PACKAGE) if "console" in parts_imported(path)}
    assert users <= {"cli", "console"}


def test_terminal_libraries_stay_in_the_command_line() -> None:
    users = {
        part_of(path)
        for path in modules(PACKAGE)
        if {name.split(".")[0] for name in imports_of(path)} & TERMINAL
    }
    assert users <= {"cli", "console"}


def test_kernels_are_imported_by_models_and_above_only() -> None:
    users = {
        part_of(path)
        for path in modules(PACKAGE)
        if any(name.split(".")[0] == "quantforge_kernels" for name in imports_of(path))
    }
    assert users <= MAY_IMPORT_KERNELS


def test_the_quantized_tensor_takes_only_rounding_from_the_kernels() -> None:
    used = {n for n in imports_of(PACKAGE / "qtensor.py") if n.startswith("quantforge_kernels")}
    assert {name.split(".")[1] for name in used} == {"rounding"}


def test_kernels_import_only_torch_and_triton() -> None:
    allowed = {"torch", "triton", "quantforge_kernels"} | set(sys.stdlib_module_names)
    foreign = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(KERNELS)
        for name in sorted(imports_of(path))
        if name.split(".")[0] not in allowed
    ]
    assert foreign == []


def test_oracles_of_the_tests_are_not_needed_at_run_time() -> None:
    used = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (*modules(PACKAGE), *modules(KERNELS))
        for name in sorted(imports_of(path))
        if name.split(".")[0] in ONLY_IN_TESTS
    ]
    assert used == []


@pytest.mark.parametrize("arguments", [["--help"], ["recipes", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from quantforge.cli.app import run\n"
        f"code = run({arguments!r})\n"
        f"loaded = {HEAVY!r} & set(sys.modules)\n"
        "sys.exit(f'loaded {sorted(loaded)}' if loaded else code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
