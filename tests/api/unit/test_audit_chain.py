"""The chain of the audit log: every change of a record, and every missing one, is found."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from cavvy.api.audit import IN_TOTAL, PER_ADDRESS, LeftOut, RefusalLimiter
from cavvy.cli.main import cli
from cavvy.domain.audit import (
    EMPTY,
    FIRST,
    AuditCut,
    AuditEntry,
    AuditOutcome,
    ChainBroken,
    ChainHead,
    SealedRecord,
    check_chain,
    hash_text,
    read_head,
    seal,
)
from cavvy.domain.values import replace

T0 = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
WORDS = st.text(max_size=8)


def chain(count: int, *, texts: Sequence[str] = ("a",)) -> list[SealedRecord]:
    records: list[SealedRecord] = []
    head = EMPTY
    for number in range(count):
        entry = AuditEntry(
            at=T0 + timedelta(seconds=number),
            signed_in=True,
            account=f"u{number}",
            action="PUT /v1/x",
            target={"name": texts[number % len(texts)]},
            after={"value": texts[number % len(texts)]},
        )
        records.append(seal(entry, head))
        head = ChainHead(records[-1].number, records[-1].hash)
    return records


def broken(records: Sequence[SealedRecord]) -> int:
    """The number of the first record that does not fit; 0 for an intact chain."""
    try:
        list(check_chain(records))
    except ChainBroken as error:
        return error.number
    return 0


def forge(record: SealedRecord, **changes: object) -> SealedRecord:
    """Change the text, and make its hash right again, as an owner of the database could."""
    told = {**msgspec.json.decode(record.text.encode()), **changes}
    text = msgspec.json.encode(told, order="sorted")
    return replace(record, text=text.decode(), hash=hash_text(text))


def test_the_first_record_follows_zeros() -> None:
    (record,) = chain(1)
    assert msgspec.json.decode(record.text)["prior"] == FIRST == "0" * 64
    assert record.hash == hash_text(record.text.encode())
    assert broken([]) == 0


@given(st.lists(WORDS, min_size=1, max_size=4), st.integers(1, 6))
def test_an_untouched_chain_is_intact_and_ends_at_its_last_record(
    texts: list[str], count: int
) -> None:
    records = chain(count, texts=texts)
    assert [head for _, head in check_chain(records)][-1] == ChainHead(count, records[-1].hash)
    stored = [msgspec.json.decode(msgspec.json.encode(each), type=SealedRecord) for each in records]
    assert broken(stored) == 0


@pytest.mark.parametrize("at", range(5))
def test_every_change_is_found_where_it_is(at: int) -> None:
    records, number = chain(5), at + 1
    one = records[at]
    text = one.text.replace("PUT", "GET")
    for changed in (
        replace(one, text=text),
        replace(one, hash=hash_text(b"other")),
        replace(one, text="{"),
        replace(one, text="{", hash=hash_text(b"{")),
        replace(one, number=number + 7),
        replace(one, account="other"),
        replace(one, project="other"),
        replace(one, at=one.at + timedelta(microseconds=1)),
        replace(one, outcome=AuditOutcome.REFUSED),
        forge(one, prior="f" * 64),
        forge(one, number=99),
    ):
        assert broken([*records[:at], changed, *records[at + 1 :]]) == number
    # A forged record with a right hash breaks the next one, and the last one only its kept head.
    forged = forge(one, action="GET /v1/y")
    assert broken([*records[:at], forged, *records[at + 1 :]]) == (number + 1 if at < 4 else 0)


def test_missing_added_and_swapped_records_are_found() -> None:
    records = chain(4)
    assert broken(records[1:]) == 1
    assert broken([records[0], *records[2:]]) == 2
    assert broken([records[1], records[0], *records[2:]]) == 1
    assert broken([records[0], records[0], *records[1:]]) == 2
    assert broken([*records, records[3]]) == 5
    assert broken(records[:2]) == 0  # a missing end needs a head that was kept


def cut(records: Sequence[SealedRecord], number: int) -> list[SealedRecord]:
    """Remove the records up to this number, as the retention does."""
    removed, end = records[number - 1], records[-1]
    told = AuditCut(
        head=ChainHead(removed.number, removed.hash),
        at=T0 + timedelta(days=400),
        before=T0 + timedelta(days=35),
        rule="retention.audit_days",
        days=365,
    )
    return [*records[number:], seal(told.make_entry(), ChainHead(end.number, end.hash))]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_chain_whose_old_records_were_removed_is_intact(number: int) -> None:
    records = cut(chain(5), number)
    assert broken(records) == 0
    assert broken(cut(records, 1)) == 0  # also the second time
    assert broken(records[:-1]) == 1  # without the record that says so
    assert broken(records[1:]) == 1  # with one more record missing
    assert broken([*records[:1], *records[2:]]) == 1
    last = forge(records[-1], after={"removed_to": f"{number}:{'f' * 64}"})
    assert broken([*records[:-1], last]) == 1


def test_a_head_is_read_as_it_is_printed() -> None:
    head = ChainHead(12, "ab" * 32)
    assert read_head(f" {head}\n") == head
    for text in ("", "12", "12:xyz", f"-1:{'ab' * 32}", f"12:{'AB' * 32}", f"12:{'ab' * 31}"):
        with pytest.raises(ValueError, match="expected NUMBER:HASH"):
            read_head(text)


def test_a_flood_of_refusals_is_counted_and_not_recorded() -> None:
    limiter = RefusalLimiter()
    admitted = sum(limiter.admit("10.0.0.1", T0) for _ in range(1000))
    assert admitted == PER_ADDRESS
    assert limiter.admit("10.0.0.2", T0)  # another address is not affected
    assert limiter.take_left_out(T0 + timedelta(seconds=59)) == []
    later = T0 + timedelta(seconds=60)
    assert limiter.take_left_out(later) == [LeftOut("10.0.0.1", 1000 - PER_ADDRESS)]
    assert limiter.take_left_out(later) == []
    assert limiter.admit("10.0.0.1", later)


def test_a_flood_from_many_addresses_is_bounded_too() -> None:
    limiter = RefusalLimiter()
    sent = 5 * IN_TOTAL
    admitted = sum(limiter.admit(f"a{number}", T0) for number in range(sent))
    assert admitted == IN_TOTAL
    left_out = limiter.take_left_out(T0 + timedelta(minutes=1))
    assert sum(each.count for each in left_out) == sent - admitted
    assert len(left_out) <= IN_TOTAL + 1


def test_the_command_checks_a_log_without_its_old_records(tmp_path: Path) -> None:
    whole = chain(5)
    file = tmp_path / "audit.jsonl"
    file.write_bytes(b"\n".join(map(msgspec.json.encode, cut(whole, 2))))
    heads = [f"{each.number}:{each.hash}" for each in whole]

    def verify(*heads: str) -> Result:
        given = [word for head in heads for word in ("--head", head)]
        return CliRunner().invoke(cli, ["audit", "verify", str(file), *given])

    told = verify(*heads[1:])
    assert told.exit_code == 0, told.output
    assert "4 records are intact" in told.output
    assert (
        "the records up to 2 were removed on 2027-02-06, because they were older than 365 days"
        in (told.output)
    )
    wrong = verify(heads[0])
    assert wrong.exit_code == 1
    assert "record 1 was removed because of its age" in wrong.output
    other = verify(f"2:{'f' * 64}")
    assert other.exit_code == 1
