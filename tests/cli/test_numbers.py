"""Numbers on the command line: what is out of range, not finite or no number is refused with what was expected."""

from __future__ import annotations

import pytest

from tidelane.cli import main

SECONDS = "must be seconds, from 0 to 31536000"
POSITIVE_SECONDS = "must be seconds, above 0 and at most 31536000"
ABOVE_0 = "must be a number above 0"
COUNT = "must be a whole number, 0 or more"
FROM_1 = "must be a whole number, 1 or more"
UP = ("up", "-f", "x.yaml")
OPERATOR = ("operator", "--agents", "x:1")
BENCH = ("bench", "--url", "http://127.0.0.1:1", "--model", "x")
SERVE = ("serve", "--model", "builtin://x")


@pytest.mark.parametrize(
    ("command", "option", "wrong", "expected"),
    [
        (UP, "--drain", ("-5", "nan", "inf", "1e9", "soon"), SECONDS),
        (UP, "--cpu-slots", ("0", "-1", "1.5", "1_0", "9" * 5000), FROM_1),
        (("agent",), "--drain", ("-5", "nan"), SECONDS),
        (("agent",), "--restart-delay-max", ("-1", "inf"), SECONDS),
        (("agent",), "--cpu-slots", ("0",), FROM_1),
        (OPERATOR, "--unreachable-after", ("nan", "-1"), SECONDS),
        (OPERATOR, "--move-after", ("nan", "-1"), SECONDS),
        (OPERATOR, "--forget-after", ("nan", "-1"), SECONDS),
        (SERVE, "--port", ("0", "65536", "-1"), "must be a whole number from 1 to 65535"),
        (SERVE, "--queue-limit", ("-1", "1.0", "\u00b2"), COUNT),
        (SERVE, "--max-context-tokens", ("-1",), COUNT),
        (SERVE, "--kv-pool-memory", ("-1", "1e9"), COUNT),
        (BENCH, "--duration", ("0", "-3", "nan", "inf"), POSITIVE_SECONDS),
        (BENCH, "--timeout", ("0", "nan"), POSITIVE_SECONDS),
        (BENCH, "--speedup", ("0", "-1", "nan", "inf"), ABOVE_0),
        (BENCH, "--limit", ("0", "-1", "1.5"), FROM_1),
        (BENCH, "--gpus", ("0", "-1", "x"), FROM_1),
        (BENCH, "--percentile", ("0", "100", "99.9"), "must be a whole number from 1 to 99"),
    ],
)
def test_refused_at_once(
    command: tuple[str, ...],
    option: str,
    wrong: tuple[str, ...],
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for text in wrong:
        with pytest.raises(SystemExit) as ended:
            main.main([*command, f"{option}={text}"])
        assert ended.value.code == 2
        assert capsys.readouterr().err.endswith(f"argument {option}: {text!r} {expected}\n")
