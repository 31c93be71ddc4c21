"""Signatures against published examples and the clouds' own libraries' results; which keys are
taken.
"""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from cavvy.domain.targets import EVERY
from cavvy.store.objects.base import ObjectDenied, ObjectTryAgain, part_bytes
from cavvy.store.objects.locations import OWN_FILES, merge_keys, open_place, overlaps
from cavvy.store.objects.s3 import AmazonKey

NOW = datetime(2013, 5, 24, tzinfo=UTC)


def test_amazons_own_example() -> None:
    """docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html, "An example"."""
    key = AmazonKey(
        key_id="AKIAIOSFODNN7EXAMPLE", secret="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    )
    url = key.sign("GET", "https://examplebucket.s3.amazonaws.com/test.txt", {}, NOW, 86400)
    assert url.endswith(
        "&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    )
    assert "wJalr" not in url


def test_project_keys_put_out_the_servers_own_of_their_family() -> None:
    environment = {
        "AWS_SESSION_TOKEN": "t",
        "AWS_ACCESS_KEY_ID": "server",
        "AZURE_STORAGE_KEY": "a",
        "HOME": "/root",
    }
    secrets = {"AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": "s", "WANDB_API_KEY": "x"}
    assert merge_keys(environment, secrets) == {
        "AZURE_STORAGE_KEY": "a",
        "AWS_ACCESS_KEY_ID": "mine",
        "AWS_SECRET_ACCESS_KEY": "s",
    }


def test_a_project_names_no_files_of_the_server() -> None:
    assert (
        merge_keys({}, {"GOOGLE_APPLICATION_CREDENTIALS": "/etc/shadow", "AWS_PROFILE": "root"})
        == {}
    )


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3://bucket/a", "AWS_ACCESS_KEY_ID"),
        ("gs://bucket/a", "GOOGLE_SERVICE_ACCOUNT"),
        ("az://container/a", "AZURE_STORAGE_KEY"),
        ("ftp://host/a", "not the URL of a storage"),
    ],
)
def test_what_is_missing_is_named(url: str, told: str) -> None:
    keys = {"AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
    with pytest.raises(ObjectDenied, match=told):
        open_place(url, keys, lambda: NOW)


def test_parts_are_few_enough() -> None:
    for size in (0, 1, 16 << 20, (160 << 30) + 1, 5 << 40):
        assert -(-size // part_bytes(size)) <= 10_000
    assert part_bytes(1) == 16 << 20


@pytest.mark.parametrize(
    ("url", "keys"),
    [
        ("http://169.254.169.254/latest/meta-data/iam/security-credentials/role", {}),
        ("http://[fe80::1]/x", {}),
        (
            "s3://b/x",
            {
                "AWS_ACCESS_KEY_ID": "a",
                "AWS_SECRET_ACCESS_KEY": "b",
                "AWS_ENDPOINT_URL_S3": "http://169.254.170.2",
            },
        ),
    ],
)
def test_nothing_is_fetched_from_the_servers_own_link(url: str, keys: dict[str, str]) -> None:
    found = open_place(url, keys, lambda: NOW)
    with pytest.raises(ObjectDenied, match="link-local"):
        found.place.head(found.key)


FILES = "s3://company/team"


@pytest.mark.parametrize(
    "url",
    [
        "s3://company",
        "s3://company/",
        "s3://company/te",  # a listing has all keys that begin so
        "s3://company/team",
        "s3://company/team/logs/other/",
        "S3://Company//%74eam/files.id",
        "s3://company/a/../team/files.id",
    ],
)
def test_the_servers_keys_open_nothing_where_its_own_files_are(url: str) -> None:
    environment = {"AWS_ACCESS_KEY_ID": "server", "AWS_SECRET_ACCESS_KEY": "s", OWN_FILES: FILES}
    assert overlaps(url, FILES)
    assert overlaps(url, f"{FILES}/")
    with pytest.raises(ObjectDenied, match="the server stores its own files"):
        assert open_place(url, merge_keys(environment, {}), lambda: NOW) is not None
    mine = {"AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": "s"}
    open_place(url, merge_keys(environment, mine), lambda: NOW)  # the rights of these keys decide
    with pytest.raises(ObjectDenied, match="the server stores its own files"):
        open_place(url, merge_keys(environment, {"AZURE_STORAGE_KEY": "x"}), lambda: NOW)


PART_OF_AWS = [
    {"AWS_REGION": "eu-west-1"},
    {"AWS_ACCESS_KEY_ID": "mine"},
    # the paths of these URLs would begin in the server's own bucket
    {"AWS_ENDPOINT_URL": "https://company.s3.eu-west-1.amazonaws.com"},
    {"AWS_ENDPOINT_URL_S3": "https://s3.eu-west-1.amazonaws.com/company"},
]


@pytest.mark.parametrize("mine", PART_OF_AWS, ids=str)
def test_a_project_with_part_of_a_familys_keys_uses_no_file_of_the_server(
    mine: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "credentials").write_text("[default]\naws_access_key_id=s\naws_secret_access_key=s\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    open_place("s3://other/a", merge_keys({OWN_FILES: FILES}, {}), lambda: NOW)
    for url in (FILES, "s3://team/logs"):
        with pytest.raises(ObjectDenied, match="no key of the server"):
            open_place(url, merge_keys({OWN_FILES: FILES}, mine), lambda: NOW)


def test_the_servers_google_key_signs_for_no_host_of_a_project() -> None:
    environment = {"GOOGLE_SERVICE_ACCOUNT": '{"client_email": "a", "private_key": "k"}'}
    mine = {"STORAGE_EMULATOR_HOST": "https://storage.googleapis.com/company"}
    assert merge_keys({**environment, OWN_FILES: "gs://company/team"}, mine) == mine
    assert merge_keys(mine, environment) == mine | environment


@pytest.mark.parametrize("url", ["s3://company/teams/a", "s3://other/team/a", "s3://company/data"])
def test_other_folders_of_the_same_bucket_are_opened(url: str) -> None:
    environment = {"AWS_ACCESS_KEY_ID": "server", "AWS_SECRET_ACCESS_KEY": "s", OWN_FILES: FILES}
    open_place(url, merge_keys(environment, {}), lambda: NOW)


@pytest.mark.parametrize("url", ["s3://me@company/team", "s3://../company/team", "gs://a:80/b"])
def test_a_bucket_has_no_name_that_means_something_else_in_a_url(url: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "server", "AWS_SECRET_ACCESS_KEY": "s"}
    with pytest.raises(ObjectDenied, match="names no bucket"):
        open_place(url, keys, lambda: NOW)


OWN_S3 = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
ENDPOINT = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("url", "environment", "secrets", "refused"),
    [
        ("http://127.0.0.1:9/x", {}, {}, True),
        ("HTTP://[::ffff:127.0.0.1]:9/x", {}, {}, True),
        ("sftp://a@127.0.0.1:9/x", {}, {}, True),
        ("s3://b/x", {}, {**OWN_S3, **ENDPOINT}, True),
        ("s3://b/x", {**OWN_S3, **ENDPOINT}, {}, False),  # the administrator chose the endpoint
        ("gs://b/x", {}, {"STORAGE_EMULATOR_HOST": "127.0.0.1:9"}, True),
        ("gs://b/x", {"STORAGE_EMULATOR_HOST": "127.0.0.1:9"}, {}, False),
        (
            "az://c/x",
            {},
            {
                "AZURE_STORAGE_ACCOUNT": "a",
                "AZURE_STORAGE_KEY": "eA==",
                "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:9",
            },
            True,
        ),
    ],
)
def test_storages_of_a_project_are_outside_unless_an_administrator_allows_them(
    url: str, environment: dict[str, str], secrets: dict[str, str], refused: bool
) -> None:
    for targets in ("", "10.0.0.0/8", "127.0.0.1", EVERY):
        found = open_place(url, merge_keys(environment, secrets, targets), lambda: NOW)
        inside = refused and targets in ("", "10.0.0.0/8")
        with pytest.raises(ObjectDenied if inside else ObjectTryAgain) as caught:
            found.place.head(found.key)
        assert ("server.private_targets does not list it" in str(caught.value)) == inside


@pytest.mark.parametrize("targets", ["", "127.0.0.1", EVERY])
def test_a_region_is_no_other_host(targets: str) -> None:
    secrets = {**OWN_S3, "AWS_REGION": "x@127.0.0.1:9/"}
    found = open_place("s3://b/x", merge_keys({}, secrets, targets), lambda: NOW)
    with pytest.raises(ObjectDenied):
        found.place.head(found.key)
