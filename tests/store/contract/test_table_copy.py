"""All rows of a database arrive in the other kind of database, and the copy works like it."""

from contextlib import closing
from pathlib import Path

import pytest
from tests.contract.store_suite import (
    NOW,
    begin,
    make_charge,
    make_event,
    make_host,
    make_node,
    store_url,
    submit,
)

from cavvy.domain.accounts import Account, Project
from cavvy.domain.audit import AuditEntry
from cavvy.store.base import AtomicWrite, HashMismatch, SealedSecret, StoreUnusable
from cavvy.store.drivers import make_driver
from cavvy.store.sql import Store
from cavvy.store.table_copy import TableDigest, copy_rows, digest_rows, refuse_rows

ENTRY = AuditEntry(at=NOW, signed_in=True, action="POST /v1/jobs")
_SPOIL = """
CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS
'BEGIN NEW.amount = NEW.amount + 1; RETURN NEW; END';
CREATE TRIGGER spoil BEFORE INSERT ON charges FOR EACH ROW EXECUTE FUNCTION spoil()
"""


@pytest.fixture
def urls(tmp_path: Path) -> tuple[str, str, str]:
    (tmp_path / "back").mkdir()
    first, back = (store_url("sqlite", folder) for folder in (tmp_path, tmp_path / "back"))
    return first, store_url("postgres", tmp_path), back


async def fill(url: str) -> None:
    store = Store(url)
    await store.open()
    job = await submit(store, "j1")
    attempt = await begin(store, job)
    await store.commit(
        AtomicWrite(
            nodes=[make_node(attempt)],
            charges=[make_charge(attempt, 7)],
            events=[make_event(job, "tab \t, \\N, a line\nand é"), make_event(job, "")],
        )
    )
    await store.put_host(make_host(cpus=0.1))
    await store.put_secret(
        SealedSecret(project="p", name="S", sealed=bytes(range(256)), updated_at=NOW)
    )
    await store.add_account(Account(name="ada", created_at=NOW))
    # the child sorts before its parent
    await store.add_project(Project(name="zoo"), adopt=True)
    await store.add_project(Project(name="ant", parent="zoo"), adopt=True)
    await store.record(ENTRY)
    await store.close()


async def read_all(url: str) -> object:
    store = Store(url)
    await store.open()
    job = await store.find_job("p", "train")
    found = (
        await store.installation(),
        job,
        await store.attempts(job.id),
        [(each.id, each.text) for each in await store.events(job.id)],
        await store.charges(job.id),
        await store.hosts(),
        await store.secrets("p"),
        await store.projects(),
        await store.spent("p"),
    )
    await store.close()
    return found


async def prepare(url: str) -> None:
    store = Store(url)
    await store.open()
    await store.close()


def copy(source: str, target: str) -> dict[str, TableDigest]:
    with (
        closing(make_driver(source, journal="wal").connect()) as one,
        closing(make_driver(target, journal="wal").connect()) as two,
    ):
        refuse_rows(two)
        one.begin()
        two.begin()
        done = copy_rows(one, two)
        two.commit()
        one.rollback()
    return {each.table: each for each in done}


async def test_rows_arrive_in_postgresql_and_come_back(urls: tuple[str, str, str]) -> None:
    first, middle, back = urls
    await fill(first)
    await prepare(middle)
    await prepare(back)
    sent = copy(first, middle)
    assert {name for name, each in sent.items() if each.rows} >= {
        "meta", "jobs", "documents", "attempts", "nodes", "events", "charges", "hosts", "secrets",
        "accounts", "projects", "audit_log",
    }  # fmt: skip
    assert copy(middle, back) == sent
    known = await read_all(first)
    assert await read_all(middle) == known
    assert await read_all(back) == known


@pytest.mark.parametrize("restored", [True, False])
async def test_a_copy_may_pause_for_longer_than_other_transactions(
    urls: tuple[str, str, str], restored: bool
) -> None:
    first, middle, _ = urls
    await prepare(first)
    await prepare(middle)
    show = "SHOW idle_in_transaction_session_timeout"
    with (
        closing(make_driver(first, journal="wal").connect()) as local,
        closing(make_driver(middle, journal="wal").connect()) as shared,
    ):
        limit = shared.run(show).fetchone()
        assert limit != ("0",)
        local.begin()
        shared.begin()
        copy_rows(*((local, shared) if restored else (shared, local)))
        assert shared.run(show).fetchone() == ("0",)
        local.rollback()
        shared.rollback()
        assert shared.run(show).fetchone() == limit


async def test_numbers_continue_after_the_copied_ones(urls: tuple[str, str, str]) -> None:
    first, middle, _ = urls
    await fill(first)
    await prepare(middle)
    copy(first, middle)
    store = Store(middle)
    await store.open()
    before = [each.id for each in await store.events("j1")]
    await store.commit(AtomicWrite(events=[make_event(await store.job("j1"), "later")]))
    assert (await store.record(ENTRY)).number == 2
    assert [each.id for each in await store.events("j1")] == [*before, max(before) + 1]
    await store.close()


async def test_a_database_with_rows_is_refused(urls: tuple[str, str, str]) -> None:
    first, middle, _ = urls
    await fill(first)
    await fill(middle)
    with pytest.raises(StoreUnusable, match=r"has rows already \(jobs, "):
        copy(first, middle)


async def test_a_row_that_arrives_changed_is_noticed(urls: tuple[str, str, str]) -> None:
    import psycopg

    first, middle, _ = urls
    await fill(first)
    await prepare(middle)
    with psycopg.connect(middle.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(_SPOIL)
    with pytest.raises(
        HashMismatch, match=r"the copy of the table charges in .* differs from the original"
    ):
        copy(first, middle)
    with closing(make_driver(middle, journal="wal").connect()) as session:
        session.begin()
        filled = [each.table for each in digest_rows(session) if each.rows]
    assert filled == ["meta"]  # nothing of the transaction was written
