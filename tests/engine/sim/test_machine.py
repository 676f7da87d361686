from __future__ import annotations

import pytest

from tidelane.engine.estimation.devices import device_facts
from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.estimation.passes import prefill_work
from tidelane.engine.estimation.shapes import model_shape
from tidelane.engine.sim.machine import colocated, in_pairs


def test_of_a_pair_each_is_the_whole_device_to_its_phase() -> None:
    """Prompts are ordered by what they take on `table.units`: it once seemed to be 0.71 of what they take."""
    shape = model_shape("llama-3.1-8b")
    one = colocated(shape, device_facts("h200"))
    two = in_pairs(one, shape)
    work = prefill_work(((0, 8000),))
    alone_s = one.believed.seconds(Phase.PREFILL, one.table.units, work)
    (row,) = two.table.splits
    assert two.believed.seconds(Phase.PREFILL, row.prefill_units, work) == pytest.approx(alone_s)
    assert two.believed.seconds(Phase.PREFILL, two.table.units, work) == pytest.approx(alone_s)
