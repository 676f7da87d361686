"""Agents by DNS, with a resolver that says what the test wants."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import pytest

from tidelane.operator.discovery import Agents, resolve


class Names:
    """What a name leads to; one that it lacks cannot be resolved."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}

    async def __call__(self, host: str) -> Iterable[str]:
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.addresses[host]


async def test_every_address_of_a_name_is_an_agent_beside_fixed_ones() -> None:
    names = Names()
    names.addresses["agents.svc"] = ["10.0.0.1", "fd00::1", "10.0.0.1"]
    agents = Agents(["machine:7", "dns:agents.svc:50061"], names)
    assert await agents.look() == {"machine:7", "10.0.0.1:50061", "[fd00::1]:50061"}
    names.addresses["agents.svc"] = ["10.0.0.2"]
    assert await agents.look() == {"machine:7", "10.0.0.2:50061"}


async def test_a_name_that_cannot_be_resolved_leads_where_it_led() -> None:
    names = Names()
    agents = Agents(["dns:agents.svc:1"], names)
    assert await agents.look() == set()
    names.addresses["agents.svc"] = ["10.0.0.1"]
    assert await agents.look() == {"10.0.0.1:1"}
    del names.addresses["agents.svc"]
    assert await agents.look() == {"10.0.0.1:1"}


async def test_without_names_there_is_nothing_to_keep_looking_for() -> None:
    followed: list[Iterable[str]] = []
    await Agents(["machine:7"], Names()).keep_looking(followed.append)
    assert followed == []


@pytest.mark.parametrize("target", ["dns:", "dns:agents", "dns:agents:", "dns::1", "dns:agents:http"])
def test_a_name_needs_a_host_and_a_port(target: str) -> None:
    with pytest.raises(ValueError, match="say dns:HOST:PORT"):
        Agents([target])


async def test_the_system_resolver_answers_with_addresses() -> None:
    assert "127.0.0.1" in await resolve("127.0.0.1")
