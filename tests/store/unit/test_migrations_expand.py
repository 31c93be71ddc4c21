"""A migration only expands the schema, so that servers of the version before still work with it;
see docs/extend/write-a-migration.md. One that contracts says so in its name.
"""

import re
from collections.abc import Sequence

import pytest

from cavvy.store.migrate import MIGRATIONS, Migration, is_next

_FIRST = "0015"  # earlier migrations were made before several servers shared a database
_EXPANDS = (
    r"CREATE TABLE \w+ \(",
    r"CREATE INDEX \w+ ON",
    r"DROP INDEX \w+$",  # searches without it have the same answers
    r"ALTER TABLE \w+ ADD COLUMN \w+ (DOUBLE PRECISION|[\w{}]+)( DEFAULT ('[^']*'|-?\d+)( NOT NULL)?)?$",
    r"UPDATE \w+ SET",
    r"INSERT INTO",
)
_CONTRACTS = (r"DROP (TABLE|INDEX) \w+$", r"ALTER TABLE \w+ DROP COLUMN \w+$")


def list_objections(name: str, text: str) -> Sequence[str]:
    """The statements that a server of the version before may not survive."""
    allowed = _CONTRACTS if name.split("_")[1] == "contract" else _EXPANDS
    bare = "\n".join(line.partition("--")[0] for line in text.splitlines())
    statements = [" ".join(each.split()) for each in bare.split(";")]
    # rules that keep the rows of a table; a server of the version before does not know new tables
    made = re.findall(r"CREATE TABLE (\w+) \(", bare)
    kept = [rf"{{{table}_(function|no_change|no_removal)}}$" for table in made]
    kept += [r"\{lift_audit_rule\}$", r"\{audit_rule\}$"]  # refuses fewer changes than before
    return [
        each
        for each in statements
        if each and not any(re.match(word, each) for word in (*allowed, *kept))
    ]


def new_migrations() -> Sequence[Migration]:
    return [each for number, each in MIGRATIONS.items() if number >= _FIRST]


@pytest.mark.parametrize("migration", new_migrations(), ids=lambda migration: migration.name)
def test_a_migration_only_expands(migration: Migration) -> None:
    assert list_objections(migration.name, migration.sql) == []


@pytest.mark.parametrize(
    ("statement", "expands", "contracts"),
    [
        ("ALTER TABLE jobs ADD COLUMN more TEXT", True, False),
        ("ALTER TABLE jobs ADD COLUMN more BIGINT DEFAULT 0 NOT NULL", True, False),
        ("ALTER TABLE jobs ADD COLUMN more BIGINT NOT NULL", False, False),
        ("ALTER TABLE jobs RENAME COLUMN name TO title", False, False),
        ("ALTER TABLE jobs ALTER COLUMN name SET NOT NULL", False, False),
        ("CREATE UNIQUE INDEX jobs_one ON jobs (name)", False, False),
        ("CREATE INDEX jobs_one ON jobs (name)", True, False),
        ("ALTER TABLE jobs DROP COLUMN more", False, True),
        ("DROP INDEX jobs_one", True, True),
        ("DROP TABLE names -- unused; since 0016", False, True),
        ("{jobs_no_change}", False, False),
        ("CREATE TABLE more (a TEXT); {more_no_change}", True, False),
    ],
)
def test_the_check_knows_what_expands(statement: str, expands: bool, contracts: bool) -> None:
    assert (list_objections("0099_more.sql", statement) == []) is expands
    assert (list_objections("0099_contract_more.sql", statement) == []) is contracts


def test_a_program_works_with_the_next_revision_only() -> None:
    assert [is_next(revision, "0016") for revision in ("0001", "0016", "0017", "0018")] == [
        True,
        True,
        True,
        False,
    ]
