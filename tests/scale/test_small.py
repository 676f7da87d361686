"""The scale test in a small form: nothing is written while nothing changes, and no replica moves without a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.harness import Binaries, Cluster
from scale.report import Aims, missed
from scale.scenario import Size, run

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


async def test_twenty_agents_and_fifty_services(binaries: Binaries, tmp_path: Path) -> None:
    size = Size(agents=20, services=50, quiet_s=15.0, move_after_s=8.0, load_s=0.2, limit_s=120.0)
    with Cluster(tmp_path / "cluster", binaries, audit_reads=True) as cluster:
        outcome = await run(size, cluster, tmp_path)
    assert missed(outcome, Aims()) == []
    assert outcome.phase("agents vanish").figures["services_hit"] > 0
    assert outcome.phase("change all").total_requests <= 2 * size.services
