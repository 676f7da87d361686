"""`tidelane simulate` and `tidelane plan`: small traces from end to end, and what is wrong said in one line."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from tidelane.cli import main
from tidelane.engine.estimation.devices import device_facts
from tidelane.engine.estimation.profile import Profile, ProfileKey, write_profile
from tidelane.engine.estimation.roofline import prior
from tidelane.engine.estimation.shapes import model_shape

MODEL = ("--model", "llama-3.1-8b", "--gpu", "h200")
SLO = ("--slo", "ttft=500ms,ttftPer1k=100ms,tpot=50ms")
HERE = ("--processes", "1")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [
        {"at_s": 0.4 * number, "input_tokens": 200 + 400 * (number % 5), "output_tokens": 5 + number % 7}
        for number in range(30)
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(*words: str) -> int:
    return main.main(words)


def test_more_is_found_with_host_memory(tmp_path: Path) -> None:
    rows = [  # two conversations in turn, of which the device holds one
        {"timestamp": 20_000 * number, "input_length": 800_000, "output_length": 2, "hash_ids": [*range(at, at + 1563)]}
        for number, at in enumerate((0, 10_000, 0, 10_000))
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shares = []
    for words in ((), ("--kv-host-memory", "200Gi", "--kv-disk-memory", "1Ti")):
        code = run(
            "simulate", "--trace", str(tmp_path / "trace.jsonl"), "--format", "mooncake", *MODEL, *SLO, *HERE,
            "--policies", "mixed", "--order", "own", "--json", str(tmp_path / "a.json"), *words,
        )  # fmt: skip
        assert code == 0
        (point,) = json.loads((tmp_path / "a.json").read_text())["policies"]["mixed/own"]["points"]
        assert point["found"]["prompt_tokens"] == 3_200_000
        shares.append(point["found"]["cached_tokens"] / 3_200_000)
    assert shares[0] < 0.25
    assert shares[1] > 0.49


def test_one_rate(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json")]
    page = tmp_path / "a.html"
    told = []
    for file in files:
        code = run(
            "simulate", "--trace", trace, "--format", "jsonl", *MODEL, *SLO, *HERE,
            "--policies", "chunked,auto,disaggregated", "--order", "own", "--json", str(file), "--html", str(page),
        )  # fmt: skip
        assert code == 0
        told.append(capsys.readouterr().out)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert told[0] == told[1]
    assert told[0].rstrip().endswith("┘")  # a table last
    plain = json.loads(files[0].read_text())
    assert plain["header"]["trace"] == "mine.jsonl"
    assert "--json" not in plain["header"]["command"]
    assert "--policies chunked,auto,disaggregated" in plain["header"]["command"]
    assert list(plain["policies"]) == ["chunked/own", "auto/own", "disaggregated/own"]
    (point,) = plain["policies"]["auto/own"]["points"]
    assert point["rate"] == pytest.approx(30 / (0.4 * 29), rel=1e-5)
    assert point["attainment"] == 1.0
    assert plain["policies"]["auto/own"]["rate_at_90"] is None
    assert plain["policies"]["disaggregated/own"]["gpus"] == 2
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(("words", "refuses"), [((), False), (("--late", "refuse"), True)])
def test_late_requests_are_refused_only_if_that_is_asked(
    words: tuple[str, ...], refuses: bool, trace: str, tmp_path: Path
) -> None:
    told = tmp_path / "told.json"
    code = run(
        "simulate", "--trace", trace, "--format", "jsonl", *MODEL, "--slo", "ttft=100ms,tpot=50ms", *HERE,
        "--policies", "lanes", "--order", "own,ours", "--rate", "1000", *words, "--json", str(told),
    )  # fmt: skip
    assert code == 0
    policies = json.loads(told.read_text())["policies"]
    refused = {name: each["points"][0]["refused_late"] for name, each in policies.items()}
    assert refused["lanes/own"] == 0.0
    assert (refused["lanes/ours"] > 0.0) == refuses


def test_a_sweep(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    code = run(
        "simulate", "--trace", trace, "--format", "jsonl", *MODEL, *SLO, *HERE, "--policies", "lanes",
        "--order", "ours", "--sweep", "--limit", "20", "--tune", "10", "--json", str(file),
    )  # fmt: skip
    assert code == 0
    policy = json.loads(file.read_text())["policies"]["lanes/ours"]
    rates = [point["rate"] for point in policy["points"]]
    assert len(rates) == 6
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(20 * rates[0], rel=0.01)
    assert policy["rate_at_90"] > 0
    assert "lanes/ours" in capsys.readouterr().out


def test_rates_that_are_named(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(
        "simulate", "--trace", trace, "--format", "jsonl", *MODEL, *SLO, *HERE, "--policies", "mixed",
        "--order", "own", "--sweep", "--rates", "4,2",
    )  # fmt: skip
    assert code == 0
    assert "2/s" in capsys.readouterr().out


def test_a_measured_profile_instead_of_a_gpu(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = prior(model_shape("smollm2-135m"), device_facts("l40s"), [4, 8]).times
    by_cores = {phase: {4: by_units[4], 8: by_units[8]} for phase, by_units in times.items()}
    path = tmp_path / "profile.json"
    write_profile(path, Profile(ProfileKey("d" * 8, "cpu", 8, "float32", 30), date(2026, 1, 31), by_cores))
    words = ("simulate", "--trace", trace, "--format", "jsonl", *SLO, *HERE, "--profile", str(path))
    assert run(*words, "--model", "smollm2-135m", "--kv-tokens", "20000", "--policies", "lanes,disaggregated") == 0
    told = capsys.readouterr().out
    assert "Step times are those measured on cpu (2026-01-31)." in told
    for wrong, message in (
        (("--model", "llama-3.1-8b", "--kv-tokens", "20000"), "--profile: is of a model of 30 layers"),
        (("--model", "smollm2-135m", "--gpu", "h200"), "--profile: is of 8 units, NVIDIA H200 SXM has 132"),
        (("--model", "smollm2-135m"), "--gpu is missing: name one, or give --profile and --kv-tokens"),
    ):
        assert run(*words, *wrong) == 2
        assert message in capsys.readouterr().err


def test_plan(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--trace", trace, "--format", "jsonl", *MODEL, *SLO, *HERE, "--policies", "auto,chunked")
    assert run("plan", *words, "--scale", "40") == 0
    told = capsys.readouterr().out
    assert "Auto" in told
    assert "ChunkedPrefill" in told
    assert " more traffic until it is 90%" in told
    assert run("plan", *words, "--slo", "ttft=1ms,tpot=1ms") == 1
    assert "In no mode" in capsys.readouterr().out
    assert run("plan", *words, "--scale", "1000000") == 2
    assert "GPUs, above 1024: plan for a part of the traffic" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("simulate", "--trace nowhere.csv", "nowhere.csv"),
        ("simulate", "--format xml", "--format: 'xml' is none of azure, mooncake, jsonl"),
        ("simulate", "--format azure", "mine.jsonl:"),
        ("simulate", "--model gpt", "--model: 'gpt' is neither a config.json nor one of llama-3.1-70b"),
        ("simulate", "--gpu tpu", "'tpu' is not among the gpus that we know: a100"),
        ("simulate", "--gpu rtx4090 --model llama-3.1-70b", "leave no room for KV"),
        ("simulate", "--slo ttft=200ms", "--slo: tpot is missing: write ttft=200ms"),
        ("simulate", "--slo ttft=200,tpot=5ms", "--slo: '200' is no duration such as 200ms"),
        ("simulate", "--slo ttft=0s,tpot=5ms", "--slo: ttft_s and tpot_s must be above 0"),
        ("simulate", "--slo speed=5ms", "--slo: 'speed=5ms' is no target"),
        ("simulate", "--policies lanes,fast", "--policies: 'fast' is none of mixed, chunked"),
        ("simulate", "--order best", "--order: 'best' is none of own, ours"),
        ("simulate", "--gpus 0", "--gpus: '0' must be a whole number, 1 or more"),
        ("simulate", "--limit -3", "--limit: '-3' must be a whole number, 1 or more"),
        ("simulate", "--seed x", "--seed: 'x' must be a whole number, 0 or more"),
        ("simulate", "--rate 0", "--rate: '0' must be a number above 0"),
        ("simulate", "--refine -5", "--refine: '-5' must be a whole number, 0 or more"),
        ("simulate", "--late refuse --order own", "--late: it is ours that refuses: add it to --order"),
        ("simulate", "--measured . --sweep", "--measured: brings its own requests and policy: leave out --trace,"),
        ("simulate", "--rates 1,2", "--rates: needs --sweep"),
        ("simulate", "--sweep --rates 1,two", "--rates: 'two' must be a number above 0"),
        ("simulate", "--sweep --rate 2", "--rate: is for one rate alone"),
        ("simulate", "--kv-tokens 9", "--kv-tokens: is known of a GPU"),
        ("simulate", "--kv-disk-memory 1Ti", "--kv-disk-memory: has no effect without --kv-host-memory"),
        ("plan", "--kv-prefetch", "--kv-prefetch: has no effect without --kv-host-memory"),
        ("plan", "--kv-host-rate 50", "--kv-host-rate: has no effect without --kv-host-memory"),
        ("simulate", "--kv-host-memory 9Gi --kv-disk-rate 7", "--kv-disk-rate: has no effect without --kv-disk-memory"),
        ("simulate", "--kv-host-memory 9Gib", "--kv-host-memory: '9Gib' is no amount of memory such as 8Gi"),
        ("simulate", "--kv-host-memory 1Ki", "host memory for KV of 1024 bytes has no room for a block"),
        ("simulate", "--kv-host-memory 9Gi --kv-host-rate 0", "--kv-host-rate: '0' must be a number above 0"),
        ("simulate", "--profile nowhere.json", "nowhere.json"),
        ("simulate", "--json /tmp", "--json: /tmp cannot be written: Is a directory"),
        (
            "simulate",
            "--json /tmp/a.out --html /tmp/../tmp/a.out",
            "--html: /tmp/../tmp/a.out is the file of --json as well",
        ),
        ("simulate", "--json nowhere/a.json", "--json: nowhere/a.json: there is no folder nowhere"),
        ("simulate", "--overhead 1", "--overhead: '1' is no duration"),
        ("simulate", "--processes 0", "--processes: '0' must be"),
        ("plan", "--attainment 101", "--attainment: '101' must be per cent, from 1 to 100"),
        ("plan", "--attainment many", "--attainment: 'many' must be a number above 0"),
        ("plan", "--scale -1", "--scale: '-1' must be a number above 0"),
        ("plan", "--policies none", "--policies: 'none' is none of"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    command: str, words: str, message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # argparse takes the last of two, and `=` since a value may start with a dash.
    wrong = [word for option in words.split(" --") for word in _option(option)]
    code = run(command, "--trace", trace, "--format", "jsonl", *MODEL, *SLO, *wrong)
    assert code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"tidelane {command}: ")
    assert message in told.err
    assert told.err.count("\n") == 1


def _option(text: str) -> list[str]:
    name, _, value = text.removeprefix("--").partition(" ")
    return [f"--{name}={value}" if value else f"--{name}"]


def test_a_measured_run_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", *MODEL, "--measured", "nowhere") == 2
    assert "nowhere/meta.json" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["trace", "model", "gpu", "slo"])
def test_what_is_missing_is_named(missing: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"trace": trace, "model": "llama-3.1-8b", "gpu": "h200", "slo": "ttft=1s,tpot=1s"}
    words = [word for name, value in given.items() if name != missing for word in (f"--{name}", value)]
    assert run("simulate", *words, "--format", "jsonl") == 2
    assert f"--{missing}: missing, add" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(command, "--help")
    assert ended.value.code == 0
    assert "--slo TARGETS" in capsys.readouterr().out


def test_a_sketch_stands_for_the_trace_that_it_was_made_of(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("sketch", "--trace", trace, "--format", "jsonl") == 0
    sketch = tmp_path / "mine.sketch.json"
    sketch.write_text(capsys.readouterr().out)
    points = []
    for words in (("--trace", trace, "--format", "jsonl"), ("--sketch", str(sketch), "--limit", "300")):
        out = tmp_path / "out.json"
        code = run("simulate", *words, *MODEL, *SLO, *HERE, "--policies", "auto", "--order", "ours", "--json", str(out))
        assert code == 0
        (point,) = json.loads(out.read_text())["policies"]["auto/ours"]["points"]
        points.append(point)
    of_trace, of_sketch = points
    assert of_sketch["rate"] == pytest.approx(of_trace["rate"], rel=0.05)
    assert of_sketch["attainment"] == pytest.approx(of_trace["attainment"], abs=0.05)
    assert of_sketch["ttft_ms"]["p50"] == pytest.approx(of_trace["ttft_ms"]["p50"], rel=0.2)
    assert "like the 30 of the sketch: 2.59 a second" in " ".join(capsys.readouterr().out.split())


def test_what_is_wrong_with_a_sketch_is_said(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sketch.json"
    for text, words, said in (
        ("{}", (), "no request has come and ended in it"),
        ('{"requests": 1, "flexRequests": 2}', (), "flex_requests must not be above requests"),
        ("[", (), "give a file that `tidelane sketch` printed"),
        ("{}", ("--trace", trace), "leave out --trace and --format, or --sketch"),
    ):
        path.write_text(text)
        assert run("simulate", "--sketch", str(path), *MODEL, *SLO, *HERE, *words) == 2
        error = capsys.readouterr().err
        assert error.startswith("tidelane simulate: --sketch: ")
        assert said in error
    assert run("sketch") == 2
    assert capsys.readouterr().err == "tidelane sketch: give --trace or --engine, one of the two\n"
    assert run("sketch", "--engine", str(tmp_path / "none")) == 2
    assert capsys.readouterr().err.startswith(f"tidelane sketch: --engine: {tmp_path / 'none'}: ")
