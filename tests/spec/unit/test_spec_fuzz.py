"""Whatever a file holds, it gives a task or a SpecError with places; and a written task is read
back as it was.
"""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cavvy.cli.init import StarterAnswers, make_starter
from cavvy.domain.tasks import (
    AcceleratorNeed,
    CheckpointPolicy,
    JobLimits,
    NetworkNeed,
    ResourceSpec,
    RetryPolicy,
    SpotPolicy,
    TaskSpec,
    Workdir,
    Workload,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.spec import SpecError
from cavvy.spec.fields.params import escape
from cavvy.spec.fields.task import TASK
from cavvy.spec.overrides import sections
from cavvy.spec.problems import SpecProblem
from cavvy.task_files import parse_task

NOW = datetime(2030, 1, 1, tzinfo=UTC)
KEYS = sorted(
    {field.name for section in sections(TASK) for field in section.fields}
    | {"<<", "params.x", "lr"}
)
ODD = (
    "~ true no -1 0 1e999 8..32 64GB.. H100:8 ${{ 1h &a *a !t | ' [ { $1e30 s3://a/b git@a:b@c "
    "https://[::1"
)
VALUES = st.one_of(
    st.sampled_from(ODD.split()),
    st.sampled_from(
        ("", "9" * 400, "9" * 30 + "d", "${{ params.lr }}", "&a x", "0 3 * * *", "\x00", "\ud800")
    ),
    st.sampled_from(("2030-01-01T00:00Z", "0001-01-01T00:00+14:00", "9999-12-31T23:59-14:00")),
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
)
LINES = st.builds(
    lambda indent, dash, key, value: f"{' ' * indent}{dash}{key}: {value}",
    st.integers(0, 6),
    st.sampled_from(["", "", "", "- "]),
    st.sampled_from(KEYS),
    VALUES,
)


def problems_of(text: str, params: dict[str, str]) -> tuple[SpecProblem, ...]:
    """What is wrong with a file; anything but SpecError fails the test."""
    try:
        task = parse_task(text, params=params, now=NOW)
    except SpecError as error:
        return error.problems
    assert task.run
    assert re.fullmatch("[a-z0-9-]{1,63}", task.name)
    return ()


def check(text: str, params: dict[str, str]) -> None:
    lines = text.count("\n") + len(re.findall("[\r\x85\u2028\u2029]", text)) + 1
    for problem in problems_of(text, params):
        assert problem.message
        assert str(problem)
        assert 0 <= problem.line <= lines
        assert problem.column >= (1 if problem.line else 0)


@given(st.text(), st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
def test_any_text(text: str, params: dict[str, str]) -> None:
    check(text, params)


@settings(max_examples=400)
@given(
    st.lists(LINES, max_size=12), st.dictionaries(st.sampled_from(["lr", "n"]), VALUES, max_size=1)
)
def test_anything_like_a_task_file(lines: list[str], params: dict[str, str]) -> None:
    check("\n".join(["params: {lr: 0.1}", "run: x", *lines]), params)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | VALUES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6))
def test_any_document_of_known_keys(document: dict[str, object]) -> None:
    check(json.dumps({"run": "x", **document}), {})


# Round trip: a task, written as its author would write it, is read back the same.

measured = st.sampled_from(
    ["cpu", "cpu:16", "H100", "H100:8", "a100", "RTX 4090", "nvidia", "TPU-v5e:4"]
)
slugs = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
texts = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\x85\u2028\u2029\ufeff"),
    min_size=1,
)
filled = texts.filter(lambda text: bool(text.strip()))
variables = st.from_regex(r"[A-Z][A-Z0-9_]{0,10}", fullmatch=True).filter(
    lambda name: not name.startswith("CAVVY_")
)
mib = st.integers(1, 1 << 24)
seconds = st.integers(1, 86400 * 365).map(lambda count: timedelta(seconds=count))
accelerators = st.builds(
    AcceleratorNeed,
    name=st.sampled_from(["H100", "A100", "MI300X"]),
    count_min=st.integers(1, 8),
    count_max=st.none() | st.integers(9, 16),
    memory_min_mib=st.just(40 * 1024),
    memory_max_mib=st.just(80 * 1024),
)
resources = st.builds(
    ResourceSpec,
    accelerators=st.lists(accelerators, max_size=3, unique=True).map(tuple),
    cpus_min=st.integers(1, 64).map(float),
    cpus_max=st.none() | st.integers(64, 128).map(float),
    memory_min_mib=mib,
    memory_max_mib=st.none() | st.just(1 << 25),
    disk_gib=st.none() | st.integers(1, 10_000),
    spot=st.sampled_from(SpotPolicy),
    providers=st.lists(slugs, max_size=2, unique=True).map(tuple),
    regions=st.lists(slugs, max_size=2, unique=True).map(tuple),
    network=st.none() | st.builds(NetworkNeed, min_mbps=st.integers(1, 1_000_000)),
    max_rate=st.none() | st.builds(HourlyRate, st.integers(0, 1 << 50)),
)
limits = st.builds(
    JobLimits,
    deadline=st.none()
    | st.datetimes(datetime(2030, 1, 2), datetime(2090, 1, 1), timezones=st.just(UTC)),
    duration=st.none() | seconds,
    budget=st.none() | st.integers(1, 1 << 60).map(Money),
    idle=st.none() | seconds.filter(lambda length: length >= timedelta(seconds=10)),
    unattended=seconds.filter(lambda length: length >= timedelta(seconds=10)),
)
limits |= limits.filter(lambda each: each.idle is not None).map(
    lambda each: replace(each, idle_gpu_percent=5.0)
)
tasks = st.builds(
    TaskSpec,
    name=slugs,
    project=slugs,
    run=filled,
    setup=st.none() | filled,
    setup_uses=st.none() | st.lists(slugs, max_size=2, unique=True).map(tuple),
    tags=st.dictionaries(slugs, texts.map(lambda text: text[:200]), max_size=2),
    priority=st.integers(-100, 100),
    resources=resources,
    nodes=st.integers(1, 100),
    image=st.none() | slugs,
    workdir=st.none()
    | slugs.map(lambda path: Workdir(path=path))
    | st.from_regex("[0-9a-f]{40}", fullmatch=True).map(
        lambda hash: Workdir(git="https://x.org/a", commit=hash)
    ),
    env=st.dictionaries(variables, texts, max_size=3),
    checkpoint=st.none() | st.builds(CheckpointPolicy, path=slugs, every=st.none() | seconds),
    limits=limits,
    retry=st.builds(
        RetryPolicy,
        preemption=st.none() | st.integers(0, 9),
        node=st.none() | st.integers(0, 9),
        exit=st.none() | st.integers(1, 9),
        exit_codes=st.lists(st.integers(1, 255), max_size=3, unique=True).map(tuple),
    ),
    work=st.none()
    | st.builds(Workload, flops=st.floats(1, 1e30), efficiency=st.floats(0.001, 1))
    | st.builds(
        Workload,
        samples=st.floats(1, 1e30),
        rates=st.dictionaries(measured, st.floats(1, 1e9), min_size=1),
    ),
    grace=st.integers(0, 3600).map(lambda count: timedelta(seconds=count)),
).map(
    lambda task: (
        task if task.setup and task.workdir and not task.image else replace(task, setup_uses=None)
    )
)


def _setup(task: TaskSpec) -> object:
    text = escape(task.setup) if task.setup else None
    return text if task.setup_uses is None else {"run": text, "uses": list(task.setup_uses)}


def written(task: TaskSpec) -> dict[str, Any]:
    """The document that an author would write for this task."""
    need, limit, retry, work = task.resources, task.limits, task.retry, task.work
    folder = task.workdir

    def some(**fields: object) -> dict[str, object]:
        return {name: value for name, value in fields.items() if value not in (None, (), {})}

    def tries(count: int | None) -> int | str:
        return "unlimited" if count is None else count

    def length(value: timedelta | None) -> str | None:
        return f"{value.total_seconds():.0f}s" if value is not None else None

    return some(
        name=task.name,
        project=task.project,
        run=escape(task.run),
        setup=_setup(task),
        tags={name: escape(value) for name, value in task.tags.items()},
        priority=task.priority,
        nodes=task.nodes,
        image=task.image,
        workdir=folder and (folder.path or {"git": folder.git, "commit": folder.commit}),
        env={name: escape(value) for name, value in task.env.items()},
        checkpoint=task.checkpoint
        and some(path=task.checkpoint.path, every=length(task.checkpoint.every)),
        resources=some(
            gpu=[
                f"{each.name}:40GB..80GB:{each.count_min}"
                + (f"..{each.count_max}" if each.count_max else "")
                for each in need.accelerators
            ],
            cpu=f"{need.cpus_min:g}..{need.cpus_max:g}" if need.cpus_max else f"{need.cpus_min:g}+",
            memory=f"{need.memory_min_mib}MB"
            + (f"..{need.memory_max_mib}MB" if need.memory_max_mib else ""),
            disk=need.disk_gib,
            spot=need.spot.value,
            providers=list(need.providers),
            regions=list(need.regions),
            network=f"{need.network.min_mbps}Mbps" if need.network else None,
            max_price=f"${need.max_rate.usd}/h" if need.max_rate else None,
        ),
        limits=some(
            deadline=limit.deadline.isoformat() if limit.deadline else None,
            duration=length(limit.duration),
            budget=str(limit.budget.usd) if limit.budget else None,
            idle={"gpu": "5%", "for": length(limit.idle)}
            if limit.idle_gpu_percent
            else length(limit.idle),
            unattended=length(limit.unattended),
        ),
        retry={
            "preemption": tries(retry.preemption),
            "node": tries(retry.node),
            "exit": tries(retry.exit),
            "exit_codes": list(retry.exit_codes),
        },
        work=work
        and some(
            flops=work.flops, efficiency=work.efficiency, samples=work.samples, rates=work.rates
        ),
        grace=length(task.grace),
    )


@settings(max_examples=200)
@given(tasks)
def test_a_task_survives_being_written_and_read(task: TaskSpec) -> None:
    assert parse_task(json.dumps(written(task), ensure_ascii=False), now=NOW) == task


@given(
    st.builds(
        StarterAnswers,
        name=slugs,
        run=st.lists(filled, min_size=1, max_size=3).map("\n".join).map(str.strip).filter(bool),
        gpu=st.sampled_from(["", "H100:8", "A100:80GB:1..4", "24GB"]),
        spot=st.sampled_from(SpotPolicy),
        checkpoint=st.just("") | slugs | st.sampled_from(["a b", "x: y", "true", "- a", "#c"]),
        budget=st.sampled_from(["", "25", "$2.50"]),
    )
)
def test_every_starter_is_a_valid_task_file(answers: StarterAnswers) -> None:
    task = parse_task(make_starter(answers), now=NOW)
    assert task.name == answers.name
    assert [line.strip() for line in task.run.splitlines()] == [
        line.strip() for line in answers.run.splitlines()
    ]
    assert (task.checkpoint.path if task.checkpoint else "") == answers.checkpoint
