"""Random two-layer models of each family, made and saved by transformers, with a tokenizer.

Norm weights and biases are random too, so that a forgotten one shows in the logits.
"""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEXT = """
The river ran past the mill and under the old stone bridge, where children threw bread to ducks
that had long since stopped being hungry. Nobody remembered who had built the bridge. One account
said monks, another said soldiers, and a third, which the baker preferred, said that it had simply
grown there, as mushrooms do, during a wet autumn three hundred years ago. In the morning the fog
lay so low that carts seemed to float across it. By noon everything was plain again: the water
brown and quick, the wheel turning, the miller's cat asleep on a sack of barley. A letter arrived
on Thursday. It was addressed to the schoolmaster, but he had moved away in 1987, so the postman
read it aloud in the square. "Dear friend," it began, "I have counted 2,456 steps between your
house and mine, and I mean to walk every one of them before winter." They agreed that this was a
good letter, though no one could explain why. def count(steps): return sum(1 for step in steps)
"""


def save_tiny_model(
    folder: Path,
    arch: str = "llama",
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """`folder`, holding a random model of `arch` in `dtype`; `overrides` are config.json keys."""
    import transformers

    model_class = getattr(transformers, CLASSES[arch])
    config = model_class.config_class(**(_sizes(arch) | overrides))
    torch.manual_seed(seed)
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    save_tiny_tokenizer(folder, min(512, config.vocab_size))
    return folder


def _sizes(arch: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if arch == "qwen3":
        sizes["head_dim"] = 32
    if arch == "mistral":
        sizes["sliding_window"] = None
    return sizes


def save_tiny_tokenizer(folder: Path, vocab_size: int = 512) -> None:
    """Writes tokenizer.json and tokenizer_config.json of a byte-level BPE trained on `TEXT`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json(vocab_size), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


@functools.cache
def _tokenizer_json(vocab_size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    assert tokenizer.get_vocab_size() == vocab_size, "the text is too short for the vocabulary"
    return str(tokenizer.to_str())
