"""`CheckpointReader`: a model folder, read lazily and trusted in nothing.

Only safetensors are read (never pickle). Headers are checked when the folder is opened; a tensor
is mapped into memory when it is asked for, so a model larger than memory can be walked.
"""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantforge.checkpoint.base import Format, QuantizationLayout, TensorSpec, format_of_config
from quantforge.checkpoint.shard import DTYPES
from quantforge.errors import CheckpointError
from quantforge.progress import Progress, silent
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme

CONFIG_FILE = "config.json"
WEIGHT_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files beside the weights and config.json that a model needs in order to talk."""

HASH_BLOCK_BYTES = 1 << 20
HASH_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """Where a tensor lies, and what its header says of it."""

    file: str
    spec: TensorSpec


class CheckpointReader:
    """The tensors and config of a Hugging Face folder.

    `config` is config.json; `layout` and `format` say how it is quantized, None when it is not.
    Raises `CheckpointError` with file and tensor for whatever is missing, corrupt or hostile, and
    `UnsupportedError` for a quantization format that we do not read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"model folder {self.folder} does not exist")
        self.config: dict[str, Any] = read_json(self.folder / CONFIG_FILE)
        self.layout: QuantizationLayout | None = None
        self.format: Format | None = None
        self._read_quantization()
        self._files = _weight_file_names(self.folder)
        self._handles = {name: _open(self.folder / name) for name in self._files}
        self._stored, self._unlisted = self._index_tensors()

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._stored))

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of a tensor, without reading it."""
        return self._find(name).spec

    def tensor(self, name: str) -> Tensor:
        """A tensor on the CPU, mapped from its file: do not write to it."""
        stored = self._find(name)
        try:
            tensor: Tensor = self._handles[stored.file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.folder / stored.file}: cannot read tensor {name}: {error}"
            ) from error
        return tensor

    def is_quantized(self, layer: str) -> bool:
        """Whether config.json says that the linear `layer` is quantized."""
        return self.scheme(layer) is not None

    def scheme(self, layer: str) -> QuantScheme | None:
        """The scheme that config.json gives `layer`, None for a dense one."""
        return None if self.layout is None else self.layout.scheme(layer, class_name(layer))

    def layer_tensors(self, layer: str) -> dict[str, Tensor]:
        """Suffix -> tensor of everything stored under `layer` (bias included), mapped."""
        prefix = f"{layer}."
        names = (n for n in self._stored if n.startswith(prefix))
        return {n[len(prefix) :]: self.tensor(n) for n in names if "." not in n[len(prefix) :]}

    def linear(self, layer: str) -> Tensor | QuantizedTensor:
        """The weight of a linear: dense [out_features, in_features], or quantized."""
        scheme = self.scheme(layer)
        if scheme is None or self.format is None:
            return self.tensor(f"{layer}.weight")
        try:
            return self.format.decode(self.layer_tensors(layer), scheme)
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.folder}: layer {layer} ({scheme} in {CONFIG_FILE}): {error}"
            ) from error

    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files, sorted by name."""
        return tuple(self.folder / name for name in self._files)

    def side_files(self) -> tuple[Path, ...]:
        """The tokenizer, chat template and generation config files that exist."""
        return tuple(p for name in SIDE_FILES if (p := self.folder / name).is_file())

    def unlisted(self) -> tuple[str, ...]:
        """Tensors that lie in a shard but that the index does not name."""
        return self._unlisted

    def num_weight_bytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(stored.spec.num_bytes for stored in self._stored.values())

    def file_hashes(self, progress: Progress = silent) -> dict[str, str]:
        """File name -> sha256 of weights, index, config and `side_files`. Progress in MiB."""
        index = (INDEX_FILE,) if (self.folder / INDEX_FILE).is_file() else ()
        named = [self.folder / name for name in (*self._files, *index, CONFIG_FILE)]
        return hash_files([*named, *self.side_files()], progress)

    def _read_quantization(self) -> None:
        section = self.config.get("quantization_config")
        if section is None:
            return
        path = self.folder / CONFIG_FILE
        if not isinstance(section, Mapping):
            raise CheckpointError(f"{path}: quantization_config is no mapping but {section!r}")
        self.format = format_of_config(section)
        try:
            self.layout = self.format.parse_config(section)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def _index_tensors(self) -> tuple[dict[str, _Stored], tuple[str, ...]]:
        """Every tensor that the index names (or a lone file holds), and those it leaves out."""
        held = {name: set(handle.keys()) for name, handle in self._handles.items()}
        listed = _weight_map(self.folder)
        if listed is None:
            listed = {tensor: file for file, tensors in held.items() for tensor in tensors}
        for tensor, file in listed.items():
            if tensor not in held[file]:
                raise CheckpointError(
                    f"{self.folder / file} lacks tensor {tensor}, which {INDEX_FILE} places there"
                )
        extra = sorted(t for f, tensors in held.items() for t in tensors if listed.get(t) != f)
        stored = {t: _Stored(file=f, spec=self._header(f, t)) for t, f in listed.items()}
        return stored, tuple(extra)

    def _header(self, file: str, tensor: str) -> TensorSpec:
        part = self._handles[file].get_slice(tensor)
        kind = part.get_dtype()
        if kind not in DTYPES:
            raise CheckpointError(
                f"{self.folder / file}: tensor {tensor} has dtype {kind}; "
                f"known: {', '.join(DTYPES)}"
            )
        return TensorSpec(shape=tuple(part.get_shape()), dtype=DTYPES[kind])

    def _find(self, name: str) -> _Stored:
        if name not in self._stored:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing")
        return self._stored[name]


def class_name(layer: str) -> str:
    """The torch class that targets mean by a layer's name: ``Embedding`` or ``Linear``."""
    return "Embedding" if layer.rpartition(".")[2].startswith("embed") else "Linear"


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in the JSON file `path`; raises `CheckpointError`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} holds a {type(document).__name__}; expected a mapping")
    return document


def hash_files(paths: Sequence[Path], progress: Progress = silent) -> dict[str, str]:
    """File name -> sha256 in hex, up to `HASH_THREADS` files at a time; progress in MiB."""
    total = sum(-(-path.stat().st_size // HASH_BLOCK_BYTES) for path in paths)
    done = 0
    counting = threading.Lock()

    def digest(path: Path) -> str:
        nonlocal done
        found = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while block := file.read(HASH_BLOCK_BYTES):
                    found.update(block)
                    with counting:
                        done += 1
                        progress("hash", done, total)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        return found.hexdigest()

    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="hash") as pool:
        digests = list(pool.map(digest, paths))
    return {path.name: found for path, found in zip(paths, digests, strict=True)}


def _weight_file_names(folder: Path) -> tuple[str, ...]:
    """Names of the safetensors files that hold the model; a lone file goes before an index."""
    if (folder / WEIGHT_FILE).is_file():
        return (WEIGHT_FILE,)
    listed = _weight_map(folder)
    if listed is None:
        raise CheckpointError(_no_weights(folder))
    files = tuple(sorted(set(listed.values())))
    for name in files:
        if not (folder / name).is_file():
            raise CheckpointError(f"shard {folder / name}, named by {INDEX_FILE}, does not exist")
    return files


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor -> file from the index, None where a lone file or no index stands."""
    path = folder / INDEX_FILE
    if (folder / WEIGHT_FILE).is_file() or not path.is_file():
        return None
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path}: weight_map is missing, empty or no mapping")
    for tensor, file in listed.items():
        plain = isinstance(file, str) and Path(file).name == file and "\\" not in file
        if not plain or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: tensor {tensor} is placed in {file!r}; "
                "expected the plain name of a .safetensors file of this folder"
            )
    return listed


def _no_weights(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if not pickles:
        return f"{folder} holds neither {WEIGHT_FILE} nor {INDEX_FILE}"
    return (
        f"{folder} holds only pickle weights ({pickles[0]}), which can run code when they are "
        "opened and are never read; convert them where you trust them: transformers' "
        "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUTPUT)"
    )


def _open(path: Path) -> Any:
    """A safetensors handle; the header and the file's length are checked here."""
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from error
