"""From a GGUF file's vocabulary to the tokenizer files of a Hugging Face folder.

GGUF keeps tokens, their kinds, the merges, and the *name* of the rule by which text is cut into
words before merging. The rules themselves are here, one entry each in `PRE_TOKENIZERS`.
"""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.models.gguf_config import Metadata

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""GGUF's kinds of tokens that differ from normal ones; unused ones only pad the embedding."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3_SPLIT = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreTokenizer:
    """A rule for cutting text into words: by a pattern, else by GPT-2's, digits apart or not."""

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """Whether a word that is a token as it stands is taken without merging."""
    add_bos: bool = False
    """Whether texts begin with BOS unless the file says otherwise."""

    def steps(self) -> pre_tokenizers.PreTokenizer:
        """The rule for the tokenizers library, bytes spelled in GPT-2's alphabet at its end."""
        steps: list[Any] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), "isolated"))
        use_regex = self.pattern is None
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
        return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]


_LLAMA3 = PreTokenizer(pattern=LLAMA3_SPLIT, ignore_merges=True, add_bos=True)

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": PreTokenizer(pattern=QWEN2_SPLIT, nfc=True),
}
"""Value of ``tokenizer.ggml.pre`` -> rule."""


def tokenizer_files(metadata: Metadata, max_length: int) -> dict[str, bytes]:
    """File name -> content of tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Raises `UnsupportedError` for vocabularies other than BPE with a known rule, `CheckpointError`
    for vocabularies that contradict themselves. `max_length` is in tokens.
    """
    rule = _rule(metadata)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", bool, rule.add_bos)
    tokenizer = _tokenizer(metadata, rule, add_bos=add_bos)
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
        "tokenizer_config.json": to_json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": max_length,
                "clean_up_tokenization_spaces": False,
                "add_bos_token": add_bos,
                **_named_tokens(metadata),
            }
        ),
    }
    template = metadata.get("tokenizer.chat_template", str)
    if template:
        files["chat_template.jinja"] = template.encode()
    return files


def token_ids(metadata: Metadata) -> dict[str, int | list[int]]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id``, where the file has them.

    A chat model may end its turns with another token than its texts: then both are given.
    """
    ends = [_token_id(metadata, kind) for kind in ("eos", "eot")]
    eos = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    ids = {
        "bos_token_id": _token_id(metadata, "bos"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": _token_id(metadata, "padding"),
    }
    return {name: value for name, value in ids.items() if value is not None}


def to_json(value: dict[str, Any]) -> bytes:
    """How the small files of a model folder are written."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _rule(metadata: Metadata) -> PreTokenizer:
    model = metadata.get("tokenizer.ggml.model", str)
    name = metadata.get("tokenizer.ggml.pre", str)
    if model != "gpt2":
        raise UnsupportedError(
            f"{metadata.path} holds a tokenizer of kind {model!r}; GGUF import knows 'gpt2' "
            "(byte-level BPE). Take the model's Hugging Face folder instead"
        )
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{metadata.path} cuts words by the rule {name!r}; GGUF import knows "
            f"{', '.join(PRE_TOKENIZERS)}. Take the model's Hugging Face folder instead"
        )
    return PRE_TOKENIZERS[name]


def _tokenizer(metadata: Metadata, rule: PreTokenizer, *, add_bos: bool) -> Tokenizer:
    tokens, kinds = _vocabulary(metadata)
    merges = [_pair(merge, metadata) for merge in metadata.require("tokenizer.ggml.merges", list)]
    try:
        model = BPE(
            {token: token_id for token_id, token in tokens.items()},
            merges,
            ignore_merges=rule.ignore_merges,
        )
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"{metadata.path}: tokens and merges disagree: {error}") from error
    tokenizer = Tokenizer(model)
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.steps()
    tokenizer.decoder = decoders.ByteLevel()
    for token_id, token in tokens.items():
        if kinds[token_id] == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kinds[token_id] == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    bos = _token_id(metadata, "bos")
    if add_bos and bos is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]}:1 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )
    return tokenizer


def _vocabulary(metadata: Metadata) -> tuple[dict[int, str], list[int]]:
    """Token of each id, those that only pad the embedding left out; and the kind of each id."""
    tokens = metadata.require("tokenizer.ggml.tokens", list)
    kinds = metadata.require("tokenizer.ggml.token_type", list)
    if len(tokens) != len(kinds) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(
            f"{metadata.path}: {len(tokens)} tokens, which must be strings, but {len(kinds)} kinds"
        )
    kept = {i: t for i, t in enumerate(tokens) if kinds[i] != UNUSED or t != f"[PAD{i}]"}
    if len(set(kept.values())) != len(kept):
        raise CheckpointError(f"{metadata.path}: a token stands twice in the vocabulary")
    return kept, kinds


def _pair(merge: object, metadata: Metadata) -> tuple[str, str]:
    """The two sides of ``"a b"``: cut at the first space that is not the first character."""
    if isinstance(merge, str):
        cut = merge.find(" ", 1)
        if 0 < cut < len(merge) - 1:
            return merge[:cut], merge[cut + 1 :]
    raise CheckpointError(f"{metadata.path}: {merge!r} is no merge of two tokens")


def _named_tokens(metadata: Metadata) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    tokens = metadata.require("tokenizer.ggml.tokens", list)
    ids = {name: _token_id(metadata, kind) for name, kind in names.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None}


def _token_id(metadata: Metadata, kind: str) -> int | None:
    """The id of the bos, eos, ... token, or None. Raises `CheckpointError` for one past the end."""
    token_id = metadata.get(f"tokenizer.ggml.{kind}_token_id", int)
    count = len(metadata.require("tokenizer.ggml.tokens", list))
    if token_id is not None and not 0 <= token_id < count:
        raise CheckpointError(
            f"{metadata.path}: the {kind} token is {token_id}, beyond the {count} tokens"
        )
    return None if token_id is None else int(token_id)
