"""Every Triton kernel compiles for the GPUs that we name, without one being there, and fits them.

A kernel is a function under ``triton.jit`` whose name ends in ``_kernel``; others are parts of
kernels. To cover a new kernel add an entry to `CASES`; the first test fails until it is there.
"""

import importlib
import os
import pkgutil
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import quantforge_kernels

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter leaves nothing to compile"
)

SHARED_MEMORY_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""By compute capability: the most that a thread block may have. The compiler does not check it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to compile a kernel, as the launcher would.

    `types` of the arguments in Triton's words (``*fp32``, ``i32``); each argument in `constants`
    is a constexpr. Pointers and `multiples_of_16` are promised to be multiples, as in a launch.
    `spills` allows the kernel to keep registers in local memory.
    """

    name: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    multiples_of_16: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    spills: bool = False


def _gptq_block(name: str, *, has_zero: bool, code_max: float, **more: Any) -> Case:
    pointers = {f"{p}_ptr": "*fp32" for p in ("work", "upper", "scale", "zero", "errors")}
    sizes = ("num_rows", "num_columns", "work_stride", "upper_stride")
    types = {**pointers, "codes_ptr": "*i8", **dict.fromkeys(sizes, "i32")}
    constants = {
        "CODE_MIN": -code_max - 1,
        "CODE_MAX": code_max,
        "HAS_ZERO": has_zero,
        "BLOCK_N": 4,
        "BLOCK_B": 128,
    }
    return Case(
        name=name,
        types=types,
        constants=constants,
        options={"num_warps": 1, "enable_fp_fusion": False},
        **more,
    )


CASES: dict[str, tuple[Case, ...]] = {
    "gptq_block_kernel": (
        _gptq_block(
            "asym-aligned",
            has_zero=True,
            code_max=7.0,
            multiples_of_16=("num_columns", "work_stride", "upper_stride"),
        ),
        _gptq_block("sym-odd", has_zero=False, code_max=1.0),
    ),
}


def found_kernels() -> dict[str, Any]:
    """Every kernel of the package by name."""
    kernels = {}
    for info in pkgutil.iter_modules(quantforge_kernels.__path__):
        module = importlib.import_module(f"quantforge_kernels.{info.name}")
        kernels |= {
            name: value
            for name, value in vars(module).items()
            if name.endswith("_kernel") and type(value).__module__.startswith("triton.")
        }
    return kernels


def undecorated(kernel: Any) -> Any:
    """The `JITFunction` under autotuners and heuristics."""
    while not isinstance(kernel, triton.JITFunction):
        kernel = kernel.fn
    return kernel


def compiled(kernel: Any, case: Case, capability: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    aligned = {n for n, t in case.types.items() if t.startswith("*")} | set(case.multiples_of_16)
    source = ASTSource(
        kernel,
        {n: "constexpr" if n in case.constants else case.types[n] for n in names},
        constexprs=dict(case.constants),
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=dict(case.options)
    )


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Local memory a thread: more than zero means that registers were spilled."""
    root = Path(triton.__file__).parent / "backends" / "nvidia"
    tool = next(root.rglob("cuobjdump"))
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    usage = subprocess.run(
        [str(tool), "-res-usage", str(file)], capture_output=True, text=True, check=True
    )
    found = re.search(r"STACK:(\d+)", usage.stdout + usage.stderr)
    assert found is not None
    return int(found[1])


def all_cases() -> Iterator[Any]:
    for kernel, cases in CASES.items():
        for case in cases:
            yield pytest.param(kernel, case, id=f"{kernel}-{case.name}")


def test_every_kernel_has_a_case() -> None:
    assert set(found_kernels()) == set(CASES)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("name", "case"), all_cases())
def test_kernel_compiles_and_fits(
    name: str, case: Case, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    binary = compiled(undecorated(found_kernels()[name]), case, capability)
    assert binary.metadata.shared <= SHARED_MEMORY_BYTES[capability]
    if not case.spills:
        assert stack_bytes(binary.asm["cubin"], tmp_path) == 0
