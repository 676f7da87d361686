"""A model's shape: the few numbers of its config that decide how much its passes compute and move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidelane.engine.estimation.fields import Field
from tidelane.engine.estimation.shipped import names, read

_DTYPE_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}
# Config fields by which models differ from "each token through every weight, K and V of kv_heads heads cached".
_OTHER_DESIGNS = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "latent attention",
}
# Families whose MLP has two matrices; in the others a third one gates.
_PLAIN_MLPS = frozenset({"falcon", "gpt_neox", "gptj", "nemotron", "opt", "phi", "starcoder2"})


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder. `dtype_bytes` are those of activations, embeddings and head; the layers' weights may be smaller.

    `eight_bit_matmul`: both factors of the layers' products have 8 bits, so the device's arithmetic is that of 8 bits.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool = False
    gated_mlp: bool = True
    dtype_bytes: float = 2.0
    weight_bytes_per_parameter: float = 2.0
    kv_bytes_per_element: float = 2.0
    eight_bit_matmul: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, object], name: str = "config.json") -> ModelShape:
        """From a Hugging Face config; KV is in the model's dtype. Raises WrongField, naming the field of `name`."""
        _refuse_other_designs(config, name)

        def of(field: str, default: object = None) -> Field:
            value = config.get(field)
            return Field(name, field, default if value is None else value)

        hidden, heads = of("hidden_size").integer(1), of("num_attention_heads").integer(1)
        dtype_bytes = _dtype_bytes(of("dtype", config.get("torch_dtype") or "bfloat16"))
        weight_bytes, eight_bit = _weights(of("quantization_config"), dtype_bytes)
        return cls(
            layers=of("num_hidden_layers").integer(1),
            hidden=hidden,
            heads=heads,
            kv_heads=of("num_key_value_heads", heads).integer(1),
            head_dim=of("head_dim", hidden // heads).integer(1),
            intermediate=of("intermediate_size").integer(1),
            vocab=of("vocab_size").integer(1),
            tied_embeddings=config.get("tie_word_embeddings") is True,
            gated_mlp=config.get("model_type") not in _PLAIN_MLPS,
            dtype_bytes=dtype_bytes,
            weight_bytes_per_parameter=weight_bytes,
            kv_bytes_per_element=dtype_bytes,
            eight_bit_matmul=eight_bit,
        )

    def layer_products(self) -> tuple[tuple[int, int], ...]:
        """(d_in, d_out) of a layer's matrix products: Q, K and V in one, O, the MLP's in one, the MLP's out."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            (self.hidden, query + 2 * key),
            (query, self.hidden),
            (self.hidden, self.intermediate * (2 if self.gated_mlp else 1)),
            (self.intermediate, self.hidden),
        )


def kv_bytes_per_token(shape: ModelShape) -> float:
    """Of one token over all layers, K and V."""
    return shape.layers * 2 * shape.kv_heads * shape.head_dim * shape.kv_bytes_per_element


def weight_bytes(shape: ModelShape) -> float:
    """Of all weights in memory, but for norms and biases, which are a thousandth."""
    layer = sum(d_in * d_out for d_in, d_out in shape.layer_products())
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied_embeddings else 2)
    return shape.layers * layer * shape.weight_bytes_per_parameter + embeddings * shape.dtype_bytes


def model_shape(name: str) -> ModelShape:
    """Of a model whose config we ship. Raises ValueError, with the names there are, on any other."""
    file = read("models", name)
    return ModelShape.from_config({field: each.value for field, each in file.items()}, file.file)


def model_names() -> tuple[str, ...]:
    return names("models")


def _refuse_other_designs(config: Mapping[str, object], name: str) -> None:
    for field, design in _OTHER_DESIGNS.items():
        if config.get(field) not in (None, 0, 1):
            raise Field(name, field, None).wrong(f"means {design}, whose times we cannot predict: measure a profile")


def _dtype_bytes(dtype: Field) -> float:
    found = _DTYPE_BYTES.get(dtype.text().removeprefix("torch."))
    if found is None:
        raise dtype.wrong(f"must be one of {', '.join(_DTYPE_BYTES)}, not {dtype.value!r}")
    return found


def _weights(quantization: Field, dtype_bytes: float) -> tuple[float, bool]:
    """(bytes of a weight in the layers, whether products are of 8 bits). Scales, a few per cent, are left out."""
    if quantization.value is None:
        return dtype_bytes, False
    of = dict(quantization.items())
    method = of["quant_method"].text() if "quant_method" in of else ""
    if method == "fp8":
        return 1.0, True
    if method in ("awq", "gptq") and "bits" in of:
        return of["bits"].integer(1) / 8, False
    raise quantization.wrong("must be of the method fp8, awq or gptq: for others, measure a profile")
