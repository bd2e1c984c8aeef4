"""The page of a run: well-formed, self-contained, and with the manifest's own figures."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quantforge.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.cli.app import run
from quantforge.errors import EXIT_BAD_DATA, EXIT_OK, EXIT_USAGE
from quantforge.page import heat_map
from quantforge.report import fallback_rows, to_page, total_rows, why, worst_layers

TinyModel = Callable[..., Path]

VOID = {"meta", "br", "img", "link", "input", "hr"}
GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


class Parser(HTMLParser):
    """Fails on a tag that is not closed; keeps tags, attributes, and the cells of each table."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            self.rows[-1][-1] += data


def parse(html: str) -> Parser:
    parser = Parser()
    parser.feed(html)
    assert parser.open == []
    return parser


@pytest.fixture
def spiky_model(tiny_model: TinyModel) -> Path:
    """A tiny model whose MLPs read one channel 40 times as large as the others."""
    folder = tiny_model()
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"][7] *= 40
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def quantized(spiky_model: Path, tmp_path: Path, capfd: Any) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"Cart {i} crossed after {i * 7} steps." for i in range(200)))
    output = tmp_path / "out"
    more = ["--num-samples", "4", "--sequence-length", "32", "--device", "cpu", "-q"]
    report = ["--report", str(tmp_path / "report.html"), "--calibration", str(text)]
    code = run(["quantize", str(spiky_model), "-o", str(output), "-m", "gptq", *more, *report])
    assert code == EXIT_OK, capfd.readouterr().err
    return output


def test_the_page_shows_every_layer_with_the_figures_of_the_manifest(
    quantized: Path, tmp_path: Path
) -> None:
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    parser = parse(page)
    assert not parser.tags & {"script", "img", "link", "iframe"}
    assert not parser.attributes & {"src", "href", "onclick", "onload"}
    assert "://" not in page
    assert "default-src 'none'" in page
    layers = json.loads((quantized / MANIFEST_FILE).read_text())["layers"]
    cells = {row[0]: row for row in parser.rows if row and row[0].startswith("model.layers.")}
    assert list(cells) == [layer["name"] for layer in layers]
    for layer in layers:
        row = cells[layer["name"]]
        assert (row[1], row[3]) == (layer["scheme"], layer["method"])
        figures = [float(row[i]) for i in (2, 5, 6, 7, 9)]
        expected = [
            layer["bits_per_weight"],
            layer["weight_error"],
            layer["output_error"],
            layer["notes"]["damping"],
            layer["seconds"],
        ]
        assert figures == pytest.approx(expected, rel=1e-3)
        assert row[8] == f"{layer['outlier_ratio']:.4g} (channel {layer['outlier_channel']})"


def test_the_outlier_map_names_the_channel_that_was_made_large(quantized: Path) -> None:
    manifest = read_manifest(quantized)
    assert manifest is not None
    found = {layer["name"]: layer for layer in manifest.layers}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            assert found[prefix + name]["outlier_channel"] == 7
            assert found[prefix + name]["outlier_ratio"] > 20
            assert found[prefix + name]["input_group"] == "gate_up"
        assert found[prefix + "self_attn.q_proj"]["outlier_ratio"] < 10
        assert found[prefix + "mlp.down_proj"]["num_tokens"] == 4 * 32


def test_plots_are_xml_with_a_cell_for_every_layer_and_input(quantized: Path) -> None:
    manifest = read_manifest(quantized)
    assert manifest is not None
    plots = [ET.fromstring(p) for p in re.findall(r"<svg.*?</svg>", to_page(manifest), re.DOTALL)]
    titles = [[str(t.text) for t in plot.iter("title")] for plot in plots]
    errors, blocks, outliers, bits = titles
    assert (len(errors), len(blocks), len(outliers), len(bits)) == (14, 2, 2 * len(GROUPS), 14)
    layer = manifest.layers[0]
    assert f"q_proj, 0: {layer['output_error']:.4g}" in errors
    assert f"q_proj, 0: {layer['bits_per_weight']:.4g}" in bits
    assert (
        f"input of {layer['name']}, channel {layer['outlier_channel']}: "
        f"{layer['outlier_ratio']:.4g}" in outliers
    )


def test_bits_of_a_layer_are_those_of_its_tensors_on_disk(quantized: Path) -> None:
    reader, manifest = CheckpointReader(quantized), read_manifest(quantized)
    assert manifest is not None
    for layer in manifest.layers:
        stored = load_file(quantized / "model.safetensors")
        size = sum(t.nbytes for n, t in stored.items() if n.rpartition(".")[0] == layer["name"])
        shape = reader.linear(layer["name"]).shape
        assert layer["bits_per_weight"] == pytest.approx(8 * size / (shape[0] * shape[1]))


def test_seconds_of_the_layers_add_up_to_those_of_the_method(quantized: Path) -> None:
    manifest = read_manifest(quantized)
    assert manifest is not None
    assert manifest.run is not None
    total = sum(layer["seconds"] for layer in manifest.layers)
    assert total == pytest.approx(manifest.run["seconds"]["quantize"], abs=0.05, rel=0.1)
    assert manifest.run["ignored"] == ["lm_head"]
    assert manifest.run["peak_host_bytes"] > 0
    assert manifest.run["device"] == "cpu"


def test_the_command_makes_the_same_page_again(quantized: Path, tmp_path: Path, capfd: Any) -> None:
    again = tmp_path / "again.html"
    capfd.readouterr()
    assert run(["report", str(quantized), "-o", str(again)]) == EXIT_OK
    assert capfd.readouterr().out == f"{again}\n"
    assert again.read_bytes() == (tmp_path / "report.html").read_bytes()


def test_what_has_no_report_is_refused_in_one_line(
    tiny_model: TinyModel, quantized: Path, tmp_path: Path, capfd: Any
) -> None:
    def refused(code: int, *arguments: object) -> str:
        capfd.readouterr()
        assert run([str(a) for a in arguments]) == code
        line = capfd.readouterr().err
        assert line.count("\n") == 1
        return line

    page = tmp_path / "x.html"
    assert MANIFEST_FILE in refused(EXIT_BAD_DATA, "report", tiny_model(), "-o", page)
    assert "use .html" in refused(EXIT_USAGE, "report", quantized, "-o", tmp_path / "x.pdf")
    nowhere = tmp_path / "no" / "x.html"
    assert "does not exist" in refused(EXIT_USAGE, "report", quantized, "-o", nowhere)
    output = tmp_path / "never"
    arguments = ("quantize", tiny_model(), "-o", output, "-m", "rtn", "-q", "--report", nowhere)
    assert "does not exist" in refused(EXIT_USAGE, *arguments)
    assert not output.exists()
    manifest = json.loads((quantized / MANIFEST_FILE).read_text())
    for layer in manifest["layers"]:
        del layer["weight_error"], layer["output_error"]
    (quantized / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert "have no 'weight_error'" in refused(EXIT_BAD_DATA, "report", quantized, "-o", page)


def layer(name: str, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": name,
        "scheme": "int4-g64-asym",
        "method": "gptq",
        "weight_error": 0.25,
        "output_error": 0.5,
        "notes": {},
    }
    return base | more


def manifest_of(*layers: dict[str, Any]) -> Manifest:
    return Manifest(
        versions={"torch": "2"},
        source={"name": "<b>m</b> & co"},
        recipe={"source": "mine.yaml", "extends": "awq_w4a16"},
        scheme="int4-g64-asym",
        method="gptq",
        seed=0,
        layers=layers,
    )


def test_a_fallback_is_told_with_its_reason_and_names_are_escaped() -> None:
    reason = "rtn: every input was zero <always>"
    layers = (
        layer("model.layers.0.mlp.up_proj", notes={"damping": 0.1, "damping_reason": "tried 0.01"}),
        layer("model.layers.1.mlp.up_proj", method="rtn", notes={"fallback": reason}),
    )
    assert fallback_rows(layers) == [("model.layers.1.mlp.up_proj", reason)]
    assert why(layers[0]) == "damping reason tried 0.01"
    assert why(layers[1]) == reason
    page = to_page(manifest_of(*layers))
    assert parse(page).rows.count(["model.layers.1.mlp.up_proj", reason]) == 1
    assert "&lt;b&gt;m&lt;/b&gt; &amp; co" in page
    assert "mine.yaml, which extends awq_w4a16" in page


def test_a_folder_of_an_older_version_or_of_rtn_has_a_page() -> None:
    """No seconds, bits, inputs or output errors: the page has what there is."""
    plain = [
        {k: v for k, v in layer(n, output_error=None).items() if k != "notes"}
        for n in ("lm_head", "model.layers.0.mlp.up_proj")
    ]
    parser = parse(to_page(manifest_of(*plain)))
    row = next(row for row in parser.rows if row and row[0] == "lm_head")
    assert row[2:] == ["-", "gptq", "", "2.500e-01", "-", "-", "-", "-"]


def test_totals_and_worst_layers() -> None:
    layers = [
        layer("a", output_error=0.1, seconds=1.0),
        layer("b", output_error=0.3, seconds=2.0),
        layer("c", output_error=None, weight_error=0.2, method="rtn"),
    ]
    assert total_rows(layers) == [
        ("gptq", "int4-g64-asym", "2", "2.00e-01", "3.00e-01", "3.0"),
        ("rtn", "int4-g64-asym", "1", "2.00e-01", "2.00e-01", "0.0"),
    ]
    assert [found["name"] for found in worst_layers(layers, 2)] == ["b", "c"]


@pytest.mark.parametrize("logarithmic", [True, False])
def test_a_heat_map_is_darker_for_more_and_leaves_missing_cells_empty(logarithmic: bool) -> None:
    values = {("q", "0"): 0.0, ("q", "1"): 1.0, ("v", "1"): 100.0, ("v", "0"): 10.0}
    root = ET.fromstring(heat_map(values, ("first", "last"), logarithmic=logarithmic))
    cells = list(root.iter("rect"))
    assert len(cells) == 4
    shade = [float(c.attrib["fill-opacity"]) for c in cells]
    assert shade[2] == 1.0
    assert shade[2] > shade[3] > shade[1] >= shade[0] > 0
    assert cells[0].attrib["x"] == cells[3].attrib["x"] != cells[1].attrib["x"]
    assert cells[0].attrib["y"] == cells[1].attrib["y"] != cells[2].attrib["y"]
    del values["v", "0"]
    assert len(list(ET.fromstring(heat_map(values, ("", ""))).iter("rect"))) == 3


def test_equal_values_have_one_shade() -> None:
    root = ET.fromstring(heat_map({("a", "0"): 4.0, ("b", "0"): 4.0}, ("", "")))
    assert len({c.attrib["fill-opacity"] for c in root.iter("rect")}) == 1
