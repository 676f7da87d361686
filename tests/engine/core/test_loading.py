from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from typing_extensions import override

from tidelane.engine.model.batch import RaggedBatch, Rows
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.fusing import (
    CpuRmsNorm,
    GatedMlp,
    PlainAttention,
    fuse_attention,
    fuse_gated_mlps,
    fuse_rms_norms,
)
from tidelane.engine.model.loading import load, weight_digest, whole_weights_digest
from tidelane.engine.model.store import BadModel, resolve

from .models import FAMILIES, PLAIN_FAMILIES, SHAPE, save

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save("llama", tmp_path / "llama")


def no_progress(_: str) -> None:
    return


def test_facts_are_those_of_the_config(folder: Path) -> None:
    facts = load(folder, "float32", None, CPU).facts
    assert facts.layers == SHAPE["num_hidden_layers"]
    assert facts.max_context_tokens == SHAPE["max_position_embeddings"]
    assert facts.stop_token_ids == (SHAPE["eos_token_id"],)
    assert facts.kv_layout.token_bytes == 4 * 2 * (16 + 16) * 4  # layers x heads x (key + value) x float32


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_sliced(family: str, tmp_path: Path) -> None:
    from tidelane.engine.kv.device import DevicePool

    loaded = load(save(family, tmp_path / family), "float32", None, CPU)
    model = SlicedModel(loaded.module)
    pool = DevicePool.allocate(loaded.facts.kv_layout, 4, torch.float32, CPU)
    with torch.inference_mode():
        model.check(RaggedBatch.build([Rows(range(40), 0, [0, 1, 2])], pool))
    assert model.layers == SHAPE["num_hidden_layers"]


def test_truncated_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(BadModel, match="cannot load the model"):
        load(folder, "float32", None, CPU)


def test_missing_weights_are_refused_and_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadModel, match=r"lacks 1 of its weights, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder, "float32", None, CPU)


@pytest.mark.parametrize(
    ("name", "shape", "place"),
    [("model.layers.4.mlp.up_proj.weight", (128, 64), "model.layers.4.mlp.up_proj.weight"), ("v_head", (1,), "v_head")],
)
def test_weights_without_a_place_in_the_config_are_refused(
    folder: Path, name: str, shape: tuple[int, ...], place: str
) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {name: torch.zeros(shape)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadModel, match=f"holds 1 weights that its config.json leaves no place for, such as {place}$"):
        load(folder, "float32", None, CPU)


def test_a_config_of_fewer_layers_than_the_weights_is_refused(folder: Path) -> None:
    change(folder / "config.json", num_hidden_layers=2)
    with pytest.raises(BadModel, match=r"holds 18 weights .*, such as model\.layers\.2\.input_layernorm\.weight"):
        load(folder, "float32", None, CPU)


def test_weights_of_another_shape_are_refused_by_name(folder: Path) -> None:
    change(folder / "config.json", num_key_value_heads=4)
    with pytest.raises(
        BadModel, match=r"model\.layers\.0\.self_attn\.k_proj\.weight has the shape \[64, 64\], but .* \[32, 64\]"
    ):
        load(folder, "float32", None, CPU)


def test_what_older_checkpoints_carry_besides_is_harmless(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "tied")
    weights = load_file(folder / "model.safetensors")
    change(folder / "config.json", tie_word_embeddings=True)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(folder, "float32", None, CPU).facts.layers == SHAPE["num_hidden_layers"]


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": "x"}, "'num_hidden_layers'.* expected int, got str"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, is 0"),
        ({"hidden_size": None}, "'hidden_size'.* expected int, got NoneType"),
        ({"hidden_size": [64]}, "'hidden_size'.* expected int, got list"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, is 0"),
        ({"head_dim": 0}, "head_dim must be at least 1, is 0"),
        ({"max_position_embeddings": -5}, "max_position_embeddings must be at least 1, is -5"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be at least 1, is 0"),
        ({"rope_parameters": "x"}, "'rope_parameters'"),
        ({"layer_types": 5}, "'int' object is not iterable"),
        ({"quantization_config": 5}, "'int' object has no attribute 'to_dict'"),
        ({"eos_token_id": "x"}, "'eos_token_id'"),
    ],
)
def test_a_config_with_nonsense_is_refused_on_one_line(folder: Path, fields: dict[str, Any], message: str) -> None:
    change(folder / "config.json", **fields)
    with pytest.raises(BadModel, match=message) as refused:
        load(folder, "float32", None, CPU)
    assert str(refused.value).startswith(f"{folder}/config.json: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "must hold a JSON object, holds list"),
        ("null", "must hold a JSON object, holds NoneType"),
        ("{", "Expecting property name"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_json_object_is_refused_by_file(folder: Path, file: str, content: str, message: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(BadModel, match=f"^{folder}/{file}: .*{message}"):
        load(folder, "float32", None, CPU)


@pytest.mark.parametrize("ids", ["x", [1, "a"], 1.5, True])
def test_stop_tokens_that_are_no_ids_are_refused(folder: Path, ids: Any) -> None:
    change(folder / "generation_config.json", eos_token_id=ids)
    with pytest.raises(BadModel, match="eos_token_id must be a token id or a list of them"):
        load(folder, "float32", None, CPU)


def test_several_stop_tokens_come_from_the_generation_config(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[2, 3])
    assert load(folder, "float32", None, CPU).facts.stop_token_ids == (2, 3)


def test_a_context_above_the_model_s_own_is_refused(folder: Path) -> None:
    with pytest.raises(BadModel, match="max context of 5000 tokens is above the model's own 4096"):
        load(folder, "float32", 5000, CPU)


def test_new_weights_of_the_same_shape_have_another_digest(folder: Path) -> None:
    before = weight_digest(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "model.safetensors")
    assert weight_digest(folder) != before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("builtin://nothing", "unknown built-in model 'nothing'; there is builtin://smollm2-135m-instruct"),
        ("hf://one-word", "expected hf://ORG/NAME"),
        ("ftp://x/y", "must start with builtin://, hf://, file:// or pvc://"),
        ("file:///no/such/folder", "/no/such/folder does not exist"),
    ],
)
def test_sources_that_lead_nowhere_say_what_to_change(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=message):
        resolve(source, tmp_path, no_progress)


def test_a_folder_without_a_model_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"expected a folder with config\.json and safetensors, or exactly one \.gguf"):
        resolve(f"file://{tmp_path}", tmp_path, no_progress)


def test_weights_are_the_engines_own_and_begin_on_cache_lines(folder: Path) -> None:
    module = load(folder, "float32", None, CPU).module
    stored = {name: weight.clone() for name, weight in load_file(folder / "model.safetensors").items()}
    for weight in module.parameters():
        assert weight.data_ptr() % 64 == 0
    for layer in range(module.config.num_hidden_layers):
        attention = f"model.layers.{layer}.self_attn."
        stored[attention + "qkv.weight"] = torch.cat(
            [stored.pop(f"{attention}{name}_proj.weight") for name in ("q", "k", "v")]
        )
        mlp = f"model.layers.{layer}.mlp."
        stored[mlp + "gate_up.weight"] = torch.cat(
            [stored.pop(mlp + "gate_proj.weight"), stored.pop(mlp + "up_proj.weight")]
        )
        stored[mlp + "down.weight"] = stored.pop(mlp + "down_proj.weight")
    assert {name for name, _ in module.named_parameters()} == stored.keys()
    for name, weight in module.named_parameters():
        assert torch.equal(weight, stored[name])
    (folder / "model.safetensors").write_bytes(b"")  # a reader of the mapped file would be killed by SIGBUS
    assert torch.equal(module.model.norm.weight, stored["model.norm.weight"])


class ScaledRMSNorm(torch.nn.Module):
    """Gemma's norm: scales by 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8,), 0.5))
        self.variance_epsilon = 1e-6

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


def test_only_norms_that_say_the_same_are_fused(folder: Path) -> None:
    module = load(folder, "float32", None, CPU).module
    assert type(module.model.norm) is CpuRmsNorm
    assert fuse_rms_norms(torch.nn.Sequential(ScaledRMSNorm())) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_norm_equals_the_models_own(dtype: torch.dtype) -> None:
    own = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    torch.nn.init.uniform_(own.weight, 0.5, 1.5)
    holder = torch.nn.Sequential(own)
    assert fuse_rms_norms(holder) == 1
    x = torch.randn(5, 64, dtype=dtype)
    torch.testing.assert_close(holder(x), own(x))


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_every_mlp_of_every_family_reads_gate_and_up_at_once(family: str, tmp_path: Path) -> None:
    module = load(save(family, tmp_path / family), "float32", None, CPU).module
    assert {type(layer.mlp) for layer in module.model.layers} == {GatedMlp}


@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_mlp_equals_the_models_own(bias: bool) -> None:
    own = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=80, mlp_bias=bias))  # type: ignore[no-untyped-call]
    holder = torch.nn.Sequential(own)
    assert fuse_gated_mlps(holder) == 1
    x = torch.randn(1, 7, 64)
    torch.testing.assert_close(holder(x), own(x))


def test_an_mlp_with_the_same_parts_and_another_formula_stays() -> None:
    class Swapped(LlamaMLP):
        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast("torch.Tensor", self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x))))

    own = Swapped(LlamaConfig(hidden_size=64, intermediate_size=80))  # type: ignore[no-untyped-call]
    assert fuse_gated_mlps(torch.nn.Sequential(own)) == 0


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_every_attention_of_every_family_is_one_matrix(family: str, tmp_path: Path) -> None:
    module = load(save(family, tmp_path / family), "float32", None, CPU).module
    assert {type(layer.self_attn) for layer in module.model.layers} == {PlainAttention}


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_fused_attention_gives_its_function_what_the_models_own_gives(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save(family, tmp_path / family))
    seen: list[tuple[Any, ...]] = []

    def see(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> Any:
        seen.append((module.layer_idx, options["scaling"], options.get("sliding_window"), query, key, value))
        return query.transpose(1, 2), None

    AttentionInterface.register("seen", see)
    model.config._attn_implementation = "seen"
    passed = {"position_ids": torch.tensor([[0, 1, 2, 0, 70]]), "use_cache": False}
    with torch.inference_mode():
        tokens = torch.tensor([[7, 8, 9, 10, 11]])
        own = model(tokens, **passed).logits
        assert fuse_attention(model) == SHAPE["num_hidden_layers"]
        fused = model(tokens, **passed).logits
    torch.testing.assert_close(own, fused)
    half = len(seen) // 2
    assert half == SHAPE["num_hidden_layers"]
    for one, other in zip(seen[:half], seen[half:], strict=True):
        assert one[:3] == other[:3]
        for mine, theirs in zip(one[3:], other[3:], strict=True):
            torch.testing.assert_close(mine, theirs)


class _LateScale(LlamaAttention):
    """Scales its queries from some position on, as Ministral does."""

    @override
    def forward(self, hidden_states: torch.Tensor, *args: Any, **passed: Any) -> Any:
        late = passed["position_ids"].unsqueeze(-1) > 100_000
        return super().forward(torch.where(late, 2 * hidden_states, hidden_states), *args, **passed)


class _Reversed(LlamaAttention):
    """The same parts in another formula."""

    @override
    def forward(self, hidden_states: torch.Tensor, *args: Any, **passed: Any) -> Any:
        return super().forward(hidden_states.flip(-1), *args, **passed)


@pytest.mark.parametrize("kind", [_LateScale, _Reversed])
def test_attention_with_the_same_parts_and_another_formula_stays(kind: type[LlamaAttention]) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    own = model.model.layers[1].self_attn
    model.model.layers[1].self_attn = kind(own.config, 1)
    assert fuse_attention(model) == SHAPE["num_hidden_layers"] - 1
    assert type(model.model.layers[1].self_attn) is kind


class _SlightlyScaled(LlamaAttention):
    """By less than bfloat16's rounding of a sum."""

    @override
    def forward(self, hidden_states: torch.Tensor, *args: Any, **passed: Any) -> Any:
        return super().forward(1.05 * hidden_states, *args, **passed)


class _SlightlyScaledMlp(LlamaMLP):
    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", 1.05 * super().forward(x))  # type: ignore[no-untyped-call]


class _SlightlyScaledNorm(LlamaRMSNorm):
    @override
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 1.03 * super().forward(hidden_states)


def test_in_bfloat16_a_formula_a_few_per_cent_off_does_not_pass_for_rounding() -> None:
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
    layer = model.model.layers[1]
    layer.self_attn = _SlightlyScaled(layer.self_attn.config, 1)
    layer.mlp = _SlightlyScaledMlp(layer.self_attn.config)  # type: ignore[no-untyped-call]
    layer.input_layernorm = _SlightlyScaledNorm(SHAPE["hidden_size"])
    model = model.to(torch.bfloat16).eval()
    layers = SHAPE["num_hidden_layers"]
    assert fuse_attention(model) == layers - 1
    assert fuse_gated_mlps(model) == layers - 1
    assert fuse_rms_norms(model) == 2 * layers  # two a layer and the last, less that one
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_attention_whose_projections_are_not_plain_stays() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    attention = model.model.layers[0].self_attn
    attention.v_proj = cast("Any", torch.nn.Sequential(attention.v_proj))
    assert fuse_attention(model) == SHAPE["num_hidden_layers"] - 1


def test_attention_that_rotates_a_part_of_each_head_stays() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.model.rotary_emb = LlamaRotaryEmbedding(LlamaConfig(**{**SHAPE, "head_dim": 8}))
    assert fuse_attention(model) == 0


def test_a_single_byte_makes_other_weights_where_kv_outlives_the_engine(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    before = whole_weights_digest(folder)
    assert whole_weights_digest(folder) == before
    data = bytearray(weights.read_bytes())
    data[-4097] ^= 1
    weights.write_bytes(data)
    assert whole_weights_digest(folder) != before
