"""What the router's bench sends."""

from __future__ import annotations

import argparse
from itertools import takewhile

import pytest
from tools.router_bench import DOCUMENT, Grouped, kinds

from tidelane.engine.bench.traffic import Arrival


def test_the_first_groups_have_the_most_chats_and_all_together_as_many_as_asked_for() -> None:
    *chats, documents = kinds(argparse.Namespace(chats=1.2, documents=0.1, groups=8))
    assert sum(each.rate_rps for each in chats) == pytest.approx(1.2)
    assert [chats[0].rate_rps / each.rate_rps for each in chats] == pytest.approx(range(1, 9))
    assert (documents.name, documents.rate_rps) == (DOCUMENT, 0.1)


def common_words(one: str, other: str) -> int:
    pairs = zip(one.split(), other.split(), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_prompts_of_a_group_begin_alike_in_one_run_and_documents_with_nothing() -> None:
    grouped = Grouped(10.0, 1.0, shared_tokens=60, salt="a run")
    chat, other = Arrival(0.0, 30, 8, "group1"), Arrival(0.0, 30, 8, "group2")
    document = Arrival(0.0, 90, 8, DOCUMENT)
    shared = common_words(grouped.prompt(chat, "0"), grouped.prompt(chat, "1"))
    assert 50 <= shared < 70
    assert len(grouped.prompt(chat, "0").split()) == 50 + 20
    assert common_words(grouped.prompt(chat, "0"), grouped.prompt(other, "0")) < 5
    assert common_words(grouped.prompt(document, "0"), grouped.prompt(document, "1")) < 5
    anew = Grouped(10.0, 1.0, shared_tokens=60, salt="another run")
    assert common_words(grouped.prompt(chat, "0"), anew.prompt(chat, "0")) < 5
