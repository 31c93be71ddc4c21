"""Sign-ins with ID tokens: which are accepted, what their bearers get, and what is refused."""

import base64
import json
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tests.api.api_state import Api, open_api, until
from tests.issuer import (
    AUDIENCE,
    BROKEN,
    DISCOVERY,
    KEYS,
    Issuer,
    IssuerAnswer,
    encode_bytes,
    encode_part,
    run_issuer,
)
from tests.waits import PATIENCE_S

from cavvy.api import id_tokens
from cavvy.control.decide.restored import compare
from cavvy.control.restored import (
    StoredAccess,
    count_access,
    end_access,
    mark_restored,
    record_restore,
)

CI: dict[str, Any] = {
    "name": "train-main",
    "audience": AUDIENCE,
    "claims": {"repository": "acme/train", "ref": "refs/heads/*"},
    "account": "ci",
    "scopes": ["run", "view"],
    "project": "vision",
}
PEOPLE: dict[str, Any] = {
    "name": "company",
    "audience": "cavvy-cli",
    "account_claim": "email",
    "client_id": "cavvy-cli",
    "lifetime_s": 43_200,
    "groups": [
        {"group": "platform", "project": "", "role": "admin"},
        {"group": "vision-team", "project": "vision", "role": "member"},
        {"group": "vision-leads", "project": "vision", "role": "operator"},
    ],
}
GITHUB = "https://token.actions.githubusercontent.com"
ADA = {"aud": "cavvy-cli", "sub": "u-1", "email": "Ada@example.com", "groups": ["vision-team"]}
# the order of the curve P-256: FIPS 186-4, D.1.2.3
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

in_both_stores = pytest.mark.parametrize("api", ["memory", "postgres"], indirect=True)


@pytest.fixture(scope="module")
def running_issuer() -> Iterator[Issuer]:
    with run_issuer() as issuer:
        yield issuer


@pytest.fixture
def issuer(running_issuer: Issuer) -> Issuer:
    running_issuer.restore()
    return running_issuer


@pytest.fixture
async def api(request: pytest.FixtureRequest, tmp_path: Path, issuer: Issuer) -> AsyncIterator[Api]:
    async with open_api(getattr(request, "param", "memory"), tmp_path) as api:
        await api.http.post("/v1/accounts", json={"name": "ci", "kind": "service"})
        await api.http.post("/v1/projects", json={"name": "vision"})
        await api.http.put("/v1/projects/vision/roles/ci/member")
        for trust in (CI, PEOPLE):
            answer = await api.http.post("/v1/trusts", json={**trust, "issuer": issuer.url})
            assert answer.status_code == 204, answer.text
        yield api


async def sign_in(api: Api, text: str) -> httpx.Response:
    headers = {"Authorization": ""}  # the bearer has no token yet
    return await api.http.post("/v1/sign-in", json={"id_token": text}, headers=headers)


async def whoami(api: Api, token: str) -> dict[str, Any]:
    answer = await api.http.get("/v1/whoami", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def audit_log(api: Api) -> list[Any]:
    rows = (await api.http.get("/v1/audit-log")).json()["records"]
    return [json.loads(each["text"]) for each in rows]


async def refused(api: Api, text: str) -> str:
    """Why the ID token is refused."""
    answer = await sign_in(api, text)
    assert (answer.status_code, answer.json()["code"]) == (403, "sign-in-refused"), answer.text
    assert text not in answer.text
    return str(answer.json()["message"])


@in_both_stores
async def test_a_job_of_a_ci_system_gets_a_token_with_the_limits_of_its_trust(
    api: Api, issuer: Issuer
) -> None:
    made = (await sign_in(api, issuer.sign())).json()
    me = await whoami(api, made["token"])
    assert me["account"] == made["account"] == "ci"
    assert (me["scopes"], me["within"]) == (["run", "view"], ["vision"])
    assert me["expires_at"] == made["expires_at"]
    headers = {"Authorization": f"Bearer {made['token']}"}
    assert (await api.http.get("/v1/accounts", headers=headers)).status_code == 403
    (record,) = [each for each in await audit_log(api) if each["action"] == "POST /v1/sign-in"]
    assert (record["account"], record["token"]) == ("ci", me["token_id"])
    assert record["after"]["trust"] == "train-main"


async def test_a_token_ends_with_the_lifetime_of_its_trust(
    api: Api, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = (await sign_in(api, issuer.sign())).json()["token"]
    later = api.app_state.now() + timedelta(seconds=3601)
    monkeypatch.setattr(api.app_state, "now", lambda: later)
    answer = await api.http.get("/v1/whoami", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 401


@in_both_stores
async def test_an_id_token_is_exchanged_once(api: Api, issuer: Issuer) -> None:
    issuer.keys["curve"] = ec.generate_private_key(ec.SECP256R1())
    text = issuer.sign()
    assert (await sign_in(api, text)).status_code == 201
    assert "used before" in await refused(api, text)
    text = issuer.sign("curve")
    assert (await sign_in(api, text)).status_code == 201
    # An ECDSA signature (r, s) has a second valid form, (r, -s).
    head, _, signature = text.rpartition(".")
    raw = base64.urlsafe_b64decode(signature + "==")
    other = raw[:32] + (ORDER - int.from_bytes(raw[32:], "big")).to_bytes(32, "big")
    assert "used before" in await refused(api, f"{head}.{encode_bytes(other)}")
    records = [each for each in await audit_log(api) if each["action"] == "POST /v1/sign-in"]
    assert [each["outcome"] for each in records] == ["done", "refused", "done", "refused"]
    assert {each["account"] for each in records if each["outcome"] == "refused"} == {""}


async def test_wrong_claims_are_refused(api: Api, issuer: Issuer) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"aud": "https://other.example.com"}, "another audience"),
        ({"aud": None}, "no claim aud"),
        ({"exp": 1_000_000_000, "iat": 999_999_000}, "has expired"),
        ({"exp": None}, "no claim exp"),
        ({"iat": None}, "no claim iat"),
        ({"nbf": 32_000_000_000}, "not valid yet"),
        ({"iat": 32_000_000_000, "exp": 32_000_000_300}, "not valid yet"),
        ({"exp": 32_000_000_000}, "more than a day"),
        ({"iss": "https://evil.example.com"}, "no trust names the token's issuer"),
        ({"iss": None}, "no trust names the token's issuer"),
        ({"exp": float("inf")}, "signature or form"),
        ({"exp": [1]}, "signature or form"),
        ({"exp": {}}, "signature or form"),
        ({"iat": "soon"}, "not valid yet"),
        ({"iat": float("nan")}, "not valid yet"),
        ({"nbf": []}, "signature or form"),
        ({"aud": 5}, "another audience"),
        ({"aud": [5]}, "another audience"),
        ({"aud": {AUDIENCE: 1}}, "another audience"),
        ({"sub": 5}, "signature or form"),
        ({"events": {}}, "logout token"),
        ({"repository": "evil/train"}, "no trust accepts the token's repository"),
        ({"repository": "acme/train-evil"}, "no trust accepts the token's repository"),
        ({"repository": ["acme/train"]}, "no trust accepts the token's repository"),
        ({"repository": None}, "no trust accepts the token's repository"),
        ({"ref": "refs/tags/v1"}, "no trust accepts the token's ref"),
    ]
    for changes, reason in cases:
        assert reason in await refused(api, issuer.sign(**changes)), changes


@in_both_stores
async def test_an_older_id_token_is_refused_after_a_newer_one(api: Api, issuer: Issuer) -> None:
    now = int(time.time())
    was_admin = issuer.sign(**{**ADA, "groups": ["platform"]}, iat=now - 60)
    left = (await sign_in(api, issuer.sign(**{**ADA, "groups": []}, iat=now))).json()
    assert "a newer ID token of this person was used" in await refused(api, was_admin)
    assert (await whoami(api, left["token"]))["roles"] == []
    assert (await api.http.delete("/v1/accounts/ada@example.com")).status_code == 204
    assert "a newer ID token" in await refused(api, was_admin)
    again = issuer.sign(**{**ADA, "jti": "2"}, iat=now)  # two of the same second have no order
    assert (await sign_in(api, again)).status_code == 201


@in_both_stores
async def test_a_restored_server_says_what_came_back_and_can_end_it(
    api: Api, issuer: Issuer
) -> None:
    store, now = api.app_state.store, api.app_state.now()
    used, unused = issuer.sign(), issuer.sign(jti="2")
    token = (await sign_in(api, used)).json()["token"]
    for name in ("ada", "out"):
        await api.http.post("/v1/accounts", json={"name": name})
    await api.http.put("/v1/accounts/out/disabled")
    made = [(await api.http.post("/v1/tokens", json={"account": "ada"})).json() for _ in range(2)]
    revoked = (await whoami(api, made[0]["token"]))["token_id"]
    await api.http.delete(f"/v1/tokens/{revoked}")

    await mark_restored(store, compare((), {}, (), {}), api.app_state.now())
    access = await count_access(store, api.app_state.now())
    assert access == StoredAccess(tokens=2, keys=0, accounts=3, disabled=1, roles=1, trusts=2)
    for text in (used, unused):
        assert "issued before this server was restored" in await refused(api, text)
    later = int(time.time()) + 2
    assert (await sign_in(api, issuer.sign(iat=later))).status_code == 201
    assert (await whoami(api, token))["account"] == "ci", "it was not ended"

    await end_access(store, api.app_state.now())
    await record_restore(store, access, now, api.app_state.now(), ended=True)
    for secret in (token, made[1]["token"]):
        headers = {"Authorization": f"Bearer {secret}"}
        assert (await api.http.get("/v1/whoami", headers=headers)).status_code == 401
    assert (await count_access(store, api.app_state.now())).tokens == 0
    told = "cavvy server restore"
    (record,) = [each for each in await audit_log(api) if each["action"] == told]
    assert (record["account"], record["signed_in"]) == ("", True)
    after = {name: record["after"][name] for name in ("tokens", "keys", "tokens_and_keys")}
    assert after == {"tokens": 2, "keys": 0, "tokens_and_keys": "ended"}


async def test_weak_keys_are_refused(api: Api, issuer: Issuer) -> None:
    issuer.keys["short"] = rsa.generate_private_key(65537, 1024)
    issuer.keys["p384"] = ec.generate_private_key(ec.SECP384R1())
    issuer.keys["koblitz"] = ec.generate_private_key(ec.SECP256K1())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyJWT, about the short key
        text = issuer.sign("short")
    assert "an RSA key of 1,024 bits; at least 2,048 are needed" in await refused(api, text)
    strong, other, unknown = (jwt.PyJWK(issuer.jwk(name)) for name in ("one", "p384", "koblitz"))
    assert id_tokens.find_weakness(strong) == id_tokens.find_weakness(other) == ""
    assert "secp256k1" in id_tokens.find_weakness(unknown)
    other.algorithm_name = "ES256"  # as a version of PyJWT might permit
    assert id_tokens.find_weakness(other) == "a key on the curve secp384r1 for ES256"


async def test_forged_signatures_are_refused(api: Api, issuer: Issuer) -> None:
    good = issuer.sign()
    head, body, signature = good.split(".")
    none = encode_part({"alg": "none", "typ": "JWT", "kid": "one"})
    stranger = Issuer(issuer.url)
    digest = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    shared = f"{encode_part({'alg': 'HS256', 'kid': 'one'})}.{body}"
    own_key = {"jwk": stranger.jwk("one"), "jku": "http://127.0.0.1:1/keys", "x5u": "http://x"}
    for text in (
        f"{none}.{body}.",
        f"{none}.{body}.{signature}",
        # signed with the public key, as if it were a shared secret
        f"{shared}.{encode_bytes(digest.sign(shared.encode(), issuer.public_pem()))}",
        stranger.sign(),
        stranger.sign(headers=own_key),
        stranger.sign(headers={"kid": "../../keys"}),
        stranger.sign(headers={"kid": "unknown"}),
        f"{head}.{encode_part(issuer.claims(repository='evil/x'))}.{signature}",
        f"{head}.{body}.",
        f"{head}.{body}",
        f"{head}..{signature}",
        "",
        "a.b.c",
        "é.é.é",
        "x" * 20_000,
        f"{encode_part([[[]]])}.{body}.{signature}",
        f"{head}.{encode_part(issuer.claims(iss=[issuer.url]))}.{signature}",
        f"{head}.{encode_part(issuer.claims(iss={issuer.url: 1}))}.{signature}",
        f"{encode_part({'alg': 'RS256', 'kid': ['one']})}.{body}.{signature}",
        f"{encode_part({'alg': ['RS256'], 'kid': 'one'})}.{body}.{signature}",
        f"{encode_part({'alg': 'RS256', 'kid': 'one', 'crit': ['x'], 'x': 1})}.{body}.{signature}",
        issuer.sign(headers={"crit": ["x"], "x": 1}),
        issuer.sign(headers={"typ": "at+jwt"}),
        issuer.sign(headers={"typ": "logout+jwt"}),
        stranger.sign(headers={**own_key, "kid": "two"}),
    ):
        answer = await sign_in(api, text)
        assert answer.json()["code"] == "sign-in-refused", (text[:60], answer.text)
        assert answer.status_code == 403
    assert (await sign_in(api, good)).status_code == 201
    assert set(issuer.asked) <= {"/.well-known/openid-configuration", "/keys"}


async def test_a_new_key_is_found_and_bad_tokens_do_not_burden_the_issuer(
    api: Api, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await sign_in(api, issuer.sign())).status_code == 201
    for _ in range(20):
        await refused(api, issuer.sign(headers={"kid": "unknown"}))
    assert issuer.asked.count("/keys") == 1
    issuer.keys["two"] = ec.generate_private_key(ec.SECP256R1())
    later = time.monotonic() + 31
    monkeypatch.setattr(id_tokens, "monotonic", lambda: later)
    assert (await sign_in(api, issuer.sign("two"))).status_code == 201
    assert issuer.asked.count("/keys") == 2


async def test_known_keys_are_used_for_a_day_while_the_issuer_is_silent(
    api: Api, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await sign_in(api, issuer.sign())).status_code == 201
    start = time.monotonic()
    issuer.given[DISCOVERY] = BROKEN
    monkeypatch.setattr(id_tokens, "monotonic", lambda: start + 23 * 3600)
    assert (await sign_in(api, issuer.sign(jti="2"))).status_code == 201
    monkeypatch.setattr(id_tokens, "monotonic", lambda: start + 25 * 3600)
    answer = await sign_in(api, issuer.sign(jti="3"))
    assert (answer.status_code, answer.json()["code"]) == (503, "issuer-silent")
    assert (await api.http.get("/v1/health")).status_code == 200


async def test_what_an_issuer_must_not_answer(api: Api, issuer: Issuer) -> None:
    (key,) = [issuer.jwk(name) for name in issuer.keys]
    cases: list[dict[str, IssuerAnswer]] = [
        {DISCOVERY: issuer.describe(issuer="https://evil.example.com")},
        {DISCOVERY: issuer.describe(jwks_uri="http://keys.evil.example.com/keys")},
        {DISCOVERY: issuer.describe(jwks_uri="file:///etc/passwd")},
        {DISCOVERY: issuer.describe(jwks_uri=["x"])},
        {
            DISCOVERY: IssuerAnswer(b"", 302, f"{issuer.url}/elsewhere"),
            "/elsewhere": issuer.describe(),
        },
        {KEYS: IssuerAnswer(b"", 307, f"{issuer.url}/elsewhere")},
        {DISCOVERY: IssuerAnswer(b"[" * 200_000)},
        {DISCOVERY: IssuerAnswer(b"<html>")},
        {KEYS: IssuerAnswer.of({"keys": [key] * 101})},
        {KEYS: IssuerAnswer.of({"keys": [key], "x": "x" * (1 << 20)})},
        {KEYS: IssuerAnswer.of({"keys": {"one": key}})},
    ]
    for given in cases:
        issuer.given = given
        api.app_state.id_tokens = id_tokens.IdTokenVerifier()  # which knows no keys yet
        answer = await sign_in(api, issuer.sign())
        assert (answer.status_code, answer.json()["code"]) == (503, "issuer-silent"), given
        assert answer.headers["Retry-After"]
    # Of a list of keys, only those that can be used count.
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "one", "alg": "HS256"}
    rows = [secret, 5, {}, {"kty": ["RSA"], "kid": "two"}, {**key, "kid": "three", "use": "enc"}]
    issuer.given = {KEYS: IssuerAnswer.of({"keys": rows})}
    api.app_state.id_tokens = id_tokens.IdTokenVerifier()
    assert "does not publish the key" in await refused(api, issuer.sign())
    assert "does not publish the key" in await refused(api, issuer.sign(headers={"kid": "three"}))


async def test_a_silent_issuer_delays_nobody_else(
    api: Api, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(id_tokens, "_MOST_FETCH_S", 0.05)
    issuer.delay = threading.Event()
    for _ in range(3):
        answer = await sign_in(api, issuer.sign())
        assert (answer.status_code, answer.json()["code"]) == (503, "issuer-silent")
    assert issuer.asked == [DISCOVERY]  # one thread waits, whoever asks
    issuer.delay.set()
    monkeypatch.undo()
    times = count(time.monotonic(), 31)

    async def accepted() -> bool:  # not by the thread that has given up, if it ends only now
        later = next(times)
        monkeypatch.setattr(id_tokens, "monotonic", lambda: later)
        return (await sign_in(api, issuer.sign())).status_code == 201

    await until(accepted)


async def test_a_read_that_failed_after_its_request_is_tried_again(
    api: Api, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Future[Any]] = []

    def start(*_: object) -> Future[Any]:
        asked.append(Future())
        return asked[-1]

    keys = id_tokens.IssuerKeys(issuer.url)
    monkeypatch.setattr(id_tokens, "_MOST_FETCH_S", 0.01)
    monkeypatch.setattr(id_tokens, "_AGAIN_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(id_tokens, "start_apart", start)
        for _ in range(2):
            with pytest.raises(id_tokens.IssuerSilent):
                await keys.find("one")
    assert len(asked) == 1
    asked[0].set_result(id_tokens.IssuerSilent("no answer"))
    monkeypatch.setattr(id_tokens, "_MOST_FETCH_S", PATIENCE_S)
    assert await keys.find("one") == issuer.jwk("one")


async def test_a_key_without_an_algorithm_is_used_with_that_of_the_token(
    api: Api, issuer: Issuer
) -> None:
    row = {name: value for name, value in issuer.jwk("one").items() if name != "alg"}
    issuer.given[KEYS] = IssuerAnswer.of({"keys": [row]})
    signed = jwt.encode(issuer.claims(), issuer.keys["one"], "PS256", headers={"kid": "one"})
    assert (await sign_in(api, signed)).status_code == 201
    curve = ec.generate_private_key(ec.SECP256R1())
    signed = jwt.encode(issuer.claims(), curve, "ES256", headers={"kid": "one"})
    assert "the issuer's key does not fit" in await refused(api, signed)


@in_both_stores
async def test_a_person_gets_an_account_and_the_roles_of_the_groups(
    api: Api, issuer: Issuer
) -> None:
    token = (await sign_in(api, issuer.sign(**ADA))).json()["token"]
    me = await whoami(api, token)
    assert me["account"] == "ada@example.com"
    assert [(each["project"], each["role"]) for each in me["roles"]] == [("vision", "member")]
    # The groups decide again at each sign-in; roles that no group is mapped to stay.
    await api.http.put("/v1/projects/vision/roles/ada@example.com/billing")
    changed = {**ADA, "groups": ["vision-leads", "platform", 7], "email": "ada.new@example.com"}
    token = (await sign_in(api, issuer.sign(**changed))).json()["token"]
    me = await whoami(api, token)
    assert me["account"] == "ada@example.com"  # the issuer's subject is the same
    found = {(each["project"], each["role"]) for each in me["roles"]}
    assert {("", "admin"), ("vision", "operator"), ("vision", "billing")} <= found
    assert ("vision", "member") not in found
    listed = (await api.http.get("/v1/projects/vision/roles")).json()
    assert {(each["role"], each["trust"]) for each in listed if "ada" in each["account"]} == {
        ("operator", "company"),
        ("billing", ""),
    }
    old, token = token, (await sign_in(api, issuer.sign(**{**ADA, "groups": None}))).json()["token"]
    for each in (old, token):
        assert [role["role"] for role in (await whoami(api, each))["roles"]] == ["billing"]


@in_both_stores
async def test_a_role_of_a_group_ends_with_the_sign_in_also_for_other_tokens(
    api: Api, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sign_in(api, issuer.sign(**ADA))
    made = await api.http.post("/v1/tokens", json={"account": "ada@example.com"})
    token = made.json()["token"]
    assert [each["role"] for each in (await whoami(api, token))["roles"]] == ["member"]
    later = api.app_state.now() + timedelta(seconds=43_201)
    monkeypatch.setattr(api.app_state, "now", lambda: later)
    assert (await whoami(api, token))["roles"] == []
    assert (await api.http.get("/v1/projects/vision/roles")).json() == [
        {"account": "ci", "project": "vision", "role": "member", "trust": "", "until": None}
    ]


@in_both_stores
async def test_a_disabled_account_is_out_at_once_and_cannot_come_back(
    api: Api, issuer: Issuer
) -> None:
    token = (await sign_in(api, issuer.sign(**ADA))).json()["token"]
    path = "/v1/accounts/ada@example.com/disabled"
    assert (await api.http.put(path)).status_code == 204
    headers = {"Authorization": f"Bearer {token}"}
    answer = await api.http.get("/v1/whoami", headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorised")
    assert "disabled" in answer.json()["message"]
    assert "is disabled" in await refused(api, issuer.sign(**ADA, jti="2"))
    assert (await api.http.delete(path)).status_code == 204
    assert (await api.http.get("/v1/whoami", headers=headers)).status_code == 200
    assert (await api.http.put("/v1/accounts/nobody/disabled")).json()["code"] == (
        "account-not-found"
    )


@in_both_stores
async def test_only_people_whom_an_admin_added_get_in_where_a_trust_says_so(
    api: Api, issuer: Issuer
) -> None:
    trust = {**PEOPLE, "issuer": issuer.url, "accounts": "existing", "replace": True}
    assert (await api.http.post("/v1/trusts", json=trust)).status_code == 204
    assert "an admin can add it" in await refused(api, issuer.sign(**ADA))
    await api.http.post("/v1/accounts", json={"name": "ada@example.com"})
    await api.http.put("/v1/projects/vision/roles/ada@example.com/viewer")
    token = (await sign_in(api, issuer.sign(**ADA))).json()["token"]
    roles = [each["role"] for each in (await whoami(api, token))["roles"]]
    assert roles == ["member", "viewer"]
    # The account is ada's now: nobody else can have it, and nobody a service's.
    assert "another person" in await refused(api, issuer.sign(**{**ADA, "sub": "u-2"}))
    stranger = {**ADA, "sub": "u-3", "email": "ci"}
    assert "or to a service" in await refused(api, issuer.sign(**stranger))


async def test_a_token_for_another_client_is_refused(api: Api, issuer: Issuer) -> None:
    both = {**ADA, "aud": ["cavvy-cli", "other"]}
    assert "another client" in await refused(api, issuer.sign(**both, azp="other"))
    assert "another client" in await refused(api, issuer.sign(**both, azp=["cavvy-cli"]))
    assert (await sign_in(api, issuer.sign(**both, azp="cavvy-cli"))).status_code == 201


@in_both_stores
async def test_a_person_cannot_become_an_account_that_is_not_theirs(
    api: Api, issuer: Issuer
) -> None:
    assert "does not belong to this person" in await refused(
        api, issuer.sign(**{**ADA, "email": "ci"})
    )
    await sign_in(api, issuer.sign(**ADA))
    again = {**ADA, "sub": "u-2"}
    assert "does not belong to this person" in await refused(api, issuer.sign(**again))
    for changes, reason in (
        ({"email": None}, "no claim email"),
        ({"email": "x y", "sub": "u-3"}, "cannot be an account's name"),
        # the Kelvin sign, whose lower case is the letter k
        ({"email": "\u212aim@example.com", "sub": "u-3"}, "cannot be an account's name"),
        ({"email": ["a@example.com"]}, "no claim email"),
        ({"email_verified": False, "email": "eve@example.com", "sub": "u-3"}, "not verified"),
        ({"sub": None}, "no claim sub"),
    ):
        assert reason in await refused(api, issuer.sign(**{**ADA, **changes}))
    names = {each["name"] for each in (await api.http.get("/v1/accounts")).json()}
    assert names == {"ci", "ada@example.com"}


async def test_terminals_are_told_only_of_providers_for_people(api: Api, issuer: Issuer) -> None:
    answer = await api.http.get("/v1/sign-in", headers={"Authorization": ""})
    assert answer.json() == [{"name": "company", "issuer": issuer.url, "client_id": "cavvy-cli"}]


async def test_a_dangerous_trust_is_refused(api: Api) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"claims": {}}, "`claims` must restrict"),
        ({"claims": {"repository": "*"}}, "`claims` must restrict"),
        ({"issuer": "http://issuer.example.com"}, "must begin with https://"),
        ({"issuer": "https://a.example/?x=1"}, "no user name, query or fragment"),
        ({"audience": ""}, "`audience` is empty"),
        ({"account": ""}, "give `account`"),
        ({"account_claim": "email"}, "give `account`"),
        ({"scopes": ["everything"]}, "scopes are"),
        ({"lifetime_s": 1}, "`lifetime_s`"),
        ({"name": "A B"}, "cannot be the name"),
        ({"groups": [{"group": "g", "project": "p", "role": "king"}]}, "for people only"),
        ({"groups": [{"group": "g", "project": "A b", "role": "king"}]}, "name of a project"),
        ({"client_id": "x"}, "for people only"),
        ({"accounts": "all"}, "create or existing"),
        ({"issuer": "https://[bad"}, "not a URL"),
        ({"issuer": GITHUB, "claims": {"ref": "refs/heads/main"}}, "one of repository,"),
        ({"issuer": GITHUB, "claims": {"repository": "acme*"}}, "one of repository,"),
        ({"issuer": GITHUB, "claims": {"sub": "*:acme/train"}}, "one of repository,"),
        (
            {"issuer": "https://agent.buildkite.com", "claims": {"pipeline_slug": "train"}},
            "one of organization_id, organization_slug, pipeline_id, sub to a fixed value",
        ),
        ({"claims": {"repository": "*/*"}}, "a pattern such as OWNER/*"),
        (
            {"issuer": "https://accounts.google.com", "account": "", "account_claim": "email"}
            | {"claims": {}},
            "one of email, hd, sub",
        ),
    ]
    for changes, reason in cases:
        ask = {**CI, "name": "new", "issuer": "https://issuer.example.com", **changes}
        answer = await api.http.post("/v1/trusts", json=ask)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request"), answer.text
        assert reason in answer.json()["message"]


@in_both_stores
async def test_a_removed_trust_accepts_nothing(api: Api, issuer: Issuer) -> None:
    ci = (await sign_in(api, issuer.sign())).json()["token"]
    ada = (await sign_in(api, issuer.sign(**ADA))).json()["token"]
    assert (await api.http.delete("/v1/trusts/train-main")).status_code == 204
    headers = {"Authorization": f"Bearer {ci}"}
    assert (await api.http.get("/v1/whoami", headers=headers)).status_code == 401
    # A replaced trust takes away the roles that it does not give any more.
    assert (await whoami(api, ada))["roles"]
    trust = {**PEOPLE, "issuer": issuer.url, "groups": PEOPLE["groups"][:1]}
    assert (await api.http.post("/v1/trusts", json=trust)).json()["code"] == "name-taken"
    answer = await api.http.post("/v1/trusts", json={**trust, "replace": True})
    assert answer.status_code == 204
    assert (await whoami(api, ada))["roles"] == []
    assert "another audience" in await refused(api, issuer.sign())
    assert (await api.http.delete("/v1/trusts/train-main")).json()["code"] == "trust-not-found"
    for account in ("unknown", "ada@example.com"):  # the latter is a person's
        again = {**CI, "issuer": issuer.url, "account": account}
        answer = await api.http.post("/v1/trusts", json=again)
        assert answer.json()["code"] == "account-not-found"
