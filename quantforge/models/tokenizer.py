"""`Tokenizer`: text to token ids and back, from a model folder's ``tokenizer.json``.

It stands on the `tokenizers` library alone. Truncation and padding that a tokenizer.json may ask
for are switched off: no token of a text is ever dropped silently. Special tokens are added only
when asked for; those that stand in the text itself become their ids, as in transformers.

`TextStream` turns ids into text while they are being generated. A token may end inside a UTF-8
character, and a decoder may look at its neighbours, so it holds back what can still change::

    push(0xE2 0x82) -> ""      push(0xAC "5") -> "€5"      finish() -> ""
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from quantforge.errors import CheckpointError, UsageError
from quantforge.models.chat_template import ChatTemplate
from quantforge.models.vocabulary import byte_token, token_bytes

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The named tokens of a tokenizer_config.json; chat templates see them as variables."""

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not (yet) a UTF-8 character."""


def load_tokenizer(folder: Path) -> "Tokenizer":
    """The tokenizer of a model folder. Raises `CheckpointError` for missing or malformed files."""
    return Tokenizer(Path(folder))


class Tokenizer:
    """Encodes, decodes and applies the chat template of one model."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; save one there with transformers: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        source = path.read_bytes()
        self.folder = folder
        self._decoder = _json_object(source, path).get("decoder") or {}
        self._fingerprint = hashlib.sha256(source).hexdigest()
        self._backend = _backend(source, path)
        self._config = _tokenizer_config(folder)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. Raises `UsageError` if `text` is no valid Unicode."""
        _check_unicode(text)
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = False
    ) -> list[list[int]]:
        """`encode` of each text, in parallel and without padding."""
        for text in texts:
            _check_unicode(text)
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that form no character become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be part of a character.

        Raises `UsageError` for an id that is not in the vocabulary.
        """
        token = self._backend.id_to_token(token_id)
        if token is None:
            raise UsageError(f"token id {token_id} is not in the vocabulary of {self.folder}")
        if token_id in self._added_ids:
            return str(token).encode()
        return token_bytes(str(token), byte_fallback=self.has_byte_fallback)

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves this token out when it skips special tokens."""
        return token_id in self._special_ids

    def is_byte(self, token_id: int) -> bool:
        """Whether a token is one of the ``<0x..>`` tokens of a byte-fallback vocabulary."""
        token = self._backend.id_to_token(token_id) if self.has_byte_fallback else None
        return token is not None and byte_token(token) is not None

    @cached_property
    def has_byte_fallback(self) -> bool:
        """Whether the decoder joins runs of ``<0x..>`` tokens (SentencePiece vocabularies)."""
        steps = [self._decoder, *self._decoder.get("decoders", [])]
        return any(step.get("type") == "ByteFallback" for step in steps)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Named special tokens: ``bos_token`` -> its text; those the model lacks are absent."""
        named = ((name, _token_text(self._config.get(name))) for name in SPECIAL_TOKENS)
        return {name: text for name, text in named if text is not None}

    @cached_property
    def bos_token_id(self) -> int | None:
        """The beginning-of-sequence token, or None for models that use none."""
        if "bos_token" in self._config:
            text = self.special_tokens.get("bos_token")
            return None if text is None else self._backend.token_to_id(text)
        for name in ("generation_config.json", "config.json"):
            for token_id in _ids(_optional_json(self.folder / name).get("bos_token_id")):
                return token_id
        return None

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a generation, without repeats."""
        ids = _ids(_optional_json(self.folder / "generation_config.json").get("eos_token_id"))
        if "eos_token" in self.special_tokens:
            ids += _ids(self._backend.token_to_id(self.special_tokens["eos_token"]))
        ids += _ids(_optional_json(self.folder / "config.json").get("eos_token_id"))
        return tuple(dict.fromkeys(ids))

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of `messages`, to be encoded without special tokens.

        `variables` reach the template beside the special tokens (``enable_thinking``, ``tools``).
        Raises `UsageError` without a template, or if it refuses the messages.
        """
        if self._chat_template is None:
            raise UsageError(
                f"{self.folder} has no chat template; it is a base model, so give plain text"
            )
        return self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            variables={**self.special_tokens, **(variables or {})},
        )

    def fingerprint(self) -> str:
        """sha256 of tokenizer.json: equal fingerprints give equal ids."""
        return self._fingerprint

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return ChatTemplate(_read_text(path), where=str(path))
        source = self._config.get("chat_template")
        if isinstance(source, list):  # several named templates
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source = named.get("default")
        if not source:
            return None
        return ChatTemplate(str(source), where=str(self.folder / "tokenizer_config.json"))

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)


class TextStream:
    """Decodes ids as they come: the pieces joined are `Tokenizer.decode` of all the ids.

    It decodes a short window of the latest ids, so a token costs the same at any length.
    """

    CONTEXT = 4
    """Ids kept before new ones: an unfinished character is at most three bytes, hence tokens."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_shown = 0
        """Characters of the window's text that were given out already."""

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often empty."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""  # one byte more can turn the whole run of byte tokens into U+FFFD
        text = self._decode()
        piece = self._take(text, _num_certain(text))
        if len(self._window) > 2 * self.CONTEXT:
            del self._window[: -self.CONTEXT]
            self._num_shown = _num_certain(self._decode())
        return piece

    def finish(self) -> str:
        """What was held back. The stream is over."""
        text = self._decode()
        return self._take(text, len(text))

    def _take(self, text: str, end: int) -> str:
        piece = text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)


def _num_certain(text: str) -> int:
    """Characters that later bytes cannot change: all but an unfinished last one."""
    return len(text) - text.endswith(REPLACEMENT)


def _backend(source: bytes, path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_buffer(source)
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(
            f"{path} is not a tokenizer of the tokenizers library: {error}"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over the older special_tokens_map.json."""
    return {
        **_optional_json(folder / "special_tokens_map.json"),
        **_optional_json(folder / "tokenizer_config.json"),
    }


def _optional_json(path: Path) -> dict[str, Any]:
    return _json_object(path.read_bytes(), path) if path.is_file() else {}


def _json_object(source: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from error


def _token_text(token: object) -> str | None:
    """A token of a tokenizer_config.json: a string, or an object with its ``content``."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _ids(value: object) -> list[int]:
    """A token id of a config (None, one, or several) as a list."""
    found: Iterable[object] = value if isinstance(value, list) else (value,)
    return [i for i in found if isinstance(i, int) and not isinstance(i, bool)]


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"text holds a lone surrogate at character {error.start}; it is not valid Unicode"
        ) from error
