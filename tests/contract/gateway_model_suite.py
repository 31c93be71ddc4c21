"""What both data planes promise to clients of OpenAI's API, and to programs in browsers."""

import json
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import pytest
from tests.contract.gateway_process import wait_for
from tests.contract.gateway_suite import KEY, of_models
from tests.contract.http_talk import Talk, ask
from tests.contract.replica_stand_in import ReplicaStandIn

FORM = (
    b'--a-b\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\n%b\r\n'
    b'--a-b\r\ncontent-disposition: form-data; name="model"\r\n\r\norg/tiny\r\n--a-b--\r\n'
)
LINES = (
    b'--a-b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--a-b\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\n'
    b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", '
    b'"body": {"model": "org/private"}}\n\r\n--a-b--\r\n'
)
PAGE = {"origin": "https://page.example"}
PREFLIGHT = {
    **PAGE,
    "access_control_request_method": "POST",
    "access_control_request_headers": "authorization,content-type",
}
ANY = "access-control-allow-origin"


class ModelSuite:
    @of_models
    def test_the_body_selects_the_service_by_its_model(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        replicas[0].reset()
        plane.set_replicas("model", replicas[:1])

        def call(body: bytes, path: str = "/v1/chat/completions", **fields: str) -> Any:
            return ask(plane.port, "POST", path, body, host="any.example", **fields)

        body = b'{"messages": [{"model": "no"}], "model": "org\\/tiny", "stream": true}'
        for path in ("/v1/chat/completions", "/v1/completions?a=b", "/v1/responses"):
            reply = call(body, path)
            assert (reply.status, reply.json["path"]) == (200, path)
            asked = 0 if "responses" in path else len('"stream_options":{"include_usage":true},')
            assert reply.json["size"] == len(body) + asked
        for wrong in (b"{}", b"not JSON", b'{"model": 1}', b""):
            error = call(wrong).json["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", None)
        missing = call(b'{"model": "org/other"}', x_api_key=KEY)
        assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")
        assert len(replicas[0].seen) == 3
        assert ask(plane.port, "POST", "/v1/other", b"x", host="any.example").status == 404

    @of_models
    def test_keys_hold_for_models_and_for_their_list(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        plane.set_replicas("keyed-model", replicas[:1])
        body = b'{"model": "org/private"}'

        def call(**fields: str) -> Any:
            path = "/v1/completions"
            return ask(plane.port, "POST", path, body, host="any.example", **fields)

        def names(**fields: str) -> list[str]:
            listed = ask(plane.port, "GET", "/v1/models", host="any.example", **fields).json
            return [each["id"] for each in listed["data"]]

        refused = call()
        assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
        misspelt = ask(
            plane.port, "POST", "/v1/completions", b'{"model": "no"}', host="any.example"
        )
        assert misspelt.status == 401, "a client without a key learns no names of models"
        assert names() == ["org/tiny"]
        assert call(authorization=f"Bearer {KEY}").status == 200
        assert replicas[0].seen[-1].get("authorization") is None
        assert names(authorization=f"Bearer {KEY}") == ["org/private", "org/tiny"]

    @of_models
    def test_a_large_body_goes_on_once_its_model_is_known(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        plane.set_replicas("model", replicas[:1])
        text = b'{"model": "org/tiny", "input": "' + b"a" * 2_000_000 + b'"}'
        reply = ask(plane.port, "POST", "/v1/embeddings", text, host="any.example")
        assert (reply.status, reply.json["size"]) == (200, len(text))
        for length in (2_000_000, 20_000_000):  # OpenAI's Python client writes `model` late
            late = b'{"input": "' + b"a" * length + b'", "model": "org/tiny"}'
            with suppress(ConnectionError):  # the rest of a refused body is not read
                reply = ask(plane.port, "POST", "/v1/embeddings", late, host="any.example")
                if length < 16 << 20:
                    assert (reply.status, reply.json["size"]) == (200, len(late))
                else:
                    assert "move `model` to the start" in reply.json["error"]["message"]

    @of_models
    @pytest.mark.parametrize("size", [10, 500_000])
    def test_a_form_selects_the_service_by_its_model(
        self, plane: Any, replicas: list[ReplicaStandIn], size: int
    ) -> None:
        plane.set_replicas("model", replicas[:1])
        path = "/v1/audio/transcriptions"
        body = FORM % (b'\r\nname="model"\r\n\r\nother' * (size // 10))
        kind = "Multipart/Form-Data; charset=utf-8; boundary=a-b"
        reply = ask(plane.port, "POST", path, body, host="any.example", content_type=kind)
        assert (reply.status, reply.json["path"], reply.json["size"]) == (200, path, len(body))
        cut = body[: body.index(b"org/tiny") + 3]
        refused = ask(plane.port, "POST", path, cut, host="any.example", content_type=kind)
        assert (refused.status, refused.json["error"]["code"]) == (400, "bad-request")

    @of_models
    def test_a_file_of_requests_runs_for_those_who_may_use_its_models(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        plane.set_replicas("keyed-model", replicas[:1])
        kind = "multipart/form-data; boundary=a-b"

        def call(method: str, path: str, body: bytes = b"", **more: str) -> Any:
            return ask(plane.port, method, path, body, host="any.example", x_api_key=KEY, **more)

        file = call("POST", "/v1/files", LINES, content_type=kind).json
        assert file["bytes"] == LINES.index(b"}}") + 3 - LINES.index(b"{")
        asked = {"input_file_id": file["id"], "endpoint": "/v1/embeddings"}
        batch = call("POST", "/v1/batches", json.dumps(asked).encode()).json
        path = f"/v1/batches/{batch['id']}"
        wait_for(lambda: call("GET", path).json["status"] == "completed")
        found = call("GET", f"/v1/files/{call('GET', path).json['output_file_id']}/content").json
        assert (found["custom_id"], found["response"]["status_code"]) == ("a", 200)
        assert call("DELETE", f"/v1/files/{file['id']}").json["deleted"]
        assert ask(plane.port, "GET", path, host="any.example").status == 404, "without the key"

    @of_models
    def test_a_model_describes_itself_to_those_who_may_use_it(self, plane: Any) -> None:
        def describe(name: str, **fields: str) -> Any:
            return ask(plane.port, "GET", f"/v1/models/{name}", host="any.example", **fields)

        for name in ("org/tiny", quote("org/tiny", safe="")):
            assert describe(name).json["id"] == "org/tiny"
        for name in ("org/private", "missing", ""):
            refused = describe(name)
            assert (refused.status, refused.json["error"]["code"]) == (404, "model_not_found")
        assert describe("org/private", x_api_key=KEY).json["object"] == "model"

    def test_a_page_of_another_origin_may_call_a_service_with_keys(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        """The browser asks without a key first."""
        replicas[0].reset()
        plane.set_replicas("keyed", replicas[:1])
        with Talk(plane.port) as talk:
            asked = talk.ask("OPTIONS", "/echo", host="keyed.example", **PREFLIGHT)
            assert (asked.status, asked.headers[ANY]) == (204, "*")
            assert asked.headers["access-control-allow-methods"] == "POST"
            assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
            assert replicas[0].seen == [], "no request without a key reaches a replica"
            called = talk.ask("POST", "/echo", b"x", host="keyed.example", x_api_key=KEY, **PAGE)
            assert (called.status, called.headers[ANY]) == (200, "*")
            assert replicas[0].seen[-1].get("origin") == PAGE["origin"]
            own = talk.ask("GET", "/own-origin", host="keyed.example", x_api_key=KEY, **PAGE)
            assert own.headers[ANY] == "https://own.example", "the program's own permission"
            refused = talk.ask("POST", "/echo", host="keyed.example", x_api_key="no", **PAGE)
            assert (refused.status, refused.headers[ANY]) == (401, "*")
            later = {"host": "keyed.example", "x_api_key": KEY, "prefer": "respond-async"}
            accepted = talk.ask("POST", "/echo", b"x", **later, **PAGE)
            assert (accepted.status, accepted.headers[ANY]) == (202, "*")
            wait_for(lambda: len(replicas[0].seen) == 3)
            plain = talk.ask("GET", "/echo", host="keyed.example", x_api_key=KEY)
            assert ANY not in plain.headers, "no page sent the request"
            assert talk.ask("OPTIONS", "/echo", host="keyed.example").status == 401

    def test_a_service_without_keys_answers_its_own_pages_itself(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        replicas[0].reset()
        plane.set_replicas("svc", replicas[:1])
        own = {"origin": "https://svc.example"}
        for method, fields in (("OPTIONS", {**PREFLIGHT, **own}), ("GET", own)):
            reply = ask(plane.port, method, "/echo", **fields)
            assert (reply.status, reply.json["method"]) == (200, method)
            assert ANY not in reply.headers
        missing = ask(plane.port, "GET", "/echo", host="unknown.example", **PAGE)
        assert ANY not in missing.headers

    def test_pages_may_call_models_if_all_of_them_need_a_key(self, plane: Any) -> None:
        for path in ("/v1/chat/completions", "/v1/models", "/v1/models/org%2Ftiny"):
            asked = ask(plane.port, "OPTIONS", path, host="any.example", **PREFLIGHT)
            assert asked.status == 404, "org/tiny needs no key"
