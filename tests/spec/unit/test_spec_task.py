"""The task file: what each key means, and what each mistake is told."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cavvy.domain.tasks import (
    AcceleratorNeed,
    CheckpointPolicy,
    IndexRange,
    JobLimits,
    JobSchedule,
    NetworkNeed,
    NodeCheck,
    ResourceSpec,
    RetryPolicy,
    SpotPolicy,
    StartWindow,
    TaskSpec,
    Transfer,
    WebhookTarget,
    WindowSpan,
    Workdir,
    Workload,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.spec import SpecError
from cavvy.spec.fields.task import TASK
from cavvy.spec.overrides import sections
from cavvy.spec.problems import ProblemNotes
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode, compose_all
from cavvy.task_files import load_task, parse_file, parse_task

NOW = datetime(2030, 1, 1, tzinfo=UTC)
FULL = """\
name: train
project: vision
tags: {team: vision, number: 3}
priority: -5
params: {lr: 0.1}
resources:
  instance: p5.48xlarge
  gpu: [H100:8, {name: A100, memory: 40GB..80GB, count: 1..4}]
  cpu: 8..32
  memory: 64
  disk: {size: 200GB, type: gp3}
  spot: auto
  providers: local
  regions: [eu, us-east-1]
  network: 100Gbps
  max_price: $15.50/h
nodes: 2
image: ghcr.io/team/image:1
workdir: {git: "https://example.org/a.git", commit: ABCDEF1}
setup: make
run: |
  echo ${{ params.lr }}
env: {A: 1, B: "", C: yes, D: 1.10}
secrets: [HF_TOKEN]
inputs: [{source: /data/a, target: ./data}]
outputs: [{source: results, target: "file:///data/b"}]
checkpoint: {path: checkpoints/, every: 10m}
limits: {deadline: 2031-01-01T10:00+02:00, duration: 6h, budget: 25, idle: 30m, unattended: 12h}
retry: {preemption: 5, node: unlimited, exit: 2, exit_codes: [1, 137], delay: 30s}
schedule: {at: 2030-05-01T00:00Z}
work: {samples: 5e6, rates: {H100: 5200, cpu: 40}, precision: fp32, efficiency: 0.3}
webhooks: [https://example.org/a, {url: https://example.org/b, on: failure}]
grace: 60
"""


def problems(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse_task(text, now=NOW)
    return str(caught.value)


def one(line: str) -> str:
    """The only problem of a file that is right but for one line."""
    with pytest.raises(SpecError) as caught:
        parse_task(line if "run:" in line else f"run: x\n{line}", now=NOW)
    assert len(caught.value.problems) == 1, str(caught.value)
    return str(caught.value)


def test_every_key_reaches_the_task() -> None:
    assert parse_task(FULL, now=NOW) == TaskSpec(
        name="train",
        project="vision",
        tags={"team": "vision", "number": "3"},
        priority=-5,
        params={"lr": 0.1},
        resources=ResourceSpec(
            instance="p5.48xlarge",
            accelerators=(
                AcceleratorNeed(name="H100", count_min=8),
                AcceleratorNeed(
                    name="A100",
                    count_min=1,
                    count_max=4,
                    memory_min_mib=40 * 1024,
                    memory_max_mib=80 * 1024,
                ),
            ),
            cpus_min=8,
            cpus_max=32,
            memory_min_mib=64 * 1024,
            disk_gib=200,
            disk_type="gp3",
            spot=SpotPolicy.AUTO,
            providers=("local",),
            regions=("eu", "us-east-1"),
            network=NetworkNeed(min_mbps=100_000),
            max_rate=HourlyRate(15_500_000),
        ),
        nodes=2,
        image="ghcr.io/team/image:1",
        workdir=Workdir(git="https://example.org/a.git", commit="abcdef1"),
        setup="make",
        run="echo 0.1\n",
        env={"A": "1", "B": "", "C": "yes", "D": "1.10"},
        secrets=("HF_TOKEN",),
        inputs=(Transfer(source="/data/a", target="data"),),
        outputs=(Transfer(source="results", target="/data/b"),),
        checkpoint=CheckpointPolicy(path="checkpoints", every=timedelta(minutes=10)),
        limits=JobLimits(
            deadline=datetime(2031, 1, 1, 8, tzinfo=UTC),
            duration=timedelta(hours=6),
            budget=Money(25_000_000),
            idle=timedelta(minutes=30),
            unattended=timedelta(hours=12),
        ),
        retry=RetryPolicy(
            preemption=5, node=None, exit=2, exit_codes=(1, 137), delay=timedelta(seconds=30)
        ),
        schedule=JobSchedule(at=datetime(2030, 5, 1, tzinfo=UTC)),
        work=Workload(
            samples=5e6, rates={"H100": 5200.0, "cpu": 40.0}, precision="fp32", efficiency=0.3
        ),
        webhooks=(
            WebhookTarget(url="https://example.org/a"),
            WebhookTarget(url="https://example.org/b", on=("failure",)),
        ),
        grace=timedelta(seconds=60),
    )


def test_a_task_may_choose_how_its_programs_stay_on_a_node() -> None:
    text = 'name: x\nrun: "true"\nenv: {CAVVY_REJOINS: "0", CAVVY_FORK_RANKS: "1"}'
    assert parse_task(text, file="x.yaml").env == {"CAVVY_REJOINS": "0", "CAVVY_FORK_RANKS": "1"}


@pytest.mark.parametrize("name", ["CAVVY_REJOINS", "CAVVY_FORK_RANKS"])
def test_how_its_programs_stay_is_0_or_1(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name} is 'true'"):
        parse_task(f'name: x\nrun: "true"\nenv: {{{name}: "true"}}', file="x.yaml")


def test_the_shortest_file() -> None:
    assert parse_task("run: x", file="/some/My Train.yaml") == TaskSpec(name="my-train", run="x")
    assert parse_task("run: x\nresources:\nenv:\nlimits:\n", file="a.yaml") == TaskSpec(
        name="a", run="x"
    )


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ("8", 8, None),
        ("8+", 8, None),
        ("8..", 8, None),
        ("8..32", 8, 32),
        ("..32", None, 32),
        ("0.5", 0.5, None),
    ],
)
def test_ranges_of_cpus(value: str, least: float | None, most: float | None) -> None:
    need = parse_task(f"run: x\nresources: {{cpu: {value}}}").resources
    assert (need.cpus_min, need.cpus_max) == (least, most)


def test_memory_for_each_cpu() -> None:
    need = parse_task(
        "run: x\nresources: {memory: 4x, any_of: [{cpu: 8+}, {memory: 16GB}]}"
    ).resources
    first, second = need.choices
    assert (first.cpus_min, first.memory_min_mib, first.memory_per_cpu_mib) == (8, None, 4096)
    assert (second.memory_min_mib, second.memory_per_cpu_mib) == (16_384, None)
    assert parse_task("run: x\nresources: {memory: 2.5x}").resources.memory_per_cpu_mib == 2560
    assert "is too little memory" in problems("run: x\nresources: {memory: 0x}")
    assert "cannot read '4x..8x' as memory" in problems("run: x\nresources: {memory: 4x..8x}")


@pytest.mark.parametrize(
    ("value", "git", "commit", "path"),
    [
        (".", None, None, "."),
        ("../src", None, None, "../src"),
        ("git@example.org:team/a.git@abcdef123", "git@example.org:team/a.git", "abcdef123", None),
        ("https://example.org/a@abcdef1", "https://example.org/a", "abcdef1", None),
        ("ssh://git@example.org/a.git@ABCDEF1", "ssh://git@example.org/a.git", "abcdef1", None),
    ],
)
def test_working_folders(value: str, git: str | None, commit: str | None, path: str | None) -> None:
    assert parse_task(f"run: x\nworkdir: '{value}'").workdir == Workdir(
        git=git, commit=commit, path=path
    )


@pytest.mark.parametrize(
    ("deadline", "expected"),
    [
        ("8h", timedelta(hours=8)),
        ("1h 30 minutes", timedelta(minutes=90)),
        ("2030-07-01 18:00 Europe/Berlin", datetime(2030, 7, 1, 16, tzinfo=UTC)),
        ("2030-07-01T18:00:30Z", datetime(2030, 7, 1, 18, 0, 30, tzinfo=UTC)),
        ("2030-07-01 18:00 Z", datetime(2030, 7, 1, 18, tzinfo=UTC)),
    ],
)
def test_deadlines(deadline: str, expected: datetime | timedelta) -> None:
    limits = parse_task(f"run: x\nlimits: {{deadline: '{deadline}'}}", now=NOW).limits
    assert (limits.deadline or limits.deadline_after) == expected


def test_all_problems_are_told_at_once_and_in_order() -> None:
    said = problems("name: A b\nresorces: {}\nrun: x\nnodes: 0\nenv: {2A: x}\nlimits: {budget: -1}")
    lines = [line for line in said.splitlines() if line.startswith("task.yaml:")]
    assert [line.split(":")[1] for line in lines] == ["1", "2", "4", "5", "6"]
    assert said.endswith("5 problems.")


@pytest.mark.parametrize(
    ("line", "place", "words"),
    [
        ("resorces: {}", "2:1", "did you mean `resources`?"),
        ("resources: {memroy: 3}", "2:13", "did you mean `memory`?"),
        ("gpu: H100", "2:1", "`gpu` belongs under `resources`"),
        ("resources: {nodes: 2}", "2:13", "`nodes` belongs at the top of the file"),
        ("nodes: 1\nresources: {accelerators: H100}", "3:13", "write `gpu`"),
        ("nodes: 1\nresources: {use_spot: true}", "3:13", "`spot: only`"),
        ("resources: {spot: true}", "2:19", "`spot: only`"),
        ("resources: {spot: no}", "2:19", "`spot: never`"),
        ("resources: {spot: onyl}", "2:19", "did you mean `only`?"),
        ("resources: {gpu: H1O0}", "2:18", "did you mean H100"),
        ("resources: {gpu: [H100, A1000]}", "2:25", "A1000"),
        ("resources: {gpu: {name: H100, coun: 2}}", "2:31", "did you mean `count`?"),
        ("resources: {gpu: {H100: 8}}", "2:19", "write `gpu: H100:COUNT`"),
        ("resources: {gpu: {name: 'H100:8'}}", "2:25", "write `gpu: NAME:COUNT`"),
        ("resources: {gpu: H100, accelerator: A100}", "2:24", "are the same"),
        ("resources: {instance: p2.xlarge}", "2:23", "p2.xlarge is retired"),
        ("resources: {cpu: 32..8}", "2:18", "write 8..32"),
        ("resources: {cpu: many}", "2:18", "such as 8, 8+ or 8..32"),
        ("resources: {cpu: 0}", "2:18", "too few"),
        ("resources: {memory: 64XB}", "2:21", "16GB..64GB"),
        ("resources: {memory: -4}", "2:21", "delete the sign"),
        ("resources: {network: 100}", "2:22", "100Gbps"),
        ("resources: {max_price: cheap}", "2:24", "dollars per hour"),
        ("resources: {providers: [Local]}", "2:25", "did you mean local?"),
        ("resources: {providers: [a, a]}", "2:28", "twice"),
        ("resources: H100:8", "2:12", "a table with"),
        ("resources: []", "2:12", "`resources` is a list"),
        ("env: {}\nnum_nodes: 2", "3:1", "write `nodes`"),
        ("nodes: two", "2:8", "from 1 to 10,000"),
        ("nodes: 1.5", "2:8", "not a whole number"),
        ("priority: 1000", "2:11", "too large"),
        ("name: my_job\nenv: {}", "2:7", "write my-job"),
        (f"name: {'x' * 70}\nnodes: 2", "2:7", "longer than 63"),
        ("env: {B: }", "2:", "write ''"),
        ("env: {A-B: x}", "2:7", "write A_B"),
        ("env: {CAVVY_JOB: x}", "2:7", "reserved for Cavvy"),
        ("env: {A: [x]}", "2:10", "a list where one value was expected"),
        ("env: [A=1]", "2:6", "a list where a table was expected"),
        ("secrets: [1A]", "2:11", "write _1A"),
        ("env: {T: x}\nsecrets: [T]", "3:1", "in `env` and in `secrets`"),
        ("checkpoint: /data", "2:13", "write a relative path"),
        ("checkpoint: a/../../b", "2:13", "without .."),
        ("checkpoint: .", "2:13", "name a folder inside the working folder"),
        ("checkpoint: s3://bucket/x", "2:13", "is a URL"),
        ("checkpoint: {every: 5m}", "2:13", "`checkpoint.path` is missing"),
        ("checkpoint: {path: }", "2:14", "`checkpoint.path` is empty"),
        ("limits: {deadline: 2020-01-01T00:00Z}", "2:10", "was 3653d00h ago"),
        ("limits: {deadline: 2030-05-01}", "2:20", "write 2030-05-01T00:00Z"),
        ("limits: {deadline: 2030-05-01T10:00}", "2:20", "has no time zone"),
        ("limits: {deadline: '18:00'}", "2:20", "write the date too"),
        (
            "limits: {deadline: 2030-05-01 10:00 Europe/Berln}",
            "2:20",
            "did you mean Europe/Berlin?",
        ),
        ("limits: {deadline: 9999-12-31T23:00-12:00}", "2:20", "outside of the supported dates"),
        ("limits: {deadline: 2h, duration: 3h}", "2:24", "exceeds the deadline"),
        ("limits: {duration: 5 parsecs}", "2:20", "90s, 10m, 1h30m or 2d"),
        ("limits: {duration: 0}", "2:20", "too short"),
        ("limits: {duration: 99999999999999d}", "2:20", "exceeds the maximum length of time"),
        ("limits: {duration: 20000d}", "2:20", "longer than ten years"),
        ("limits: {budget: 0}", "2:10", "omit `budget`"),
        ("limits: {budget: -3}", "2:18", "such as 25"),
        ("limits: {timeout: 3h}", "2:10", "write `duration`"),
        ("grace: 2h", "2:8", "at most 1h00m"),
        ("nodes: 4..2", "2:8", "write 2..4"),
        ("nodes: 2..16\nsession: true", "2:1", "a session stays on its nodes"),
        ("notify: mian", "2:9", "did you mean `main`?"),
        ("notify: [all]", "2:9", "handlers, main or all"),
        ("keep: 25h", "2:7", "at most 1d00h"),
        ("keep: 10m\nvolumes: [{host: /data, path: /data}]", "2:1", "cannot be kept"),
        ("keep: 10m\nlimits: {duration: 1h}", "2:1", "reclaim the nodes when the duration ends"),
        ("retry: 3", "2:8", "a table with preemption"),
        ("retry: {exit_codes: [1]}", "2:9", "for example `exit: 3`"),
        ("retry: {exit: 2, exit_codes: [0]}", "2:31", "too small"),
        ("retry: {node: -1}", "2:15", "or `unlimited`"),
        ("schedule: 0 3 * * 1-9", "2:11", "not a valid weekday of a cron line"),
        ("schedule: {cron: 0 25 * * *}", "2:18", "not a valid hour of a cron line"),
        ("schedule: '*/0 * * * *'", "2:11", "not a valid minute of a cron line"),
        ("schedule: 0 0 30 2 *", "2:11", "no date matches '0 0 30 2 *'"),
        ("schedule: 0 0 31 4,6 *", "2:11", "no date matches '0 0 31 4,6 *'"),
        ("window: at night", "2:9", "is not a day or range of days"),
        ("window: 22:00-22:00", "2:9", "an empty range"),
        ("window: Mon-Fri", "2:9", "time range is missing"),
        ("window: off-peak Europe/Berlim", "2:9", "Europe/Berlin"),
        ("window: 22:00-25:00", "2:9", "outside of 00:00-24:00"),
        ("schedule: 2029-12-31T23:00Z", "2:1", "the start was 1h00m ago"),
        (
            "schedule: 2030-05-02T00:00Z\nlimits: {deadline: 2030-05-01T00:00Z}",
            "2:1",
            "must be before the deadline",
        ),
        ("schedule: tomorrow", "2:11", "a time with its zone"),
        ("schedule: {}", "2:11", "`at` or `cron` is missing"),
        ("schedule: {at: 2030-05-01T00:00Z, time_zone: UTC}", "2:35", "belongs to `cron`"),
        ("work: {flops: 1e20, samples: 3}", "2:8", "cannot be used together"),
        ("work: {samples: 3}", "2:7", "is not fully described"),
        ("work: {rates: {H100: 1}}", "2:7", "is not fully described"),
        ("work: {duration: 1h, samples: 3}", "2:8", "cannot be used together"),
        ("work: {flops: 1, measured_on: cpu}", "2:18", "has no effect without `duration`"),
        ("work: {duration: 1h, measured_on: A10O}", "2:35", "did you mean A100"),
        ("work: {duration: 1h, measured_on: 'gpu:8'}", "2:35", "exactly one accelerator"),
        ("work: {duration: 1h, measured_on: 'A100:1..8'}", "2:35", "exactly one accelerator"),
        ("work: {duration: 1h}\nresources: {gpu: [L4, H100:8]}", "2:1", "`measured_on: L4:1`"),
        ("work: {duration: 1h}\nresources: {gpu: 24GB}", "2:1", "`measured_on` is needed"),
        ("work: {flops: 0}", "2:15", "out of bounds"),
        ("work: {flops: nan}", "2:15", "out of bounds"),
        ("work: {flops: 1, precision: bfloat16}", "2:29", "did you mean `bf16`?"),
        ("work: {samples: 3, rates: {H1000: 3}}", "2:28", "did you mean H100?"),
        ("work: {samples: 3, rates: {'H100:x': 3}}", "2:28", "'x' is not a count"),
        ("limits: {duration: 0s}", "2:20", "at least 1ms; omit the key"),
        ("name: Ünïcode name\nenv: {}", "2:7", "write unicode-name"),
        ("webhooks: ftp://x", "2:11", "https://example.org/hook"),
        ("webhooks: {url: https://x.org, on: [success]}", "2:37", "did you mean `finish`?"),
        ("inputs: [{source: ftp://b/x, target: x}]", "2:19", "the scheme ftp:// is not supported"),
        ("inputs: [{source: hf://gpt2, target: x}]", "2:19", "names no repository"),
        ("inputs: [{source: hf://a/b@x?y, target: x}]", "2:19", "names no repository"),
        (
            "outputs: [{source: x, target: hf://a/b}]",
            "2:31",
            "cannot write to the Hugging Face Hub",
        ),
        ("inputs: [{source: data, target: x}]", "2:19", "`workdir`"),
        ("inputs: [{source: /data, target: /etc}]", "2:34", "is a system path"),
        (
            "inputs: [{source: /data, target: x, mode: stream}]",
            "2:37",
            "needs a URL as the source",
        ),
        ("inputs: [{from: /data, target: x}]", "2:11", "write `source`"),
        ("inputs: [{source: 'https://[::1', target: x}]", "2:19", "is not a URL"),
        ("commands: [a]  # run:", "1:1", "write `run: |`"),
        ("run: x\nlimits: {time: 2h}", "2:10", "write `duration`"),
        ("run: x\nkubernetes: {pod: {}}", "2:1", "`resources: {options: {kubernetes: {pod: …}}}`"),
        ("run: x\nresources: {kubernetes: {}}", "2:13", "`options: {kubernetes: {pod: …}}`"),
        ("inputs: /data", "2:9", "where a list was expected"),
        ("workdir: https://example.org/a.git", "2:10", "git ls-remote https://example.org/a.git"),
        (
            "workdir: https://example.org/a.git@main",
            "2:10",
            "git ls-remote https://example.org/a.git main",
        ),
        ("workdir: {git: https://example.org/a.git, ref: main}", "2:43", "not supported yet"),
        ("workdir: https://me:secret@example.org/a.git@abcdef1", "2:10", "password"),
        ("workdir: ~/src", "2:10", "only expanded by a shell"),
        ("image: docker:python:3", "2:8", "write python:3"),
        ("image: a b", "2:8", "is not an image name"),
        ("run: ''", "1:6", "the text is empty"),
        ('run: "a\\0b"', "1:6", "a NUL byte"),
        ("name: x\nrun:", "2:1", "`run` is empty"),
        ("tags: {a b: c}", "2:8", "cannot be a tag's name"),
    ],
)
def test_each_mistake_is_told_once_at_its_place(line: str, place: str, words: str) -> None:
    said = one(line)
    assert said.startswith(f"task.yaml:{place}"), said
    assert words in said


def test_a_file_without_run_shows_how_to_write_it() -> None:
    said = problems("name: x")
    assert "`run` is missing" in said
    assert "hint: write `run: " in said


@pytest.mark.parametrize("text", ["- run: x", "x", "3", "null"])
def test_a_file_that_is_no_table(text: str) -> None:
    assert problems(text).startswith("task.yaml:1:1: the file is ")


def plain(node: Node | None) -> object:
    match node:
        case ListNode():
            return [plain(item) for item in node.items]
        case MapNode():
            return {key.text: plain(value) for key, value in node.entries}
        case ScalarNode():
            return node.value
        case None:
            raise AssertionError


COMPARED = {"sweep": {"lr": [1, 2]}, "best": "val_loss:min"}
# What must stand beside a field for its example to mean anything, by the section's path.
BESIDE: dict[str, dict[str, object]] = {
    "params.NAME": {"default": 0.5},
    "inputs": {"source": "/a", "target": "b"},
    "outputs": {"source": "a", "target": "s3://b/c"},
    "webhooks": {"url": "https://example.org"},
    "checkpoint": {"path": "p"},
    "topology: slice": {"same": "rack"},
    "group": {"name": "g", "helper": True},
    ": best": {"sweep": {"lr": [1, 2]}},
    ": stop_early": COMPARED,
    ": search": {**COMPARED, "trials": 2},
    ": trials": {"sweep": {"lr": "0..99"}, "best": "val_loss:min"},
    "batch": {"input": "a.jsonl", "output": "/b"},
    "workdir": {"git": "https://example.org/a", "commit": "abcdef1"},
    "retry": {"exit": 1},
    "setup": {"run": "make"},
    "service.events": {"bucket": "s3://photos/in/"},
    "service.events: cron": {},
    "service.events: webhook": {"secret": "S"},
    "service.events: secret": {"webhook": "a"},
    "service.events: signature": {"webhook": "a", "secret": "S"},
    "service.routing: header": {"by": "header"},
    "resources.gpu: isolation": {"share": 0.25},
    ": parallel": {"array": "0-99"},
    ": sweep": {"params": {"lr": 0.1, "seed": 0}},
    "service.events: body": {"cron": "0 3 * * *"},
}
EXAMPLES = [
    (section.path, field.name, field.example)
    for section in sections(TASK)
    for field in section.fields
    if not field.refused and field.name != "time_zone"
]


@pytest.mark.parametrize(("path", "name", "example"), EXAMPLES)
def test_every_example_of_a_field_is_accepted(path: str, name: str, example: str) -> None:
    """The reference page shows these; a wrong one would teach a mistake."""
    (root,) = compose_all(example, ProblemNotes("example", example))
    document = plain(root)
    assert isinstance(document, dict)
    assert list(document) == [name]
    beside = {
        "samples": {"rates": {"cpu": 1}},
        "rates": {"samples": 1},
        "profile": {"samples": 1},
        "margin": {"samples": "1e6", "rates": {"H100": 5200}},
        "measured_on": {"duration": "10h"},
    }.get(name) or BESIDE.get(f"{path}: {name}", BESIDE.get(path, {}))
    if path == "work" and name in ("precision", "efficiency"):
        beside = {"flops": 1}
    if path == "params.NAME" and name in ("choices", "default"):
        beside = {"type": "str", "default": "adam"} if name == "choices" else {}
    if name == "mode":
        beside = {"source": "s3://b/x", "target": "x"}
    if name == "writable":
        beside = {"source": "s3://b/x", "target": "x", "mode": "mount"}
    if path == "image":
        beside = (
            {"name": "a"}
            if name == "login"
            else {"build": "."}
            if name in ("dockerfile", "target", "args")
            else {}
        )
    if path == "volumes":  # one source, and what is of this source alone
        source = (
            {"host": "/a"}
            if name in ("path", "read_only")
            else {"nfs": "nas:/e"}
            if name == "options"
            else {}
        )
        source = {"name": "a", "size": 5} if name in ("size", "type", "keep") else source
        beside = {"path": "/data", **source}
    document = {**beside, **document}
    for part in reversed([part for part in path.split(".") if part]):
        document = {
            part: document if part not in ("inputs", "outputs", "any_of", "ordered") else [document]
        }
    if name in ("metric", "value") and path == "service.replicas.target":
        document["service"]["replicas"]["target"] = {"metric": "waiting", "value": 4, **beside}
    if "service" in document:  # which can be read, but not run
        document = _complete_service(document, path, name)
        (served,) = parse_file(json.dumps(document), now=NOW).tasks
        assert served.service is not None
        return
    document = {
        "run": "x",
        "params": {"lr": 1},
        **({"nodes": 8} if "topology" in document else {}),
        **(COMPARED if path in ("stop_early", "search") else {}),
        **({"trials": 2} if path == "search" else {}),
        **(
            {"workdir": "."}
            if "setup" in document or path == "image" or name in ("image", "folder")
            else {}
        ),
        **document,
    }
    if "function" in document.get("batch", {}):
        del document["run"]
    if "edge" in document:
        del document["run"]
        document |= {"edge": _complete_step(document["edge"]), "after": "train"}
    task = parse_task(json.dumps(document), now=NOW)
    assert task != parse_task("run: x\nparams: {lr: 1}")


def test_outputs_may_be_sent_while_the_work_runs() -> None:
    task = parse_task("{run: x, outputs: [{source: a, target: 's3://b/c', every: 1m}]}")
    assert task.outputs == (Transfer(source="a", target="s3://b/c", every=timedelta(minutes=1)),)
    with pytest.raises(SpecError, match="`every` needs a URL as the target"):
        parse_task("{run: x, outputs: [{source: a, target: /b, every: 1m}]}")


def _complete_step(step: dict[str, Any]) -> dict[str, Any]:
    """Add the keys that a step needs beside the key of an example."""
    step.pop("rates", None)  # beside `samples`, which `work` has too
    if step.keys() & {"publish", "model", "main"}:
        return {"publish": "train", "model": "m", **step}
    if step.keys() & {"collect", "samples", "residency", "into"}:
        return {"collect": "m", "into": "a", **step}
    return {"deploy": "m", **step}


def _complete_service(document: dict[str, Any], path: str, name: str) -> dict[str, Any]:
    """Add the keys that a service needs beside the key of an example."""
    if path == "service.rate":
        rate = {"each": "header"} if name == "header" else {}
        document["service"]["rate"] = {"requests": 5, **rate, **document["service"]["rate"]}
    if path.startswith("service.slo"):
        document["service"]["models"] = ["m"]
    if path == "service.groups":  # by name
        groups = {"prefill": {}, "decode": {}, "router": {"run": "r"}}
        groups["router" if name == "router" else "decode"].update(document["service"]["groups"])
        document["service"]["groups"] = groups
    if path.startswith("service.fallback"):
        _complete_fallback(document["service"]["fallback"])
    if path == "service.edge":
        document["service"]["edge"].setdefault("model", "m")
    if path == "service.update":
        document["service"]["update"].setdefault("strategy", "canary")
    if path == "service" and name in ("adapters", "engine", "model", "options"):
        engine = {"engine": "vllm", "model": "m", **document["service"]}
        return {**document, "service": engine}
    return {"run": "x", "service": {"port": 80, **document["service"]}}


def _complete_fallback(entry: dict[str, Any]) -> None:
    """Add the keys that a fallback needs beside the key of an example."""
    if "openai" not in entry:
        entry.setdefault("service", "backup")
        return
    api = entry["openai"]
    api.setdefault("model", "m")
    if "price" in api:
        api["price"] = {"input": 1, "output": 2, **api["price"]}


def test_every_field_has_an_example() -> None:
    assert len(EXAMPLES) > 60
    assert all(example for _, _, example in EXAMPLES)


def test_hints_are_for_keys_that_do_not_exist() -> None:
    for section in sections(TASK):
        assert not set(section.hints) & {field.name for field in section.fields}, section.path
    assert "num_nodes" in TASK.hints


def test_setup_may_name_what_it_uses() -> None:
    task = parse_task("{run: x, workdir: ., setup: {run: make, uses: [./a.txt, src/]}}")
    assert (task.setup, task.setup_uses) == ("make", ("a.txt", "src"))
    assert parse_task("{run: x, setup: make}").setup_uses is None
    assert parse_task("{run: x, setup: {run: make, uses: []}}").setup_uses == ()
    assert "`workdir` is missing" in one("run: x\nsetup: {run: make, uses: [a]}")
    assert "leads out" in one("run: x\nworkdir: .\nsetup: {run: make, uses: [../a]}")
    assert "`setup.run` is missing" in one("run: x\nworkdir: .\nsetup: {uses: [a]}")
    assert "not supported with an `image`" in one(
        "run: x\nworkdir: .\nimage: a\nsetup: {run: make, uses: [a]}"
    )


def test_what_a_setup_uses_must_be_in_the_frozen_folder(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("{run: x, workdir: ., setup: {run: make, uses: [a.txt, b.txt]}}")
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").touch()
    assert load_task(file).task.setup_uses == ("a.txt", "b.txt")
    (tmp_path / ".cavvyignore").write_text("b.txt")
    with pytest.raises(
        SpecError, match=r"`setup\.uses` names b\.txt, which is not in the frozen"
    ) as caught:
        load_task(file)
    assert "excludes it" in str(caught.value)


def test_how_often_a_checkpoint_is_written_may_be_left_to_cavvy() -> None:
    task = parse_task("name: x\nrun: x\ncheckpoint: {path: c, every: auto}")
    assert task.checkpoint == CheckpointPolicy(path="c", auto=True)
    assert parse_task(
        "name: x\nrun: x\ncheckpoint: {path: c, every: 5m}"
    ).checkpoint == CheckpointPolicy(path="c", every=timedelta(minutes=5))


def test_schedules_and_windows() -> None:
    task = parse_task("name: x\nrun: x\nschedule: 0 3 * * 1-5\nwindow: off-peak Europe/Berlin")
    assert task.schedule == JobSchedule(cron="0 3 * * 1-5")
    assert task.window is not None
    assert (task.window.time_zone, len(task.window.spans)) == ("Europe/Berlin", 2)
    table = parse_task("name: x\nrun: x\nschedule: {cron: '*/5 * * * *', time_zone: Asia/Tokyo}")
    assert table.schedule == JobSchedule(cron="*/5 * * * *", time_zone="Asia/Tokyo")
    window = parse_task("name: x\nrun: x\nwindow: Fri-Mon 20:00-08:00").window
    assert window == StartWindow(
        spans=(WindowSpan(days=(0, 4, 5, 6), start_minute=1200, end_minute=480),),
        text="Fri-Mon 20:00-08:00",
    )


def test_the_check_of_nodes_is_a_flag_or_a_table() -> None:
    def check(text: str) -> NodeCheck | None:
        return parse_task(f"name: a\nrun: 'true'\nresources: {{check: {text}}}\n").resources.check

    assert check("false") is None
    assert check("true") == NodeCheck(share=0.6, link_mbps=None)
    assert check("{share: 0.8, link: 10Gbps}") == NodeCheck(share=0.8, link_mbps=10_000)


def test_alternatives_are_laid_over_what_stands_beside_them() -> None:
    need = parse_task(
        "run: x\nresources:\n  disk: 100GB\n  spot: only\n"
        "  any_of: [{gpu: H100:8}, {gpu: A100:80GB:8, spot: never, disk: {size: 50GB, type: gp3}}]"
    ).resources
    assert (need.accelerators[0].name, need.disk_gib, need.spot) == ("H100", 100, SpotPolicy.ONLY)
    first, second = need.choices
    assert first == need
    assert not need.ordered
    assert (second.accelerators[0].name, second.disk_gib, second.disk_type, second.spot) == (
        "A100",
        50,
        "gp3",
        SpotPolicy.NEVER,
    )
    assert second.choices == need.choices
    assert parse_task("run: x\nresources: {ordered: [{cpu: 8}, {cpu: 2}]}").resources.ordered
    alone = parse_task("run: x\nresources: {memory: 4GB, any_of: [{cpu: 8}]}").resources
    assert (alone.cpus_min, alone.memory_min_mib, alone.any_of) == (8, 4096, ())
    assert "`any_of` and `ordered` cannot be used together" in problems(
        "run: x\nresources: {any_of: [{}], ordered: [{}]}"
    )
    assert "cannot contain alternatives" in problems(
        "run: x\nresources: {any_of: [{any_of: []}, {}]}"
    )


def test_idle_may_be_measured_on_the_gpu() -> None:
    task = parse_task("name: t\nrun: a\nlimits: {idle: {gpu: 5%, for: 30m}}")
    assert (task.limits.idle, task.limits.idle_gpu_percent) == (timedelta(minutes=30), 5)
    for wrong in ("{for: 1s}", "{gpu: 100%}", "{gpu: 0, for: 30m}", "{gpu: low, for: 30m}"):
        with pytest.raises(SpecError):
            parse_task(f"name: t\nrun: a\nlimits: {{idle: {wrong}}}")


@pytest.mark.parametrize("text", ["inputs: [./data]", "inputs: ./data", "inputs: [3]"])
def test_the_error_of_a_section_shows_an_example(text: str) -> None:
    said = one(text)
    assert "`inputs: [{source: s3://bucket/images/, target: data/images}]`" in said
    assert "belong to `workdir`" in said


def test_a_batch_is_an_array_that_runs_our_program() -> None:
    text = "{batch: {input: 's3://b/rows/x.parquet', output: /out/, workers: 3}, run: './a \"$B\"'}"
    task = parse_task(text)
    assert task.array == (IndexRange(0, 2, 1),)
    assert [(each.source, each.target) for each in task.inputs] == [
        ("s3://b/rows/x.parquet", ".cavvy/input/x.parquet")
    ]
    assert task.workdir is None
    assert task.run == (
        "exec python3 .cavvy/batch.py --input .cavvy/input/x.parquet --output /out --rows 1000 "
        "--command './a \"$B\"'"
    )
    assert parse_task("{batch: {input: /a/b, output: /a/bc}, run: x}").array  # is beside it
    local = parse_task("batch: {input: rows.jsonl, output: /out, function: 'm:f', rows: 5}")
    assert local.workdir == Workdir(path=".")
    apart = parse_task(
        "{batch: {input: 's3://b/in/', output: 's3://b/out/', region: eu-central-1}, run: x}"
    )
    assert apart.inputs[0].region == apart.outputs[0].region == "eu-central-1"
    with pytest.raises(SpecError, match="eu-central-1"):
        parse_task(
            "{batch: {input: /in, output: 's3://b/out/', region: eu-central-1}, run: x, "
            "resources: {regions: [us]}}"
        )
    assert (apart.outputs[0].source, apart.outputs[0].target) == (
        ".cavvy/batch/results",
        "s3://b/out/",
    )
    assert apart.checkpoint is not None
    assert (apart.checkpoint.path, apart.checkpoint.storage) == (
        ".cavvy/batch",
        "s3://b/out/.batch",
    )
    assert "--striped --state .cavvy/batch/state" in apart.run
    brought = parse_task(
        "{batch: {input: rows/a.jsonl, output: /b}, run: x, inputs: [{source: /c, target: rows/}]}"
    )
    assert (brought.workdir, len(brought.inputs)) == (None, 1)
    assert local.run.endswith("--input rows.jsonl --output /out --rows 5 --function m:f")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("batch: {input: a, output: /b}", "the batch runs nothing"),
        ("{batch: {input: a, output: /b, function: 'm:f'}, run: x}", "are both set"),
        ("{batch: {input: a, output: b}, run: x}", "'b' is not an absolute path"),
        ("{batch: {input: ../a, output: /b}, run: x}", "leads out of the working folder"),
        ("{batch: {input: a, output: /b, function: m.f}}", "does not name a function"),
        ("{batch: {input: a, output: /b, format: xml}, run: x}", "is not one of the choices"),
        ("{batch: {input: a, output: /b}, run: x, array: 0-3}", "cannot be used with `batch`"),
        ("{batch: {input: a, output: /b}, run: x, service: {port: 1}}", "cannot be used with"),
        ("{batch: {input: /a, output: 's3://b/c'}, run: x, checkpoint: d}", "a checkpoint of its"),
        ("{batch: {input: /a, output: 'hf://a/b'}, run: x}", "cannot write to"),
        ("{batch: rows.jsonl, run: x}", "`batch` is"),
        ("{batch: {input: a}, run: x}", "`batch.output` is missing"),
        ("{batch: {input: /a/b, output: /a/b/out}, run: x}", "is inside the input"),
        ("{batch: {input: /a//b/, output: /a/./b}, run: x}", "is inside the input"),
    ],
)
def test_a_wrong_batch_says_why(text: str, told: str) -> None:
    with pytest.raises(SpecError, match=re.escape(told)):
        parse_task(text)


def test_a_step_of_the_server_refuses_what_only_a_program_has() -> None:
    text = "name: t\nedge: {deploy: m}\nencrypt: true\ngrace: 1m\nlimits: {deadline: 1h}\n"
    with pytest.raises(SpecError) as caught:
        parse_task(text)
    told = [f"`{name}` has no meaning with `edge`" for name in ("encrypt", "grace")]
    assert [each.message for each in caught.value.problems] == told
