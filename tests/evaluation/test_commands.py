"""`eval ppl` and `gate` as a shell runs them: documents, reports, records and exit codes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantforge.checkpoint.manifest import Manifest, read_manifest, write_manifest
from quantforge.cli.app import run

WINDOW = 64


def arguments(command: str, pair: tuple[Path, Path], text: Path, *more: str) -> list[str]:
    common = ["--data", str(text), "--window", str(WINDOW), "--max-tokens", "320"]
    return [*command.split(), str(pair[0]), "--baseline", str(pair[1]), *common, *more]


def gate_file(folder: Path, **limits: float) -> str:
    path = folder / "limits.yaml"
    path.write_text("gate:\n" + "".join(f"  {k}: {v}\n" for k, v in limits.items()))
    return str(path)


def test_eval_ppl_prints_one_json_document(
    pair: tuple[Path, Path], text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments("eval ppl", pair, text_file, "--json", "--device", "cpu")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ppl"] / document["comparison"]["ppl_baseline"] == pytest.approx(
        document["comparison"]["ppl_ratio"]
    )
    assert 0 < document["comparison"]["mean_kl"] < document["comparison"]["max_kl"]


def test_eval_ppl_without_a_baseline_gives_perplexity_alone(
    pair: tuple[Path, Path], text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "ppl", str(pair[0]), "--data", str(text_file), "--window", "64"]
    assert run([*command, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("perplexity ")
    assert "KL" not in out


def test_gate_passes_records_and_reports(
    pair: tuple[Path, Path], text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Manifest(versions={}, source={}, recipe={}, scheme="x", method="rtn", seed=0)
    write_manifest(pair[0], manifest)
    recipe = gate_file(tmp_path, max_ppl_ratio=2.0, min_top1=0.1, max_bits_per_weight=32)
    report = tmp_path / "gate.html"
    more = ("--recipe", recipe, "--report", str(report), "--device", "cpu")
    assert run(arguments("gate", pair, text_file, *more)) == 0
    assert "Gate passed" in capsys.readouterr().out
    assert "Gate passed" in report.read_text(encoding="utf-8")
    recorded = read_manifest(pair[0])
    assert recorded is not None
    (entry,) = recorded.evaluations
    assert entry["kind"] == "gate"
    assert entry["gate"]["passed"] is True
    assert entry["engine"]["kernels"]
    assert "windows" not in entry


def test_gate_that_fails_exits_1_with_the_reason_and_the_document(
    pair: tuple[Path, Path], text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Manifest(versions={}, source={}, recipe={}, scheme="x", method="rtn", seed=0)
    write_manifest(pair[0], manifest)
    recipe = gate_file(tmp_path, max_mean_kl=1e-9, min_top1=0.1)
    more = ("--recipe", recipe, "--json", "--no-record", "--device", "cpu")
    assert run(arguments("gate", pair, text_file, *more)) == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["gate"]["passed"] is False
    assert document["gate"]["exit_code"] == 1
    assert [c["ok"] for c in document["gate"]["checks"]] == [False, True]
    assert "max_mean_kl is 1e-09" in captured.err.splitlines()[-1]
    recorded = read_manifest(pair[0])
    assert recorded is not None
    assert recorded.evaluations == ()


def test_a_model_against_itself_passes_the_strictest_gate(
    pair: tuple[Path, Path], text_file: Path, tmp_path: Path
) -> None:
    recipe = gate_file(tmp_path, max_ppl_ratio=1.0, max_mean_kl=0.0, max_p99_kl=0.0, min_top1=1.0)
    same = (pair[1], pair[1])
    assert run(arguments("gate", same, text_file, "--recipe", recipe, "--device", "cpu")) == 0


def test_a_gate_of_absolute_limits_needs_no_baseline(
    pair: tuple[Path, Path], text_file: Path, tmp_path: Path
) -> None:
    recipe = gate_file(tmp_path, max_bits_per_weight=8.0)
    command = ["gate", str(pair[0]), "--recipe", recipe, "--data", str(text_file)]
    assert run([*command, "--window", "64", "--device", "cpu"]) == 1


def test_usage_errors_exit_2(
    pair: tuple[Path, Path], text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(pair[0])
    assert run(["gate", model]) == 2
    assert "--baseline" in capsys.readouterr().err
    assert run(["gate", model, "--recipe", "ci_gat"]) == 2
    assert "did you mean 'ci_gate'" in capsys.readouterr().err
    assert run(["gate", model, "--recipe", "awq_w4a16"]) == 2
    assert "no 'gate' section" in capsys.readouterr().err
    assert run(["eval", "ppl", model, "--data", "wikitext"]) == 2
    assert run(["eval", "ppl", model, "--report", str(tmp_path / "report.pdf")]) == 2
    assert "use .html or .md" in capsys.readouterr().err
    assert run(arguments("eval ppl", pair, text_file, "--stride", "65")) == 2
    assert run(["eval", "ppl"]) == 2


def test_bad_data_exits_5(
    pair: tuple[Path, Path],
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed_weights: Callable[..., None],
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    assert run(["eval", "ppl", str(pair[0]), "--data", str(short), "--window", "64"]) == 5
    assert "fewer than a window of 64" in capsys.readouterr().err
    assert run(["eval", "ppl", str(tmp_path / "nowhere"), "--data", str(text_file)]) == 5

    def huge(name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1e30 if name.endswith("norm.weight") else weight

    changed_weights(pair[0], huge)
    recipe = gate_file(tmp_path, max_mean_kl=1e9)
    more = ("--recipe", recipe, "--device", "cpu")
    assert run(arguments("gate", pair, text_file, *more)) == 5
    assert "the model's logits hold NaN" in capsys.readouterr().err
