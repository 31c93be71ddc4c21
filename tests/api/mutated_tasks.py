"""Task files of every kind, each with values that a user could write by mistake."""

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import yaml

Path = tuple[str | int, ...]
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 10**6, 10**12, 10**19, 10**400, 0.5, 1e300, float("nan")),
    *("", "x", "é" * 300, "a\0b", "..", "/etc", "a/../b", "~", "~nobody-such/x", "x" * 5000, "."),
    *("5%", "100%", "1s", "400d", "99999d", "1e400", "8..2", "0..0", "$5", "1.000,50", "1,000"),
    *("H100:8", "H100:0", "eu", "s3://b/k", "https://x/", "https://[::1/", "file:///etc/passwd"),
    *("0 0 30 2 *", "2031-02-28T00:00Z", "9999-12-31T23:59Z", "Mon-Fri 20:00-08:00"),
    *([], ["x"], ["x", "x"], {}, {"a": "b"}, "${{ params.nope }}", "$${{", "\u202e", "unlimited"),
)
_SERVICE = {"port": 8000, "replicas": {"min": 0, "max": 3, "target": {"queue_wait": "10s"}}}
# What is added to {name, run}; keys of other tools replace `run`.
KINDS: tuple[dict[str, Any], ...] = (
    {"service": _SERVICE | {"concurrency": 4, "probe": {"path": "/h", "every": "10s"}}},
    {"service": _SERVICE | {"drain": "1m", "timeouts": {"queue": "1m"}, "slo": {"p95": "2s"}}},
    {"service": _SERVICE | {"regions": ["eu"], "residency": "eu", "budget": "$40/h"}},
    {"service": {"port": 1, "replicas": {"target": {"metric": "a", "value": 1}}}, "nodes": 1},
    {"service": {"port": 1}, "resources": {"cpu": 1, "providers": ["local"]}, "env": {"A": "1"}},
    {"limits": {"idle": {"gpu": "5%", "for": "30m"}, "budget": 25, "duration": "6h"}},
    {"limits": {"idle": "30m", "deadline": "8h", "unattended": "1h"}, "session": True},
    {"setup": {"run": "true", "uses": ["a.txt"]}, "workdir": "."},
    {"image": {"build": "."}, "workdir": "."},
    {"schedule": {"cron": "0 3 * * 1", "time_zone": "Europe/Berlin"}, "window": "22:00-06:00"},
    {"schedule": {"at": "2031-05-31T18:00Z"}},
    {"machine": "box", "keep": "30m", "grace": "30s"},
    {"checkpoint": {"path": "c", "every": "auto", "size": "1GB"}, "retry": {"exit_codes": [1, 2]}},
    {"retry": {"exit": 2, "delay": "5s", "preemption": "unlimited", "parallel": 2}},
    {"params": {"lr": {"type": "float", "default": 0.1, "max": 1}, "o": {"choices": ["a"]}}},
    {"work": {"flops": 1e18, "efficiency": 0.4}, "priority": 3, "tags": {"a": "b"}},
    {"work": {"samples": 1e6, "rates": {"A100:1": 50, "cpu": 3}}},
    {"work": {"duration": "10h", "measured_on": "cpu"}},
    {"resources": {"any_of": [{"cpu": 1}, {"cpu": 2, "memory": 4}]}},
    {"resources": {"cpu": "1..4", "memory": "4GB+", "disk": {"size": "10GB"}, "max_price": 3}},
    {"resources": {"options": {"kubernetes": {"pod": {"spec": {"a": 1}}}}, "check": True}},
    {"inputs": [{"source": "/data/x", "target": "in", "mode": "copy", "size": "1GB"}]},
    {
        "outputs": [{"source": "out", "target": "/data/o"}],
        "volumes": [{"host": "/s", "path": "/s"}],
    },
    {"webhooks": [{"url": "https://example.org/h", "on": ["failure"]}], "project": "p"},
    {"num_nodes": 1, "envs": {"A": 1}, "resources": {"cpus": "1+", "memory": "2+"}},
    {"num_nodes": 1, "file_mounts": {"/d": "./a.txt"}, "workdir": ".", "setup": "true"},
    {"type": "task", "commands": ["x"], "env": ["A=1"], "resources": {"disk": "1GB.."}},
    {"type": "task", "commands": ["x"], "files": ["a.txt"], "schedule": {"cron": "0 8 * * *"}},
)


def make_task(number: int) -> bytes:
    """A task file; the first of them have no mistake, and the others one or two."""
    dice = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    document = {"name": "t"} | ({} if "type" in kind else {"run": "true"}) | kind
    if number >= len(KINDS):
        for _ in range(dice.choice((1, 1, 2))):
            document = _replace(document, dice.choice(list(_walk(document))), dice.choice(ODD))
    try:
        text = yaml.safe_dump(document, allow_unicode=True)
    except (yaml.YAMLError, ValueError):
        text = json.dumps(document)
    return text.encode()


def _walk(node: object, path: Path = ()) -> Iterator[Path]:
    """The paths of all values but the file's name."""
    if path and path != ("name",):
        yield path
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()  # fmt: skip
    for key, value in pairs:
        yield from _walk(value, (*path, key))


def _replace(document: dict[str, Any], path: Path, value: object) -> dict[str, Any]:
    changed = deepcopy(document)
    at: Any = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed
