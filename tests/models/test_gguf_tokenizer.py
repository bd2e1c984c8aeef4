"""An imported GGUF has the tokenizer of the model that it was made from."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2Tokenizer

from quantforge.models.gguf_import import import_gguf
from quantforge.models.tokenizer import load_tokenizer

TEXTS = (
    "The river ran past the mill.",
    " 1 22 333 4444 55555, 2,456 steps in 1987",
    "it's  he'LL\n\n  \tdef count(steps):\r\n    return 1\n\n\n",
    "naïve café, 日本語 😀, e\u0301 \u00a0x",
    "<|im_start|>user\nhello<|im_end|>\n",
    "",
)


def test_the_tiny_tokenizer_comes_back_with_its_template(tiny_model, gguf_files, tmp_path):
    source = tiny_model("llama")
    path = gguf_files.write_gguf(tmp_path / "m.gguf", source, arch="llama")
    folder = import_gguf(path, tmp_path / "out")
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(source)
    by_transformers = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        expected = theirs.encode(text)
        assert ours.encode(text) == expected
        assert by_transformers.encode(text) == expected
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))
    assert by_transformers.all_special_ids == theirs.all_special_ids


def crossing_vocabulary(folder: Path, steps=None, **model_options) -> Path:
    """Replaces the tokenizer by one whose merges cross words, so that each rule's cuts show."""
    tokenizer = Tokenizer(models.BPE(**model_options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=511,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[i:] for text in TEXTS[:4] for i in range(8)], trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    if steps is not None:
        tokenizer.pre_tokenizer = steps
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_the_smollm_rule_takes_digits_apart(tiny_model, gguf_files, tmp_path):
    digits = pre_tokenizers.Digits(individual_digits=True)
    steps = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    source = crossing_vocabulary(tiny_model("llama"), steps)
    path = gguf_files.write_gguf(tmp_path / "m.gguf", source, arch="llama", pre="smollm")
    ours = load_tokenizer(import_gguf(path, tmp_path / "out"))
    original = Tokenizer.from_file(str(source / "tokenizer.json"))
    for text in (*TEXTS, "x<tool>1 2"):
        assert ours.encode(text) == original.encode(text).ids


def test_the_llama3_rule_equals_transformers(tiny_model, gguf_files, tmp_path):
    source = crossing_vocabulary(tiny_model("llama"))
    path = gguf_files.write_gguf(tmp_path / "m.gguf", source, arch="llama", pre="llama-bpe")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = load_tokenizer(import_gguf(path, tmp_path / "out"))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_the_qwen2_rule_equals_transformers(tiny_model, gguf_files, tmp_path):
    source = crossing_vocabulary(tiny_model("qwen2"))
    path = gguf_files.write_gguf(tmp_path / "m.gguf", source, arch="qwen2", pre="qwen2")
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    vocabulary = {**model["vocab"], "<tool>": 511}
    theirs = Qwen2Tokenizer(vocabulary, [tuple(merge) for merge in model["merges"]])
    theirs.add_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    ours = load_tokenizer(import_gguf(path, tmp_path / "out"))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text


def test_bos_is_added_only_with_special_tokens(tiny_model, gguf_files, tmp_path):
    source = tiny_model("llama")
    path = gguf_files.write_gguf(tmp_path / "m.gguf", source, arch="llama", pre="llama-bpe")
    folder = import_gguf(path, tmp_path / "out")
    ours, by_transformers = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    plain = ours.encode("the mill")
    assert ours.encode("the mill", add_special_tokens=True) == [1, *plain]
    assert by_transformers.encode("the mill") == [1, *plain]


def test_a_turn_may_end_with_another_token_than_a_text(tiny_model, gguf_files, tmp_path):
    path = gguf_files.write_gguf(
        tmp_path / "m.gguf",
        tiny_model("llama"),
        arch="llama",
        metadata={"tokenizer.ggml.eot_token_id": 0},
    )
    assert load_tokenizer(import_gguf(path, tmp_path / "out")).eos_token_ids == (2, 0)


def test_tokens_that_only_pad_the_embedding_are_left_out(tiny_model, gguf_files, tmp_path):
    source = tiny_model("llama")
    definition = json.loads((source / "tokenizer.json").read_text())
    vocabulary, merges = definition["model"]["vocab"], definition["model"]["merges"]
    last = next(token for token, i in vocabulary.items() if i == 511)
    vocabulary["[PAD511]"] = vocabulary.pop(last)
    definition["model"]["merges"] = [m for m in merges if "".join(m) != last]
    (source / "tokenizer.json").write_text(json.dumps(definition))
    path = gguf_files.write_gguf(tmp_path / "m.gguf", source, arch="llama", token_types={511: 5})
    assert load_tokenizer(import_gguf(path, tmp_path / "out")).vocab_size == 511
