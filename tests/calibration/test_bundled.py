"""The promises of the bundled calibration set and of the held-out text."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from quantforge.calibration.data import load_calibration, overlap
from quantforge.calibration.documents import bundled_parts
from quantforge.recipe import CalibrationSection
from quantforge.resources import resource_folder


class ByteTokenizer:
    """One token a byte; chats are joined as they are."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        return "".join(f"<{m['role']}>{m['content']}</>" for m in messages)


def section(dataset: object, samples: int = 4, length: int = 32, **more: Any) -> CalibrationSection:
    return CalibrationSection(
        dataset=str(dataset), num_samples=samples, sequence_length=length, **more
    )


def bundled_rows(part: str) -> list[dict[str, Any]]:
    text = (resource_folder("calib_data") / f"{part}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_bundled_is_all_parts_shuffled_together() -> None:
    assert bundled_parts() == ("chat", "code", "prose")
    found = load_calibration(section("bundled", 16, 2048), ByteTokenizer())
    assert found.token_ids.shape == (16, 2048)
    assert found.warnings == ()
    assert sum(found.sources.values()) == sum(len(bundled_rows(p)) for p in bundled_parts())


@pytest.mark.parametrize("part", ["chat", "code", "prose"])
def test_a_part_of_the_bundled_set_can_be_named(part: str) -> None:
    found = load_calibration(section(f"bundled:{part}", 8, 1024), ByteTokenizer())
    assert found.token_ids.shape == (8, 1024)
    assert set(found.sources) == {row["source"] for row in bundled_rows(part)}


def test_the_bundled_set_is_small_to_ship_and_large_enough_for_128_times_2048_tokens() -> None:
    folder = resource_folder("calib_data")
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sum(sizes.values()) < 3_000_000
    assert max(sizes.values()) < 1_400_000
    words = sum(
        len(re.findall(r"\w+|[^\w\s]", json.dumps(row)))
        for part in bundled_parts()
        for row in bundled_rows(part)
    )
    # A token is at most about a word or a mark of punctuation for the vocabularies in use.
    assert words > 1.2 * 128 * 2048


def test_the_readme_lists_each_file_by_its_hash_and_each_source_with_a_licence() -> None:
    folder = resource_folder("calib_data")
    readme = (folder / "README.md").read_text()
    for name in ("chat.jsonl", "code.jsonl", "prose.jsonl", "held_out.txt"):
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() in readme
    for source in {row["source"] for part in bundled_parts() for row in bundled_rows(part)}:
        licence = re.search(rf"^\| {re.escape(source)} \|[^|]*\|[^|]*\|([^|]*)\|", readme, re.M)
        assert licence, source
        assert re.search(r"Apache-2\.0|PSF-2\.0|public domain", licence[1])


def test_the_held_out_text_shares_no_run_of_words_with_the_calibration_set() -> None:
    held_out = (resource_folder("calib_data") / "held_out.txt").read_text(encoding="utf-8")
    assert 150_000 <= len(held_out.encode()) <= 250_000
    for part in bundled_parts():
        rows = bundled_rows(part)
        texts = [
            row.get("text") or "\n".join(m["content"] for m in row["messages"]) for row in rows
        ]
        assert overlap(held_out, "\n".join(texts)) == 0.0
