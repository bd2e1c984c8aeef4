"""The engine's promises beside greedy tokens: stops, seeds, log probabilities, aborts, errors."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import QuantForgeError, UnsupportedError, UsageError
from quantforge.models.loader import load_decoder
from quantforge.qtensor import quantize
from quantforge.runtime.config import EngineConfig
from quantforge.runtime.engine import Engine
from quantforge.runtime.request import RequestOutput, SamplingParams
from quantforge.schemes import TensorQuant

MakeEngine = Callable[..., Engine]
TinyModel = Callable[..., Path]


def run(engine: Engine) -> dict[str, list[RequestOutput]]:
    """Steps until there is no work; every output by request."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check()
    return outputs


def all_pages_are_free(engine: Engine) -> bool:
    engine.check()
    return not engine.has_work() and engine.pool.num_free == engine.pool.num_pages


def test_text_is_the_decoded_tokens(
    tiny_model: TinyModel, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    engine = make_engine(tiny_model())
    params = SamplingParams(max_tokens=20, temperature=1.5, seed=3)
    assert engine.tokenizer is not None
    for completion in engine.generate(prompts, params):
        ids = completion.token_ids
        ids = ids[:-1] if completion.finish_reason == "stop" else ids
        assert completion.text == engine.tokenizer.decode(ids)


def test_streamed_pieces_joined_are_the_text(
    tiny_model: TinyModel, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    engine = make_engine(tiny_model())
    params = SamplingParams(max_tokens=20, temperature=1.5, seed=3, stop=("e", "th"))
    whole = engine.generate(prompts, params)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    for request_id, outputs in run(engine).items():
        completion = whole[int(request_id)]
        assert "".join(output.text for output in outputs) == completion.text
        assert all(output.finish_reason is None for output in outputs[:-1])
        assert outputs[-1].finish_reason == completion.finish_reason
        assert sum((output.token_ids for output in outputs), ()) == completion.token_ids


def test_a_stop_string_across_token_borders_ends_the_generation(
    tiny_model: TinyModel, make_engine: MakeEngine, greedy: SamplingParams
) -> None:
    engine = make_engine(tiny_model())
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("The river ran")
    free = engine.generate([prompt], replace(greedy, ignore_eos=True, max_tokens=40))[0]
    pieces = [engine.tokenizer.decode([token]) for token in free.token_ids]
    at = next(i for i in range(3, 30) if len(pieces[i]) > 1 and len(pieces[i + 1]) > 1)
    stop = pieces[at][-1] + pieces[at + 1][0]
    cut = free.text.index(stop)
    stopped = engine.generate([prompt], replace(greedy, max_tokens=40, stop=(stop, "unseen")))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[:cut]
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) <= at + 2


def test_a_stop_token_ends_the_generation_and_is_not_in_the_text(
    tiny_model: TinyModel, make_engine: MakeEngine, greedy: SamplingParams
) -> None:
    engine = make_engine(tiny_model())
    free = engine.generate([[9, 8, 7]], greedy)[0]
    token = free.token_ids[4]
    first = free.token_ids.index(token)
    stopped = engine.generate([[9, 8, 7]], replace(greedy, stop_token_ids=(token,)))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert engine.tokenizer is not None
    assert stopped.text == engine.tokenizer.decode(free.token_ids[:first])


def test_the_models_own_end_token_is_disregarded_only_when_asked(
    tiny_model: TinyModel, make_engine: MakeEngine, greedy: SamplingParams
) -> None:
    ids = make_engine(tiny_model()).generate([[9, 8, 7]], greedy)[0].token_ids
    engine = make_engine(tiny_model(eos_token_id=ids[3]))
    ended = engine.generate([[9, 8, 7]], greedy)[0]
    assert ended.token_ids == ids[: ids.index(ids[3]) + 1]
    assert ended.finish_reason == "stop"
    ignored = engine.generate([[9, 8, 7]], replace(greedy, ignore_eos=True))[0]
    assert ignored.token_ids == ids
    assert ignored.finish_reason == "length"


def test_without_a_limit_the_context_is_filled(
    tiny_model: TinyModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(tiny_model(), max_model_len=32)
    params = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
    assert len(engine.generate([[5] * 10], params)[0].token_ids) == 22


def test_a_seeded_result_does_not_depend_on_the_batch_or_on_preemption(
    tiny_model: TinyModel, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    folder = tiny_model()
    engine = make_engine(folder)
    each = [
        SamplingParams(
            max_tokens=25,
            temperature=0.5 + i / 5,
            top_k=(0, 20)[i % 2],
            top_p=(1.0, 0.9, 0.5)[i % 3],
            min_p=(0.0, 0.02)[i % 2],
            seed=i,
            ignore_eos=True,
        )
        for i in range(len(prompts))
    ]
    alone = [engine.generate([p], own)[0].token_ids for p, own in zip(prompts, each, strict=True)]
    together = [completion.token_ids for completion in engine.generate(prompts, each)]
    assert together == alone
    tight = make_engine(folder, kv_cache_tokens=80, max_num_batched_tokens=16)
    assert [c.token_ids for c in tight.generate(prompts, each)] == alone
    assert tight.scheduler.num_preemptions > 0


def test_other_seeds_give_other_results_and_a_fresh_engine_repeats_unseeded_ones(
    tiny_model: TinyModel, make_engine: MakeEngine
) -> None:
    folder = tiny_model()
    params = SamplingParams(max_tokens=20, temperature=2.0, ignore_eos=True)
    runs = [
        [c.token_ids for c in make_engine(folder, seed=seed).generate([[5, 6]] * 3, params)]
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1]
    assert len({*runs[0], *runs[2]}) == 6


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_equal_log_softmax_of_transformers(
    temperature: float,
    tiny_model: TinyModel,
    make_engine: MakeEngine,
    reference_model: Callable[..., Any],
    prompts: list[list[int]],
) -> None:
    folder = tiny_model()
    engine = make_engine(folder, max_num_batched_tokens=20)
    counts = [None, 0, 1, 5, 20] * 2
    each = [
        SamplingParams(
            max_tokens=8, temperature=temperature, seed=i, logprobs=count, ignore_eos=True
        )
        for i, count in enumerate(counts)
    ]
    model = reference_model(folder)
    for prompt, count, completion in zip(
        prompts, counts, engine.generate(prompts, each), strict=True
    ):
        if count is None:
            assert completion.logprobs is None
            continue
        assert completion.logprobs is not None
        ids = [*prompt, *completion.token_ids]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
        own = torch.tensor([entry.logprob for entry in completion.logprobs])
        token_ids = torch.tensor(completion.token_ids)[:, None]
        torch.testing.assert_close(own, expected.gather(1, token_ids)[:, 0], rtol=1e-4, atol=1e-4)
        for entry, row in zip(completion.logprobs, expected, strict=True):
            assert len(entry.top) == count
            likeliest = row.topk(count)
            assert [token for token, _ in entry.top] == likeliest.indices.tolist()
            torch.testing.assert_close(
                torch.tensor([value for _, value in entry.top]),
                likeliest.values,
                rtol=1e-4,
                atol=1e-4,
            )


def test_an_abort_frees_the_pages_and_leaves_the_others_as_they_were(
    tiny_model: TinyModel,
    make_engine: MakeEngine,
    prompts: list[list[int]],
    greedy: SamplingParams,
) -> None:
    engine = make_engine(tiny_model(), max_num_seqs=6, max_num_batched_tokens=40)
    expected = [completion.token_ids for completion in engine.generate(prompts, greedy)]
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, greedy)
    outputs = [output for _ in range(3) for output in engine.step()]
    for request_id in ("1", "9"):  # one runs, one waits
        last = engine.abort(request_id)
        assert last is not None
        assert last.finish_reason == "abort"
        assert engine.abort(request_id) is None
        engine.check()
    for rest in run(engine).values():
        outputs += rest
    for index in set(range(len(prompts))) - {1, 9}:
        mine = [output.token_ids for output in outputs if output.request_id == str(index)]
        assert sum(mine, ()) == expected[index]
    assert all_pages_are_free(engine)


def test_aborting_everything_frees_everything(
    tiny_model: TinyModel, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    engine = make_engine(tiny_model(), kv_cache_tokens=100)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(9):
        engine.step()
    for index in range(len(prompts)):
        engine.abort(str(index))
    assert all_pages_are_free(engine)
    assert engine.step() == []


def test_nan_scores_end_only_their_own_request(
    tiny_model: TinyModel, make_engine: MakeEngine, prompts: list[list[int]], greedy: SamplingParams
) -> None:
    """Token 2's embedding is NaN; pages that its request leaves behind must not spoil others."""
    engine = make_engine(tiny_model(), kv_cache_tokens=200)
    expected = [completion.token_ids for completion in engine.generate(prompts, greedy)]
    engine._runner.decoder.embed_tokens[2] = float("nan")
    for index, prompt in enumerate(prompts):
        engine.add_request(f"nan {index}", [*prompt[:5], 2], greedy)
        engine.add_request(str(index), prompt, greedy)
    outputs = run(engine)
    for index in range(len(prompts)):
        (failed,) = outputs[f"nan {index}"]
        assert failed.finish_reason == "error"
        assert failed.error is not None
        assert "NaN" in failed.error
        good = outputs[str(index)]
        assert sum((output.token_ids for output in good), ()) == expected[index]
    assert all_pages_are_free(engine)


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: TinyModel,
    make_engine: MakeEngine,
    greedy: SamplingParams,
) -> None:
    engine = make_engine(tiny_model())
    expected = engine.generate([[7, 8]], greedy)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "hidden", fail)
        engine.add_request("a", [5, 6], greedy)
        (output,) = engine.step()
        assert output.finish_reason == "error"
        assert output.error == "the step failed: no memory left"
        with pytest.raises(QuantForgeError, match="no memory left"):
            engine.generate([[5]], greedy)
    assert all_pages_are_free(engine)
    assert engine.generate([[7, 8]], greedy) == expected


def test_prompts_that_cannot_be_served_are_refused_before_any_work(
    tiny_model: TinyModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(tiny_model(), max_model_len=32)
    params = SamplingParams(max_tokens=10)
    for bad, reason in (
        ([], "no tokens"),
        ([600], "600 at position 0"),
        ([5] * 23, "max_model_len is 32"),
    ):
        with pytest.raises(UsageError, match=reason):
            engine.generate([[5], bad], params)
        assert all_pages_are_free(engine)
    with pytest.raises(UsageError, match="1 sampling parameters for 2 prompts"):
        engine.generate([[5], [6]], [params])


def test_stop_strings_need_a_tokenizer(tiny_model: TinyModel, greedy: SamplingParams) -> None:
    reader = CheckpointReader(tiny_model())
    decoder = load_decoder(reader, device="cpu", dtype=torch.float32)
    engine = Engine(decoder, None)
    with pytest.raises(UsageError, match="need a tokenizer"):
        engine.add_request("a", [5], replace(greedy, stop=("x",)))
    completion = engine.generate([[5]], greedy)[0]
    assert completion.text == ""
    assert len(completion.token_ids) == 12


def test_lengths_beyond_the_model_or_the_cache_are_refused(
    tiny_model: TinyModel, make_engine: MakeEngine
) -> None:
    folder = tiny_model()
    with pytest.raises(UsageError, match="513 is more than the model's 512 positions"):
        make_engine(folder, max_model_len=513)
    with pytest.raises(UsageError, match="100 is more than the 64 tokens of the KV cache"):
        make_engine(folder, max_model_len=100, kv_cache_tokens=64)
    assert make_engine(folder, kv_cache_tokens=64).max_model_len == 64
    assert make_engine(folder).max_model_len == 512


def test_a_yarn_model_may_be_used_up_to_its_scaled_length(
    tiny_model: TinyModel, make_engine: MakeEngine
) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    folder = tiny_model(rope_scaling=scaling)
    assert make_engine(folder, max_model_len=2048).max_model_len == 2048
    with pytest.raises(UsageError, match="2048 positions"):
        make_engine(folder, max_model_len=2049)


def test_kernels_are_named_for_every_op_and_every_kind_of_linear(
    monkeypatch: pytest.MonkeyPatch, tiny_model: TinyModel, make_engine: MakeEngine
) -> None:
    folder = tiny_model()
    kernels = make_engine(folder).kernels()
    ops = {"rope", "kv_store", "paged_attention", "rms_norm", "silu_mul", "sample", "decode_step"}
    assert set(kernels) == {*ops, "float32"}
    assert kernels["float32"] == "dense"
    monkeypatch.setenv("QUANTFORGE_KERNELS", "triton")
    with pytest.raises(UnsupportedError, match="no kernel for"):
        make_engine(folder)


def test_quantized_linears_are_named_by_their_scheme(tiny_model: TinyModel) -> None:
    decoder = load_decoder(CheckpointReader(tiny_model()), device="cpu", dtype=torch.float32)
    linear = decoder.layers[0].mlp.down_proj
    quant = TensorQuant(num_bits=4, symmetric=False, granularity="group", group_size=32)
    linear.load_quantized(quantize(linear.weight, quant), None, torch.float32)
    kernels = Engine(decoder, None).kernels()
    assert kernels["int4-g32-asym"] == "dequantize-once"
    assert kernels["float32"] == "dense"


@pytest.mark.gpu
def test_a_gpu_gives_the_tokens_of_the_cpu_in_float32(
    tiny_model: TinyModel, make_engine: MakeEngine, prompts: list[list[int]], greedy: SamplingParams
) -> None:
    folder = tiny_model()
    expected = make_engine(folder).generate(prompts, greedy)
    for config in ({}, {"max_num_batched_tokens": 9}, {"kv_cache_tokens": 88}):
        engine = make_engine(folder, device="cuda", **config)
        assert engine.generate(prompts, greedy) == expected


def test_the_default_engine_reads_the_device_from_the_decoder(tiny_model: TinyModel) -> None:
    engine = Engine.from_folder(tiny_model(), EngineConfig(device="cpu"))
    assert engine.device.type == "cpu"
    assert engine.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_decode_step_waits_for_the_gpu_once(
    tiny_model: TinyModel, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    engine = make_engine(tiny_model(), device="cuda")
    params = SamplingParams(max_tokens=50, seed=1, top_k=5, top_p=0.9, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    for _ in range(3):
        engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "called a synchronizing CUDA operation" in str(w.message)]
    assert len(waits) == 1, [f"{w.filename}:{w.lineno}" for w in waits]
