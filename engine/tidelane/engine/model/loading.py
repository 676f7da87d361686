"""Loading a model folder: weights, dtype, and the facts that the rest of the engine needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from xxhash import xxh3_128

from tidelane.engine.kv.keys import Key, namespace
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.memory import zeroed
from tidelane.engine.model import attention, attention_cuda
from tidelane.engine.model.fusing import fuse
from tidelane.engine.model.store import BadModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_LINE_BYTES = 64

# What transformers runs into in a folder that is not what it should be: it computes with the fields as they are, so
# that no list is complete without what any expression may raise.
_FAULTS = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError,
    ImportError, StrictDataclassError, SafetensorError,
)  # fmt: skip
# Counts that a config may hold, under the names that most decoders give them.
_COUNTS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip
# Buffers that older checkpoints carry though models compute them.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$|\.(attn|attention)\.(masked_)?bias$")


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
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    paged = attention_cuda if device.type == "cuda" else attention
    paged.register()
    dtype = _dtype(dtype_name, device)
    _check_counts(folder / "config.json")
    with _fault_of(f"{folder}/config.json"):
        AutoConfig.from_pretrained(folder, local_files_only=True)
    if (folder / "generation_config.json").exists():
        _json_object(folder / "generation_config.json")
        with _fault_of(f"{folder}/generation_config.json"):
            GenerationConfig.from_pretrained(folder, local_files_only=True)
    with _fault_of(f"cannot load the model in {folder}"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", attn_implementation=paged.NAME, local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report; the error that would come names none
        )  # fmt: skip
    module, report = loaded
    _check_weights(folder, report)
    module = module.to(device).eval()
    fuse(module)
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
        stop_token_ids=_stop_token_ids(module, folder),
        kv_layout=_layout(config, module.dtype),
        weight_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
    )
    return LoadedModel(facts, module)


@contextlib.contextmanager
def _fault_of(what: str) -> Iterator[None]:
    """Turns what transformers raises about `what` into BadModel, on one line."""
    try:
        yield
    except _FAULTS as error:
        reason = " ".join(str(error).split())
        raise BadModel(f"{what}: {type(error).__name__}: {reason[:500]}") from error


def _json_object(path: Path) -> dict[str, Any]:
    with _fault_of(str(path)):
        value = json.loads(path.read_text())
    if not isinstance(value, dict):
        raise BadModel(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


def _check_counts(path: Path) -> None:
    """transformers checks their types, but takes 0 and -1 for them: nonsense, or a division by zero, much later."""
    fields = _json_object(path)
    for name in _COUNTS:
        value = fields.get(name)
        if isinstance(value, int) and value < 1:
            raise BadModel(f"{path}: {name} must be at least 1, is {value}")


def _check_weights(folder: Path, report: Mapping[str, Any]) -> None:
    """transformers would serve random numbers for what is missing, and leave out layers that the config lacks."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise BadModel(f"the model in {folder} lacks {len(missing)} of its weights, such as {missing[0]}")
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, stored, wanted = mismatched[0]
        raise BadModel(
            f"the model in {folder}: by its config.json {name} has the shape {list(wanted)}, but it is stored as "
            f"{list(stored)}"
        )
    surplus = sorted(name for name in report["unexpected_keys"] if not _COMPUTED.search(name))
    if surplus:
        raise BadModel(
            f"the model in {folder} holds {len(surplus)} weights that its config.json leaves no place for, such as "
            f"{surplus[0]}"
        )


def _settle_weights(module: torch.nn.Module) -> None:
    """Move weights that transformers mapped from their file, wherever its header ends, to memory of the engine's own.

    Each then begins on a cache line, most of it on huge pages: reading them all is most of a decode step. And the page
    cache cannot drop them between two steps, nor a truncated file kill the engine.
    """
    weights = [weight for weight in module.parameters() if weight.device.type == "cpu"]
    if not weights:
        return
    sizes = [-(-weight.nbytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES for weight in weights]
    whole = torch.frombuffer(zeroed(sum(sizes)), dtype=torch.uint8)
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


def whole_weights_digest(folder: Path) -> str:
    """Of every byte of the weights. What outlives the process must not be taken for that of other weights, however few
    of them differ; `weight_digest` looks at samples."""
    digest = xxh3_128()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 24):
                digest.update(piece)
    return digest.hexdigest()


def kv_namespace(facts: ModelFacts) -> Key:
    """Names all that KV depends on besides tokens: weights and config (RoPE included), number format and layout."""
    return namespace(facts.digest, str(facts.dtype), str(facts.kv_layout))


def _dtype(name: str, device: torch.device) -> torch.dtype | None:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    if name not in DTYPES:
        raise BadModel(f"dtype {name!r}: must be auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _layout(config: Any, dtype: torch.dtype) -> KVLayout:
    """What the model's attention hands over: with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) keys and
    values of all heads, made of the latent, and of different width."""
    heads, head_dim = config.num_attention_heads, getattr(config, "head_dim", None)
    if hasattr(config, "kv_lora_rank"):
        key_dim, value_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    else:
        key_dim = value_dim = head_dim or config.hidden_size // heads
        heads = getattr(config, "num_key_value_heads", None) or heads
    return KVLayout(config.num_hidden_layers, heads, key_dim, value_dim, dtype.itemsize)


def _stop_token_ids(module: Any, folder: Path) -> tuple[int, ...]:
    """End-of-text ids from generation_config (chat models often list several there) or config."""
    ids = getattr(module.generation_config, "eos_token_id", None)
    if ids is None:
        ids = module.config.eos_token_id
    if ids is None:
        return ()
    listed = ids if isinstance(ids, list) else [ids]
    if not all(type(token_id) is int for token_id in listed):
        raise BadModel(
            f"{folder}/generation_config.json: eos_token_id must be a token id or a list of them, is {ids!r}"
        )
    return tuple(listed)
