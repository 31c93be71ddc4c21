"""The tables of capabilities: made, upgraded, kept while their capability is left out."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from cavvy.frame.capability import Capability, OwnTables
from cavvy.store import migrate, own_tables, table_copy
from cavvy.store.base import StoreUnusable
from cavvy.store.drivers import DatabaseDriver, DatabaseSession, make_driver
from cavvy.store.own_tables import OwnMigrations, list_left_out, read_stated

FIRST = "CREATE TABLE hens (name TEXT NOT NULL);\n"
SECOND = "ALTER TABLE hens ADD COLUMN eggs BIGINT NOT NULL DEFAULT 0;\n"


def make(scripts: Mapping[str, str]) -> list[OwnMigrations]:
    tables = OwnTables("none", of_projects=())
    return [OwnMigrations(capability="hens", tables=tables, scripts=scripts)] if scripts else []


@pytest.fixture
def driver(tmp_path: Path) -> DatabaseDriver:
    return make_driver(f"sqlite:///{tmp_path}/cavvy.db", journal="delete")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A function that sets the migrations of the capability hens; {}: it is not installed."""

    def set_scripts(scripts: Mapping[str, str]) -> None:
        for module in (migrate, own_tables, table_copy):
            monkeypatch.setattr(module, "list_own_migrations", lambda: make(scripts))
        table_copy._tables.cache_clear()

    yield set_scripts
    table_copy._tables.cache_clear()


def start(driver: DatabaseDriver) -> DatabaseSession:
    migrate.prepare(driver, lambda: "i")
    return driver.connect()


def test_tables_are_made_upgraded_and_kept(driver, installed) -> None:  # type: ignore[no-untyped-def]
    installed({"0001": FIRST})
    with closing(start(driver)) as session:
        session.begin()
        session.run("INSERT INTO hens (name) VALUES ('Berta')")
        session.commit()
        assert read_stated(session)["hens"] == "0001"
    installed({})
    with closing(start(driver)) as session:
        assert list_left_out(session) == ["hens"]
        assert session.run("SELECT name FROM hens").fetchall() == [("Berta",)]
        with pytest.raises(StoreUnusable, match="tables of hens, which is not installed"):
            table_copy.copy_rows(session, session)
    installed({"0001": FIRST, "0002": SECOND})
    with closing(start(driver)) as session:
        assert list_left_out(session) == []
        assert session.run("SELECT name, eggs FROM hens").fetchall() == [("Berta", 0)]
    backup = driver.path.with_name(f"cavvy.db.backup-{migrate.HEAD}-hens-0001")
    assert backup.exists()
    installed({"0001": FIRST})
    with pytest.raises(StoreUnusable, match="tables of hens are at 0002"):
        start(driver)


def test_a_copy_has_the_tables_of_capabilities(driver, installed) -> None:  # type: ignore[no-untyped-def]
    installed({"0001": FIRST})
    assert "hens" in [each.name for each in table_copy._tables()]


def test_a_failed_migration_changes_nothing(driver, installed) -> None:  # type: ignore[no-untyped-def]
    installed({"0001": FIRST, "0002": "ALTER TABLE cocks ADD COLUMN x TEXT;\n"})
    with pytest.raises(Exception, match="cocks"):
        start(driver)
    installed({"0001": FIRST})
    with closing(start(driver)) as session:
        assert read_stated(session)["hens"] == "0001"


def test_a_capability_comes_after_those_that_it_needs() -> None:
    made = [Capability("a", "", needs=("c",)), Capability("b", ""), Capability("c", "")]
    assert [each.name for each in own_tables._order(made)] == ["b", "c", "a"]
