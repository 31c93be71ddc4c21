"""Two servers, `a` and `b`, with one PostgreSQL database and one folder for files."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from tests.system.postgres import new_database
from tests.system.server_state import home_at, kill_server
from tests.waits import PATIENCE_S, wait_until

from cavvy.client import ApiClient, connect
from cavvy.client.transport import Patience

_PRICE = "[providers.local]\nprice_usd_hr = 3.6\n"
_LEASES = 68  # 64 shards, three that exist once, and that of the machine


class ReplicaSite:
    """The state folders of both servers, and their database."""

    def __init__(self, root: Path, url: str) -> None:
        self.root, self.url, self.files = root, url, root / "f"
        self.homes = {name: self.files / name for name in "ab"}

    def connect(self, name: str) -> ApiClient:
        """A client of one server, which starts that server if it does not run."""
        return connect(home=str(self.homes[name]), patience=Patience(PATIENCE_S))

    def kill(self, name: str) -> None:
        assert kill_server(self.homes[name], signal.SIGKILL)

    def run(self, sql: str) -> None:
        with psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(sql)  # type: ignore[call-overload]  # our own SQL

    def ask(self, sql: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True) as connection:
            return connection.execute(sql).fetchall()  # type: ignore[call-overload,no-any-return]  # our own SQL

    def shards(self) -> dict[str, int]:
        """How many leases each server that lives holds, by its folder."""
        rows = self.ask(
            "SELECT r.folder, COUNT(*) FROM cavvy_leases l JOIN cavvy_replicas r ON r.id = l.holder"
            " GROUP BY 1"
        )
        return {Path(str(folder)).name: int(str(count)) for folder, count in rows}

    def shared(self) -> bool:
        """Whether both servers have a part of the work."""
        found = self.shards()
        return len(found) == 2 and sum(found.values()) == _LEASES


@contextmanager
def replica_site(
    root: Path, settings: str = "", variables: dict[str, str] | None = None
) -> Iterator[ReplicaSite]:
    """A site with a new database and no server yet. At the end, its jobs are stopped and its servers
    are gone. Raises PostgresMissing.
    """
    made = ReplicaSite(root, new_database())
    # the tests' PostgreSQL may lose the newest transactions in a crash, unlike one for real use
    made.run(
        f"ALTER DATABASE {made.url.partition('@/')[2].partition('?')[0]} SET synchronous_commit = on"
    )
    made.files.mkdir(mode=0o700)
    given = {"CAVVY_SERVER_DATABASE": made.url, "CAVVY_SERVER_FILES": str(made.files)}
    with home_at(made.homes["a"], **given, **(variables or {})):
        (root / "f" / "settings.toml").write_text(_PRICE + settings)
        try:
            yield made
        finally:
            with made.connect("a") as client:
                client.down()
                wait_until(lambda: not client.nodes())
            kill_server(made.homes["b"])
