"""`CheckpointWriter`: a model folder that appears whole or not at all.

Everything is written into a hidden sibling, ``.<name>.partial-<pid>``, and renamed at the end. A
killed run leaves only that sibling, which the next run to the same output removes (its folder lock
tells it from a run that is still alive).

Tensors stream straight into shards (`shard.py`), so memory is bounded by one tensor.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from quantforge.checkpoint.base import Format
from quantforge.checkpoint.manifest import Manifest, write_manifest
from quantforge.checkpoint.reader import CONFIG_FILE, INDEX_FILE, WEIGHT_FILE, CheckpointReader
from quantforge.checkpoint.shard import DTYPE_NAMES, Shard
from quantforge.errors import CheckpointError, UsageError
from quantforge.qtensor import QuantizedTensor


class CheckpointWriter:
    """Writes a model folder at `output`; a context manager, finished by `commit`.

    Raises `UsageError` at once if `output` exists without `overwrite`, is no model folder, or is or
    contains `source`; and `CheckpointError` if less than `expected_bytes` are free, or when the
    disk fails. Leaving the context without `commit` removes what was written and leaves an
    existing output as it was.
    """

    def __init__(
        self,
        output: Path,
        *,
        overwrite: bool = False,
        max_shard_bytes: int = 5_000_000_000,
        source: Path | None = None,
        expected_bytes: int | None = None,
    ) -> None:
        self.output = Path(os.path.realpath(output))
        self.overwrite = overwrite
        self.max_shard_bytes = max_shard_bytes
        self.partial = _sibling(self.output, "partial")
        with _disk_errors(self.output):
            remove_stale(self.output)
            refuse_output(self.output, overwrite, source)
            self.output.parent.mkdir(parents=True, exist_ok=True)
            _refuse_small_disk(self.output.parent, expected_bytes)
            self.partial.mkdir()
            self._lock = _lock(self.partial)
        self._shard: Shard | None = None
        self._shard_paths: list[Path] = []
        self._places: dict[str, int] = {}
        self._total_bytes = 0
        self._committed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shard is not None:
            with contextlib.suppress(OSError):
                self._shard.file.close()
        if not self._committed:
            shutil.rmtree(self.partial, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Appends `tensor`, of any device, under `name`."""
        if name in self._places:
            raise CheckpointError(f"tensor {name} was added twice to {self.output}")
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}, not one of safetensors")
        stored = tensor.detach().cpu().contiguous()
        with _disk_errors(self.output):
            if self._shard is not None and not self._shard.fits(name, stored, self.max_shard_bytes):
                self._close_shard()
            if self._shard is None:
                self._shard = Shard(self.partial / f"shard-{len(self._shard_paths)}")
            self._shard.add(name, stored)
        self._places[name] = len(self._shard_paths)
        self._total_bytes += stored.nbytes

    def add_linear(
        self, layer: str, weight: QuantizedTensor | Tensor, format: Format | None = None
    ) -> None:
        """Appends the weight of a linear: dense, or as `format` encodes it."""
        if isinstance(weight, Tensor):
            self.add(f"{layer}.weight", weight)
            return
        assert format is not None, "a quantized weight needs a format"
        for suffix, tensor in format.encode(weight).items():
            self.add(f"{layer}.{suffix}", tensor)

    def add_bytes(self, filename: str, data: bytes) -> None:
        """Writes a small file beside the weights."""
        assert Path(filename).name == filename, f"{filename!r} is no plain file name"
        with _disk_errors(self.output):
            _write_durably(self.partial / filename, data)

    def copy_file(self, path: Path) -> None:
        """Copies the file `path` (its content, if it is a link) beside the weights."""
        target = self.partial / path.name
        with _disk_errors(self.output):
            shutil.copyfile(path, target)
            _sync(target)

    def commit(
        self,
        config: Mapping[str, Any],
        *,
        manifest: Manifest | None = None,
        check: Callable[[Path], None] | None = None,
    ) -> Path:
        """Finishes the folder, lets `check` look at it, and gives it its name.

        `config` becomes config.json; `manifest`, with the hashes of all files filled in, becomes
        quantforge.json. Files are hashed while `check` runs. When `check` raises, nothing appears
        at the output.
        """
        if not self._places:
            raise CheckpointError(f"no tensor was written to {self.output}")
        with _disk_errors(self.output):
            self._close_shard()
            self._name_shards()
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        self.add_bytes(CONFIG_FILE, text.encode())
        with ThreadPoolExecutor(1) as pool:
            hashing = pool.submit(CheckpointReader(self.partial).file_hashes) if manifest else None
            if check is not None:
                check(self.partial)
        if manifest is not None and hashing is not None:
            write_manifest(self.partial, replace(manifest, files=hashing.result()))
        with _disk_errors(self.output):
            _sync(self.partial)
            self._publish()
            _sync(self.output.parent)
        return self.output

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shard_paths.append(self._shard.path)
            self._shard = None

    def _name_shards(self) -> None:
        """Gives the shards their final names and writes the index if there are several."""
        count = len(self._shard_paths)
        if count == 1:
            self._shard_paths[0].rename(self.partial / WEIGHT_FILE)
            return
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for path, name in zip(self._shard_paths, names, strict=True):
            path.rename(self.partial / name)
        index = {
            "metadata": {"total_size": self._total_bytes},
            "weight_map": {tensor: names[i] for tensor, i in sorted(self._places.items())},
        }
        _write_durably(self.partial / INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())

    def _publish(self) -> None:
        """Renames the folder to its output; an old output steps aside first and is removed last."""
        old = _sibling(self.output, "old")
        replaced = self.overwrite and self.output.exists()
        if replaced:
            self.output.rename(old)
        try:
            self.partial.rename(self.output)
        except OSError as error:
            if replaced:
                old.rename(self.output)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise UsageError(
                    f"output {self.output} appeared while this run was writing; it was kept"
                ) from error
            raise
        self._committed = True
        if replaced:
            shutil.rmtree(old, ignore_errors=True)


def remove_stale(output: Path) -> None:
    """Removes what killed runs to `output` left, and brings back an output that one moved aside."""
    for old in output.parent.glob(f".{_escape(output.name)}.old-*"):
        if output.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(output)
    for partial in output.parent.glob(f".{_escape(output.name)}.partial-*"):
        with contextlib.suppress(FileNotFoundError):
            lock = _lock(partial)
            if lock is not None:
                shutil.rmtree(partial, ignore_errors=True)
                os.close(lock)


def _sibling(output: Path, kind: str) -> Path:
    return output.with_name(f".{output.name}.{kind}-{os.getpid()}")


def _escape(name: str) -> str:
    """`name` with glob's special characters taken literally."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock of `folder`; None if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held elsewhere, or a file system without locks: leave it alone
        os.close(descriptor)
        return None
    return descriptor


def refuse_output(output: Path, overwrite: bool, source: Path | None) -> None:
    """Raises `UsageError` where a model made of `source` must not be written to `output`, a real
    path: it exists without `overwrite`, is no model folder, or is or contains `source`."""
    if source is not None:
        real = Path(os.path.realpath(source))
        if real == output or output in real.parents:
            raise UsageError(
                f"output {output} is or contains the source {real}; use another folder"
            )
    if not output.exists():
        return
    if not output.is_dir():
        raise UsageError(f"output {output} exists and is no folder; use another name")
    if not overwrite:
        raise UsageError(f"output {output} exists; use --overwrite to replace it")
    if any(output.iterdir()) and not (output / CONFIG_FILE).is_file():
        raise UsageError(
            f"output {output} exists and is no model folder (no {CONFIG_FILE}); "
            "--overwrite replaces model folders only"
        )


def _refuse_small_disk(folder: Path, expected_bytes: int | None) -> None:
    free = shutil.disk_usage(folder).free
    if expected_bytes is not None and free < expected_bytes:
        raise CheckpointError(
            f"{folder} has {free / 1e9:.2f} GB free; the output needs {expected_bytes / 1e9:.2f} GB"
        )


@contextlib.contextmanager
def _disk_errors(output: Path) -> Iterator[None]:
    """Turns what the disk refuses into a `CheckpointError` that names the output."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {output}: {error.strerror}") from error


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Makes a file's content, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
