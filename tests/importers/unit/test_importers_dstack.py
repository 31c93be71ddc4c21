"""dstack's configurations: what they mean here, what is kept, and what is wrong with them."""

import json
import subprocess
from datetime import timedelta

import pytest
from tests.records import make_offer

from cavvy.capabilities.importers.dstack.tasks import join_commands
from cavvy.catalog.fit import Constraint, meets
from cavvy.domain.tasks import AcceleratorNeed, JobSchedule, RetryPolicy, SpotPolicy, Workdir
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, Translation, parse_file, parse_task

FULL = """\
type: task
name: train
image: nvcr.io/nvidia/pytorch:24.05-py3
nodes: 2
repos: [.]
env:
  - HF_TOKEN
  - EPOCHS=3
commands:
  - pip install -r requirements.txt
  - torchrun --nnodes $DSTACK_NODES_NUM train.py
resources:
  gpu: H100,H200:80GB..:4..8
  cpu: 16..
  memory: 64GB..128GB
  disk: 1TB
  shm_size: 16GB
spot_policy: auto
backends: [aws, gcp]
regions: [us-east-1]
max_price: 20.5
max_duration: 6h
stop_duration: 2m
retry: {on_events: [no-capacity, interruption], duration: 1h}
priority: 5
tags: {team: vision}
"""
OPEN = 65_536


def run(more: str) -> Translation:
    return parse_file(f"type: task\ncommands: [x]\n{more}")


def keys(found: Translation, *, refused: bool) -> list[str]:
    return [each.key for each in found.kept if each.refused is refused]


def test_a_whole_task() -> None:
    found = parse_file(FULL)
    task = found.task
    assert task is not None
    assert (found.kind, found.what, found.refused) == ("dstack", "task", ())
    assert (task.name, task.nodes, task.image) == ("train", 2, "nvcr.io/nvidia/pytorch:24.05-py3")
    assert (
        task.run
        == "pip install -r requirements.txt &&\ntorchrun --nnodes $DSTACK_NODES_NUM train.py"
    )
    assert (task.env, task.secrets, task.workdir) == (
        {"EPOCHS": "3"},
        ("HF_TOKEN",),
        Workdir(path="."),
    )
    assert (task.tags, task.priority) == ({"team": "vision"}, 5)
    assert (task.limits.duration, task.grace) == (timedelta(hours=6), timedelta(minutes=2))
    assert task.retry == RetryPolicy(preemption=None, node=None, exit=0)
    request = task.resources
    assert request.accelerators == tuple(
        AcceleratorNeed(name=name, count_min=4, count_max=8, memory_min_mib=81_920)
        for name in ("H100", "H200")
    )
    assert (request.cpus_min, request.cpus_max, request.memory_min_mib, request.memory_max_mib) == (
        16,
        None,
        65_536,
        131_072,
    )
    assert (request.disk_gib, request.spot, request.max_rate) == (
        1024,
        SpotPolicy.AUTO,
        HourlyRate(20_500_000),
    )
    assert (request.providers, request.regions) == (("aws", "gcp"), ("us-east-1",))
    assert keys(found, refused=False) == ["env.HF_TOKEN", "resources.shm_size", "retry.duration"]


def test_what_dstack_asks_for_where_a_file_is_silent() -> None:
    task = run("").task
    assert task is not None
    request = task.resources
    assert (request.cpus_min, request.memory_min_mib, request.disk_gib, request.accelerators) == (
        2,
        8192,
        100,
        (),
    )
    assert (task.retry, task.grace) == (
        RetryPolicy(preemption=0, node=0, exit=0),
        timedelta(minutes=5),
    )


@pytest.mark.parametrize(
    ("more", "implied"),
    [
        ("", ("cpus_min", "memory_min_mib", "disk_gib")),
        ("resources: {cpu: 4, disk: }", ("memory_min_mib",)),
        ("resources: {memory: 1GB.., gpu: 1}", ("cpus_min", "disk_gib")),
    ],
)
def test_dstack_s_defaults_do_not_bind_on_own_machines(more: str, implied: tuple[str, ...]) -> None:
    task = run(more).task
    assert task is not None
    need = task.resources
    assert need.implied == implied
    small = make_offer(
        "local/here/cpu",
        0,
        vcpus=1 if "cpu:" not in more else 4,
        memory_mib=1024,
        disk_gib=9,
        shared=True,
        owned=True,
    )
    sizes = (Constraint.CPUS, Constraint.MEMORY, Constraint.DISK)
    assert all(meets(small, need, each) for each in sizes)
    assert not all(meets(replace(small, owned=False), need, each) for each in sizes)


def test_a_size_of_the_command_line_binds_everywhere() -> None:
    options = ReadOptions(overrides="resources: {cpu: 3}")
    task = parse_task("type: task\ncommands: [x]", options=options)
    assert (task.resources.cpus_min, task.resources.implied) == (3, ("memory_min_mib", "disk_gib"))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("24GB", ("nvidia", 1, OPEN, 24_576, 24_576)),
        ("H100", ("H100", 1, OPEN, None, None)),
        ("H100:8", ("H100", 8, None, None, None)),
        ("A100:80GB:1..4", ("A100", 1, 4, 81_920, 81_920)),
        ("amd:16GB..", ("amd", 1, OPEN, 16_384, None)),
        ("2", ("nvidia", 2, None, None, None)),
        ("v5litepod-4", ("TPU-v5e", 4, None, None, None)),
        ("tpu:v2-8", ("TPU-v2", 4, None, None, None)),
        ("V100:32GB:2", ("V100", 2, None, 32_768, 32_768)),
        ("{name: A10G, count: 2, memory: 24GB}", ("A10G", 2, None, 24_576, 24_576)),
        ("{vendor: nvidia, count: {min: 2}}", ("nvidia", 2, OPEN, None, None)),
    ],
)
def test_accelerators(written: str, expected: tuple[object, ...]) -> None:
    task = run(
        f"resources: {{gpu: '{written}'}}"
        if "{" not in written
        else f"resources: {{gpu: {written}}}"
    ).task
    assert task is not None
    (need,) = task.resources.accelerators
    assert (
        need.name,
        need.count_min,
        need.count_max,
        need.memory_min_mib,
        need.memory_max_mib,
    ) == expected


@pytest.mark.parametrize(
    ("gpu", "some", "none"),
    [
        ("{compute_capability: 8.9, count: 2}", {"L4", "H100", "RTX-PRO-6000"}, {"A100", "T4"}),
        ("{name: [A100, T4], compute_capability: [8, 0]}", {"A100"}, {"T4", "H100"}),
        ("{compute_capability: 12.0}", {"RTX5090"}, {"H100", "RTX5000"}),
    ],
)
def test_a_compute_capability_is_a_list_of_accelerators(
    gpu: str, some: set[str], none: set[str]
) -> None:
    found = run(f"resources: {{gpu: {gpu}}}")
    assert found.refused == ()
    assert found.task is not None
    names = {each.name for each in found.task.resources.accelerators}
    assert some <= names
    assert not none & names


@pytest.mark.parametrize("more", ["image: rocm/pytorch", "docker: true"])
def test_only_dstack_s_own_image_needs_nvidia(more: str) -> None:
    (task,) = run(f"{more}\nresources: {{gpu: 24GB}}").tasks
    assert [each.name for each in task.resources.accelerators] == ["gpu"]


def test_no_accelerators_are_none() -> None:
    task = run("resources: {gpu: 0}").task
    assert task is not None
    assert task.resources.accelerators == ()


def test_commands_depend_on_each_other_as_there() -> None:
    commands = [" a ", "server &", "cat <<E\nx\nE\n"]
    assert join_commands(commands) == "a &&\n{ server & } &&\n{\ncat <<E\nx\nE\n}"


def test_a_command_by_its_entrypoint() -> None:
    task = parse_file("type: task\nimage: a\nentrypoint: bash -c\ncommands: ['echo hi']").task
    assert task is not None
    assert task.run == "bash -c 'echo hi'"


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("volumes: [{name: [a, b], path: /data}]", "volumes"),
        ("volumes: ['data:/etc']", "volumes"),
        ("user: ubuntu", "user"),
        ("privileged: true\nbackends: [aws]", "privileged"),
        ("docker: true\nbackends: [aws]", "docker"),
        ("reservation: cr-1", "reservation"),
        ("reservation: r\nbackends: [aws]", "reservation"),
        ("instances: [{fleet: f, instance: 3}]", "instances"),
        ("instances: [a]\nbackends: [aws]", "instances"),
        ("creation_policy: reuse", "creation_policy"),
        ("schedule: {cron: ['0 8 * * *', '0 9 * * *']}", "schedule"),
        ("env: {A: 'x${{ secrets.b }}'}", "env.A"),
        ("files: [../a.txt]\nrepos: [.]", "files"),
        ("files: ['a.txt:~/../../etc/a.txt']", "files"),
        ("repos: ['.:sub']", "repos"),
        ("shell: /usr/bin/zsh", "shell"),
        ("repos: ['https://example.org/a.git']", "repos"),
        ("resources: {cpu: 'arm:4'}", "resources.cpu"),
        ("resources: {gpu: 'n150:1'}", "resources.gpu"),
        (
            "resources: {gpu: {name: T4, compute_capability: 8.0}}",
            "resources.gpu.compute_capability",
        ),
        (
            "resources: {gpu: {vendor: amd, compute_capability: 8.0}}",
            "resources.gpu.compute_capability",
        ),
        ("resources: {gpu: {total_memory: 96GB}}", "resources.gpu.total_memory"),
    ],
)
def test_what_has_no_place_is_kept_and_refused_when_run(line: str, key: str) -> None:
    found = run(line)
    assert keys(found, refused=True) == [key]
    assert found.refused[0].line == 3
    with pytest.raises(SpecError, match="of this dstack file is not supported: "):
        parse_task(f"type: task\ncommands: [x]\n{line}")


@pytest.mark.parametrize(
    ("retry", "preemption", "exit_"),
    [
        ("true", None, None),
        ("{duration: 1h}", None, None),
        ("{on_events: [error], duration: 1h}", 0, None),
        ("{on_events: [interruption]}", None, 0),
        ("{on_events: [no-capacity], duration: 1h}", 0, 0),
    ],
)
def test_retries_by_event(retry: str, preemption: int | None, exit_: int | None) -> None:
    found = run(f"retry: {retry}")
    assert found.refused == ()
    assert found.task is not None
    policy = found.task.retry
    assert (policy.preemption, policy.node, policy.exit) == (preemption, preemption, exit_)
    assert (policy.delay > timedelta(0)) is (exit_ is None)


@pytest.mark.parametrize(
    ("lines", "providers", "regions"),
    [
        ("availability_zones: [eu-1a]\nregions: [eu-1]", (), ("eu-1a",)),
        ("instances: [a, {hostname: 192.0.2.1}]", ("ssh", "join"), ("a", "192.0.2.1")),
        ("instances: [{name: a}, {fleet: f, instance: 3}]", ("ssh", "join"), ("a",)),
        ("reservation: mine", ("gcp",), ()),
        ("docker: true", ("kubernetes",), ()),
        ("privileged: true\nbackends: [aws, kubernetes]", ("kubernetes",), ()),
        ("fleets: [mine]", (), ()),
    ],
)
def test_where_a_run_may_be_placed(
    lines: str, providers: tuple[str, ...], regions: tuple[str, ...]
) -> None:
    found = run(lines)
    assert found.refused == ()
    assert found.task is not None
    request = found.task.resources
    assert (request.providers, request.regions) == (providers, regions)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("docker: true", {"docker": "all"}),
        (
            "privileged: true",
            {"pod": {"spec": {"containers": [{"securityContext": {"privileged": True}}]}}},
        ),
    ],
)
def test_privileges_are_options_of_kubernetes(line: str, options: object) -> None:
    task = run(line).task
    assert task is not None
    (own,) = task.resources.options
    assert (own.provider, json.loads(own.values)) == ("kubernetes", options)


def test_files_beside_the_working_folder() -> None:
    found = run("files: [../data, a.txt, '../../b:../../b', /etc/c]")
    assert found.refused == ()
    assert [(each.source, each.inside) for each in found.local] == [
        ("../data", "work/data"),
        ("a.txt", "work/work/a.txt"),
        ("../../b", "b"),
        ("/etc/c", ".mounts/3-c"),
    ]
    assert "cd work/work ||" in found.before


def test_volumes() -> None:
    task = run(
        "volumes: ['data:/data', '/scratch:/s', {name: d, path: /d}, {instance_path: /i, path: /j}]"
    ).task
    assert task is not None
    assert [(each.kind, each.source, each.path) for each in task.volumes] == [
        ("named", "data", "/data"),
        ("host", "/scratch", "/s"),
        ("named", "d", "/d"),
        ("host", "/i", "/j"),
    ]


def test_notes_do_not_stop_a_run() -> None:
    assert keys(run("ports: [8000]"), refused=False) == ["ports"]
    text = (
        "privileged: false\nvolumes: [{instance_path: /a, path: /a, optional: "
        "true}]\nidle_duration: 5m\nretry: false"
    )
    assert keys(run(text), refused=False) == ["volumes", "idle_duration"]
    assert run(text).refused == ()


@pytest.mark.parametrize(
    ("text", "what", "tasks"),
    [
        ("type: fleet\nnodes: 0..2\nplacement: cluster", "fleet", 0),
        ("type: fleet\nssh_config: {user: a, hosts: [{hostname: b, blocks: auto}, c]}", "fleet", 0),
        ("type: volume\nbackend: aws\nregion: eu\nsize: 100GB", "volume", 0),
        ("type: gateway\nbackend: aws\nregion: eu\ncertificate: {type: acm, arn: x}", "gateway", 0),
        ("type: preset\nbase: m\ntrials: 2", "preset", 0),
    ],
)
def test_other_kinds_are_kept_and_named(text: str, what: str, tasks: int) -> None:
    found = parse_file(text)
    assert (found.what, len(found.tasks)) == (what, tasks)
    assert found.refused[0].key == "type"
    with pytest.raises(SpecError, match="`type` of this dstack file is not supported"):
        parse_task(text)


def test_a_fleet_of_ssh_hosts_is_a_setting() -> None:
    hosts = "[10.0.0.1, {hostname: 10.0.0.2, user: eve}, bob@host]"
    found = parse_file(f"type: fleet\nssh_config: {{user: ann, hosts: {hosts}}}")
    (kept,) = found.refused
    assert '`hosts = "ann@10.0.0.1, eve@10.0.0.2, bob@host"` under `[providers.ssh]`' in kept.reason


def test_a_dev_environment_is_a_task_that_waits() -> None:
    text = "type: dev-environment\nide: vscode\ninit: [pip install x]\ninactivity_duration: 2h"
    found = parse_file(text)
    assert found.refused == ()
    assert keys(found, refused=False) == ["type", "ide", "inactivity_duration"]
    assert found.task is not None
    assert found.task.run.startswith("pip install x\ntrap 'exit 143' TERM\n")
    assert found.task.limits.idle == timedelta(hours=2)


def test_a_schedule_is_in_utc() -> None:
    task = run("schedule: {cron: '0 8 * * mon-fri'}").task
    assert task is not None
    assert task.schedule == JobSchedule(cron="0 8 * * mon-fri")


def test_what_becomes_something_near_is_noted() -> None:
    text = "nvcc: true\nregistry_auth: {username: a, password: b}\n"
    found = run(text + "utilization_policy: {min_gpu_utilization: 10, time_window: 10m}\nimage: i")
    assert found.task is not None
    assert (found.task.image_login, found.refused) == ("DSTACK_REGISTRY_LOGIN", ())
    limits = found.task.limits
    assert (limits.idle, limits.idle_gpu_percent) == (timedelta(minutes=10), 10)
    assert keys(found, refused=False) == ["nvcc", "registry_auth", "utilization_policy"]


def test_the_shortest_length_is_named() -> None:
    with pytest.raises(SpecError) as caught:
        run("utilization_policy: {min_gpu_utilization: 10, time_window: 6s}")
    assert "6s is too short" in str(caught.value)
    assert "a length of time of at least 5m00s, such as 90" in str(caught.value)


def test_files_are_submitted() -> None:
    found = run("files: [a.txt, ~/b:/etc/b, {local_path: ../c, path: ~/c}]")
    assert found.task is not None
    assert [(each.source, each.inside) for each in found.local] == [
        ("a.txt", "a.txt"),
        ("~/b", ".mounts/1-b"),
        ("../c", ".mounts/2-c"),
    ]
    assert [(each.source, each.path) for each in found.task.volumes] == [
        (".mounts/1-b", "/etc/b"),
        (".mounts/2-c", "~/c"),
    ]


def test_a_repository_at_a_path_is_seen_there() -> None:
    found = run("repos: ['.:/my-repo']")
    assert found.task is not None
    assert [(each.source, each.path) for each in found.task.volumes] == [(".", "/my-repo")]
    assert "cd /my-repo ||" in found.before


@pytest.mark.parametrize(
    ("more", "volumes"),
    [
        ("working_dir: /work/app\nrepos: [.]", [(".", "/work/app")]),
        ("working_dir: /work/app\nrepos: ['.:lib']", [(".", "/work/app/lib")]),
        ("working_dir: /work\nrepos: ['.:/work/app']", [(".", "/work/app")]),
        ("working_dir: ~/app\nrepos: [.]", [(".", "~/app")]),
        ("working_dir: /work\nfiles: [a.txt]", [(".mounts/0-a.txt", "/work/a.txt")]),
        ("working_dir: /work\nfiles: ['a.txt:../b.txt']", [(".mounts/0-a.txt", "/b.txt")]),
        ("working_dir: /work\nfiles: ['a.txt:/b.txt']", [(".mounts/0-a.txt", "/b.txt")]),
        ("repos: [.]", []),
        ("working_dir: /work", []),
    ],
)
def test_relative_paths_start_at_the_working_dir(more: str, volumes: list[tuple[str, str]]) -> None:
    found = run(more)
    assert found.task is not None
    assert [(each.source, each.path) for each in found.task.volumes] == volumes
    assert found.refused == ()


def test_a_secret_may_have_another_name_than_its_variable() -> None:
    found = run("env: ['A=${{ secrets.b }}', 'C=${{ secrets.C }}']")
    assert found.task is not None
    assert (found.task.secrets, found.before) == (("b", "C"), 'export A="$b"\n')


def wrong(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_file(text)
    return [
        f"{problem.line}:{problem.column}: {problem.message}" for problem in caught.value.problems
    ]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("commands: [x]\nnode: 2", "3:1: unknown key 'node'"),
        ("commands: x", "2:11: `commands` is the text 'x'"),
        ("commands: [no]", "2:12: `commands[0]`: no, which YAML reads as false, is not a string"),
        ("commands: []", "1:1: the file has nothing to run"),
        ("commands: [x]\nnodes: 0", "3:8: `nodes`: 0 is too small"),
        ("commands: [x]\nnodes: true", "3:8: `nodes`: the truth value true is not a whole number"),
        ("commands: [x]\nresources: {disk: true}", "3:19: `resources.disk`: cannot use 'true'"),
        (
            "commands: [x]\nmax_price: true",
            "3:12: `max_price`: the truth value true is not a number",
        ),
        ("commands: [x]\nnodes: many", "3:8: `nodes`: the text 'many' is not a whole number"),
        ("commands: [x]\npython: 2.7", "3:9: `python`: cannot use '2.7'"),
        (
            "commands: [x]\nimage: a\npython: 3.12",
            "4:1: `image` and `python` cannot be used together",
        ),
        (
            "commands: [x]\nspot_policy: always",
            "3:14: `spot_policy`: the text 'always' is not one of the choices",
        ),
        (
            "commands: [x]\nmax_duration: 6 hours",
            "3:15: `max_duration`: the text '6 hours' is not a length of time",
        ),
        (
            "commands: [x]\nbackends: [awz]",
            "3:12: `backends[0]`: the text 'awz' is not one of the choices; did you mean aws?",
        ),
        ("commands: [x]\nresources: {gpu: 'A100:H100:8'}", "3:18: `resources.gpu`: cannot use"),
        (
            "commands: [x]\nresources: {gpu: {nmae: A100}}",
            "3:19: unknown key 'nmae' in `resources.gpu`",
        ),
        ("commands: [x]\nresources: {memory: 9XB}", "3:21: `resources.memory`: cannot use '9XB'"),
        (
            "commands: [x]\nresources: {memory: 64GB..16GB}",
            "3:21: `resources.memory`: cannot use '64GB..16GB'",
        ),
        ("commands: [x]\nenv: {A: true}", "3:10: `env.A`: the truth value true is not a string"),
        ("commands: [x]\nenv: [A=1, A=2]", "3:12: the variable A appears twice"),
        ("commands: [x]\nports: [99999]", "3:9: `ports[0]`: cannot use '99999'"),
        ("commands: [x]\nvolumes: ['a:b']", "3:11: `volumes[0]`: cannot use 'a:b'"),
        ("commands: [x]\ntags: {a b: c}", "3:8: 'a b' cannot be a key in `tags`"),
        (
            "commands: [x]\nschedule: {cron: '0 25 * * *'}",
            "3:18: `schedule.cron`: cannot use '25' in a cron line",
        ),
        ("commands: [x]\nretry: {on_events: []}", "3:20: `retry.on_events` has 0 entries"),
        (
            "nodes: 2\ngroups: [{commands: [x]}]",
            "2:1: `nodes` and `groups` cannot be used together",
        ),
        ("commands: [x]\nmax_price: -1", "3:12: `max_price`: -1 is too small"),
    ],
)
def test_every_mistake_has_its_place(lines: str, said: str) -> None:
    found = wrong(f"type: task\n{lines}")
    assert len(found) == 1
    assert found[0].startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("type: tsk\ncommands: [x]", "1:1: dstack has no configuration type 'tsk'"),
        ("type: service\ncommands: [x]", "1:1: `port` is missing"),
        (
            "type: service\nport: 1\ncommands: [x]\nreplicas: 1..3",
            "4:11: a variable number of replicas needs",
        ),
        (
            "type: service\nport: 1\ncommands: [x]\nreplicas: 1..",
            "4:11: the number of replicas needs a maximum",
        ),
        (
            "type: service\nport: 1\ncommands: [x]\nprobes: [{type: tcp}]",
            "4:17: `probes[0].type`: the text 'tcp'",
        ),
        ("type: fleet\nnodes: 3..1", "2:8: `nodes`: cannot use '3..1'"),
        ("type: fleet\nssh_config: {user: a}", "2:13: `ssh_config.hosts` is missing"),
        ("type: volume\nregion: eu", "1:1: `backend` is missing, or names"),
        ("type: volume\nbackend: aws", "1:1: `region` is missing"),
        ("type: gateway\nbackend: aws", "1:1: `region` is missing"),
        ("type: dev-environment\nversion: 1", "2:1: `version` needs `ide`"),
        ("type: preset\nbase: a\nrepo: b", "1:1: `base` and `repo` cannot be used together"),
    ],
)
def test_mistakes_of_other_kinds(text: str, said: str) -> None:
    found = wrong(text)
    assert found[0].startswith(said)


def test_of_two_equal_keys_the_last_counts_as_there() -> None:
    found = parse_file("type: task\ncommands: [a]\ncommands: [b]")
    assert found.task is not None
    assert found.task.run == "b"
    assert [(each.line, each.key, each.refused) for each in found.kept] == [(3, "commands", False)]


def test_a_second_document_is_a_mistake_as_there() -> None:
    with pytest.raises(SpecError, match="a second document begins here"):
        parse_file(
            "type: task\ncommands: [a]\n---\ntype: task\ncommands: [b]\n",
            options=ReadOptions(dialect="dstack"),
        )


def test_expressions_in_commands() -> None:
    found = parse_file("type: task\ncommands: ['a ${{ run.args }} b', 'echo $$HOME $X']")
    assert found.task is not None
    assert found.task.run == "a  b &&\necho $HOME $X"
    assert (keys(found, refused=False), found.refused) == (["commands"], ())
    for wrong_one in ("${{ secrets.KEY }}", "${{ github.sha }}", "${{ run.args"):
        found = parse_file(f"type: task\ncommands: ['echo {wrong_one}']")
        assert [each.reason for each in found.refused] == [
            f"{wrong_one} cannot be evaluated; use an environment variable"
        ]


@pytest.mark.parametrize(
    ("backends", "providers", "refused"),
    [
        ("[vastai, datacrunch, remote]", ("vast", "verda", "ssh"), None),
        ("[aws, tensordock]", ("aws",), False),
        ("[tensordock]", (), True),
    ],
)
def test_backends_are_providers(
    backends: str, providers: tuple[str, ...], refused: bool | None
) -> None:
    found = parse_file(f"type: task\ncommands: [a]\nbackends: {backends}\n")
    assert found.task is not None
    assert found.task.resources.providers == providers
    assert [(each.line, each.refused) for each in found.kept] == (
        [] if refused is None else [(3, refused)]
    )


def test_commands_may_wait_for_a_program_in_the_background() -> None:
    text = "type: task\ncommands: [sleep 0.1 && echo served &, echo pulled, fg]\n"
    task = parse_task(text, file="t.yaml")
    for shell in ("bash", "dash"):
        done = subprocess.run(
            [shell, "-e", "-c", task.run],
            env={"PATH": "/usr/bin:/bin", "NNODES": "1", "NPROC_PER_NODE": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert {"pulled", "served"} <= set(done.stdout.split("\n"))


def test_a_fleet_with_a_renamed_key() -> None:
    with pytest.raises(SpecError, match="write `idle_duration`"):
        parse_file("type: fleet\nnodes: 1\ntermination_idle_time: 1h\n")
