"""The drivers of the two databases, SQLite and PostgreSQL. A driver connects to the database, locks
the database, and converts the database's errors to the store's errors.
"""

import errno
import os
import re
import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cavvy.domain.values import Struct
from cavvy.mounts import is_shared, read_mounts
from cavvy.packages import extra_command
from cavvy.store.base import (
    HashMismatch,
    RowNotFound,
    StaleVersion,
    StoreError,
    StoreFull,
    StoreUnusable,
)
from cavvy.store.prepared import PreparedStatements, Row, SqlCursor

# The store has about 200 statements in use at a time. One that is not kept is compiled again.
_CACHED_STATEMENTS = 512
_BUSY_S = 10  # seconds that a statement waits for a lock of another process

# Without these limits of libpq, a connection whose packets get lost is noticed after 15 minutes.
# Parameters of the URL take precedence.
_PATIENCE = {
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
}
# Seconds after which PostgreSQL ends an idle transaction, because the locks of a server that has
# vanished would otherwise delay the server that takes over. Only copies of a database pause in a
# transaction for longer; see `allow_pauses`.
_ABANDONED_S = 20
_T = TypeVar("_T")
_ABORTED = 3  # psycopg's status INERROR: a statement of the transaction has failed
_STREAMED = 2000  # rows that a query with many rows fetches at once


class DatabaseDriver(Struct, frozen=True, kw_only=True):
    """One database. Statements contain `?` in place of values, and run in autocommit mode."""

    url: str  # postgresql://…; sqlite:///path
    path: Path | None  # path of the SQLite file
    journal: str = "wal"

    @property
    def is_sqlite(self) -> bool:
        return self.path is not None

    @property
    def shown(self) -> str:
        """The database's path or URL for use in messages. The password is omitted."""
        return str(self.path or re.sub(r"(?<=:)[^:/@]+(?=@)|(?<=password=)[^&]+", "***", self.url))

    @property
    def reads_at_once(self) -> bool:
        """Whether reads neither wait for writes nor for a network."""
        return self.is_sqlite and self.journal == "wal"

    def connect(self, *, readonly: bool = False, waits: bool = True) -> "DatabaseSession":
        """Open a separate connection for the calling thread. Unless it `waits`, SQLite's statements
        fail at once if the file is locked. Raises the driver's errors."""
        return DatabaseSession(self, readonly=readonly, waits=waits)

    def connect_raw(self, *, readonly: bool, waits: bool = True) -> Any:
        """Open a connection of sqlite3 or psycopg, in autocommit mode."""
        if not self.is_sqlite:
            return _connect_postgres(self.url)
        raw = sqlite3.connect(
            str(self.path),
            isolation_level=None,
            check_same_thread=False,
            cached_statements=_CACHED_STATEMENTS,
        )
        raw.execute(f"PRAGMA busy_timeout={_BUSY_S * 1000 if waits else 0}")
        raw.execute("PRAGMA foreign_keys=ON")
        # With synchronous=NORMAL, a system crash can damage a database that uses a rollback
        # journal, but not one that uses a WAL.
        raw.execute(f"PRAGMA synchronous={'NORMAL' if self.journal == 'wal' else 'FULL'}")
        if readonly:
            raw.execute("PRAGMA query_only=ON")
        return raw


class _Part:
    """A part of a transaction, whose statements can be undone without the others."""

    __slots__ = ("before", "is_open")

    def __init__(self) -> None:
        self.is_open = False  # whether it has a savepoint
        self.before: Exception | None = None  # the error of a statement before it


class DatabaseSession:
    """One thread's connection. Hides the differences between the two drivers' connections."""

    __slots__ = ("_part", "_raw", "_readonly", "_statements", "_waits", "driver")

    def __init__(self, driver: DatabaseDriver, *, readonly: bool, waits: bool = True) -> None:
        self._readonly, self._waits = readonly, waits
        self._part: _Part | None = None  # the part of the transaction that `contain` runs
        self.driver = driver
        self._connect()

    def _connect(self) -> None:
        self._raw = self.driver.connect_raw(readonly=self._readonly, waits=self._waits)
        self._statements = None if self.driver.is_sqlite else PreparedStatements(self._raw)

    def reopen(self) -> "DatabaseSession":
        """Reconnect after the database was unreachable."""
        self._raw.close()
        self._connect()
        return self

    def run(self, sql: str, values: Sequence[object] = ()) -> SqlCursor:
        self._begin_part()
        if self._statements is not None:
            return self._statements.run(sql, values)
        cursor: SqlCursor = self._raw.execute(sql, values)
        return cursor

    def change_or(self, nothing: Exception, sql: str, values: Sequence[object]) -> None:
        """Run a statement, and raise `nothing` if it changes no row, so that the transaction is
        rolled back.
        """
        if self.run(sql, values).rowcount == 0:
            raise nothing

    def run_later(
        self,
        sql: str,
        values: Sequence[object] = (),
        fewer: Exception | None = None,
        least: int = 1,
    ) -> None:
        """Run a statement of the open transaction whose result is not needed. With PostgreSQL, the
        statement travels with the next one, which raises its error. If the statement changes or
        finds fewer than `least` rows, `fewer` is raised.
        """
        self._begin_part()
        if self._statements is not None:
            self._statements.run_later(sql, values, fewer, least)
        elif self._raw.execute(sql, values).rowcount < least and fewer is not None:
            raise fewer

    def run_all(self, statements: Sequence[tuple[str, Sequence[object]]]) -> Sequence[SqlCursor]:
        """Run several statements and return their results, for PostgreSQL in one message."""
        self._begin_part()
        if self._statements is None:
            return [self.run(sql, values) for sql, values in statements]
        return self._statements.run_all(statements)

    def stream(self, sql: str) -> Iterator[Row]:
        """Run a query in the open transaction, and yield its rows, read in small batches."""
        self._begin_part()
        if self.driver.is_sqlite:
            yield from self._raw.execute(sql)
            return
        self.run_all(())
        with self._raw.cursor(name="stream") as cursor:
            cursor.itersize = _STREAMED
            yield from cursor.execute(sql)

    def insert_all(self, table: str, columns: str, rows: Iterable[Row]) -> None:
        """Insert many rows, in the open transaction. The rows can refer to each other."""
        self._begin_part()
        if self.driver.is_sqlite:
            self._raw.execute("PRAGMA defer_foreign_keys=ON")
            marks = ", ".join("?" * (columns.count(",") + 1))
            self._raw.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows)
            return
        self.run_all(())
        with (
            self._raw.cursor() as cursor,
            cursor.copy(f"COPY {table} ({columns}) FROM STDIN") as copy,
        ):
            for row in rows:
                copy.write_row(row)

    def begin(self) -> None:
        # Use IMMEDIATE, because otherwise another process could write between the reads and the
        # writes of a transaction.
        if self._statements is None:
            self._raw.execute("BEGIN IMMEDIATE")
        else:
            self._statements.run_later("BEGIN", ())

    def contain(self, work: Callable[[], None]) -> Exception | None:
        """Call `work` in the open transaction. If it raises, undo what its statements have changed,
        and return the error: the transaction goes on as if `work` had not been called.

        Raises what the transaction itself cannot go on after: errors of the statements before it, a
        full disk, a lost connection, and an abort by PostgreSQL after which everything is repeated.
        """
        part = self._part = _Part()
        try:
            work()
            if part.is_open and self._statements is not None:
                self._statements.run_all(())  # raises the errors of what was put off
                if self._raw.info.transaction_status == _ABORTED:
                    raise RuntimeError("it goes on after a statement has failed")
        except Exception as error:
            if part.before is not None:
                raise part.before from None
            if is_passing(error) or isinstance(translate(error, self.driver), StoreFull):
                raise
            if part.is_open:
                self._undo_part(error)
            return error
        finally:
            self._part = None
        return None

    def _begin_part(self) -> None:
        """Set the savepoint of `contain` before the first statement of its work: most has none."""
        part = self._part
        if part is None or part.is_open:
            return
        try:
            if self._statements is not None:
                self._statements.run_all(())
        except Exception as error:
            part.before = error
            raise
        part.is_open = True
        if self._statements is None:
            self._raw.execute("SAVEPOINT part")
        else:
            self._statements.run_later("SAVEPOINT part", ())

    def _undo_part(self, error: Exception) -> None:
        """Undo what has changed since the savepoint. Raises `error` if the transaction is over."""
        try:
            if self._statements is not None:
                self._statements.forget()
            self._raw.execute("ROLLBACK TO SAVEPOINT part")
        except Exception:  # noqa: BLE001 - the first error says why
            raise error from None

    def copy_into(self, empty: "DatabaseSession") -> None:
        """Make the other SQLite database, in which nothing is, a copy of this one."""
        self._raw.backup(empty._raw)

    def allow_pauses(self) -> None:
        """Let the open transaction stay idle for as long as needed, while work outside the database
        continues.
        """
        if not self.driver.is_sqlite:
            self.run("SET LOCAL idle_in_transaction_session_timeout = 0")

    def commit(self) -> None:
        if self._statements is None:
            self._raw.execute("COMMIT")
        else:
            self._statements.run_text("COMMIT")

    def rollback(self) -> None:
        """Roll back the open transaction, unless the database has already done so."""
        if self._statements is not None:
            self._statements.forget()
        if self.in_transaction:
            self._raw.execute("ROLLBACK")

    @property
    def in_transaction(self) -> bool:
        if self.driver.is_sqlite:
            return bool(self._raw.in_transaction)
        # psycopg's status IDLE is 0
        return not self._raw.closed and bool(self._raw.info.transaction_status)

    @property
    def broken(self) -> bool:
        return not self.driver.is_sqlite and bool(self._raw.closed)

    def close(self) -> None:
        self._raw.close()


def _connect_postgres(url: str) -> Any:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    given = conninfo_to_dict(url)
    limits = {name: value for name, value in _PATIENCE.items() if name not in given}
    raw = psycopg.connect(make_conninfo(url, **limits), autocommit=True)
    raw.execute(f"SET idle_in_transaction_session_timeout = '{_ABANDONED_S}s'")
    return raw


def make_driver(url: str, *, journal: str) -> DatabaseDriver:
    """Create the driver for a URL. Raises StoreUnusable if the URL is wrong, or if the Python
    driver or the database's folder is missing.
    """
    scheme, _, rest = url.partition("://")
    if scheme != "sqlite":
        try:
            import psycopg  # noqa: F401  fail early if it is missing
        except ModuleNotFoundError as error:
            raise StoreUnusable(
                f"PostgreSQL needs psycopg: {extra_command('postgres')} ({error})"
            ) from error
        return DatabaseDriver(url=f"postgresql://{rest}", path=None)
    if not rest.startswith("/") or rest in ("/", "/:memory:"):
        raise StoreUnusable(
            "the URL of a SQLite store must name a file, as in sqlite:///path; a store in memory "
            "has the URL memory:"
        )
    path = Path(rest[1:])
    _create_file(path)
    return DatabaseDriver(
        url=url,
        path=path,
        journal=choose_journal(path, read_mounts()) if journal == "auto" else journal,
    )


def choose_journal(path: Path, mounts: str) -> str:
    """Return the SQLite journal mode: "delete" if the file is on a file system that several
    machines share, otherwise "wal"."""
    return "delete" if is_shared(path, mounts) else "wal"


def _create_file(path: Path) -> None:
    """Create the file so that only its owner can read it. SQLite itself would create the file with
    the permissions of the umask.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                f"no space to create {path}; free some space and start again"
            ) from error
        raise StoreUnusable(
            f"cannot write {path}: {error.strerror}; make its folder writable for this user, or "
            "choose another path"
        ) from error


def translate(error: Exception, driver: DatabaseDriver) -> Exception:
    """Return the store error for an error of the driver, or the error itself if it has another
    cause.
    """
    if isinstance(error, StoreError):
        return error
    if isinstance(error, sqlite3.Error):
        return _translate_sqlite(error, driver)
    if type(error).__module__.startswith("psycopg"):
        return _translate_postgres(error, driver)
    if isinstance(error, (OverflowError, UnicodeError)):
        return HashMismatch(f"the database cannot hold a value: {error}")
    return error


@contextmanager
def translating(driver: DatabaseDriver) -> Iterator[None]:
    """Raise the store error instead of an error of the driver that the block raises."""
    try:
        yield
    except Exception as error:
        if (told := translate(error, driver)) is error:
            raise
        raise told from error


def _translate_sqlite(error: sqlite3.Error, driver: DatabaseDriver) -> Exception:
    code = getattr(error, "sqlite_errorcode", 0) or 0
    where = driver.shown
    match code & 0xFF:  # the primary result code, https://sqlite.org/rescode.html
        case 13 | 10 if code in (13, 4874):  # SQLITE_IOERR_SHMSIZE: no space for the -shm file
            return StoreFull(
                f"no space to write {where}; nothing was written: free some disk space"
            )
        case 5 | 6:
            return StoreUnusable(f"{where} is locked by another process; stop that process")
        case 14 if _is_out_of_files():
            return StoreUnusable(
                f"cannot open {where}: this process has too many files open; raise its limit: "
                "`ulimit -n 4096`, or LimitNOFILE= of systemd"
            )
        case 3 | 8 | 14:
            return StoreUnusable(
                f"cannot write {where} ({error}); check its owner and whether its disk is read-only"
            )
        case 11 | 26:
            return StoreUnusable(
                f"{where} is damaged ({error}); restore a backup, or move it away to start with "
                "an empty database"
            )
        case 10:
            return StoreUnusable(
                f"the disk of {where} has failed ({error}); check it, then restart the server"
            )
        case 18:
            return HashMismatch(f"a value is too large for {where}: {error}")
        case 19 if code == 787:  # SQLITE_CONSTRAINT_FOREIGNKEY
            return RowNotFound("the row's parent does not exist")
        case _:
            return error


def _is_out_of_files() -> bool:
    """Return whether this process cannot open one more file. SQLite does not say why it cannot open
    a file.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


def _translate_postgres(error: Exception, driver: DatabaseDriver) -> Exception:
    state = getattr(error, "sqlstate", None) or ""
    where = driver.shown
    match state:  # https://www.postgresql.org/docs/current/errcodes-appendix.html
        case "53100":
            return StoreFull(f"the database {where} has no disk space left; nothing was written")
        case "23503":
            return RowNotFound("the row's parent does not exist")
        case "40001" | "40P01":
            return StaleVersion("another writer changed the same rows; read again")
        case "25006" | "42501":
            return StoreUnusable(f"cannot write to {where}: {error}")
        case "XX001" | "XX002":
            return StoreUnusable(f"the database {where} is damaged: {error}")
    # psycopg itself refuses a NUL character, with an error of the class DataError and without
    # SQLSTATE.
    if state[:2] == "22" or type(error).__name__ == "DataError":
        return HashMismatch(f"the database cannot hold a value: {error}")
    # 25P03: this process stood still in a transaction until PostgreSQL ended it
    if state[:2] in ("", "08", "28", "3D", "53", "57", "58") or state == "25P03":
        return StoreUnusable(
            f"cannot use the database {where}: {str(error).strip()}; check that the database runs "
            "and accepts this user"
        )
    return error


def is_passing(error: Exception) -> bool:
    """Return whether the transaction can succeed if it is repeated immediately (only for
    PostgreSQL, which can abort one of two concurrent transactions)."""
    return getattr(error, "sqlstate", None) in ("40001", "40P01")


class RunTransaction(Protocol):
    """Runs a function with an open session, in one transaction."""

    def __call__(self, work: Callable[[DatabaseSession], _T], /) -> Awaitable[_T]: ...
