"""Which services a policy matches, what they get, and what it says of them."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.slo import percentile
from tidelane.operator.policies import LabelSelector, Policy
from tidelane.operator.policy_status import policy_status
from tidelane.operator.prediction import Outlook, predict
from tidelane.operator.quantities import format_duration
from tidelane.operator.resources import ObjectRef
from tidelane.operator.targets import Targets

from .policy_objects import policies, policy, policy_object, service, tpot

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)


def expression(operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": "tier", "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("raw", "matched"),
    [
        ({}, ["gold", "silver", ""]),
        ({"matchLabels": {"tier": "gold"}}, ["gold"]),
        ({"matchLabels": {"tier": "gold", "team": "a"}}, []),
        (expression("In", "gold", "silver"), ["gold", "silver"]),
        # As in Kubernetes, a label that is not there is not in any list.
        (expression("NotIn", "gold"), ["silver", ""]),
        (expression("Exists"), ["gold", "silver"]),
        (expression("DoesNotExist"), [""]),
        ({"matchLabels": {"tier": "gold"}, **expression("NotIn", "gold")}, []),
    ],
)
def test_selectors(raw: dict[str, Any], matched: list[str]) -> None:
    selector = LabelSelector.parse(raw)
    tiers = ["gold", "silver", ""]
    assert [tier for tier in tiers if selector.matches({"tier": tier} if tier else {})] == matched


def test_namespaces_are_selected_by_their_labels() -> None:
    selector = {"namespaceSelector": {"matchLabels": {"env": "prod"}}}
    found = policies(policy(selector=selector, overrides=tpot("20ms")), prod={"env": "prod"}, test={"env": "test"})
    got = {name: found.effective(service(namespace=name)).slo.tpot_s for name in ("prod", "test", "unheard-of")}
    assert got == {"prod": 0.02, "test": 0.05, "unheard-of": 0.05}


def test_the_name_of_a_namespace_is_known_without_reading_it() -> None:
    by_name = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "unheard-of"}}}
    found = policies(policy(selector=by_name, overrides=tpot("20ms")))
    assert found.effective(service(namespace="unheard-of")).slo.tpot_s == 0.02


def test_only_what_is_enforced_and_matches_holds() -> None:
    gold = {"matchLabels": {"tier": "gold"}}
    found = policies(
        policy("tried", mode="DryRun", overrides=tpot("10ms")),
        policy("other", selector=gold, overrides=tpot("20ms")),
        policy("broken", mode="Never", overrides=tpot("30ms")),
        policy("held", defaults={"slo": {"maxTokenGap": "70ms"}}),
    )
    applied = found.applied(service()).spec
    assert not isinstance(applied, str)
    assert (applied.slo.tpot_s, applied.slo.max_token_gap_s) == (0.05, 0.07)
    assert applied.objective.slo == applied.slo
    assert found.effective(service(labels={"tier": "gold"})).slo.tpot_s == 0.02


def test_a_policy_that_is_being_deleted_no_longer_holds() -> None:
    raw = policy_object(overrides=tpot("10ms"))
    raw["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    assert policies(Policy.parse(raw)).effective(service()).slo.tpot_s == 0.05


def test_without_policies_a_service_gets_what_it_states() -> None:
    stated = service(slo={"ttft": "2s", "tpot": "70ms"}, execution={"minDecodeShare": 20})
    assert policies().applied(stated) == stated
    bare = service(slo=None)
    assert not isinstance(bare.spec, str)
    assert (bare.spec.slo.ttft_s, bare.spec.slo.tpot_s, bare.spec.slo.percentile) == (1.0, 0.1, 99)


def test_bounds_without_a_border_are_told_as_ignored() -> None:
    found = policies(policy(overrides={"execution": {"minDecodeShare": 40}}))
    ignored = []
    for mode in ("Lanes", "MixedBatch"):
        spec = found.applied(service(execution={"mode": mode})).spec
        assert not isinstance(spec, str)
        ignored.append(spec.ignored)
    assert ignored == [(), ("minDecodeShare of SLOPolicy gold (overrides) (MixedBatch has no border to move)",)]


MEASURED = {
    "effectiveSLO": {"ttft": "200ms", "tpot": "50ms", "percentile": 90, "source": "spec"},
    "ttft": "150ms",
    "tpot": "40ms",
    "attainment": 93,
}


def wanted(ttft_s: float = 0.2, tpot_s: float = 0.05, percentile: int = 90, **more: Any) -> Targets:
    return Targets(ttft_s=ttft_s, tpot_s=tpot_s, percentile=percentile, **{"ttft_per_1k_input_tokens_s": 0.0, **more})


@pytest.mark.parametrize(
    ("targets", "outlook", "at_least", "at_most"),
    [
        # The same targets, looser ones, and tighter ones that the percentiles still keep.
        (wanted(), "WouldMeet", 93, 93),
        (wanted(ttft_s=0.3), "WouldMeet", 93, 100),
        (wanted(tpot_s=0.045), "WouldMeet", 80, 93),
        # Above at its own percentile: fewer than 90 % are within.
        (wanted(tpot_s=0.039), "WouldBreach", 0, 89),
        (wanted(ttft_s=0.149), "WouldBreach", 0, 89),
        # ... which may still be half of them.
        (wanted(tpot_s=0.039, percentile=50), "Unknown", 0, 89),
        # More are asked for than the percentile tells of.
        (wanted(percentile=99), "WouldBreach", 93, 93),
        (wanted(ttft_s=0.3, tpot_s=0.06, percentile=99), "Unknown", 93, 100),
        (wanted(ttft_s=0.3, tpot_s=0.045, percentile=99), "Unknown", 80, 100),
        # One looser, one too tight.
        (wanted(ttft_s=1.0, tpot_s=0.01), "WouldBreach", 0, 89),
        # With an allowance by length a prompt's target may be longer than what was measured.
        (wanted(ttft_s=0.1, ttft_per_1k_input_tokens_s=1.0), "Unknown", 0, 100),
        (wanted(ttft_s=0.2, ttft_per_1k_input_tokens_s=1.0), "WouldMeet", 93, 100),
        # Gaps are not in the status.
        (wanted(max_token_gap_s=0.1), "Unknown", 0, 93),
    ],
)
def test_predictions(targets: Targets, outlook: str, at_least: int, at_most: int) -> None:
    found = predict(MEASURED, targets)  # type: ignore[arg-type]
    assert (found.outlook, found.at_least, found.at_most) == (outlook, at_least, at_most)
    assert "measured at p90: TTFT 150ms" in found.message


@pytest.mark.parametrize(
    ("targets", "outlook", "at_least", "at_most"),
    [
        # Not even half of them.
        (wanted(tpot_s=0.019), "WouldBreach", 0, 49),
        (wanted(tpot_s=0.019, percentile=50), "WouldBreach", 0, 49),
        # More than half of them, but not as many as 90 %.
        (wanted(tpot_s=0.03, percentile=50), "WouldMeet", 40, 89),
        (wanted(ttft_s=0.1, tpot_s=0.03, percentile=50), "WouldMeet", 0, 89),
    ],
)
def test_the_median_tells_of_lower_shares(targets: Targets, outlook: str, at_least: int, at_most: int) -> None:
    found = predict({**MEASURED, "ttftMedian": "90ms", "tpotMedian": "20ms"}, targets)  # type: ignore[typeddict-item]
    assert (found.outlook, found.at_least, found.at_most) == (outlook, at_least, at_most)


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=1, max_size=60),
    st.sampled_from([50, 90, 95, 99]),
    st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
    st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
)
def test_what_is_predicted_bounds_what_the_same_requests_come_to(
    requests: list[tuple[float, float]], percent: int, under: tuple[float, float], targets: tuple[float, float]
) -> None:
    """Of figures that are not rounded, to the millisecond."""
    made = [(round(ttft_s, 3), round(tpot_s, 3)) for ttft_s, tpot_s in requests]
    (old_ttft_s, old_tpot_s), (ttft_s, tpot_s) = [(round(a, 3), round(b, 3)) for a, b in (under, targets)]

    def share(ttft_s: float, tpot_s: float) -> int:
        return 100 * sum(a <= ttft_s and b <= tpot_s for a, b in made) // len(made)

    def at(percent: int, kind: int) -> str:
        return format_duration(percentile([each[kind] for each in made], percent))

    shown = {"ttft": format_duration(old_ttft_s), "tpot": format_duration(old_tpot_s), "percentile": percent}
    status = {
        "effectiveSLO": shown,
        "ttft": at(percent, 0),
        "tpot": at(percent, 1),
        "ttftMedian": at(50, 0),
        "tpotMedian": at(50, 1),
        "attainment": share(old_ttft_s, old_tpot_s),
    }
    found = predict(status, wanted(ttft_s, tpot_s, percent))  # type: ignore[arg-type]
    assert found.at_least <= share(ttft_s, tpot_s) <= found.at_most
    if found.outlook is Outlook.BREACH:
        assert share(ttft_s, tpot_s) < percent


@pytest.mark.parametrize("missing", ["ttft", "tpot", "attainment", "effectiveSLO"])
def test_nothing_measured_is_nothing_known(missing: str) -> None:
    status = {name: value for name, value in MEASURED.items() if name != missing}
    found = predict(status, wanted())  # type: ignore[arg-type]
    assert (found.outlook, found.at_least, found.at_most) == (Outlook.UNKNOWN, 0, 100)


def test_a_dry_run_says_what_would_be_and_for_whom() -> None:
    tried = policy("tried", mode="DryRun", overrides=tpot("30ms"), defaults={"slo": {"percentile": 50}})
    held = policy("held", overrides={"slo": {"ttft": "300ms"}})
    found = policies(held, tried)
    services = [service("quiet"), service("busy", status=MEASURED)]
    status = policy_status(tried, found, services, NOW)
    assert (status["matched"], status["changed"], status["wouldBreach"], status["unknown"]) == (2, 2, 1, 1)
    busy, quiet = status["services"]
    assert busy == {
        "namespace": "default",
        "name": "busy",
        "effective": {"ttft": "300ms", "ttftPer1kInputTokens": "0s", "tpot": "30ms", "percentile": 90},
        "changes": [{"field": "tpot", "from": "50ms", "to": "30ms"}],
        "verdict": "WouldBreach",
        "attainmentAtLeast": 0,
        "attainmentAtMost": 89,
        "basis": "Bounds",
        "message": "measured at p90: TTFT 150ms (300ms wanted), TPOT 40ms (30ms wanted); "
        "93 % within the targets in force",
    }
    assert (quiet["name"], quiet["verdict"]) == ("quiet", "Unknown")
    told = {each["type"]: (each["status"], each["reason"], each["message"]) for each in status["conditions"]}
    assert told == {
        "Ready": ("True", "DryRun", ""),
        "Attainable": ("False", "WouldBreach", "1 of 2: default/busy"),
    }


def test_an_enforced_policy_tells_what_it_makes_of_services() -> None:
    held = policy("held", overrides=tpot("45ms"))
    status = policy_status(held, policies(held), [service("busy", status=MEASURED)], NOW)
    [busy] = status["services"]
    assert busy["changes"] == [{"field": "tpot", "from": "50ms", "to": "45ms"}]
    assert [each["reason"] for each in status["conditions"]] == ["WouldMeet", "Enforced"]


def test_a_policy_status_is_written_only_when_it_says_something_new() -> None:
    tried = policy("tried", mode="DryRun", overrides=tpot("30ms"))
    services = [service("quiet")]
    first = policy_status(tried, policies(tried), services, NOW)
    again = policy("tried", status=first, mode="DryRun", overrides=tpot("30ms"))
    assert policy_status(again, policies(again), services, LATER) == first
    changed = policy_status(again, policies(again), [service("busy", status=MEASURED)], LATER)
    since = {each["type"]: each["lastTransitionTime"] for each in changed["conditions"]}
    assert since == {"Ready": "2030-01-01T00:00:00Z", "Attainable": "2030-01-01T01:00:00Z"}


def test_a_policy_status_is_bounded_and_names_breaches_first() -> None:
    tried = policy("tried", mode="DryRun", overrides=tpot("30ms"))
    services = [service(f"quiet-{at:03}") for at in range(99)] + [service("zz", status=MEASURED)]
    status = policy_status(tried, policies(tried), services, NOW)
    assert (status["matched"], status["unknown"], len(status["services"])) == (100, 99, 64)
    assert status["services"][0]["name"] == "zz"
    [attainable] = [each for each in status["conditions"] if each["type"] == "Attainable"]
    assert attainable["message"] == "1 of 100: default/zz"


def test_a_policy_that_cannot_be_understood_says_so_and_does_nothing() -> None:
    broken = policy("broken", mode="Never", overrides=tpot("30ms"))
    status = policy_status(broken, policies(broken), [service()], NOW)
    assert {(each["type"], each["status"], each["reason"]) for each in status["conditions"]} == {
        ("Ready", "False", "InvalidSpec"),
        ("Stalled", "True", "InvalidSpec"),
    }
    assert "matched" not in status


def test_a_policy_for_nobody() -> None:
    lonely = policy(selector={"matchLabels": {"tier": "gold"}}, overrides=tpot("30ms"))
    status = policy_status(lonely, policies(lonely), [service()], NOW)
    assert (status["matched"], status["services"]) == (0, [])
    assert [(each["status"], each["reason"]) for each in status["conditions"]] == [
        ("Unknown", "NothingMatched"),
        ("True", "Enforced"),
    ]


def test_a_policy_may_have_the_name_of_a_service() -> None:
    assert ObjectRef.of(policy_object("chat")) == ObjectRef("", "chat")
    assert str(ObjectRef.of(policy_object("chat"))) == "chat"
    assert copy.deepcopy(policy("chat")) == policy("chat")
