"""Tiny random models of each supported family, as folders that the engine loads like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
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

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # large enough for attention to matter and for ties to be rare
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING_WINDOW = 48
# Keys of 24 numbers and values of 12, and from the second layer on experts.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,  # of what is rotated
}
EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}


def build(family: str) -> PreTrainedModel:
    torch.manual_seed(20)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE))
    if family == "qwen2":
        shape = {k: v for k, v in SHAPE.items() if k != "head_dim"}
        return Qwen2ForCausalLM(Qwen2Config(**shape))
    if family == "qwen2-windowed":
        shape = {k: v for k, v in SHAPE.items() if k != "head_dim"}
        window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "max_window_layers": 2}
        return Qwen2ForCausalLM(Qwen2Config(**shape, **window))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    if family == "mistral":
        return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None))
    if family == "mistral-windowed":
        return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=SLIDING_WINDOW))
    if family == "deepseek":
        return DeepseekV3ForCausalLM(DeepseekV3Config(**SHAPE | LATENT | EXPERTS))
    raise ValueError(family)


# Whose attention and MLP are plain, so that they are fused.
PLAIN_FAMILIES = ("llama", "qwen2", "qwen2-windowed", "qwen3", "mistral", "mistral-windowed")
FAMILIES = (*PLAIN_FAMILIES, "deepseek")


def save(family: str, folder: Path) -> Path:
    build(family).save_pretrained(folder)
    return folder
