"""Machines and lines to nodes, where nobody can join and nothing runs: each is told why."""

from datetime import timedelta
from types import SimpleNamespace
from typing import cast

from tests.api.api_state import Api

from cavvy.api.peers import PEER, _signed
from cavvy.domain.jobs import NodeProof
from cavvy.domain.messages import PROTOCOL
from cavvy.domain.values import replace
from cavvy.providers.abilities import SERVES_NODES
from cavvy.providers.base import Provider
from cavvy.store.base import AtomicWrite


async def test_nobody_can_join_where_no_place_takes_machines(api: Api) -> None:
    refused = await api.http.post("/v1/invitations", json={})
    assert (refused.status_code, refused.json()["code"]) == (409, "no-joining")
    assert (await api.http.get("/v1/joined")).json() == []
    gone = await api.http.delete("/v1/joined/box")
    assert (gone.status_code, gone.json()["code"]) == (404, "machine-not-found")
    for body in ({"valid_s": 0}, {"valid_s": 1e12}, {"unknown": 1}):
        assert (await api.http.post("/v1/invitations", json=body)).status_code == 422


async def test_machines_routes_take_no_users_token_for_a_place_that_is_not_there(api: Api) -> None:
    none = {"Authorization": ""}
    assert (await api.http.post("/nodes/v1/fake/enter", headers=none)).status_code == 401
    assert (await api.http.post("/nodes/v1/fake/enter")).json()["code"] == "no-joining"
    assert (await api.http.get("/nodes/v1/fake/script", headers=none)).json()[
        "code"
    ] == "no-joining"
    assert (await api.http.get(f"/boot/v1/{'0' * 64}", headers=none)).json()[
        "code"
    ] == "blob-not-found"
    assert (await api.http.get("/v1/joined", headers=none)).status_code == 401


async def test_a_claim_token_claims_its_rank_and_opens_nothing_else(api: Api) -> None:
    made = await api.submit()
    gang = (await api.attempt(made["id"])).gang
    spoken = {
        "Cavvy-Agent-Protocol": str(PROTOCOL),
        "Authorization": f"Bearer {api.app_state.tokens.of_claim(gang, 0)}",
    }
    assert (
        await api.http.get(f"/agent/v1/orders?gang={gang}&rank=0", headers=spoken)
    ).status_code == 403
    ask = {"gang": gang, "rank": 0, "nonce": "n", "address": "a"}
    claimed = (await api.http.post("/agent/v1/claim", json=ask, headers=spoken)).json()
    own = api.app_state.tokens.of_node(gang, NodeProof(0, 0))
    assert (claimed["state"], claimed["token"]) == ("go", own)
    other = await api.http.post("/agent/v1/claim", json={**ask, "nonce": "m"}, headers=spoken)
    assert (other.status_code, other.json()["code"]) == (409, "claimed")
    kept = await api.http.post("/agent/v1/claim", json=ask, headers=api.agent(gang))
    assert kept.json()["token"] == own


async def test_a_lost_node_opens_nothing_once_it_was_replaced(api: Api) -> None:
    """Rank 1 was replaced in round 5, and rank 0 was kept."""
    made = await api.submit("{name: t, run: 'true', nodes: 2}")
    attempt, tokens, store = (
        await api.attempt(made["id"]),
        api.app_state.tokens,
        api.app_state.store,
    )
    gang = attempt.gang
    repaired = replace(attempt, rounds={1: 5})

    async def claim(token: str, rank: int) -> int:
        headers = {"Cavvy-Agent-Protocol": str(PROTOCOL), "Authorization": f"Bearer {token}"}
        ask = {"gang": gang, "rank": rank, "nonce": f"n{rank}", "address": "a"}
        return int((await api.http.post("/agent/v1/claim", json=ask, headers=headers)).status_code)

    async def orders(token: str) -> int:
        headers = {"Cavvy-Agent-Protocol": str(PROTOCOL), "Authorization": f"Bearer {token}"}
        path = f"/agent/v1/orders?gang={gang}&rank=0"
        return int((await api.http.get(path, headers=headers)).status_code)

    lost = [tokens.of(gang), tokens.of_claim(gang, 1), tokens.of_node(gang, NodeProof(1, 0))]
    assert await orders(lost[0]) == 200
    await store.commit(AtomicWrite(attempts=[repaired]))
    refused = [await claim(token, rank) for token in lost for rank in (0, 1)]
    assert refused == [409, 409, 403, 403, 409, 409]  # the agents end; a claim token is no proof
    assert [await orders(token) for token in lost] == [409, 403, 409]
    own = [tokens.of_node(gang, NodeProof(0, 0)), tokens.of_node(gang, NodeProof(1, 5))]
    assert await claim(own[1], 0) == 409
    assert [await claim(own[0], 0), await claim(own[1], 1)] == [200, 200]
    assert await claim(tokens.of(f"{gang}#5"), 1) == 200
    assert await claim(tokens.of_claim(f"{gang}#5", 1), 1) == 200
    assert [await orders(each) for each in own] == [200, 200]
    forged = own[1].replace("1.5.", "1.0.")
    assert await orders(forged) == 403
    stored = await store.attempt_of_gang(gang)
    await store.commit(AtomicWrite(attempts=[replace(stored, open_ranks=(0,))]))
    assert await claim(tokens.of(gang), 0) == 200  # its agent had no token of its own yet


async def test_a_line_needs_a_rank_that_runs_and_forgets_nothing_on_its_way(api: Api) -> None:
    made = await api.submit()
    lines = f"/v1/projects/default/jobs/{made['id']}/exec"
    for body in ({}, {"command": ["x"], "session": True}, {"session": True, "rank": -1}):
        assert (await api.http.post(lines, json=body)).status_code == 422
    gang = (await api.attempt(made["id"])).gang
    assert (await api.http.post(lines, json={"session": True})).json()["code"] == "job-not-running"
    found = api.app_state.execs.start("e", made["id"], gang, 0, [], session=True)
    agent = f"/agent/v1/execs/e/input?gang={gang}&rank=0"
    for offset, data, wanted in ((0, b"one", 3), (0, b"onetwo", 6), (9, b"gap", 6)):
        answer = await api.http.post(f"{lines}/e/input?offset={offset}", content=data)
        assert answer.json() == {"next": wanted, "ended": False}
    first = (await api.http.get(agent, headers=api.agent(gang))).json()
    assert (
        first
        == (await api.http.get(agent, headers=api.agent(gang))).json()
        == {"data": "b25ldHdv", "end": False}
    )
    await api.http.post(f"{lines}/e/input?offset=6&end=true")
    last = await api.http.get(f"{agent}&offset=6", headers=api.agent(gang))
    assert last.json() == {"data": "", "end": True}
    assert not found.input  # what was confirmed is not kept
    strange = await api.http.get(agent.replace("/e/", "/other/"), headers=api.agent(gang))
    assert strange.json() == {"data": "", "end": True}


class Machines:
    """A provider whose machines another server asks about."""

    def __init__(self) -> None:
        self.manifest = SimpleNamespace(abilities={SERVES_NODES})
        self.asked: list[bytes] = []

    async def answer_server(self, call: str, body: bytes) -> bytes:
        self.asked.append(body)
        return b"{}"


async def test_only_another_server_may_ask_about_machines(api: Api) -> None:
    machines, path = Machines(), "/nodes/v1/machines/ask"
    api.app_state.control_plane.pool.providers["machines"] = cast(Provider, machines)
    now = api.app_state.now()
    real = api.app_state.peers._make_token(
        "POST", _signed(path, b"right"), now + timedelta(seconds=30)
    )
    until = real.partition(".")[0]

    async def ask(token: str, body: bytes) -> int:
        headers = {PEER.decode(): token}
        return (await api.http.post(path, content=body, headers=headers)).status_code

    for token in ("", "x", until, f"{until}.", f"{until}.{'0' * 64}", f"-1.{'0' * 64}"):
        assert await ask(token, b"right") in (401, 403), token
    assert await ask(real, b"another body") == 403
    assert machines.asked == []
    assert await ask(real, b"right") == 200
    assert machines.asked == [b"right"]
