"""Documents of providers: written by one server at a time, seen by all, apart from each other."""

import asyncio

from cavvy.domain.gangs import ProviderDocument
from cavvy.domain.values import replace
from cavvy.store.sql import Store

GANG = ProviderDocument(collection="gangs", name="rm-1", body='{"note":"\\u0000 é"}')


async def test_a_document_is_inserted_once_and_read_back(store: Store) -> None:
    assert await store.swap_provider_document("aws", GANG)
    assert not await store.swap_provider_document("aws", replace(GANG, body="{}"))
    assert list(await store.provider_documents("aws", "gangs")) == [GANG]


async def test_a_document_changes_from_the_version_that_the_writer_read(store: Store) -> None:
    await store.swap_provider_document("aws", GANG)
    second = replace(GANG, body="{}", version=2)
    assert await store.swap_provider_document("aws", second)
    assert not await store.swap_provider_document("aws", replace(second, body="[]"))
    assert not await store.swap_provider_document("aws", second, delete=True)
    assert list(await store.provider_documents("aws", "gangs", "rm-1")) == [second]
    assert await store.swap_provider_document("aws", replace(GANG, version=3), delete=True)
    assert list(await store.provider_documents("aws", "gangs")) == []


async def test_a_missing_document_can_be_neither_changed_nor_deleted(store: Store) -> None:
    assert not await store.swap_provider_document("aws", replace(GANG, version=2))
    assert not await store.swap_provider_document("aws", replace(GANG, version=2), delete=True)


async def test_providers_and_collections_are_apart_and_names_are_sorted(store: Store) -> None:
    others = [replace(GANG, name=name) for name in ("b", "B", "a")]
    for each in (*others, replace(GANG, collection="ended")):
        assert await store.swap_provider_document("aws", each)
    assert await store.swap_provider_document("ray", GANG)
    assert [each.name for each in await store.provider_documents("aws", "gangs")] == ["B", "a", "b"]
    assert len(await store.provider_documents("aws", "ended")) == 1
    assert list(await store.provider_documents("aws", "gangs", "rm-1")) == []
    assert list(await store.provider_documents("ray", "gangs")) == [GANG]


async def test_of_many_writers_at_once_one_wins(store: Store) -> None:
    bodies = [replace(GANG, body=f"{number}") for number in range(8)]
    won = await asyncio.gather(*(store.swap_provider_document("aws", each) for each in bodies))
    assert won.count(True) == 1
    assert list(await store.provider_documents("aws", "gangs")) == [bodies[won.index(True)]]
