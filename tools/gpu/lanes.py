"""What the device does: its speeds whole and by lane, whether lanes are disjoint, what moving the border costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from tools.gpu.report import Finding, Report

from tidelane.engine.lanes.green import StreamLanes, open_lanes

SIDE = 8192  # of the matrices
SMALL_SIDE = 4096
COPIED_BYTES = 4 << 30
SWITCHES = 500
# A neighbour on other SMs costs a matrix product some bandwidth and clock, not the half that sharing SMs costs.
MOST_SLOWDOWN = 1.3


def main() -> None:
    report = Report.from_arguments()
    device = torch.device("cuda:0")
    opened: list[StreamLanes] = []

    def opening(_: float) -> Finding:
        lanes = open_lanes(device)
        opened.append(lanes)
        facts = torch.cuda.get_device_properties(device)
        rows = [(row.decode_units, row.prefill_units) for row in lanes.table.splits]
        kind = "green contexts" if lanes.disjoint else "PLAIN STREAMS"
        data = {
            "device": facts.name,
            "capability": [facts.major, facts.minor],
            "sms": lanes.table.units,
            "memory_bytes": facts.total_memory,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "rows": rows,
            "disjoint": lanes.disjoint,
        }
        return Finding(f"{facts.name}, torch {torch.__version__}: {kind} {rows}", lanes.disjoint, data)

    report.check("lanes: opened", 30, opening)
    if not opened:
        return
    lanes = opened[0]
    report.check("lanes: the SMs they run on", 20, partial(sms, lanes, device))
    report.check("device: speeds, whole and by lane", 25, partial(speeds, lanes, device))
    report.check("lanes: interference", 15, partial(interference, lanes, device))
    report.check("lanes: cost of a switch", 10, partial(switch, lanes, device))
    torch.cuda.synchronize()
    lanes.close()


def sms(lanes: StreamLanes, device: torch.device, _until_s: float) -> Finding:
    """Asked of the hardware: each lane's SMs, and that lanes which fit the device together share none."""
    from tools.gpu.smid import sms_of

    decode = {n: sms_of(stream, device) for n, stream in lanes.decode_lanes.items()}
    prefill = {n: sms_of(stream, device) for n, stream in lanes.prefill_lanes.items()}
    wrong = [f"{n} SMs ran on {len(found)}" for n, found in (*decode.items(), *prefill.items()) if len(found) != n]
    shared = [
        f"{d}+{p} share {len(decode[d] & prefill[p])}"
        for d in decode
        for p in prefill
        if d + p <= lanes.table.units and decode[d] & prefill[p]
    ]
    said = "each on as many as it should, and none shared" if not wrong + shared else "; ".join(wrong + shared)
    data = {"decode": {n: sorted(s) for n, s in decode.items()}, "prefill": {n: sorted(s) for n, s in prefill.items()}}
    return Finding(said[:300], not wrong and not shared, data)


def speeds(lanes: StreamLanes, device: torch.device, until_s: float) -> Finding:
    """Of a large matrix product and of reading memory; by lane they are the curves of data/gpus."""
    left, right = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(COPIED_BYTES // 2, device=device, dtype=torch.bfloat16).normal_()
    target = torch.empty_like(source)
    thin = torch.randn(16, SIDE, device=device, dtype=torch.bfloat16)
    tall = [torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(8)]

    def gemv() -> None:
        """What decode is made of: 16 rows through matrices of 128 MiB each."""
        for each in tall:
            thin @ each

    whole = lanes.whole
    matmul = 2 * SIDE**3 / timed(lambda: left @ right, whole)
    copy = 2 * COPIED_BYTES / timed(lambda: target.copy_(source), whole)
    read_bytes = sum(each.nbytes for each in tall)
    read = read_bytes / timed(gemv, whole)
    by_lane: dict[str, dict[int, float]] = {"matmul": {}, "read": {}}
    streams = {**lanes.decode_lanes, **lanes.prefill_lanes}
    for units, stream in sorted(streams.items()):
        if time.monotonic() > until_s:
            break
        by_lane["read"][units] = read_bytes / timed(gemv, stream, 3) / read
        by_lane["matmul"][units] = 2 * SIDE**3 / timed(lambda: left @ right, stream, 3) / matmul
    data = {"matmul_flops": matmul, "copy_bytes_s": copy, "read_bytes_s": read, "relative": by_lane}
    few = {n: round(share, 2) for n, share in list(by_lane["read"].items())[:5]}
    said = f"matmul {matmul / 1e12:.0f} TFLOP/s, copy {copy / 1e12:.2f} TB/s, weights read at {read / 1e12:.2f} TB/s"
    return Finding(f"{said}; read by SMs {few}", None, data)


def interference(lanes: StreamLanes, device: torch.device, _until_s: float) -> Finding:
    """How much slower a product gets on prefill's lane while decode's lane does the same, and on plain streams."""
    row = lanes.table.splits[len(lanes.table.splits) // 2]
    mine = [torch.randn(SMALL_SIDE, SMALL_SIDE, device=device, dtype=torch.bfloat16) for _ in range(2)]
    theirs = [torch.randn(SMALL_SIDE, SMALL_SIDE, device=device, dtype=torch.bfloat16) for _ in range(2)]

    def slowdown(here: torch.cuda.Stream, there: torch.cuda.Stream) -> float:
        alone = timed(lambda: mine[0] @ mine[1], here, 20)
        torch.cuda.synchronize()
        with torch.cuda.stream(there):
            for _ in range(200):
                theirs[0] @ theirs[1]
        beside = timed(lambda: mine[0] @ mine[1], here, 20)
        torch.cuda.synchronize()
        return beside / alone

    ours = slowdown(lanes.prefill(row.prefill_units), lanes.decode(row.decode_units))
    plain = slowdown(*(torch.cuda.Stream(device) for _ in range(2)))  # type: ignore[no-untyped-call]
    said = f"beside a product on the other lane {ours:.2f} times as long; on plain streams {plain:.2f}"
    return Finding(said, ours <= MOST_SLOWDOWN, {"lanes": ours, "plain": plain, "row": [row.decode_units]})


def switch(lanes: StreamLanes, device: torch.device, _until_s: float) -> Finding:
    """A chain of small kernels that changes lanes at each, by events, against the same chain on one lane."""
    row = lanes.table.splits[0]
    streams = (lanes.prefill(row.prefill_units), lanes.decode(row.decode_units))
    number = torch.zeros(1024, device=device)

    def chain(order: tuple[torch.cuda.Stream, ...]) -> float:
        torch.cuda.synchronize()
        begun_s = time.monotonic()
        before: torch.cuda.Stream | None = None
        for turn in range(SWITCHES):
            stream = order[turn % len(order)]
            if before is not None and before is not stream:
                stream.wait_stream(before)
            with torch.cuda.stream(stream):
                number.add_(1)
            before = stream
        torch.cuda.synchronize()
        return time.monotonic() - begun_s

    for order in (streams[:1], streams):
        chain(order)
    one, two = (median(chain(order) for _ in range(5)) for order in (streams[:1], streams))
    micros = (two - one) / SWITCHES * 1e6
    return Finding(f"{micros:.1f} us each (host and device)", micros < 100, {"us": micros})


def timed(work: Callable[[], object], stream: torch.cuda.Stream, times: int = 10) -> float:
    """Seconds of one `work` on `stream`: the median, after one to warm up."""
    seconds = []
    with torch.cuda.stream(stream):
        work()
        for _ in range(times):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begun.record(stream)
            work()
            ended.record(stream)
            seconds.append((begun, ended))
        stream.synchronize()
    return median(float(begun.elapsed_time(ended)) / 1000 for begun, ended in seconds)


if __name__ == "__main__":
    main()
