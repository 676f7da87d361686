"""What a KV block is called: a digest of all that its contents follow from.

The name of a block chains over the tokens before it, as vLLM's and SGLang's do, and starts from a root that names the
weights, the number format, the layout and the tenant. Two blocks of one name hold the same bytes; leaving one of these
parts out of a name has served wrong text elsewhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from tidelane.engine.request import Request

Key = bytes
KEY_BYTES = 16
# Separates the parts of a namespace, and occurs in none of them.
_SEPARATOR = b"\x00"


def namespace(*parts: str) -> Key:
    """The digest of everything besides tokens that KV depends on. The order of the parts counts."""
    return blake2b(_SEPARATOR.join(part.encode() for part in parts), digest_size=KEY_BYTES).digest()


def root(name_of_space: Key, salt: str) -> Key:
    """Where the chain of a prompt starts. Prompts of different `salt` share nothing."""
    return blake2b(name_of_space + salt.encode(), digest_size=KEY_BYTES).digest()


def chain(parent: Key, tokens: Sequence[int], block_tokens: int) -> list[Key]:
    """The keys of the blocks of `tokens`, whole ones, which stand right behind the block of `parent`.

    A cryptographic hash: who chooses the tokens must not be able to make two blocks of one name.
    """
    data = array("I", tokens).tobytes()
    size = block_tokens * array("I").itemsize
    keys = []
    for start in range(0, len(data), size):
        parent = blake2b(parent + data[start : start + size], digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


class TokenNames:
    """Blocks by their tokens and all those before them, and the salt of the request."""

    def __init__(self, name_of_space: Key, block_tokens: int) -> None:
        self._space = name_of_space
        self._block_tokens = block_tokens

    def extend(self, keys: list[Key], request: Request, tokens: list[int], blocks: int) -> None:
        if len(keys) < blocks:
            parent = keys[-1] if keys else root(self._space, request.cache_salt)
            missing = tokens[len(keys) * self._block_tokens : blocks * self._block_tokens]
            keys += chain(parent, missing, self._block_tokens)

    def lasting(self, keys: list[Key], request: Request) -> list[Key]:
        return keys
