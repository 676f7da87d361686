from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from engine.http.test_stop_strings import cut
from engine.http.tiny_model import id_of, make_tokenizer
from tidelane.engine.channel import Tokens
from tidelane.engine.http.choice import Choice, Delta, Echo
from tidelane.engine.http.pieces import Pieces
from tidelane.engine.request import FinishReason, NewToken, Request, Sampling, TokenLogprob

TOKENIZER = make_tokenizer()
PIECES = Pieces(TOKENIZER, json.loads(TOKENIZER.to_str())["decoder"])
END = id_of(TOKENIZER, "<|im_end|>")


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def bytes_of(text: str) -> list[int]:
    """One token for each byte: the finest split there is."""
    return [_BYTES[byte] for byte in text.encode()]


_BYTES = {PIECES.label(token)[0]: token for token in range(3, 259)}


def choice_of(*stops: str, prompt: str = "p", echo: Echo | None = None) -> Choice:
    request = Request("r", tuple(ids_of(prompt)), 100, Sampling(seed=1), arrival_s=0.0, stop_token_ids=(END,))
    return Choice(0, request, PIECES, stops, echo)


def message(ids: list[int], finish: FinishReason | None = None, *, logprobs: bool = False) -> Tokens:
    new = tuple(NewToken(token, TokenLogprob(token, -1.0, ((token, -1.0),)) if logprobs else None) for token in ids)
    return Tokens("r", new, 1.0, finish=finish)


def taken(choice: Choice) -> Delta:
    delta = choice.take()
    assert delta is not None
    return delta


@given(
    ids=st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1).filter(lambda token: token != END), max_size=25),
    stops=st.lists(st.text("abe \ufffd", min_size=1, max_size=3), max_size=3).map(tuple),
    data=st.data(),
)
def test_deltas_join_to_the_full_decode_cut_at_the_first_stop(
    ids: list[int], stops: tuple[str, ...], data: st.DataObject
) -> None:
    expected = cut(TOKENIZER.decode(ids, skip_special_tokens=True), stops)
    choice = choice_of(*stops)
    text, rest, finishes = "", ids, 0
    while choice.finish is None:
        size = data.draw(st.integers(min(1, len(rest)), len(rest)))
        choice.add(message(rest[:size], FinishReason.LENGTH if size == len(rest) else None))
        rest = rest[size:]
        if data.draw(st.booleans()) or choice.finish is not None:
            delta = choice.take()
            text += delta.text if delta else ""
            finishes += delta is not None and delta.finish is not None
            assert expected.startswith(text)
    assert text == expected
    assert finishes == 1
    assert choice.take() is None


def test_a_stop_string_over_several_tokens_is_never_shown() -> None:
    choice = choice_of("DEFGHIJ")
    for token in bytes_of("ABCDEFGHI"):
        choice.add(message([token]))
    assert taken(choice).text == "ABC"
    choice.add(message(bytes_of("J")))
    assert taken(choice) == Delta(0, "", (), FinishReason.STOP)


def test_a_false_start_of_a_stop_string_is_shown_once_it_is_one() -> None:
    choice = choice_of("END")
    choice.add(message(bytes_of("EN")))
    assert choice.take() is None
    choice.add(message(bytes_of("J")))
    assert taken(choice).text == "ENJ"


def test_a_stop_string_inside_a_token_cuts_the_token() -> None:
    token = next(i for i in range(259, TOKENIZER.get_vocab_size()) if len(PIECES.label(i)) >= 4)
    text = PIECES.label(token).decode()
    choice = choice_of(text[1:3])
    choice.add(message([token]))
    assert taken(choice) == Delta(0, text[:1], (), FinishReason.STOP)


def test_what_is_held_back_is_shown_when_the_output_ends() -> None:
    choice = choice_of("END")
    choice.add(message(bytes_of("the EN"), FinishReason.LENGTH))
    assert taken(choice) == Delta(0, "the EN", (), FinishReason.LENGTH)


def test_a_stop_token_counts_but_shows_nothing() -> None:
    visible = ids_of("x")[0]
    request = Request("r", (5,), 100, Sampling(seed=1), arrival_s=0.0, stop_token_ids=(visible,))
    choice = Choice(0, request, PIECES, ())
    choice.add(message([*bytes_of("ab"), visible], FinishReason.STOP, logprobs=True))
    delta = taken(choice)
    assert (delta.text, delta.finish) == ("ab", FinishReason.STOP)
    assert len(delta.tokens) == 2
    assert choice.completion_tokens == 3


def test_tokens_after_a_stop_string_do_not_count() -> None:
    choice = choice_of("b")
    choice.add(message(bytes_of("abcd"), FinishReason.LENGTH))
    assert taken(choice) == Delta(0, "a", (), FinishReason.STOP)
    assert choice.completion_tokens == 2


def test_logprobs_come_with_the_text_of_their_token() -> None:
    choice = choice_of("XY")
    choice.add(message(bytes_of("a🙂"[:1]), logprobs=True))
    assert [token.piece for token in taken(choice).tokens] == [b"a"]
    smile = bytes_of("🙂")
    choice.add(message(smile[:2], logprobs=True))
    assert choice.take() is None
    choice.add(message(smile[2:] + bytes_of("X"), logprobs=True))
    delta = taken(choice)
    assert delta.text == "🙂"
    assert [token.offset for token in delta.tokens] == [1, 1, 1, 1]
    choice.add(message(bytes_of("Z"), FinishReason.LENGTH, logprobs=True))
    delta = taken(choice)
    assert delta.text == "XZ"
    assert [(token.piece, token.offset) for token in delta.tokens] == [(b"X", 2), (b"Z", 3)]


def test_logprobs_of_tokens_that_were_cut_are_not_reported() -> None:
    choice = choice_of("XY")
    choice.add(message(bytes_of("aXY"), logprobs=True))
    delta = taken(choice)
    assert delta.text == "a"
    assert [token.piece for token in delta.tokens] == [b"a"]


def test_echo_shows_the_clients_own_text_before_the_output() -> None:
    choice = choice_of(prompt="Once upon", echo=Echo("Once upon"))
    choice.add(message(bytes_of("!"), FinishReason.LENGTH, logprobs=True))
    delta = taken(choice)
    assert delta.text == "Once upon!"
    assert [token.offset for token in delta.tokens] == [len("Once upon")]


def test_echo_of_tokens_goes_on_in_the_middle_of_a_character() -> None:
    smile = bytes_of("🙂")
    request = Request("r", tuple(smile[:2]), 10, Sampling(seed=1), arrival_s=0.0)
    choice = Choice(0, request, PIECES, (), Echo(None))
    choice.add(message(smile[2:], FinishReason.LENGTH))
    assert taken(choice).text == "🙂"


def test_echo_reports_the_prompts_logprobs_with_the_first_missing() -> None:
    choice = choice_of(prompt="Tokyo", echo=Echo("Tokyo"))
    prompt = choice.request.prompt
    report = (None, *(TokenLogprob(token, -2.0) for token in prompt[1:]))
    choice.add(Tokens("r", (), 1.0, prompt_logprobs=report, finish=FinishReason.LENGTH))
    delta = taken(choice)
    assert delta.text == "Tokyo"
    assert [token.logprob for token in delta.tokens] == list(report)
    assert "".join(token.piece.decode() for token in delta.tokens) == "Tokyo"


def test_a_stop_string_in_the_prompt_does_not_stop_the_output() -> None:
    choice = choice_of("Once", prompt="Once", echo=Echo("Once"))
    choice.add(message(bytes_of("more"), FinishReason.LENGTH))
    assert taken(choice) == Delta(0, "Oncemore", (), FinishReason.LENGTH)


def test_what_waits_is_counted_until_it_is_taken() -> None:
    choice = choice_of()
    choice.add(message(bytes_of("abc")))
    assert choice.unread_tokens == 3
    choice.take()
    assert choice.unread_tokens == 0
