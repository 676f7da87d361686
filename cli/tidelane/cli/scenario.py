"""What `simulate` and `plan` are told alike: a trace, a model, a device, targets and policies."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format

from tidelane.cli.targets import EXAMPLE, BadOption, duration_s, parse_slo
from tidelane.cli.traces import FORMAT_HELP, replayed
from tidelane.engine.bench.traffic import Traffic
from tidelane.engine.estimation.devices import device_facts, device_names
from tidelane.engine.estimation.fields import parse
from tidelane.engine.estimation.profile import read_profile
from tidelane.engine.estimation.shapes import ModelShape, model_names, model_shape
from tidelane.engine.machine_report import MachineReport
from tidelane.engine.scheduling.policies import OrderName
from tidelane.engine.sim.contestants import POLICIES
from tidelane.engine.sim.machine import Machine, as_profiled, colocated, in_blocks_of, in_pairs, with_tiers
from tidelane.engine.sim.reported import reported
from tidelane.engine.sim.scene import Scene
from tidelane.engine.sim.synthetic import TooLittleSeen, synthetic
from tidelane.engine.sim.tiers import DISK_BYTES_PER_S, HOST_BYTES_PER_S, TierSizes
from tidelane.engine.workload import Sketch
from tidelane.operator.quantities import parse_memory
from tidelane.rpc import serving_pb2
from tidelane.rpc.wire import Workload, workload_from_wire

# Enough for the tail that a target at p99 is about.
_OF_SKETCH: Final = 2000


@dataclass(frozen=True, slots=True)
class Scenario:
    """`notes` are what was done to the trace and what the times are from."""

    scene: Scene
    trace: str
    model: str
    device: str
    notes: tuple[str, ...]


def add_scenario_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="requests to replay: arrivals and lengths")
    add("--sketch", type=Path, metavar="FILE", help="instead: what traffic is like, as `tidelane sketch` prints it")
    add("--format", metavar="FORMAT", help=FORMAT_HELP)
    add("--limit", metavar="N", help=f"only the first N requests of the trace; N made of the sketch ({_OF_SKETCH})")
    add("--model", metavar="MODEL", help=f"{', '.join(model_names())}, or a model's config.json")
    add("--gpu", metavar="GPU", help=f"{', '.join(device_names())}: step times by its data sheet, unless --profile")
    add("--profile", type=Path, metavar="FILE", help="step times as `tidelane profile` measured them")
    add("--kv-tokens", metavar="N", help="tokens that the KV cache holds; with --profile and without --gpu")
    add("--kv-host-memory", metavar="SIZE", help="host memory of each engine for KV, such as 256Gi (none)")
    add("--kv-disk-memory", metavar="SIZE", help="disk of each engine for KV that has no room there (none)")
    add("--kv-prefetch", action="store_const", const=True, help="bring KV up before a conversation should go on")
    add("--kv-host-rate", metavar="GB/S", help=f"between device and host memory, each way ({HOST_BYTES_PER_S / 1e9:g})")
    add("--kv-disk-rate", metavar="GB/S", help=f"between host memory and disk, each way ({DISK_BYTES_PER_S / 1e9:g})")
    add(
        "--slo",
        metavar="TARGETS",
        help=f"{EXAMPLE}: time to first token, what each 1,000 input tokens add to it, time "
        "per output token; and maxTokenGap, if wanted",
    )
    add("--overhead", default="0ms", metavar="TIME", help="what each launch costs the host (%(default)s)")
    add("--seed", default="0", metavar="N", help="of arrivals within Mooncake's ticks (%(default)s)")
    add("--processes", metavar="N", help="simulate on N cores (all)")


def scenario(args: argparse.Namespace) -> Scenario:
    """Raises ValueError or OSError with what to change."""
    missing = [f"--{name}" for name in ("model", "slo") if getattr(args, name) is None]
    workload = None if args.sketch is None else read_sketch(args.sketch)
    if workload is None and args.trace is None:
        missing.insert(0, "--trace")
    if args.gpu is None and args.profile is None and (workload is None or workload.machine is None):
        missing.append("--gpu")
    if missing:
        raise BadOption(f"{', '.join(missing)}: missing, add (--help tells what each takes)")
    slo = parse_slo(args.slo)
    seed = whole_number("--seed", args.seed)
    traffic, notes = _traffic(args, seed) if workload is None else _made(args, workload.sketch, seed)
    shape = _shape(_needed(args, "model"))
    one, device, times_from = _machine(args, shape, None if workload is None else workload.machine)
    if workload is not None:
        one = in_blocks_of(one, traffic.hashed_tokens)
    sizes = _tier_sizes(args)
    if sizes is not None:
        one = with_tiers(one, shape, sizes)
    return Scenario(
        Scene(traffic, one, in_pairs(one, shape), slo, seed),
        (args.trace or args.sketch).name,
        args.model,
        device,
        (*notes, times_from),
    )


def machine(args: argparse.Namespace) -> Machine:
    """The one device alone. Raises ValueError or OSError with what to change."""
    return _machine(args, _shape(_needed(args, "model")))[0]


def processes(args: argparse.Namespace) -> int:
    if args.processes is None:
        return len(os.sched_getaffinity(0))
    return whole_number("--processes", args.processes, at_least=1)


def parse_policies(text: str) -> tuple[str, ...]:
    return _choices("--policies", text, POLICIES)


def parse_orders(text: str) -> tuple[OrderName, ...]:
    return tuple(OrderName(name) for name in _choices("--order", text, tuple(OrderName)))


def number(option: str, text: str, above: float = 0.0) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > above and math.isfinite(value)):
        raise BadOption(f"{option}: {text!r} must be a number above {above:g}")
    return value


def whole_number(option: str, text: str, at_least: int = 0) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= at_least):
        raise BadOption(f"{option}: {text!r} must be a whole number, {at_least} or more")
    return int(text)


def _traffic(args: argparse.Namespace, seed: int) -> tuple[Traffic, tuple[str, ...]]:
    limit = None if args.limit is None else whole_number("--limit", args.limit, at_least=1)
    return replayed(_needed(args, "trace"), args.format, limit, seed)


def _made(args: argparse.Namespace, sketch: Sketch, seed: int) -> tuple[Traffic, tuple[str, ...]]:
    if args.trace is not None or args.format is not None:
        raise BadOption("--sketch: stands for a trace: leave out --trace and --format, or --sketch")
    requests = _OF_SKETCH if args.limit is None else whole_number("--limit", args.limit, at_least=1)
    try:
        traffic = synthetic(sketch, requests, seed)
    except TooLittleSeen as error:
        raise BadOption(f"--sketch: {args.sketch}: {error} in it") from error
    note = (
        f"Requests are made up, like the {sketch.requests} of the sketch: {sketch.rate_rps:.3g} a second, burstiness "
        f"{sketch.burstiness:.2g}, {sketch.prompts.mean:.0f} tokens in ({sketch.reused.mean:.0f} reused) and "
        f"{sketch.outputs.mean:.0f} out in the mean."
    )
    return traffic, (note,)


def read_sketch(path: Path) -> Workload:
    """Raises BadOption if it is none of ours, or cannot be read."""
    message = serving_pb2.Workload()
    try:
        json_format.Parse(path.read_text(encoding="utf-8"), message)
        return workload_from_wire(message)
    except OSError as error:
        raise BadOption(f"--sketch: {error}") from error
    except (json_format.ParseError, ValueError) as error:
        raise BadOption(f"--sketch: {path}: {error}: give a file that `tidelane sketch` printed") from error


def _shape(model: str) -> ModelShape:
    if model in model_names():
        return model_shape(model)
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise BadOption(f"--model: {model!r} is neither a config.json nor one of {', '.join(model_names())}")
    config = parse(str(path), path.read_text(encoding="utf-8"))
    return ModelShape.from_config({name: each.value for name, each in config.items()}, str(path))


def _machine(
    args: argparse.Namespace, shape: ModelShape, report: MachineReport | None = None
) -> tuple[Machine, str, str]:
    """(one device, its name, where its times are from)."""
    overhead_s = duration_s("--overhead", args.overhead)
    profile = None if args.profile is None else read_profile(args.profile)
    if profile is not None and profile.key.layers != shape.layers:
        raise BadOption(
            f"--profile: is of a model of {profile.key.layers} layers, {args.model} has {shape.layers}: "
            "give the --model that was measured"
        )
    if args.gpu is None and profile is None and report is not None:
        if report.layers != shape.layers:
            raise BadOption(
                f"--sketch: is of a model of {report.layers} layers, {args.model} has {shape.layers}: "
                "give the --model that was served, or a --gpu"
            )
        one = replace(reported(report), overhead_s=overhead_s)
        return one, report.device, f"Step times are those that the engine on {report.device} had found."
    if args.gpu is None:
        if profile is None or args.kv_tokens is None:
            raise BadOption("--gpu is missing: name one, or give --profile and --kv-tokens")
        kv_tokens = whole_number("--kv-tokens", args.kv_tokens, at_least=1)
        measured = f"Step times are those measured on {profile.key.device} ({profile.measured})."
        return as_profiled(profile, kv_tokens, overhead_s=overhead_s), profile.key.device, measured
    if args.kv_tokens is not None:
        raise BadOption("--kv-tokens: is known of a GPU: leave it out, or --gpu")
    device = device_facts(args.gpu)
    if profile is None:
        return colocated(shape, device, overhead_s=overhead_s), device.name, "Step times are a prior, from data sheets."
    if profile.key.units != device.units:
        raise BadOption(f"--profile: is of {profile.key.units} units, {device.name} has {device.units}: give its --gpu")
    one = colocated(shape, device, profile=profile.estimates(), overhead_s=overhead_s)
    return one, device.name, f"Step times are those measured on {profile.key.device} ({profile.measured})."


_NEEDS = (
    ("disk_memory", "host_memory"),
    ("prefetch", "host_memory"),
    ("host_rate", "host_memory"),
    ("disk_rate", "disk_memory"),
)


def _tier_sizes(args: argparse.Namespace) -> TierSizes | None:
    given = {name: value for name, value in vars(args).items() if name.startswith("kv_") and value is not None}
    for name, needed in _NEEDS:
        if f"kv_{name}" in given and f"kv_{needed}" not in given:
            option, other = (f"--kv-{each.replace('_', '-')}" for each in (name, needed))
            raise BadOption(f"{option}: has no effect without {other}: add it, or leave this out")
    if "kv_host_memory" not in given:
        return None
    return TierSizes(
        host_bytes=_bytes("--kv-host-memory", given["kv_host_memory"]),
        disk_bytes=_bytes("--kv-disk-memory", given.get("kv_disk_memory", "0")),
        host_bytes_per_s=_rate("--kv-host-rate", given.get("kv_host_rate"), HOST_BYTES_PER_S),
        disk_bytes_per_s=_rate("--kv-disk-rate", given.get("kv_disk_rate"), DISK_BYTES_PER_S),
        prefetch=given.get("kv_prefetch", False),
    )


def _rate(option: str, text: str | None, default_bytes_per_s: float) -> float:
    return default_bytes_per_s if text is None else number(option, text) * 1e9


def _bytes(option: str, text: str) -> int:
    try:
        return parse_memory(text)
    except ValueError as error:
        raise BadOption(f"{option}: {error}") from None


def _needed(args: argparse.Namespace, name: str) -> Any:
    value = getattr(args, name)
    if value is None:
        raise BadOption(f"--{name} is missing: add it (--help tells what it takes)")
    return value


def _choices(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(text.split(",")))
    for name in chosen:
        if name not in known:
            raise BadOption(f"{option}: {name!r} is none of {', '.join(known)}")
    return chosen
