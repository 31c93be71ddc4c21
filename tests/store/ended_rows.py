"""Copies of an ended job in SQLite, and how much work a statement is: for tests that no statement
does more because more jobs have ended.
"""

import sqlite3

# the columns that name a job, an attempt or a gang
_NAMES = {"id", "job_id", "attempt_id", "gang", "bought_as", "name"}
_TABLES = ("jobs", "documents", "attempts", "nodes", "charges", "ledger_subjects", "ledger")


def copy_ended(database: sqlite3.Connection, ended: str, first: int, last: int) -> None:
    """Copy the rows of the job that `ended`, a statement, selects, and of all that belongs to it,
    under these numbers."""
    database.execute("PRAGMA foreign_keys=OFF")
    for table in _TABLES:
        columns = database.execute(f"PRAGMA table_info({table})").fetchall()
        names = [each[1] for each in columns]
        owner = "id" if table == "jobs" else "job_id"
        if owner not in names and "attempt_id" not in names:
            continue
        texts = [each[1] for each in columns if each[2] not in ("BIGINT", "INTEGER")]
        made = ", ".join(
            f"{each} || '-' || n" if each in _NAMES and each in texts else f'"{each}"'
            for each in names
        )
        where = (
            f"{owner} IN ({ended})"
            if owner in names
            else f"attempt_id IN (SELECT id FROM attempts WHERE job_id IN ({ended}))"
        )
        database.execute(
            "WITH RECURSIVE numbers(n) AS "
            "(SELECT ? UNION ALL SELECT n + 1 FROM numbers WHERE n < ?) "
            f"INSERT INTO {table} SELECT {made} FROM {table}, numbers WHERE {where}",
            (first, last),
        )


def weigh(
    database: sqlite3.Connection, sql: str, values: tuple[object, ...], every: int = 1
) -> tuple[str, int]:
    """How SQLite runs a statement, and how many steps that takes, counted in parts of `every`
    steps. Nothing is changed."""
    plan = database.execute(f"EXPLAIN QUERY PLAN {sql}", values).fetchall()
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += every
        return 0

    database.execute("BEGIN")
    database.set_progress_handler(count, every)
    database.execute(sql, values).fetchall()
    database.set_progress_handler(None, every)
    database.execute("ROLLBACK")
    return "\n".join(str(each[3]) for each in plan), steps
