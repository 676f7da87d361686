from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine.http.tiny_model import id_of, make_tokenizer
from tidelane.engine.http.detokenizer import Detokenizer
from tidelane.engine.http.pieces import Pieces, UnsupportedTokenizer


def pieces_of(tokenizer: Tokenizer) -> Pieces:
    return Pieces(tokenizer, json.loads(tokenizer.to_str())["decoder"])


def make_sentencepiece() -> Tokenizer:
    """As Llama 2 and Mistral have it: spaces as ▁, other characters as letters or as bytes."""
    words = ["▁", "▁a", "b", "▁▁", "é", "c", "▁end"]
    vocabulary = {"<s>": 0, "</s>": 1}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for word in words:
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


BYTE_LEVEL = make_tokenizer()
SENTENCEPIECE = make_sentencepiece()


def stream(tokenizer: Tokenizer, ids: list[int], *, at_start: bool = False) -> list[str]:
    detokenizer = Detokenizer(pieces_of(tokenizer), at_start=at_start)
    return [*map(detokenizer.feed, ids), detokenizer.finish()]


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40))
def test_byte_level_equals_the_full_decode_for_any_tokens(ids: list[int]) -> None:
    # Not only text that someone encoded: a model may write any tokens, and so any bytes.
    assert "".join(stream(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=40))
def test_text_comes_back_whole(text: str) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    assert "".join(stream(BYTE_LEVEL, ids)) == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_no_broken_character_is_ever_shown(text: str) -> None:
    ids = [token for character in text.replace("\ufffd", "") for token in BYTE_LEVEL.encode(character).ids]
    assert not any("\ufffd" in part for part in stream(BYTE_LEVEL, ids))


@given(st.text("ab é c🙂日", max_size=20), st.data())
def test_byte_fallback_equals_the_full_decode(text: str, data: st.DataObject) -> None:
    ids: list[int] = []
    for character in text:
        token = SENTENCEPIECE.token_to_id("▁" if character == " " else character)
        as_bytes = [id_of(SENTENCEPIECE, f"<0x{byte:02X}>") for byte in character.encode()]
        ids += as_bytes if token is None or (character != " " and data.draw(st.booleans())) else [token]
    assert "".join(stream(SENTENCEPIECE, ids, at_start=True)) == SENTENCEPIECE.decode(ids, skip_special_tokens=True)


def test_sentencepiece_drops_one_space_at_the_start_of_a_text_only() -> None:
    ids = [id_of(SENTENCEPIECE, token) for token in ("<s>", "▁▁", "▁a", "▁a")]
    assert "".join(stream(SENTENCEPIECE, ids, at_start=True)) == "  a a"
    assert "".join(stream(SENTENCEPIECE, ids)) == "   a a"


def test_a_split_emoji_appears_with_its_last_byte() -> None:
    ids = [id_of(BYTE_LEVEL, character) for character in ("ð", "Ł", "Ļ", "Ĥ")]
    assert stream(BYTE_LEVEL, ids) == ["", "", "", "🙂", ""]


def test_half_a_character_is_flushed_at_the_end() -> None:
    ids = [id_of(BYTE_LEVEL, "ð"), id_of(BYTE_LEVEL, "Ł")]
    assert stream(BYTE_LEVEL, ids) == ["", "", "\ufffd"]


def test_special_tokens_have_a_label_but_no_text() -> None:
    pieces = pieces_of(BYTE_LEVEL)
    end = id_of(BYTE_LEVEL, "<|im_end|>")
    assert pieces.text(end) == b""
    assert pieces.label(end) == b"<|im_end|>"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    # A model's matrix is often padded beyond its tokenizer.
    pieces = pieces_of(BYTE_LEVEL)
    assert pieces.text(10**6) == pieces.label(10**6) == b""


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    for decoder in (None, {"type": "WordPiece"}, {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}):
        with pytest.raises(UnsupportedTokenizer):
            Pieces(BYTE_LEVEL, decoder)


def test_metaspace_writes_spaces_and_drops_the_first() -> None:
    tokenizer = Tokenizer(models.BPE({"▁a": 0, "b": 1}, []))
    tokenizer.decoder = decoders.Metaspace()
    assert "".join(stream(tokenizer, [0, 1, 0], at_start=True)) == "ab a" == tokenizer.decode([0, 1, 0])
