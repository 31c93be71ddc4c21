"""A user who sends anything that is valid by type to every route that users have. No answer may have
a status of 500 or above.

Paths, queries and bodies are made from the server's own description of its routes.
"""

import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from tests.api.api_state import Api

Schema = Mapping[str, Any]
TEXTS = (
    *("", "a", "default", "fake", "web", "t", "x" * 63, "x" * 5000, "a\0b", "é\u202e", "\ud800"),
    *("2026-11-21T12:00:00Z", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00", "2026-11"),
    *("aws", "local", "*", "../..", "a=b", "https://a.example", "https://[::1", "0" * 64, "viewer"),
    *(
        "{name: t, run: 'true'}",
        "{name: web, run: x, service: {port: 80}}",
        "cursor",
        "tag:a",
        "job",
    ),
)
WHOLES = (-1, 0, 1, 7, 100, 1 << 31, (1 << 53), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))
REALS = (0.0, 0.5, -1.0, 1e15, 1e308, 5e-324)
SKIPPED = ("/v1/server/stop", "/v1/shutdown", "/v1/down")


class Routes:
    """The routes of users, and what makes requests to them."""

    def __init__(self, description: Schema, seed: int) -> None:
        self._schemas = description.get("components", {}).get("schemas", {})
        self._dice = random.Random(seed)
        self._list = [
            (method, path, operation)
            for path, methods in description["paths"].items()
            if path.startswith("/v1/") and path not in SKIPPED
            for method, operation in methods.items()
            if method in ("get", "post", "put", "delete", "patch")
        ]

    def __len__(self) -> int:
        return len(self._list)

    def make(self, number: int) -> tuple[str, str, dict[str, str], bytes | None]:
        """The method, path, query and body of a request. All routes take turns."""
        method, path, operation = self._list[number % len(self._list)]
        query = {}
        for parameter in operation.get("parameters", ()):
            value = self._text(self._value(parameter.get("schema", {})))
            name = parameter["name"]
            if parameter["in"] == "path":
                path = path.replace(f"{{{name}}}", quote(value or "a", safe="", errors="replace"))
            elif parameter["in"] == "query" and name == "wait_s":
                query[name] = "0"
            elif parameter["in"] == "query" and self._dice.random() < 0.6:
                query[name] = value.encode("utf-8", "replace").decode()
        body = None
        if (asked := operation.get("requestBody")) is not None:
            schema = next(iter(asked["content"].values())).get("schema", {})
            body = json.dumps(self._value(schema)).encode()
            if self._dice.random() < 0.02:
                body = self._dice.choice((b"", b"[]", b"null", b"\xff", b"{" * 5000))
        return method.upper(), path, query, body

    def _text(self, value: object) -> str:
        return value[:5000] if isinstance(value, str) else json.dumps(value)

    def _value(self, schema: Schema, depth: int = 0) -> Any:
        dice = self._dice
        schema = {} if isinstance(schema, bool) else schema  # any value
        if reference := schema.get("$ref"):
            schema = self._schemas.get(str(reference).rpartition("/")[2], {})
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return self._value(dice.choice(options), depth)
        if (choices := schema.get("enum")) and dice.random() < 0.9:
            return dice.choice(choices)
        kind = schema.get("type")
        match dice.choice(kind) if isinstance(kind, list) else kind:
            case "object":
                if depth > 5:
                    return {}
                required = schema.get("required", ())
                properties = schema.get("properties", {})
                found = {
                    name: self._value(each, depth + 1)
                    for name, each in properties.items()
                    if name in required or dice.random() < 0.6
                }
                if not properties:
                    inner = schema.get("additionalProperties")
                    each = inner if isinstance(inner, dict) else {}
                    found = {
                        dice.choice(TEXTS): self._value(each, depth + 1)
                        for _ in range(dice.randrange(3))
                    }
                return found
            case "array":
                items = schema.get("items", {})
                return [self._value(items, depth + 1) for _ in range(dice.randrange(3))]
            case "integer":
                return dice.choice(WHOLES)
            case "number":
                return dice.choice((*REALS, *WHOLES))
            case "boolean":
                return dice.random() < 0.5
            case "null":
                return None
            case _:
                return dice.choice(TEXTS)


async def attack_routes(api: Api, count: int, seed: int, seen: Counter[int]) -> list[str]:
    """Send `count` requests. Returns what went wrong; `seen` counts the answers by status."""
    description = (await api.http.get("/v1/openapi.json")).json()
    routes, wrong = Routes(description, seed), []
    for number in range(count):
        method, path, query, body = routes.make(number)
        answer = await api.http.request(method, path, params=query, content=body)
        seen[answer.status_code] += 1
        if answer.status_code >= 500:
            wrong.append(
                f"{answer.status_code} {answer.text[:200]} to {method} {path[:200]} "
                f"{query!s:.300} {body!r:.600}"
            )
    if not (await api.http.get("/v1/health")).is_success:
        wrong.append("the server does not answer any more")
    return wrong
