"""What a run keeps beside its output, so that ``--resume`` can go on where it was killed.

::

    .<name>.resume/
        fingerprint.json            what decides the bits of the output
        block-00000.safetensors     one file a finished block: encoded tensors, dense ones, reports
        block-00001.safetensors
        hidden-00001.safetensors    the calibration samples behind block 1; the newest only

Every file is written beside its name, made durable and renamed, so that it is whole or absent. The
hidden states only save time: behind the newest ones, finished blocks are run forward again, as
they were quantized, which gives the same bits. So a run of any method resumes after the last
finished block, however rarely the hidden states are written.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantforge.calibration.data import CalibrationSet
from quantforge.calibration.statistics import StatisticsFile
from quantforge.checkpoint.reader import read_json
from quantforge.checkpoint.shard import Shard
from quantforge.errors import CheckpointError, QuantForgeError, UsageError
from quantforge.fingerprint import differences
from quantforge.methods.base import LayerReport
from quantforge.plan import QuantizePlan

FINGERPRINT_FILE = "fingerprint.json"
REPORTS = "reports"
"""Name of the tensor (uint8) that holds a block's reports and the order of its tensors as JSON."""

HIDDEN_BYTES_PER_BLOCK = 16 << 20
"""How much of the hidden states may be written a block, on the average, when nothing is asked.

To run finished blocks forward again costs a GPU less than a second each; to write 1 GB costs more.
"""
PART_BYTES = 64 << 20
"""The hidden states are copied in pieces of this size, so that host memory stays small."""
NUM_SHOWN = 3
"""Differences of two fingerprints that a message spells out; the rest is counted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedBlock:
    """A quantized block. Names are within the block; both mappings are in the order of writing.

    - `encoded` the tensors of quantized linears as the format lays them out, on the CPU;
    - `dense` weights, norms and biases in float32, not yet rounded to the source's dtype;
    - `reports` with full layer names.
    """

    encoded: Mapping[str, Tensor]
    dense: Mapping[str, Tensor]
    reports: tuple[LayerReport, ...]


def work_folder(output: Path) -> Path:
    """The folder in which a run to `output` keeps its progress."""
    real = Path(os.path.realpath(output))
    return real.with_name(f".{real.name}.resume")


def num_kept_blocks(output: Path) -> int:
    """Finished blocks that a run to `output` left and that ``--resume`` would find."""
    folder = work_folder(output)
    if not (folder / FINGERPRINT_FILE).is_file():
        return 0
    return _count_blocks(folder)


def kept_allocation(output: Path) -> dict[str, Any] | None:
    """The schemes that a killed run to `output` had chosen by sensitivity, None where none are."""
    path = work_folder(output) / FINGERPRINT_FILE
    if not path.is_file():
        return None
    plan = read_json(path).get("plan")
    found = plan.get("allocation") if isinstance(plan, dict) else None
    return found if isinstance(found, dict) else None


def progress_bytes(
    plan: QuantizePlan, evidence: CalibrationSet | StatisticsFile | None, dtype: torch.dtype
) -> int:
    """About what a work folder takes at most: the blocks, the newest hidden states and the next."""
    if not isinstance(evidence, CalibrationSet):
        return plan.planned_bytes
    hidden = evidence.token_ids.numel() * plan.config.hidden_size * dtype.itemsize
    streams = 2 if plan.method.needs(plan.options).mismatch else 1
    return plan.planned_bytes + 2 * streams * hidden


class WorkFolder:
    """The progress of one run; a context manager that `open_work_folder` makes.

    Leaving it after success removes the folder. After an interrupt, or an error of the system such
    as a full disk, it stays if a block is finished; after any other error of ours it goes, since a
    resumed run would only meet the error again. Methods raise `CheckpointError` for a disk that
    refuses and for damaged files.
    """

    def __init__(self, folder: Path, lock: int | None, *, every: int | None) -> None:
        self.folder = folder
        self.every = every
        self._lock = lock
        self._num_found = _count_blocks(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or not _is_worth_resuming(error) or _count_blocks(self.folder) == 0:
            remove_work(self.folder)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def identify(self, fingerprint: Mapping[str, Any]) -> None:
        """Commits the fingerprint of a folder opened without one; no block may come before it."""
        with _disk_errors(self.folder):
            _write_fingerprint(self.folder, fingerprint)

    def block(self, layer: int) -> FinishedBlock | None:
        """Block `layer` as an earlier run finished it, None if it has yet to be quantized."""
        if layer >= self._num_found:
            return None
        path = _block_path(self.folder, layer)
        try:
            with _open(path) as file:
                document = json.loads(file.get_tensor(REPORTS).numpy().tobytes())
                return FinishedBlock(
                    encoded={n: file.get_tensor(f"encoded.{n}") for n in document["encoded"]},
                    dense={n: file.get_tensor(f"dense.{n}") for n in document["dense"]},
                    reports=tuple(LayerReport(**report) for report in document["reports"]),
                )
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(path) from error

    def add_block(self, layer: int, block: FinishedBlock) -> None:
        """Commits block `layer`."""
        document = {
            "encoded": list(block.encoded),
            "dense": list(block.dense),
            "reports": [asdict(report) for report in block.reports],
        }
        text = bytearray(json.dumps(document).encode())
        with _committed(_block_path(self.folder, layer)) as shard:
            for name, tensor in block.encoded.items():
                shard.add(f"encoded.{name}", tensor.contiguous())
            for name, tensor in block.dense.items():
                shard.add(f"dense.{name}", tensor.cpu().contiguous())
            shard.add(REPORTS, torch.frombuffer(text, dtype=torch.uint8))

    def restore_hidden(self, *hidden: Tensor) -> int:
        """Fills `hidden` [tokens, hidden size] with the newest states that finished blocks led to,
        one tensor a stream of samples.

        Gives the number of blocks that they have passed; 0, and `hidden` untouched, if none is
        kept.
        """
        kept = [p for p in self._hidden_paths() if _layer_of(p) < self._num_found]
        if not kept:
            return 0
        path = kept[-1]
        try:
            with _open(path) as file:
                for index, rows in enumerate(part for h in hidden for part in _parts(h)):
                    rows.copy_(file.get_tensor(f"rows.{index}"))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise _damaged(path) from error
        return _layer_of(path) + 1

    def keep_hidden(self, layer: int, *hidden: Tensor) -> None:
        """Commits the states behind block `layer` if their turn has come, and drops older ones."""
        every = self.every or hidden_interval(sum(h.nbytes for h in hidden))
        if (layer + 1) % every:
            return
        with _committed(self.folder / f"hidden-{layer:05d}.safetensors") as shard:
            for index, rows in enumerate(part for h in hidden for part in _parts(h)):
                shard.add(f"rows.{index}", rows.cpu().contiguous())
        for path in self._hidden_paths():
            if _layer_of(path) < layer:
                path.unlink(missing_ok=True)

    def _hidden_paths(self) -> list[Path]:
        return sorted(self.folder.glob("hidden-*.safetensors"))


def open_work_folder(
    output: Path,
    fingerprint: Mapping[str, Any] | None,
    *,
    resume: bool,
    every: int | None = None,
    expected_bytes: int = 0,
) -> WorkFolder:
    """The work folder of a run to `output`: an earlier run's with `resume`, else an empty one.

    A `fingerprint` of None is for a fresh run that has yet to learn it (`WorkFolder.identify`).
    `every` is how many blocks pass between two writes of the hidden states; None chooses by size.
    `expected_bytes` of output and progress together must have room, or `CheckpointError` is raised.
    Raises `UsageError` while another run works there, and when the earlier run was not the same;
    the message says in what it differs.
    """
    folder = work_folder(output)
    with _disk_errors(folder), contextlib.ExitStack() as on_error:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder, on_error) if folder.exists() else None
        if resume and fingerprint is not None and (folder / FINGERPRINT_FILE).is_file():
            _require_same(folder, fingerprint)
            for path in folder.glob("*.partial"):
                path.unlink()
            _refuse_small_disk(folder, expected_bytes)
        else:
            on_error.close()
            remove_work(folder)
            _refuse_small_disk(folder, expected_bytes)
            folder.mkdir()
            lock = _lock(folder, on_error)
            if fingerprint is not None:
                _write_fingerprint(folder, fingerprint)
        on_error.pop_all()
    return WorkFolder(folder, lock, every=every)


def _write_fingerprint(folder: Path, fingerprint: Mapping[str, Any]) -> None:
    partial = folder / f"{FINGERPRINT_FILE}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(fingerprint, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _rename(partial, folder / FINGERPRINT_FILE)


def hidden_interval(num_bytes: int) -> int:
    """Blocks between two writes of hidden states of this size: 1 for small ones."""
    return max(1, -(-num_bytes // HIDDEN_BYTES_PER_BLOCK))


def remove_work(folder: Path) -> None:
    """Removes a work folder; its fingerprint first, so that half of it is never resumed."""
    with contextlib.suppress(OSError):
        (folder / FINGERPRINT_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _refuse_small_disk(folder: Path, expected_bytes: int) -> None:
    free = shutil.disk_usage(folder.parent).free
    present = sum(path.stat().st_size for path in folder.glob("*"))
    if free + present < expected_bytes:
        raise CheckpointError(
            f"{folder.parent} has {free / 1e9:.2f} GB free; the output and the progress kept "
            f"beside it need {(expected_bytes - present) / 1e9:.2f} GB; make room, or keep none "
            "with --resume-every 0"
        )


def _require_same(folder: Path, fingerprint: Mapping[str, Any]) -> None:
    changed = differences(read_json(folder / FINGERPRINT_FILE), fingerprint)
    if changed:
        more = f"; and {len(changed) - NUM_SHOWN} more" if len(changed) > NUM_SHOWN else ""
        raise UsageError(
            f"{folder} holds the progress of another run: {'; '.join(changed[:NUM_SHOWN])}{more}; "
            "resume with what that run had, or start over without --resume"
        )


def _is_worth_resuming(error: BaseException) -> bool:
    return not isinstance(error, QuantForgeError) or isinstance(error.__cause__, OSError)


def _count_blocks(folder: Path) -> int:
    count = 0
    while _block_path(folder, count).is_file():
        count += 1
    return count


def _block_path(folder: Path, layer: int) -> Path:
    return folder / f"block-{layer:05d}.safetensors"


def _layer_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _parts(hidden: Tensor) -> tuple[Tensor, ...]:
    """Views of rows of `hidden`, of at most `PART_BYTES`."""
    return torch.split(hidden, max(1, PART_BYTES // max(1, hidden[0].nbytes)))


def _open(path: Path) -> Any:
    return safe_open(str(path), framework="pt", device="cpu")


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is damaged; start over without --resume")


@contextlib.contextmanager
def _committed(path: Path) -> Iterator[Shard]:
    """A safetensors file that gets the name `path` when the context ends well."""
    partial = path.with_name(f"{path.name}.partial")
    with _disk_errors(path.parent):
        shard = Shard(partial)
        try:
            yield shard
            shard.close()
            _rename(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                shard.file.close()
            partial.unlink(missing_ok=True)
            raise


def _rename(partial: Path, path: Path) -> None:
    """Gives a durable file its name, durably."""
    os.replace(partial, path)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(folder: Path, on_error: contextlib.ExitStack) -> int | None:
    """A descriptor that holds the lock of `folder`; None on a file system without locks.

    `on_error` will close it unless its callbacks are taken away.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UsageError(f"another run is writing to {folder}; wait for it or end it") from error
    except OSError:
        os.close(descriptor)
        return None
    on_error.callback(os.close, descriptor)
    return descriptor


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot keep progress in {folder}: {error.strerror}; "
            "make room, or keep none with --resume-every 0"
        ) from error
