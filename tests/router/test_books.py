"""Prefixes, pace, ejection and a backend's books, in virtual time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.load import Load, Outlook
from tidelane.engine.request import ServiceTier
from tidelane.engine.slo import Slo
from tidelane.router.address import Address
from tidelane.router.ask import Ask, ask_of
from tidelane.router.backend import STALE_S, Backend
from tidelane.router.choice import Fitness
from tidelane.router.ejection import FAILURES_TO_EJECT, HEALTHY, LONGEST_EJECTION_S
from tidelane.router.pace import HALF_LIFE_S, Pace
from tidelane.router.prefixes import CHARS_PER_TOKEN, PIECE_TOKENS, Kept, names_of_text, names_of_tokens

PIECE = PIECE_TOKENS * CHARS_PER_TOKEN
SYSTEM = "You are a helpful assistant. " * 40


def chat(*texts: str, **fields: object) -> dict[str, object]:
    roles = ("system", "user", "assistant")
    return {"model": "chat", "messages": [{"role": roles[n % 3], "content": t} for n, t in enumerate(texts)]} | fields


def asked(fields: dict[str, object], headers: dict[str, str] | None = None) -> Ask:
    return ask_of(fields, headers or {}, b"id")


def load(**fields: object) -> Load:
    usual: dict[str, object] = {
        "model": "chat", "started_s": 1, "ready": True, "draining": False, "slo": Slo(1.0, 0.1), "kv_tokens": 4096,
        "kv_free_tokens": 4096, "kv_kept_tokens": 4096,
        "outlook": Outlook(
            {"priority": 10, "default": 100, "flex": 1000}, {"default": 2, "flex": 3}, 200.0, 0.05, 0.01
        ),
    }  # fmt: skip
    return Load(**(usual | fields))  # type: ignore[arg-type]


# ---- what a request says -------------------------------------------------------------------------------------------


def test_a_conversations_next_turn_begins_with_the_names_of_the_last() -> None:
    first, second = asked(chat(SYSTEM, "One?")), asked(chat(SYSTEM, "One?", "Two.", "And then? " * 50))
    assert len(first.names) == (len(SYSTEM) + len("system\0\0user\0One?\0")) // PIECE
    assert second.names[: len(first.names)] == first.names
    assert len(second.names) > len(first.names)
    assert first.home == second.home == first.names[0]


@pytest.mark.parametrize("other", [{"cache_salt": "mine"}, {"model": "other"}])
def test_neither_models_nor_salts_share_names(other: dict[str, object]) -> None:
    assert not set(asked(chat(SYSTEM)).names) & set(asked(chat(SYSTEM, **other)).names)


def test_a_change_in_one_piece_changes_all_after_it() -> None:
    text = bytes(range(256)) * 4
    changed = text[:PIECE] + b"!" + text[PIECE + 1 :]
    one, other = names_of_text(text, b""), names_of_text(changed, b"")
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])


def test_token_ids_have_names_and_are_counted_as_they_are() -> None:
    ask = asked({"model": "chat", "prompt": list(range(200))})
    assert ask.prompt_tokens == 200
    assert ask.names == names_of_tokens(list(range(200)), b"chat\0\0")
    assert len(ask.names) == 3


def test_several_prompts_count_together() -> None:
    assert asked({"prompt": ["a" * 400, "b" * 40, "c"]}).prompt_tokens == 100 + 10 + 1
    assert asked({"prompt": [[1, 2, 3], [4]]}).prompt_tokens == 4


def test_targets_and_class_are_taken_where_they_make_sense() -> None:
    ask = asked({"service_tier": "flex"}, {"x-slo-ttft-ms": "300", "x-slo-tpot-ms": "50"})
    assert (ask.tier, ask.ttft_s, ask.tpot_s) == (ServiceTier.FLEX, 0.3, 0.05)
    ask = asked({"service_tier": "auto"}, {"x-slo-ttft-ms": "soon", "x-slo-tpot-ms": "-1"})
    assert (ask.tier, ask.ttft_s, ask.tpot_s) == (ServiceTier.DEFAULT, None, None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, JSON, JSON, JSON)
def test_whatever_a_body_holds_it_is_read(messages: object, prompt: object, salt: object, tier: object) -> None:
    fields = {"messages": messages, "prompt": prompt, "cache_salt": salt, "service_tier": tier}
    assert asked({key: value for key, value in fields.items() if value is not None}).prompt_tokens >= 1


# ---- beginnings ----------------------------------------------------------------------------------------------------


def test_the_ends_of_what_was_used_longest_ago_go_first() -> None:
    kept = Kept(most=5)
    old, new = (names_of_text(bytes([each]) * PIECE * 3, b"") for each in (1, 2))
    kept.sent(old)
    kept.sent(new)
    assert (kept.pieces(new), kept.pieces(old)) == (3, 2)


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 8))
def test_never_more_is_held_than_there_is_room_for(sent: list[int], most: int) -> None:
    kept = Kept(most)
    for each in sent:
        kept.sent(names_of_text(bytes([each % 4]) * PIECE * (each % 7), b""))
        assert len(kept) <= most


# ---- pace and ejection ---------------------------------------------------------------------------------------------


def test_a_pace_follows_what_is_measured_and_is_forgotten() -> None:
    pace = Pace()
    for _ in range(30):
        pace = pace.measured(predicted_s=0.1, ttft_s=0.2, now_s=0.0)
    assert pace.factor(0.0) == pytest.approx(2.0, rel=0.01)
    assert pace.factor(HALF_LIFE_S) == pytest.approx(math.sqrt(2.0), rel=0.01)
    assert pace.factor(20 * HALF_LIFE_S) == pytest.approx(1.0, rel=0.01)


def test_one_stall_moves_a_pace_by_no_more_than_a_third() -> None:
    assert Pace().measured(predicted_s=0.01, ttft_s=1000.0, now_s=0.0).factor(0.0) == pytest.approx(4.0**0.2)


def test_failures_in_a_row_eject_for_longer_each_time_until_one_succeeds() -> None:
    record, now_s, ejected_for_s = HEALTHY, 0.0, []
    for _ in range(FAILURES_TO_EJECT - 1):
        record = record.failed(now_s)
    assert not record.ejected(now_s)
    for _ in range(7):
        record = record.failed(now_s)
        assert record.until_s is not None
        ejected_for_s.append(record.until_s - now_s)
        assert record.failed(now_s) == record, "what was on its way counts no more"
        now_s = record.until_s
        assert not record.ejected(now_s)
    assert ejected_for_s == [1, 2, 4, 8, 16, LONGEST_EJECTION_S, LONGEST_EJECTION_S]
    assert record.succeeded() == HEALTHY


def test_failures_that_are_not_in_a_row_eject_nobody() -> None:
    record = HEALTHY
    for _ in range(10):
        record = record.failed(0.0).failed(0.0).succeeded()
    assert record == HEALTHY


# ---- a backend's books ---------------------------------------------------------------------------------------------


@pytest.fixture
def backend() -> Backend:
    return Backend(Address("127.0.0.1", 8000))


def test_before_it_has_spoken_a_backend_is_in_doubt_and_serves_anything(backend: Backend) -> None:
    assert backend.fitness(0.0) is Fitness.DOUBTFUL
    assert backend.serves("anything")


def test_what_is_queued_counts_by_class_and_ebbs_until_the_next_news(backend: Backend) -> None:
    backend.heard(load(age_s=0.1), now_s=10.0)
    before = {tier: backend.view(Ask("chat", tier, 50), now_s=9.9).tokens_before for tier in ServiceTier}
    assert before == {ServiceTier.PRIORITY: 10, ServiceTier.DEFAULT: 110, ServiceTier.FLEX: 1110}
    later = backend.view(Ask("chat", ServiceTier.DEFAULT, 50), now_s=10.15)
    assert later.tokens_before == pytest.approx(110 - 0.25 * 200)
    assert backend.view(Ask("chat", ServiceTier.DEFAULT, 50), now_s=11.0).tokens_before == 0


def test_what_was_sent_since_it_spoke_counts_until_it_knows_of_it(backend: Backend) -> None:
    ask = Ask("chat", ServiceTier.DEFAULT, 500)
    backend.heard(load(), now_s=10.0)
    with backend.holding(ask, resident_tokens=128, now_s=10.0001):
        view = backend.view(ask, now_s=10.0)
        assert (view.tokens_before, view.kv_free_tokens) == (110 + 372, 4096 - 372)
        assert (view.requests, view.interactive) == (6, 3)
        assert view.step_s == pytest.approx(0.06)
        assert backend.view(Ask("chat", ServiceTier.PRIORITY, 1), now_s=10.0).tokens_before == 10
        backend.heard(load(), now_s=10.2)
        assert backend.view(ask, now_s=10.2).tokens_before == 110
        assert backend.in_flight == 1
    assert backend.in_flight == 0


def test_what_was_sent_there_is_expected_there_until_it_starts_anew(backend: Backend) -> None:
    ask = asked(chat(SYSTEM))
    backend.heard(load(), now_s=0.0)
    with backend.holding(ask, 0, now_s=0.0):
        pass
    assert backend.view(ask, 0.0).resident_tokens == len(ask.names) * PIECE_TOKENS
    backend.heard(load(started_s=2), now_s=1.0)
    assert backend.view(ask, 1.0).resident_tokens == 0


def test_no_more_is_expected_there_than_it_can_keep(backend: Backend) -> None:
    ask = asked(chat(SYSTEM))
    backend.heard(load(kv_kept_tokens=2 * PIECE_TOKENS), now_s=0.0)
    with backend.holding(ask, 0, now_s=0.0):
        pass
    assert backend.view(ask, 0.0).resident_tokens == 2 * PIECE_TOKENS


def test_its_fitness_follows_what_it_says_and_how_requests_fare(backend: Backend) -> None:
    backend.heard(load(), now_s=10.0)
    assert backend.fitness(10.0 + STALE_S) is Fitness.HEALTHY
    assert backend.fitness(10.1 + STALE_S) is Fitness.DOUBTFUL
    backend.closed()
    assert backend.fitness(10.0) is Fitness.CLOSED
    backend.heard(load(), now_s=11.0)
    for _ in range(FAILURES_TO_EJECT):
        backend.failed(11.0)
    assert backend.fitness(11.5) is Fitness.DOUBTFUL
    assert backend.ejections == 1
    assert backend.fitness(12.0) is Fitness.HEALTHY
    backend.gone()
    assert backend.fitness(12.0) is Fitness.DOUBTFUL


# ---- addresses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "name"),
    [("http://10.0.0.1:8000", "10.0.0.1:8000"), ("host:81/v1/", "host:81"), ("http://[::1]:9", "[::1]:9"),
        ("http://host", "host:80")],
)  # fmt: skip
def test_an_address_is_read_from_a_url(url: str, name: str) -> None:
    assert Address.of_url(url).name == name


@pytest.mark.parametrize("url", ["https://host:1", "http://", "http://host:x", "http://host/a", "http://host:99999"])
def test_a_url_that_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        Address.of_url(url)


@pytest.mark.parametrize("text", ["host", "host:", ":80", "host:0", "host:65536", "host:http"])
def test_a_name_without_its_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        Address.of_host_port(text)
