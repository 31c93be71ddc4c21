"""Credentials of projects at providers: who may set them, which jobs use them, and that nothing
of them leaves the server.
"""

import json
import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from tests.api.api_state import Api, until
from tests.api.team import make_team
from tests.providers.seam.unit.test_project_keys import AZURE, GOOGLE

from cavvy.api.errors import ApiProblem
from cavvy.api.project_credentials import CredentialContent
from cavvy.control.reconcile import HOSTS
from cavvy.domain.accounts import Role
from cavvy.domain.jobs import Attempt, AttemptPhase
from cavvy.domain.values import replace
from cavvy.providers.abilities import CLOSEABLE, SHARES_HOSTS, ability
from cavvy.providers.base import Provider, Refused, TryAgain

PATH = "/v1/projects/p/credentials/fake"
KEY = "key-4711-planted"
# the made-up cloud of the installation has no offer of this size, and that of a project has one
TASK = "{name: %s, run: 'true', resources: {cpu: 4}, env: {FAKE_RUN_S: '600'}}"


async def put(api: Api, key: str = KEY, path: str = PATH, **settings: Any) -> httpx.Response:
    return await api.http.put(path, json={"keys": {"key_file": key}, "settings": settings})


async def start(api: Api, project: str, name: str) -> Attempt:
    answer = await api.post_job(TASK % name, project=project, consent=True)
    assert answer.status_code == 201, answer.text
    return await launched(api, answer.json()["id"])


async def launched(api: Api, job: str) -> Attempt:
    """The job's attempt, once its gang is at a provider."""

    async def look() -> Attempt | None:
        attempts = await api.app_state.store.attempts(job)
        going = (AttemptPhase.BOOTING, AttemptPhase.RUNNING)
        return attempts[-1] if attempts and attempts[-1].phase in going else None

    found: Attempt = await until(look, 20)
    return found


async def test_jobs_use_the_account_of_their_project(api: Api) -> None:
    assert (await put(api)).status_code == 204
    pool = api.app_state.control_plane.pool
    assert set(pool.providers) == {"fake", "fake@p"}
    mine, others = await start(api, "p", "mine"), await start(api, "q", "others")
    assert (mine.offer.account, others.offer.account) == ("fake@p", "fake")
    for account, gang in (("fake@p", mine.gang), ("fake", others.gang)):
        assert [each.name for each in await pool.gangs(account)] == [gang]


async def test_no_answer_record_or_file_has_the_key(api: Api, tmp_path: Path) -> None:
    await put(api)
    secret = await api.http.put("/v1/projects/p/secrets/S", json={"value": f"secret {KEY}"})
    assert secret.status_code == 204
    await start(api, "p", "mine")
    listed = await api.http.get("/v1/projects/p/credentials")
    assert [each["provider"] for each in listed.json()] == ["fake"]
    assert listed.json()[0]["problem"] == ""
    log = await api.http.get("/v1/audit-log")
    assert f"PUT {PATH.replace('/p/', '/{project}/').replace('/fake', '/{provider}')}" in log.text
    (sealed,) = await api.app_state.store.provider_credentials.list()
    assert KEY.encode() not in sealed.sealed
    assert KEY not in listed.text + log.text
    assert (await api.http.get(PATH)).status_code == 405
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


async def test_a_credential_in_use_stays(api: Api) -> None:
    await put(api)
    attempt = await start(api, "p", "mine")
    for answer in (await api.http.delete(PATH), await put(api, "of another customer")):
        assert (answer.status_code, answer.json()["code"]) == (409, "credential-in-use")
        assert attempt.gang in answer.json()["message"]
    assert "fake@p" in api.app_state.control_plane.pool.providers


async def test_without_its_credential_a_project_uses_that_of_the_server_again(api: Api) -> None:
    await put(api)
    assert (await api.http.delete(PATH)).status_code == 204
    assert (await api.http.delete(PATH)).json()["code"] == "credential-not-found"
    assert set(api.app_state.control_plane.pool.providers) == {"fake"}
    assert (await start(api, "p", "again")).offer.account == "fake"


async def test_a_key_that_the_provider_refuses_is_not_stored(api: Api) -> None:
    answer = await put(api, "wrong")
    assert (answer.status_code, answer.json()["code"]) == (502, "provider-refused")
    assert not await api.app_state.store.provider_credentials.list()
    for path, asked in (
        (PATH, {"keys": {}}),
        (PATH, {"keys": {"key_file": "k"}, "settings": {"script": "/etc/passwd"}}),
        ("/v1/projects/p/credentials/nowhere", {"keys": {"key_file": "k"}}),
        ("/v1/projects/p/credentials/local", {"keys": {"key_file": "k"}}),
    ):
        answer = await api.http.put(path, json=asked)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request"), path


KEYS = {
    "aws": "aws_access_key_id = AKIDTEST\naws_secret_access_key = word\n",
    "azure": json.dumps(AZURE),
    "gcp": json.dumps(GOOGLE),
}


@pytest.mark.parametrize(
    ("provider", "key", "settings"),
    [
        ("aws-batch", "aws", {"queues": "gpu", "regions": "eu-west-1"}),
        ("ecs", "aws", {"capacity": "FARGATE", "subnets": "s-1", "regions": "eu-west-1"}),
        ("sagemaker-endpoints", "aws", {"role": "r", "regions": "eu-west-1"}),
        ("sagemaker-notebooks", "aws", {"role": "r", "regions": "eu-west-1"}),
        ("vertex-endpoints", "gcp", {"regions": "us-central1"}),
        ("vertex-workbench", "gcp", {"zones": "us-central1-a", "script": "gs://b/s", "fees": "0"}),
        ("azure", "azure", {"subscription": "s", "regions": "eastus"}),
        ("azure-batch", "azure", {"account": "train.westeurope"}),
        ("azureml", "azure", {"resource_group": "g", "workspace": "w"}),
        ("azureml-endpoints", "azure", {"resource_group": "g", "workspace": "w"}),
        ("azureml-notebooks", "azure", {"resource_group": "g", "workspace": "w"}),
    ],
)
async def test_accounts_at_managed_services(
    api: Api, provider: str, key: str, settings: dict[str, Any]
) -> None:
    """The provider is made of the key and the settings; nothing asks the cloud."""
    content = CredentialContent(settings=settings, keys={"key_file": KEYS[key]})
    credentials = api.app_state.credentials
    made, files = credentials._open("p", provider, content)
    try:
        assert len(files) == 1
    finally:
        if closeable := ability(made, CLOSEABLE):
            await closeable.close()
        os.close(files[0])
    for wrong in (
        CredentialContent(settings=settings),
        CredentialContent(settings={**settings, "endpoint": "http://x"}, keys=content.keys),
    ):
        with pytest.raises(ApiProblem):
            credentials._open("p", provider, wrong)
    if key != "aws":  # whose key file is read line by line
        with pytest.raises(ApiProblem, match="cannot be used"):
            credentials._open("p", provider, replace(content, keys={"key_file": "/etc/shadow"}))


async def test_providers_without_accounts_say_why(api: Api) -> None:
    for name in ("local", "ssh", "join", "slurm", "pbs", "ray", "kubernetes"):
        path = f"/v1/projects/p/credentials/{name}"
        answer = await api.http.put(path, json={"keys": {"key_file": "k"}})
        assert answer.status_code == 422
        assert "does not support credentials of projects: " in answer.json()["message"]


async def test_a_credential_that_cannot_be_opened_is_told_and_tried_again(api: Api) -> None:
    await put(api, regions="eu")
    await put(api, path="/v1/projects/q/credentials/fake")
    stored = {each.project: each for each in await api.app_state.store.provider_credentials.list()}
    control_plane, credentials = api.app_state.control_plane, api.app_state.credentials
    before = dict(control_plane.pool.providers)
    for account in ("fake@p", "fake@q"):
        await control_plane.drop_account(account)  # as after a restart
    damaged = replace(stored["q"], sealed=stored["q"].sealed[:-1] + b"?")
    await api.app_state.store.provider_credentials.put(damaged)
    await credentials.open_changed()
    assert control_plane.pool.providers["fake@p"] is not before["fake@p"]
    assert "fake@q" not in control_plane.pool.providers
    with pytest.raises(TryAgain, match="cannot be used"):  # Refused would give up its jobs' offers
        await control_plane.pool.gangs("fake@q")
    (row,) = (await api.http.get("/v1/projects/q/credentials")).json()
    assert "cannot be used" in row["problem"]
    answer = await api.post_job(TASK % "t", project="q", consent=True)
    assert answer.status_code == 201  # it waits, and does not use the account of the server
    await api.app_state.store.provider_credentials.put(stored["q"])
    await credentials.open_changed()
    assert (await launched(api, answer.json()["id"])).offer.account == "fake@q"


async def test_a_credential_that_could_not_be_opened_may_be_removed(api: Api) -> None:
    await put(api)
    stored, pool = api.app_state.store.provider_credentials, api.app_state.control_plane.pool
    (row,) = await stored.list()
    await api.http.delete(PATH)
    await stored.put(replace(row, sealed=b"?"))  # by another server, like its removal
    await api.app_state.credentials.open_changed()
    assert set(pool.unusable) == {"fake@p"}
    await stored.delete("p", "fake")
    await api.app_state.credentials.open_changed()
    assert not pool.unusable


async def test_calls_find_a_provider_while_its_credential_is_replaced(api: Api) -> None:
    control_plane, found = api.app_state.control_plane, list[object]()

    class Closing:
        manifest = SimpleNamespace(abilities=frozenset({CLOSEABLE}))

        async def offers(self) -> list[object]:
            return []

        async def close(self) -> None:
            found.append(control_plane.pool.providers.get("fake@z"))

    first, second = (cast(Provider, Closing()) for _ in range(2))
    await control_plane.put_account("fake@z", first)
    await control_plane.put_account("fake@z", second)
    assert found == [second]
    await control_plane.drop_account("fake@z")
    assert found == [second, None]


async def test_a_key_rotation_covers_credentials(api: Api) -> None:
    await put(api)
    (before,) = await api.app_state.store.provider_credentials.list()
    done = (await api.http.post("/v1/secret-keys/rotate")).json()
    assert (done["encrypted"], done["unreadable"]) == (1, [])
    (after,) = await api.app_state.store.provider_credentials.list()
    assert after.sealed != before.sealed
    sealer = api.app_state.sealer
    assert KEY in sealer.unseal("p", after.bound_name, after.sealed)


async def test_a_project_below_inherits_it_and_only_admins_set_it(api: Api) -> None:
    team = await make_team(api)
    operator = await team.token(("team", Role.OPERATOR))
    admin = await team.token(("team", Role.ADMIN))
    path, body = "/v1/projects/team/credentials/fake", {"keys": {"key_file": KEY}}
    for token, status in ((operator, 403), (admin, 204)):
        headers = {"Authorization": f"Bearer {token}"}
        assert (await team.http.put(path, json=body, headers=headers)).status_code == status
    assert (await start(api, "sub", "below")).offer.account == "fake@team"
    assert (await start(api, "other", "beside")).offer.account == "fake"


async def test_what_another_server_changes_is_used_here(api: Api) -> None:
    await put(api)
    pool, credentials = api.app_state.control_plane.pool, api.app_state.credentials
    stored = api.app_state.store.provider_credentials
    first = pool.providers["fake@p"]
    (row,) = await stored.list()
    await credentials.open_changed()
    assert pool.providers["fake@p"] is first
    await stored.put(replace(row, updated_at=row.updated_at + timedelta(seconds=1)))
    await credentials.open_changed()
    assert pool.providers["fake@p"] is not first
    await stored.delete("p", "fake")
    await credentials.open_changed()
    assert "fake@p" not in pool.providers

    # A server that has not read a new credential yet is no reason to give up a job.
    with pytest.raises(Refused, match="no credential"):
        await pool.gangs("fake@p")
    await stored.put(row)
    pool.accounts_read_at = None
    with pytest.raises(TryAgain):
        await pool.gangs("fake@p")

    async def look() -> bool:
        return "fake@p" in pool.providers

    await until(look)


async def test_a_credential_may_be_set_while_hosts_are_read(api: Api) -> None:
    control_plane = api.app_state.control_plane

    class SlowHosts:
        manifest = SimpleNamespace(abilities=frozenset({SHARES_HOSTS}))

        async def offers(self) -> list[object]:
            return []

        async def hosts(self) -> list[object]:
            if "fake@p" not in control_plane.pool.providers:
                assert (await put(api)).status_code == 204
            return []

    control_plane.pool.providers["slow"] = cast(Provider, SlowHosts())
    assert await control_plane.reconcile(HOSTS)
    del control_plane.pool.providers["slow"]
    assert "fake@p" in control_plane.pool.providers


async def test_a_key_file_that_leads_elsewhere_is_refused_before_it_is_used(api: Api) -> None:
    path = "/v1/projects/p/credentials/gcp"
    answer = await put(api, '{"type": "external_account", "private_key": "planted"}', path)
    assert answer.status_code == 422
    assert "must be the key of a service account" in answer.text
    assert "planted" not in answer.text
    assert await api.app_state.store.provider_credentials.list() == []
