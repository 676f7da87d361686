"""Prompts of a wanted number of tokens, without the server's tokenizer: it is measured by what it counts."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tidelane.engine.bench.traffic import HASHED_TOKENS, Arrival

# Short common words, each one token (with the space before it) to any tokenizer that learned from English text.
_WORDS = """
    the of and to in is was for that it with as on be at by this had not are but from or have an they which one you were
    her all she there would their we him been has when who will more no if out so said what up its about into than them
    can only other new some could time these two may then do first any my now such like our over man me even most made
    after also did many before must through back years where much your way well down should because each just those
    people how too little state good very make world still own see men work long get here between both life being under
    never day same another know while last might us great old year off come since against go came right used take three
""".split()  # noqa: SIM905 - a literal list would fill the screen


@dataclass(frozen=True, slots=True)
class Ruler:
    """How long prompts come out at one server: `words` of ours cost `tokens_per_word` each, and what its chat template
    puts around them costs `template_tokens`."""

    template_tokens: float = 0.0
    tokens_per_word: float = 1.0

    @staticmethod
    def between(short: tuple[int, int], long: tuple[int, int]) -> Ruler:
        """From two prompts of (words, tokens)."""
        per_word = (long[1] - short[1]) / (long[0] - short[0])
        if per_word <= 0:
            return Ruler()  # a server that counts something else
        return Ruler(short[1] - per_word * short[0], per_word)

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.template_tokens) / self.tokens_per_word))

    def prompt(self, arrival: Arrival, seed: str) -> str:
        """As long as asked for. It begins like others whose first `hash_ids` are the same, as far as they fill blocks;
        what is behind those follows from `seed`."""
        words = self.words(arrival.input_tokens)
        block_words = round(HASHED_TOKENS / self.tokens_per_word)
        common = arrival.hash_ids[: (words - 1) // block_words]
        blocks = [prompt_of(block_words, f"block {number}") for number in common]
        return " ".join([*blocks, prompt_of(words - len(blocks) * block_words, seed)])


def prompt_of(words: int, seed: str) -> str:
    """`words` words, about as many tokens; another seed gives another text, so that no two share a prefix."""
    draw = random.Random(seed)
    return " ".join(draw.choices(_WORDS, k=words))
