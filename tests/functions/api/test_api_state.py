"""Dicts and queues over HTTP: of users, and of the programs of jobs."""

import asyncio
import base64
import os
import pickle
from datetime import timedelta
from typing import Any

import pytest
from tests.api.api.test_api_accounts import add, code
from tests.api.api.test_api_accounts import call as ask_as
from tests.api.api_state import Api

from cavvy.capabilities.functions.state import rows
from cavvy.capabilities.functions.state.rows import StateRows
from cavvy.store.drivers import DatabaseSession

BASE = "/v1/projects/team"


def write(*values: bytes) -> list[str]:
    return [base64.b64encode(each).decode() for each in values]


def read(entries: list[dict[str, Any]]) -> list[bytes]:
    return [base64.b64decode(each["value"]) for each in entries]


async def ask(api: Api, path: str, op: str, **fields: Any) -> Any:
    answer = await api.http.post(f"{BASE}/{path}", json={"op": op, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_dict_keeps_bytes_in_the_order_of_its_keys(api: Api) -> None:
    await ask(api, "dicts/d", "put", keys=['"b"', '"a"'], data=write(b"1", b"2"))
    await ask(api, "dicts/d", "put", keys=['"b"'], data=write(b"3"))
    listed = await ask(api, "dicts/d", "list")
    assert [each["key"] for each in listed["entries"]] == ['"b"', '"a"']
    assert read(listed["entries"]) == [b"3", b"2"]
    new = await ask(api, "dicts/d", "put", keys=['"a"', "1"], data=write(b"x", b"y"), if_new=True)
    assert new["count"] == 1
    found = await ask(api, "dicts/d", "get", keys=['"a"', "2", "1"])
    assert read(found["entries"]) == [b"2", b"y"]
    assert (await ask(api, "dicts/d", "len"))["count"] == 3
    popped = await ask(api, "dicts/d", "pop", keys=['"a"', "2"])
    assert (read(popped["entries"]), popped["count"]) == ([b"2"], 1)
    (view,) = (await api.http.get(f"{BASE}/dicts")).json()
    assert (view["name"], view["entries"]) == ("d", 2)
    assert (await ask(api, "dicts/d", "clear"))["count"] == 2
    (view,) = (await api.http.get(f"{BASE}/dicts")).json()
    assert (view["entries"], view["bytes"]) == (0, 0)
    assert (await api.http.delete(f"{BASE}/dicts/d")).status_code == 204
    assert code(await api.http.delete(f"{BASE}/dicts/d")) == (404, "state-not-found")
    assert (await api.http.get("/v1/projects/other/dicts")).json() == []


async def test_long_answers_come_in_parts(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_ANSWER", 10)
    await ask(api, "dicts/d", "put", keys=["1", "2", "3"], data=write(*[b"12345678"] * 3))
    first = await ask(api, "dicts/d", "list")
    assert ([each["key"] for each in first["entries"]], first["more"]) == (["1"], True)
    rest = await ask(api, "dicts/d", "list", after=first["entries"][0]["number"], values=False)
    assert ([each["key"] for each in rest["entries"]], rest["more"]) == (["2", "3"], False)
    await ask(api, "queues/q", "put", data=write(*[b"12345678"] * 3))
    assert len((await ask(api, "queues/q", "get", most=3))["items"]) == 1


async def test_values_that_fill_an_answer_are_in_it(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MOST_ANSWER", 16)
    keys, data = ["1", "2", "3"], write(*[b"12345678"] * 3)
    await ask(api, "dicts/d", "put", keys=keys, data=data)
    await ask(api, "queues/q", "put", data=data)
    for asked in ({"op": "list"}, {"op": "get", "keys": keys}, {"op": "pop", "keys": keys}):
        found = await ask(api, "dicts/d", **asked)
        assert (len(found["entries"]), found["more"]) == (2, True), asked
    assert len((await ask(api, "queues/q", "get", most=3))["items"]) == 2
    await ask(api, "dicts/d", "put", keys=["4"], data=data[:1])
    found = await ask(api, "dicts/d", "list")
    assert (len(found["entries"]), found["more"]) == (2, False)
    monkeypatch.setattr(rows, "MOST_ITEMS", 2)
    assert not (await ask(api, "queues/q", "put", data=data[:1]))["full"]
    used = 2 * (1 + 8 + 64) + 2 * (8 + 64)
    monkeypatch.setattr(rows, "MOST_BYTES", used + 1 + 9 + 64)
    await ask(api, "dicts/d", "put", keys=["5"], data=write(bytes(9)))


async def test_no_more_values_are_read_than_an_answer_has_room_for(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project may keep a gigabyte; what does not fit into an answer stays in the database."""
    monkeypatch.setattr(rows, "MOST_ANSWER", 20)
    keys, data = ["1", "2", "3", "4", "5", "6"], write(*[b"12345678"] * 6)
    await ask(api, "dicts/d", "put", keys=keys, data=data)
    await ask(api, "queues/q", "put", data=data)
    read_rows, run = list[Any](), DatabaseSession.run

    def note(session: DatabaseSession, sql: str, values: Any = ()) -> Any:
        cursor = run(session, sql, values)
        if sql.startswith("SELECT") and any(each in sql for each in ("dict_entries", "queue_it")):
            found = cursor.fetchall()
            read_rows.extend(each for row in found for each in row if isinstance(each, bytes))
            return Rows(found)
        return cursor

    monkeypatch.setattr(DatabaseSession, "run", note)
    listed = await ask(api, "dicts/d", "list")
    assert (len(listed["entries"]), listed["more"], len(read_rows)) == (2, True, 2)
    read_rows.clear()
    assert len((await ask(api, "queues/q", "list", most=1000))["items"]) == len(read_rows) == 2
    read_rows.clear()
    assert len((await ask(api, "queues/q", "get", most=1000))["items"]) == len(read_rows) == 2
    read_rows.clear()
    popped = await ask(api, "dicts/d", "pop", keys=keys)
    assert (len(popped["entries"]), popped["count"], popped["more"]) == (2, 2, True)
    assert len(read_rows) == 3
    assert (await ask(api, "dicts/d", "len"))["count"] == 4


class Rows:
    """A cursor whose rows were fetched."""

    def __init__(self, found: list[Any]) -> None:
        self._found = found

    def fetchall(self) -> list[Any]:
        return self._found

    def fetchone(self) -> Any:
        return self._found[0] if self._found else None


async def test_a_queue_gives_each_item_once_in_order(api: Api) -> None:
    await ask(api, "queues/q", "put", data=write(b"1", b"2", b"3"))
    await ask(api, "queues/q", "put", data=write(b"other"), part="p")
    assert (await ask(api, "queues/q", "len"))["count"] == 3
    assert (await ask(api, "queues/q", "len", all=True))["count"] == 4
    seen = await ask(api, "queues/q", "list", most=2)
    assert read(seen["items"]) == [b"1", b"2"]
    later = await ask(api, "queues/q", "list", most=2, after=seen["items"][-1]["number"])
    assert read(later["items"]) == [b"3"]
    assert read((await ask(api, "queues/q", "get", most=2))["items"]) == [b"1", b"2"]
    assert read((await ask(api, "queues/q", "get", most=2))["items"]) == [b"3"]
    assert (await ask(api, "queues/q", "get"))["items"] == []
    assert (await ask(api, "queues/q", "clear", part="p"))["count"] == 1
    (view,) = (await api.http.get(f"{BASE}/queues")).json()
    assert (view["entries"], view["bytes"]) == (0, 0)


async def test_who_waits_gets_the_next_item_and_who_puts_waits_for_room(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MOST_ITEMS", 2)
    waiting = asyncio.create_task(ask(api, "queues/q", "get", wait_s=20))
    await asyncio.sleep(0)
    await ask(api, "queues/q", "put", data=write(b"1"))
    assert read((await waiting)["items"]) == [b"1"]
    await ask(api, "queues/q", "put", data=write(b"2", b"3"))
    assert (await ask(api, "queues/q", "put", data=write(b"4")))["full"]
    adding = asyncio.create_task(ask(api, "queues/q", "put", data=write(b"4"), wait_s=20))
    assert read((await ask(api, "queues/q", "get"))["items"]) == [b"2"]
    assert not (await adding)["full"]
    assert read((await ask(api, "queues/q", "get", most=9))["items"]) == [b"3", b"4"]


async def test_a_request_that_is_sent_again_changes_things_once(api: Api) -> None:
    async def twice(path: str, op: str, name: str, **fields: Any) -> Any:
        first = await ask(api, path, op, id=name, **fields)
        assert await ask(api, path, op, id=name, **fields) == first
        return first

    await twice("queues/q", "put", "1", data=write(b"a", b"b"))
    assert (await ask(api, "queues/q", "len"))["count"] == 2
    assert read((await twice("queues/q", "get", "2"))["items"]) == [b"a"]
    assert read((await ask(api, "queues/q", "get", id="3", seen="2"))["items"]) == [b"b"]
    assert (await ask(api, "queues/q", "get", id="2"))["items"] == []  # it was forgotten
    asked = {"keys": ["1"], "data": write(b"x"), "if_new": True}
    assert (await twice("dicts/d", "put", "4", **asked))["count"] == 1
    assert read((await twice("dicts/d", "pop", "5", keys=["1"]))["entries"]) == [b"x"]


async def test_sizes_are_bounded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"op": "put", "data": write(bytes((1 << 20) + 1))}
    answer = await api.http.post(f"{BASE}/queues/q", json=large)
    assert code(answer) == (413, "value-too-large")
    monkeypatch.setattr(rows, "MOST_BYTES", 1000)
    await ask(api, "queues/q", "put", data=write(bytes(800)))
    for path, more in (("queues/q", {}), ("dicts/d", {"keys": ["1"]})):
        asked = {"op": "put", "data": write(bytes(200)), **more}
        assert code(await api.http.post(f"{BASE}/{path}", json=asked)) == (409, "state-full")
    assert (await ask(api, "queues/q", "len"))["count"] == 1  # nothing of it was stored
    assert (await ask(api, "dicts/d", "len"))["count"] == 0
    empty = {"op": "put", "data": write(*[b""] * 20)}  # empty values count, too
    assert code(await api.http.post(f"{BASE}/queues/q", json=empty)) == (409, "state-full")
    monkeypatch.setattr(rows, "MOST_OBJECTS", 1)
    asked = {"op": "put", "data": write(b"")}
    assert code(await api.http.post(f"{BASE}/queues/other", json=asked)) == (409, "state-full")


@pytest.mark.parametrize(
    "asked",
    [
        {"op": "exec"},
        {"op": "put", "keys": ["1"], "data": []},
        {"op": "put", "keys": ["x" * 1025], "data": [""]},
        {"op": "put", "keys": ["1"], "data": ["%%"]},
        {"op": "put", "keys": [""], "data": [""]},
        {"op": "list", "after": -1},
        {"op": "list", "after": 1 << 63},
        {"op": "list", "most": 1 << 40},
        {"op": "get", "keys": ["1"] * 1001},
        {"op": "get", "id": "x" * 65},
        {"op": "get", "wait_s": 1e9, "ttl_s": 0},
    ],
)
async def test_hostile_requests_are_refused(api: Api, asked: dict[str, Any]) -> None:
    kind = "queues" if "ttl_s" in asked else "dicts"
    answer = await api.http.post(f"{BASE}/{kind}/d", json=asked)
    assert code(answer) == (422, "invalid-request"), answer.text


@pytest.mark.parametrize("name", ["..", "a%2Fb", "-a", "a" * 65, "a%00b", "ä"])
async def test_hostile_names_are_refused(api: Api, name: str) -> None:
    answer = await api.http.post(f"{BASE}/dicts/{name}", json={"op": "len"})
    assert answer.status_code in (404, 405, 422), answer.text


async def test_keys_with_nul_and_odd_text_are_kept_apart(api: Api) -> None:
    keys = ['"\\u0000"', '"\\ud800"', '"a"', '"A"', '" a"', "'; DROP TABLE dict_entries; --"]
    await ask(api, "dicts/d", "put", keys=keys, data=write(*[each.encode() for each in keys]))
    found = await ask(api, "dicts/d", "get", keys=keys)
    assert read(found["entries"]) == [each.encode() for each in keys]


class Hostile:
    """Makes a folder when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


async def test_the_server_loads_no_value(api: Api, tmp_path: Any) -> None:
    data = pickle.dumps(Hostile(str(tmp_path / "loaded")))
    await ask(api, "dicts/d", "put", keys=["1"], data=write(data))
    await ask(api, "queues/q", "put", data=write(data))
    assert read((await ask(api, "dicts/d", "pop", keys=["1"]))["entries"]) == [data]
    assert read((await ask(api, "queues/q", "get"))["items"]) == [data]
    assert not (tmp_path / "loaded").exists()


async def test_rights_are_those_of_the_project(api: Api) -> None:
    viewer = await add(api, "vera", ("team", "viewer"))
    member = await add(api, "mia", ("team", "member"))
    other = await add(api, "otto", ("other", "member"))
    put = {"op": "put", "keys": ["1"], "data": write(b"x")}
    assert (await ask_as(api, member, "POST", "/projects/team/dicts/d", put)).status_code == 200
    refused = await ask_as(api, viewer, "POST", "/projects/team/dicts/d", {"op": "list"})
    assert code(refused) == (403, "role-needed")
    (view,) = (await ask_as(api, viewer, "GET", "/projects/team/dicts")).json()
    assert (view["name"], view["user"]) == ("d", "mia")
    hidden = await ask_as(api, other, "POST", "/projects/team/dicts/d", {"op": "len"})
    assert code(hidden) == (404, "project-not-found")


async def begin(api: Api, token: str, project: str, tags: str = "{}") -> str:
    """The gang of a job of an account that runs."""
    text = {"text": f"{{name: t, run: 'true', tags: {tags}, resources: {{providers: [fake]}}}}"}
    job = (await ask_as(api, token, "POST", f"/projects/{project}/jobs", text)).json()
    gang = (await api.attempt(job["id"])).gang
    claim = {
        **{"gang": gang, "rank": 0, "nonce": "n1", "address": "127.0.0.1"},
        "host": {"hostname": "h", "python": "3", "platform": "p"},
    }
    await api.http.post("/agent/v1/claim", json=claim, headers=api.agent(gang))
    return gang


async def test_a_job_has_the_state_of_its_project(api: Api) -> None:
    token = await add(api, "mia", ("team", "member"))
    gang = await begin(api, token, "team")

    async def ask_there(kind: str, **fields: Any) -> Any:
        place = f"/agent/v1/asks/state/{kind}?gang={gang}&rank=0"
        return await api.http.post(place, json=fields, headers=api.agent(gang))

    put = {"op": "put", "keys": ["1"], "data": write(b"there")}
    assert (await ask_there("dict", name="d", **put)).status_code == 200
    assert read((await ask(api, "dicts/d", "get", keys=["1"]))["entries"]) == [b"there"]
    await ask(api, "queues/q", "put", data=write(b"here"))
    assert read((await ask_there("queue", name="q", op="get")).json()["items"]) == [b"here"]
    for name in ("../x", "", "a\n", "x" * 65):
        assert code(await ask_there("dict", name=name, op="len")) == (422, "invalid-request")
    place = f"/agent/v1/asks/state/dict?gang={gang}&rank=0"
    wrong = {**api.agent(gang), "Authorization": f"Bearer {token}"}
    assert (await api.http.post(place, json={}, headers=wrong)).status_code in (401, 403)
    # who may run no jobs any more has none that reads or writes
    assert (await api.http.delete("/v1/projects/team/roles/mia/member")).status_code == 204
    assert code(await ask_there("dict", name="d", op="len")) == (403, "role-needed")


async def test_what_nobody_takes_expires(api: Api) -> None:
    await ask(api, "queues/q", "put", data=write(b"1"), ttl_s=60)
    await ask(api, "queues/q", "put", data=write(b"2"), part="kept", ttl_s=86400 * 3)
    await ask(api, "queues/ephemeral-1", "put", data=write(b"1"), ttl_s=86400 * 3, id="an id")
    stored = StateRows(*api.app_state.store.database)
    await stored.sweep(api.app_state.now() + timedelta(days=2))
    (view,) = (await api.http.get(f"{BASE}/queues")).json()
    assert (view["name"], view["entries"]) == ("q", 1)
    assert (await ask(api, "queues/q", "len"))["count"] == 0
    reading, _ = api.app_state.store.database
    sql = "SELECT COUNT(*) FROM state_answers"
    assert (await reading(lambda session: session.run(sql).fetchone()))[0] == 0  # type: ignore[index]
