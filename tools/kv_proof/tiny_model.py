"""A tiny random model with a tokenizer, as a folder that an engine loads and serves like any other.

Each character is a token, so that a text and its tokens say the same, whatever a model makes of it.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
_SPECIAL = ("<unknown>", "<end>")
# Their ids: with these banned, an answer has a character for each token.
NOT_TEXT = tuple(range(len(_SPECIAL)))
CONTEXT_TOKENS = 4096


def save(folder: Path, seed: int) -> Path:
    """In `folder`, which is made. A block of 16 tokens takes 16 KiB in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = (*_SPECIAL, *_CHARACTERS)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokens),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                max_position_embeddings=CONTEXT_TOKENS,
                initializer_range=0.2,  # large enough for attention to matter and for ties to be rare
                eos_token_id=tokens.index("<end>"),
            )
        )
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({token: at for at, token in enumerate(tokens)}, "<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}), encoding="utf-8")
    return folder
