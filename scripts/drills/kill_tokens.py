"""A gateway is killed again and again while clients stream answers of a language model. The tokens
that it has counted must be those of the engine.

    python scripts/drills/kill_tokens.py --kills 50

Four clients stream answers; each kill (SIGKILL) comes at a random moment and cuts some of them. The
counts must hold each token that reached a client, none twice: they may not exceed what the engine
has sent, and may be less than that only by tokens that were on their way to the gateway when it was
killed. The exit code is 1 if they are not.
"""

import argparse
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import openai  # noqa: E402
from tests.contract.engine_stand_in import EngineStandIn  # noqa: E402
from tests.contract.gateway_process import GatewayProcess, wait_for  # noqa: E402

_CLIENTS = 4
_SERVICE = {"name": "llm", "prefix": "/default/llm", "models": ["m"]}


class CountedEngine(EngineStandIn):
    """An engine that counts the tokens that it has sent, of answers that were cut, too."""

    sent = 0

    def _cut(self, events: list[bytes]) -> Iterator[bytes]:  # type: ignore[override]
        for each in events:
            self.sent += b"delta" in each
            yield each


class Client(threading.Thread):
    """Streams one answer after the other and counts the tokens that reach it."""

    def __init__(self, gateway: GatewayProcess, chance: random.Random, ended: threading.Event):
        super().__init__(daemon=True)
        self.gateway, self.chance, self.ended = gateway, chance, ended
        self.received = self.whole = self.cut = 0

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                self._stream_one()
                self.whole += 1
            except (openai.APIError, OSError, ValueError):
                self.cut += 1
                time.sleep(0.02)
            except Exception as error:  # of the HTTP package below, as it passes them on
                if not type(error).__module__.startswith("http"):
                    raise
                self.cut += 1

    def _stream_one(self) -> None:
        base = f"http://127.0.0.1:{self.gateway.port}/v1"
        chat = [{"role": "user", "content": "a b c"}]
        terms: Any = {"model": "m", "messages": chat, "stream": True}
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=10) as client:
            words = self.chance.randint(1, 80)
            for each in client.chat.completions.create(**terms, max_tokens=words):
                self.received += bool(each.choices and each.choices[0].delta.content)


def read_counts(gateway: GatewayProcess) -> int:
    works = gateway.facts("llm")["work"].values()
    uses = (use for work in works for each in work.values() for use in each["tokens"].values())
    return sum(use.get("completion", 0) for use in uses)


def run_drill(kills: int, seed: int) -> int:
    chance, ended = random.Random(seed), threading.Event()
    engine = CountedEngine("e1")
    engine.pause_s = 0.003
    engine.start()
    gateway = GatewayProcess(services=[_SERVICE])
    gateway.set_replicas("llm", [engine])
    clients = [Client(gateway, random.Random(seed + n), ended) for n in range(_CLIENTS)]
    for each in clients:
        each.start()
    for number in range(kills):
        before = sum(each.received for each in clients)
        wait_for(lambda before=before: sum(each.received for each in clients) > before)
        time.sleep(chance.uniform(0.0, 0.5))
        gateway.process.kill()
        gateway.process.wait()
        gateway.start()
        with suppress(TimeoutError):
            gateway.set_replicas("llm", [engine])
        print(f"\rkill {number + 1} of {kills}", end="", file=sys.stderr, flush=True)
    ended.set()
    for each in clients:
        each.join(30)
    received = sum(each.received for each in clients)
    with suppress(AssertionError):
        wait_for(lambda: read_counts(gateway) >= received)
    counted = read_counts(gateway)
    whole, cut = sum(each.whole for each in clients), sum(each.cut for each in clients)
    print(
        f"\n{kills} kills, {whole} whole answers, {cut} cut or refused. Tokens: {received:,} "
        f"reached clients, {counted:,} counted, {engine.sent:,} sent by the engine"
    )
    gateway.remove()
    engine.stop()
    return 0 if received <= counted <= engine.sent else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    sys.exit(run_drill(given.kills, given.seed))
