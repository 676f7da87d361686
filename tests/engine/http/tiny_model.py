"""A byte-level BPE tokenizer with a chat template, small enough to make for each run."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tidelane.engine.channel import Facts

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEXTS = [
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "Once upon a time there was a lane in the middle of the road.",
    "日本語のテキスト。🙂🚀 naïve café, Größe",
] * 4
TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message.role == 'assistant' %}"
    "{{ raise_exception('The assistant cannot speak first') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


def write_model_folder(folder: Path) -> None:
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def facts_of(
    folder: Path,
    served_name: str,
    max_context_tokens: int = 512,
    kv_pool_tokens: int = 2048,
    queue_limit: int = 1000,
) -> Facts:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Facts(
        served_name=served_name,
        model_folder=str(folder),
        max_context_tokens=max_context_tokens,
        kv_pool_tokens=kv_pool_tokens,
        vocab_size=tokenizer.get_vocab_size(),
        stop_token_ids=(id_of(tokenizer, "<|im_end|>"),),
        queue_limit=queue_limit,
    )
