"""Ids, texts and chat prompts equal transformers'; streamed pieces join to the whole text."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import AutoTokenizer

from quantforge.errors import CheckpointError, UsageError
from quantforge.models.tokenizer import TextStream, load_tokenizer

TEXTS = (
    "The river ran past the mill.",
    " 12 345\n\n\tx",
    "日本語 😀 e\u0301\u0000",
    "<|im_end|>a",
    "",
)

TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    "blocks are trimmed": (
        "{%- for m in messages %}\n    {% if m.role == 'user' %}\n  U {{ m.content | trim }}\n"
        "    {% else %}\nA {{ m.content }}\n    {% endif %}\n{% endfor %}\n"
        "{% if add_generation_prompt %}\nA {% endif %}"
    ),
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
    "missing variables": "{{ tools is none }}{{ documents is none }}{{ nothing is defined }}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=true) }}",
    "dates": "{{ strftime_now('%Y') | length }}{{ strftime_now('%d %b %Y') }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation blocks": "{% set x = 1 %}{% for m in messages %}{% generation %}\n"
    "{% set x = 2 %}{{ m.content }}{% endgeneration %}\n{% endfor %}{{ x }}",
    "absent keys": "{% for m in messages %}{{ 'tool_calls' in m }}{{ m.name is defined }}"
    "{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
}

MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind'."},
    {"role": "user", "content": "  {{ 7 * 7 }} naïve 日本\n"},
    {"role": "assistant", "content": "49", "tool_calls": None, "reasoning": "7 × 7"},
]


@pytest.fixture
def folder(tiny_model) -> Path:
    return tiny_model("llama")


def edit(path: Path, **changes) -> None:
    settings_ = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings_ | changes))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_transformers(folder, text):
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert b"".join(ours.token_bytes(i) for i in ids).decode() == text


def test_a_batch_is_encoded_text_by_text(folder):
    ours = load_tokenizer(folder)
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]
    assert ours.vocab_size == 512


def test_truncation_and_padding_of_the_file_are_not_applied(folder):
    long_text = TEXTS[0] * 20
    expected = load_tokenizer(folder).encode(long_text)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(8)
    backend.enable_padding(length=4000)
    backend.save(str(folder / "tokenizer.json"))
    ours = load_tokenizer(folder)
    assert ours.encode(long_text) == expected
    assert ours.encode_batch([long_text, "a"])[0] == expected


def test_every_end_token_of_the_configs_is_known_once(folder):
    assert load_tokenizer(folder).eos_token_ids == (2,)
    edit(folder / "generation_config.json", eos_token_id=[7, 2, 9])
    edit(folder / "config.json", eos_token_id=5)
    assert load_tokenizer(folder).eos_token_ids == (7, 2, 9, 5)


def test_a_model_that_declares_no_bos_has_none(folder):
    assert load_tokenizer(folder).bos_token_id == 1
    edit(folder / "tokenizer_config.json", bos_token=None)
    assert load_tokenizer(folder).bos_token_id is None


def test_named_tokens_may_be_objects_or_stand_in_the_older_file(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["bos_token"]
    config["eos_token"] = {"content": "<|endoftext|>", "lstrip": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    edit(folder / "special_tokens_map.json", bos_token="<|im_end|>")
    ours = load_tokenizer(folder)
    assert ours.special_tokens["eos_token"] == "<|endoftext|>"
    assert ours.bos_token_id == 2


def test_the_fingerprint_changes_with_the_vocabulary_only(folder):
    first = load_tokenizer(folder).fingerprint()
    edit(folder / "tokenizer_config.json", model_max_length=7)
    assert load_tokenizer(folder).fingerprint() == first
    edit(folder / "tokenizer.json", normalizer={"type": "NFC"})
    assert load_tokenizer(folder).fingerprint() != first


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_chat_prompt_equals_transformers(folder, template, add_generation_prompt):
    (folder / "chat_template.jinja").write_text(template)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.apply_chat_template(
        MESSAGES, add_generation_prompt=add_generation_prompt
    ) == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt
    )


def test_variables_reach_the_template(folder):
    (folder / "chat_template.jinja").write_text("{{ enable_thinking }}{{ tools | tojson }}")
    variables = {"enable_thinking": False, "tools": [{"name": "f"}]}
    theirs = AutoTokenizer.from_pretrained(folder)
    assert load_tokenizer(folder).apply_chat_template(
        MESSAGES, variables=variables
    ) == theirs.apply_chat_template(MESSAGES, tokenize=False, **variables)


def test_the_template_of_the_config_is_used_without_a_file(folder):
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert load_tokenizer(folder).apply_chat_template(MESSAGES) == expected
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "d"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert load_tokenizer(folder).apply_chat_template(MESSAGES) == "d"


def test_without_a_template_the_error_says_so(folder):
    edit(folder / "tokenizer_config.json", chat_template=None)
    ours = load_tokenizer(folder)
    assert not ours.has_chat_template
    with pytest.raises(UsageError, match="no chat template"):
        ours.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[0].missing.deeper }}", "no attribute 'missing'"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ messages[0].content.__class__.__mro__ }}", "'__class__' of 'str' object is unsafe"),
        ("{% for i in range(999999999) %}{% endfor %}", "too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_refuses_fails_or_escapes_is_a_usage_error(folder, template, message):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UsageError, match=message):
        load_tokenizer(folder).apply_chat_template(MESSAGES)


@pytest.mark.parametrize("messages", [["hello"], [{"role": "user", "content": object()}]])
def test_messages_of_other_types_are_refused(folder, messages):
    with pytest.raises(UsageError, match="chat message"):
        load_tokenizer(folder).apply_chat_template(messages)


def test_a_lone_surrogate_is_refused(folder):
    ours = load_tokenizer(folder)
    with pytest.raises(UsageError, match="lone surrogate at character 1"):
        ours.encode("a\ud800b")
    with pytest.raises(UsageError, match="lone surrogate"):
        ours.encode_batch(["a", "\udfff"])


def test_missing_and_malformed_files_name_the_file(folder):
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja is not valid Jinja: line 1"):
        _ = load_tokenizer(folder).has_chat_template
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json is not valid JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "Nonsense"}}')
    with pytest.raises(CheckpointError, match=r"tokenizer.json is not a tokenizer"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json"):
        load_tokenizer(folder)


def byte_fallback_folder(folder: Path) -> Path:
    """A vocabulary as SentencePiece's: words with U+2581, other characters byte by byte."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab", "é", "\ufffd"]
    vocabulary = {word: i for i, word in enumerate(words)}
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581a", "b")]
    backend = Backend(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def both_kinds(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    tiny.save_tiny_tokenizer(root / "bytes")
    byte_fallback_folder(root / "fallback")
    return [load_tokenizer(root / "bytes"), load_tokenizer(root / "fallback")]


def stream(tokenizer, ids, **options):
    pieces = TextStream(tokenizer, **options)
    return [*(pieces.push(token_id) for token_id in ids), pieces.finish()]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), kind=st.integers(0, 1), skip=st.booleans())
def test_streamed_pieces_of_any_ids_join_to_their_decoding(both_kinds, data, kind, skip):
    tokenizer = both_kinds[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    pieces = stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40), kind=st.integers(0, 1))
def test_streamed_text_comes_in_whole_characters(both_kinds, text, kind):
    tokenizer = both_kinds[kind]
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_plain_text_is_shown_token_by_token(both_kinds):
    tokenizer = both_kinds[0]
    ids = tokenizer.encode("The river ran past the mill.")
    assert stream(tokenizer, ids) == [*(tokenizer.decode([i]) for i in ids), ""]


def test_the_window_of_a_stream_stays_short(both_kinds):
    tokenizer = both_kinds[0]
    pieces = TextStream(tokenizer)
    for token_id in tokenizer.encode("😀 river " * 100):
        pieces.push(token_id)
        assert len(pieces._window) <= 2 * TextStream.CONTEXT


def test_a_byte_fallback_token_is_one_byte(both_kinds):
    tokenizer = both_kinds[1]
    ids = tokenizer.encode("ab €")
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == " ab €".encode()
    assert tokenizer.decode(ids) == "ab €"
    with pytest.raises(UsageError, match="token id 9999 is not in the vocabulary"):
        tokenizer.token_bytes(9999)
