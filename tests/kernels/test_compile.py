"""Every Triton kernel compiles for the GPUs that we name, without one being there, and fits them.

A kernel is a function under ``triton.jit`` whose name ends in ``_kernel``; others are parts of
kernels. To cover a new kernel add an entry to `CASES`; the first test fails until it is there.
"""

import importlib
import json
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
from quantforge_kernels.w4a16_configs import TABLES, Config, read_table

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
    `spills` allows the kernel to keep registers in local memory; `capabilities` are the devices
    that the launcher chooses this way for.
    """

    name: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    multiples_of_16: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    spills: bool = False
    capabilities: tuple[int, ...] = (80, 90, 100)


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


def _pointers(dtype: str, *names: str) -> dict[str, str]:
    return {f"{name}_ptr": f"*{dtype}" for name in names}


def _sizes(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def _rms_norm(name: str, size: int, *, has_residual: bool, dtype: str = "bf16") -> Case:
    sizes = ("num_rows", "size", "inner_rows", "outer_stride", "inner_stride", "residual_stride")
    return Case(
        name=name,
        types=_pointers(dtype, "x", "residual", "weight", "normed", "total")
        | {"eps": "fp32"}
        | _sizes(*sizes),
        constants={
            "HAS_RESIDUAL": has_residual,
            "BLOCK_R": max(1, 4096 // size),
            "BLOCK_D": size,
        },
        multiples_of_16=("size", "outer_stride", "inner_stride", "residual_stride"),
        options={"num_warps": 4 if size <= 4096 else 8},
    )


def _silu_mul(dtype: str) -> Case:
    return Case(
        name=dtype,
        types=_pointers(dtype, "gate", "up", "out") | _sizes("size", "gate_stride", "up_stride"),
        constants={"BLOCK": 1024},
        multiples_of_16=("size", "gate_stride", "up_stride"),
        options={"num_warps": 4},
    )


def _rope(head_dim: int, dtype: str = "bf16") -> Case:
    strides = [f"{x}_{of}_stride" for x in "qk" for of in ("token", "head")]
    return Case(
        name=f"head{head_dim}-{dtype}",
        types=_pointers(dtype, "q", "k", "cos", "sin", "q_out", "k_out")
        | _sizes("num_heads", "num_kv_heads", "query_blocks", *strides, "table_stride"),
        constants={"HEAD_DIM": head_dim, "BLOCK_H": 8, "BLOCK_F": max(16, head_dim // 2)},
        multiples_of_16=(*strides, "table_stride"),
        options={"num_warps": 2, "enable_fp_fusion": False},
    )


KV_STORE = Case(
    name="bf16",
    types=_pointers("bf16", "k", "v", "k_cache", "v_cache")
    | {"slot_mapping_ptr": "*i64"}
    | _sizes("size", "head_dim", "slot_stride")
    | _sizes(*(f"{x}_{of}_stride" for x in "kv" for of in ("token", "head"))),
    constants={"BLOCK": 1024},
    multiples_of_16=("size", "head_dim", "slot_stride", "k_token_stride", "v_token_stride"),
    options={"num_warps": 4},
)

CACHE_STRIDES = ("q_token_stride", "q_head_stride", "page_stride", "token_stride", "head_stride")


def _attention(
    name: str,
    head_dim: int,
    group: int,
    window: int,
    *,
    rows: int | None = None,
    tile: int = 64,
    dtype: str = "bf16",
    **more: Any,
) -> Case:
    mixed = rows is not None
    tables = ("table", "context", "query_start") if mixed else ("table", "context")
    sizes = ("num_sequences", "num_heads") if mixed else ("splits",)
    types = (
        _pointers(dtype, "q", "k", "v", *(("out",) if mixed else ()))
        | _pointers("i32", *tables)
        | ({} if mixed else _pointers("fp32", "out", "log_sum"))
        | {"scale": "fp32"}
        | _sizes(*sizes, *CACHE_STRIDES, "table_stride")
    )
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": 16,
        "WINDOW": window,
        "BLOCK_N": tile,
        "BLOCK_A": head_dim,
        "STAGES": 3 if head_dim <= 128 and tile <= 64 else 2,
        "PRECISION": "tf32",
    }
    constants |= {"BLOCK_M": 16} if rows is None else {"BLOCK_G": group, "BLOCK_Q": rows // group}
    return Case(
        name=name,
        types=types,
        constants=constants,
        multiples_of_16=CACHE_STRIDES,
        options={"num_warps": 8 if mixed else 4},
        **more,
    )


def _w4a16(
    name: str,
    config: Config,
    *,
    group: int = 128,
    symmetric: bool = True,
    dtype: str = "bf16",
    scale32: bool = False,
    has_bias: bool = True,
) -> Case:
    """The fused kernel as `w4a16_triton.multiply` launches it."""
    floats = {f"{p}_ptr": f"*{dtype}" for p in ("x", "bias", "y")}
    ints = dict.fromkeys(("words_ptr", "meta_ptr", "counters_ptr"), "*i32")
    sizes = ("M", "N", "K", "x_stride", "tiles_k", "meta_stride")
    return Case(
        name=name,
        types={**floats, **ints, "parts_ptr": "*fp32", **dict.fromkeys(sizes, "i32")},
        constants={
            "GROUP": group,
            "SYMMETRIC": symmetric,
            "SCALE32": scale32,
            "FP16_SCALE": dtype == "fp16",
            "HAS_BIAS": has_bias,
            "EVEN_K": True,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "TILES": config.tiles,
            "SPLIT": config.split,
            "NUM_WARPS": config.num_warps,
            "STAGES": config.num_stages,
            "PREFETCH": config.prefetch,
            "PDL": config.pdl,
            "INTERPRETED": False,
        },
        multiples_of_16=("N", "x_stride", "meta_stride"),
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            **({"launch_pdl": True} if config.pdl else {}),
        },
    )


def _w4a16_dequantize(name: str, *, group: int, symmetric: bool, dtype: str) -> Case:
    return Case(
        name=name,
        types={
            **dict.fromkeys(("words_ptr", "meta_ptr"), "*i32"),
            "weight_ptr": f"*{dtype}",
            **dict.fromkeys(("N", "K", "tiles_k", "meta_stride"), "i32"),
        },
        constants={
            "GROUP": group,
            "SYMMETRIC": symmetric,
            "SCALE32": False,
            "FP16_SCALE": dtype == "fp16",
            "INTERPRETED": False,
        },
        multiples_of_16=("N", "K", "meta_stride"),
        options={"num_warps": 4},
    )


W4A16_IN_REGISTERS = (
    _w4a16("sym-16", Config(block_m=16, tiles=2), has_bias=False),
    _w4a16("asym-32", Config(block_m=32, block_n=128, num_warps=8), symmetric=False),
    _w4a16("asym-64-g64", Config(block_m=64, num_stages=2), symmetric=False, group=64),
    _w4a16(
        "sym-128-fp16", Config(block_m=128, block_n=128, num_warps=8, num_stages=2), dtype="fp16"
    ),
)
"""Cases of `w4a16_kernel` that keep K whole, and so need no shared memory to add parts up."""

CASES: dict[str, tuple[Case, ...]] = {
    "rms_norm_kernel": (
        _rms_norm("heads", 128, has_residual=False),
        _rms_norm("hidden", 4096, has_residual=True),
        _rms_norm("wide", 16384, has_residual=True),
        _rms_norm("float32", 4096, has_residual=True, dtype="fp32"),
    ),
    "silu_mul_kernel": (_silu_mul("bf16"), _silu_mul("fp32")),
    "rope_kernel": (_rope(64), _rope(128), _rope(128, "fp32")),
    "kv_store_kernel": (KV_STORE,),
    "paged_decode_kernel": (
        _attention("head128", 128, 4, 0),
        _attention("head64-window", 64, 3, 512, dtype="fp16"),
        _attention("head256", 256, 2, 0),
    ),
    "paged_reduce_kernel": (
        Case(
            name="head128",
            types=_pointers("fp32", "part", "log_sum") | {"out_ptr": "*bf16", "splits": "i32"},
            constants={"HEAD_DIM": 128, "BLOCK_S": 32, "BLOCK_A": 128},
            options={"num_warps": 4},
        ),
    ),
    "paged_mixed_kernel": (
        _attention("head128", 128, 4, 0, rows=128, tile=128, capabilities=(90,)),
        _attention("head128", 128, 4, 0, rows=128, capabilities=(100,)),
        _attention("head128", 128, 4, 0, rows=64, capabilities=(80,)),
        _attention("window", 64, 4, 512, rows=128, tile=128, dtype="fp16", capabilities=(90,)),
        _attention("window", 64, 4, 512, rows=64, dtype="fp16", capabilities=(80,)),
        _attention("head256", 256, 2, 0, rows=64, tile=32),
    ),
    "w4a16_kernel": (
        *W4A16_IN_REGISTERS,
        _w4a16("split-4-channel", Config(block_m=16, split=4), group=0),
        _w4a16("split-8-g32", Config(block_m=32, split=8), group=32, symmetric=False, scale32=True),
    ),
    "w4a16_dequantize_kernel": (
        _w4a16_dequantize("sym-g128", group=128, symmetric=True, dtype="bf16"),
        _w4a16_dequantize("asym-g32", group=32, symmetric=False, dtype="fp16"),
        _w4a16_dequantize("asym-channel", group=0, symmetric=False, dtype="bf16"),
    ),
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


def examined(cubin: bytes, folder: Path, tool: str, *options: str) -> str:
    """What a tool of Triton's wheel says about a binary."""
    root = Path(triton.__file__).parent / "backends" / "nvidia"
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [str(next(root.rglob(tool))), *options, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Local memory a thread: more than zero means that registers were spilled."""
    found = re.search(r"STACK:(\d+)", examined(cubin, folder, "cuobjdump", "-res-usage"))
    assert found is not None
    return int(found[1])


def all_cases() -> Iterator[Any]:
    for kernel, cases in CASES.items():
        for case in cases:
            for capability in case.capabilities:
                name = f"{kernel}-{case.name}-{capability}"
                yield pytest.param(kernel, case, capability, id=name)


def test_every_kernel_has_a_case() -> None:
    assert set(found_kernels()) == set(CASES)


@pytest.mark.parametrize(("name", "case", "capability"), all_cases())
def test_kernel_compiles_and_fits(
    name: str, case: Case, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    binary = compiled(undecorated(found_kernels()[name]), case, capability)
    assert binary.metadata.shared <= SHARED_MEMORY_BYTES[capability]
    if not case.spills:
        assert stack_bytes(binary.asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize("case", W4A16_IN_REGISTERS, ids=lambda case: case.name)
def test_int4_weights_go_from_registers_into_wgmma(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    binary = compiled(undecorated(found_kernels()["w4a16_kernel"]), case, 90)
    code = binary.asm["ttgir"]
    loop = code[code.index("scf.for") : code.index("scf.yield")]
    assert "ttg.convert_layout" not in loop
    assert "ttg.local_alloc %" not in loop
    assert "HGMMA" in examined(binary.asm["cubin"], tmp_path, "nvdisasm", "-c")


def tuned_configs() -> list[Config]:
    """Every fused config of the measured tables, once."""
    tables = (
        read_table(json.loads(file.read_text("utf-8"))) for file in TABLES.glob("w4a16-*.json")
    )
    configs = {c for table in tables for by_m in table.values() for c in by_m.values()}
    return sorted((c for c in configs if c.block_m), key=str)


@pytest.mark.slow
@pytest.mark.parametrize("config", tuned_configs(), ids=str)
def test_tuned_int4_configs_fit_a_hopper_gpu(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = undecorated(found_kernels()["w4a16_kernel"])
    binary = compiled(kernel, _w4a16("tuned", config), 90)
    assert binary.metadata.shared <= SHARED_MEMORY_BYTES[90]
    assert stack_bytes(binary.asm["cubin"], tmp_path) == 0
