from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.model.sampling import sample, uniform
from tidelane.engine.request import NewToken, Sampling

GREEDY = Sampling(seed=1, temperature=0.0)


def one(logits: list[float], sampling: Sampling, tokens: list[int] | None = None, output: list[int] = []) -> int:  # noqa: B006
    [drawn] = sample(torch.tensor([logits]), [sampling], [tokens or [0]], [Counter(output)])
    assert isinstance(drawn, NewToken)
    return drawn.token_id


def frequencies(logits: list[float], sampling: Sampling, draws: int = 4000) -> list[float]:
    rows = torch.tensor([logits] * draws)
    seeds = [replace(sampling, seed=seed) for seed in range(draws)]
    drawn = sample(rows, seeds, [[0]] * draws, [Counter()] * draws)
    counts = Counter(new.token_id for new in drawn if new is not None)
    return [counts[token] / draws for token in range(len(logits))]


def test_greedy_takes_the_likeliest() -> None:
    assert one([0.1, 3.0, 2.9], GREEDY) == 1


def test_draws_follow_the_distribution() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    seen = frequencies([math.log(p) for p in probabilities], Sampling(seed=0))
    assert seen == pytest.approx(probabilities, abs=0.03)


def test_temperature_sharpens() -> None:
    # Probabilities squared, normalised.
    seen = frequencies([math.log(0.75), math.log(0.25)], Sampling(seed=0, temperature=0.5))
    assert seen == pytest.approx([0.9, 0.1], abs=0.02)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.0001}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
        ({"top_k": 100}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_the_head(filters: dict[str, float], kept: set[int]) -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    seen = frequencies(logits, Sampling(seed=0, **filters), draws=500)  # type: ignore[arg-type]
    assert {token for token, share in enumerate(seen) if share} == kept


def test_a_seed_gives_one_sequence_whatever_the_batch() -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(5, 50, generator=generator)
    requests = [Sampling(seed=seed, top_p=0.9) for seed in range(5)]
    tokens = [[0] * (row + 1) for row in range(5)]
    together = sample(logits.clone(), requests, tokens, [Counter()] * 5)
    alone = [sample(logits[i : i + 1].clone(), [requests[i]], [tokens[i]], [Counter()])[0] for i in range(5)]
    assert together == alone


def test_bias_bans_and_forces() -> None:
    assert one([5.0, 1.0, 0.0], replace(GREEDY, logit_bias=((0, -100.0),))) == 1
    assert one([5.0, 1.0, 0.0], replace(GREEDY, logit_bias=((2, 100.0),))) == 2


def test_repetition_penalty_counts_the_prompt_and_works_on_both_signs() -> None:
    assert one([2.0, 1.5], replace(GREEDY, repetition_penalty=2.0), tokens=[0]) == 1
    assert one([-1.0, -1.5], replace(GREEDY, repetition_penalty=2.0), tokens=[0]) == 1


def test_presence_and_frequency_count_the_output_alone() -> None:
    assert one([2.0, 1.5], replace(GREEDY, presence_penalty=1.0), tokens=[0]) == 0
    assert one([2.0, 1.5], replace(GREEDY, presence_penalty=1.0), tokens=[0], output=[0]) == 1
    assert one([2.0, 1.5], replace(GREEDY, frequency_penalty=0.3), output=[0]) == 0
    assert one([2.0, 1.5], replace(GREEDY, frequency_penalty=0.3), output=[0, 0]) == 1


def test_logprobs_are_the_model_s_own_not_those_after_filters() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    [new] = sample(
        torch.tensor([logits]),
        [Sampling(seed=0, temperature=0.0, logprobs=2, logit_bias=((2, 100.0),))],
        [[0]],
        [Counter()],
    )
    assert new is not None
    assert new.token_id == 2
    assert new.logprob is not None
    assert math.exp(new.logprob.logprob) == pytest.approx(0.2, rel=1e-5)
    assert [token for token, _ in new.logprob.top] == [0, 1]


def test_rows_that_are_not_numbers_yield_no_token_and_spare_the_others() -> None:
    drawn = sample(torch.tensor([[math.nan, 1.0], [0.0, 1.0]]), [GREEDY, GREEDY], [[0], [0]], [Counter(), Counter()])
    assert drawn[0] is None
    assert drawn[1] == NewToken(1)


@given(st.integers(), st.integers(0, 1 << 20))
def test_uniform_is_in_range_and_repeats(seed: int, position: int) -> None:
    value = uniform(seed, position)
    assert 0.0 <= value < 1.0
    assert value == uniform(seed, position)


@pytest.mark.parametrize(
    "extreme",
    [
        {"top_p": 1e-300},
        {"temperature": 1e-300},
        {"temperature": 1e-40, "top_p": 0.9},
        {"temperature": 1e-40, "top_k": 5, "min_p": 0.1},
        {"repetition_penalty": 1e-40, "top_p": 0.5},
        {"repetition_penalty": 1e-40, "min_p": 0.1},
        {"repetition_penalty": 1e-300, "temperature": 0.0},
        {"logit_bias": ((1, 1e308),), "top_p": 0.5},
    ],
)
def test_extremes_round_to_greedy_and_never_to_nothing(extreme: dict[str, Any]) -> None:
    logits = [0.5, 3.0, -1.0] + [0.0] * 97
    assert one(logits, Sampling(seed=1, **extreme), tokens=[1]) == 1
