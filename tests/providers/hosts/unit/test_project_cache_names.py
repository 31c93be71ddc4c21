"""On clusters with one account, each project has its own cache, and its name cannot be guessed."""

import asyncio
from typing import Any, cast

from tests.records import make_gang_spec

from cavvy.providers.base import AgentEndpoint, GangSpec
from cavvy.providers.project_caches import ProjectCaches
from cavvy.providers.state import MemoryProviderState


def gang(project: str) -> GangSpec:
    return make_gang_spec(
        cast(Any, None),
        name="g",
        agent_endpoint=AgentEndpoint(address="", token=""),
        labels={"project": project, "cache": "tag of a user"},
    )


async def names(*caches: ProjectCaches) -> list[str]:
    return [await each.name(gang(project)) for each in caches for project in ("pa", "pb")]


def test_each_project_has_its_own_name_on_every_server_of_the_installation() -> None:
    state = MemoryProviderState()
    first, second = ProjectCaches(state), ProjectCaches(state)
    found = asyncio.run(names(first, second, ProjectCaches(MemoryProviderState())))
    assert found[:2] == found[2:4]
    assert len(set(found)) == 4
    assert not any("pa" in each or "/" in each for each in found)


def test_two_servers_that_start_at_once_agree() -> None:
    state = MemoryProviderState()

    async def both() -> set[str]:
        caches = [ProjectCaches(state) for _ in range(4)]
        return set(await asyncio.gather(*(each.name(gang("pa")) for each in caches)))

    assert len(asyncio.run(both())) == 1
