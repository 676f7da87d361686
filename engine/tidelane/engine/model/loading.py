"""Loading a model folder: weights, dtype, and the facts that the rest of the engine needs."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.model.attention import NAME, register
from tidelane.engine.model.fusing import fuse_gated_mlps, fuse_projections, fuse_rms_norms
from tidelane.engine.model.store import BadModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model is, without its weights."""

    folder: Path
    digest: str
    dtype: torch.dtype
    layers: int
    vocab_size: int
    max_context_tokens: int
    stop_token_ids: tuple[int, ...]
    kv_layout: KVLayout
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    facts: ModelFacts
    module: Any  # transformers.PreTrainedModel


def load(folder: Path, dtype_name: str, max_context_tokens: int | None, device: torch.device) -> LoadedModel:
    """Load the model in `folder` for paged attention.

    `dtype_name` "auto" takes float32 on a CPU and the checkpoint's own dtype on a GPU. Raises BadModel for a folder
    that transformers cannot load, or whose attention is not plain.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    register()
    dtype = _dtype(dtype_name, device)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", attn_implementation=NAME, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise BadModel(f"cannot load the model in {folder}: {error}") from error
    module, report = loaded
    if report["missing_keys"]:
        # transformers would serve random numbers in their place.
        missing = sorted(report["missing_keys"])
        raise BadModel(f"the model in {folder} lacks {len(missing)} of its weights, such as {missing[0]}")
    module = module.to(device).eval()
    fuse_rms_norms(module)
    fuse_gated_mlps(module)
    fuse_projections(module)
    _settle_weights(module)
    config = module.config.get_text_config()
    own_limit = getattr(config, "max_position_embeddings", None)
    if own_limit and max_context_tokens and max_context_tokens > own_limit:
        raise BadModel(f"max context of {max_context_tokens} tokens is above the model's own {own_limit}")
    facts = ModelFacts(
        folder=folder,
        digest=weight_digest(folder),
        dtype=module.dtype,
        layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        max_context_tokens=max_context_tokens or own_limit or 8192,
        stop_token_ids=_stop_token_ids(module),
        kv_layout=_layout(config, module.dtype),
        weight_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
    )
    return LoadedModel(facts, module)


def _settle_weights(module: torch.nn.Module) -> None:
    """Move weights that transformers mapped from their file, wherever its header ends, to memory of the engine's own.

    Each then begins on a cache line, most of it on huge pages: reading them all is most of a decode step. And the page
    cache cannot drop them between two steps, nor a truncated file kill the engine.
    """
    weights = [weight for weight in module.parameters() if weight.device.type == "cpu"]
    if not weights:
        return
    sizes = [-(-weight.nbytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES for weight in weights]
    memory = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel may be built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    for weight, part in zip(weights, torch.split(whole, sizes), strict=True):
        weight.data = part[: weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight.data)


def weight_digest(folder: Path) -> str:
    """Names weights without reading all of them: sha256 over config, file names, sizes and safetensors headers."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            digest.update(file.read(min(header_bytes, 1 << 24)))
            for part in range(16):  # samples of the data, so that new weights of one shape get a new name
                file.seek(max(0, path.stat().st_size - 4096) * part // 15)
                digest.update(file.read(4096))
    return digest.hexdigest()


def _dtype(name: str, device: torch.device) -> torch.dtype | None:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    if name not in DTYPES:
        raise BadModel(f"dtype {name!r}: must be auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _layout(config: Any, dtype: torch.dtype) -> KVLayout:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVLayout(
        layers=config.num_hidden_layers,
        heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        element_bytes=dtype.itemsize,
    )


def _stop_token_ids(module: Any) -> tuple[int, ...]:
    """End-of-text ids from generation_config (chat models often list several there) or config."""
    ids = getattr(module.generation_config, "eos_token_id", None)
    if ids is None:
        ids = module.config.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
