"""What a Lease must do for those who want it: run on the fake of the property tests, and on a real API server."""

from __future__ import annotations

import pytest

from tidelane.operator.errors import Conflict
from tidelane.operator.lease import Leases


class LeasesContract:
    async def test_there_is_none_until_one_is_created_and_only_one_is(self, leases: Leases) -> None:
        assert await leases.read() is None
        created = await leases.create("one", 15)
        assert (created.holder, created.duration_s, created.transitions) == ("one", 15, 0)
        with pytest.raises(Conflict):
            await leases.create("two", 15)
        assert await leases.read() == created

    async def test_only_the_version_that_was_read_is_replaced_and_a_write_makes_another(self, leases: Leases) -> None:
        created = await leases.create("one", 15)
        renewed = await leases.replace(created, "one", 15, 0)
        assert renewed.version != created.version
        with pytest.raises(Conflict):
            await leases.replace(created, "two", 20, 1)
        taken = await leases.replace(renewed, "two", 20, 1)
        assert (taken.holder, taken.duration_s, taken.transitions) == ("two", 20, 1)
        assert await leases.read() == taken

    async def test_one_that_is_given_back_has_no_holder(self, leases: Leases) -> None:
        await leases.replace(await leases.create("one", 15), "", 15, 0)
        found = await leases.read()
        assert found is not None
        assert found.holder == ""
