"""Arrivals: the same seed gives the same traffic, and its figures are those asked for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tidelane.engine.bench.prompts import Ruler, prompt_of
from tidelane.engine.bench.traffic import Arrival, Kind, Traffic, parse_kind, poisson

CHAT = Kind("chat", 5.0, (10, 40), (16, 32))
LONG = Kind("long", 0.5, (400, 700), (8, 8))


def test_one_seed_gives_one_traffic() -> None:
    assert poisson([CHAT, LONG], 60, seed=3) == poisson([CHAT, LONG], 60, seed=3)
    assert poisson([CHAT], 60, seed=3) != poisson([CHAT], 60, seed=4)


def test_a_kind_keeps_its_arrivals_beside_another() -> None:
    alone = poisson([CHAT], 60, seed=3)
    beside = poisson([CHAT, LONG], 60, seed=3)
    assert tuple(each for each in beside.arrivals if each.kind == "chat") == alone.arrivals
    assert [each.at_s for each in beside.arrivals] == sorted(each.at_s for each in beside.arrivals)


def test_rate_and_lengths_are_as_asked() -> None:
    arrivals = poisson([CHAT], 1000, seed=0).arrivals
    assert len(arrivals) == pytest.approx(5000, rel=0.05)
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)  # of an exponential distribution the two are one
    assert {each.input_tokens for each in arrivals} == set(range(10, 41))
    assert {each.output_tokens for each in arrivals} == set(range(16, 33))
    assert max(each.at_s for each in arrivals) < 1000


def test_traffic_can_be_densified_and_cut() -> None:
    traffic = Traffic((Arrival(0.0, 1, 1), Arrival(4.0, 2, 2), Arrival(8.0, 3, 3)), 10.0)
    assert traffic.faster(2) == Traffic((Arrival(0.0, 1, 1), Arrival(2.0, 2, 2), Arrival(4.0, 3, 3)), 5.0)
    assert traffic.first(8) == Traffic((Arrival(0.0, 1, 1), Arrival(4.0, 2, 2)), 8)
    assert traffic.first(11) is traffic


def test_a_kind_is_parsed() -> None:
    assert parse_kind("chat:rate=0.5,in=20-60,out=8") == Kind("chat", 0.5, (20, 60), (8, 8))
    assert parse_kind("batch:rate=2,in=9,out=8,tier=flex") == Kind("batch", 2.0, (9, 9), (8, 8), tier="flex")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chat", "expected NAME:rate=RPS"),
        ("chat:rate=1,in=20-10,out=8", "20-10 tokens; expected 1 <= low <= high"),
        ("chat:rate=0,in=20,out=8", "the rate must be above 0"),
        pytest.param(f"chat:rate={'9' * 400},in=20,out=8", "the rate must be above 0 and finite", id="endless rate"),
        ("chat:rate=1.2.3,in=20,out=8", "could not convert string to float"),
        ("chat:rate=1,in=0,out=8", "0-0 tokens"),
    ],
)
def test_a_wrong_kind_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_kind(text)


def test_prompts_have_their_length_and_share_no_prefix() -> None:
    first, second = prompt_of(50, "0:1"), prompt_of(50, "0:2")
    assert len(first.split()) == len(second.split()) == 50
    assert first == prompt_of(50, "0:1")
    assert first.split()[:4] != second.split()[:4]


def test_prompts_of_a_hashed_trace_begin_alike_as_far_as_their_hashes_are_the_same() -> None:
    ruler = Ruler(template_tokens=0.0, tokens_per_word=2.0)  # 256 words a block

    def words(tokens: int, hash_ids: tuple[int, ...], seed: str) -> list[str]:
        return ruler.prompt(Arrival(0.0, tokens, 1, hash_ids=hash_ids), seed).split()

    first, second = words(1400, (1, 2, 3), "0:1"), words(1400, (1, 2, 4), "0:2")
    assert len(first) == len(second) == 700
    assert first[:512] == second[:512]
    assert first[512:520] != second[512:520]
    assert words(1024, (1, 2), "0:3")[:256] == first[:256]
    # The last token at least is nobody else's.
    assert words(1024, (1, 2), "0:3")[256:264] != first[256:264]
