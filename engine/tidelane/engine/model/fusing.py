"""Fewer, larger kernels for what transformers spells with many: RMS norms, gated MLPs, attention before its KV.

At batch 1 a decoder passes some 400 kernels a step, each with a barrier. What to replace is found by its parts, and
since the same parts could make another formula, each replacement is tried beside the original first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import override

# Of the pass, not of the layer: every attention function is given these anew.
PASSED = frozenset({"position_ids", "use_cache", "cache", "past_key_values", "cache_position", "ragged"})


def fuse(model: Any) -> None:
    """All of it, as far as it fits the transformers `model`."""
    fuse_rms_norms(model)
    fuse_gated_mlps(model)
    fuse_attention(model)


class CpuRmsNorm(torch.nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) (Zhang and Sennrich, arXiv 1910.07467) in float32.

    Five operations: torch's own RMSNorm has one kernel on a GPU, but spells out eight on a CPU.
    """

    def __init__(self, weight: torch.nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._eps = torch.tensor(eps)
        self._per_element = 1 / weight.shape[0]

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.mul(x, self.weight).mul_(torch.addcmul(self._eps, norm, norm, value=self._per_element).rsqrt_())


def fuse_rms_norms(model: torch.nn.Module) -> int:
    """Replace RMS norms where ours say the same; how many it replaced.

    A decoder has two a layer, and at batch 1 they cost as much as its attention. Whether a norm is the plain kind
    (Gemma's scales by 1 + weight) is found out by trying, not by its name.
    """
    plain = [
        (parent, name, norm)
        for parent in list(model.modules())
        for name, norm in parent.named_children()
        if type(norm).__name__.endswith("RMSNorm")
    ]
    replaced = 0
    for parent, name, norm in plain:
        fused = _fused_norm(norm)
        if fused is not None:
            setattr(parent, name, fused)
            replaced += 1
    return replaced


def _fused_norm(norm: torch.nn.Module) -> torch.nn.Module | None:
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    trial = _in_float32(norm)
    sample = torch.linspace(-3, 3, weight.shape[0], device=weight.device).unsqueeze(0)
    ours = _plain_norm(trial.weight, eps)
    with torch.inference_mode():
        same = torch.allclose(ours(sample), trial(sample), rtol=8 * torch.finfo(torch.float32).eps, atol=1e-6)
    return _plain_norm(weight, eps) if same else None


def _plain_norm(weight: torch.nn.Parameter, eps: float) -> torch.nn.Module:
    if weight.device.type == "cpu" and weight.dtype is torch.float32:
        return CpuRmsNorm(weight, eps).eval()
    norm = torch.nn.RMSNorm(weight.shape[0], eps, device="meta")
    norm.weight = weight
    return norm.eval()


class GatedMlp(torch.nn.Module):
    """down(act(gate(x)) * up(x)), of SwiGLU's kind (Shazeer, arXiv 2002.05202), with gate and up as one matrix."""

    def __init__(self, gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Module, act: Any) -> None:
        super().__init__()
        self.gate_up = _joined([gate, up])
        self.down = down
        self.act = act

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)  # type: ignore[no-any-return]


def fuse_gated_mlps(model: torch.nn.Module) -> int:
    """Join gate and up of each MLP of Llama's shape; how many it replaced."""
    gated = [
        (parent, name, mlp)
        for parent in list(model.modules())
        for name, mlp in parent.named_children()
        if {n for n, _ in mlp.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}
    ]
    replaced = 0
    for parent, name, mlp in gated:
        fused = _fused_mlp(mlp)
        if fused is not None:
            setattr(parent, name, fused)
            replaced += 1
    return replaced


def _fused_mlp(mlp: Any) -> GatedMlp | None:
    gate, up = mlp.gate_proj, mlp.up_proj
    if not _can_join([gate, up]) or gate.out_features != up.out_features:
        return None
    trial = _in_float32(mlp)
    sample = torch.linspace(-3, 3, gate.in_features, device=gate.weight.device).unsqueeze(0)
    ours = _gated(trial)
    with torch.inference_mode():
        same = _same(ours(sample), trial(sample))
    return _gated(mlp) if same else None


def _gated(mlp: Any) -> GatedMlp:
    return GatedMlp(mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn).eval()


def _in_float32(module: Any) -> Any:
    """`module`, or a copy if it computes with less: there a formula a few per cent off would pass for rounding."""
    in_float32 = all(weight.dtype is torch.float32 for weight in module.parameters())
    return module if in_float32 else copy.deepcopy(module).float()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """But for the rounding of float32."""
    tolerance = 32 * torch.finfo(torch.float32).eps
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=tolerance, atol=tolerance * float(other.abs().max())
    )


def _joined(linears: Sequence[torch.nn.Linear]) -> torch.nn.Linear:
    """Linear layers of one input as one, their outputs side by side."""
    outputs = sum(linear.out_features for linear in linears)
    joint = torch.nn.Linear(linears[0].in_features, outputs, bias=False, device="meta")
    joint.weight = torch.nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if linears[0].bias is not None:
        joint.bias = torch.nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return joint.eval()


def _can_join(linears: Sequence[Any]) -> bool:
    return (
        all(type(linear) is torch.nn.Linear for linear in linears)  # not a subclass, which may do more
        and len({linear.in_features for linear in linears}) == 1
        and len({linear.bias is None for linear in linears}) == 1
    )


class PlainAttention(torch.nn.Module):
    """Attention as Llama spells it, q, k and v as one matrix and q and k rotated at once; each may be normed by head.

    `options` go to the attention function with every pass: the scale, a window.
    """

    def __init__(self, own: Any, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = own.config  # names the attention function
        self.layer_idx = own.layer_idx  # attention functions look for their layer's KV by it
        self.qkv = _joined([own.q_proj, own.k_proj, own.v_proj])
        self.o_proj = own.o_proj
        self.q_norm, self.k_norm = getattr(own, "q_norm", None), getattr(own, "k_norm", None)
        self._options = dict(options)
        self._dim = own.head_dim
        self._heads = own.q_proj.out_features // own.head_dim
        self._kv_heads = own.k_proj.out_features // own.head_dim

    @override
    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, rows, hidden]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cosines and sines, [1, rows, dim] each
        attention_mask: torch.Tensor | None = None,
        **passed: Any,
    ) -> tuple[torch.Tensor, Any]:
        heads, kv_heads = self._heads, self._kv_heads
        joint = self.qkv(hidden_states).view(*hidden_states.shape[:-1], heads + 2 * kv_heads, self._dim)
        turning, value = joint.split_with_sizes((heads + kv_heads, kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = turning.split_with_sizes((heads, kv_heads), dim=2)
            turning = torch.cat((self.q_norm(query), self.k_norm(key)), dim=2)
        query, key = _rotated(turning, *position_embeddings).transpose(1, 2).split_with_sizes((heads, kv_heads), dim=1)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, weights = attend(self, query, key, value.transpose(1, 2), attention_mask, **self._options, **passed)
        return self.o_proj(out.flatten(2)), weights


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (Su and others, arXiv 2104.09864) of x [1, rows, heads, dim], whose halves make up the pairs."""
    low, high = x.chunk(2, dim=-1)
    sin_low, sin_high = sin.unsqueeze(2).chunk(2, dim=-1)
    out = x * cos.unsqueeze(2)
    out_low, out_high = out.chunk(2, dim=-1)
    out_low.addcmul_(high, sin_low, value=-1)
    out_high.addcmul_(low, sin_high)
    return out


def fuse_attention(model: Any) -> int:
    """Replace the attention of each layer where it is plain; how many it replaced."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    plain = [
        (parent, name, own)
        for parent in list(model.modules())
        for name, own in parent.named_children()
        if {n for n, _ in own.named_children()} - {"q_norm", "k_norm"} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    ]
    replaced = 0
    for parent, name, own in plain:
        fused = _fused_attention(own, rotary)
        if fused is not None:
            setattr(parent, name, fused)
            replaced += 1
    return replaced


def _fused_attention(own: Any, rotary: Any) -> PlainAttention | None:
    """None if it gives its attention function anything else than the model's own does."""
    if not _can_join([own.q_proj, own.k_proj, own.v_proj]):
        return None
    trial = _in_float32(own)
    device = own.q_proj.weight.device
    sample = torch.linspace(-3, 3, 2 * own.q_proj.in_features, device=device).view(1, 2, -1)
    # One far off: some models scale queries from some position on.
    positions = torch.tensor([[3, 1 << 20]], device=device)
    theirs, ours = _Recorder(), _Recorder()
    try:
        with torch.inference_mode(), theirs.in_place_of(trial.config):
            passed = {"position_embeddings": rotary(sample, positions), "attention_mask": None}
            expected, _ = trial(sample, position_ids=positions, **passed)
        fused = PlainAttention(trial, theirs.options).eval()
        with torch.inference_mode(), ours.in_place_of(trial.config):
            got, _ = fused(sample, **passed)
    except (TypeError, AttributeError, LookupError, ValueError, RuntimeError):
        return None  # wants more than plain attention is given, or other shapes
    same = all(map(_same, (*ours.given, got), (*theirs.given, expected)))
    return PlainAttention(own, theirs.options).eval() if same else None


class _Recorder:
    """An attention function that keeps what it is given: `given` are query, key and value."""

    def __init__(self) -> None:
        self.given: tuple[torch.Tensor, ...] = ()
        self.options: dict[str, Any] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        self.given = (query, key, value)
        self.options = {name: option for name, option in options.items() if name not in PASSED}
        return query.transpose(1, 2), None

    @contextmanager
    def in_place_of(self, config: Any) -> Iterator[None]:
        """While open, layers with `config` call this."""
        name = config._attn_implementation
        AttentionInterface.register("tidelane_trial", self)
        config._attn_implementation = "tidelane_trial"
        try:
            yield
        finally:
            config._attn_implementation = name
