"""Messages: the generated code matches the .proto files; dataclasses go out and come back the same."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.slo import Slo
from tidelane.rpc.wire import (
    ExecutionMode,
    KvCacheSpec,
    LateRequests,
    ModelSpec,
    Objective,
    ReplicaRef,
    ReplicaSpec,
    ShareBounds,
    objective_from_wire,
    objective_to_wire,
    ref_from_wire,
    ref_to_wire,
    slo_from_wire,
    slo_to_wire,
    spec_from_wire,
    spec_to_wire,
)

ROOT = Path(__file__).parents[2]

seconds = st.floats(1e-6, 1e6)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
slos = st.builds(Slo, seconds, seconds, st.just(0.0) | seconds, st.integers(1, 99), max_token_gap_s=st.none() | seconds)
# 0, 0 on the wire means "the engine's own", so it is no pair of bounds.
some_bounds = st.tuples(st.floats(0, 1), st.floats(0.01, 1)).map(lambda two: ShareBounds(min(two), max(two)))
objectives = st.builds(
    Objective,
    slos,
    st.sampled_from(ExecutionMode),
    st.none() | some_bounds,
    st.integers(0, 2**62),
    st.sampled_from(LateRequests),
)
refs = st.builds(ReplicaRef, names, names, names, st.integers(0, 2**32 - 1))
models = st.builds(
    ModelSpec,
    st.sampled_from(["builtin://a", "hf://a/b", "pvc://a/b", "file:///a"]),
    names,
    st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
    st.none() | st.integers(1, 2**32 - 1),
)
caches = st.builds(
    KvCacheSpec,
    st.sampled_from(["auto", "bf16", "fp8", "int8", "int4"]),
    st.integers(0, 2**63),
    st.integers(0, 2**63),
    st.none() | seconds,
    st.booleans(),
)
specs = st.builds(
    ReplicaSpec,
    refs,
    st.integers(1, 2**62),
    models,
    objectives,
    caches,
    st.integers(1, 64),
    st.none() | st.integers(1, 65535),
)


@given(specs)
def test_a_spec_comes_back_the_same(spec: ReplicaSpec) -> None:
    assert spec_from_wire(spec_to_wire(spec)) == spec


@given(slos, objectives, refs)
def test_its_parts_do_too(slo: Slo, objective: Objective, ref: ReplicaRef) -> None:
    assert slo_from_wire(slo_to_wire(slo)) == slo
    assert objective_from_wire(objective_to_wire(objective)) == objective
    assert ref_from_wire(ref_to_wire(ref)) == ref


@pytest.mark.parametrize("percentile", [0, 100, 4_000_000_000])
def test_a_bad_percentile_is_named(percentile: int) -> None:
    message = slo_to_wire(Slo(1, 1))
    message.percentile = percentile
    with pytest.raises(ValueError, match=r"^there: percentile must lie between 1 and 99"):
        slo_from_wire(message, "there")


def test_generated_code_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/protos.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_check_sees_a_stale_and_a_stray_file(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/protos.py").write_bytes((ROOT / "tools/protos.py").read_bytes())
    rpc = tmp_path / "protos/tidelane/rpc"
    rpc.mkdir(parents=True)
    for path in (ROOT / "protos/tidelane/rpc").glob("*"):
        if path.is_file():
            (rpc / path.name).write_bytes(path.read_bytes())
    proto = rpc / "serving.proto"
    proto.write_text(proto.read_text().replace("uint32 pid = 10;", "uint32 pid = 10;\n  uint32 more = 1000;"))
    (rpc / "gone_pb2.py").touch()
    command = [sys.executable, str(tmp_path / "tools/protos.py")]
    done = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    told = {line.split()[0] for line in done.stderr.splitlines()}
    assert told == {f"protos/tidelane/rpc/{name}" for name in ("serving_pb2.py", "serving_pb2.pyi", "gone_pb2.py")}
    assert subprocess.run(command, capture_output=True, check=True).returncode == 0
    assert subprocess.run([*command, "--check"], check=False).returncode == 0


HEAVY = ("torch", "transformers", "numpy", "kopf", "kubernetes", "fastapi", "zmq", "msgspec")


def test_the_agent_and_the_messages_load_nothing_heavy() -> None:
    modules = [f"tidelane.agent.{path.stem}" for path in (ROOT / "agent/tidelane/agent").glob("*.py")]
    modules += ["tidelane.cli.agent", "tidelane.rpc.wire"]
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m.removesuffix('.__init__'))\n"
    code += f"print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []


def test_showing_the_commands_help_loads_no_grpc() -> None:
    code = "import sys, tidelane.cli.agent; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
