"""Runs the statements of one connection to PostgreSQL. Repeated statements are prepared, and then
run by libpq directly, which takes a third of the CPU time that a cursor of psycopg takes. A
statement whose result is not needed at once is sent in one message with the next one: each wait for
an answer takes time, also because the thread must get Python's lock again afterwards.
"""

import select
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

Row = tuple[Any, ...]
_REPEATED = 5  # runs of a statement after which it is prepared, as in psycopg
_MOST = 512  # prepared statements of a connection; each takes some KiB of PostgreSQL's memory
_TOGETHER = 64  # statements of one message; their answers fit into the buffers of the sockets
_PIPELINES = 140000  # the version of libpq that sends several statements in one message


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
        self._sync, self._usable = pq.ExecStatus.PIPELINE_SYNC, pq.ConnStatus.OK
        self._lost = errors.OperationalError
        self._pipelines = pq.version() >= _PIPELINES
        self._poll = select.poll()
        self._texts: dict[str, str] = {}
        # statements that were put off, and what to raise if they change fewer rows than the number
        self._later: list[tuple[str, Sequence[object], Exception | None, int]] = []
        # How often each statement was run, or its encoders and name once it is prepared. The key is
        # the statement with the types of its values.
        self._runs: dict[tuple[object, ...], int] = {}
        self._prepared: dict[tuple[object, ...], tuple[bytes, list[Callable[..., Any]]]] = {}

    def run(self, sql: str, values: Sequence[object]) -> SqlCursor:
        """Run a statement with `?` in place of the values, after those that were put off."""
        if self._later:
            return self.run_all([(sql, values)])[0]
        return self._run_alone(sql, values)

    def run_later(
        self, sql: str, values: Sequence[object], fewer: Exception | None = None, least: int = 1
    ) -> None:
        """Put a statement off until the next one runs. That one then raises the error of this
        statement, or `fewer` if this statement has changed or found fewer than `least` rows.
        """
        self._later.append((sql, values, fewer, least))
        if len(self._later) >= _TOGETHER:
            self.run_all(())

    def run_all(self, statements: Sequence[tuple[str, Sequence[object]]]) -> Sequence[SqlCursor]:
        """Run the statements that were put off, and these, in one message. Return the results of
        these.
        """
        planned = [*self._later, *((sql, values, None, 0) for sql, values in statements)]
        self._later = []
        sends = [self._plan(sql, values) for sql, values, *_ in planned]
        together = [send for send in sends if send is not None]
        cursors: Iterator[SqlCursor]
        if len(planned) > 1 and self._pipelines and len(together) == len(planned):
            cursors = self._exchange(together)
        else:
            cursors = (self._run_alone(sql, values) for sql, values, *_ in planned)
        found: list[SqlCursor] = []
        for (_, _, fewer, least), cursor in zip(planned, cursors, strict=True):
            if fewer is not None and cursor.rowcount < least:
                raise fewer
            found.append(cursor)
        return found[len(found) - len(statements) :]

    def forget(self) -> None:
        """Do not run the statements that were put off."""
        self._later = []

    def run_text(self, text: str) -> SqlCursor:
        """Run a statement without values, after those that were put off."""
        if self._later:
            self.run_all(())
        return self._read(self._libpq.exec_(text.encode()))

    def _run_alone(self, sql: str, values: Sequence[object]) -> SqlCursor:
        key = (sql, *map(type, values))
        found = self._prepared.get(key) or self._prepare(key)
        if found is None:
            text = self._texts.get(sql) or self._texts.setdefault(sql, sql.replace("?", "%s"))
            cursor: SqlCursor = self._connection.execute(text, values)
            return cursor
        name, encoders = found
        texts = [encode(value) for encode, value in zip(encoders, values, strict=True)]
        return self._read(self._libpq.exec_prepared(name, texts))

    def _plan(self, sql: str, values: Sequence[object]) -> Callable[[], None] | None:
        """Return what sends the statement in a pipeline, or None if psycopg must run it."""
        key = (sql, *map(type, values))
        if found := self._prepared.get(key) or self._prepare(key):
            name, encoders = found
            texts = [encode(value) for encode, value in zip(encoders, values, strict=True)]
            return partial(self._libpq.send_query_prepared, name, texts)
        if self._encoding != "utf-8" or not all(each in _TYPES for each in key[1:]):
            return None
        known = [_TYPES[type(value)] for value in values]
        texts = [encode(value) for (encode, _), value in zip(known, values, strict=True)]
        text = _number_values(sql).encode()
        return partial(self._libpq.send_query_params, text, texts, [oid for _, oid in known])

    def _exchange(self, sends: Sequence[Callable[[], None]]) -> Iterator[SqlCursor]:
        """Send statements in one message. Yield the result of each, or raise its error. After an
        error, PostgreSQL runs none of the later ones.
        """
        try:
            self._libpq.enter_pipeline_mode()
            for send in sends:
                send()
            self._libpq.pipeline_sync()
            results = self._receive()
            if self._libpq.status == self._usable:
                self._libpq.exit_pipeline_mode()
        except BaseException:
            self._connection.close()  # its state is unknown
            raise
        for result in results:
            yield self._read(result)
        if len(results) < len(sends):
            raise self._lost("the connection was lost before all answers arrived")

    def _receive(self) -> Sequence[Any]:
        """Return the result of each statement that was sent, or of the first ones if the connection
        is lost."""
        libpq = self._libpq
        results: list[Any] = []
        self._poll.register(libpq.socket, select.POLLIN | select.POLLOUT)
        while libpq.flush():  # large values: read answers meanwhile, else both sides would wait
            self._poll.poll()
            libpq.consume_input()
        self._poll.register(libpq.socket, select.POLLIN)
        while True:
            ended = False  # whether the results of a statement have ended
            while not libpq.is_busy():
                result = libpq.get_result()
                if result is None and (ended or libpq.status != self._usable):
                    break
                ended = result is None
                if result is not None and result.status == self._sync:
                    return results
                if result is not None:
                    results.append(result)
            if libpq.status != self._usable:
                return results
            self._poll.poll()
            libpq.consume_input()

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
