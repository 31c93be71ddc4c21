"""What listeners of capabilities do in the core's transactions, in every store."""

from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.contract.store_suite import NOW, make_event, make_job, submit

from cavvy.domain.events import Announcement
from cavvy.frame.faults import forget_faults, list_faults
from cavvy.store import announcements
from cavvy.store.announcements import Happened, Listener
from cavvy.store.base import AtomicWrite, StaleVersion
from cavvy.store.drivers import DatabaseSession
from cavvy.store.sql import Store


def write_half(session: DatabaseSession, happened: Sequence[Happened]) -> None:
    session.run("INSERT INTO heard (text) VALUES (?)", ("half",))
    raise KeyError("a row that it does not know")


def write_wrong(session: DatabaseSession, happened: Sequence[Happened]) -> None:
    session.run("INSERT INTO heard (text) VALUES (?)", ("half",))
    session.run("INSERT INTO nothing_such (text) VALUES (?)", ("x",))


def write_wrong_later(session: DatabaseSession, happened: Sequence[Happened]) -> None:
    session.run_later("INSERT INTO heard (text) VALUES (?)", ("half",))
    session.run_later("INSERT INTO nothing_such (text) VALUES (?)", ("x",))


def ask_for_more_rows(session: DatabaseSession, happened: Sequence[Happened]) -> None:
    session.run("INSERT INTO heard (text) VALUES (?)", ("half",))
    session.run_later("DELETE FROM heard WHERE text = ?", ("none",), StaleVersion("none is there"))


def hide_its_fault(session: DatabaseSession, happened: Sequence[Happened]) -> None:
    session.run("INSERT INTO heard (text) VALUES (?)", ("half",))
    try:
        session.run("INSERT INTO nothing_such (text) VALUES (?)", ("x",))
    except Exception:  # noqa: BLE001 - each driver has errors of its own
        raise ValueError("it says something else") from None


def read_nothing(session: DatabaseSession, happened: Sequence[Happened]) -> None:
    raise ZeroDivisionError


def write_well(session: DatabaseSession, happened: Sequence[Happened]) -> None:
    for _ in happened:
        session.run_later("INSERT INTO heard (text) VALUES (?)", ("whole",))


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes functions the only listeners."""
    forget_faults()

    def use(*listeners: Listener) -> None:
        found = [("reminders", each) for each in listeners]
        monkeypatch.setattr(announcements, "_list_listeners", lambda: found)

    yield use
    forget_faults()


async def list_heard(store: Store) -> list[str]:
    read, _ = store.database
    rows = await read(lambda session: session.run("SELECT text FROM heard").fetchall())
    return [row[0] for row in rows]


async def make_table(store: Store) -> None:
    _, write = store.database
    await write(lambda session: session.run("CREATE TABLE heard (text TEXT NOT NULL)"))


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (write_half, "KeyError: 'a row that it does not know'"),
        (write_wrong, "nothing_such"),
        (write_wrong_later, "nothing_such"),
        (ask_for_more_rows, "StaleVersion: none is there"),
        (hide_its_fault, "ValueError: it says something else"),
        (read_nothing, "ZeroDivisionError"),
    ],
)
async def test_a_broken_listener_harms_nothing_else(
    store: Store, listen: Callable[..., None], broken: Listener, why: str
) -> None:
    await make_table(store)
    listen(write_well, broken, write_well)
    job = await submit(store, "j1")
    await store.commit(AtomicWrite(events=[make_event(job, "and more")]))
    assert [job.id for job in (await store.list_jobs(None)).jobs] == ["j1"]
    texts = [event.text for event in await store.events(job.id)]
    assert texts[-1:] == ["and more"]
    assert await list_heard(store) == ["whole"] * 2 * len(texts)
    [fault] = list_faults()
    assert fault.startswith(
        f"reminders: cannot learn what happens ({__name__}:{broken.__name__}): "
    )
    assert why in fault


async def test_an_announcement_of_a_broken_listener_alone(
    store: Store, listen: Callable[..., None]
) -> None:
    await make_table(store)
    listen(write_wrong, write_well)
    await store.announce(Announcement(event="budget", project="default", text="t", at=NOW))
    assert await list_heard(store) == ["whole"]


async def test_what_fails_before_a_listener_is_no_fault_of_the_listener(
    store: Store, listen: Callable[..., None]
) -> None:
    await make_table(store)
    job = await submit(store, "j1")
    listen(write_well)
    _, write = store.database

    def work(session: DatabaseSession) -> None:
        changed = StaleVersion("someone else was here")
        session.run_later("UPDATE jobs SET spent = 0 WHERE id = ?", ("none",), changed)
        announcements.tell(session, [make_event(make_job("j2"), "t")])

    with pytest.raises(StaleVersion, match="someone else"):
        await write(work)
    assert await list_heard(store) == []
    assert list_faults() == []
    assert (await store.job(job.id)).id == "j1"
