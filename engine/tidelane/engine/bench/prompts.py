"""Prompts of about a wanted number of tokens, without the server's tokenizer."""

from __future__ import annotations

import random

# Short common words, each one token (with the space before it) to any tokenizer that learned from English text.
_WORDS = """
    the of and to in is was for that it with as on be at by this had not are but from or have an they which one you were
    her all she there would their we him been has when who will more no if out so said what up its about into than them
    can only other new some could time these two may then do first any my now such like our over man me even most made
    after also did many before must through back years where much your way well down should because each just those
    people how too little state good very make world still own see men work long get here between both life being under
    never day same another know while last might us great old year off come since against go came right used take three
""".split()  # noqa: SIM905 - a literal list would fill the screen


def prompt_of(tokens: int, seed: str) -> str:
    """Words that make about `tokens` tokens; another seed gives another text, so that no two share a prefix."""
    draw = random.Random(seed)
    return " ".join(draw.choices(_WORDS, k=max(1, tokens)))
