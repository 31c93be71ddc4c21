"""Key files that projects set: what identifies an account is kept, and nothing that leads elsewhere."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from cavvy.providers import nebius
from cavvy.providers.azure import account as azure
from cavvy.providers.azure.account import AzureAccount
from cavvy.providers.base import KeyFileRefused, Refused
from cavvy.providers.gcp import credentials as gcp
from cavvy.providers.oci import api as oci
from cavvy.providers.oci.api import OciCredentials
from cavvy.providers.registry import manifests

PEM = (
    rsa.generate_private_key(65537, 2048)
    .private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    .decode()
)
GOOGLE = {
    "type": "service_account",
    "project_id": "vision-1",
    "private_key_id": "abc123",
    "private_key": PEM,
    "client_email": "cavvy@vision-1.iam.gserviceaccount.com",
    "client_id": "1",
    "auth_uri": "https://accounts.google.com/o/oauth2/auth",
    "token_uri": gcp.TOKEN_URI,
    "universe_domain": "googleapis.com",
}
NEBIUS = {
    "alg": "RS256",
    "type": "JWT",
    "private-key": PEM,
    "kid": "publickey-1",
    "iss": "serviceaccount-1",
    "sub": "serviceaccount-1",
}
OCI = {
    "user": "ocid1.user.oc1..aaaa1",
    "tenancy": "ocid1.tenancy.oc1..bbbb2",
    "region": "eu-frankfurt-1",
    "fingerprint": ":".join(["0a"] * 16),
    "key_content": "\n  " + PEM.strip().replace("\n", "\n  "),
}


AZURE = {
    "appId": "3f6a7c1e-0000-4000-8000-00000000000a",
    "displayName": "cavvy",
    "password": "abc~DEF.123",
    "tenant": "3f6a7c1e-0000-4000-8000-00000000000b",
}


def make_google(**changes: object) -> str:
    return json.dumps({**GOOGLE, **changes})


def make_nebius(**changes: object) -> str:
    return json.dumps({"subject-credentials": {**NEBIUS, **changes}})


def make_oci(**changes: str) -> str:
    lines = [f"{name} = {value}" for name, value in {**OCI, **changes}.items() if value]
    return "[DEFAULT]\n" + "\n".join(lines) + "\n"


def make_azure(**changes: object) -> str:
    return json.dumps({**AZURE, **changes})


def test_a_service_principal_of_azure_in_both_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = pytest.importorskip("azure.identity")
    monkeypatch.setenv("AZURE_SUBSCRIPTION_ID", "of-the-server")
    found = json.loads(azure.clean_key(make_azure()))
    assert found == {
        "clientId": AZURE["appId"], "tenantId": AZURE["tenant"], "clientSecret": AZURE["password"],
    }  # fmt: skip
    with_addresses = {**found, "managementEndpointUrl": "http://evil", "certificate": "/etc/shadow"}
    assert json.loads(azure.clean_key(json.dumps(with_addresses))) == found
    file = tmp_path / "key"
    file.write_text(azure.clean_key(make_azure()))
    settings = {"endpoint": "https://management.azure.com", "key_file": str(file)}
    account = AzureAccount(settings, None)
    assert account._subscription == "", "the server's own is not that of the project"
    credential = account._find_credential()
    assert isinstance(credential, identity.ClientSecretCredential)
    assert AzureAccount({**settings, "key_file": ""}, None)._subscription == "of-the-server"
    file.write_text("{}")
    with pytest.raises(Refused, match="key_file: `appId`"):
        account._find_credential()


def test_each_provider_takes_credentials_of_projects_or_says_why_not() -> None:
    for each in manifests():
        assert bool(each.project_settings) != bool(each.no_project_accounts), each.name
        forbidden = {"profile", "endpoint", "prices_endpoint", "history_endpoint"}
        assert forbidden.isdisjoint(each.project_settings), each.name
        known = {setting.name for setting in each.settings}
        assert known >= set(each.project_settings), each.name


def test_a_key_of_google_leads_to_google_alone() -> None:
    clean = json.loads(gcp.clean_key(make_google(client_x509_cert_url="http://evil")))
    assert clean["token_uri"] == gcp.TOKEN_URI
    assert clean["private_key"] == PEM
    assert set(clean) == {
        "type", "project_id", "private_key_id", "private_key", "client_email", "token_uri",
    }  # fmt: skip


def test_keys_of_nebius_and_their_tokens() -> None:
    text = json.dumps({**json.loads(make_nebius(more="x")), "file": "/etc/shadow"})
    assert json.loads(nebius.clean_key(text)) == {"subject-credentials": NEBIUS}
    assert nebius.clean_key(" v1.abc-def \n") == "v1.abc-def"


def test_a_configuration_of_oci_signs_with_the_key_in_it(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(oci.clean_key(make_oci(key_file="/etc/shadow", log_file="/x")))
    assert "shadow" not in file.read_text()
    found = OciCredentials({"key_file": str(file), "profile": "DEFAULT"}).profile()
    assert found.region == "eu-frankfurt-1"
    assert found.key.key_size == 2048
    headers = OciCredentials({"key_file": str(file), "profile": "DEFAULT"}).sign(
        "GET", "https://iaas.eu-frankfurt-1.oraclecloud.com/x", None
    )
    assert f"{OCI['tenancy']}/{OCI['user']}/{OCI['fingerprint']}" in headers["Authorization"]


@pytest.mark.parametrize(
    ("clean", "text", "reason"),
    [
        (gcp.clean_key, "x", "not JSON"),
        (gcp.clean_key, "[" * 9999, "not JSON"),
        (gcp.clean_key, make_google(type="external_account"), "service account"),
        (gcp.clean_key, make_google(type="authorized_user"), "service account"),
        (gcp.clean_key, make_google(token_uri="http://169.254.169.254/"), "token_uri"),
        (gcp.clean_key, make_google(universe_domain="evil.example"), "universe_domain"),
        (gcp.clean_key, make_google(project_id="../x"), "project_id"),
        (gcp.clean_key, make_google(private_key="file:///etc/shadow"), "private_key"),
        (gcp.clean_key, make_google(client_email=None), "client_email"),
        (azure.clean_key, "x", "not JSON"),
        (azure.clean_key, "[]", "az ad sp"),
        (azure.clean_key, make_azure(tenant="../x"), "tenant"),
        (azure.clean_key, make_azure(tenant="a.example/#"), "tenant"),
        (azure.clean_key, make_azure(appId="x"), "appId"),
        (azure.clean_key, make_azure(password="a\nb"), "password"),
        (azure.clean_key, make_azure(password=None), "password"),
        (azure.clean_key, make_azure(activeDirectoryEndpointUrl="http://evil"), "Endpoint"),
        (nebius.clean_key, "/etc/shadow {", "neither"),
        (nebius.clean_key, "{}", "neither"),
        (nebius.clean_key, make_nebius(alg="none"), "RS256"),
        (nebius.clean_key, make_nebius(sub="a\nb"), "sub"),
        (nebius.clean_key, make_nebius(**{"private-key": "/etc/shadow"}), "private-key"),
        (oci.clean_key, "x", "not a configuration file"),
        (oci.clean_key, make_oci(region="evil.example/#"), "region"),
        (oci.clean_key, make_oci(key_content="", key_file="/etc/shadow"), "key_content"),
        (oci.clean_key, make_oci().replace("-----END ", "-----END \rkey_file = "), "key_content"),
        (oci.clean_key, make_oci(tenancy="x"), "tenancy"),
        (oci.clean_key, make_oci(pass_phrase="x"), "pass_phrase"),
        (oci.clean_key, make_oci() + "[other]\nuser = x\n", "one profile"),
    ],
)
def test_what_leads_elsewhere_is_refused(
    clean: Callable[[str], str], text: str, reason: str
) -> None:
    with pytest.raises(KeyFileRefused, match=reason) as raised:
        clean(text)
    assert "PRIVATE KEY" not in str(raised.value)
    assert raised.value.__cause__ is None
