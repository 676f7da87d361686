from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Encoder
from tokenizers import normalizers, processors

from engine.http.tiny_model import TEMPLATE, make_tokenizer, write_model_folder
from tidelane.engine.http.chat_template import ChatTemplate, TemplateRefused
from tidelane.engine.http.tokenizer import NoChatTemplate, Tokenizer, TooLong

ROOM = 4096  # tokens; more than any text here comes to
USER = [{"role": "user", "content": "hi <b>"}]


def now() -> datetime:
    return datetime(2031, 5, 6, tzinfo=UTC)


def render(source: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, now).render(messages, options)


def test_templates_have_what_transformers_gives_them() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}") == "<s>hi <b>"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hi <b>"}]'
    assert render("{{ {'é': 1} | tojson(indent=1) }}") == '{\n "é": 1\n}'
    assert render("{{ strftime_now('%Y-%m-%d') }}") == "2031-05-06"
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{% generation %}a{{ 1 }}{% endgeneration %}b") == "a1b"
    assert render("{% if add_generation_prompt %}yes{% endif %}") == "yes"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ tools is defined }}") == "False"
    # Line breaks after blocks are dropped, as templates are written for.
    assert render("{% if true %}\n  {% set x = 1 %}\nx{% endif %}") == "x"


def test_a_client_cannot_replace_the_messages_by_options() -> None:
    assert (
        render("{{ messages[0].role }}{{ add_generation_prompt }}", messages=USER, add_generation_prompt=False)
        == "userTrue"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('No system role') }}", "No system role"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ lipsum.__globals__.os.popen('id').read() }}", "unsafe"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused_with_its_reason(source: str, message: str) -> None:
    with pytest.raises(TemplateRefused, match=message):
        render(source)


@pytest.mark.parametrize("where", ["jinja", "config", "named", "json", "jinja wins"])
def test_templates_are_found_where_models_keep_them(tmp_path: Path, where: str) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config: dict[str, Any] = {}
    if where.startswith("jinja"):
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    if where == "jinja wins":
        config["chat_template"] = "old"
    if where == "config":
        config["chat_template"] = TEMPLATE
    if where == "named":
        config["chat_template"] = [{"name": "rag", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    if where == "json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokens = Tokenizer.load(tmp_path, now).encode_chat([{"role": "user", "content": "x"}], {}, ROOM)
    text = make_tokenizer().decode(list(tokens), skip_special_tokens=False)
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(NoChatTemplate):
        Tokenizer.load(tmp_path, now).encode_chat(USER, {}, ROOM)


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    encoder = make_tokenizer()
    encoder.enable_truncation(4)
    encoder.enable_padding(length=64)
    encoder.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path, now)
    text = "a long text of many words, longer than four tokens"
    assert tokenizer.encode(text, ROOM) == tuple(make_tokenizer().encode(text).ids)


def test_special_tokens_are_added_to_plain_prompts_only(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    encoder = Encoder.from_file(str(tmp_path / "tokenizer.json"))
    encoder.post_processor = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    encoder.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path, now)
    assert tokenizer.encode("x", ROOM)[0] == 0
    assert 0 not in tokenizer.encode_chat([{"role": "user", "content": "x"}], {}, ROOM)


def test_a_long_text_is_encoded_without_keeping_other_threads_waiting(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    tokenizer = Tokenizer.load(tmp_path, now)
    text = "The capital of France is Paris. " * 20_000
    turns = 0
    with ThreadPoolExecutor(1) as pool:
        encoded = pool.submit(tokenizer.encode, text, len(text))
        while not encoded.done():
            time.sleep(0.001)  # to be woken needs the GIL
            turns += 1
    assert turns > 10
    assert encoded.result() == tokenizer.encode("The capital of France is Paris. ", ROOM) * 20_000


@pytest.mark.parametrize(("normalizer", "factor"), [(None, 1), (normalizers.NFC(), 4)])
def test_only_what_cannot_fit_is_refused_by_its_length(
    tmp_path: Path, normalizer: normalizers.Normalizer | None, factor: int
) -> None:
    encoder = make_tokenizer()
    fitting = 10 * factor * max(map(len, encoder.get_vocab()))
    if normalizer is not None:
        encoder.normalizer = normalizer
    encoder.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path, now)
    assert len(tokenizer.encode("x" * fitting, 10)) == fitting
    with pytest.raises(TooLong, match=f"^{fitting + 1} characters$"):
        tokenizer.encode("x" * (fitting + 1), 10)


@pytest.mark.slow
def test_prompts_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_model_folder(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path, now)
    chats = [
        USER,
        [
            {"role": "system", "content": "Be <|im_end|> brief\n"},
            *USER,
            {"role": "assistant", "content": " 🙂 "},
            *USER,
        ],
    ]
    for chat in chats:
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(chat, {}, ROOM) == tuple(expected)
    for text in ("The capital of France", "  spaces\n\n", "日本語 🙂", "<|im_start|>user"):
        assert ours.encode(text, ROOM) == tuple(theirs(text)["input_ids"])
