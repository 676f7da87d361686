"""What a device achieves, whole and in part: facts for priors, until a profile is measured on it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from tidelane.engine.estimation.estimates import Contention
from tidelane.engine.estimation.fields import Field
from tidelane.engine.estimation.shipped import names, read

SpeedCurve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Speeds are those achieved by the whole device, in flop/s and bytes/s; `units` are SMs of a GPU, cores of a CPU.

    The curves give (units, speed relative to the whole device): decode's is that of memory-bound work, prefill's that
    of arithmetic. They rise from (0, 0), which is implied, to (`units`, 1). `linear_flops_8bit` equals `linear_flops`
    where the device gains nothing from 8 bits. `launch_s` is paid once by each pass. Lanes have at least `min_units`,
    and a multiple of `unit_step`.
    """

    name: str
    units: int
    memory_bytes: int
    linear_flops: float
    linear_flops_8bit: float
    attention_flops: float
    memory_bytes_per_s: float
    decode_speed: SpeedCurve
    prefill_speed: SpeedCurve
    contention: Contention
    launch_s: float
    min_units: int = 1
    unit_step: int = 1

    def __post_init__(self) -> None:
        for curve in (self.decode_speed, self.prefill_speed):
            if not curve or curve[-1] != (self.units, 1.0):
                raise ValueError(f"{self.name}: a speed curve must end at ({self.units}, 1)")
            points = ((0, 0.0), *curve)
            if any(after[0] <= before[0] or after[1] < before[1] for before, after in zip(points, curve, strict=False)):
                raise ValueError(f"{self.name}: a speed curve must rise")

    def decode_speed_at(self, units: int) -> float:
        return self._speed(self.decode_speed, units)

    def prefill_speed_at(self, units: int) -> float:
        return self._speed(self.prefill_speed, units)

    def _speed(self, curve: SpeedCurve, units: int) -> float:
        """Straight between the points. Raises ValueError on units that the device does not have."""
        if not 1 <= units <= self.units:
            raise ValueError(f"{self.name} has no {units} units, but 1 to {self.units}")
        at = bisect_left(curve, units, key=lambda point: point[0])
        high, high_speed = curve[at]
        low, low_speed = curve[at - 1] if at else (0, 0.0)
        return low_speed + (high_speed - low_speed) * (units - low) / (high - low)


def cpu_device(
    cores: int,
    memory_bytes: int,
    *,
    linear_flops_per_core: float,
    attention_flops_per_core: float,
    memory_bytes_per_s: float,
    memory_bytes_per_s_of_core: float,
    launch_s: float,
    contention: Contention,
) -> DeviceFacts:
    """A CPU from a few measured constants: arithmetic goes by cores, bandwidth too until memory has no more."""
    one_core = min(1.0, memory_bytes_per_s_of_core / memory_bytes_per_s)
    return DeviceFacts(
        name="cpu",
        units=cores,
        memory_bytes=memory_bytes,
        linear_flops=linear_flops_per_core * cores,
        linear_flops_8bit=linear_flops_per_core * cores,
        attention_flops=attention_flops_per_core * cores,
        memory_bytes_per_s=min(memory_bytes_per_s, memory_bytes_per_s_of_core * cores),
        decode_speed=_saturating(cores, one_core),
        prefill_speed=((cores, 1.0),),
        contention=contention,
        launch_s=launch_s,
    )


def _saturating(cores: int, one_core: float) -> SpeedCurve:
    """By cores, if one reaches the share `one_core` of what memory gives to all."""
    most = min(1.0, one_core * cores)
    return (*((n, min(1.0, one_core * n / most)) for n in range(1, cores)), (cores, 1.0))


def device_facts(name: str) -> DeviceFacts:
    """Of a GPU that we have facts of. Raises ValueError, with the names there are, on any other."""
    return _facts(read("gpus", name))


def device_names() -> tuple[str, ...]:
    return names("gpus")


_PEAKS = frozenset({"tflops_16bit", "tflops_8bit", "memory_gb_per_s"})
_EFFICIENCIES = frozenset({"linear", "attention", "memory"})
_FACTS = frozenset(
    {
        "name",
        "units",
        "min_units",
        "unit_step",
        "memory_gb",
        "peak",
        "efficiency",
        "decode_speed",
        "prefill_speed",
        "contention",
        "launch_s",
        "sources",
    }
)


def _facts(file: Field) -> DeviceFacts:
    """What is achieved is the data sheet's dense peak times an efficiency; `sources` say where each number is from."""
    of = file.members(_FACTS)
    peak = of["peak"].members(_PEAKS)
    efficiency = of["efficiency"].members(_EFFICIENCIES)
    slowdowns = of["contention"].members(frozenset({"decode_slowdown", "prefill_slowdown", "guard"}))
    linear = efficiency["linear"].number() * 1e12
    return DeviceFacts(
        name=of["name"].text(),
        units=of["units"].integer(1),
        memory_bytes=of["memory_gb"].integer(1) * 10**9,
        linear_flops=peak["tflops_16bit"].number() * linear,
        linear_flops_8bit=peak["tflops_8bit"].number() * linear,
        attention_flops=peak["tflops_16bit"].number() * efficiency["attention"].number() * 1e12,
        memory_bytes_per_s=peak["memory_gb_per_s"].number() * efficiency["memory"].number() * 1e9,
        decode_speed=_curve(of["decode_speed"]),
        prefill_speed=_curve(of["prefill_speed"]),
        contention=Contention(**{name: each.number(1) for name, each in slowdowns.items()}),
        launch_s=of["launch_s"].number(),
        min_units=of["min_units"].integer(1),
        unit_step=of["unit_step"].integer(1),
    )


def _curve(at: Field) -> SpeedCurve:
    points = [point.elements() for point in at.elements()]
    if any(len(point) != 2 for point in points):
        raise at.wrong("must be a list of [units, speed]")
    return tuple((units.integer(1), speed.number()) for units, speed in points)
