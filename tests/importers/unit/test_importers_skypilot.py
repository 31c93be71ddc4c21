"""SkyPilot's files: what they mean here, what is kept, and what is wrong with them."""

import json
from datetime import timedelta

import pytest

from cavvy.catalog.regions import is_region
from cavvy.domain.tasks import (
    AcceleratorNeed,
    MountMode,
    ResourceSpec,
    RetryPolicy,
    SpotPolicy,
    Transfer,
    Workdir,
)
from cavvy.domain.units import HourlyRate
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, Translation, parse_file, parse_task

FULL = """\
name: train_it
num_nodes: 2
workdir: src/${WHICH}
resources:
  infra: aws/us-east-1
  accelerators: A100-80GB:8
  cpus: 32+
  memory: 256GB
  disk_size: 1TB
  use_spot: true
  max_hourly_cost: 12.5
  image_id: docker:nvcr.io/nvidia/pytorch:24.05-py3
  labels: {team: vision}
  priority: 20
  job_recovery: {strategy: failover, max_restarts_on_errors: 3}
envs:
  WHICH: model
  COUNT: 010
  SWITCH: no
  RATIO: 1.50
  TOKEN:
secrets: {HF_TOKEN: null}
setup: |
  pip install torch
run: |
  torchrun train.py
"""


def keys(found: Translation, *, refused: bool) -> list[str]:
    return [each.key for each in found.kept if each.refused is refused]


def wrong(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_file(text)
    return [
        f"{problem.line}:{problem.column}: {problem.message}" for problem in caught.value.problems
    ]


def need(resources: str) -> Translation:
    return parse_file(f"run: x\nnum_nodes: 1\nresources: {resources}")


def test_a_whole_task() -> None:
    found = parse_file(FULL)
    task = found.task
    assert task is not None
    assert (found.kind, found.what, found.refused) == ("SkyPilot", "task", ())
    assert (task.name, task.nodes, task.image) == (
        "train-it",
        2,
        "nvcr.io/nvidia/pytorch:24.05-py3",
    )
    assert (task.run, task.setup) == ("torchrun train.py\n", "pip install torch\n")
    assert task.env == {"WHICH": "model", "COUNT": "8", "SWITCH": "False", "RATIO": "1.5"}
    assert task.secrets == ("TOKEN", "HF_TOKEN")
    assert task.workdir == Workdir(path="src/model")
    assert (task.tags, task.priority, task.retry) == ({"team": "vision"}, 20, RetryPolicy(exit=3))
    request = task.resources
    assert request.accelerators == (
        AcceleratorNeed(name="A100", count_min=8, memory_min_mib=81_920, memory_max_mib=81_920),
    )
    assert (request.cpus_min, request.cpus_max) == (32, None)
    assert (request.memory_min_mib, request.memory_max_mib) == (262_144, 262_144)
    assert (request.disk_gib, request.spot, request.max_rate) == (
        1024,
        SpotPolicy.ONLY,
        HourlyRate(12_500_000),
    )
    assert (request.providers, request.regions) == (("aws",), ("us-east-1",))
    assert keys(found, refused=False) == [
        "name",
        "resources.job_recovery",
        "envs.TOKEN",
        "secrets.HF_TOKEN",
    ]


def test_a_file_without_a_name_gets_the_file_s() -> None:
    assert parse_task("run: x\nnum_nodes: 1", file="/a/My Train.sky.yaml").name == "my-train"


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("H100:8", [("H100", 8)]),
        ("{H100: 8}", [("H100", 8)]),
        ("{L4:8, A10g:4}", [("L4", 8), ("A10G", 4)]),
        ("MI300:8", [("MI300X", 8)]),
        ("tpu-v5litepod-8", [("TPU-v5e", 8)]),
        ("80GB+", [("gpu", 1)]),
        ("NVIDIA:24GB:2", [("nvidia", 2)]),
    ],
)
def test_accelerators(written: str, names: list[tuple[str, int]]) -> None:
    task = need(f"{{accelerators: {written}}}").task
    assert task is not None
    assert [(each.name, each.count_min) for each in task.resources.accelerators] == names


def test_a_bare_a100_is_the_small_one() -> None:
    task = need("{accelerators: A100}").task
    assert task is not None
    assert task.resources.accelerators[0].memory_max_mib == 40_960


@pytest.mark.parametrize(
    ("name", "clouds"),
    [("tpu-v5e-8", ("gcp", "tpu")), ("'tpu-v5-lite-podslice:4'", ("kubernetes",))],
)
def test_a_tpu_is_of_the_clouds_that_have_it(name: str, clouds: tuple[str, ...]) -> None:
    task = need(f"{{accelerators: {name}}}").task
    assert task is not None
    assert task.resources.providers == clouds


@pytest.mark.parametrize(
    ("name", "nodes", "instance", "chips"),
    [
        ("tpu-v5litepod-16", 4, "tpu-v5litepod-16", 4),
        ("tpu-v4-32", 4, "tpu-v4-32", 4),
        ("tpu-v6e-8", 1, None, 8),
    ],
)
def test_each_host_of_a_slice_is_a_node(
    name: str, nodes: int, instance: str | None, chips: int
) -> None:
    for count in (1, 3):
        text = f"run: x\nnum_nodes: {count}\nresources: {{accelerators: {name}}}"
        found = parse_file(text).task
        assert found is not None
        assert (found.nodes, found.resources.instance) == (nodes * count, instance)
        assert [each.count_min for each in found.resources.accelerators] == [chips]


def test_alternatives_that_are_one_wish() -> None:
    found = need(
        "{cpus: 4, any_of: [{infra: aws/us-east-1, use_spot: true}, {infra: aws/us-east-1, "
        "use_spot: false}, "
        "{infra: aws/us-west-2, use_spot: true}, {infra: aws/us-west-2, use_spot: false}]}"
    )
    assert found.task is not None
    assert found.refused == ()
    request = found.task.resources
    assert (request.spot, request.providers, request.regions) == (
        SpotPolicy.AUTO,
        ("aws",),
        ("us-east-1", "us-west-2"),
    )


def test_alternatives_are_not_multiplied_out() -> None:
    task = need("{any_of: [{infra: aws/us-east-1}, {infra: lambda/us-west-2}, {infra: gcp}]}").task
    assert task is not None
    assert [(each.providers, each.regions) for each in task.resources.choices] == [
        (("aws",), ("us-east-1",)),
        (("lambda",), ("us-west-2",)),
        (("gcp",), ()),
    ]


def test_a_partition_is_a_part_of_its_cluster() -> None:
    task = need("{infra: slurm/Alps/debug}").task
    assert task is not None
    assert (task.resources.providers, task.resources.regions) == (("slurm",), ("Alps/debug",))
    assert is_region("alps/debug", "slurm", "Alps", "debug")
    assert not is_region("Alps/debug", "slurm", "Alps", "long")


def test_a_part_of_a_device_is_a_whole_one() -> None:
    found = need("{accelerators: 'V100:0.5'}")
    assert found.task is not None
    assert found.task.resources.accelerators[0].count_min == 1
    assert keys(found, refused=False) == ["resources.accelerators"]


@pytest.mark.parametrize(
    ("tier", "kind"), [("low", "standard"), ("medium", None), ("high", "gp3"), ("best", None)]
)
def test_a_disk_tier_is_the_disk_type_of_skypilot_on_aws(tier: str, kind: str | None) -> None:
    found = need(f"{{disk_tier: {tier}}}")
    assert found.task is not None
    assert (found.task.resources.disk_type, found.refused) == (kind, ())


def options_of(needs: ResourceSpec) -> list[tuple[tuple[str, ...], object]]:
    return [
        (each.regions, {one.provider: json.loads(one.values) for one in each.options})
        for each in needs.choices
    ]


def test_a_machine_image_is_an_option_of_its_cloud() -> None:
    task = need("{infra: aws/us-east-2, image_id: ami-1}").task
    assert task is not None
    assert options_of(task.resources) == [(("us-east-2",), {"aws": {"image": "ami-1"}})]


def test_machine_images_of_regions_are_alternatives() -> None:
    images = "{eu-west-1: ami-1, us-west-2: ami-2}"
    task = need(f"{{cloud: aws, accelerators: T4, image_id: {images}}}").task
    assert task is not None
    assert options_of(task.resources) == [
        (("eu-west-1",), {"aws": {"image": "ami-1"}}),
        (("us-west-2",), {"aws": {"image": "ami-2"}}),
    ]
    task = need(f"{{cloud: aws, region: us-west-2, image_id: {images}}}").task
    assert task is not None
    assert options_of(task.resources) == [(("us-west-2",), {"aws": {"image": "ami-2"}})]


@pytest.mark.parametrize(
    "place",
    [
        "infra: aws/us-west-2/us-west-2b",
        "cloud: aws, region: us-west-2, zone: us-west-2b",
        "any_of: [{infra: aws/us-west-2/us-west-2b}]",
    ],
)
def test_a_zone_keeps_the_machine_image_of_its_region(place: str) -> None:
    found = need(f"{{{place}, image_id: {{eu-west-1: ami-1, us-west-2: ami-2}}}}")
    assert found.task is not None
    options = {"aws": {"image": "ami-2", "zone": "us-west-2b"}}
    assert options_of(found.task.resources) == [(("us-west-2",), options)]
    assert found.refused == ()


def test_an_alternative_whose_region_has_no_machine_image_is_refused() -> None:
    found = need("{any_of: [{infra: aws/us-west-2}, {infra: gcp/x}], image_id: {us-west-2: ami-2}}")
    assert found.task is not None
    assert [each.regions for each in found.task.resources.choices] == [("us-west-2",), ("x",)]
    assert [each.reason for each in found.refused] == [
        "no image is for x; add an entry for the region"
    ]


def test_fields_of_pods_are_an_option_of_kubernetes() -> None:
    fields = "{spec: {priorityClassName: high}}"
    text = f"run: x\nconfig: {{kubernetes: {{pod_config: {fields}}}}}\n"
    found = parse_file(text + "resources: {any_of: [{infra: k8s, cpus: 2}, {infra: aws}]}")
    assert found.task is not None
    assert found.refused == ()
    pod = {"kubernetes": {"pod": {"spec": {"priorityClassName": "high"}}}}
    assert [options for _, options in options_of(found.task.resources)] == [pod, pod]


def test_an_image_that_skypilot_publishes_is_a_note() -> None:
    found = need("{infra: aws, image_id: {us-east-1: 'skypilot:gpu-ubuntu', docker: 'a:b'}}")
    assert found.task is not None
    assert (found.task.image, found.refused) == ("a:b", ())
    assert keys(found, refused=False) == ["resources.image_id"]


@pytest.mark.parametrize(
    ("written", "ordered", "said"),
    [
        (
            "{any_of: [{infra: aws, accelerators: A10G}, {infra: gcp, accelerators: L4}]}",
            False,
            [("A10G", "aws", None), ("L4", "gcp", None)],
        ),
        ("{infra: aws, any_of: [{cpus: 4}, {cpus: 8+}]}", False, [("", "aws", 4), ("", "aws", 8)]),
        ("{ordered: [{infra: gcp}, {infra: aws}]}", True, [("", "gcp", None), ("", "aws", None)]),
        (
            "{infra: aws, accelerators: [H100, L4]}",
            True,
            [("H100", "aws", None), ("L4", "aws", None)],
        ),
        ("{ordered: [{infra: gcp}]}", False, [("", "gcp", None)]),
    ],
)
def test_alternatives_that_are_several_wishes_keep_their_order(
    written: str, ordered: bool, said: list[tuple[str, str, float | None]]
) -> None:
    found = need(written)
    assert found.refused == ()
    assert found.task is not None
    request = found.task.resources
    assert request.ordered is ordered
    assert [
        (each.accelerators[0].name if each.accelerators else "", each.providers[0], each.cpus_min)
        for each in request.choices
    ] == said
    assert request == request.choices[0]


def test_each_alternative_has_its_own_disk_and_memory_for_each_of_its_cpus() -> None:
    found = need(
        "{any_of: [{cpus: 8, memory: 4x, disk_size: 100}, {cpus: 16, memory: 2.5x, disk_size: "
        "200}]}"
    )
    assert found.refused == ()
    assert found.task is not None
    assert [
        (
            each.memory_min_mib,
            each.memory_per_cpu_mib,
            each.least_memory_mib(each.cpus_min or 0),
            each.disk_gib,
        )
        for each in found.task.resources.choices
    ] == [(None, 4096, 32768, 100), (None, 2560, 40960, 200)]


@pytest.mark.parametrize(
    ("cpus", "bounds"), [("", (None, None)), ("cpus: 8+, ", (8, None)), ("cpus: 8, ", (8, 8))]
)
def test_memory_may_go_with_however_many_cpus_there_are(
    cpus: str, bounds: tuple[float | None, float | None]
) -> None:
    found = need(f"{{{cpus}memory: 3.5x}}")
    assert found.refused == ()
    assert found.task is not None
    request = found.task.resources
    assert (request.cpus_min, request.cpus_max) == bounds
    assert (request.memory_min_mib, request.memory_max_mib, request.memory_per_cpu_mib) == (
        None,
        None,
        3584,
    )


@pytest.mark.parametrize(
    "resources",
    [
        "{any_of: [{image_id: 'docker:a'}, {image_id: 'docker:b'}]}",
        "{accelerators: H1000:8}",
        "{disk_tier: ultra}",
        "{image_id: ami-123}",
        "{local_disk: nvme}",
        "{accelerators: tpu-v4-34}",
    ],
)
def test_what_has_no_place_is_kept_and_refused_when_run(resources: str) -> None:
    found = need(resources)
    assert found.refused
    assert all(
        each.line == 3 and each.key.startswith("resources") and each.reason
        for each in found.refused
    )
    with pytest.raises(
        SpecError, match=r"task\.yaml:3:\d+: `resources.* of this SkyPilot file is not supported: "
    ):
        parse_task(f"run: x\nnum_nodes: 1\nresources: {resources}")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("file_mounts: {/a: r2://b, /data: s3://c}", "file_mounts./data"),
        ("file_mounts: {/data: {name: b, store: hf}}", "file_mounts./data"),
        ("file_mounts: {/etc: s3://bucket}", "file_mounts./etc"),
        ("file_mounts: {/data: {source: [s3://a, s3://b]}}", "file_mounts./data"),
        ("volumes: {data: vol}", "volumes.data"),
        ("file_mounts: {/data: ~/.ssh}", "file_mounts./data"),
        ("file_mounts: {/data: $HERE/x}", "file_mounts./data"),
        ("file_mounts: {~/sky_workdir/: ./x}", "file_mounts.~/sky_workdir/"),
        ("file_mounts: {/data: {name: b, source: s3://c}}", "file_mounts./data"),
        (
            "file_mounts: {/data: ../x}\nworkdir: {url: https://x/y, ref: abcdef1}",
            "file_mounts./data",
        ),
        (
            "config: {docker: {run_options: --a}}\nresources: {image_id: docker:a}",
            "config.docker.run_options",
        ),
        ("secrets: {A: open}", "secrets.A"),
        ("workdir: {url: https://x/y.git, ref: main}", "workdir"),
    ],
)
def test_other_keys_are_kept_with_their_place(line: str, key: str) -> None:
    found = parse_file(f"num_nodes: 1\n{line}\nrun: x")
    assert next((each.key, each.line) for each in found.refused) in ((key, 2), (key, 1))


def test_buckets_become_inputs_and_outputs() -> None:
    text = """
run: x
file_mounts:
  /data: s3://bucket/images
  ~/weights: gs://b/w.bin
  /web: https://example.org/file
  /copy: {source: s3://b/c, mode: COPY}
  /read: {source: gs://b/r, mode: MOUNT, config: {mount: {read_only: true}}}
  /write: {source: s3://b/w}
  /own: {name: mine, store: s3, mode: MOUNT_CACHED}
volumes: {/v: claim, /w: {name: other}}
"""
    found = parse_file(text)
    assert found.task is not None
    assert found.refused == ()
    assert [(each.source, each.target) for each in found.task.inputs] == [
        ("s3://bucket/images", "/data"),
        ("gs://b/w.bin", "~/weights"),
        ("https://example.org/file", "/web"),
        ("s3://b/c/", "/copy"),
        ("gs://b/r/", "/read"),
        ("s3://b/w/", "/write"),
        ("s3://mine/", "/own"),
    ]
    mounted = [(each.target, each.mount, each.writable) for each in found.task.inputs]
    assert mounted[3:] == [
        ("/copy", None, False),
        ("/read", "mount", False),
        ("/write", "mount", True),
        ("/own", "cached", True),
    ]
    assert all(found is None for _, found, _ in mounted[:3])
    assert found.task.outputs == ()
    assert [(each.source, each.path) for each in found.task.volumes] == [
        ("claim", "/v"),
        ("other", "/w"),
    ]
    told = keys(found, refused=False)
    assert told == [
        "file_mounts./read",
        "file_mounts./write",
        "file_mounts./own",
        "file_mounts./own",
    ]


def test_a_bucket_without_a_store_is_of_the_only_cloud_or_of_s3() -> None:
    text = "run: x\nfile_mounts: {/a: {name: b}, data/c: {name: d, mode: COPY}}\n"
    for resources, scheme in (
        ("", "s3"),
        ("resources: {infra: aws}", "s3"),
        ("resources: {infra: gcp/us-central1}", "gs"),
        ("resources: {cloud: azure}", "az"),
        ("resources: {any_of: [{infra: gcp}, {infra: aws}]}", "s3"),
    ):
        found = parse_file(text + resources)
        assert found.task is not None
        assert found.refused == ()
        assert [(each.source, each.target) for each in found.task.inputs] == [
            (f"{scheme}://b/", "/a"),
            (f"{scheme}://d/", "data/c"),
        ]
        assert any(f"{scheme}://b/ must exist" in each.reason for each in found.kept)


def test_a_container_of_azure_by_its_address() -> None:
    task = parse_file("run: x\nfile_mounts: {/a: 'https://x.blob.core.windows.net/c/d'}").task
    assert task is not None
    assert task.inputs[0].source == "az://c/d"


def test_a_volume_of_a_size_lasts_as_long_as_an_attempt() -> None:
    task = parse_file("run: x\nvolumes: {/mnt/data: {size: 10Gi}}").task
    assert task is not None
    (volume,) = task.volumes
    assert (volume.source, volume.path, volume.size_gib, volume.keep) == (
        "mnt-data",
        "/mnt/data",
        10,
        False,
    )


def test_a_priority_beyond_the_range_counts_as_its_end() -> None:
    found = need("{priority: -500}")
    assert found.task is not None
    assert (found.task.priority, keys(found, refused=False)) == (-100, ["resources.priority"])


@pytest.mark.parametrize(
    ("mode", "url"), [("MOUNT", "s3://b/"), ("MOUNT_CACHED", "s3://b/"), ("COPY", None)]
)
def test_local_files_of_a_bucket_are_submitted(mode: str, url: str | None) -> None:
    text = f"run: x\nfile_mounts: {{/a: {{name: b, source: ~/set, mode: {mode}}}}}"
    found = parse_file(text)
    assert found.task is not None
    assert [each.source for each in found.local] == ["~/set"]
    assert [(each.source, each.path) for each in found.task.volumes] == [(".mounts/0-set", "/a")]
    assert [each.target for each in found.task.outputs] == ([url] if url else [])
    assert found.task.inputs == ()


def test_several_local_files_of_a_bucket_lie_below_its_path() -> None:
    found = parse_file("run: x\nfile_mounts: {/a: {name: b, source: ['~/x y', ./z], mode: COPY}}")
    assert found.task is not None
    assert [each.source for each in found.local] == ["~/x y", "./z"]
    assert [(each.source, each.path) for each in found.task.volumes] == [
        (".mounts/0-x_y", "/a/x y"),
        (".mounts/1-z", "/a/z"),
    ]


@pytest.mark.parametrize(
    ("text", "workdir", "expected", "local"),
    [
        (
            "file_mounts: {~/code: ./code, /etc/x.conf: a/x.conf}",
            None,
            [(".mounts/0-code", "~/code"), (".mounts/1-x.conf", "/etc/x.conf")],
            ["./code", "a/x.conf"],
        ),
        ("workdir: .\nfile_mounts: {/all: .}", ".", [(".", "/all")], []),
        ("workdir: src\nfile_mounts: {/opt/lib: src/lib}", "src", [("lib", "/opt/lib")], []),
        ("workdir: ~/a\nfile_mounts: {/l: ~/a/lib}", "~/a", [("lib", "/l")], []),
        ("workdir: .\nfile_mounts: {lib: ./lib}", ".", None, []),
        ("workdir: .\nfile_mounts: {lib: ../lib}", ".", None, ["../lib"]),
        ("workdir: src\nfile_mounts: {/l: lib}", "src", [(".mounts/0-lib", "/l")], ["lib"]),
        ("workdir: .\nfile_mounts: {/l: ../lib}", ".", [(".mounts/0-lib", "/l")], ["../lib"]),
        ("workdir: .\nfile_mounts: {/l: /lib/x}", ".", [(".mounts/0-x", "/l")], ["/lib/x"]),
    ],
)
def test_local_mounts_are_parts_of_the_working_folder_or_submitted_beside_it(
    text: str, workdir: str | None, expected: list[tuple[str, str]] | None, local: list[str]
) -> None:
    found = parse_file(f"run: x\nnum_nodes: 1\n{text}")
    assert found.task is not None
    assert found.refused == ()
    assert [(each.source, each.path) for each in found.task.volumes] == (expected or [])
    assert {each.kind for each in found.task.volumes} <= {"folder"}
    assert [each.source for each in found.local] == local
    assert expected is not None or [each.inside for each in found.local] == ["lib"] * len(local)
    assert (found.task.workdir and found.task.workdir.path) == workdir


@pytest.mark.parametrize(
    ("config", "resources"),
    [
        ("kubernetes: {remote_identity: a}", "{infra: aws}"),
        ("kubernetes: {remote_identity: a}", "{cpus: 2}"),
        ("kubernetes: {provision_timeout: 900}", "{infra: k8s}"),
        ("active_workspace: a", "{cpus: 2}"),
        ("gcp: {enable_gvnic: true}", "{infra: gcp}"),
        ("docker: {run_options: --a}", "{cpus: 2}"),
        ("docker: {run_options: [--shm-size=2g, --gpus all]}", "{image_id: 'docker:a'}"),
    ],
)
def test_settings_that_the_work_does_not_notice_are_notes(config: str, resources: str) -> None:
    found = parse_file(f"run: x\nconfig: {{{config}}}\nresources: {resources}")
    assert found.refused == ()
    assert [each.key.startswith("config.") or each.key for each in found.kept] == [True]


def test_a_file_without_commands_waits_for_a_login() -> None:
    task = parse_task("setup: y\nresources: {accelerators: A100}")
    assert "while :; do sleep 3600 & wait $!; done" in task.run


def test_conda_is_a_note_where_no_image_may_have_it() -> None:
    text = "num_nodes: 1\nsetup: conda activate a\nrun: python b.py\n"
    assert keys(parse_file(text), refused=False) == ["setup"]
    assert keys(parse_file(text + "resources: {image_id: 'docker:a'}"), refused=False) == []


def test_ports_are_a_note() -> None:
    found = parse_file("run: x\nresources: {cpus: 1, ports: 8080}")
    assert (keys(found, refused=False), found.refused) == (["resources.ports"], ())


def test_notes_do_not_stop_a_run() -> None:
    text = (
        "run: x\nresources: {cpus: 1, disk_tier: best, network_tier: best, autostop: "
        "10m}\ninputs: {s3://a: 1.0}"
    )
    assert keys(parse_file(text), refused=False) == [
        "resources.disk_tier",
        "resources.network_tier",
        "resources.autostop",
        "inputs",
    ]
    assert parse_task(text).resources.cpus_min == 1


def test_pipelines_and_groups_are_kept_whole() -> None:
    pipeline = parse_file("name: p\n---\nrun: a\nnum_nodes: 2\n---\nname: b\nrun: b")
    assert (pipeline.what, pipeline.task) == ("pipeline", None)
    assert [(task.name, task.run, task.nodes) for task in pipeline.tasks] == [
        ("p-0", "a", 2),
        ("b", "b", 1),
    ]
    assert (keys(pipeline, refused=True), [each.job for each in pipeline.tasks[1].after]) == (
        [],
        ["p-0"],
    )
    group = parse_file(
        "name: g\nexecution: parallel\nprimary_tasks: [a]\n---\nname: a\nrun: x\n---\nname: "
        "b\nrun: y"
    )
    assert (group.what, len(group.tasks), keys(group, refused=True)) == ("job group", 2, [])
    single = parse_file("name: p\n---\nrun: a\nnum_nodes: 2")
    assert single.task is not None
    assert (single.task.name, single.refused) == ("p-0", ())


def test_a_volume_is_kept() -> None:
    found = parse_file("name: v\ntype: k8s-pvc\ninfra: k8s\nsize: 10Gi")
    assert (found.what, found.tasks, keys(found, refused=True)) == ("volume", (), ["type"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_nodes: two\nrun: x", "1:12: `num_nodes`: the text 'two' is not a whole number"),
        ("num_nodes: 0\nrun: x", "1:12: `num_nodes`: 0 is too small"),
        ("num_node: 2\nrun: x\nenvs: {}", "1:1: unknown key 'num_node'"),
        ("run: [a]\nenvs: {}", "1:6: `run` is a list"),
        ("run: 8\nenvs: {}", "1:6: `run`: the number 8 is not a string"),
        ("run: x\nresources: {cpus: many}", "2:19: `resources.cpus`: cannot use the text 'many'"),
        ("run: x\nresources: {cpus: -1}", "2:19: `resources.cpus`: cannot use the number -1"),
        (
            "run: x\nresources: {cpus: 1, memory: 8QB}",
            "2:30: `resources.memory`: cannot use the text '8QB'",
        ),
        (
            "run: x\nresources: {use_spot: 'yes'}",
            "2:23: `resources.use_spot`: the text 'yes' is neither true nor false",
        ),
        (
            "run: x\nresources: {cloud: awz}",
            "2:20: `resources.cloud`: 'awz' is not one of the choices; did you mean aws?",
        ),
        (
            "run: x\nresources: {infra: awz/us}",
            "2:20: `resources.infra`: unknown cloud 'awz'; did you mean aws?",
        ),
        (
            "run: x\nresources: {accelerators: 'H100:a'}",
            "2:27: `resources.accelerators`: cannot use 'H100:a'",
        ),
        (
            "run: x\nresources: {accelerators: {H100: -1}}",
            "2:34: `resources.accelerators.H100`: -1 is too small",
        ),
        (
            "run: x\nresources: {cpus: 1, spot_recovery: a}",
            "2:22: unknown key 'spot_recovery' in `resources`",
        ),
        (
            "run: x\nresources: {ports: 99999}",
            "2:20: `resources.ports`: cannot use the number 99999",
        ),
        (
            "run: x\nresources: {infra: aws, region: us}",
            "2:33: `region` and `infra` cannot be used together",
        ),
        (
            "run: x\nresources: {cpus: 1, any_of: [{cpux: 4}]}",
            "2:32: unknown key 'cpux' in `resources.any_of[0]`",
        ),
        (
            "run: x\nresources: {cpus: 1, any_of: [], ordered: []}",
            "2:43: `any_of` and `ordered` cannot be used together",
        ),
        ("run: x\nenvs: {1A: b}", "2:8: '1A' cannot be a key in `envs`"),
        ("run: x\nenvs: {}\nrun: y", "3:1: the key 'run' appears twice"),
        (
            "run: x\nservice: {readiness_probe: health}",
            "2:28: `service.readiness_probe`: cannot use 'health'",
        ),
        ("run: x\npool: {}", "2:7: the pool has no number of workers"),
        (
            "run: x\nservice: {replica_policy: {min_replicas: 1, max_replicas: 2}}",
            "2:27: a variable number of replicas needs a scaling target",
        ),
        (
            "run: x\nfile_mounts: {/a: {mode: MOUTN}}",
            "2:26: `file_mounts./a.mode`: 'MOUTN' is not one of the choices",
        ),
        ("run: x\nfile_mounts: {/a: 5}", "2:19: `file_mounts./a`: the number 5 is not a string"),
        ("name: a\nexecution: parallel\n---\nrun: x", "4:1: each job in a job group needs a name"),
        (
            "run: x\nresources: {accelerators: tpu-v4-8, infra: aws}",
            "2:27: tpu-v4-8 is a TPU, which aws does not have",
        ),
    ],
)
def test_every_mistake_has_its_place(text: str, said: str) -> None:
    found = wrong(text)
    assert len(found) == 1
    assert found[0].startswith(said)


def test_parameters_are_ours_alone() -> None:
    with pytest.raises(SpecError, match="this SkyPilot file declares no parameter lr"):
        parse_task("run: x\nnum_nodes: 1", params={"lr": "1"})


def test_recovery_on_exit_codes() -> None:
    task = need("{cpus: 1, job_recovery: {recover_on_exit_codes: [33, 34]}}").task
    assert task is not None
    assert task.retry == RetryPolicy(exit=None, exit_codes=(33, 34))
    assert task.grace == timedelta(seconds=10)


def test_recovery_on_any_error_and_on_exit_codes_is_limited_in_all() -> None:
    found = need(
        "{cpus: 1, job_recovery: {max_restarts_on_errors: 3, recover_on_exit_codes: [33, 34]}}"
    )
    assert (keys(found, refused=False), found.refused) == (["resources.job_recovery"], ())
    assert found.task is not None
    assert found.task.retry == RetryPolicy(exit=3)


LOGIN = "{SKYPILOT_DOCKER_USERNAME: a, SKYPILOT_DOCKER_PASSWORD: b, SKYPILOT_DOCKER_SERVER: s.io}"
ASKED = LOGIN.replace(": a", ": null").replace(": b", ": null").replace(": s.io", ": null")


@pytest.mark.parametrize(
    ("section", "image", "expected"),
    [
        (f"envs: {LOGIN}", "team/app", "s.io/team/app"),
        (f"envs: {LOGIN}", "s.io/team/app", "s.io/team/app"),
        (f"secrets: {ASKED}", "ghcr.io/team/app", "ghcr.io/team/app"),
        (f"secrets: {LOGIN.replace(': b', ': null')}", "team/app", "s.io/team/app"),
    ],
)
def test_the_login_of_a_registry(section: str, image: str, expected: str) -> None:
    found = parse_file(f"run: x\nresources: {{image_id: 'docker:{image}'}}\n{section}")
    task = found.task
    assert task is not None
    assert (task.image, task.image_login) == (expected, "SKYPILOT_DOCKER_LOGIN")
    assert (task.env, task.secrets, found.refused) == ({}, (), ())
    assert keys(found, refused=False) == [section.partition(":")[0]]


def test_a_registry_that_no_key_names_is_refused() -> None:
    text = f"run: x\nresources: {{image_id: 'docker:team/app'}}\nsecrets: {ASKED}"
    written = text.replace(ASKED, LOGIN)
    assert keys(parse_file(written), refused=True) == ["secrets.SKYPILOT_DOCKER_PASSWORD"]
    assert keys(parse_file(text), refused=True) == ["secrets"]
    plain = parse_file(f"run: x\nenvs: {LOGIN}").task
    assert plain is not None
    assert (len(plain.env), plain.image_login) == (3, None)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("~/.netrc", "NETRC_FILE"),
        ("~/.git-credentials", "GIT_CREDENTIALS_FILE"),
        ("~/.kaggle/kaggle.json", "KAGGLE_KAGGLE_JSON_FILE"),
        ("~/.config/gh/hosts.yml", "CONFIG_GH_HOSTS_YML_FILE"),
        ("~/.cache/huggingface/token", "CACHE_HUGGINGFACE_TOKEN_FILE"),
        ("/root/.ssh/id_rsa", "SSH_ID_RSA_FILE"),
    ],
)
def test_a_file_of_credentials_is_a_secret(path: str, name: str) -> None:
    sky = parse_file(f"run: x\nfile_mounts: {{~/keys: {path}}}")
    theirs = parse_file(f"type: task\ncommands: [x]\nfiles: ['{path}:~/keys']")
    for found, key in ((sky, "file_mounts.~/keys"), (theirs, "files")):
        assert found.task is not None
        assert (found.task.secrets, found.task.volumes, found.local) == ((name,), (), ())
        assert (keys(found, refused=False), found.refused) == ([key], ())
        assert f"cavvy secret set {name} --file {path}" in found.kept[0].reason


@pytest.mark.parametrize("path", ["~/.ssh", "/home/ann/.aws/", "~/.config/gcloud"])
def test_a_folder_of_credentials_is_not_uploaded(path: str) -> None:
    sky = parse_file(f"run: x\nfile_mounts: {{~/keys: {path}}}")
    theirs = parse_file(f"type: task\ncommands: [x]\nfiles: ['{path}:~/keys']")
    for found in (sky, theirs):
        assert len(found.refused) == 1
        assert found.local == ()


def test_managed_secrets_may_be_files() -> None:
    text = "run: x\nmanaged_secrets: [TOKEN, {global.CERT: {mount_path: /etc/cert.pem}}]"
    found = parse_file(text)
    assert found.task is not None
    assert (found.task.secrets, found.refused) == (("TOKEN", "CERT"), ())
    assert '"$CERT" > "$_file"' in parse_task(text).run


def test_files_near_credentials_are_uploaded() -> None:
    paths = ("~/.ssh/id_rsa.pub", "~/.gitconfig", "~/.cache/huggingface/hub", "~/.config/app")
    for path in paths:
        assert parse_file(f"run: x\nfile_mounts: {{/keys: {path}}}").refused == ()


def test_the_files_own_variables_are_put_into_mounts_before_they_are_looked_at() -> None:
    found = parse_file(
        """
envs: {NAME: my-bucket, STORE: s3, SIZE: 7, LATER: null}
file_mounts:
  /data: {name: $NAME, store: $STORE}
  /weights/llama-${SIZE}b: s3://weights/llama-${SIZE}b
  /later: {source: "s3://$LATER/x"}
workdir: src/$NAME
run: echo $NAME
"""
    )
    assert found.task is not None
    assert found.task.inputs[0] == Transfer(
        source="s3://my-bucket/", target="/data", mount=MountMode.MOUNT, writable=True
    )
    assert found.task.inputs[1] == Transfer(
        source="s3://weights/llama-7b", target="/weights/llama-7b"
    )
    assert found.task.workdir == Workdir(path="src/my-bucket")
    assert found.task.run == "echo $NAME"
    with pytest.raises(SpecError, match="'gcp' is not one of the choices"):
        parse_file("envs: {STORE: gcp}\nfile_mounts: {/data: {name: abc, store: $STORE}}\nrun: x\n")


def test_a_value_that_looks_like_a_variable_is_noted() -> None:
    text = "run: x\nenvs: {A: '${A}', B: $B, C: '${C:-d}', D: 'a$D', E: 5}\n"
    found = parse_file(text)
    assert keys(found, refused=False) == ["envs.A", "envs.B", "envs.C"]
    assert found.task is not None
    assert found.task.env["A"] == "${A}", "SkyPilot does not replace it, either"


@pytest.mark.parametrize(
    ("overrides", "env", "secrets"),
    [
        ("", {"A": ""}, ()),
        ("secrets: [A]", {}, ("A",)),
        ("env: {A: x}", {"A": "x"}, ()),
    ],
)
def test_an_empty_secret_is_an_empty_variable(
    overrides: str, env: dict[str, str], secrets: tuple[str, ...]
) -> None:
    found = parse_file("run: x\nsecrets: {A: ''}\n", options=ReadOptions(overrides=overrides))
    assert found.refused == ()
    assert found.task is not None
    assert (found.task.env, found.task.secrets) == (env, secrets)


def test_a_note_says_how_to_set_a_value() -> None:
    stored = "set the value with `cavvy secret set A`"
    for text, expected in (
        ("run: x\nenvs: {A: }\n", f"{stored}, or set the value for one job with --env A=VALUE"),
        ("run: x\nsecrets: {A: }\n", stored),
        (
            "type: task\ncommands: [x]\nenv: [A]\n",
            f"{stored}, or set the value for one job with --env A=VALUE",
        ),
        ("type: task\ncommands: [x]\nenv: {A: '${{ secrets.A }}'}\n", stored),
    ):
        assert [each.reason for each in parse_file(text).kept] == [expected]


@pytest.mark.parametrize(
    ("command", "url"),
    [
        (
            "curl -X POST --data \"s=$JOB_STATUS\" 'https://h.example/x?a=1'",
            "https://h.example/x?a=1",
        ),
        ("set -e\ncurl https://h.example/x; echo told", "https://h.example/x"),
        ("curl https://h.example/$JOB_ID", None),
        ("curl https://h.example/${JOB_ID}/x", None),
        ("curl https://a.example https://b.example", None),
        ("curl https://user:pass@h.example/x", None),
        ("python tell.py https://h.example/x", None),
        ("echo", None),
    ],
)
def test_a_callback_that_posts_to_one_address_is_a_webhook(command: str, url: str | None) -> None:
    found = parse_file(f"num_nodes: 1\nrun: echo\nevent_callback: {json.dumps(command)}\n")
    assert [each.url for each in found.task.webhooks] == ([url] if url else [])
    (told,) = (each for each in found.kept if each.key == "event_callback")
    assert not told.refused
    assert ("becomes `webhooks`" in told.reason) is (url is not None)


def test_a_path_in_the_home_folder_can_be_written_as_a_cavvy_file() -> None:
    text = (
        "run: x\nworkdir: .\ninputs: [{source: 'gs://b/', target: ~/.cache/hub/}]\n"
        "volumes: [{folder: conf, path: ~/conf}]\n"
    )
    task = parse_task(text, file="f.yaml")
    assert [each.target for each in task.inputs] == ["~/.cache/hub"]
    assert [each.path for each in task.volumes] == ["~/conf"]
    for wrong, said in (("target: ~/../x", "leads out"), ("target: '~/'", "working folder")):
        with pytest.raises(SpecError, match=said):
            parse_task(f"run: x\ninputs: [{{source: 'gs://b/', {wrong}}}]\n", file="f.yaml")
    with pytest.raises(SpecError, match="write an absolute path"):
        parse_task("run: x\nvolumes: [{host: /a, path: ~/a}]\n", file="f.yaml")
