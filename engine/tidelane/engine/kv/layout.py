"""The shape of a KV block, in bytes: measured from a model's config, then frozen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Per token and layer, `heads` keys of `key_dim` and as many values of `value_dim` elements: sized apart, since
    some models have them differ."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    element_bytes: int
    block_tokens: int = 16

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, K and V."""
        return self.layers * self.heads * (self.key_dim + self.value_dim) * self.element_bytes

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens of one sequence."""
        return -(-tokens // self.block_tokens)

    def blocks_in(self, memory_bytes: int) -> int:
        """Whole blocks that fit in `memory_bytes`."""
        return memory_bytes // self.block_bytes
