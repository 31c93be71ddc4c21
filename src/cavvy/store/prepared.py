"""Runs the statements of one connection to PostgreSQL. Repeated statements are prepared, and then
run by libpq directly, which takes a third of the CPU time that a cursor of psycopg takes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Row = tuple[Any, ...]
_REPEATED = 5  # runs of a statement after which it is prepared, as in psycopg
_MOST = 512  # prepared statements of a connection; each takes some KiB of PostgreSQL's memory


class SqlCursor(Protocol):
    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Row | None: ...
    def fetchall(self) -> list[Row]: ...


def _encode_text(text: str) -> bytes:
    data = text.encode()
    if b"\0" in data:  # libpq would cut the value off here
        from psycopg import DataError

        raise DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
    return data


# For each type, the function that encodes its values, and the ID of PostgreSQL's type, which is 0
# for the type that the statement expects. Statements with values of other types are left to
# psycopg.
_TYPES: Mapping[type, tuple[Callable[[Any], bytes | None], int]] = {
    str: (_encode_text, 0),
    int: (lambda value: b"%d" % value, 20),
    float: (lambda value: repr(value).encode(), 701),
    bool: (lambda value: b"t" if value else b"f", 16),
    type(None): (lambda value: None, 0),
}


class PreparedStatements:
    """The statements of one connection, and those of them that are prepared."""

    def __init__(self, connection: Any) -> None:
        from psycopg import adapt, errors, pq

        self._connection, self._libpq = connection, connection.pgconn
        self._decoder = adapt.Transformer(connection)
        self._make_error, self._failed = errors.error_from_result, pq.ExecStatus.FATAL_ERROR
        self._encoding = connection.info.encoding
        self._quote = pq.Escaping(self._libpq).escape_literal
        self._texts: dict[str, str] = {}
        self._named: dict[str, str] = {}  # the names of the statements of `run_after`
        # How often each statement was run, or its encoders and name once it is prepared. The key is
        # the statement with the types of its values.
        self._runs: dict[tuple[object, ...], int] = {}
        self._prepared: dict[tuple[object, ...], tuple[bytes, list[Callable[..., Any]]]] = {}

    def run(self, sql: str, values: Sequence[object]) -> SqlCursor:
        """Run a statement with `?` in place of the values."""
        key = (sql, *map(type, values))
        found = self._prepared.get(key) or self._prepare(key)
        if found is None:
            text = self._texts.get(sql) or self._texts.setdefault(sql, sql.replace("?", "%s"))
            cursor: SqlCursor = self._connection.execute(text, values)
            return cursor
        name, encoders = found
        texts = [encode(value) for encode, value in zip(encoders, values, strict=True)]
        return self._read(self._libpq.exec_prepared(name, texts))

    def run_text(self, text: str) -> SqlCursor:
        """Run one or more statements without values, as one message to the database. Return the
        result of the last one.
        """
        return self._read(self._libpq.exec_(text.encode()))

    def run_after(self, text: str, sql: str, values: Sequence[object]) -> SqlCursor:
        """Run the statement `text` and then another one, which is prepared, in one message."""
        name = self._named.get(sql)
        if name is None:
            name = f"cavvy_named_{len(self._named)}"
            self.run_text(f"PREPARE {name} AS {_number_values(sql)}")
            self._named[sql] = name
        quoted = [self._quote(_encode_text(str(value))).decode() for value in values]
        return self.run_text(f"{text}; EXECUTE {name} ({', '.join(quoted)})")

    def _prepare(self, key: tuple[object, ...]) -> tuple[bytes, list[Callable[..., Any]]] | None:
        """Prepare the statement if it was run often enough and has values of known types only."""
        runs = self._runs[key] = self._runs.get(key, 0) + 1
        sql, *types = key
        if runs <= _REPEATED or len(self._prepared) >= _MOST or self._encoding != "utf-8":
            if len(self._runs) > 10 * _MOST:
                self._runs.clear()
            return None
        if not all(each in _TYPES for each in types):
            return None
        known = [_TYPES[each] for each in types]  # type: ignore[index]
        name = b"cavvy_%d" % len(self._prepared)
        text = _number_values(str(sql)).encode()
        self._read(self._libpq.prepare(name, text, [oid for _, oid in known]))
        self._prepared[key] = name, [encode for encode, _ in known]
        return self._prepared[key]

    def _read(self, result: Any) -> "_Result":
        if result.status == self._failed:
            raise self._make_error(result, self._encoding)
        if not result.nfields:
            return _Result([], result.command_tuples or 0)
        self._decoder.set_pgresult(result)
        rows = self._decoder.load_rows(0, result.ntuples, tuple)
        return _Result(rows, len(rows))


def _number_values(sql: str) -> str:
    """Write $1, $2 and so on instead of each `?`."""
    first, *others = sql.split("?")
    return first + "".join(f"${at}{part}" for at, part in enumerate(others, 1))


class _Result:
    """The rows of a statement, all of which were read."""

    __slots__ = ("_rows", "_taken", "rowcount")

    def __init__(self, rows: list[Row], rowcount: int) -> None:
        self._rows, self._taken = rows, 0
        self.rowcount = rowcount

    def fetchone(self) -> Row | None:
        self._taken += 1
        return self._rows[self._taken - 1] if self._taken <= len(self._rows) else None

    def fetchall(self) -> list[Row]:
        rows, self._taken = self._rows[self._taken :], len(self._rows)
        return rows
