"""``quantforge bench latency`` times what it was asked for, and refuses what it cannot hold."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantforge.cli.app import run
from quantforge.errors import UsageError
from quantforge.runtime.config import EngineConfig
from quantforge.runtime.engine import Engine
from quantforge.runtime.latency import Workload, measure_latency

SHORT = ["--input-len", "5", "--output-len", "8", "--device", "cpu"]


def test_json_has_a_record_for_each_batch_size(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "engine.json"
    model = str(tiny_model())
    options = ["--batch-size", "3", "--batch-size", "1", "--profile", "--json"]
    assert run(["bench", "latency", model, *SHORT, *options, "--output", str(output)]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert records == json.loads(output.read_text())["records"]
    assert [record["batch"] for record in records] == [1, 3]
    for record in records:
        assert record["model"] == model
        assert record["kernels"]["decode_step"] == "no graphs: needs a CUDA device, not cpu"
        assert record["workload"] == "5 in, 8 out"
        assert record["num_steps"] == 7  # the first token comes with the prefill
        assert record["out_tok_s"] == pytest.approx(
            1000 * record["batch"] / record["itl_ms"], rel=0.01
        )
        assert record["ttft_ms"] > 0
        assert record["startup_s"] >= record["load_s"]
        assert record["profile"]["kernels"]
    assert (
        run(["bench", "latency", model, *SHORT, "--batch-size", "2", "-q", "--output", str(output)])
        == 0
    )
    assert [r["batch"] for r in json.loads(output.read_text())["records"]] == [1, 3, 2]


def test_a_synthetic_model_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--synthetic", "smollm2-135m:w8a16", "--num-layers", "1", "--batch-size", "2"]
    modes = ["--cuda-graphs", "off", "--cuda-graphs", "auto"]
    assert run(["bench", "latency", *arguments, *modes, *SHORT, "--json"]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    for record in records:
        assert record["model"] == "synthetic smollm2-135m"
        assert record["scheme"] == "w8a16"
        assert record["num_layers"] == 1
        assert record["kernels"]["int8-channel-sym"] == "dequantize-once"
    steps = [record["kernels"]["decode_step"] for record in records]
    assert steps == ["no graphs: switched off", "no graphs: needs a CUDA device, not cpu"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "either MODEL or --synthetic"),
        (["model", "--synthetic", "llama-3.1-8b:w4a16"], "either MODEL or --synthetic"),
        (["--synthetic", "llama-3.1-8b:w5a16"], "unknown scheme 'w5a16'"),
        (["--synthetic", "llama-9b"], "unknown model shape 'llama-9b'"),
        (["model", "--num-layers", "2"], "belong to --synthetic"),
        (["--synthetic", "llama-3.1-8b", "--cuda-graphs", "maybe"], "auto, on, off"),
        (["model", "--output", "no-such-folder/x.json"], "no-such-folder does not exist"),
        (["model", "--output", __file__], "holds no records"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "latency", *arguments, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_requests_that_do_not_decode_together_are_no_measurement(
    tiny_model: Callable[..., Path],
) -> None:
    settings = {"device": "cpu", "page_size": 4, "max_model_len": 24}
    few = EngineConfig(max_num_seqs=2, **settings)
    with pytest.raises(UsageError, match="no step had all 3 requests"):
        measure_latency(
            Engine.from_folder(tiny_model(), few), Workload(batch=3, input_len=5, output_len=8)
        )
    small = EngineConfig(kv_cache_tokens=32, **settings)
    with pytest.raises(UsageError, match="cannot hold 4 requests of 13 tokens"):
        measure_latency(
            Engine.from_folder(tiny_model(), small), Workload(batch=4, input_len=5, output_len=8)
        )


@pytest.mark.gpu
def test_an_8b_layer_is_timed_with_and_without_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--synthetic", "llama-3.1-8b:w4a16_sym", "--num-layers", "2", "--batch-size", "4"]
    modes = ["--cuda-graphs", "off", "--cuda-graphs", "on", "--profile", "--json"]
    assert run(["bench", "latency", *arguments, *modes]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    steps = [record["kernels"]["decode_step"] for record in records]
    assert steps == ["no graphs: switched off", "cuda-graphs"]
    for record in records:
        assert record["kernels"]["int4-g128-sym"] == "triton"
        assert 0 < record["profile"]["device_us"] < 1000 * record["itl_ms"] * 2
