from __future__ import annotations

import pytest

from tidelane.engine.estimation.fields import WrongField
from tidelane.engine.estimation.shapes import ModelShape, kv_bytes_per_token, weight_bytes

SMALL: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def shape(**changes: object) -> ModelShape:
    return ModelShape.from_config({**SMALL, **changes})


def test_a_config_with_grouped_queries_a_gate_and_tied_embeddings() -> None:
    assert shape() == ModelShape(2, 64, 4, 2, 16, 128, 100, tied_embeddings=True)
    attention = 64 * (64 + 2 * 32) + 64 * 64
    assert weight_bytes(shape()) == 2 * (2 * (attention + 3 * 64 * 128) + 64 * 100)
    assert kv_bytes_per_token(shape()) == 2 * 2 * 2 * 16 * 2


def test_what_a_config_leaves_out() -> None:
    assert shape(num_key_value_heads=None).kv_heads == 4
    assert shape(head_dim=32).head_dim == 32
    assert not shape(tie_word_embeddings=None).tied_embeddings
    assert weight_bytes(shape(tie_word_embeddings=False)) - weight_bytes(shape()) == 2 * 64 * 100
    assert not shape(model_type="gpt_neox").gated_mlp


@pytest.mark.parametrize(
    ("changes", "dtype", "weight", "eight_bit"),
    [
        ({"dtype": "float32"}, 4.0, 4.0, False),
        ({"torch_dtype": "torch.float16"}, 2.0, 2.0, False),
        ({"torch_dtype": None}, 2.0, 2.0, False),
        ({"quantization_config": {"quant_method": "fp8"}}, 2.0, 1.0, True),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, 2.0, 0.5, False),
    ],
)
def test_bytes_of_each_kind_of_number(changes: dict[str, object], dtype: float, weight: float, eight_bit: bool) -> None:
    found = shape(**changes)
    assert (found.dtype_bytes, found.weight_bytes_per_parameter, found.eight_bit_matmul) == (dtype, weight, eight_bit)
    assert found.kv_bytes_per_element == dtype


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": None}, "hidden_size must be an integer of at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1"),
        ({"dtype": "int3"}, "dtype must be one of bfloat16, float16, float32"),
        ({"num_local_experts": 8}, "num_local_experts means a mixture of experts.*measure a profile"),
        ({"kv_lora_rank": 512}, "kv_lora_rank means latent attention"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config must be of the method"),
    ],
)
def test_configs_whose_times_we_cannot_predict(changes: dict[str, object], says: str) -> None:
    with pytest.raises(WrongField, match=f"^config.json: {says}"):
        shape(**changes)
