"""Where a model named on the command line lies: a folder, a GGUF file, or the Hugging Face Hub."""

import hashlib
import os
import re
from pathlib import Path

from quantforge.errors import CheckpointError
from quantforge.progress import Progress, silent

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")
HUB_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.jinja")
"""What is fetched from the Hub: never pickled weights, never code."""
NOT_HUB_FILES = ("*/*", "consolidated*")
"""Subfolders (exports to other runtimes) and second copies of the weights in a vendor's layout."""

WHAT_A_MODEL_IS = "MODEL is a local folder, a .gguf file, or a Hugging Face id such as org/name"


def resolve_model(model: str, *, revision: str | None = None, progress: Progress = silent) -> Path:
    """The local folder of `model`, which is imported or downloaded first where needed.

    A GGUF file is imported once, into `cache_folder`, under the sha256 of its content. `revision`
    (branch, tag or commit) applies to the Hub, where ``HF_HUB_OFFLINE`` is respected.

    Raises `CheckpointError` if there is no such model or it cannot be read.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(f"{model} is a file but not a .gguf file; {WHAT_A_MODEL_IS}")
        return _import_once(path, progress)
    if path.suffix.lower() == ".gguf" or not HUB_ID.fullmatch(model) or _looks_local(model):
        raise CheckpointError(f"there is no file or folder {model}; {WHAT_A_MODEL_IS}")
    return _download(model, revision)


def cache_folder() -> Path:
    """``$QUANTFORGE_CACHE``, else ``quantforge`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if chosen := os.environ.get("QUANTFORGE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "quantforge"


def _looks_local(model: str) -> bool:
    return model.startswith((".", "/", "~", "\\"))


def _import_once(path: Path, progress: Progress) -> Path:
    from quantforge.models.gguf_import import IMPORT_VERSION, import_gguf

    digest = _sha256(path, progress)
    folder = cache_folder() / "gguf" / f"{digest}-v{IMPORT_VERSION}"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    return import_gguf(path, folder, overwrite=True, progress=progress)


def _sha256(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    total = path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
            progress(f"hash {path.name}", file.tell(), total)
    return digest.hexdigest()


def _download(model: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    where = f"{model} at revision {revision}" if revision else model
    try:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(HUB_FILES),
            ignore_patterns=list(NOT_HUB_FILES),
        )
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"there is no local folder {model}, it was not downloaded before, and the Hugging Face "
            f"Hub cannot be reached ({_first_line(error)}); {WHAT_A_MODEL_IS}"
        ) from error
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{where} is gated on the Hugging Face Hub; accept its terms there and log in with "
            "'hf auth login'"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise CheckpointError(
            f"no model {where} on the Hugging Face Hub ({_first_line(error)}), and no local "
            f"folder of that name; {WHAT_A_MODEL_IS}"
        ) from error
    return _checked(Path(folder), model)


def _checked(folder: Path, model: str) -> Path:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{model} on the Hugging Face Hub has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{model} on the Hugging Face Hub has no *.safetensors files; pickled weights are "
            "never loaded, so convert it first"
        )
    return folder


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
