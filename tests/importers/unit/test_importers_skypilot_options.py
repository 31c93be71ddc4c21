"""Parts of SkyPilot files that become options of one provider."""

import json

import pytest

from cavvy.spec.describe import describe_task
from cavvy.task_files import Translation, parse_file


def read(resources: str, config: str = "{}") -> Translation:
    return parse_file(f"run: x\nnum_nodes: 1\nresources: {resources}\nconfig: {config}\n")


def options_of(found: Translation) -> list[tuple[tuple[str, ...], dict[str, object]]]:
    assert found.task is not None
    assert found.refused == ()
    return [
        (need.regions, {each.provider: json.loads(each.values) for each in need.options})
        for need in found.task.resources.choices
    ]


@pytest.mark.parametrize(
    ("resources", "region", "options"),
    [
        ("{infra: aws/us-east-1/us-east-1a}", "us-east-1", {"aws": {"zone": "us-east-1a"}}),
        ("{cloud: gcp, zone: us-east1-b}", "us-east1-b", {}),
        ("{infra: gcp/*/asia-northeast3-a}", "asia-northeast3-a", {}),
        (
            "{infra: aws/us-east-1/us-east-1a, image_id: ami-1}",
            "us-east-1",
            {"aws": {"image": "ami-1", "zone": "us-east-1a"}},
        ),
        (
            "{accelerators: tpu-v2-8, accelerator_args: {runtime_version: v2, tpu_vm: true}}",
            None,
            {"gcp": {"runtime_version": "v2"}, "tpu": {"runtime": "v2"}},
        ),
    ],
)
def test_zones_images_and_runtimes_are_options_of_the_cloud(
    resources: str, region: str | None, options: dict[str, object]
) -> None:
    assert options_of(read(resources)) == [((region,) if region else (), options)]


def test_zones_of_alternatives_stay_with_their_alternative() -> None:
    found = read("{any_of: [{infra: aws/us-west-2/us-west-2a}, {infra: aws/us-west-2/us-west-2b}]}")
    assert options_of(found) == [
        (("us-west-2",), {"aws": {"zone": "us-west-2a"}}),
        (("us-west-2",), {"aws": {"zone": "us-west-2b"}}),
    ]


@pytest.mark.parametrize(
    ("resources", "key"),
    [
        ("{zone: us-east-1a}", "resources.zone"),
        (
            "{accelerators: tpu-v2-8, accelerator_args: {tpu_vm: false}}",
            "resources.accelerator_args",
        ),
    ],
)
def test_a_zone_without_a_cloud_and_old_tpu_nodes_are_refused(resources: str, key: str) -> None:
    assert [each.key for each in read(resources).refused] == [key]


@pytest.mark.parametrize(
    ("written", "option"),
    [
        ("true", "all"),
        ("BUILD", "build"),
        ("{mode: ALL}", "all"),
        ("{mode: BUILD, cache_volume: c}", {"mode": "build", "cache": "c"}),
    ],
)
def test_docker_beside_the_work_is_an_option_of_kubernetes(written: str, option: object) -> None:
    found = read("{infra: k8s}", f"{{kubernetes: {{enable_docker: {written}}}}}")
    assert options_of(found) == [((), {"kubernetes": {"docker": option}})]
    off = read("{infra: k8s}", "{kubernetes: {enable_docker: false}}")
    assert options_of(off) == [((), {})]


def test_a_pool_starts_one_worker_as_with_sky_launch() -> None:
    found = parse_file("run: x\npool: {workers: 2}\n")
    assert found.refused == ()
    assert found.task is not None
    assert found.task.run == "x"
    (kept,) = found.kept
    assert kept.key == "pool"
    assert "sky launch" in kept.reason


@pytest.mark.parametrize(
    ("mounts", "url"),
    [
        ("{/a: {name: b, store: r2}}", "s3://b/"),
        ("{/a: r2://b/c}", "s3://b/c"),
        ("{/a: nebius://b/c/}", "s3://b/c/"),
        ("{/a: cos://eu-de/b/c}", "s3://b/c"),
        ("{/a: {source: cw://b, mode: MOUNT}}", "s3://b/"),
    ],
)
def test_stores_with_the_protocol_of_s3_need_their_address(mounts: str, url: str) -> None:
    found = parse_file(f"run: x\nfile_mounts: {mounts}\n")
    assert found.refused == ()
    assert found.task is not None
    assert [each.source for each in found.task.inputs] == [url]
    assert {each.target for each in found.task.outputs} <= {url}
    assert found.task.secrets == ("AWS_ENDPOINT_URL_S3",)
    assert any("cavvy secret set AWS_ENDPOINT_URL_S3" in each.reason for each in found.kept)


def test_a_bucket_of_the_only_cloud_uses_the_store_of_that_cloud() -> None:
    found = parse_file("run: x\nresources: {infra: nebius}\nfile_mounts: {/a: {name: b}}\n")
    assert found.task is not None
    assert found.task.secrets == ("AWS_ENDPOINT_URL_S3",)


def test_a_bucket_of_a_job_on_tpus_is_in_google_s_cloud() -> None:
    text = "run: x\nresources: {accelerators: tpu-v2-8}\nfile_mounts: {/a: {name: b}}\n"
    (task,) = parse_file(text).tasks
    assert task.resources.providers == ("gcp", "tpu")
    assert [each.source for each in task.inputs] == ["gs://b/"]


@pytest.mark.parametrize("cloud", ["runpod", "vast", "yotta", "kubernetes"])
def test_clouds_of_containers_have_no_machine_images(cloud: str) -> None:
    found = read(f"{{infra: {cloud}, image_id: team/app}}")
    assert options_of(found) == [((), {})]
    assert found.task is not None
    assert found.task.image == "team/app"


def test_validate_shows_the_values_of_options() -> None:
    (task,) = parse_file(
        "run: x\nresources: {any_of: [{infra: aws/us-east-1/us-east-1a}, "
        "{infra: aws/us-east-1/us-east-1b}]}\n"
    ).tasks
    rows = dict(describe_task(task))
    assert rows["on"] == "1 node with options of aws (zone us-east-1a)"
    assert rows["or"].startswith("with options of aws (zone us-east-1b), ")


def test_validate_says_that_a_file_without_commands_is_a_session() -> None:
    (task,) = parse_file("setup: x\nnum_nodes: 1\n").tasks
    assert dict(describe_task(task))["runs"] == "a session that waits for you, after its setup"
