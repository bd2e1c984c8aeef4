"""Turns a recipe's calibration section into the token ids that a method sees.

The protocol, the one that published figures for GPTQ and AWQ use::

    documents -> duplicates dropped -> shuffled with random.Random(seed) -> chats through the
    model's template -> joined by blank lines -> tokenized once, without special tokens
    -> cut in order into num_samples rows of sequence_length

The result depends on the documents, the section and the tokenizer alone. Only as many documents
are tokenized as the rows need: the token ids are those of the whole text, cut short.

Legend: S samples, T tokens of a sample.
"""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quantforge.calibration.documents import Document, read_documents
from quantforge.errors import CalibrationError, UsageError
from quantforge.progress import Progress, silent
from quantforge.recipe import CalibrationSection

FEW_TOKENS = 8192
"""Below this many tokens a set is called tiny."""
OVERLAP_WORDS = 13
"""Length in words of the runs whose reappearance counts as overlap (GPT-3, appendix C)."""
MAX_OVERLAP = 0.01
"""Share of the evaluation text's runs that may stand in the calibration text unremarked."""

_SEPARATOR = "\n\n"
_CHARACTERS_PER_TOKEN = 8
"""More than any tokenizer needs of ordinary text, so that one try usually gives enough tokens."""
_STAGE = "reading calibration text"

Generate = Callable[[int, int, int], Sequence[Sequence[int]]]
"""``generate(num_samples, length, seed)`` -> token ids sampled from the model itself."""


class TextTokenizer(Protocol):
    """What calibration needs of a tokenizer; `quantforge.models.tokenizer` has the real one."""

    @property
    def has_chat_template(self) -> bool: ...
    def encode(self, text: str) -> list[int]: ...
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationSet:
    """Token ids [S, T] (int64, CPU) and where they come from.

    `id` names the data and the protocol (``bundled 128x2048 seed 0``), `sha256` is of the token
    ids as little-endian int64, `sources` counts the distinct documents that the text was drawn
    from, by source, and `warnings` are sentences for the user.
    """

    token_ids: Tensor
    id: str
    sha256: str
    sources: dict[str, int]
    warnings: tuple[str, ...]


def load_calibration(
    section: CalibrationSection,
    tokenizer: TextTokenizer,
    *,
    evaluation_text: str | None = None,
    generate: Generate | None = None,
    progress: Progress = silent,
) -> CalibrationSet:
    """The calibration set that `section` asks for.

    Too little text gives as many whole samples as there are, with a warning. `evaluation_text`
    is compared with the text that was read, and a warning tells of overlap. The data set ``self``
    calls `generate`.

    Raises `UsageError` for a section that cannot be carried out, and `CalibrationError` when the
    data is unreadable or holds less than one sample.
    """
    if section.num_samples < 1 or section.sequence_length < 1:
        raise UsageError(
            f"calibration of {section.num_samples} samples of {section.sequence_length} tokens; "
            "both must be at least 1"
        )
    if section.dataset == "self":
        return _generated_set(section, generate)

    wanted = section.num_samples * section.sequence_length
    progress(_STAGE, 0, wanted)
    documents = distinct_documents(
        read_documents(
            section.dataset,
            split=section.split,
            column=section.column,
            max_characters=4 * _CHARACTERS_PER_TOKEN * wanted,
        )
    )
    random.Random(section.seed).shuffle(documents)
    texts = [_plain_text(document, tokenizer) for document in documents]
    ids, text = _tokenize_prefix(texts, wanted, tokenizer)
    progress(_STAGE, wanted, wanted)

    warnings = []
    num_chats = sum(not isinstance(document.content, str) for document in documents)
    if num_chats and not tokenizer.has_chat_template:
        warnings.append(
            f"the tokenizer has no chat template; {num_chats} chats are joined as plain text"
        )
    if evaluation_text is not None:
        share = overlap(evaluation_text, text)
        if share > MAX_OVERLAP:
            warnings.append(
                f"{share:.1%} of the evaluation text stands in the calibration text of "
                f"{section.dataset!r} (runs of {OVERLAP_WORDS} words); its figures flatter the "
                "quantized model"
            )
    sources = dict(sorted(Counter(document.source for document in documents).items()))
    return _cut(ids, section, sources, warnings)


def distinct_documents(documents: Sequence[Document]) -> list[Document]:
    """`documents` without empty ones and without repeats, which differ in white space at most."""
    seen: dict[str, Document] = {}
    for document in documents:
        key = " ".join(document.text.split())
        if key:
            seen.setdefault(key, document)
    return list(seen.values())


def overlap(evaluation_text: str, calibration_text: str) -> float:
    """Share of the runs of 13 words of `evaluation_text` that `calibration_text` holds too.

    Words are compared without case or punctuation. 0 for a text shorter than one run.
    """
    known = set(_word_runs(calibration_text))
    found = [run in known for run in _word_runs(evaluation_text)]
    return sum(found) / len(found) if found else 0.0


def _word_runs(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return zip(*(words[start:] for start in range(OVERLAP_WORDS)), strict=False)


def _plain_text(document: Document, tokenizer: TextTokenizer) -> str:
    if isinstance(document.content, str) or not tokenizer.has_chat_template:
        return document.text
    return tokenizer.apply_chat_template(document.content, add_generation_prompt=False)


def _tokenize_prefix(
    texts: Sequence[str], wanted: int, tokenizer: TextTokenizer
) -> tuple[list[int], str]:
    """The first `wanted` token ids of the joined `texts`, and the part of it that was tokenized.

    Takes whole texts until there are enough characters, and more if they give too few tokens.
    The last tokens of a prefix may differ from the whole text's, hence the spare ones.
    """
    spare = 64
    num_characters = _CHARACTERS_PER_TOKEN * (wanted + spare)
    while True:
        count, characters = 0, 0
        while count < len(texts) and characters < num_characters:
            characters += len(texts[count])
            count += 1
        joined = _SEPARATOR.join(texts[:count])
        ids = tokenizer.encode(joined)
        if len(ids) >= wanted + spare or count == len(texts):
            return ids[:wanted], joined
        num_characters *= 2


def _generated_set(section: CalibrationSection, generate: Generate | None) -> CalibrationSet:
    if generate is None:
        raise UsageError(
            "calibration data 'self' is sampled from the model, and this command has no runtime "
            "to sample with; use 'bundled', a file or a Hub data set"
        )
    length = section.sequence_length
    samples = generate(section.num_samples, length, section.seed)
    ids = [token for sample in samples for token in sample[:length]]
    return _cut(ids, section, {"self": len(samples)}, [])


def _cut(
    ids: Sequence[int],
    section: CalibrationSection,
    sources: dict[str, int],
    warnings: Sequence[str],
) -> CalibrationSet:
    """Whole samples of `ids` in order, with the warnings about how many there are."""
    length = section.sequence_length
    num_samples = min(section.num_samples, len(ids) // length)
    if num_samples == 0:
        raise CalibrationError(
            f"calibration data {section.dataset!r} gives {len(ids)} tokens from "
            f"{sum(sources.values())} documents; one sample needs sequence_length {length}"
        )
    num_tokens = num_samples * length
    token_ids_ST = torch.tensor(ids[:num_tokens], dtype=torch.int64).reshape(num_samples, length)
    warnings = list(warnings)
    if num_samples < section.num_samples:
        warnings.append(
            f"calibration data {section.dataset!r} gives {num_samples} samples of {length} "
            f"tokens, not the {section.num_samples} asked for"
        )
    if num_tokens < FEW_TOKENS:
        warnings.append(
            f"{num_tokens} calibration tokens are few; below {FEW_TOKENS} the statistics are noisy"
        )
    return CalibrationSet(
        token_ids=token_ids_ST,
        id=f"{section.dataset} {num_samples}x{length} seed {section.seed}",
        sha256=hashlib.sha256(token_ids_ST.numpy().astype("<i8").tobytes()).hexdigest(),
        sources=sources,
        warnings=tuple(warnings),
    )
