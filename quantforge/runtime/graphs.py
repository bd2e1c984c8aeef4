"""Decode steps at fixed sizes, replayed as CUDA graphs.

A decode step of an 8B model is some 500 kernel launches, and Python issues them more slowly than a
GPU runs them. So a step in which every sequence has one token is padded up to one of a ladder of
sizes and computed from static tensors; its launches are recorded at the first use of the size and
from then on replayed as one. Hidden states come out; scores and sampling follow as ordinary
launches, which the GPU reaches long after they were issued.

- A padding row has token 0 at position 0, a context of one token, and slot -1: it writes nowhere,
  reads what page 0 holds, and its hidden state is dropped.
- Block tables have powers of two for widths, because attention cuts contexts by the width of the
  table; lengths are read on the device, so a graph serves every context that its table can hold.
- Sizes are padded whether steps are recorded or not, so both give the same bits. On a CPU, where
  padding would cost time and there is nothing to record, every number of sequences is a size.
- All graphs share one pool of memory, and run one after another on one stream (weights of `w4a16`
  have counters). What leaves a graph is copied to a static tensor, valid until the next step.

A step that cannot be recorded (an op reads something back, or memory is short) is a reason to go on
without graphs, which is logged once and shown by `Engine.kernels`; with ``cuda_graphs="on"`` it is
an error.

Legend: S sequences, B pages of a block table, D hidden size.
"""

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.errors import UnsupportedError
from quantforge.runtime.batch import StepBatch
from quantforge.runtime.kv.pool import BlockManager
from quantforge.runtime.packing import Layout, host_buffer
from quantforge.runtime.runner import Runner
from quantforge.runtime.scheduler import Chunk

logger = logging.getLogger(__name__)

SMALLEST_WIDTH = 64
"""Pages of the narrowest block table."""

WIDTH_MULTIPLE = 16
"""Of the widest one: kernels are compiled anew for strides that are not multiples of 16."""

GRAPH_BYTES = 8 << 20
"""Device memory that a driver may take for one graph, over what its tensors need: a margin."""

Work = Callable[[], None]
Record = Callable[[Work], Work]
"""Takes work on static tensors, and gives what does it again."""


def batch_ladder(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes of a GPU's decode steps: 1, 2, 4, then multiples of 8 (of 32 beyond 256)."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_num_seqs + 32, 32)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def width_ladder(max_pages: int) -> tuple[int, ...]:
    """Pages of a block table: powers of two, and at the end what `max_pages` need."""
    widest = max(SMALLEST_WIDTH, -(-max_pages // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
    powers = range(SMALLEST_WIDTH.bit_length() - 1, widest.bit_length())
    return (*(1 << power for power in powers if 1 << power < widest), widest)


def refuse_graphs(device: torch.device) -> str | None:
    """Why steps on `device` cannot be recorded, or None."""
    return None if device.type == "cuda" else f"needs a CUDA device, not {device.type}"


def cuda_recorder() -> Record:
    """Records CUDA graphs, all in one pool of memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # the outer one restores the stream, which a capture that fails does not
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            work()
        replay: Work = graph.replay
        return replay

    return record


@dataclass(frozen=True, kw_only=True, slots=True)
class _Size:
    """A size of step: its arrays on the host, and the same on the device."""

    size: int
    layout: Layout
    host: list[Tensor]
    batch: StepBatch
    fresh_S: Tensor


class DecodeInputs:
    """The integers of a decode step, kept from step to step on the host and on the device.

    Only rows of the block table whose pages changed are written again; while none does, the table
    is not copied either.
    """

    def __init__(self, sizes: Sequence[int], widths: Sequence[int], device: torch.device) -> None:
        self.sizes, self.widths, self.device = tuple(sizes), tuple(widths), device
        num_bytes = self._layout(sizes[-1], widths[-1]).num_bytes
        self._host = torch.zeros(num_bytes, dtype=torch.uint8)
        self._static = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._starts = torch.arange(sizes[-1] + 1, dtype=torch.int32, device=device)
        self._known: dict[tuple[int, int], _Size] = {}
        self._rows: list[tuple[Sequence[int], int]] = []
        self._filled: _Size | None = None

    @staticmethod
    def _layout(size: int, width: int) -> Layout:
        """Tokens, positions, slots, pages to be cleared, contexts, block table."""
        columns = [(torch.int64, (size,))] * 4
        return Layout([*columns, (torch.int32, (size,)), (torch.int32, (size, width))])

    def fill(self, chunks: Sequence[Chunk], pool: BlockManager) -> tuple[StepBatch, Tensor]:
        """(the step padded to a size of the ladder, pages int64 to be cleared before it).

        The same static tensors for every step of a size; they are valid until the next call.
        """
        each = [pool.pages(chunk.request.request_id) for chunk in chunks]
        used = [pool.pages_for(chunk.start + 1) for chunk in chunks]
        place = self._place(len(chunks), max(used))
        last, self._filled = self._filled, None  # a failure on the way leaves nothing half known
        if place is not last:
            self._rows.clear()
        clean = self._write_tables(place.host[-1], each, used)
        fresh = self._write_columns(place.host, chunks, each, pool.page_size)
        end = place.layout.starts[-1] if clean else place.layout.num_bytes
        staged = host_buffer(end, self.device)
        staged.copy_(self._host[:end])
        self._static[:end].copy_(staged, non_blocking=True)
        self._filled = place
        return place.batch, place.fresh_S[:fresh]

    def _place(self, num_sequences: int, num_pages: int) -> _Size:
        size = self.sizes[bisect.bisect_left(self.sizes, num_sequences)]
        width = self.widths[bisect.bisect_left(self.widths, num_pages)]
        if (size, width) not in self._known:
            layout = self._layout(size, width)
            token_ids, positions, slots, fresh, contexts, table = layout.views(self._static)
            self._known[size, width] = _Size(
                size=size,
                layout=layout,
                host=layout.views(self._host),
                fresh_S=fresh,
                batch=StepBatch(
                    token_ids_T=token_ids,
                    positions_T=positions,
                    slot_mapping_T=slots,
                    block_table_SB=table,
                    query_start_S1=self._starts[: size + 1],
                    context_len_S=contexts,
                    fresh_pages=None,
                ),
            )
        return self._known[size, width]

    def _write_tables(
        self, table_SB: Tensor, each: Sequence[Sequence[int]], used: Sequence[int]
    ) -> bool:
        """Writes the rows that changed, each filled up with its own first page; whether none did.

        A padding row may keep what a sequence left there: any page number will do."""
        rows, table = self._rows, table_SB.numpy()
        if not rows:
            table[:] = 0
        clean = bool(rows)
        for i, (pages, count) in enumerate(zip(each, used, strict=True)):
            known = i < len(rows)
            if known and rows[i][0] is pages and rows[i][1] == count:
                continue
            clean = False
            table[i, :count] = pages[:count]
            table[i, count:] = pages[0]
            rows[i : i + 1] = [(pages, count)]
        return clean

    @staticmethod
    def _write_columns(
        host: Sequence[Tensor],
        chunks: Sequence[Chunk],
        each: Sequence[Sequence[int]],
        page_size: int,
    ) -> int:
        """Writes everything but the table; the number of pages to be cleared."""
        positions = [chunk.start for chunk in chunks]
        pages = [own[at // page_size] for own, at in zip(each, positions, strict=True)]
        pairs = list(zip(pages, positions, strict=True))
        slots = [page * page_size + at % page_size for page, at in pairs]
        fresh = [page for page, at in pairs if at % page_size == 0] if page_size > 1 else []
        columns: list[tuple[list[int], int]] = [
            ([chunk.request.token_ids[chunk.start] for chunk in chunks], 0),
            (positions, 0),
            (slots, -1),
            (fresh, 0),
            ([at + 1 for at in positions], 1),
        ]
        for view, (values, padding) in zip(host, columns, strict=False):
            numbers = view.numpy()
            numbers[: len(values)] = values
            numbers[len(values) :] = padding
        return len(fresh)


class DecodeSteps:
    """Decode steps of a `Runner`, for at most ``sizes[-1]`` sequences of ``widths[-1]`` pages."""

    def __init__(
        self,
        runner: Runner,
        *,
        sizes: Sequence[int],
        widths: Sequence[int],
        record: Record | None = None,
        refusal: str | None = None,
        strict: bool = False,
    ) -> None:
        """`record` None computes every step anew, for the reason `refusal`; `strict` makes a step
        that cannot be recorded an error."""
        self._runner = runner
        self._inputs = DecodeInputs(sizes, widths, runner.device)
        self._record = record
        self._strict = strict
        self.refusal = refusal
        self._replays: dict[tuple[int, ...], Work] = {}
        hidden_size = runner.decoder.config.hidden_size
        self._out_SD = torch.zeros(sizes[-1], hidden_size, dtype=runner.dtype, device=runner.device)

    @classmethod
    def for_runner(
        cls, runner: Runner, mode: str, *, max_num_seqs: int, max_model_len: int
    ) -> "DecodeSteps":
        """Steps by the word `mode` of `EngineConfig.cuda_graphs`. Raises `UnsupportedError` if it
        is ``on`` and the device has no graphs."""
        refusal = "switched off" if mode == "off" else refuse_graphs(runner.device)
        if mode == "on" and refusal is not None:
            raise UnsupportedError(f"cuda_graphs 'on' {refusal}; use auto or off")
        padded = runner.device.type == "cuda"
        return cls(
            runner,
            sizes=batch_ladder(max_num_seqs) if padded else range(1, max_num_seqs + 1),
            widths=width_ladder(-(-max_model_len // runner.cache.page_size)),
            record=cuda_recorder() if refusal is None else None,
            refusal=refusal,
            strict=mode == "on",
        )

    @property
    def num_graphs(self) -> int:
        """Sizes that have been recorded."""
        return len(self._replays)

    @property
    def kernel(self) -> str:
        """``cuda-graphs``, or why steps are computed without."""
        return "cuda-graphs" if self.refusal is None else f"no graphs: {self.refusal}"

    @torch.inference_mode()
    def hidden(self, chunks: Sequence[Chunk], pool: BlockManager) -> Tensor:
        """Hidden states [S, D] of `chunks` of one token each, valid until the next call."""
        batch, fresh = self._inputs.fill(chunks, pool)
        if len(fresh):
            self._runner.cache.clear(fresh)
        replay = self._replays.get(tuple(batch.block_table_SB.shape))
        if replay is not None:
            replay()
        else:
            self._compute(batch)
            if self._record is not None:
                self._remember(batch, self._record)
        return self._out_SD[: len(chunks)]

    def _compute(self, batch: StepBatch) -> None:
        self._out_SD[: batch.token_ids_T.shape[0]].copy_(self._runner.hidden(batch))

    def _remember(self, batch: StepBatch, record: Record) -> None:
        """Records the step of `batch`, which has just been computed and so holds nothing new to
        compile or to allocate; or gives up on graphs."""
        size, width = batch.block_table_SB.shape
        try:
            self._replays[size, width] = record(lambda: self._compute(batch))
        except RuntimeError as error:  # torch's only class for errors of a device
            cause = error.__context__ or error  # the end of a failed capture raises once more
            reason = str(cause).strip().partition("\n")[0]
            refusal = f"a step of {size} sequences cannot be recorded: {reason}"
            if self._strict:
                raise UnsupportedError(f"cuda_graphs 'on': {refusal}") from error
            self._record, self.refusal = None, refusal
            self._replays.clear()
            logger.warning("decode steps run without CUDA graphs: %s", refusal)
            return
        logger.info("recorded a decode step of %s sequences, %s pages wide", size, width)
