"""Random models for the checks: small ones of several kinds, and one of the shape of Llama-3.1-8B."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tidelane.engine.kv.layout import KVLayout

SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,  # large enough for attention to matter and for ties to be rare
}
WINDOW = 100
# Grouped heads; heads of their own with biases; three heads to a key with norms and heads of 64; a sliding window.
FAMILIES = ("llama", "qwen2", "qwen3", "mistral-windowed")


def small(family: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    match family:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**SMALL))
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**{**SMALL, "num_key_value_heads": 8}))
        case "qwen3":
            return Qwen3ForCausalLM(
                Qwen3Config(**{**SMALL, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64})
            )
        case "mistral-windowed":
            return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=WINDOW))
        case _:
            raise ValueError(family)


def llama_8b(device: torch.device, attention: str, most_tokens: int) -> PreTrainedModel:
    """Llama-3.1-8B's shape, in bfloat16, on `device`."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=most_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with device:
        made = LlamaForCausalLM._from_config(config, attn_implementation=attention, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    return cast("PreTrainedModel", made.eval())


def layout_of(module: PreTrainedModel) -> KVLayout:
    config = module.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_key_value_heads
    return KVLayout(config.num_hidden_layers, heads, head_dim, head_dim, module.dtype.itemsize)
