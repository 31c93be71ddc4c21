"""The named volumes of the server's machine are listed and deleted, unless a job uses them."""

import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.api.api.test_api_accounts import code
from tests.api.api_state import Api
from tests.contract.stand_in import STAND_IN

from cavvy.api.routes import volumes
from cavvy.domain.jobs import JobPhase
from cavvy.providers.base import ProviderContext, Refused, TryAgain
from cavvy.providers.hosts.machine import this_machine
from cavvy.providers.hosts.supervisor import volumes as supervisor
from cavvy.providers.local import MANIFEST, provider
from cavvy.providers.local.provider import LocalProvider

BASE = "/v1/projects/default/volumes"


@pytest.fixture
def home(api: Api, tmp_path: Path) -> Path:
    """The folder of this machine, as a provider of the server."""
    home = tmp_path / "machine"
    context = ProviderContext(
        installation="here",
        home=home,
        settings={},
        agent_command=(sys.executable, str(STAND_IN)),
        now=lambda: datetime.now(UTC),
    )
    local = LocalProvider(MANIFEST, context, this_machine(home))
    providers = api.app_state.control_plane.pool.providers
    api.app_state.control_plane.pool.providers = {**providers, "local": local}
    (home / "volumes/default/models").mkdir(parents=True)
    (home / "volumes/default/models/weights").write_bytes(b"x" * 5000)
    return home


async def test_a_volume_is_listed_with_its_size_and_deleted(api: Api, home: Path) -> None:
    (found,) = (await api.http.get(BASE)).json()
    assert (found["name"], found["provider"], found["files"]) == ("models", "local", 1)
    assert found["size_bytes"] >= 5000
    assert (await api.http.get("/v1/projects/other/volumes")).json() == []
    assert code(await api.http.delete("/v1/projects/other/volumes/models")) == (
        404,
        "volume-not-found",
    )
    expired: list[bool] = []
    api.app_state.control_plane.pool.tell_expired = lambda: expired.append(True)
    assert (await api.http.delete(f"{BASE}/models")).status_code == 204
    assert expired, "the next job that names it is bound to no host"
    assert code(await api.http.delete(f"{BASE}/models")) == (404, "volume-not-found")
    assert not (home / "volumes/default/models").exists()
    assert (await api.http.get(BASE)).json() == []
    long = "a" * 253  # as long as a task file may name it
    (home / "volumes/default" / long).mkdir()
    assert (await api.http.delete(f"{BASE}/{long}")).status_code == 204


async def test_an_inventory_that_cannot_be_read_is_told(
    api: Api, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*place: object) -> bool:
        raise Refused("the inventory has no hosts")

    monkeypatch.setattr(provider, "list_folders", fail)
    answer = await api.http.get(BASE)
    assert code(answer) == (409, "conflict")
    assert "the inventory has no hosts" in answer.text


async def test_volumes_that_cannot_be_listed_are_told_and_hinder_no_other_provider(
    api: Api, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk with errors."""

    def fail(path: str) -> list[str]:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(supervisor, "_list_folders", fail)
    answer = await api.http.get(BASE)
    assert code(answer) == (409, "conflict")
    assert "the volumes of this machine cannot be listed" in answer.text
    local = api.app_state.control_plane.pool.providers["local"]
    assert isinstance(local, LocalProvider)
    with pytest.raises(TryAgain, match="cannot be listed"):
        await local.volumes()


async def test_a_removal_that_failed_says_where_the_rest_is(
    api: Api, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*place: object) -> bool:
        raise PermissionError(13, "Permission denied", "weights")

    monkeypatch.setattr(provider, "remove_folder", fail)
    answer = await api.http.delete(f"{BASE}/models")
    assert code(answer) == (409, "conflict")
    assert f"what is left of it is in {home}/volumes/default/models" in answer.text


async def test_a_volume_that_a_job_uses_stays(
    api: Api, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volumes, "_USING", tuple(JobPhase))  # no job of this API can run
    await api.submit("{name: other, run: 'true', volumes: ['data:/c']}")
    await api.submit("{name: train, run: 'true', volumes: ['models:/c']}")
    answer = await api.http.delete(f"{BASE}/models")
    assert code(answer) == (409, "volume-in-use")
    assert "the job train uses the volume models" in answer.text
    assert (home / "volumes/default/models/weights").exists()
    monkeypatch.undo()
    assert (await api.http.delete(f"{BASE}/models")).status_code == 204


async def test_names_that_are_no_volumes_are_refused(api: Api, home: Path) -> None:
    for name in (".models", "-", "a" * 254, "%2e%2e", "models%2f..%2f..%2f"):
        assert (await api.http.delete(f"{BASE}/{name}")).status_code in (404, 422)
    assert (home / "volumes/default/models/weights").exists()


class Elsewhere(LocalProvider):
    """Another provider with volumes that are folders."""


async def test_of_two_volumes_of_one_name_the_provider_says_which_is_removed(
    api: Api, home: Path, tmp_path: Path
) -> None:
    context = ProviderContext(
        installation="here", home=tmp_path / "other", now=lambda: datetime.now(UTC)
    )
    other = Elsewhere(MANIFEST, context, this_machine(tmp_path / "other"))
    pool = api.app_state.control_plane.pool
    pool.providers = {**pool.providers, "there": other}
    (tmp_path / "other/volumes/default/models").mkdir(parents=True)
    answer = await api.http.delete(f"{BASE}/models")
    assert code(answer) == (409, "conflict")
    assert "local and there each have a volume models" in answer.text
    assert (await api.http.delete(f"{BASE}/models?provider=there")).status_code == 204
    assert code(await api.http.delete(f"{BASE}/models?provider=there")) == (404, "volume-not-found")
    assert (home / "volumes/default/models/weights").exists()
    assert (await api.http.delete(f"{BASE}/models")).status_code == 204
