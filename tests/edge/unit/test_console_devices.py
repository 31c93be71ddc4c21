"""The console's pages about devices at the edge, rollouts and models."""

import html
import re
from datetime import timedelta
from typing import Any

from tests.console_rig import HOSTILE_TEXTS, NOW, CannedClient, sign_in

from cavvy.capabilities.edge.wire import DeviceModelView, DeviceView, RolloutView
from cavvy.capabilities.models.model_keys import list_expiring
from cavvy.capabilities.models.wire import PromotedView, SignedListsView
from cavvy.client import ApiError
from cavvy.client.model_wire import ModelView

UNSIGNED = SignedListsView(lists={}, held=[])


def device(name: str, **fields: Any) -> DeviceView:
    usual = {
        "project": "default",
        "name": name,
        "site": "lyon",
        "state": "online",
        "labels": {},
        "facts": {"board": "Jetson"},
        "enrolled_at": NOW,
        "heard_at": NOW,
        "models": [],
        "free_mib": 5000,
        "skew_s": 0.0,
        "waiting": 0,
        "agent": "1",
    }
    return DeviceView(**usual | fields)


def serves(number: int, problem: str = "") -> DeviceModelView:
    return DeviceModelView(
        name="digits", serving=number, refused=0, problem=problem, requests=1200, errors=0.25
    )


def rollout(name: str = "digits-1", **fields: Any) -> RolloutView:
    usual = {
        "project": "default",
        "name": name,
        "model": "digits",
        "to": 2,
        "site": "",
        "labels": {},
        "phase": "running",
        "reason": "",
        "wave": 1,
        "waves": [0.0, 1.0],
        "devices": 2000,
        "in_wave": 1,
        "serving": 1500,
        "refused": 3,
        "requests": 10,
        "errors": (0.01, 0.5),
        "residency": "",
        "left_out": [],
        "made_by": "ada",
        "created_at": NOW,
    }
    return RolloutView(**usual | fields)


def model(number: int, **fields: Any) -> ModelView:
    usual = {
        "project": "default",
        "name": f"digits@{number}",
        "model": "digits",
        "number": number,
        "main": "m.onnx",
        "size": 3 << 20,
        "files": [],
        "job": "train",
        "residency": "",
        "made_by": "ada",
        "created_at": NOW,
        "notes": {"accuracy": 0.97},
    }
    return ModelView(**usual | fields)


def answers(*devices: DeviceView, **more: Any) -> dict[str, Any]:
    lists = {"/v1/edge/devices": list(devices), "/v1/rollouts": [rollout()], "/v1/models": []}
    return (
        lists
        | {f"/v1/projects/{each.project}/edge/devices/{each.name}": each for each in devices}
        | {f"/v1/projects/{each.project}/edge/lists": UNSIGNED for each in devices}
        | more
    )


def words(page: str) -> str:
    return html.unescape(" ".join(re.sub(r"<[^>]+>", " ", page).split()))


def test_what_a_user_signed_is_to_be_renewed_before_it_expires() -> None:
    days = {"root": 900, "targets": -1, "model-m": 59, "model-n": 61, "model-free": 3}
    lists = {
        role: f'{{"signed": {{"expires": "{(NOW + timedelta(days=each)):%Y-%m-%dT%H:%M:%SZ}"}}}}'
        for role, each in days.items()
    }
    signed = SignedListsView(lists=lists | {"timestamp": lists["model-free"]}, held=["model-free"])
    client = CannedClient(answers(device("d"), **{"/v1/projects/default/edge/lists": signed}))
    told = list_expiring(client, "default", NOW)
    assert [re.findall(r"list (\S+) .* (expires|has expired)", each) for each in told] == [
        [("model-m", "expires")],
        [("targets", "has expired")],
    ]
    text = words(sign_in(client).get("/devices").text)
    assert all(each in text for each in told)
    client.answers = {"/v1/projects/x/edge/lists": ApiError("model-not-found", "none", status=404)}
    assert list_expiring(client, "x", NOW) == []


def test_devices_are_found_by_site_state_and_text() -> None:
    browser = sign_in(
        CannedClient(
            answers(
                device("press-1", models=[serves(2)], labels={"line": "a"}),
                device("oven-1", state="offline", models=[serves(1, "the disk is full")]),
                device("mixer-1", site="oslo", state="silent", heard_at=None),
            )
        )
    )

    def found(query: str) -> list[str]:
        return re.findall(r'/devices/\w+/(\w+-1)">', browser.get(f"/devices{query}").text)

    assert found("") == ["oven-1", "press-1", "mixer-1"]
    assert found("?site=oslo") == ["mixer-1"]
    assert found("?state=offline") == ["oven-1"]
    assert found("?text=Digits@2") == found("?text=line%3Da") == ["press-1"]
    assert found("?text=disk%20is&site=lyon") == ["oven-1"]
    assert found("?text=nothing") == []
    text = words(browser.get("/devices").text)
    assert "1 online, 1 offline, 1 silent." in text
    assert "2 of 2 1,500 of 2,000 3 1.0% → 50.0%" in text
    assert "No device matches." in browser.get("/devices?site=x").text
    many = sign_in(CannedClient(answers(*(device(f"d{each:05}") for each in range(10_000)))))
    page = many.get("/devices").text
    assert len(re.findall('<tr data-key="default/d0', page)) == 200
    assert "10,000 online. These are the first 200" in words(page)
    assert "d09999" in many.get("/devices?text=d09999").text


def test_a_device_shows_what_it_serves_and_a_wrong_clock() -> None:
    one = device("press-1", models=[serves(2, "the engine ended")], skew_s=-7200.0)
    browser = sign_in(CannedClient(answers(one)))
    text = words(browser.get("/devices/default/press-1").text)
    assert "The clock of the device is 2h00m behind" in text
    assert "digits digits@2 – 1,200 25.0% the engine ended" in text
    assert "board Jetson" in text
    missing = ApiError("device-not-found", "no such device", "", 404)
    browser = sign_in(CannedClient({"/v1/projects/default/edge/devices/x": missing}))
    assert browser.get("/devices/default/x").status_code == 404


def test_models_show_their_newest_versions_and_all_that_have_labels() -> None:
    models = [model(each, labels=["production"] if each == 2 else []) for each in range(1, 11)]
    page = sign_in(CannedClient(answers(**{"/v1/models": models}))).get("/devices").text
    shown = re.findall(r"<th scope=\"row\" class=\"name\"><a [^>]+>digits@(\d+)", page)
    assert shown == ["10", "9", "8", "7", "6", "2"]
    assert "digits@2 production Remove default 3.0 MiB train accuracy 0.97" in words(page)


def test_a_model_is_promoted_and_a_label_removed_with_the_right_of_the_user() -> None:
    path = "/v1/projects/default/models/digits/labels"
    moved = PromotedView(name="digits@3", former="digits@2")
    client = CannedClient(
        answers(
            **{
                "/v1/models": [model(2, labels=["old & odd"]), model(3)],
                f"PUT {path}/production": moved,
                f"DELETE {path}/old%20%26%20odd": moved,
            }
        )
    )
    browser = sign_in(client)
    page = browser.get("/devices").text
    assert page.count('action="/models/default/digits/promote"') == 2
    for form in ({"label": " production ", "number": "3"}, {"label": "production", "number": "3"}):
        answer = browser.post("/models/default/digits/promote", data=form, follow_redirects=False)
        assert answer.headers["location"] == "/devices#models-title"
    assert client.asked.count(f"PUT {path}/production") == 2
    (remove,) = re.findall(r'action="(/models/[^"]+/remove)"', page)
    assert browser.post(html.unescape(remove), follow_redirects=False).status_code == 303
    for wrong in ({}, {"label": "x", "number": "-1"}, {"label": "x", "number": "9" * 20}):
        assert browser.post("/models/default/digits/promote", data=wrong).status_code == 400
    evil = {"origin": "http://evil.example"}
    form = {"label": "production", "number": "2"}
    answer = browser.post("/models/default/digits/promote", data=form, headers=evil)
    assert answer.status_code == 403
    client.answers[f"PUT {path}/production"] = ApiError("forbidden", "you need operator", "", 403)
    refused = browser.post("/models/default/digits/promote", data=form)
    assert refused.status_code == 403
    assert "you need operator" in refused.text


def test_a_rollout_is_halted_or_taken_back_with_the_right_of_the_user() -> None:
    states = [
        rollout(f"digits-{n}", phase=each)
        for n, each in enumerate(("running", "done", "halted", "replaced"))
    ]
    path = "/v1/projects/default/rollouts/digits-1/halt"
    client = CannedClient(answers(**{"/v1/rollouts": states, f"POST {path}": states[2]}))
    browser = sign_in(client)
    page = browser.get("/devices").text
    assert re.findall(r"/rollouts/(digits-\d)/halt", page) == ["digits-0", "digits-1"]
    answer = browser.post("/devices/default/rollouts/digits-1/halt", follow_redirects=False)
    assert answer.headers["location"] == "/devices#rollouts-title"
    assert f"POST {path}" in client.asked
    client.answers[f"POST {path}"] = ApiError("forbidden", "you need the role operator", "", 403)
    refused = browser.post("/devices/default/rollouts/digits-1/halt")
    assert refused.status_code == 403
    assert "you need the role operator" in refused.text


def test_texts_of_devices_and_users_are_shown_as_they_are() -> None:
    for text in HOSTILE_TEXTS:
        told = {text: text}
        one = device("d", site=text, facts=told, labels=told, models=[serves(1, text)])
        more = {
            "/v1/rollouts": [rollout(text, reason=text, site=text)],
            "/v1/models": [model(1, job=text, labels=[text], notes={text: 1.0}, made_by=text)],
        }
        browser = sign_in(CannedClient(answers(one, **more)))
        for path in ("/devices", "/devices/default/d"):
            answer = browser.get(path)
            assert answer.status_code == 200
            assert text not in answer.text
            assert (
                html.escape(text, quote=False).replace('"', "&#34;").replace("'", "&#39;")
                in answer.text
            )


def test_the_list_is_sorted_by_its_columns() -> None:
    devices = answers(
        device("x", heard_at=None),
        device("y", heard_at=NOW),
        device("z", heard_at=NOW - timedelta(1)),
    )
    browser = sign_in(CannedClient(devices))
    page = browser.get("/devices?sort=Last+heard&way=down").text
    assert "".join(re.findall(r'<tr data-key="default/(\w)"', page)) == "yzx"
    assert "site=lyon&amp;sort=Name&amp;way=down" in browser.get("/devices?site=lyon").text


def test_several_rows_are_acted_on_and_failures_are_told() -> None:
    refused = ApiError("device-not-found", "there is no device b", "", 404)
    path = "/v1/projects/default/edge/devices"
    given = answers(device("a"), device("b")) | {
        f"DELETE {path}/a": {"project": "default", "name": "a"},
        f"DELETE {path}/b": refused,
    }
    client = CannedClient(given)
    browser = sign_in(client)
    data = {"do": "retire", "device": ["default/a", "default/b"]}
    page = browser.post("/devices?site=lyon", data=data).text
    assert "there is no device b." in page
    assert f"DELETE {path}/a" in client.asked
    assert 'action="/devices?site=lyon"' in page
    assert "no device was chosen" in browser.post("/devices", data={"do": "retire"}).text
    assert browser.post("/devices", data={"do": "x"}).status_code == 400
    other = {"origin": "http://evil.example"}
    assert browser.post("/devices", data={"do": "retire"}, headers=other).status_code == 403
