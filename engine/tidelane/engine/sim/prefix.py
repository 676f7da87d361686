"""What blocks of simulated prompts are called: by the hashes of their blocks, as Mooncake's trace gives them."""

from __future__ import annotations

from collections.abc import Sequence

from tidelane.engine.bench.traffic import HASHED_TOKENS
from tidelane.engine.kv.keys import KEY_BYTES, Key
from tidelane.engine.request import Request


class HashNames:
    """Prompts alone have names: the trace does not tell what was answered, but as part of a later prompt."""

    def __init__(self, block_tokens: int, hashed_tokens: int = HASHED_TOKENS) -> None:
        if hashed_tokens % block_tokens:
            raise ValueError(f"blocks of {block_tokens} tokens do not divide those of {hashed_tokens}")
        self._hashed_tokens = hashed_tokens
        self._per_hash = hashed_tokens // block_tokens
        self._block_tokens = block_tokens
        self._hashes: dict[str, Sequence[int]] = {}  # by request under way

    def expect(self, request_id: str, hashes: Sequence[int]) -> None:
        """A request is on its way, whose prompt has these blocks."""
        if hashes:
            self._hashes[request_id] = hashes

    def extend(self, keys: list[Key], request: Request, tokens: list[int], blocks: int) -> None:
        hashes = self._hashes.get(request.id)
        if hashes is None:
            return
        named = min(blocks, len(request.prompt) // self._block_tokens, len(hashes) * self._per_hash)
        for number in range(len(keys), named):
            # As the trace has it: equal hashes stand for equal tokens, and equal ones before them.
            block = hashes[number // self._per_hash] * self._per_hash + number % self._per_hash
            keys.append(block.to_bytes(KEY_BYTES, "big"))

    def lasting(self, keys: list[Key], request: Request) -> list[Key]:
        """Where a prompt ends within a hashed block, another that goes on from it has another hash for that."""
        return keys[: len(request.prompt) // self._hashed_tokens * self._per_hash]

    def ended(self, request_id: str) -> None:
        self._hashes.pop(request_id, None)
