"""The routes for keys of secrets, and the commands on them."""

from pathlib import Path

import pytest
from tests.api.api_state import Api, open_api

from cavvy.settings import SettingsError


async def test_a_rotation_keeps_every_secret_and_is_recorded(api: Api) -> None:
    for name in ("A", "B"):
        answer = await api.http.put(f"/v1/projects/p/secrets/{name}", json={"value": f"of {name}"})
        assert answer.status_code == 204
    (before,) = (await api.http.get("/v1/secret-keys")).json()
    assert (before["current"], before["secrets"]) == (True, 2)
    done = (await api.http.post("/v1/secret-keys/rotate")).json()
    assert (done["encrypted"], done["unreadable"]) == (2, [])
    new, old = (await api.http.get("/v1/secret-keys")).json()
    assert (new["id"], new["current"], new["secrets"]) == (done["id"], True, 2)
    assert (old["id"], old["current"], old["secrets"]) == (before["id"], False, 0)
    app_state = api.app_state
    for secret in await app_state.store.secrets("p"):
        plain = app_state.sealer.unseal("p", secret.name, secret.sealed)
        assert plain == f"of {secret.name}"
        assert plain.encode() not in secret.sealed
    log = (await api.http.get("/v1/audit-log", params={"newest": True, "limit": 1})).text
    assert "POST /v1/secret-keys/rotate" in log


async def test_a_lost_key_is_told_and_nothing_is_changed(api: Api, tmp_path: Path) -> None:
    await api.http.put("/v1/projects/p/secrets/A", json={"value": "x"})
    await api.http.post("/v1/secret-keys/rotate")
    (secret,) = await api.app_state.store.secrets("p")
    lost = secret.sealed.replace(b"aes-", b"aes+", 1)
    assert await api.app_state.store.reseal_secret(secret, lost)
    done = (await api.http.post("/v1/secret-keys/rotate")).json()
    assert done["encrypted"] == 0
    assert [(each["project"], each["name"]) for each in done["unreadable"]] == [("p", "A")]
    rows = (await api.http.get("/v1/secret-keys")).json()
    assert [row["secrets"] for row in rows if row["place"] is None] == [1]
    (secret,) = await api.app_state.store.secrets("p")
    assert secret.sealed == lost


@pytest.mark.parametrize("name", ["KEY", "FORMER_KEYS"])
async def test_a_wrong_place_of_a_key_is_an_error_of_the_settings(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(SettingsError, match="vault:x"):
        async with open_api("memory", tmp_path, values={f"CAVVY_SECRETS_{name}": "vault:x"}):
            pass
