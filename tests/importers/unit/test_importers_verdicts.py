"""Constructs on which a reader of SkyPilot's and dstack's files easily differs from their own:
taken, or not, as there.

Each verdict is that of SkyPilot 0.14.1 and dstack 0.22.5, which `scripts/importers/compare.py` asks.
"""

import re

import pytest

from cavvy.capabilities.importers.dialects import Dialect
from cavvy.spec import SpecError
from cavvy.spec.translation import WAIT
from cavvy.task_files import ReadOptions, parse_file

SKYPILOT = "run: x\nnum_nodes: 1\n"
DSTACK = "type: task\ncommands: [x]\n"
SERVICE = "type: service\ncommands: [x]\n"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (SKYPILOT + "envs:", "3:1: `envs` is empty"),
        (SKYPILOT + "inputs:", "3:1: `inputs` is empty"),
        (SKYPILOT + "service: {readiness_probe: }", "3:28: `readiness_probe` is empty"),
        (
            SKYPILOT + "resources: {memory: 4x+}",
            "3:21: `resources.memory`: cannot use the text '4x+'",
        ),
        (
            SKYPILOT + "resources: {disk_size: 100.0}",
            "3:24: `resources.disk_size`: cannot use the number 100.0",
        ),
        (
            SKYPILOT + "resources: {infra: aws /us-east-1}",
            "3:20: `resources.infra`: unknown cloud 'aws '",
        ),
        (SKYPILOT + "resources: {local_disk: ''}", "3:25: `resources.local_disk`: cannot use ''"),
        (SKYPILOT + "resources: {volumes: [{path: /a}]}", "3:23: a network volume needs a `name`"),
        (SKYPILOT + "file_mounts: {'s3://b': /data}", "3:15: s3://b cannot be a target"),
        (SKYPILOT + "file_mounts: {//data: ./a}", "3:15: //data cannot be a target"),
        (
            "name:\nexecution: parallel\n---\nname: a\nrun: x\n---\nname: b\nrun: y",
            "1:1: `name` is missing",
        ),
        (
            "run: x\nresources: {cpus: 1, use_spot: no}\nnum_nodes: 1.0",
            "3:12: `num_nodes`: the number 1.0 is not",
        ),
        (
            SKYPILOT + "resources: {any_of: [{priority: 1}, {priority: 2}]}",
            "3:48: the alternatives have the priorities",
        ),
        (
            SKYPILOT + "resources: {priority: 3, ordered: [{cpus: 1}, {priority: 2}]}",
            "3:58: the alternatives have",
        ),
        (
            SKYPILOT + "resources: {accelerators: tpu-v6e-8, instance_type: a}",
            "3:53: `instance_type` and a TPU, which",
        ),
        (
            SKYPILOT
            + "resources: {accelerators: {T4, tpu-v6e-8}, any_of: [{cloud: gcp}, {cloud: aws}]}",
            "3:32: tpu-v6e-8 is a TPU, which aws",
        ),
        (
            SKYPILOT + "resources: {cloud: aws, accelerators: {T4, tpu-v6e-8}}",
            "3:44: tpu-v6e-8 is a TPU, which aws",
        ),
        (
            SKYPILOT + "config: {kubernetes: {enable_docker: {mode: BUILT}}}",
            "3:45: `config.kubernetes.enable_docker.mode`",
        ),
        ("name: v\ntype: k8s-pvc\ninfra: k9s", "3:8: `infra`: unknown cloud 'k9s'"),
        (SKYPILOT + "disk_size: 100", "3:1: unknown key 'disk_size'"),
        (SKYPILOT + "resources: {cpus: 1, envs: {}}", "3:22: unknown key 'envs' in `resources`"),
        (
            "name: g\nexecution: parallel\nplacement: any\n---\nname: a\nrun: x",
            "3:12: `placement`: 'any' is not one of the choices",
        ),
        (DSTACK + "nodes: 2\t", "3:9: this is not YAML: a tab instead of a space"),
        (DSTACK + "nodes:\t2", "3:7: this is not YAML: a tab instead of a space"),
        (DSTACK + "gpu: 24GB", "3:1: unknown key 'gpu'"),
        (DSTACK + "python: '3.1'", "3:9: `python`: cannot use '3.1'"),
        (DSTACK + "volumes: ['/a/../b:/c']", "3:11: `volumes[0]`: cannot use '/a/../b:/c'"),
        (
            DSTACK + "schedule: {cron: '5-1 * * * *'}",
            "3:18: `schedule.cron`: cannot use '5-1' in a cron line",
        ),
        (
            DSTACK + "schedule: {cron: '0 8 * * fri-mon'}",
            "3:18: `schedule.cron`: cannot use 'fri-mon' in a cron line",
        ),
        (
            DSTACK + "resources: {cpu: {count: '8.'}}",
            "3:26: `resources.cpu.count`: cannot use '8.'",
        ),
        (SERVICE + "port: '*:80'", "3:7: `port`: cannot use '*:80'"),
    ],
)
def test_what_they_refuse_is_refused_with_its_place(text: str, place: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_file(text)
    assert [
        f"{each.line}:{each.column}: {each.message}"[: len(place)] for each in caught.value.problems
    ] == [place]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (SKYPILOT + "resources: {volumes: [{path: /a, storage_type: Instance}]}", Dialect.SKYPILOT),
        (SKYPILOT + "resources: {local_disk: 500+}", Dialect.SKYPILOT),
        (
            SKYPILOT + "resources: {infra: k8s, instance_type: m5.large, accelerators: tpu-v2-8}",
            Dialect.SKYPILOT,
        ),
        (
            SKYPILOT + "resources: {any_of: [{priority: 1}, {cpus: 1}, {priority: 1}]}",
            Dialect.SKYPILOT,
        ),
        (SKYPILOT + "resources: {accelerators: tpu-v2-8, instance_type: TPU-VM}", Dialect.SKYPILOT),
        (
            SKYPILOT
            + "resources: {accelerators: tpu-v2-8, instance_type: n1, accelerator_args: {tpu_vm: "
            "no}}",
            Dialect.SKYPILOT,
        ),
        (
            SKYPILOT + "config: {kubernetes: {enable_docker: {mode: ALL, cache_volume: v}}}",
            Dialect.SKYPILOT,
        ),
        (
            SKYPILOT + "envs:\t{}\t",
            Dialect.SKYPILOT,
        ),  # SkyPilot reads with libyaml, which takes tabs between words
        (
            "name: g\nexecution: parallel\nplacement: SAME_INFRA\n---\nname: a\nrun: x",
            Dialect.SKYPILOT,
        ),
        ("run: x\nsecrets: ['secrets:A']", Dialect.SKYPILOT),
        (DSTACK + "python: 3.10", Dialect.DSTACK),
        (DSTACK + "schedule: {cron: '0 8 last jan-mar mon-fri'}", Dialect.DSTACK),
        (DSTACK + "ports: ['*:80']", Dialect.DSTACK),
        (SERVICE + "port: 8080:80", Dialect.DSTACK),
    ],
)
def test_what_they_take_is_taken(text: str, kind: Dialect) -> None:
    assert parse_file(text).kind == kind


def test_a_variable_whose_name_yaml_takes_for_true_is_called_so() -> None:
    found = parse_file(SKYPILOT + "envs: {ON: 1, 'YES': 2, no: 3}")
    assert found.task is not None
    assert found.task.env == {"True": "1", "YES": "2", "False": "3"}


def test_a_disk_written_out_as_nothing_is_none_and_a_silent_file_s_is_dstack_s() -> None:
    silent, none = parse_file(DSTACK), parse_file(DSTACK + "resources: {disk: }")
    assert silent.task is not None
    assert none.task is not None
    assert (silent.task.resources.disk_gib, none.task.resources.disk_gib) == (100, None)


def test_a_disk_with_an_upper_end_alone_has_no_least_size() -> None:
    found = parse_file(DSTACK + "resources: {disk: ..50GB}")
    assert found.task is not None
    assert found.task.resources.disk_gib is None
    assert [(each.key, each.refused) for each in found.kept] == [("resources.disk", False)]


@pytest.mark.parametrize(
    ("text", "names", "refused"),
    [
        (SKYPILOT + "resources: {accelerators: {H100:8, X9:8}}", ["H100", "X9"], False),
        (SKYPILOT + "resources: {any_of: [{accelerators: X9}, {cpus: 4}]}", ["X9", ""], False),
        (SKYPILOT + "resources: {accelerators: {X8, X9}}", ["X8", "X9"], True),
        (DSTACK + "resources: {gpu: 'H100,X9:8'}", ["H100", "X9"], False),
        (DSTACK + "resources: {gpu: 'X8,X9:8'}", ["X8", "X9"], True),
    ],
)
def test_an_alternative_that_nobody_knows_is_a_note_where_there_is_another(
    text: str, names: list[str], refused: bool
) -> None:
    found = parse_file(text)
    assert found.task is not None
    choices = [need.accelerators or (None,) for need in found.task.resources.choices]
    assert sorted(
        {(each.name or "") if each else "" for needs in choices for each in needs}
    ) == sorted(names)
    assert [each.refused for each in found.kept] == [refused] * sum(
        name.startswith("X") for name in names
    )


def test_any_of_several_instance_types_will_do() -> None:
    found = parse_file(DSTACK + "instance_types: [b, a, b]\nmax_price: 2")
    assert found.refused == ()
    assert found.task is not None
    choices = found.task.resources.choices
    assert [each.instance for each in choices] == ["b", "a"]
    assert len({each.max_rate for each in choices}) == 1
    assert not found.task.resources.ordered


@pytest.mark.parametrize("count", ["0..", "..4", "0..8"])
def test_accelerators_that_may_be_none_are_told(count: str) -> None:
    found = parse_file(DSTACK + f"resources: {{gpu: {count}}}")
    assert [(each.key, each.refused) for each in found.kept] == [("resources.gpu", False)]


@pytest.mark.parametrize(
    ("text", "name", "run"),
    [
        ("name: My_Task\nsetup: y\nrun: x", "my-task", "x"),
        ("setup: y", "task", WAIT),
        ("setup: y\nrun: ''", "task", WAIT),
        ("run: x\nworkdir: {url: 'https://example.org/a.git', ref: main}", "task", "x"),
        ("run: x\nresources: {priority: 5}", "task", "x"),
        ("run: x\nworkdir: ~/src", "task", "x"),
    ],
)
def test_a_file_of_shared_keys_is_skypilot_s_only_where_the_user_says_so(
    text: str, name: str, run: str
) -> None:
    if "priority" not in text and "url" not in text:  # keys of SkyPilot's alone
        with pytest.raises(SpecError):
            parse_file(text)
    found = parse_file(text, options=ReadOptions(dialect="skypilot"))
    assert found.task is not None
    assert (found.kind, found.task.name, found.task.run) == ("SkyPilot", name, run)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: My_Task\nrun: x\nnodes: 2", "'My_Task' cannot be a name"),  # one key of ours
        ("name: My_Task\nrnu: x", "unknown key 'rnu'"),  # wrong as either
        ("name: A\nname: b\nrun: x", "the key 'name' appears twice"),
        ("name: a\nrun:", "`run` is empty"),
        ("run: x\nworkdir: https://example.org/a.git", "git ls-remote"),
    ],
)
def test_a_file_that_is_wrong_as_either_is_told_as_ours(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        parse_file(text)


def test_contexts_and_pools_are_not_mixed_with_each_other_s_names() -> None:
    places = "[{infra: k8s/a}, {infra: k8s/b}, {infra: ssh/pool}, {infra: aws/us-east-1}]"
    found = parse_file(SKYPILOT + f"resources: {{any_of: {places}}}")
    assert found.task is not None
    assert [(each.providers, each.regions) for each in found.task.resources.choices] == [
        (("kubernetes",), ("a",)),
        (("kubernetes",), ("b",)),
        (("ssh",), ("pool",)),
        (("aws",), ("us-east-1",)),
    ]
