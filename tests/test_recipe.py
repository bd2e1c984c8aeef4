"""Recipes that extend others, and every shipped recipe run on a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantforge.cli.app import run
from quantforge.errors import EXIT_GATE_FAILED, EXIT_OK, EXIT_USAGE, RecipeError
from quantforge.recipe import GateSection, load_recipe, merge_patch, recipe_names

TinyModel = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    """``write("a.yaml", text)``: the path of the recipe, as a user would give it."""

    def make(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return make


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merging_follows_the_examples_of_rfc_7396(target: Any, patch: Any, result: Any) -> None:
    """Appendix A, but for the two whose patch is null as a whole."""
    before = json.dumps(target)
    assert merge_patch(target, patch) == result
    assert json.dumps(target) == before


def test_a_recipe_keeps_what_it_does_not_change(write: Any) -> None:
    child = write(
        "mine.yaml",
        "extends: awq_w4a16\nquantize: {group_size: 32, options: {clip: false}}\n"
        "calibration: {num_samples: 16}\ngate: {max_ppl_ratio: 1.5}\n",
    )
    found, parent = load_recipe(child), load_recipe("awq_w4a16")
    assert (found.source, found.extends, found.description) == (child, "awq_w4a16", "")
    assert found.quantize.method == parent.quantize.method
    assert found.quantize.group_size == 32
    assert found.quantize.options == {"clip": False}
    assert found.calibration.num_samples == 16
    assert found.calibration.sequence_length == parent.calibration.sequence_length
    assert found.gate == GateSection(max_ppl_ratio=1.5)
    assert parent.extends is None


def test_parents_lie_relative_to_the_file_and_have_parents(
    write: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write("base.yaml", "extends: gptq_w4a16\nquantize: {options: {damping: 0.1, clip: false}}\n")
    write("team/middle.yaml", "extends: ../base.yaml\nquantize: {options: {clip: true}}\n")
    child = write("team/mine.yaml", "extends: middle.yaml\nquantize: {ignore: [down_proj]}\n")
    monkeypatch.chdir("/")
    found = load_recipe(child)
    assert found.quantize.method == "gptq"
    assert found.quantize.options == {"damping": 0.1, "clip": True}
    assert found.quantize.ignore == ("down_proj",)


def test_null_takes_a_key_of_the_parent_away(write: Any) -> None:
    write("base.yaml", "quantize: {method: awq, options: {clip: false}}\ngate: {max_ppl: 9}\n")
    child = write(
        "mine.yaml", "extends: base.yaml\nquantize: {method: rtn, options: null}\ngate: null\n"
    )
    found = load_recipe(child)
    assert (found.quantize.method, found.quantize.options, found.gate) == ("rtn", {}, None)


@pytest.mark.parametrize(
    ("files", "chain"),
    [
        ({"a.yaml": "extends: a.yaml"}, "a.yaml -> a.yaml"),
        ({"a.yaml": "extends: ./b.yaml", "b.yaml": "extends: a.yaml"}, "a.yaml -> b.yaml -> a"),
        (
            {"a.yaml": "extends: b.yaml", "b.yaml": "extends: c.yaml", "c.yaml": "extends: b.yaml"},
            "a.yaml -> b.yaml -> c.yaml -> b.yaml",
        ),
    ],
)
def test_a_circle_is_refused_with_its_chain(files: dict[str, str], chain: str, write: Any) -> None:
    paths = [write(name, text) for name, text in files.items()]
    with pytest.raises(RecipeError, match="extends itself") as caught:
        load_recipe(paths[0])
    assert chain in str(caught.value)


def test_a_file_may_have_the_name_of_the_shipped_recipe_that_it_extends(write: Any) -> None:
    child = write("awq_w4a16.yaml", "extends: awq_w4a16\nquantize: {symmetric: true}\n")
    assert load_recipe(child).quantize.symmetric is True


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("extends: awq_w4a61", "unknown recipe 'awq_w4a61' .did you mean 'awq_w4a16'"),
        ("extends: lost.yaml", r"extends lost\.yaml, but .*lost\.yaml does not exist"),
        ("extends: [a, b]", r"extends is \['a', 'b'\]; expected"),
        ("extends: wrong.yaml", r"recipe wrong\.yaml: quantize: unknown key 'methd'"),
        ("extends: awq_w4a16\nquantize: {methd: rtn}", r"recipe .*mine\.yaml: quantize: unknown"),
        ("extends: awq_w4a16\nquantize: 3", r"quantize is 3; expected a mapping"),
        ("extend: awq_w4a16", "unknown key 'extend' .did you mean 'extends'"),
    ],
)
def test_errors_name_the_recipe_that_is_wrong(text: str, reason: str, write: Any) -> None:
    write("wrong.yaml", "quantize: {methd: awq}\n")
    with pytest.raises(RecipeError, match=reason):
        load_recipe(write("mine.yaml", text))


@pytest.mark.parametrize("name", recipe_names())
def test_a_printed_recipe_means_the_same_and_stands_alone(
    name: str, write: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["recipes", name]) == EXIT_OK
    printed = capfd.readouterr().out
    assert "extends" not in yaml.safe_load(printed)
    copy, original = load_recipe(write("copy.yaml", printed)), load_recipe(name)
    for part in ("description", "quantize", "calibration", "gate"):
        assert getattr(copy, part) == getattr(original, part)
    assert run(["recipes", name, "--json"]) == EXIT_OK
    assert json.loads(capfd.readouterr().out)["extends"] == original.extends


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_runs_on_a_tiny_model(
    name: str, tiny_model: TinyModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = str(tiny_model(hidden_size=128, intermediate_size=256))
    output = str(tmp_path / "out")
    arguments = ["quantize", source, "-o", output, "--device", "cpu", "-q", "--recipe", name]
    if load_recipe(name).gate is not None:
        arguments[-1] = "rtn_w4a16"
    arguments += ["--num-samples", "4", "--sequence-length", "32"]
    assert run(arguments) == EXIT_OK, capfd.readouterr().err
    if load_recipe(name).gate is not None:
        page = ["--window", "64", "--max-tokens", "512", "--device", "cpu", "-q", "--json"]
        code = run(["gate", output, "--baseline", source, "--recipe", name, *page])
        captured = capfd.readouterr()
        assert code in (EXIT_OK, EXIT_GATE_FAILED), captured.err
        assert json.loads(captured.out[captured.out.index("{") :])["gate"]["checks"]
    manifest = json.loads((tmp_path / "out" / "quantforge.json").read_text())
    assert manifest["recipe"]["source"] == arguments[arguments.index("--recipe") + 1]
    assert len(manifest["layers"]) == 14


def test_the_manifest_holds_the_merged_recipe(
    write: Any, tiny_model: TinyModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    child = write("mine.yaml", "extends: rtn_w4a16\nquantize: {group_size: 32}\n")
    output = tmp_path / "out"
    code = run(["quantize", str(tiny_model()), "-o", str(output), "--recipe", child, "-q"])
    assert code == EXIT_OK, capfd.readouterr().err
    recipe = json.loads((output / "quantforge.json").read_text())["recipe"]
    assert (recipe["source"], recipe["extends"]) == (child, "rtn_w4a16")
    assert (recipe["quantize"]["method"], recipe["quantize"]["group_size"]) == ("rtn", 32)
    circle = write("circle.yaml", "extends: circle.yaml\n")
    assert run(["recipes", circle]) == EXIT_USAGE
