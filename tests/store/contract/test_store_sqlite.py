"""What only a file can do: fill up, be locked, be damaged, be killed, be shared by two
processes.
"""

import asyncio
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.contract.store_suite import (
    NOW,
    begin,
    make_charge,
    make_event,
    make_host,
    make_job,
    make_node,
    store_url,
    submit,
)
from tests.store.ended_rows import copy_ended, weigh

from cavvy import settings
from cavvy.domain.jobs import JobPhase
from cavvy.domain.values import replace
from cavvy.store import migrate
from cavvy.store.base import (
    AtomicWrite,
    HashMismatch,
    RowNotFound,
    StaleVersion,
    StoreFull,
    StoreUnusable,
)
from cavvy.store.drivers import DatabaseSession, choose_journal, make_driver
from cavvy.store.ended_jobs import PART
from cavvy.store.open import open_store
from cavvy.store.sql import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cavvy.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[Store]:
    opened = Store(f"sqlite:///{path}", journal="wal")
    await opened.open()
    yield opened
    await opened.close()


async def run_on_writer(store: Store, *statements: str) -> None:
    """Set something on the one connection that writes."""
    for statement in statements:
        await store._write(lambda session, text=statement: session.run(text).fetchall())


async def test_the_file_is_private_and_has_its_journal(
    store: Store, path: Path, tmp_path: Path
) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    await submit(store, "j1")
    assert (tmp_path / "cavvy.db-wal").exists()
    other = Store(f"sqlite:///{tmp_path}/other.db", journal="delete")
    await other.open()
    await submit(other, "j1")
    await other.close()
    assert not (tmp_path / "other.db-wal").exists()
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


async def test_a_file_can_change_its_journal(path: Path) -> None:
    for journal in ("wal", "delete", "wal"):
        opened = open_store(f"sqlite:///{path}", journal=journal)
        await opened.open()
        await submit(opened, f"j-{journal}-{len((await opened.list_jobs(None)).jobs)}")
        await opened.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("SELECT COUNT(*) FROM jobs").fetchone() == (3,)


def test_the_journal_follows_the_file_system() -> None:
    mounts = "\n".join(
        [
            "/dev/sda1 / ext4 rw 0 0",
            "srv:/home /home nfs4 rw 0 0",
            "srv:/b /home/local\\040disk xfs rw 0 0",
            "x /mnt fuse.sshfs rw 0 0",
        ]
    )
    wanted = {
        "/var/db": "wal",
        "/home/ann/x.db": "delete",
        "/home/local disk/x.db": "wal",
        "/mnt/x": "delete",
        "/homes/x": "wal",
    }
    assert {path: choose_journal(Path(path), mounts) for path in wanted} == wanted
    assert choose_journal(Path("/x"), "") == "wal"


async def test_a_full_disk_writes_nothing(store: Store) -> None:
    job = await submit(store, "j1")
    attempt = await begin(store, job)
    pages = await store._read(lambda session: session.run("PRAGMA page_count").fetchall()[0][0])
    await run_on_writer(store, f"PRAGMA max_page_count={pages}")
    big = "x" * 50_000
    writes = [
        store.commit(AtomicWrite(jobs=[replace(job, reason=big)], nodes=[make_node(attempt)])),
        submit(store, "j2", name=big),
        store.commit(AtomicWrite(events=[make_event(job, big)])),
    ]
    with pytest.raises(StoreFull, match="free some disk space"):
        await writes[0]
    results = await asyncio.gather(*writes[1:], return_exceptions=True)
    assert [type(result) for result in results] == [StoreFull, StoreFull]
    assert await store.job("j1") == job
    assert await store.nodes(attempt.id) == []
    await run_on_writer(store, "PRAGMA max_page_count=100000")
    await store.commit(AtomicWrite(jobs=[replace(job, reason=big)], nodes=[make_node(attempt)]))
    assert (await store.job("j1")).reason == big


async def test_a_disk_without_space_to_open_the_database_is_reported_as_full(
    path: Path,
) -> None:
    """The limit refuses the shared-memory file, as a full disk does."""
    store = Store(f"sqlite:///{path}", journal="wal")
    await store.open()
    await store.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        again = Store(f"sqlite:///{path}", journal="wal")
        with pytest.raises(StoreFull, match="free some disk space"):
            await again.open()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await again.close()


@pytest.mark.system
def test_a_full_file_system_writes_nothing(tmp_path: Path) -> None:
    """On a real file system of 8 MiB, in a process of its own, which then goes on when there is
    room again.
    """
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path], capture_output=True
    ).returncode:
        pytest.skip(
            "cannot mount a small file system; to run this: be root outside of a restricted "
            "container"
        )
    try:
        done = subprocess.run(
            [sys.executable, "-c", _FILL, tmp_path], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["Full", "read", "written", "reopened"]
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


_FILL = """
import asyncio, os, sys
from tests.contract.store_suite import submit
from cavvy.store.base import StoreFull
from cavvy.store.sql import Store

async def main(folder):
    url = f"sqlite:///{folder}/cavvy.db"
    store = Store(url)
    await store.open()
    with open(f"{folder}/ballast", "wb") as ballast:
        ballast.write(b"x" * 1_000_000)
    acked = []
    try:
        for i in range(10_000):
            acked.append((await submit(store, f"j{i:05}", user="u" * 500)).id)
    except StoreFull as error:
        print("Full")
    for job_id in acked:
        await store.job(job_id)
    assert len((await store.list_jobs(None, limit=20_000)).jobs) == len(acked) > 20
    print("read")
    os.remove(f"{folder}/ballast")
    await submit(store, "later")
    print("written")
    await store.close()
    store = Store(url)
    await store.open()
    assert len((await store.list_jobs(None, limit=20_000)).jobs) == len(acked) + 1
    print("reopened")
    await store.close()

asyncio.run(main(sys.argv[1]))
"""


async def test_a_read_only_database_is_unusable(store: Store) -> None:
    await submit(store, "j1")
    await run_on_writer(store, "PRAGMA query_only=ON")
    with pytest.raises(StoreUnusable, match="read-only"):
        await submit(store, "j2")
    assert len((await store.list_jobs(None)).jobs) == 1


async def test_a_lock_that_stays_is_unusable(store: Store, path: Path) -> None:
    await run_on_writer(store, "PRAGMA busy_timeout=20")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnusable, match="locked by another process"):
            await submit(store, "j1")
        assert (await store.list_jobs(None)).jobs == []  # readers go on
    await submit(store, "j1")


def test_a_locked_database_is_reported_before_commands_stop_waiting_for_the_server() -> None:
    assert 1000 * settings.load({}).whole("server.start_timeout_s") > migrate._WAIT_MS


async def test_many_wait_for_one_lock_together(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_on_writer(store, "PRAGMA busy_timeout=100")
    begin_one, begun = DatabaseSession.begin, []

    def counted(session: DatabaseSession) -> None:
        begun.append(session)
        begin_one(session)

    monkeypatch.setattr(DatabaseSession, "begin", counted)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        results = await asyncio.gather(
            *(submit(store, f"j{i}") for i in range(20)), return_exceptions=True
        )
    assert {type(result) for result in results} == {StoreUnusable}
    assert len(begun) <= 3


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("sqlite:////nowhere/at/all/cavvy.db", "cannot write /nowhere"),
        ("sqlite://", "must name a file"),
        ("mysql://x/y", "expected memory:"),
        ("postgresql://nobody@127.0.0.1:1/none", "check that the database runs"),
    ],
)
async def test_what_cannot_be_opened_says_why(url: str, text: str) -> None:
    with pytest.raises(StoreUnusable, match=text):
        await open_store(url).open()


async def test_a_damaged_file_is_unusable(path: Path) -> None:
    path.write_bytes(b"this is no database at all, " * 100)
    with pytest.raises(StoreUnusable, match="damaged"):
        await open_store(f"sqlite:///{path}").open()


async def test_another_programs_database_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE songs (title TEXT)")
    with pytest.raises(StoreUnusable, match=r"another program.*songs"):
        await open_store(f"sqlite:///{path}").open()
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("songs",)]


async def test_a_store_that_is_not_open_says_so(path: Path) -> None:
    store = open_store(f"sqlite:///{path}")
    with pytest.raises(StoreUnusable, match="not open"):
        await store.job("x")
    await store.open()
    await store.close()
    with pytest.raises(StoreUnusable, match="closed"):
        await store.job("x")


async def test_a_bad_write_does_not_harm_those_beside_it(store: Store) -> None:
    job = await submit(store, "j0")
    results = await asyncio.gather(
        submit(store, "j1"),
        store.commit(AtomicWrite(jobs=[replace(job, exit_code=1 << 70)])),
        submit(store, "j2"),
        store._write(lambda session: session.rollback()),  # one that loses the whole transaction
        submit(store, "j3"),
        store.commit(AtomicWrite(jobs=[replace(job, version=9)])),
        store._write(lambda _: 1 // 0),
        submit(store, "j4"),
        return_exceptions=True,
    )
    kinds = [type(result).__name__ for result in results]
    assert (kinds[1], kinds[5], kinds[6]) == ("HashMismatch", "StaleVersion", "ZeroDivisionError")
    assert isinstance(results[1], HashMismatch)
    assert isinstance(results[5], StaleVersion)
    assert [j.id for j in (await store.list_jobs(None)).jobs] == ["j4", "j3", "j2", "j1", "j0"]
    assert await store.job("j0") == job


async def test_a_cancelled_caller_leaves_the_store_whole(store: Store) -> None:
    waiting = [asyncio.ensure_future(submit(store, f"j{i:02}")) for i in range(20)]
    await asyncio.sleep(0)
    for task in waiting[::2]:
        task.cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    stored = {job.id for job in (await store.list_jobs(None, limit=100)).jobs}
    assert {result.id for result in results if not isinstance(result, BaseException)} <= stored
    assert len(stored) == len({job.name for job in (await store.list_jobs(None, limit=100)).jobs})


async def test_two_stores_on_one_file_see_each_other(store: Store, path: Path) -> None:
    other = Store(f"sqlite:///{path}")
    await other.open()
    job = await submit(store, "j1")
    assert await other.job("j1") == job
    await asyncio.gather(
        *(submit(each, f"k{i}{j}") for i, each in enumerate((store, other)) for j in range(20))
    )
    assert len({j.name for j in (await other.list_jobs(None)).jobs}) == 41
    changed = replace(job, origin=replace(job.origin, commit="new"))
    await other.commit(AtomicWrite(jobs=[changed]))
    with pytest.raises(StaleVersion):
        await store.commit(AtomicWrite(jobs=[replace(job, reason="late")]))
    assert (await store.job("j1")).origin.commit == "new"  # not the one remembered
    assert await other.installation() == await store.installation()
    await other.close()


_WRITE = """
import asyncio, sys
from tests.contract.store_suite import submit
from cavvy.store.sql import Store

async def main():
    store = Store(sys.argv[1])
    await store.open()
    async def work(n):
        for i in range(100_000):
            print((await submit(store, f"j{n}-{i:06}")).id, flush=True)
    await asyncio.gather(*(work(n) for n in range(4)))

asyncio.run(main())
"""


async def test_what_was_answered_survives_a_kill(path: Path) -> None:
    url = store_url("sqlite-wal", path.parent)
    with subprocess.Popen(
        [sys.executable, "-c", _WRITE, url], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        answered = [process.stdout.readline().strip() for _ in range(200)]
        process.send_signal(signal.SIGKILL)
        answered += [line.strip() for line in process.stdout if line.endswith("\n")]
    store = Store(url)
    await store.open()
    for job_id in answered:
        assert (await store.job(job_id)).id == job_id
        assert len(await store.events(job_id)) == 1
    await store.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_a_free_name_takes_the_same_few_statements(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(300):
        await submit(store, f"j{i:03}")
    run, texts = DatabaseSession.run, []

    def counted(session: DatabaseSession, sql: str, values: "tuple[object, ...]" = ()) -> object:
        texts.append(sql)
        return run(session, sql, values)

    monkeypatch.setattr(DatabaseSession, "run", counted)
    assert (await submit(store, "later")).name == "train-301"
    # one asks whether the project is archived, and two whether an array has the name
    assert len(texts) <= 9


async def test_listings_walk_an_index(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """No listing reads a whole table or sorts: that is what keeps 100,000 jobs cheap."""
    await store.put_host(make_host())
    job = await submit(store, "j1")
    await store.commit(AtomicWrite(charges=[make_charge(await begin(store, job), 1)]))
    run, asked = DatabaseSession.run, []

    def noted(session: DatabaseSession, sql: str, values: "tuple[object, ...]" = ()) -> object:
        asked.append((sql, values))
        return run(session, sql, values)

    monkeypatch.setattr(DatabaseSession, "run", noted)
    some = {JobPhase.QUEUED, JobPhase.RUNNING}
    for project in ("p", None):
        await store.list_jobs(project)
        await store.list_jobs(project, cursor="j9")
        await store.list_jobs(project, {JobPhase.DONE}, cursor="j9")
        await store.list_jobs(project, some)
        await store.list_jobs(project, some, cursor="j9")
        await store.open_attempts(project)
    await store.waiting(NOW, [job.id])
    await store.queue.heads(NOW, 5)
    await store.queue.firsts(NOW)
    await store.queue.more(NOW, 5, arrays=["a"], projects=["p"], users_of=["p"])
    await store.queue.rows(NOW)
    await store.queue.held()
    await store.next_waiting(NOW)
    await store.unfinished()
    await store.gang_spent("g")
    await store.jobs_of_machine("p", "dev")
    await store.job("j1")
    await store.find_job("p", "train")
    await store.events("j1")
    await store.charges("j1")
    await store.spent("p")
    await store.snapshots()
    monkeypatch.undo()
    assert len(asked) >= 20
    for sql, values in asked:
        steps = await store._read(
            lambda s, q=sql, v=values: s.run(f"EXPLAIN QUERY PLAN {q}", v).fetchall()
        )
        plan = "\n".join(str(step[3]) for step in steps)
        scans = re.findall(r"SCAN (?!p\d|\()\w+(?! USING)(?:$|\n)", plan)
        assert not scans, f"{sql}\n{plan}"
        if "PARTITION BY" in sql:  # the queues of machines and pools, without all other queued jobs
            line = next((each for each in ("machine", "pool") if f"BY project, {each} " in sql), "")
            queue = f"jobs_{line}_turns" if line else "jobs_turns"
            assert queue in plan, f"{sql}\n{plan}"
            assert "FOR RIGHT PART" not in plan, f"{sql}\n{plan}"
        # these sort the rows that they return, or add up those of one project
        elif not any(each in sql for each in ("UNION", "FROM charges", "FROM ledger", "size")):
            assert "TEMP B-TREE" not in plan, f"{sql}\n{plan}"


async def test_a_later_count_of_ended_jobs_reads_as_much_of_many_as_of_few(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, tuple[object, ...]]] = []
    run = DatabaseSession.run

    def noted(session: DatabaseSession, sql: str, values: "tuple[object, ...]" = ()) -> object:
        asked.append((sql, tuple(values)))
        return run(session, sql, values)

    async def grow(first: int, last: int) -> tuple[int, int]:
        """Let so many jobs be there, count them, end one more, and count again. Return what was
        counted, and how many steps the second time took."""
        with closing(sqlite3.connect(path, timeout=60)) as database:
            with database:
                copy_ended(database, "SELECT id FROM jobs WHERE id = 'a'", first, last)
            store.ended_jobs.start_over()
            await store.ended_jobs.count()
            job = await store.job("late")
            phase = JobPhase.QUEUED if job.phase is JobPhase.DONE else JobPhase.DONE
            await store.commit(AtomicWrite(jobs=[replace(job, phase=phase)]))
            monkeypatch.setattr(DatabaseSession, "run", noted)
            found = await store.ended_jobs.count()
            monkeypatch.undo()
            steps = sum(weigh(database, sql, values)[1] for sql, values in asked)
            asked.clear()
        return sum(found.values()), steps

    await submit(store, "a", phase=JobPhase.DONE)
    await submit(store, "late", name="late")
    few, first = await grow(1, 2 * PART + 9)
    many, then = await grow(2 * PART + 10, 24 * PART + 9)
    assert (few, many) == (2 * PART + 11, 24 * PART + 10)
    assert abs(then - first) <= 20 + first // 10


def test_opening_imports_little(path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from cavvy.store.open import open_store\n"
        f"store = open_store('sqlite:///{path}')\n"
        "async def main():\n    await store.open()\n    await store.list_jobs(None)\n    await "
        "store.close()\n"
        "asyncio.run(main())\n"
        "print(*sorted(sys.modules))"
    )
    for _ in ("fresh", "existing"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        assert not set(done.stdout.split()) & {"sqlalchemy", "alembic", "psycopg", "cryptography"}


async def test_nothing_of_a_closed_store_stays(path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    store = Store(f"sqlite:///{path}", journal="wal")
    await store.open()
    await asyncio.gather(*(store.list_jobs(None) for _ in range(20)), submit(store, "j1"))
    await store.close()
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert [name for name in os.listdir(path.parent) if name.startswith("cavvy")] == ["cavvy.db"]


def test_jobs_are_read_by_the_columns_they_are_written(path: Path) -> None:
    """A guard for the person who adds a column: the update must set all but the three that never
    change.
    """
    from cavvy.store.migrate import bring_to_head
    from cavvy.store.rows import JOB_COLUMNS, job_values

    assert len(job_values(make_job("j1"), 1)) == len(JOB_COLUMNS)
    assert JOB_COLUMNS[:3] == ("id", "project", "name")
    with closing(make_driver(f"sqlite:///{path}", journal="wal").connect()) as session:
        bring_to_head(session, lambda: "install-1")
        columns = {
            name for (name,) in session.run("SELECT name FROM pragma_table_info('jobs')").fetchall()
        }
    assert {*JOB_COLUMNS, "place", "spent", "removed"} == columns


async def test_a_new_file_gets_smaller_after_rows_are_deleted(store: Store, path: Path) -> None:
    job = make_job("j1")
    texts = [make_event(job, "x" * 100_000) for _ in range(30)]
    await store.commit(AtomicWrite(jobs=[job], events=texts))

    def count_pages() -> int:
        with closing(sqlite3.connect(path)) as database:
            return int(database.execute("PRAGMA page_count").fetchone()[0])

    full = count_pages()
    await run_on_writer(store, "DELETE FROM events")
    assert count_pages() == full
    for _ in range(5):
        await store.retention.shrink(1)
    assert count_pages() < full / 4


async def test_brief_reads_see_every_write_and_wait_for_a_locked_file(
    store: Store, path: Path
) -> None:
    await submit(store, "j1")
    assert (await store.read_job("j1")).job.id == "j1"
    with pytest.raises(RowNotFound):
        await store.read_job("j2")
    await submit(store, "j2")
    assert (await store.read_job("j2")).job.id == "j2"

    tries = []

    def refuse_once(session: DatabaseSession) -> str:
        tries.append(session)
        if len(tries) == 1:
            raise sqlite3.OperationalError("database is locked")
        return str(session.run("SELECT 'read'").fetchall()[0][0])

    assert await store._read_brief(refuse_once) == "read"
    assert tries[0] is not tries[1]


async def test_many_brief_reads_leave_others_their_turn(store: Store) -> None:
    await submit(store, "j1")
    turns = 0

    async def work_beside() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(work_beside())
    for _ in range(500):
        await store.job("j1")
    assert turns >= 9
    beside.cancel()
