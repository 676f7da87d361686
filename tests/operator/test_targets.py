"""The merge: who wins, and that what wins makes sense together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.operator.policies import Policy, layers
from tidelane.operator.targets import BUILT_IN, NAMES, Layer, Targets, differences, merge
from tidelane.rpc.wire import ShareBounds

from .policy_objects import policy

DURATIONS = st.sampled_from(["10ms", "40ms", "50ms", "200ms", "1s"])
SHARES = st.integers(1, 99)


@st.composite
def targets(draw: st.DrawFn) -> dict[str, dict[str, str | int]]:
    """What one block of a policy or a spec may say under the schema's rules."""
    slo: dict[str, str | int] = {}
    for name in ("ttft", "ttftPer1kInputTokens", "tpot", "maxTokenGap"):
        if draw(st.booleans()):
            slo[name] = draw(DURATIONS)
    if draw(st.booleans()):
        slo["percentile"] = draw(st.sampled_from([50, 90, 95, 99]))
    shares = sorted(draw(st.lists(SHARES, max_size=2)))
    names = [("minDecodeShare", "maxDecodeShare"), ("maxDecodeShare",), ("minDecodeShare",)][draw(st.integers(0, 2))]
    said = {"slo": slo, "execution": dict(zip(names, shares, strict=False))}
    parsed = Targets.parse(said)
    if parsed.tpot_s is not None and parsed.max_token_gap_s is not None and parsed.max_token_gap_s < parsed.tpot_s:
        del slo["maxTokenGap"]
    return said  # type: ignore[return-value]


@st.composite
def sets_of_policies(draw: st.DrawFn) -> list[Policy]:
    return [
        policy(name, priority=draw(st.integers(-1, 1)), defaults=draw(targets()), overrides=draw(targets()))
        for name in draw(st.lists(st.sampled_from("abcd"), unique=True))
    ]


@given(sets_of_policies(), targets(), st.randoms(use_true_random=False))
def test_the_order_of_listing_does_not_matter(found: list[Policy], own: dict[str, object], random: object) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    mine = Targets.parse(own)
    assert merge(layers(mine, shuffled)) == merge(layers(mine, found))


@given(sets_of_policies(), targets())
def test_what_is_in_force_is_whole_and_makes_sense(found: list[Policy], own: dict[str, object]) -> None:
    effective = merge(layers(Targets.parse(own), found))
    of = effective.targets
    assert effective.slo.tpot_s == of.tpot_s
    assert effective.sources.keys() == of.shown().keys()
    assert of.max_token_gap_s is None or effective.slo.tpot_s <= of.max_token_gap_s
    bounds = effective.bounds
    assert (bounds is None) == (of.min_decode_share is None and of.max_decode_share is None)


@given(sets_of_policies(), targets())
def test_each_field_comes_from_where_it_is_said_to(found: list[Policy], own: dict[str, object]) -> None:
    """By a reading of the rule of its own: priority, then name, then overrides before the spec before defaults."""
    specs = {each.name: each.spec for each in found if not isinstance(each.spec, str)}
    effective = merge(layers(Targets.parse(own), found))
    said = {"spec": Targets.parse(own), BUILT_IN: Targets(1.0, 0.0, 0.1, 99)}
    for name, spec in specs.items():
        said[f"SLOPolicy {name} (overrides)"], said[f"SLOPolicy {name} (defaults)"] = spec.overrides, spec.defaults
    ranked = sorted(specs, key=lambda name: (-specs[name].priority, name))
    order = [f"SLOPolicy {name} (overrides)" for name in ranked] + ["spec"]
    order += [f"SLOPolicy {name} (defaults)" for name in ranked] + [BUILT_IN]
    for field in ("ttft_s", "ttft_per_1k_input_tokens_s", "percentile"):
        first = next(source for source in order if getattr(said[source], field) is not None)
        assert effective.sources[NAMES[field]] == first
        assert getattr(effective.targets, field) == getattr(said[first], field)
    # A field of a pair may have given way, to a source that is at least as strong as its own.
    for field in ("tpot_s", "max_token_gap_s", "min_decode_share", "max_decode_share"):
        first_or_none = next((source for source in order if getattr(said[source], field) is not None), None)
        source = effective.sources.get(NAMES[field])
        assert (source is None) == (first_or_none is None)
        if source is not None and first_or_none is not None:
            assert order.index(source) <= order.index(first_or_none)


def layered(*said: Targets) -> list[Layer]:
    return [Layer(str(at), each) for at, each in enumerate(said)]


def test_nothing_said_is_what_is_built_in() -> None:
    effective = merge([])
    assert effective.targets.shown() == {"ttft": "1s", "ttftPer1kInputTokens": "0s", "tpot": "100ms", "percentile": 99}
    assert set(effective.sources.values()) == {BUILT_IN}
    assert effective.bounds is None


@pytest.mark.parametrize(
    ("strong", "weak", "shown"),
    [
        # The gap gives way to a stronger tpot, and the other way round.
        (Targets(tpot_s=0.2), Targets(max_token_gap_s=0.1), {"tpot": "200ms", "maxTokenGap": "200ms"}),
        (Targets(max_token_gap_s=0.05), Targets(tpot_s=0.08), {"tpot": "50ms", "maxTokenGap": "50ms"}),
        (Targets(min_decode_share=70), Targets(max_decode_share=40), {"minDecodeShare": 70, "maxDecodeShare": 70}),
        (Targets(max_decode_share=40), Targets(min_decode_share=70), {"minDecodeShare": 40, "maxDecodeShare": 40}),
    ],
)
def test_of_two_that_contradict_each_other_the_weaker_gives_way(
    strong: Targets, weak: Targets, shown: dict[str, object]
) -> None:
    effective = merge(layered(strong, weak))
    assert {name: effective.targets.shown()[name] for name in shown} == shown
    assert {effective.sources[name] for name in shown} == {"0"}


def test_a_zero_allowance_is_something_said() -> None:
    effective = merge(layered(Targets(ttft_per_1k_input_tokens_s=0.0), Targets(ttft_per_1k_input_tokens_s=1.0)))
    assert effective.slo.ttft_per_1k_input_tokens_s == 0.0
    assert effective.sources["ttftPer1kInputTokens"] == "0"


def test_one_bound_leaves_the_other_open() -> None:
    assert merge(layered(Targets(min_decode_share=30))).bounds == ShareBounds(0.3, 1.0)
    assert merge(layered(Targets(max_decode_share=60))).bounds == ShareBounds(0.0, 0.6)


def test_differences_are_in_the_words_of_the_resources() -> None:
    before, after = Targets(tpot_s=0.05, percentile=99), Targets(tpot_s=0.04, percentile=99, max_decode_share=60)
    assert differences(before, after) == {"tpot": ("50ms", "40ms"), "maxDecodeShare": ("none", "60")}
    assert differences(after, after) == {}


def test_priority_then_name_for_every_order_of_three() -> None:
    three = [
        policy("b", priority=1, overrides={"slo": {"tpot": "20ms"}}, defaults={"slo": {"percentile": 50}}),
        policy("a", priority=1, overrides={"slo": {"tpot": "30ms"}}, defaults={"slo": {"percentile": 90}}),
        policy("c", priority=0, overrides={"slo": {"tpot": "40ms", "ttft": "300ms"}}),
    ]
    for order in itertools.permutations(three):
        effective = merge(layers(Targets(tpot_s=0.5, ttft_s=0.5), order))
        assert effective.targets == Targets(0.3, 0.0, 0.03, 90)
        assert effective.sources == {
            "ttft": "SLOPolicy c (overrides)",
            "ttftPer1kInputTokens": BUILT_IN,
            "tpot": "SLOPolicy a (overrides)",
            "percentile": "SLOPolicy a (defaults)",
        }
