"""Tables on narrow terminals: names stay whole, and lines fit where the names allow it."""

import ast
import csv
import io
import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw, convert
from msgspec.json import encode
from msgspec.structs import asdict, replace
from tests.records import make_offer
from tests.unit.cli_client import (
    OFFER,
    T0,
    UNSTARTED,
    FakeClient,
    at,
    client,
    make_attempt,
    make_event,
    make_job,
    make_node,
    make_quota,
)

import cavvy.cli
from cavvy.cli.main import cli
from cavvy.cli.reach import usage
from cavvy.cli.view import layout
from cavvy.cli.view.layout import (
    TableColumn,
    choose_widths,
    row_lines,
    text_width,
    wrap_message,
)
from cavvy.cli.view.output import pairs_out, rows_out
from cavvy.client import (
    account_wire,
    array_wire,
    maintenance_wire,
    policy_wire,
    pool_wire,
    queue_wire,
    wire,
)
from cavvy.client.account_wire import AccountClient
from cavvy.domain.audit import EMPTY, AuditEntry, seal
from cavvy.domain.tasks import JobSchedule, TaskSpec
from cavvy.domain.units import HourlyRate, Money
from cavvy.frame.discover import find_capabilities
from cavvy.planner.advice import ObservedRun
from cavvy.planner.reservations import ReservableType, UsedMachine

__all__ = ["client"]
NAME = "fine-tune-llama-of-the-customer-support-team-0042"
NIGHTLY = f"nightly-{NAME}"
PROJECT = "research-and-development"
PLACEMENT = "datacrunch/FIN-03/FIN-03/8xH100.80S.176V:1/on-demand"
REASON = "no capacity for 8xH100.80S.176V in FIN-03, tried again at 2026-01-02 03:04:05 UTC; " * 2
USER = "the-nightly-evaluation@research-and-development.example.com"
MACHINE = "workstation-of-the-robotics-lab-in-building-17"
TRUST = account_wire.TrustView(
    name="company",
    issuer="https://login.research-and-development.example.com/realms/people",
    audience="cavvy-of-research",
    claims={"email_verified": "true", "department": "research-and-development"},
    account="",
    account_claim="email",
    accounts="create",
    groups_claim="groups",
    groups=[account_wire.GroupRoleView(group="vision-team", project=PROJECT, role="member")],
    scopes=["view", "run"],
    project=PROJECT,
    lifetime_s=43_200,
    client_id="cavvy",
)
BUDGET = policy_wire.BudgetView(
    name="b" * 63,
    project=PROJECT,
    user=USER,
    tag="study=ablations",
    limit_micros=10**13,
    month_limit_micros=10**13,
    spent_micros=10**13 - 1,
    expected_micros=None,
    low_micros=None,
    high_micros=None,
    alerts=[50],
    soft_percent=100,
    hard_percent=None,
    carry_over=False,
    request=None,
)
POLICY = policy_wire.ProjectPolicyView(
    project=PROJECT,
    providers=["aws", "datacrunch"],
    regions=["eu", "us-east-1"],
    accelerators=["RTX-PRO-6000", "H100"],
    max_rate_micros_per_hour=12_500_000,
    images=["ghcr.io/research-and-development/*"],
    image_digests=True,
    signed_by=["MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE="],
    share=0.5,
    quota_gpus=1024,
    max_gpus=16384,
    user_gpus=0.125,
    user_jobs=1000,
    user_waiting=10_000,
    quota_accelerators={"RTX-PRO-6000": 1024, "H100": 8},
    max_micros_per_hour=12_345_678_000_000,
)
ARRAY = array_wire.ArrayDetail(
    array=wire.JobListing(
        id="0123456789abcdef",
        project=PROJECT,
        name=NAME,
        user="ada",
        phase="running",
        reason="8 running, 9,992 queued",
        **UNSTARTED,
        spent_micros=123_456_780_000,
    ),
    parallel=8,
    jobs=[
        array_wire.ArrayMemberView(
            index=9999,
            id="0123456789abcdef",
            name=f"{NAME}.9999",
            phase="stopping",
            reason="the node of rank 3 was lost",
            attempt=12,
            exit_code=137,
            placement="primeintellect/eu-north-1/gpu.h100x8/spot",
            since=T0,
            ended_at=None,
            spent_micros=123_456_780_000,
            params={"learning_rate": 1e-05, "optimizer": "adam"},
            progress={"validation_loss": 0.123456789},
        )
    ],
)
SHARES = queue_wire.ShareReport(
    half_life_days=7,
    projects=[
        queue_wire.ShareView(
            project=PROJECT,
            parent=None,
            weight=0.5,
            part=1 / 3,
            used_part=0.999,
            used_gpu_hours=1234567.8,
            gpus=16384.125,
            jobs=100_000,
            waiting_gpus=123456.625,
            waiting_jobs=1_000_000,
            quota_gpus=1024,
            max_gpus=16384,
            debt_gpu_hours=-123456.7,
            micros_per_hour=12_345_678_900,
            quota_accelerators={"RTX-PRO-6000": 1024, "H100": 8},
            max_micros_per_hour=12_345_678_000_000,
            lent=[
                queue_wire.LoanView(project="b" * 63, accelerator="H100", gpus=8, micros_per_hour=0)
            ],
        )
    ],
)
POOL = pool_wire.PoolView(
    name=NAME,
    project=PROJECT,
    user=USER,
    state="closed",
    opens_at=at(1e6),
    min=1000,
    max=10_000,
    nodes=10_000,
    idle=1000,
    starting=1000,
    leaving=1000,
    running_jobs=100_000,
    waiting_jobs=1_000_000,
    idle_s=86_400,
    spot_share=0.5,
    hours="Mon-Fri 08:00-20:00 Europe/Berlin",
    rate_micros_per_hour=98_765_432_100,
    spent_micros=123_456_789_000_000,
    problem=REASON,
    text="",
)
HOST = maintenance_wire.HostView(
    name=f"ssh/{MACHINE}",
    state="draining",
    why=REASON,
    since=at(0),
    drain_by=at(1e6),
    cpus=192,
    memory_mib=2 << 20,
    devices=[f"GPU-{number:032}" for number in range(8)],
    kinds=["H100"] * 8,
    sick={f"GPU-{7:032}": "Xid 79"},
    holders=[
        maintenance_wire.HolderView(
            project=PROJECT,
            job=NAME,
            job_id="01jdqk3w5t9xz7e2",
            user=USER,
            rank=0,
            phase="running",
            devices=[f"GPU-{number:032}" for number in range(7)],
            part=1.0,
            cpus=96,
            memory_mib=1 << 20,
            since=at(0),
            until=at(1e6),
            until_from="notice",
            lost_s=1e6,
            lost_micros=123_456_789_000_000,
        )
    ],
    reservations=[
        maintenance_wire.ReservationView(
            name="r" * 63,
            project=PROJECT,
            user=USER,
            parts=[maintenance_wire.ReservedPartView(host=f"ssh/{MACHINE}", devices=[])],
            gpus=0,
            begins_at=at(0),
            ends_at=at(1e6),
            made_by=USER,
            reason=REASON,
        )
    ],
)
CREDENTIAL = account_wire.CredentialRow(provider="primeintellect", updated_at=at(0), problem=REASON)
KEY = account_wire.SecretKeyRow(
    id="aes-0123456789abcdef", place=f"file:/srv/{NAME}/state/key", current=True, secrets=42
)
COMMITTED = make_offer(
    "datacrunch/FIN-03/h100-instance-with-a-long-name",
    20_000_000,
    accelerator="H100",
    accelerator_count=8,
    term_months=36,
)
USED = UsedMachine(
    kind=ReservableType("datacrunch", "FIN-03", "h100-instance-with-a-long-name"),
    since=datetime.now(UTC) - timedelta(days=60),
    until=datetime.now(UTC) + timedelta(days=1),
    rate=HourlyRate(40_000_000),
)
IDLE = ObservedRun(
    project=PROJECT,
    job=NAME,
    attempt=1,
    nodes=1,
    offer=replace(COMMITTED, term_months=0),
    charged=Money(10**12),
    hours=500,
    gpu_percent=0.1,
    measured=timedelta(days=20),
    unfinished=True,
)
HEAD = st.builds(
    TableColumn, st.just("x"), drop=st.integers(0, 3), wrap=st.booleans(), cut=st.booleans()
)
WORDS = st.lists(st.text("ab語", min_size=1, max_size=12), min_size=1, max_size=6).map(" ".join)
# Modules whose tables need more than a client: a measurement, a machine, an engine, a simulation,
# a backup.
APART = {
    "bench",
    "compare",
    "decide",
    "doctor",
    "edge",
    "estimate",
    "image",
    "kernel_bench",
    "model",
    "model_keys",
    "notify",
    "restore",
    "service_plan",
    "serving",
    "simulation",
    "tco",
    "top",
}


@pytest.fixture
def width(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    columns: int = request.param
    monkeypatch.setattr(layout, "terminal_width", lambda out: columns)
    return columns


@pytest.fixture
def long_names(client: FakeClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeClient:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    offer = Raw(encode(OFFER))
    failed = {"placement": PLACEMENT, "offer": offer, "reason": REASON, "outcome": "capacity"}
    attempts = [make_attempt(number, **failed) for number in (1, 2)]
    node = make_node(exit_reason=REASON, telemetry={"gpu_utilization": 0.93, "memory": 0.5})
    attempts.append(make_attempt(3, placement=PLACEMENT, nodes=[node, node]))
    facts = {"project": PROJECT, "placement": PLACEMENT, "reason": REASON, "attempts": attempts}
    client.all_jobs = {
        NAME: make_job(NAME, "running", attempt=3, avoid={PLACEMENT: at(1e10)}, **facts),
        "b": make_job("b", "failed", **facts),
    }
    cron = TaskSpec(
        name="n", run="x", schedule=JobSchedule(cron="0 3 * * 1-5", time_zone="Asia/Tokyo")
    )
    client.all_jobs[NIGHTLY] = make_job(
        NIGHTLY, "queued", task=cron, held=True, not_before=at(9), project=PROJECT, reason=REASON
    )
    client.story = [make_event(1, "placed", REASON), make_event(86_400, "exited", REASON, rank=3)]
    gang = "rm-0-01jdqk3w5t9xz7e2-12"
    client.found = [
        wire.CleanupItem(kind="gang", name=gang, where=PLACEMENT, why=REASON, done=False)
    ]
    client.rows = [
        wire.NodeListing(
            project=PROJECT,
            job=NAME,
            job_id="x",
            attempt=3,
            rank=rank,
            gang=gang,
            placement=PLACEMENT,
            phase="running",
            rank_phase="running",
            rate_micros_per_hour=23_900_000,
            since=at(0),
            heard_at=at(1),
            devices=[f"GPU-{number}" for number in range(8)],
        )
        for rank in range(2)
    ]
    client.named = [
        wire.MachineView(
            name=MACHINE,
            project=PROJECT,
            user="ada",
            state="idle",
            job=NAME,
            waiting=0,
            placement=PLACEMENT,
            has="2 x RTX4090 24GB",
            nodes=1,
            since=at(0),
            kept_until=at(9),
            keep_s=1800,
            rate_micros_per_hour=23_900_000,
            spent_micros=1_000_000,
        )
    ]
    bill = wire.AuditRow(
        job=NAME,
        attempt=1,
        gang=gang,
        placement=PLACEMENT,
        billed_micros=1_000_000,
        unsure_micros=0,
        reported_micros=None,
        verdict="forgotten",
    )
    answers = {
        "joined": [
            wire.MachineRow(
                name=MACHINE, state="joined", has="2 x RTX4090 24GB, " * 6, joined_at=at(0)
            )
        ],
        "quotas": wire.QuotaReport(quotas=[make_quota()], untold=[]),
        "audit": wire.AuditReport(bills=[bill], problems=[]),
        "secrets": [wire.SecretRow(name=NAME.upper(), updated_at=at(0))],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(client, name, lambda *_, answer=answer: answer, raising=False)
    for name, rows in make_accounts().items():
        monkeypatch.setattr(AccountClient, name, lambda *_, rows=rows: rows)
    monkeypatch.setattr(account_wire, "list_keys", lambda *_: [KEY, replace(KEY, place=None)])
    monkeypatch.setattr(account_wire, "list_credentials", lambda *_: [CREDENTIAL])
    monkeypatch.setattr(policy_wire, "list_policies", lambda *_: [POLICY])
    monkeypatch.setattr(array_wire, "read_array", lambda *_: ARRAY)
    monkeypatch.setattr(queue_wire, "read_shares", lambda *_: SHARES)
    monkeypatch.setattr(pool_wire, "list_pools", lambda *_: [POOL])
    monkeypatch.setattr(maintenance_wire, "list_hosts", lambda *_: [HOST])
    monkeypatch.setattr(maintenance_wire, "list_reservations", lambda *_: HOST.reservations)
    monkeypatch.setattr(account_wire, "list_trusts", lambda *_: [TRUST])
    monkeypatch.setattr(policy_wire, "list_budgets", lambda *_: [BUDGET])
    monkeypatch.setattr(usage, "read_charges", lambda *_: [])
    monkeypatch.setattr(usage, "read_runs", lambda *_: [IDLE])
    monkeypatch.setattr(usage, "list_used_machines", lambda *_: [USED])
    monkeypatch.setattr(usage, "list_offers_of", lambda *_: [COMMITTED])
    monkeypatch.setattr(account_wire, "read_newest", lambda *_, **filters: [make_audit_row()])
    return client


def make_audit_row() -> account_wire.AuditLogRow:
    entry = AuditEntry(
        at=at(0),
        signed_in=True,
        account=USER,
        address="2001:db8:85a3:1234:1234:8a2e:1370:7334",
        action="PUT /v1/projects/{project}/roles/{account}/{role}",
        target={"project": PROJECT, "account": USER, "role": "operator"},
        after={"roles": "admin, billing, operator"},
    )
    return convert(asdict(seal(entry, EMPTY)), account_wire.AuditLogRow)


def make_accounts() -> dict[str, list[Any]]:
    """What each method of the client for accounts returns."""
    token = account_wire.TokenView(
        id="0123456789abcdef",
        account=USER,
        label=REASON,
        scopes=["operate", "run", "spending", "view"],
        project=PROJECT,
        created_at=at(0),
        expires_at=at(9),
        revoked_at=None,
        last_used_at=at(5),
    )
    roles = ["admin", "billing"]
    return {
        "accounts": [account_wire.AccountView(name=USER, kind="service", created_at=at(0))],
        "tokens": [token],
        "projects": [
            account_wire.ProjectView(name=PROJECT, parent="company", roles=roles, archived_at=at(0))
        ],
        "roles": [account_wire.RoleView(account=USER, project=PROJECT, role="operator")],
    }


TABLES = {  # command -> the names that its table must contain
    "ps": [NAME],
    f"status {NAME}": [PLACEMENT],
    f"events {NAME}": ["exited"],
    "context list": ["local"],
    "cost": [NAME],
    f"cost {NAME}": [],
    "cost --audit": [NAME],
    "nodes": [NAME],
    "nodes hosts": ["ssh/" + MACHINE],
    "nodes who": ["ssh/" + MACHINE, NAME],
    "reservations list": [PROJECT],
    "joined": [MACHINE],
    "machines": [MACHINE],
    "quota": ["Standard NDSH100v5 Family vCPUs"],
    "gc": ["rm-0-01jdqk3w5t9xz7e2-12"],
    "schedules": [NIGHTLY],
    "secret list": [NAME.upper()],
    "secret keys": ["aes-0123456789abcdef"],
    "user list": [USER],
    "token list": [USER, "0123456789abcdef"],
    "project list": [PROJECT],
    f"role list -p {PROJECT}": [USER],
    f"diff {NAME} b": ["result.phase"],
    "audit list": [PROJECT],
    f"policy show -p {PROJECT}": [PROJECT],
    "ps tune --best validation_loss:min": [f"{NAME}.9999", "0.123456789", "adam"],
    "shares": [PROJECT, "33.3%"],
    "pool list": [NAME],
    f"credential list -p {PROJECT}": ["primeintellect"],
    "trust list": ["company"],
    "advise": [NAME],
    "reserve advise": ["h100-instance-with-a-long-name"],
    "budget list": ["b" * 63, PROJECT],
    "check": ["kubernetes"],
    "init --list": ["hpo-sweep"],
    "offers --gpu H100:8 --limit 40": ["p5.48xlarge", "datacrunch"],
    "offers --accelerators": ["RTX-PRO-6000"],
    "catalog info": ["primeintellect"],
    "catalog sources": ["primeintellect"],
    "plan TASK": ["datacrunch"],
    "plan NONE": [],
}


# without a capability that brings templates, there are none
NEEDS_TEMPLATES = (
    {"init --list"}
    if not any(each.templates for each in find_capabilities().capabilities)
    else set[str]()
)


@pytest.mark.parametrize("width", [80, 50, 200], indirect=True)
@pytest.mark.parametrize("command", [each for each in TABLES if each not in NEEDS_TEMPLATES])
def test_tables_keep_names_whole_and_fit_the_terminal(
    long_names: FakeClient, width: int, command: str, tmp_path: Path
) -> None:
    (tmp_path / "TASK").write_text("name: t\nrun: 'true'\nresources: {gpu: H100:8}\n")
    (tmp_path / "NONE").write_text("name: t\nrun: 'true'\nresources: {gpu: H100:8, cpu: 9999}\n")
    words = [
        str(tmp_path / word) if word.isupper() and word in "TASK NONE" else word
        for word in command.split()
    ]
    shown = CliRunner().invoke(cli, words, prog_name="cavvy")
    assert shown.stdout, shown.output
    for name in TABLES[command]:
        assert name in shown.stdout
    if not command.startswith(("ps", "nodes")):  # their free text may be cut
        assert "…" not in shown.stdout
    table = [line for line in shown.stdout.splitlines() if "  " in line]  # without sentences
    longest = max(len(word) for line in table for word in line.split())
    for line in table:
        assert text_width(line) <= max(width, longest + 2), line


def test_every_command_with_a_table_is_rendered_here() -> None:
    root = Path(cavvy.cli.__file__).parent
    with_table = {name for path in root.rglob("*.py") for name in list_tables(path)}
    assert {"events", "joined", "user"} <= with_table
    rendered = {command.split()[0] for command in TABLES} | {"arrays"}  # `ps ARRAY`
    assert with_table - rendered <= APART | {"down", "summary"}


def list_tables(path: Path) -> Iterator[str]:
    """The commands whose part of the file prints a table: in a file of several commands, the part
    of each begins with its function `NAME_command`. Elsewhere, the name of the file or folder."""
    name = path.parent.name if path.stem in ("__init__", "tables") else path.stem
    for part in ast.parse(path.read_text()).body:
        if isinstance(part, ast.FunctionDef) and part.name.endswith("_command"):
            name = part.name.removesuffix("_command")
        for node in ast.walk(part):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "rows_out":
                yield name


@settings(max_examples=50)
@given(
    st.lists(HEAD, max_size=5).map(lambda heads: [TableColumn("name"), *heads]),
    st.data(),
    st.integers(20, 120),
)
def test_a_table_fits_or_there_is_none(
    heads: list[TableColumn], data: st.DataObject, width: int
) -> None:
    cells = st.lists(WORDS, min_size=len(heads), max_size=len(heads))
    table = data.draw(st.lists(cells, min_size=2, max_size=4))
    widths = choose_widths(heads, table, width)
    kept = [index for index, head in enumerate(heads) if not head.drop]
    if widths is None:
        full = [max(text_width(row[index]) for row in table) for index in kept]
        assert sum(full) + 2 * (len(kept) - 1) > width
        return
    assert set(kept) <= set(widths)
    for row in table:
        made = row_lines(heads, row, widths)
        assert max(map(text_width, made)) <= width
        for index in widths:
            if heads[index].wrap:
                assert set(row[index].split()) <= set(" ".join(made).split())
            elif not heads[index].cut:
                assert row[index] in made[0]


def test_columns_that_are_the_same_in_all_rows_are_dropped_first() -> None:
    heads = [TableColumn("name"), TableColumn("site", drop=1), TableColumn("project", drop=2)]
    rows = [["NAME", "SITE", "PROJECT"], ["a", "here", "same"], ["b", "there", "same"]]
    assert choose_widths(heads, rows, 12) == {0: 4, 1: 5}
    assert choose_widths(heads, rows, 5) == {0: 4}
    assert choose_widths(heads, rows, 3) is None


def test_a_long_name_moves_below_its_row_rather_than_take_the_room_of_others() -> None:
    heads = [TableColumn("rank"), TableColumn("name", below=True), TableColumn("price", drop=1)]
    rows = [["#", "NAME", "PRICE"], ["1", "a-long-name", "$10.00"]]
    assert choose_widths(heads, rows, 22) == {0: 1, 1: 11, 2: 6}
    assert (widths := choose_widths(heads, rows, 21)) == {0: 1, 1: 0, 2: 6}
    assert row_lines(heads, rows[1], widths or {}) == ["1  $10.00", "    a-long-name"]
    assert choose_widths(heads, rows, 14) == {0: 1, 1: 11}


@pytest.mark.parametrize("width", [80], indirect=True)
def test_a_plan_on_a_narrow_terminal_shows_prices(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    task = "name: t\nrun: 'true'\nresources: {gpu: A100:8}\nwork: {duration: 10h}\n"
    (tmp_path / "task.yaml").write_text(task)
    shown = CliRunner().invoke(cli, ["plan", str(tmp_path / "task.yaml")]).stdout
    assert {"$/H", "TOTAL"} <= set(shown.split())


@pytest.mark.parametrize("width", [50], indirect=True)
def test_wide_output_has_all_columns(long_names: FakeClient, width: int) -> None:
    shown = CliRunner().invoke(cli, ["ps", "-o", "wide"], prog_name="cavvy").stdout
    assert PLACEMENT in shown
    assert "PROJECT" in shown
    assert "…" not in shown


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


def test_people_read_local_time_with_its_zone_and_programs_read_utc(
    client: FakeClient, new_york: None
) -> None:
    def run(*words: str) -> str:
        return CliRunner().invoke(cli, words, prog_name="cavvy").stdout

    client.story = [make_event(1, "placed", "starts")]
    assert run("events", "good").splitlines()[0].startswith("2026-01-01 EST")
    assert "22:04:06  " in run("events", "good")
    assert run("events", "good", "-f").startswith("22:04:06 EST  placed")
    assert "2026-01-01 22:04:05 EST by ada" in run("status", "good")
    charges = run("cost", "good").splitlines()
    assert "FROM (EST)" in charges[0]
    assert "2026-01-01 22:04:05" in charges[1]
    assert json.loads(run("events", "good", "-o", "json"))[0]["at"] == "2026-01-02T03:04:06+00:00"
    client.story.append(make_event(180 * 86_400, "done", "ended"))
    both = run("events", "good")
    assert "22:04:06 EST" in both
    assert " EDT  " in both


def test_texts_in_csv_are_no_formulas_and_stay_in_their_cells() -> None:
    odd = ["=1+1", "+cmd|x", "-2+3+cmd|x", "@SUM(A1)", "\tx", "\rx"]
    kept = ["-", "-1.5", "a=b", "one\rtwo", "", "-7"]
    out = io.StringIO()
    rows_out(["text", "number"], [(each, -7) for each in (*odd, *kept)], "csv", file=out)
    found = list(csv.reader(io.StringIO(out.getvalue(), newline="")))
    texts = [*(f"'{each}" for each in odd), *kept]
    assert found == [["text", "number"], *([each, "-7"] for each in texts)]
    assert "\r\n" not in out.getvalue()


def test_values_cannot_control_a_terminal() -> None:
    value = "a\x1b[2J\x9b2J\x7fb\nü"
    for kind, expected in (
        ("csv", r"a\x1b[2J\x9b2J\x7fb"),
        ("json", r"a\u001b[2J\u009b2J\u007fb\nü"),
    ):
        out = io.StringIO()
        rows_out(["lr"], [(value,)], kind, file=out)
        assert expected in out.getvalue()
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out.getvalue())
    assert json.loads(out.getvalue()) == [{"lr": value}]
    out = io.StringIO()
    rows_out(["lr"], [(value,)], title=f"{value}\u202e", file=out)
    pairs_out([(f"{value}\u202e", value)], file=out)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out.getvalue())


def test_messages_wrap_between_words_and_commands_stay_whole() -> None:
    text = (
        "t.yaml:3:1: unknown key 'foo' in `resources`\n"
        "    3 | foo: 3  # a line of the user's file that is as long as it is\n"
        "      | ^^^\n"
        "  expected: one of accelerators, cloud, cpus; `cavvy run t.yaml --as cavvy --yes` reads it"
    )
    shown = wrap_message(text, 40, first=7)
    assert shown.splitlines() == [
        "t.yaml:3:1: unknown key 'foo' in",
        "`resources`",
        "    3 | foo: 3  # a line of the user's file that is as long as it is",
        "      | ^^^",
        "  expected: one of accelerators, cloud,",
        "  cpus;",
        "  `cavvy run t.yaml --as cavvy --yes`",
        "  reads it",
    ]
    assert wrap_message(text, None) == text
    assert [wrap_message(each, 1) for each in ("a", "")] == ["a", ""]


def test_every_note_goes_through_the_function_that_wraps_it() -> None:
    plain = re.compile(r"echo\(\s*f?[\"']note: ")
    sources = [path for path in Path(cavvy.cli.__file__).parents[1].rglob("*.py")]
    assert len(sources) > 500
    assert [str(path) for path in sources if plain.search(path.read_text("utf-8"))] == []
