"""Runs on a machine that was just started: learns its rank, fetches the agent by hash, lets it work to its end.

Standard library of Python 3.8, one file, sent within user data by `userdata.py`: boot.py BOOT.JSON PYTHON.
"""

from __future__ import annotations

import hashlib
import json
import os
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any


def ask(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return str(answer.read().decode().strip())


def learn(metadata: dict[str, Any]) -> tuple[int, str]:
    """This machine's rank and address, by the cloud's own metadata service."""
    headers, token = dict(metadata["headers"]), metadata.get("token")
    if token:
        headers[token["header"]] = ask(token["url"], token["headers"], token["method"])
    return int(ask(metadata["rank"], headers)), ask(metadata["address"], headers)


def fetch(address: str, digest: str, path: str) -> bytes:
    """What is fetched is checked by its hash, so the certificate need not be."""
    context = ssl._create_unverified_context()
    with urllib.request.urlopen(address + "/boot/v1/" + digest, timeout=60, context=context) as answer:
        content = bytes(answer.read())
    if hashlib.sha256(content).hexdigest() != digest:
        raise OSError("what came is not what was asked for")
    with open(path, "wb") as file:
        file.write(content)
    return content


def keep_trying(what: str, until: float, call: Callable[..., Any], *arguments: Any) -> Any:
    while True:
        try:
            return call(*arguments)
        except (OSError, ValueError) as error:
            sys.stderr.write(f"remuda: {what}: {error}\n")
            if time.monotonic() > until:
                raise SystemExit(1) from error
        time.sleep(2)  # noqa: TID251 - a process of its own


def main(path: str, python: str) -> None:
    home = os.path.dirname(os.path.abspath(path))
    with open(path, encoding="utf-8") as file:
        boot = json.load(file)
    os.unlink(path)  # its tokens
    until = time.monotonic() + boot["patience_s"]
    rank, address = keep_trying("metadata", until, learn, boot["metadata"])
    agent = os.path.join(home, "agent.pyz")
    keep_trying("agent", until, fetch, boot["address"], boot["agent"], agent)
    tokens = boot["tokens"]
    if isinstance(tokens, str):
        tokens = json.loads(keep_trying("tokens", until, fetch, boot["address"], tokens, os.path.join(home, "tokens")))
        os.unlink(os.path.join(home, "tokens"))
    config = dict(boot["config"], rank=rank, token=tokens[rank], node_address=address)
    config.update(address=boot["address"], home=os.path.join(home, "work"), cache=os.path.join(home, "cache"))
    target = os.path.join(home, "config.json")
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        json.dump(config, out)
    command = [*python.split(), "-I", "-S", agent]
    code = subprocess.call([*command, target])
    # What could not be delivered is tried again for as long as the lease says; then the machine goes all the same.
    until = time.monotonic() + config["lease_s"]
    while code == 1 and time.monotonic() < until:
        time.sleep(5)  # noqa: TID251 - a process of its own
        code = subprocess.call([*command, "--deliver", target])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
