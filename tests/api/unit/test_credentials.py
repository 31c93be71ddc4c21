"""Which account a project's jobs use, and what a project may set for it."""

from pathlib import Path

import pytest

from cavvy.api.errors import ApiProblem
from cavvy.api.project_credentials import CredentialContent, check_content
from cavvy.domain.accounts import Project
from cavvy.domain.allocations import SilentPlace, VolumeLocation
from cavvy.domain.credentials import CredentialBook, mark_account
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.planner.candidates import OfferedMarket
from cavvy.providers.aws.account import AwsAccount
from cavvy.providers.base import Refused, SettingKind
from cavvy.providers.registry import list_known, manifest_of, manifests

TREE = [Project(name="company"), Project(name="team", parent="company"), Project(name="other")]
BOOK = CredentialBook([("company", "aws"), ("team", "aws"), ("other", "lambda")], TREE)


def offer(credential: str = "") -> Offer:
    return Offer(
        provider="aws", credential=credential, region="r", instance_type="t", rate=HourlyRate(1)
    )


def test_the_nearest_project_with_a_credential_pays() -> None:
    pays = {
        ("team", "aws"): "aws@team",
        ("company", "aws"): "aws@company",
        ("team", "lambda"): "lambda",
        ("other", "aws"): "aws",
        ("unknown", "aws"): "aws",
    }
    assert {each: BOOK.find_account(*each) for each in pays} == pays


def test_a_project_below_inherits_the_credential() -> None:
    book = CredentialBook([("company", "aws")], TREE)
    assert book.find_account("team", "aws") == "aws@company"


def test_accounts_never_recognise_the_machines_of_each_other() -> None:
    marks = {mark_account("i", project) for project in ("", "a", "b")}
    assert len(marks) == 3
    assert mark_account("i", "") == "i"


def test_a_project_sees_only_its_own_part_of_the_market() -> None:
    own, others = offer("team"), offer("company")
    common = offer()
    assert len({own.key, others.key, common.key}) == 3
    market = OfferedMarket(
        offers=[own, others, common],
        volumes=[VolumeLocation(provider="aws@team", names=("v",), region="r")],
        blind=frozenset({"aws@team", "aws"}),
        problems=[SilentPlace("aws@company", "secret detail"), SilentPlace("aws@team", "slow")],
        credentials=BOOK,
    )
    seen = market.restrict("team")
    assert list(seen.offers) == [own]
    assert [each.provider for each in seen.volumes] == ["aws"]
    assert seen.blind == {"aws"}
    assert list(seen.problems) == [SilentPlace("aws", "slow")]
    assert list(market.restrict("other").offers) == [common]
    assert market.restrict("other").problems == []


def test_only_data_for_the_cloud_can_be_set() -> None:
    able = [each for each in manifests() if each.project_settings]
    assert {"aws", "lambda", "runpod"} <= {each.name for each in able}
    for manifest in able:
        kinds = {each.name: each.kind for each in manifest.settings}
        mine = {each: kinds[each] for each in manifest.project_settings}
        assert SettingKind.KEY_FILE in mine.values()
        for name in mine:
            assert "endpoint" not in name
            assert name not in ("profile", "reach_by_ssh", "enabled")
            # of Vertex Workbench, an address in Cloud Storage; elsewhere, a program of the server
            assert name != "script" or manifest.name == "vertex-workbench"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (CredentialContent(), "needs the key key_file"),
        (CredentialContent(keys={"key_file": " "}), "needs the key key_file"),
        (CredentialContent(keys={"key_file": "k", "other": "k"}), "the key 'other'"),
        (CredentialContent(keys={"key_file": "k\0"}), "must be text"),
        (
            CredentialContent(settings={"endpoint": "http://169.254.169.254"}),
            "the setting 'endpoint'",
        ),
        (CredentialContent(settings={"key_file": "/etc/shadow"}), "the setting 'key_file'"),
        (
            CredentialContent(keys={"key_file": "k"}, settings={"regions": "evil.example/#"}),
            "does not list regions",
        ),
        (CredentialContent(keys={"key_file": "k"}, settings={"image": "a\nb"}), "printable"),
    ],
)
def test_paths_addresses_and_unknown_names_are_refused(
    content: CredentialContent, reason: str
) -> None:
    with pytest.raises(ApiProblem, match=reason):
        check_content(manifest_of(list_known()["vast"]), content)


def test_machines_of_ones_own_have_no_credentials() -> None:
    for name in ("local", "ssh", "join", "kubernetes", "slurm"):
        with pytest.raises(ApiProblem, match="does not support credentials of projects"):
            check_content(manifest_of(list_known()[name]), CredentialContent())


def test_the_keys_of_aws_come_from_the_key_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "[default]\naws_access_key_id = AKIA1\n aws_secret_access_key=s3cret/+x\n"
        "credential_process = /bin/false\nrole_arn = other\n"
    )
    account = AwsAccount({"key_file": str(file), "profile": "ignored"})
    assert account._name_credentials() == {
        "aws_access_key_id": "AKIA1",
        "aws_secret_access_key": "s3cret/+x",
    }
    file.write_text("credential_process = /bin/false\n")
    with pytest.raises(Refused, match="aws_access_key_id"):
        account._name_credentials()
