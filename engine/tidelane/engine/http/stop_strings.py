"""Stop strings: cutting a text at the first of them, and holding back only what may yet become one.

Of several matches the one that is complete first wins, the longest if several end at one character. So the cut
depends on the text alone, never on how it was split into tokens.
"""

from __future__ import annotations


class StopStrings:
    """`feed` text as it comes; it returns what may be shown now. After a hit it returns nothing more.

    Each stop string is matched by Knuth, Morris and Pratt's automaton, whose state is how much of the string the end
    of the text matches: the largest state is the shortest text that must be held back.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = stops
        self._fallback = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        if not self._stops or self.hit is not None:
            return text if self.hit is None else ""
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            hit = self._advance(buffer[position])
            if hit is not None:
                self.hit, self._held = hit, ""
                return buffer[: position + 1 - len(hit)]
        shown = len(buffer) - max(self._matched)
        self._held = buffer[shown:]
        return buffer[:shown]

    def finish(self) -> str:
        """What was held back, now that the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Takes one character; the longest stop string that it completes."""
        hit = ""
        for number, stop in enumerate(self._stops):
            matched = self._matched[number]
            while matched and stop[matched] != character:
                matched = self._fallback[number][matched - 1]
            if stop[matched] == character:
                matched += 1
            self._matched[number] = matched
            if matched == len(stop) and matched > len(hit):
                hit = stop
        return hit or None


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    for end in range(1, len(stop)):
        length = borders[end - 1]
        while length and stop[length] != stop[end]:
            length = borders[length - 1]
        borders[end] = length + 1 if stop[length] == stop[end] else length
    return borders
