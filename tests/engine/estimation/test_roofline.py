from __future__ import annotations

import json
from importlib.resources import files
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.estimation.devices import DeviceFacts, cpu_device, device_facts, device_names
from tidelane.engine.estimation.estimates import Contention, Phase
from tidelane.engine.estimation.passes import PassWork, decode_work, prefill_work
from tidelane.engine.estimation.roofline import KNOTS, prior
from tidelane.engine.estimation.shapes import kv_bytes_per_token, model_names, model_shape, weight_bytes

H200 = device_facts("h200")
PROMPT = prefill_work([(0, 1000)])
STEP = decode_work(32, 32_000)


def whole_ms(model: str, phase: Phase, work: PassWork, device: DeviceFacts = H200) -> float:
    return 1000 * prior(model_shape(model), device, ()).seconds(phase, device.units, work)


def test_the_8b_model_on_an_h200_prefills_a_thousand_tokens_in_some_27_ms() -> None:
    """2 * 1,000 * 7.0e9 parameters of layers / 600 TFLOP/s = 23.3 ms; attention 0.7; the head's weights, 1.05 GB, 0.3;
    between the products 5.4 GB, 1.4; the launch 0.5. (Our rough model, 27 us a token, computes all 8.0e9 for each.)"""
    assert whole_ms("llama-3.1-8b", Phase.PREFILL, PROMPT) == pytest.approx(26.2, abs=0.5)


def test_the_8b_model_on_an_h200_decodes_32_sequences_of_a_thousand_in_some_5_ms() -> None:
    """Weights 15.0 GB at 4.0 TB/s: 3.75 ms; KV 32,000 * 131,072 bytes: 1.05; launch 0.5; the rest 0.1."""
    assert whole_ms("llama-3.1-8b", Phase.DECODE, STEP) == pytest.approx(5.4, abs=0.2)


def test_the_70b_model_in_fp8_on_an_h200() -> None:
    """Prefill: 2 * 1,000 * 68.5e9 / 1,200 TFLOP/s = 114 ms; attention 2.6 MFLOP for each of 500,500 pairs: 3.3; between
    the products 30 GB: 7.5; head 0.5; launch 0.5. Decode: layers 68.5 GB and the head, in BF16, 2.1: 17.6 ms; KV 10.5
    GB: 2.6; launch 0.5."""
    assert whole_ms("llama-3.1-70b-fp8", Phase.PREFILL, PROMPT) == pytest.approx(125.5, abs=2)
    assert whole_ms("llama-3.1-70b-fp8", Phase.DECODE, STEP) == pytest.approx(21.0, abs=0.5)


def test_a_fused_pass_reads_weights_once() -> None:
    fused = whole_ms("llama-3.1-8b", Phase.FUSED, PROMPT + STEP)
    apart = whole_ms("llama-3.1-8b", Phase.PREFILL, PROMPT) + whole_ms("llama-3.1-8b", Phase.DECODE, STEP)
    assert whole_ms("llama-3.1-8b", Phase.PREFILL, PROMPT) < fused < apart - 3


def test_decode_on_16_of_132_sms_is_slowed_by_bandwidth_as_the_table_says() -> None:
    estimates = prior(model_shape("llama-3.1-8b"), H200, [16])
    launch_s = H200.launch_s
    slow, fast = (estimates.seconds(Phase.DECODE, units, STEP) - launch_s for units in (16, 132))
    assert slow / fast == pytest.approx(1 / 0.57, rel=0.01)


@pytest.mark.parametrize("device", device_names())
@pytest.mark.parametrize("model", model_names())
def test_no_more_units_and_no_less_work_takes_longer(model: str, device: str) -> None:
    facts = device_facts(device)
    rows = range(facts.min_units, facts.units, facts.unit_step)
    estimates = prior(model_shape(model), facts, rows)
    for phase in Phase:
        by_units = [estimates.seconds(phase, units, PROMPT + STEP) for units in rows]
        assert all(later <= earlier for earlier, later in pairwise(by_units))
        assert estimates.times[phase][facts.units].knots == KNOTS


def test_units_that_a_device_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="NVIDIA H200 SXM has no 133 units"):
        prior(model_shape("llama-3.1-8b"), H200, [133])


@pytest.mark.parametrize(
    ("model", "gigabytes", "kv_bytes"),
    [
        ("llama-3.1-8b", 16.06, 131_072),
        ("llama-3.1-70b", 141.1, 327_680),
        ("llama-3.1-70b-fp8", 72.7, 327_680),
        ("qwen2.5-7b", 15.23, 57_344),
        ("smollm2-135m", 0.269, 23_040),
    ],
)
def test_models_that_we_ship_are_as_large_as_their_weights(model: str, gigabytes: float, kv_bytes: int) -> None:
    assert weight_bytes(model_shape(model)) / 1e9 == pytest.approx(gigabytes, rel=1e-3)
    assert kv_bytes_per_token(model_shape(model)) == kv_bytes


def test_the_h200_is_that_of_our_rough_model() -> None:
    assert pytest.approx(600e12, rel=1e-3) == H200.linear_flops
    assert pytest.approx(400e12, rel=1e-3) == H200.attention_flops
    assert pytest.approx(4.0e12, rel=1e-3) == H200.memory_bytes_per_s
    assert H200.prefill_speed_at(33) == pytest.approx(0.25)
    assert [H200.decode_speed_at(units) for units in (4, 8, 12, 132)] == pytest.approx([0.165, 0.33, 0.45, 1.0])
    assert H200.contention == Contention(1.15, 1.05, 1.3)


@pytest.mark.parametrize("name", device_names())
def test_each_fact_of_a_gpu_says_where_it_is_from(name: str) -> None:
    document = json.loads((files("tidelane.engine") / "data" / "gpus" / f"{name}.json").read_text())
    assert document["sources"].keys() == {
        "data_sheet",
        "granularity",
        "efficiency",
        "decode_speed",
        "prefill_speed",
        "contention",
        "launch_s",
    }
    assert all(isinstance(source, str) and len(source) > 20 for source in document["sources"].values())


def test_names_that_we_lack_are_answered_with_those_we_have() -> None:
    with pytest.raises(ValueError, match="'tpu' is not among the gpus that we know: a100, h100, h200, l40s, rtx4090"):
        device_facts("tpu")
    with pytest.raises(ValueError, match=r"'gpt-5' is not among the models that we know: llama-3\.1-70b, "):
        model_shape("gpt-5")


@given(st.integers(1, 64), st.floats(1e9, 2e10), st.floats(1e10, 5e11))
def test_a_cpu_gains_with_cores_until_memory_has_no_more(cores: int, of_core: float, of_all: float) -> None:
    facts = cpu_device(
        cores,
        16 * 10**9,
        linear_flops_per_core=5e10,
        attention_flops_per_core=2e10,
        memory_bytes_per_s=of_all,
        memory_bytes_per_s_of_core=of_core,
        launch_s=0.002,
        contention=Contention(),
    )
    for n in range(1, cores + 1):
        assert facts.prefill_speed_at(n) == pytest.approx(n / cores)
        assert facts.memory_bytes_per_s * facts.decode_speed_at(n) == pytest.approx(min(of_all, n * of_core))
    estimates = prior(model_shape("smollm2-135m"), facts, range(1, cores))
    assert estimates.seconds(Phase.PREFILL, cores, PROMPT) <= estimates.seconds(Phase.PREFILL, 1, PROMPT)


@pytest.mark.parametrize(
    ("curve", "says"),
    [
        ((), "must end at"),
        (((4, 0.5),), "must end at"),
        (((4, 0.5), (4, 0.6), (8, 1.0)), "rise"),
        (((4, 2.0), (8, 1.0)), "rise"),
    ],
)
def test_a_speed_curve_must_rise_to_the_whole_device(curve: tuple[tuple[int, float], ...], says: str) -> None:
    with pytest.raises(ValueError, match=f"tiny: a speed curve must {says}|tiny: a speed curve {says}"):
        DeviceFacts("tiny", 8, 1, 1.0, 1.0, 1.0, 1.0, curve, ((8, 1.0),), Contention(), 0.0)
