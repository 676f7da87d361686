"""Running some of a model's layers over a ragged batch."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any, Protocol

import torch

from tidelane.engine.model.store import BadModel

# What decoders of transformers call the norm after the last layer.
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f")


class Batch(Protocol):
    """What the model itself reads of a batch, [rows] each; the rest is for its attention function."""

    @property
    def tokens(self) -> torch.Tensor: ...

    @property
    def positions(self) -> torch.Tensor: ...


class SlicedModel:
    """Any transformers decoder, a few layers at a time.

    A slice is a shallow copy of the decoder that holds only those layers, and the final norm only with the last: the
    model's own forward (rotary embedding, per-layer kinds) runs unchanged over it. A model that does more between
    embedding and layers would come out different so; `check` finds out, and then the model counts as one layer.
    """

    def __init__(self, model: Any) -> None:
        self._base = model.base_model
        self._head = model.get_output_embeddings()
        self._embed = model.get_input_embeddings()
        layers = model.config.get_text_config().num_hidden_layers
        names = [n for n, m in self._base.named_children() if isinstance(m, torch.nn.ModuleList) and len(m) == layers]
        if len(names) != 1 or self._head is None:
            raise BadModel(f"{type(model).__name__} is not a decoder with one list of layers and an output head")
        self._model = model
        self._layers_name = names[0]
        self._depth = layers
        self.layers = layers  # as seen from outside: 1 if it cannot be sliced
        self._view = lru_cache(maxsize=None)(self._make_view)

    @property
    def query_heads(self) -> int:
        return int(self._model.config.get_text_config().num_attention_heads)

    @property
    def linear_weights(self) -> int:
        """Weights that each token is multiplied with, the head's included."""
        linear = [m.weight for m in self._base.modules() if isinstance(m, torch.nn.Linear)]
        return sum(weight.numel() for weight in (*linear, self._head.weight))

    def embed(self, batch: Batch) -> torch.Tensor:
        """[1, rows, hidden]"""
        return self._embed(batch.tokens.unsqueeze(0))  # type: ignore[no-any-return]

    def run(self, hidden: torch.Tensor, batch: Batch, first: int, last: int) -> torch.Tensor:
        """`hidden` [1, rows, hidden] through layers [first, last), and the final norm if that ends the model."""
        if self.layers == 1:
            last = self._depth
        out = self._view(first, last)(
            inputs_embeds=hidden, position_ids=batch.positions.unsqueeze(0), use_cache=False, ragged=batch
        )
        return out.last_hidden_state  # type: ignore[no-any-return]

    def run_whole(self, batch: Batch) -> torch.Tensor:
        """float32 logits [rows, vocab] of every row."""
        return self.logits(self.run(self.embed(batch), batch, 0, self.layers)[0])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] of normed states to float32 logits [n, vocab]."""
        return self._head(hidden).float()  # type: ignore[no-any-return]

    def check(self, batch: Batch) -> None:
        """Compare with the model's own forward on `batch`: bit for bit on a CPU.

        Raises BadModel if `logits` differ (some models scale them); falls back to one layer if slices do.
        """
        whole = self.run(self.embed(batch), batch, 0, self.layers)
        own = self._model(
            input_ids=batch.tokens.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            ragged=batch,
        )
        if not _same(own.logits[0].float(), self.logits(whole[0])):
            raise BadModel(
                f"{type(self._model).__name__} changes its logits after the head, which is not supported yet"
            )
        if self._depth > 1:
            half = self._depth // 2
            part = self.run(self.embed(batch), batch, 0, half)
            if not _same(whole, self.run(part, batch, half, self._depth)):
                self.layers = 1

    def _make_view(self, first: int, last: int) -> Any:
        view = copy.copy(self._base)
        modules = dict(self._base._modules)
        # As a plain list: decoders slice their layers in every forward, and slicing a ModuleList builds a new one.
        view.__dict__[self._layers_name] = list(modules.pop(self._layers_name))[first:last]
        if last < self._depth:
            modules.update({name: torch.nn.Identity() for name in FINAL_NORMS if name in modules})
        view.__dict__["_modules"] = modules
        return view


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device.type == "cpu":
        return torch.equal(one, other)
    # A GPU's libraries may sum in another order when the same rows come in another shape.
    return torch.allclose(one, other, rtol=0.0, atol=0.02 * float(one.abs().max()))
