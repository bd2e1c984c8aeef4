"""Padded decode steps, and steps that are recorded and replayed, give what plain ones give."""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.errors import UnsupportedError, UsageError
from quantforge.runtime import graphs
from quantforge.runtime.batch import build_batch
from quantforge.runtime.config import EngineConfig
from quantforge.runtime.engine import Engine
from quantforge.runtime.graphs import DecodeInputs, DecodeSteps, batch_ladder, width_ladder
from quantforge.runtime.kv.pool import BlockManager
from quantforge.runtime.request import Request, SamplingParams
from quantforge.runtime.scheduler import Chunk
from quantforge.schemes import QuantScheme, TensorQuant

CPU = torch.device("cpu")
SIZES = (4, 12, 64)
WIDTHS = (8, 16, 128)


class Recorder:
    """Stands in for CUDA graphs: a replay does the recorded work again, on the same tensors."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1

        def again() -> None:
            self.replayed += 1
            work()

        return again


def pad(engine: Engine, **more: Any) -> Engine:
    """`engine` with decode steps of few sizes, as on a GPU."""
    engine._decode = DecodeSteps(engine._runner, sizes=SIZES, widths=WIDTHS, **more)
    return engine


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 100, 256, 300, 1000])
def test_every_number_of_sequences_has_a_size_with_little_padding(most: int) -> None:
    sizes = batch_ladder(most)
    assert sizes[-1] == most
    assert all(a < b for a, b in pairwise(sizes))
    for count in range(1, most + 1):
        size = min(size for size in sizes if size >= count)
        assert size < count + (8 if count <= 256 else 32)


def test_the_ladder_starts_with_powers_of_two() -> None:
    assert batch_ladder(33) == (1, 2, 4, 8, 16, 24, 32, 33)


@pytest.mark.parametrize("pages", [1, 64, 65, 128, 1000, 8192, 8193])
def test_widths_double_and_the_last_holds_every_page(pages: int) -> None:
    widths = width_ladder(pages)
    assert widths[-1] >= pages
    assert widths[-1] - pages < 64
    assert all(width % 16 == 0 for width in widths)
    assert all(b == 2 * a for a, b in pairwise(widths[:-1]))
    assert widths[-1] <= 2 * (widths[:-1] or widths)[-1]


@pytest.mark.parametrize(
    "schedule",
    [{}, {"max_num_batched_tokens": 7}, {"max_num_batched_tokens": 1}, {"page_size": 1}],
    ids=str,
)
def test_recorded_steps_equal_transformers(
    schedule: dict[str, int],
    tiny_model: Callable[..., Path],
    reference_model: Callable[..., Any],
    generate_alone: Callable[..., Any],
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
    greedy: SamplingParams,
) -> None:
    folder = tiny_model()
    recorder = Recorder()
    engine = pad(make_engine(folder, **schedule), record=recorder)
    ours = [completion.token_ids for completion in engine.generate(prompts, greedy)]
    assert ours == generate_alone(reference_model(folder), prompts, 12)
    assert recorder.replayed > 0
    assert recorder.recorded == engine._decode.num_graphs <= len(SIZES) * len(WIDTHS)


def test_recorded_steps_with_preemption_equal_transformers(
    tiny_model: Callable[..., Path],
    reference_model: Callable[..., Any],
    generate_alone: Callable[..., Any],
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
) -> None:
    folder = tiny_model()
    recorder = Recorder()
    engine = make_engine(folder, kv_cache_tokens=88, max_num_batched_tokens=30)
    pad(engine, record=recorder)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    ours = [completion.token_ids for completion in engine.generate(prompts, params)]
    assert engine.scheduler.num_preemptions > 3
    assert recorder.replayed > 0
    model = reference_model(folder)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    assert ours == generate_alone(model, prompts, 30)


def test_a_recorded_sliding_window_equals_transformers(
    tiny_model: Callable[..., Path],
    reference_model: Callable[..., Any],
    generate_alone: Callable[..., Any],
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
    greedy: SamplingParams,
) -> None:
    folder = tiny_model("mistral", sliding_window=6)
    engine = pad(make_engine(folder), record=Recorder())
    ours = [completion.token_ids for completion in engine.generate(prompts, greedy)]
    assert ours == generate_alone(reference_model(folder), prompts, 12)


def test_seeded_sampling_and_log_probabilities_do_not_change_with_padding(
    tiny_model: Callable[..., Path], make_engine: Callable[..., Engine], prompts: list[list[int]]
) -> None:
    folder = tiny_model()
    params = SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, seed=5, logprobs=2)
    plain = make_engine(folder).generate(prompts, params)
    padded = pad(make_engine(folder), record=Recorder()).generate(prompts, params)
    assert [c.token_ids for c in padded] == [c.token_ids for c in plain]
    for one, other in zip(padded, plain, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert [t.logprob for t in one.logprobs] == pytest.approx(
            [t.logprob for t in other.logprobs], rel=1e-4
        )


def test_padding_writes_into_no_page(
    tiny_model: Callable[..., Path], make_engine: Callable[..., Engine]
) -> None:
    engine = pad(make_engine(tiny_model(), kv_cache_tokens=80))
    starts = {"a": 2, "b": 9, "c": 4}
    chunks = []
    for request_id, start in starts.items():
        assert engine.pool.grow(request_id, start + 1)
        chunks.append(Chunk(request(request_id, start + 1), start, 1, samples=True))
    cache = engine._runner.cache
    cache.pages.fill_(7.0)
    engine._decode.hidden(chunks, engine.pool)
    changed = (cache.pages != 7.0).flatten(0, 1).flatten(-2).any(-1).any(0)  # [pages, page_size]
    written = {(p, o) for p, o in changed.nonzero().tolist()}
    own = {(engine.pool.pages(r)[start // 4], start % 4) for r, start in starts.items()}
    begun = engine.pool.pages("c")[1]  # its first token is this step's, so it is cleared
    assert written == own | {(begun, offset) for offset in range(4)}


def request(request_id: str, num_tokens: int) -> Request:
    tokens = [3 + (7 * at) % 100 for at in range(num_tokens)]
    return Request(
        request_id=request_id,
        token_ids=tokens,
        num_prompt=1,
        params=SamplingParams(),
        max_tokens=200,
        seed=0,
        arrival=0,
    )


STEPS = st.lists(
    st.tuples(st.sampled_from(["decode", "leave", "swap", "rest"]), st.integers(0, 9)), max_size=40
)


@settings(deadline=None, max_examples=60)
@given(page_size=st.sampled_from([1, 2, 4]), moves=STEPS)
def test_kept_inputs_are_those_built_anew(page_size: int, moves: list[tuple[str, int]]) -> None:
    pool = BlockManager(200, page_size)
    inputs = DecodeInputs((2, 4, 10), (2, 8, 64), CPU)
    running: list[Request] = []
    for count, (move, index) in enumerate(moves):
        if move == "leave" and running:
            pool.release(running.pop(index % len(running)).request_id)
        elif move == "swap" and len(running) > 1:
            running.insert(0, running.pop(index % len(running)))
        elif len(running) < 10:
            running.append(request(f"{count}", 1 + index))
            assert pool.grow(f"{count}", 1 + index + index % 3)  # pages ahead of the tokens
        if move == "rest" or not running:
            continue
        for each in running:
            each.token_ids.append(3 + count)
            assert pool.grow(each.request_id, each.num_tokens)
        chunks = [Chunk(r, r.num_tokens - 1, 1, samples=True) for r in running]
        batch, fresh = inputs.fill(chunks, pool)
        anew, n = build_batch(chunks, pool, CPU), len(chunks)
        width = anew.block_table_SB.shape[1]
        assert torch.equal(batch.token_ids_T[:n], anew.token_ids_T)
        assert torch.equal(batch.positions_T[:n], anew.positions_T)
        assert torch.equal(batch.slot_mapping_T[:n], anew.slot_mapping_T)
        assert torch.equal(batch.context_len_S[:n], anew.context_len_S)
        assert torch.equal(batch.block_table_SB[:n, :width], anew.block_table_SB)
        assert torch.equal(
            batch.block_table_SB[:n, width:],
            anew.block_table_SB[:, :1].expand(-1, batch.block_table_SB.shape[1] - width),
        )
        assert fresh.tolist() == ([] if anew.fresh_pages is None else anew.fresh_pages.tolist())
        assert batch.slot_mapping_T[n:].eq(-1).all()
        assert batch.context_len_S[n:].eq(1).all()
        assert batch.block_table_SB.ge(0).all()
        assert batch.block_table_SB.lt(pool.num_pages).all()


def test_a_table_is_written_again_after_a_failure_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = BlockManager(20, 4)
    inputs = DecodeInputs((2,), (8,), CPU)
    assert pool.grow("a", 3)
    assert pool.grow("b", 7)
    first = [Chunk(request("a", 3), 2, 1, samples=True)]
    second = [Chunk(request("b", 7), 6, 1, samples=True)]
    inputs.fill(first, pool)

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(graphs, "host_buffer", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            inputs.fill(second, pool)
    batch, _ = inputs.fill(second, pool)
    assert batch.block_table_SB[0, :2].tolist() == list(pool.pages("b"))


def test_pages_are_another_list_whenever_they_change() -> None:
    pool = BlockManager(20, 4)
    assert pool.grow("a", 3)
    first = pool.pages("a")
    assert pool.grow("a", 4)
    assert pool.pages("a") is first
    assert pool.grow("a", 5)
    assert pool.pages("a") is not first
    assert len(first) == 1


def test_a_step_that_cannot_be_recorded_is_computed_and_the_reason_is_said_once(
    tiny_model: Callable[..., Path],
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
    greedy: SamplingParams,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tiny_model()

    def refuse(_: object) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    expected = make_engine(folder).generate(prompts, greedy)
    engine = pad(make_engine(folder), record=refuse)
    with caplog.at_level(logging.WARNING):
        assert engine.generate(prompts, greedy) == expected
    said = [record.message for record in caplog.records]
    assert len(said) == 1
    assert "operation not permitted when stream is capturing" in said[0]
    assert "not permitted" in engine.kernels()["decode_step"]
    strict = pad(make_engine(folder), record=refuse, strict=True)
    with pytest.raises(UnsupportedError, match="not permitted"):
        strict.generate(prompts, greedy)


def test_graphs_may_be_demanded_or_switched_off(
    tiny_model: Callable[..., Path], make_engine: Callable[..., Engine]
) -> None:
    folder = tiny_model()
    assert make_engine(folder).kernels()["decode_step"].endswith("needs a CUDA device, not cpu")
    assert make_engine(folder, cuda_graphs="off").kernels()["decode_step"].endswith("switched off")
    with pytest.raises(UnsupportedError, match="needs a CUDA device"):
        make_engine(folder, cuda_graphs="on")
    with pytest.raises(UsageError, match="auto, on, off"):
        EngineConfig(cuda_graphs="yes")


W4A16 = QuantScheme(weight=TensorQuant(num_bits=4, granularity="group", group_size=32))

GPU_SCHEDULES: dict[str, dict[str, int]] = {
    "one mixed batch": {},
    "chunked prefill": {"max_num_batched_tokens": 7},
    "few sequences": {"max_num_seqs": 3},
    "preemption": {"kv_cache_tokens": 128, "max_num_batched_tokens": 30, "page_size": 16},
}


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", GPU_SCHEDULES.values(), ids=GPU_SCHEDULES)
@pytest.mark.parametrize("scheme", [W4A16, None], ids=["w4a16", "dense"])
def test_replayed_graphs_give_the_tokens_of_plain_launches(
    scheme: QuantScheme | None,
    schedule: dict[str, int],
    tiny_model: Callable[..., Path],
    quantized_model: Callable[..., Path],
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
) -> None:
    folder = tiny_model(dtype=torch.bfloat16)
    if scheme is not None:
        folder = quantized_model(folder, lambda _: scheme)
    params = [
        SamplingParams(max_tokens=30, temperature=i % 2 / 2, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    settings = {"device": "cuda", "dtype": "bfloat16", **schedule}
    plain = make_engine(folder, cuda_graphs="off", **settings)
    expected = plain.generate(prompts, params)
    engine = make_engine(folder, cuda_graphs="on", **settings)
    for _ in range(2):  # all sizes are recorded by the first, and replayed by the second
        assert engine.generate(prompts, params) == expected
        engine.check()
    assert (engine.scheduler.num_preemptions > 0) == ("kv_cache_tokens" in schedule)
    assert engine._decode.num_graphs >= 1
    kernels = engine.kernels()
    assert kernels["decode_step"] == "cuda-graphs"
    assert kernels["paged_attention"] == kernels["kv_store"] == kernels["rope"] == "triton"
    assert scheme is None or kernels["int4-g32-sym"] == "triton"


@pytest.mark.gpu
def test_graphs_serve_contexts_that_outgrow_a_table(
    tiny_model: Callable[..., Path], make_engine: Callable[..., Engine]
) -> None:
    folder = tiny_model(dtype=torch.bfloat16)
    prompts = [[5 + i] * (200 + 9 * i) for i in range(5)]  # 64 pages of 4 tokens end at 256
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    settings = {"device": "cuda", "dtype": "bfloat16"}
    expected = make_engine(folder, cuda_graphs="off", **settings).generate(prompts, params)
    engine = make_engine(folder, cuda_graphs="on", **settings)
    assert engine.generate(prompts, params) == expected
    assert engine._decode.num_graphs >= 2
    short = engine.generate(prompts, replace(params, max_tokens=3))  # narrow tables again
    assert [c.token_ids for c in short] == [c.token_ids[:3] for c in expected]


@pytest.mark.gpu
def test_an_op_that_reads_back_ends_the_use_of_graphs_and_nothing_else(
    tiny_model: Callable[..., Path],
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
    greedy: SamplingParams,
) -> None:
    folder = tiny_model(dtype=torch.bfloat16)
    settings = {"device": "cuda", "dtype": "bfloat16"}
    expected = make_engine(folder, cuda_graphs="off", **settings).generate(prompts, greedy)
    engine = make_engine(folder, **settings)
    mlp = engine._runner.decoder.layers[1].mlp
    activate = mlp.activate

    def waiting(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate.sum().item()
        out: torch.Tensor = activate(gate, up)
        return out

    mlp.activate = waiting
    stream = torch.cuda.current_stream()
    assert engine.generate(prompts, greedy) == expected
    assert engine.kernels()["decode_step"].startswith("no graphs: a step of")
    assert torch.cuda.current_stream() == stream
    other = make_engine(folder, cuda_graphs="on", **settings)
    assert other.generate(prompts, greedy) == expected
