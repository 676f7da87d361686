"""What the KV codecs cost: quality of the built-in model on top of quantised KV, bytes, and time.

    python -m tools.kv_quality --json kv-quality.json

Perplexity: of each context of 1,024 tokens the first half is prefilled, all of its blocks go through the codec and
back, as by way of a lower tier, and the second half is scored on top. Greedy text: the whole blocks of a prompt go
through the codec, then 64 tokens are decoded. Both on the engine's own path, in float32, against the same without.
The text is ours, so that the model cannot have read it: decision records 1 to 19, which do not change, and scheduling
code, which does; figures compare only where hashes are equal. Beside the codecs stand schemes that were not taken, and
keys and values rounded to bfloat16, which is what a GPU's own pool would hold.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tools.kv_variants import BESIDE, TAKEN, VARIANTS, through
from tools.live.rig import MODEL, refusing, write_measurement

from tidelane.cli.traces import check_outputs
from tidelane.engine.http.tokenizer import Tokenizer
from tidelane.engine.kv.codecs import CODECS, Codec
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.model.batch import RaggedBatch, Rows
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.loading import load
from tidelane.engine.model.store import default_store, resolve

REPOSITORY = Path(__file__).parents[1]
TEXTS = {"English": "docs/adr/00[01]*.md", "code": "engine/tidelane/engine/scheduling/*.py"}
CONTEXTS = {"English": 5, "code": 3}
CONTEXT_TOKENS = 1024
KEPT_TOKENS = CONTEXT_TOKENS // 2
PROMPTS_OF_EACH = 10
EXCERPT_CHARS = 900
PROMPT_BLOCKS = 32  # of a prompt, and of what is decoded after it
NEW_TOKENS = 64
TIMED_BLOCKS = 256
TIMED_LAYERS = 4
ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Scored:
    """Of tokens in the second halves, against raw. `error_percent`: of the difference, one standard error, by token."""

    difference_percent: float
    error_percent: float
    divergence: float  # mean Kullback-Leibler divergence of the next token's distribution from raw's, in nats
    same_best: float  # share of positions whose best token is raw's


@dataclass(frozen=True, slots=True)
class Greedy:
    """`matched`: mean share of a prompt's tokens before the first that differs from raw's."""

    matched: float
    all_equal: float


@dataclass(frozen=True, slots=True)
class Timed:
    """Processor time of one thread, for all layers."""

    encode_us_per_token: float
    decode_us_per_token: float
    encode_gb_per_s: float  # of the pool's bytes, as are those of decode
    decode_gb_per_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """By what it is held as; times by dtype first."""

    bytes_per_token: dict[str, float]
    raw_perplexity: float
    perplexity: dict[str, Scored]
    greedy: dict[str, Greedy]
    time: dict[str, dict[str, Timed]]


@dataclass(frozen=True, slots=True)
class Text:
    kind: str
    files: list[str]
    sha256: str
    text: str


class Rig:
    """The built-in model over a pool of its own."""

    def __init__(self, blocks: int) -> None:
        folder = resolve(MODEL, default_store(), print)
        loaded = load(folder, "float32", None, torch.device("cpu"))
        self.layout = loaded.facts.kv_layout
        self.stop_tokens = list(loaded.facts.stop_token_ids)
        self.model = SlicedModel(loaded.module)
        self.pool = DevicePool.allocate(self.layout, blocks, torch.float32, torch.device("cpu"))
        self.tokenizer = Tokenizer.load(folder, lambda: datetime.now(tz=UTC))

    def logits(self, rows: Sequence[Rows]) -> torch.Tensor:
        """Of every row."""
        return self.model.run_whole(RaggedBatch.build(rows, self.pool))

    def prefill(self, rows: Rows) -> torch.Tensor:
        """Logits of the last token."""
        batch = RaggedBatch.build([rows], self.pool)
        hidden = self.model.run(self.model.embed(batch), batch, 0, self.model.layers)
        return self.model.logits(hidden[0, -1:])[0]

    def kept(self) -> Callable[[], None]:
        """Puts the pool back to what it is now."""
        tensors = (*self.pool.keys, *self.pool.values)
        copies = [tensor.clone() for tensor in tensors]

        def put_back() -> None:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)

        return put_back


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args()
    check_outputs(args.json, None)
    began_s = time.monotonic()
    texts = [_text(kind, pattern) for kind, pattern in TEXTS.items()]
    with torch.inference_mode():
        figures = _measured(Rig(blocks=2 * PROMPTS_OF_EACH * PROMPT_BLOCKS), texts)
    console = Console()
    _show(console, figures)
    console.print(f"{time.monotonic() - began_s:.0f} s", highlight=False)
    if args.json is not None:
        sources = {text.kind: {"files": text.files, "sha256": text.sha256} for text in texts}
        tokens = {"context": CONTEXT_TOKENS, "through_codec": KEPT_TOKENS, "greedy": NEW_TOKENS}
        about = {"model": MODEL, "dtype": "float32", "texts": sources, "contexts": CONTEXTS, "tokens": tokens}
        write_measurement(args.json, {**about, **asdict(figures)})
    return 0


def _measured(rig: Rig, texts: Sequence[Text]) -> Figures:
    perplexity, scored = score(rig, [each for text in texts for each in _contexts(text, rig.tokenizer)])
    return Figures(
        {each.name: each.codec.block_bytes(rig.layout) / rig.layout.block_tokens for each in VARIANTS},
        perplexity,
        scored,
        agree(rig, [_chat(excerpt, rig.tokenizer) for text in texts for excerpt in _excerpts(text.text)]),
        {
            str(dtype).removeprefix("torch."): {each.name: timing(each, rig.layout, dtype) for each in CODECS}
            for dtype in (torch.bfloat16, torch.float32)
        },
    )


def _text(kind: str, pattern: str) -> Text:
    files = sorted(REPOSITORY.glob(pattern))
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    names = [str(file.relative_to(REPOSITORY)) for file in files]
    return Text(kind, names, hashlib.sha256(text.encode()).hexdigest(), text)


def _contexts(text: Text, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    tokens = tokenizer.encode(text.text, len(text.text))
    for at in range(CONTEXTS[text.kind]):
        context = tokens[at * CONTEXT_TOKENS :][:CONTEXT_TOKENS]
        if len(context) < CONTEXT_TOKENS:
            raise SystemExit(f"{TEXTS[text.kind]}: {len(tokens)} tokens are too few for {CONTEXTS[text.kind]} contexts")
        yield context


def _excerpts(text: str) -> Iterator[str]:
    """At equal distances."""
    for at in range(PROMPTS_OF_EACH):
        start = at * (len(text) - EXCERPT_CHARS) // (PROMPTS_OF_EACH - 1)
        yield text[start : start + EXCERPT_CHARS]


def _chat(excerpt: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    content = f"This is part of a longer text:\n\n{excerpt}\n\nSay in your own words what it is about."
    return tokenizer.encode_chat([{"role": "user", "content": content}], {"add_generation_prompt": True}, 4096)


def score(rig: Rig, contexts: Sequence[tuple[int, ...]]) -> tuple[float, dict[str, Scored]]:
    """The perplexity of raw, and what each variant makes of it."""
    blocks = list(range(rig.layout.blocks_for(CONTEXT_TOKENS)))
    losses: list[torch.Tensor] = []
    found: dict[str, list[tuple[torch.Tensor, ...]]] = {}
    for context in contexts:
        rig.prefill(Rows(context[:KEPT_TOKENS], 0, blocks))
        put_back = rig.kept()
        second = Rows(context[KEPT_TOKENS:], KEPT_TOKENS, blocks)
        wanted = torch.tensor(second.tokens[1:]).unsqueeze(1)
        raw = rig.logits([second])[:-1].log_softmax(1)
        loss = -raw.gather(1, wanted)
        losses.append(loss)
        for variant in VARIANTS:
            put_back()
            through(variant, rig.pool, [blocks[: rig.layout.blocks_for(KEPT_TOKENS)]])
            ours = rig.logits([second])[:-1].log_softmax(1)
            more = -ours.gather(1, wanted) - loss
            divergence = (raw.exp() * (raw - ours)).sum(1)
            same = ours.argmax(1) == raw.argmax(1)
            found.setdefault(variant.name, []).append((more, divergence, same.float()))
    return float(torch.cat(losses).mean().exp()), {name: _scored(parts) for name, parts in found.items()}


def _scored(parts: Sequence[tuple[torch.Tensor, ...]]) -> Scored:
    more, divergence, same = (torch.cat(each) for each in zip(*parts, strict=True))
    return Scored(
        100 * math.expm1(float(more.mean())),
        100 * float(more.std()) / math.sqrt(more.numel()),
        float(divergence.mean()),
        float(same.mean()),
    )


def agree(rig: Rig, prompts: Sequence[tuple[int, ...]]) -> dict[str, Greedy]:
    blocks = [list(range(at * PROMPT_BLOCKS, (at + 1) * PROMPT_BLOCKS)) for at in range(len(prompts))]
    firsts = [
        _best(rig, rig.prefill(Rows(prompt, 0, mine)).unsqueeze(0))[0]
        for prompt, mine in zip(prompts, blocks, strict=True)
    ]
    put_back = rig.kept()
    whole = [mine[: len(prompt) // rig.layout.block_tokens] for prompt, mine in zip(prompts, blocks, strict=True)]
    raw = _decoded(rig, prompts, blocks, firsts)
    found = {}
    for variant in (*TAKEN, *BESIDE):
        put_back()
        through(variant, rig.pool, whole)
        matched = [
            matched_prefix(mine, theirs)
            for mine, theirs in zip(_decoded(rig, prompts, blocks, firsts), raw, strict=True)
        ]
        shares = [each / NEW_TOKENS for each in matched]
        found[variant.name] = Greedy(sum(shares) / len(shares), shares.count(1.0) / len(shares))
    return found


def _decoded(
    rig: Rig, prompts: Sequence[tuple[int, ...]], blocks: Sequence[list[int]], firsts: Sequence[int]
) -> list[list[int]]:
    """NEW_TOKENS after each prompt and its first token, which is raw's own; in one batch, alike for each variant."""
    tokens = [[first] for first in firsts]
    for step in range(NEW_TOKENS):
        rows = [
            Rows([said[-1]], len(prompt) + step, mine)
            for said, prompt, mine in zip(tokens, prompts, blocks, strict=True)
        ]
        for said, best in zip(tokens, _best(rig, rig.logits(rows)), strict=True):
            said.append(best)
    return [said[1:] for said in tokens]


def _best(rig: Rig, logits: torch.Tensor) -> list[int]:
    """Never an end, so that all texts are equally long."""
    logits[:, rig.stop_tokens] = -math.inf
    return logits.argmax(1).tolist()


def matched_prefix(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens are equal before the first that is not."""
    return next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))


def timing(each: Codec, layout: KVLayout, dtype: torch.dtype) -> Timed:
    """The least of some rounds, each over layers that no cache holds all of."""
    layout = replace(layout, element_bytes=dtype.itemsize)
    shape = (TIMED_LAYERS, TIMED_BLOCKS, layout.block_tokens, layout.heads)
    chance = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn((*shape, dim), generator=chance).to(dtype) for dim in (layout.key_dim, layout.value_dim)
    )
    records = torch.empty(TIMED_BLOCKS, TIMED_LAYERS, each.layer_bytes(layout), dtype=torch.uint8)

    def encode() -> None:
        for layer in range(TIMED_LAYERS):
            each.encode(keys[layer], values[layer], records[:, layer])

    def decode() -> None:
        for layer in range(TIMED_LAYERS):
            each.decode(records[:, layer], keys[layer], values[layer])

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    encode_s, decode_s = (min(_took_s(work) for _ in range(ROUNDS)) for work in (encode, decode))
    torch.set_num_threads(threads)
    read = keys.nbytes + values.nbytes
    us_per_token = 1e6 * layout.layers / (TIMED_LAYERS * TIMED_BLOCKS * layout.block_tokens)
    return Timed(encode_s * us_per_token, decode_s * us_per_token, read / encode_s / 1e9, read / decode_s / 1e9)


def _took_s(work: Callable[[], None]) -> float:
    # Of this thread, not of the clock: what else runs here shows less.
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


def _show(console: Console, figures: Figures) -> None:
    quality = Table(
        title=f"Scored on top, against raw's perplexity of {figures.raw_perplexity:.2f}", title_justify="left"
    )
    quality.add_column("held as", no_wrap=True)
    for column in ("bytes/token", "perplexity, %", "divergence", "same best"):
        quality.add_column(column, justify="right")
    for name, scored in figures.perplexity.items():
        quality.add_row(
            name,
            f"{figures.bytes_per_token[name]:,.0f}",
            f"{scored.difference_percent:+.2f} ± {scored.error_percent:.2f}",
            f"{scored.divergence:.6f}",
            f"{100 * scored.same_best:.2f} %",
        )
    console.print(quality)
    texts = Table(title=f"Greedy texts of {NEW_TOKENS} tokens, against raw's", title_justify="left")
    texts.add_column("held as")
    for column in ("before the first difference", "equal"):
        texts.add_column(column, justify="right")
    for name, greedy in figures.greedy.items():
        texts.add_row(name, f"{100 * greedy.matched:.0f} %", f"{100 * greedy.all_equal:.0f} %")
    console.print(texts)
    times = Table(title=f"Time, one thread, {TIMED_BLOCKS} blocks at once", title_justify="left")
    times.add_column("codec")
    for column in ("encode", "encode/token", "decode", "decode/token"):
        times.add_column(column, justify="right")
    for dtype, by_codec in figures.time.items():
        for name, timed in by_codec.items():
            times.add_row(
                f"{name} of {dtype}",
                f"{timed.encode_gb_per_s:.2f} GB/s",
                f"{timed.encode_us_per_token:.1f} µs",
                f"{timed.decode_gb_per_s:.2f} GB/s",
                f"{timed.decode_us_per_token:.1f} µs",
            )
    console.print(times)


if __name__ == "__main__":
    sys.exit(refusing(main))
