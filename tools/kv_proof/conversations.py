"""Conversations of our own, of different lengths, and the order in which their turns are asked."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

SENTENCES = (
    "The tide came in before noon and took the small boats with it.",
    "How long does the channel stay open for a ship of nine metres?",
    "Two pilots waited at the lock, and neither wanted to go first.",
    "Please list what the harbour master wrote down on Tuesday.",
    "In winter the ferry leaves at 6:40, in summer half an hour earlier.",
    "Nobody had told the crew that the northern light was out of order.",
    "Compare the spring tide with the neap tide, in one line each.",
    "My grandfather kept a table of the currents, by hand, for forty years.",
    "What would you pack for three days on the mud flats?",
    "The crane lifted 28 tonnes, which is two more than its plate allows.",
    "Tell it again, but as if you were the buoy.",
    "Wind from the west, four to five, rising to seven towards the evening.",
    "If the bridge opens at low water, who pays for the detour?",
    "She counted the bollards twice and got 61 both times.",
    "Write down the names of the sands from the mouth to the town.",
    "There is an old rule: red to port when you come home.",
    "Why do the gulls leave an hour before the storm?",
    "The dredger worked all night, and the map was wrong by morning.",
)
_TURNS = (2, 5)
_SENTENCES_A_TURN = (1, 6)
_ANSWER_TOKENS = (6, 20)


class Encoder(Protocol):
    """A tokenizer."""

    def encode(self, text: str, max_tokens: int) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """What is said, and how many tokens are to be answered."""

    said: tuple[int, ...]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    name: str
    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> int:
        """At its end."""
        return sum(len(turn.said) + turn.answer_tokens for turn in self.turns)


def conversations(count: int, encoder: Encoder, seed: int) -> tuple[Conversation, ...]:
    chance = random.Random(seed)
    return tuple(Conversation(f"c{number:02}", _turns(number, encoder, chance)) for number in range(count))


def _turns(number: int, encoder: Encoder, chance: random.Random) -> tuple[Turn, ...]:
    turns = []
    for at in range(chance.randint(*_TURNS)):
        said = " ".join(chance.choices(SENTENCES, k=chance.randint(*_SENTENCES_A_TURN)))
        # The number in front, so that no two conversations begin alike: all that is found is their own.
        text = f"{number} {said}\n" if at == 0 else f"\n{said}\n"
        turns.append(Turn(encoder.encode(text, len(text)), chance.randint(*_ANSWER_TOKENS)))
    return tuple(turns)


def rounds(talks: Sequence[Conversation], at_once: int, seed: int) -> Iterator[tuple[tuple[Conversation, int], ...]]:
    """All turns, as (conversation, turn): in each round up to `at_once` conversations, drawn anew, their next turn."""
    chance = random.Random(seed)
    done = dict.fromkeys(talks, 0)
    while left := [talk for talk in talks if done[talk] < len(talk.turns)]:
        drawn = chance.sample(left, min(at_once, len(left)))
        yield tuple((talk, done[talk]) for talk in drawn)
        for talk in drawn:
            done[talk] += 1
