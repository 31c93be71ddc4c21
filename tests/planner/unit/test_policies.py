"""What policies forbid, and what they leave."""

from datetime import UTC, datetime

import pytest
from tests.records import make_offer

from cavvy.domain.accounts import Project
from cavvy.domain.jobs import JobRecord
from cavvy.domain.policies import BoundPolicy, PolicyBook, ProjectPolicy, find_lifted
from cavvy.domain.tasks import AcceleratorNeed, ImageBuild, ResourceSpec, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import fields, replace
from cavvy.planner.candidates import OfferedMarket, find_candidates, match
from cavvy.planner.objections import explain_image, explain_policy, name_image
from cavvy.planner.placements import PlanningContext

NOW = datetime(2026, 1, 2, tzinfo=UTC)
DIGEST = "sha256:" + "0a" * 32
CPU = make_offer("gcp/europe-west4/n2", 400_000, vcpus=8, memory_mib=32768)
GPU = replace(
    CPU,
    provider="aws",
    region="us-east-1",
    zone="us-east-1a",
    instance_type="p5.48xlarge",
    accelerator="H100",
    accelerator_count=8,
    accelerator_memory_mib=81920,
    rate=HourlyRate(98_000_000),
)
HOST = replace(GPU, provider="local", region="here", zone=None, shared=True, rate=HourlyRate(0))
TASK = TaskSpec(name="t", run="true", project="vision")
ON_GPU = replace(
    TASK, resources=ResourceSpec(accelerators=(AcceleratorNeed(name="H100", count_min=8),))
)


def bound(**rules: object) -> list[BoundPolicy]:
    return [BoundPolicy("company", ProjectPolicy(**rules))]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rules", "cpu", "gpu", "host"),
    [
        ({}, True, True, True),
        ({"providers": ("gcp",)}, True, False, False),
        ({"providers": ("aws", "local")}, False, True, True),
        ({"regions": ("eu",)}, True, False, False),
        ({"regions": ("us-east-1", "here")}, False, True, True),
        ({"regions": ("us-east-1a",)}, False, True, False),
        ({"max_rate": HourlyRate(400_000)}, True, False, True),
        ({"max_rate": HourlyRate(399_999)}, False, False, True),
        ({"max_rate": HourlyRate(0)}, False, False, True),
        ({"accelerators": ("A100",)}, True, False, True),  # the task leaves the host's GPUs alone
        ({"accelerators": ("nvidia",)}, True, True, True),
        ({"accelerators": ("h100",)}, True, True, True),
        ({"regions": ("eu",), "accelerators": ("H100",)}, True, False, False),
    ],
)
def test_offers(rules: dict[str, object], cpu: bool, gpu: bool, host: bool) -> None:
    found = [explain_policy(bound(**rules), TASK, offer) is None for offer in (CPU, GPU, HOST)]
    assert found == [cpu, gpu, host]


def test_the_gpus_of_a_shared_host_count_if_the_task_uses_them() -> None:
    (refusal,) = {
        explain_policy(bound(accelerators=("A100",)), ON_GPU, each) for each in (GPU, HOST)
    }
    assert refusal is not None
    assert refusal.field == "resources.gpu"
    assert refusal.reason == "project company permits only the GPUs A100"


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("python:3.12", "docker.io/library/python"),
        ("docker.io/python", "docker.io/library/python"),
        ("index.docker.io/library/python:3", "docker.io/library/python"),
        ("nvidia/cuda:12", "docker.io/nvidia/cuda"),
        ("ghcr.io/acme/train:1.0", "ghcr.io/acme/train"),
        (f"ghcr.io/acme/train:1.0@{DIGEST}", "ghcr.io/acme/train"),
        (f"ghcr.io/acme/train@{DIGEST}", "ghcr.io/acme/train"),
        ("localhost:5000/train:2", "localhost:5000/train"),
        ("localhost/train", "localhost/train"),
    ],
)
def test_names_of_images(image: str, name: str) -> None:
    assert name_image(image) == name


@pytest.mark.parametrize(
    ("patterns", "image", "permitted"),
    [
        (("ghcr.io/acme/*",), "ghcr.io/acme/train:1", True),
        (("ghcr.io/acme",), "ghcr.io/acme/deep/train:1", True),
        (("ghcr.io",), "ghcr.io/acme/train", True),
        (("ghcr.io/acme/*",), "ghcr.io/acme-evil/train", False),
        (("ghcr.io/acme",), "ghcr.io/acme-evil/train", False),
        (("ghcr.io",), "ghcr.io.evil.example/acme/train", False),
        (("ghcr.io/acme/*",), "evil.example/ghcr.io/acme/train", False),
        (("ghcr.io/acme/*",), "acme/train", False),
        (("docker.io/library/*",), "python:3.12", True),
        (("docker.io/library/*",), "evil/python:3.12", False),
        (("a.example/x", "b.example"), "b.example/y", True),
    ],
)
def test_registries(patterns: tuple[str, ...], image: str, permitted: bool) -> None:
    task = replace(TASK, image=image)
    assert (explain_image(bound(images=patterns), task) is None) is permitted
    assert (explain_policy(bound(images=patterns), task, CPU) is None) is permitted


def test_digests() -> None:
    policies = bound(image_digests=True)
    assert explain_image(policies, TASK) is None  # it has no image
    assert explain_image(policies, replace(TASK, image=f"python@{DIGEST}")) is None
    for image in ("python", "python:3.12", "python@sha256:0a", f"python@{DIGEST}x"):
        refusal = explain_image(policies, replace(TASK, image=image))
        assert refusal is not None
        assert "docker.io/library/python@sha256:…" in refusal.reason
    build = replace(TASK, image_build=ImageBuild(path="."))
    assert explain_image(policies, build) is not None
    assert explain_image(bound(images=("ghcr.io",)), build) is not None
    assert explain_image(bound(regions=("eu",)), build) is None


def test_policies_of_all_projects_above_apply() -> None:
    projects = [Project(name="company"), Project(name="vision", parent="company")]
    policies = [
        BoundPolicy(name, ProjectPolicy(regions=(name or "all",)))
        for name in ("vision", "company", "", "other")
    ]
    book = PolicyBook(policies, projects)
    assert [each.project for each in book.find("vision")] == ["", "company", "vision"]
    assert [each.project for each in book.find("company")] == ["", "company"]
    assert [each.project for each in book.find("unknown")] == [""]
    assert [each.project for each in book.find("")] == [""]
    loop = [Project(name="a", parent="b"), Project(name="b", parent="a")]
    assert PolicyBook(policies[2:], loop).find("a") == [policies[2]]


def test_a_job_gets_only_offers_that_the_policies_permit() -> None:
    offers = (CPU, replace(CPU, provider="aws", region="eu-central-1"))
    job = JobRecord(
        id="1", project="vision", name="t", task=TASK, submitted_at=NOW, since=NOW, consented=True
    )

    def find(policy: ProjectPolicy) -> tuple[list[str], str, bool]:
        book = PolicyBook([BoundPolicy("vision", policy)])
        market = OfferedMarket(offers=offers, policies=book)
        found = find_candidates(
            job,
            market,
            match(job, market),
            lambda *_: (),
            situation=PlanningContext(submitted_at=NOW),
            now=NOW,
        )
        return [offer.provider for offer in found.offers], found.reason, found.hopeless

    assert sorted(find(ProjectPolicy())[0]) == ["aws", "gcp"]
    assert find(ProjectPolicy(providers=("aws",))) == (["aws"], "", False)
    names, reason, hopeless = find(ProjectPolicy(regions=("asia",)))
    assert (names, hopeless) == ([], True)
    assert "project vision permits only the regions asia" in reason


def test_every_field_of_a_policy_restricts_something() -> None:
    strict = {
        "providers": ("x",),
        "regions": ("x",),
        "accelerators": ("A100",),
        "max_rate": HourlyRate(0),
        "images": ("x",),
        "image_digests": True,
        "signed_by": ("MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=",),
    }
    # restrict no offers; see test_control_retention and test_shares
    others = {"keep_jobs_days", "share", "quota_gpus", "max_gpus", "user_gpus", "user_jobs"}
    others |= {"user_waiting", "users"} | {
        f"{whose}_{what}"
        for whose in ("quota", "max", "user")
        for what in ("accelerators", "micros_per_hour")
    }
    assert set(strict) | others == {each.name for each in fields(ProjectPolicy)}
    task = replace(ON_GPU, image="python")
    assert explain_policy(bound(), task, GPU) is None
    for name, value in strict.items():
        assert explain_policy(bound(**{name: value}), task, GPU) is not None


def test_a_move_lifts_restrictions_and_not_how_long_jobs_are_kept() -> None:
    projects = [Project(name="team", parent=None), Project(name="a", parent="team")]
    for policy, lifts in (
        (ProjectPolicy(keep_jobs_days=5), False),
        (ProjectPolicy(providers=("aws",), keep_jobs_days=5), True),
    ):
        book = PolicyBook([BoundPolicy("team", policy)], projects)
        assert bool(find_lifted(book, "a", None)) == lifts
