"""How far along their chains waiting prompts get."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.kv.frontier import Frontier

# A tree of names: each chain is a path from its root.
CHAINS = [
    [bytes([depth, *path[: depth + 1]]) for depth in range(4)] for path in ([0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1])
]


@given(st.lists(st.tuples(st.sampled_from(["follow", "leave", "rise", "fall"]), st.integers(0, 5), st.integers(0, 4))))
def test_who_follows_is_where_a_walk_would_get(steps: list[tuple[str, int, int]]) -> None:
    true: set[bytes] = set()
    frontier = Frontier(true.__contains__)
    following: dict[str, list[bytes]] = {}
    moved: set[str] = set()
    places: dict[str, int] = {}

    def walk(keys: list[bytes]) -> int:
        return next((n for n, key in enumerate(keys) if key not in true), len(keys))

    for action, which, size in steps:
        chain = CHAINS[which % len(CHAINS)]
        name = str(which)
        if action == "follow" and name not in following:
            following[name] = chain[:size]
            assert frontier.follow(name, following[name]) == walk(chain[:size])
        elif action == "leave" and name in following:
            frontier.leave(name)
            del following[name]
            moved.discard(name)
        elif action == "rise":
            for key in chain[:size]:
                if key not in true:
                    true.add(key)
                    frontier.rose(key)
        elif action == "fall":
            # With all that is behind it in any chain, the last ones first.
            gone = {
                key for other in CHAINS if chain[size - 1 : size] == other[size - 1 : size] for key in other[size - 1 :]
            }
            for key in sorted(gone & true, reverse=True):
                true.remove(key)
                frontier.fell(key)
        now = {each: walk(keys) for each, keys in following.items()}
        assert {each: frontier.reached(each) for each in following} == now
        told = frontier.take_moved()
        assert told <= following.keys()
        assert {each for each in now if each in places and places[each] != now[each]} <= told
        places = now
