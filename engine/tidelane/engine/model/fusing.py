"""Fewer, larger kernels for what transformers spells with many: RMS norms, gated MLPs, attention's projections.

At batch 1 a decoder passes some 400 kernels a step, each with a barrier. What to replace is found by its parts; where
the same parts could make another formula (norms, MLPs), the replacement is tried beside the original first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override


def fuse(model: torch.nn.Module) -> None:
    """All of it, as far as it fits `model`."""
    fuse_rms_norms(model)
    fuse_gated_mlps(model)
    fuse_projections(model)


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
    fused: torch.nn.Module
    if weight.device.type == "cpu" and weight.dtype is torch.float32:
        fused = CpuRmsNorm(weight, eps)
    else:
        fused = torch.nn.RMSNorm(weight.shape[0], eps, device="meta")
        fused.weight = weight
    sample = torch.linspace(-3, 3, weight.shape[0], device=weight.device, dtype=weight.dtype).unsqueeze(0)
    with torch.inference_mode():
        same = torch.allclose(fused(sample), norm(sample), rtol=8 * torch.finfo(weight.dtype).eps, atol=1e-6)
    return fused.eval() if same else None


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
    fused = GatedMlp(gate, up, mlp.down_proj, mlp.act_fn).eval()
    weight = gate.weight
    sample = torch.linspace(-3, 3, gate.in_features, device=weight.device, dtype=weight.dtype).unsqueeze(0)
    with torch.inference_mode():
        ours, theirs = fused(sample), mlp(sample)
    tolerance = 32 * torch.finfo(weight.dtype).eps
    return fused if torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max())) else None


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


class JointProjections(torch.nn.Module):
    """Attention's q_proj, which computes k and v of the same input with it and keeps them until they are asked for.

    The model's own forward stays as it is, and may ask in any order: what is not kept is computed anew. Lanes run one
    module in several threads at once, so each thread keeps its own.
    """

    def __init__(self, joint: torch.nn.Linear, sizes: Sequence[int]) -> None:
        super().__init__()
        self.joint = joint
        self._sizes = tuple(sizes)
        self._kept = threading.local()

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(0, x)

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        source: torch.Tensor | None
        parts: tuple[torch.Tensor, ...]
        source, parts = getattr(self._kept, "pass_", (None, ()))
        if source is not x:
            parts = self.joint(x).split(self._sizes, dim=-1)
        # A pass ends with its v. Kept longer, the largest prompt so far would stay in memory once for every layer.
        self._kept.pass_ = (x, parts) if index < len(self._sizes) - 1 else (None, ())
        return parts[index]


class JointPart(torch.nn.Module):
    """k_proj or v_proj: part `index` of what `projections` computes. Holds no weights."""

    def __init__(self, projections: JointProjections, index: int) -> None:
        super().__init__()
        self._of = (projections,)  # in a tuple: not a child, or its weights would count three times
        self._index = index

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._of[0].part(self._index, x)


def fuse_projections(model: torch.nn.Module) -> int:
    """Join q_proj, k_proj and v_proj of each attention; how many it joined."""
    names = ("q_proj", "k_proj", "v_proj")
    replaced = 0
    for attention in list(model.modules()):
        linears: list[Any] = [getattr(attention, name, None) for name in names]
        if not _can_join(linears):
            continue
        projections = JointProjections(_joined(linears), [linear.out_features for linear in linears])
        attention.q_proj = projections
        attention.k_proj = JointPart(projections, 1)
        attention.v_proj = JointPart(projections, 2)
        replaced += 1
    return replaced
