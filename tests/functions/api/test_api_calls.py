"""Calls that the server keeps, over HTTP. No job runs here: a test ends the calls."""

import base64
import threading
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from msgspec.json import encode
from tests.api.api.test_api_accounts import add, code
from tests.api.api.test_api_accounts import call as ask_as
from tests.api.api_state import Api
from tests.functions.api.test_api_apps import ASK, BASE, PART

from cavvy.capabilities.functions import dispatcher, routes, wire
from cavvy.capabilities.functions.dispatcher import find_calls
from cavvy.capabilities.functions.rows import DONE, FAILED, EndedCall
from cavvy.capabilities.functions.schema import (
    MOST_STEPS,
    Steps,
    TooManySteps,
    describe_function,
    explain_unfit,
    find_faults,
)

PATH = f"{BASE}/embed"


def resize(width: int, names: list[str], scale: float = 1.0) -> dict[str, int]:
    raise NotImplementedError


@pytest.fixture
async def calls(api: Api) -> Api:
    arguments, result = describe_function(resize, bound=False)
    function = {"name": "resize", "arguments": arguments, "result": result}
    part = {**PART, "functions": [function, {"name": "count", "generator": True}]}
    assert (await api.http.put(PATH, json={**ASK, "parts": [part]})).status_code == 200
    # the job would be one that never starts
    find_calls(api.app_state).look = lambda project, app: None  # type: ignore[method-assign]
    return api


def make_call(key: str = "", body: bytes = b"any", function: str = "resize") -> dict[str, Any]:
    return {"function": function, "body": base64.b64encode(body).decode(), "key": key}


async def end(api: Api, call: str, result: bytes, state: str = DONE, **told: Any) -> None:
    answer = encode(wire.CallEnd(**told)).decode()
    await find_calls(api.app_state).store_ended([EndedCall(call, state, answer, result)])


async def read(api: Api, *ids: str) -> Any:
    return (await api.http.post(f"{PATH}/calls/read", json={"ids": ids})).json()


async def test_a_key_names_one_call_with_one_result(calls: Api) -> None:
    asked = [make_call("a"), make_call("b"), make_call("a")]
    taken = (await calls.http.post(f"{PATH}/calls", json={"calls": asked})).json()
    assert [each["created"] for each in taken] == [True, True, False]
    first, other = taken[0]["id"], taken[1]["id"]
    assert taken[2]["id"] == first != other
    assert (await read(calls, first)) == {
        "ended": [],
        "missing": [],
        "waiting": {first: "its job is about to be submitted"},
    }
    await end(calls, first, b"one")
    await end(calls, first, b"two")  # a second result, of a job that was thought to be lost
    (found,) = (await read(calls, first, other, "none"))["ended"]
    assert (found["state"], base64.b64decode(found["result"])) == ("done", b"one")
    assert (await read(calls, "none"))["missing"] == ["none"]
    again = await calls.http.post(f"{PATH}/calls", json={"calls": [make_call("a")]})
    assert again.json() == [{"id": first, "created": False}]


async def test_a_call_that_was_cancelled_gets_no_result(calls: Api) -> None:
    asked = {"calls": [make_call()]}
    ((taken),) = (await calls.http.post(f"{PATH}/calls", json=asked)).json()
    assert (await calls.http.delete(f"{PATH}/calls/{taken['id']}")).status_code == 204
    await end(calls, taken["id"], b"late")
    (found,) = (await read(calls, taken["id"]))["ended"]
    assert (found["state"], found["end"]["kind"]) == ("cancelled", "CallCancelled")
    assert found["result"] == ""
    assert code(await calls.http.delete(f"{PATH}/calls/none")) == (404, "function-call-not-found")


async def test_calls_go_with_their_app(calls: Api) -> None:
    asked = {"calls": [make_call()]}
    ((taken),) = (await calls.http.post(f"{PATH}/calls", json=asked)).json()
    assert [each["id"] for each in (await calls.http.get(f"{PATH}/calls")).json()] == [taken["id"]]
    assert (await calls.http.delete(PATH)).status_code == 204
    assert (await read(calls, taken["id"])) == {
        "ended": [],
        "missing": [taken["id"]],
        "waiting": {},
    }


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (make_call(function="none"), (404, "function-not-found")),
        (make_call(function="count"), (422, "invalid-request")),
        (make_call(key="k" * 201), (422, "invalid-request")),
        (make_call(key="a\0b"), (422, "invalid-request")),
        ({**make_call(), "body": "no base 64!"}, (422, "invalid-request")),
    ],
)
async def test_calls_that_are_refused(
    call: dict[str, Any], expected: tuple[int, str], calls: Api
) -> None:
    assert code(await calls.http.post(f"{PATH}/calls", json={"calls": [call]})) == expected
    assert (await calls.http.get(f"{PATH}/calls")).json() == []


async def test_a_project_keeps_some_bytes_of_calls(
    calls: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MOST_KEPT", 10)
    monkeypatch.setattr(dispatcher, "_COUNT_AGAIN_S", 0.0)
    asked = {"calls": [make_call(body=b"four"), make_call(body=b"four")]}
    taken = (await calls.http.post(f"{PATH}/calls", json=asked)).json()
    refused = await calls.http.post(f"{PATH}/calls", json=asked)
    assert code(refused) == (422, "invalid-request")
    assert "kept calls of project team" in refused.json()["message"]
    await end(calls, taken[0]["id"], b"six676")  # its arguments are kept no longer
    assert await find_calls(calls.app_state).find_room("team", 3) == 0
    assert code(await calls.http.post(f"{PATH}/calls", json=asked)) == (422, "invalid-request")
    await calls.http.delete(f"{PATH}/calls/{taken[1]['id']}")
    one = {"calls": [make_call(body=b"four")]}
    assert (await calls.http.post(f"{PATH}/calls", json=one)).status_code == 200
    assert await find_calls(calls.app_state).find_room("other", 1) == 10


async def test_no_job_starts_in_the_name_of_one_who_may_run_none(calls: Api) -> None:
    names = ("eve", "mallory", "ada")
    eve, mallory, ada = [await add(calls, name, ("team", "member")) for name in names]
    ids = {}
    for name, token in zip(names, (eve, mallory, ada), strict=True):
        asked = {"calls": [make_call()], "consent": name != "ada"}
        taken = await ask_as(calls, token, "POST", "/projects/team/apps/embed/calls", asked)
        ids[name] = taken.json()[0]["id"]
    assert (await calls.http.delete("/v1/projects/team/roles/eve/member")).status_code == 204
    assert (await calls.http.delete("/v1/accounts/mallory")).status_code == 204
    await add(calls, "mallory", ("team", "member"))  # another person
    owner = find_calls(calls.app_state)
    app = dispatcher.AppCalls(owner, calls.app_state, "functions/team/embed")
    (part,) = await owner.apps.parts("team", "embed")
    found = await app._find_caller(part, {"resize"})
    assert found is not None
    assert (found.id, found.account) == (ids["ada"], "ada")
    ended = {each["id"]: each for each in (await read(calls, *ids.values()))["ended"]}
    assert {each["state"] for each in ended.values()} == {"failed"}
    assert "eve may no longer run jobs" in ended[ids["eve"]]["end"]["text"]
    assert "mallory was removed" in ended[ids["mallory"]]["end"]["text"]
    assert (await calls.http.delete("/v1/projects/team/roles/ada/member")).status_code == 204
    assert await app._find_job(part, {"resize"}) is None
    assert [each["state"] for each in (await read(calls, ids["ada"]))["ended"]] == ["failed"]


async def test_long_results_are_read_some_at_a_time(
    calls: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_MOST_READ", 10)
    asked = {"calls": [make_call() for _ in range(4)]}
    taken = (await calls.http.post(f"{PATH}/calls", json=asked)).json()
    ids = [each["id"] for each in taken]
    for call, size in zip(ids, (4, 6, 1, 20), strict=True):
        await end(calls, call, bytes(size))
    for asked_ids, got in ((ids, 2), (ids[2:], 1), (ids[3:], 1)):
        assert len((await read(calls, *asked_ids))["ended"]) == got


def test_the_schema_of_a_batched_function_is_that_of_one_call() -> None:
    def embed(texts: list[str], size: list[int]) -> list[list[float]]:
        raise NotImplementedError

    arguments, result = describe_function(embed, bound=False, batched=True)
    assert arguments["properties"] == {"texts": {"type": "string"}, "size": {"type": "integer"}}
    assert result == {"type": "array", "items": {"type": "number"}}


async def test_a_function_shows_its_schema(calls: Api) -> None:
    found = (await calls.http.get(f"{PATH}/functions/resize")).json()
    assert found["arguments"] == {
        "type": "object",
        "properties": {
            "width": {"type": "integer"},
            "names": {"type": "array", "items": {"type": "string"}},
            "scale": {"type": "number", "default": 1.0},
        },
        "required": ["width", "names"],
        "additionalProperties": False,
    }
    missing = await calls.http.get(f"{PATH}/functions/other")
    assert code(missing) == (404, "function-not-found")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "the body has no `width`"),
        (b"[1]", "must be an object"),
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"width": "3", "names": []}', "width must be integer, not string"),
        (b'{"width": true, "names": []}', "width must be integer, not boolean"),
        (b'{"width": 1, "names": [1]}', "names[0] must be string"),
        (b'{"width": 1, "names": [], "__class__": 1}', "`__class__` is no argument"),
        (b'{"width": 1e999, "names": []}', ""),
        (b"\x80\x04\x95", "no JSON"),  # a pickle
    ],
)
async def test_a_hostile_caller_of_the_route(body: bytes, told: str, calls: Api) -> None:
    answer = await calls.http.post(f"{PATH}/functions/resize", content=body)
    assert code(answer) == (422, "invalid-arguments")
    assert told in answer.json()["message"]
    assert (await calls.http.get(f"{PATH}/calls")).json() == []


NOTHING = [{"type": "null"}]


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": NOTHING * 60_000},
        {"enum": list(range(2000))},
        {"enum": [[1]]},
        {"enum": 5},
        {"type": [5]},
        {"properties": {str(number): {} for number in range(2000)}},
        {"properties": [1]},
        {"required": ["a"] * 2000},
        {"items": {"anyOf": 5}},
        {"additionalProperties": {"items": 3}},
        [],
    ],
)
async def test_a_schema_that_no_check_is_meant_for_is_not_deployed(schema: Any, api: Api) -> None:
    part = {**PART, "functions": [{"name": "f", "arguments": schema}]}
    answer = await api.http.put(PATH, json={**ASK, "parts": [part]})
    assert code(answer) == (422, "invalid-request")
    assert "the schema of f" in answer.json()["message"]


def test_a_deep_schema_is_unfit() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"anyOf": [deep]}
    assert "levels" in explain_unfit(deep)


def test_what_cannot_be_checked_may_be_anything() -> None:
    def f(kind: Literal[tuple(range(2000))], size: int) -> None: ...  # type: ignore[valid-type]

    arguments, _ = describe_function(f, bound=False)
    assert arguments["properties"] == {"kind": {}, "size": {"type": "integer"}}
    assert explain_unfit(arguments) == ""


def test_a_check_takes_few_steps() -> None:
    hostile = {"items": {"anyOf": NOTHING * 60_000 + [{"type": "integer"}]}}
    with pytest.raises(TooManySteps):
        list(find_faults([1] * 5, hostile, steps=Steps(10_000)))
    with pytest.raises(TooManySteps):
        list(find_faults({str(number): 1 for number in range(20)}, {}, steps=Steps(10)))
    honest = {"items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}
    assert list(find_faults([1] * 100_000 + [None], honest, steps=Steps(MOST_STEPS // 80))) == []
    wrong = [*[1] * 10, True, 2.0, "3"]
    assert len(list(find_faults(wrong, {"items": {"type": "integer"}}))) == 2


async def test_long_checks_leave_the_server_to_others(
    calls: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def find(*args: Any, **keys: Any) -> Iterator[str]:
        seen.append(threading.current_thread() is threading.main_thread())
        return find_faults(*args, **keys)

    monkeypatch.setattr(routes, "find_faults", find)
    monkeypatch.setattr(routes, "_FEW_STEPS", 100)
    path = f"{PATH}/functions/resize?wait_s=0"
    for names, main in ((["a"], [True]), (["a"] * 9000, [True, False]), (["a"] * 20_000, [False])):
        seen.clear()
        answer = await calls.http.post(path, json={"width": 3, "names": names})
        assert (answer.status_code, seen) == (202, main)
    monkeypatch.setattr(routes, "MOST_STEPS", 100)
    answer = await calls.http.post(path, json={"width": 3, "names": ["a"] * 9000})
    assert code(answer) == (422, "invalid-arguments")
    assert "too many values" in answer.json()["message"]


async def test_a_function_is_called_by_json(calls: Api) -> None:
    sent = {"width": 3, "names": ["a"]}
    headers = {"Idempotency-Key": "order 17"}
    path = f"{PATH}/functions/resize?wait_s=0"
    first = await calls.http.post(path, json=sent, headers=headers)
    assert (first.status_code, first.json()["state"]) == (202, "waiting")
    await end(calls, first.json()["call"], b'{"a": [3, null]}')
    again = await calls.http.post(path, json=sent, headers=headers)
    assert (again.status_code, again.json()["result"]) == (200, {"a": [3, None]})
    assert again.json()["call"] == first.json()["call"]
    failed = (await calls.http.post(path, json=sent)).json()["call"]
    headers = {"Idempotency-Key": failed}
    await end(calls, failed, b"", FAILED, kind="error", type="ValueError", text="no")
    (found,) = (await read(calls, failed))["ended"]
    assert (found["json"], found["end"]["text"]) == (True, "no")


async def test_an_exception_of_the_function_is_told(calls: Api) -> None:
    path, headers = f"{PATH}/functions/resize?wait_s=0", {"Idempotency-Key": "k"}
    sent = {"width": 3, "names": []}
    call = (await calls.http.post(path, json=sent, headers=headers)).json()["call"]
    await end(calls, call, b"", FAILED, kind="error", type="ValueError", text="too wide")
    answer = await calls.http.post(path, json=sent, headers=headers)
    assert code(answer) == (424, "call-failed")
    assert answer.json()["message"] == "ValueError: too wide"


async def test_a_pickle_is_no_answer_of_the_route(calls: Api) -> None:
    """A call with the key was made from Python; its result may run code when it is loaded."""
    asked = {"calls": [make_call("shared")]}
    ((taken),) = (await calls.http.post(f"{PATH}/calls", json=asked)).json()
    await end(calls, taken["id"], b"\x80\x05N.")
    answer = await calls.http.post(
        f"{PATH}/functions/resize",
        json={"width": 1, "names": []},
        headers={"Idempotency-Key": "shared"},
    )
    assert code(answer) == (424, "call-failed")
    assert "its result is a pickle" in answer.json()["message"]


async def test_calls_are_sent_by_priority_and_callers_take_turns(calls: Api) -> None:
    many = [make_call(f"m{number}") | {"turn": "a map"} for number in range(600)]
    assert (await calls.http.post(f"{PATH}/calls", json={"calls": many})).status_code == 200
    others = [make_call("single"), make_call("urgent") | {"priority": 7}]
    others.append(make_call("later") | {"priority": -1, "limits": ["acme"], "turn": "x"})
    assert (await calls.http.post(f"{PATH}/calls", json={"calls": others})).status_code == 200
    rows = find_calls(calls.app_state).rows
    first = await rows.list_next("team", "embed", "resize", None, 512)
    rest = await rows.list_next("team", "embed", "resize", first[-1].place, 512)
    found = await rows.get("team", "embed", [each.id for each in (*first, *rest)])
    keys = {each.id: each.once_key for each in found}
    sent = [keys[each.id] for each in (*first, *rest)]
    assert sent == ["urgent", "m0", "single", *(f"m{at}" for at in range(1, 600)), "later"]
    assert rest[-1].limit_keys == '["acme"]'
    assert await rows.list_functions("team", "embed") == ["resize"]


@pytest.mark.parametrize(
    "told",
    [{"priority": 101}, {"limits": ["x"] * 9}, {"limits": ["x" * 257]}, {"turn": "x" * 201}],
)
async def test_hostile_limits_of_calls_are_refused(told: dict[str, Any], calls: Api) -> None:
    answer = await calls.http.post(f"{PATH}/calls", json={"calls": [make_call("a") | told]})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
