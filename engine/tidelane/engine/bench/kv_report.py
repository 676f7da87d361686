"""What `tidelane kv-bench` found: a table for people, JSON for programs, and whether each target was met."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from tidelane.engine.bench.ratio import Measured, Ratio


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of a conversation so far and of its next turn; `rounds` of each case, `steps` of decode in a round."""

    history_tokens: int = 4000
    new_tokens: int = 60
    rounds: int = 5
    steps: int = 100

    @property
    def turn_tokens(self) -> int:
        """Of the prompt of a next turn."""
        return self.history_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class Setting:
    """On what it was measured. `direct`: the disk was read past the page cache (O_DIRECT). `load_average` is the
    machine's over the minute before: what others ran there."""

    model: str
    dtype: str
    device: str
    cores: tuple[int, ...]
    memory_bytes: int
    file_system: str
    direct: bool
    token_bytes: int
    block_tokens: int
    load_average: float


@dataclass(frozen=True, slots=True)
class KvReport:
    setting: Setting
    sizes: Sizes
    ratios: tuple[Ratio, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know besides the table."""
        setting, sizes = self.setting, self.sizes
        history_mb = sizes.history_tokens * setting.token_bytes / 1e6
        about = (
            f"{setting.model} in {setting.dtype}: a history of {sizes.history_tokens} tokens, {history_mb:.0f} MB of "
            f"KV, and {sizes.new_tokens} new ones; medians of {sizes.rounds} rounds or more."
        )
        lines = [about, *(f"{ratio.name}: {ratio.price}." for ratio in self.ratios if ratio.price)]
        if not self.setting.direct:
            lines.append(
                f"The file system ({self.setting.file_system}) takes no O_DIRECT: records and raw reads both went "
                "through the page cache, so these are figures of memory, not of a disk."
            )
        lines.append(f"Load average before it began: {setting.load_average:.1f}, on {len(setting.cores)} cores.")
        wanted = [each for ratio in self.ratios if (each := met(ratio)) is not None]
        lines.append(f"{sum(wanted)} of {len(wanted)} targets met.")
        return tuple(lines)


def met(ratio: Ratio) -> bool | None:
    """None: nothing was wanted of it."""
    return None if ratio.at_least is None and ratio.at_most is None else ratio.met


def table(report: KvReport) -> Table:
    made = Table(title="KV below the device", title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("", "over", "under", "ratio", "wanted", "met"):
        made.add_column(column, justify="right" if column in ("over", "under", "ratio") else "left", no_wrap=True)
    for ratio in report.ratios:
        verdict = met(ratio)
        made.add_row(
            ratio.name,
            _side(ratio.over),
            _side(ratio.under),
            f"{ratio.value:.3g}",
            _wanted(ratio),
            "" if verdict is None else "yes" if verdict else "NO",
        )
    return made


def as_json(report: KvReport) -> dict[str, Any]:
    """Every sample, with what is worked out from them."""
    return {
        "setting": dataclasses.asdict(report.setting),
        "sizes": dataclasses.asdict(report.sizes),
        "ratios": [
            dataclasses.asdict(ratio)
            | {"over": _plain(ratio.over), "under": _plain(ratio.under), "value": ratio.value, "met": met(ratio)}
            for ratio in report.ratios
        ],
        "notes": list(report.notes),
    }


def _side(measured: Measured) -> str:
    return f"{measured.name} {measured.middle:.3g} {measured.unit}"


def _wanted(ratio: Ratio) -> str:
    if ratio.at_least is not None:
        return f"≥ {ratio.at_least:g}"
    return "" if ratio.at_most is None else f"≤ {ratio.at_most:g}"


def _plain(measured: Measured) -> dict[str, Any]:
    return dataclasses.asdict(measured) | {"median": measured.middle}
