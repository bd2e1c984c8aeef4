"""``quantforge generate`` on a tiny model: stdout holds the text (or one JSON document) alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quantforge.cli.app import run

TinyModel = Callable[..., Path]
CPU = ["--device", "cpu", "--max-tokens", "8"]


@pytest.fixture
def expected(
    reference_model: Callable[..., Any], generate_alone: Callable[..., Any]
) -> Callable[[Path, str], str]:
    """The text that transformers writes after a prompt."""

    def text(folder: Path, prompt: str, **chat: Any) -> str:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if chat:
            messages = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, **chat)
        ids = tokenizer(prompt).input_ids
        new = generate_alone(reference_model(folder), [ids], 8)[0]
        return str(tokenizer.decode(new, skip_special_tokens=True))

    return text


def test_one_prompt_is_completed_on_stdout(
    tiny_model: TinyModel,
    expected: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tiny_model()
    assert run(["generate", str(folder), "--prompt", "The river ran", *CPU]) == 0
    out, err = capsys.readouterr()
    assert out == expected(folder, "The river ran") + "\n"
    assert "tokens/s, cpu, float32" in err


def test_chat_applies_the_chat_template(
    tiny_model: TinyModel,
    expected: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tiny_model()
    assert run(["generate", str(folder), "--chat", "--prompt", "Who built it?", "-q", *CPU]) == 0
    out, err = capsys.readouterr()
    assert out == expected(folder, "Who built it?", add_generation_prompt=True) + "\n"
    assert err == ""


def test_prompts_of_a_file_and_of_options_give_one_json_document(
    tiny_model: TinyModel,
    expected: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = tiny_model()
    file = tmp_path / "prompts.txt"
    file.write_text("The miller's cat\n\nNobody remembered\n", encoding="utf-8")
    arguments = ["--prompt", "The river", "--prompt-file", str(file), "--json", *CPU]
    assert run(["generate", str(folder), *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    completions = document["completions"]
    prompts = ["The river", "The miller's cat", "Nobody remembered"]
    assert [c["prompt"] for c in completions] == prompts
    assert [c["text"] for c in completions] == [expected(folder, p) for p in prompts]
    assert document["kernels"]["paged_attention"] == "reference"


def test_several_prompts_are_listed_in_order(
    tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["--prompt", "first", "--prompt", "second"]
    assert run(["generate", str(tiny_model()), *prompts, *CPU]) == 0
    out = capsys.readouterr().out
    assert out.startswith("[1] first\n")
    assert "\n\n[2] second\n" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "there is no prompt"),
        (["--prompt", "x", "--temperature", "-1"], "temperature -1.0 must be 0 or more"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens 0 must be at least 1"),
        (["--prompt-file", "missing.txt"], "missing.txt cannot be read"),
        (["--prompt", "x" * 600, "--device", "cpu"], "max_model_len is 512"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    arguments: list[str],
    reason: str,
    tiny_model: TinyModel,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["generate", str(tiny_model()), "-q", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert reason in err
    assert err.count("\n") == 1
