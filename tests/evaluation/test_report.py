"""Reports: complete, well-formed, self-contained, and safe with hostile names."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from quantforge.errors import UsageError
from quantforge.evaluation.divergence import compare
from quantforge.evaluation.gate import evaluate_gate
from quantforge.evaluation.measure import Measurement
from quantforge.evaluation.report import (
    check_report_path,
    to_html,
    to_markdown,
    to_text,
    write_report,
)
from quantforge.evaluation.texts import EvalText
from quantforge.page import bar_plot
from quantforge.recipe import GateSection

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Checker(HTMLParser):
    """Fails on a tag that is not closed; collects the tags and attributes seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def document(fake_engine: Any, token_ids: list[int]) -> dict[str, Any]:
    compared = compare(fake_engine(noise=0.3), fake_engine(), token_ids, window=20)
    found = Measurement(
        model="models/<b>mine</b> & |co|",
        baseline="models/base",
        text=EvalText(name="bundled", text="", sha256="0123456789abcdef" * 4),
        perplexity=compared.model,
        comparison=compared,
        bits_per_weight=4.5,
        engine={
            "device": "cpu",
            "dtype": "float32",
            "kv_cache": "float32",
            "kernels": {"int4-g64-asym": "reference"},
        },
        baseline_engine={
            "device": "cpu",
            "dtype": "float32",
            "kv_cache": "float32",
            "kernels": {"float32": "dense"},
        },
        seconds=1.0,
    )
    section = GateSection(max_ppl_ratio=9.0, max_mean_kl=1e-6)
    gate = {"recipe": "strict", **evaluate_gate(section, found.metrics()).to_dict()}
    return {**found.to_dict(), "gate": gate}


def test_the_page_is_well_formed_and_needs_neither_network_nor_script(
    document: dict[str, Any],
) -> None:
    page = to_html(document)
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert not checker.tags & {"script", "img", "link", "iframe", "b"}
    assert not checker.attributes & {"src", "href", "onclick", "onload"}
    assert "://" not in page
    assert "default-src 'none'" in page


def test_names_are_escaped(document: dict[str, Any]) -> None:
    assert "models/&lt;b&gt;mine&lt;/b&gt; &amp; |co|" in to_html(document)
    assert r"\|co\|" in to_markdown(document)


@pytest.mark.parametrize("render", [to_html, to_markdown, to_text])
def test_every_report_tells_verdict_limits_and_figures(
    document: dict[str, Any], render: Any
) -> None:
    report = render(document)
    compared = document["comparison"]
    for figure in (document["ppl"], compared["ppl_ratio"], compared["mean_kl"], compared["top1"]):
        assert f"{figure:.4g}" in report
    for words in ("Gate FAILED", "max_mean_kl", "max_ppl_ratio", "FAIL", "pass"):
        assert words in report


@pytest.mark.parametrize("render", [to_html, to_markdown])
def test_written_reports_tell_text_protocol_device_and_kernels(
    document: dict[str, Any], render: Any
) -> None:
    report = render(document)
    for words in ("0123456789abcdef", "dropped", "float32", "int4-g64-asym: reference", "dense"):
        assert words in report


def test_markdown_tables_have_one_width(document: dict[str, Any]) -> None:
    for table in re.split(r"\n\n", to_markdown(document)):
        lines = [line for line in table.split("\n") if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) <= 1


def test_the_page_holds_both_plots(document: dict[str, Any]) -> None:
    plots = re.findall(r"<svg.*?</svg>", to_html(document), re.DOTALL)
    assert len(plots) == 2
    for plot in plots:
        ET.fromstring(plot)
    assert plots[1].count("<rect") == document["protocol"]["num_windows"]


def test_an_evaluation_without_baseline_or_gate_has_a_report(document: dict[str, Any]) -> None:
    plain = {k: v for k, v in document.items() if k not in ("gate", "kl_histogram", "windows")}
    plain |= {"comparison": None, "baseline": None, "baseline_engine": None}
    for render in (to_html, to_markdown):
        report = render(plain)
        assert "Evaluation of" in report
        assert "KL" not in report
        assert "svg viewBox" not in report


def test_bars_stand_on_the_base_line_and_keep_their_proportions() -> None:
    root = ET.fromstring(bar_plot([1.0, 4.0, 0.0], ["a", "b", "c"], ("first", "last")))
    bars = [(float(r.attrib["y"]), float(r.attrib["height"])) for r in root.iter("rect")]
    assert len({round(y + height, 1) for y, height in bars}) == 1
    assert bars[1][1] == pytest.approx(4 * bars[0][1], rel=1e-3)
    assert bars[2][1] == 0


def test_the_suffix_chooses_the_kind(document: dict[str, Any], tmp_path: Path) -> None:
    for name, start in (("r.html", "<!DOCTYPE html>"), ("r.md", "# Gate FAILED")):
        write_report(tmp_path / name, document)
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)


def test_a_report_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"use \.html or \.md"):
        check_report_path(tmp_path / "report.pdf")
    with pytest.raises(UsageError, match="does not exist"):
        check_report_path(tmp_path / "nowhere" / "report.md")
