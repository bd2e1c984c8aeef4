"""What is installed: names on the path, shipped files, and the content of the wheel."""

import importlib.metadata
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import quantforge
from quantforge.resources import resource_folder

ROOT = Path(__file__).resolve().parent.parent


def hugging_face_kernels_is_installed() -> bool:
    return bool(importlib.metadata.packages_distributions().get("kernels"))


@pytest.mark.skipif(hugging_face_kernels_is_installed(), reason="HF's package kernels is here")
def test_the_folder_kernels_is_no_importable_module() -> None:
    program = (
        "import importlib.util, sys; sys.exit(importlib.util.find_spec('kernels') is not None)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=ROOT, check=False)
    assert done.returncode == 0
    assert importlib.util.find_spec("kernels") is None


def test_recipes_and_calibration_text_are_found() -> None:
    assert {p.name for p in resource_folder("recipes").iterdir()} >= {
        "awq_w4a16.yaml",
        "rtn_w4a16.yaml",
        "ci_gate.yaml",
    }
    assert (resource_folder("calib_data") / "README.md").is_file()
    assert (resource_folder("calib_data") / "held_out.txt").is_file()


def test_the_installed_version_is_the_packages_own() -> None:
    assert importlib.metadata.version("quantforge") == quantforge.__version__


def test_the_command_is_declared() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="quantforge")
    assert script.value == "quantforge.cli.app:main"


def test_run_time_dependencies_hold_no_oracle_of_the_tests() -> None:
    required = importlib.metadata.requires("quantforge") or []
    plain = [line for line in required if "extra ==" not in line]
    names = {line.split(";")[0].split(">")[0].split("[")[0].strip() for line in plain}
    assert names & {"transformers", "compressed-tensors", "accelerate", "datasets"} == set()
    assert {"torch", "safetensors", "tokenizers"} <= names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without network from the working tree."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_both_packages_and_their_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    info = f"quantforge-{quantforge.__version__}.dist-info"
    assert tops == {"quantforge", "quantforge_kernels", info}
    assert "quantforge/py.typed" in names
    assert "quantforge/_data/recipes/awq_w4a16.yaml" in names
    assert "quantforge/_data/calib_data/held_out.txt" in names
    assert f"{info}/licenses/LICENSE" in names
    tracked = {
        path.relative_to(folder.parent).as_posix()
        for folder in (ROOT / "quantforge", ROOT / "kernels" / "quantforge_kernels")
        for path in folder.rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == tracked


@pytest.mark.slow
def test_an_unpacked_wheel_finds_its_own_data(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "from quantforge.resources import resource_folder\n"
        "for kind in ('recipes', 'calib_data'): print(resource_folder(kind))\n"
    )
    command = [sys.executable, "-P", "-S", "-c", program]  # -S: no site, hence no editable install
    path = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=True)
    data = tmp_path / "quantforge" / "_data"
    assert done.stdout.split() == [str(data / "recipes"), str(data / "calib_data")]
