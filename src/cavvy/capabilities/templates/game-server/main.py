"""A game server that runs for days: players move over one field and paint it; the most colour wins.

    PORT=8000 python main.py        # then open http://127.0.0.1:8000/

The page in `index.html` asks for the field five times a second. The server saves the world every
`--every` seconds and when it is asked to stop. The next server reads the world at its first
request, so players keep their colour and their key, and lose at most that many seconds.
"""

import argparse
import json
import os
import secrets
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SAVED = Path(os.environ.get("WORLD", "world")) / "world.json"
PAGE = Path(__file__).with_name("index.html")
WIDTH, HEIGHT, MOST, IDLE_S = 32, 20, 64, 60
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
lock = threading.Lock()
world: dict = {}  # empty until the first request


def load() -> None:
    if SAVED.exists():
        world.update(json.loads(SAVED.read_text()))
        print(f"continuing with {len(world['players'])} players", flush=True)
    else:
        world.update(players={}, field=[0] * WIDTH * HEIGHT, hours=0.0, next=1)
    world["began"] = world["hours"]


def join() -> dict[str, object]:
    """Add a player at the place of its number, and return its key, which its moves must have."""
    now = time.time()
    for key in [key for key, each in world["players"].items() if now - each["seen"] > IDLE_S]:
        del world["players"][key]
    if len(world["players"]) >= MOST:
        raise ValueError(f"the game is full: {MOST} players")
    key, number = secrets.token_hex(16), world["next"]
    place = number * 7919 % (WIDTH * HEIGHT)
    world["next"] += 1
    world["players"][key] = {"number": number, "place": place, "seen": now}
    world["field"][place] = number
    return {"key": key, "number": number}


def move(key: str, direction: str) -> dict[str, object]:
    player, (right, down) = world["players"][key], MOVES[direction]
    x, y = player["place"] % WIDTH + right, player["place"] // WIDTH + down
    now = time.time()
    world["hours"] += min(now - player["seen"], IDLE_S) / 3600
    player["seen"] = now
    if 0 <= x < WIDTH and 0 <= y < HEIGHT:
        player["place"] = y * WIDTH + x
        world["field"][player["place"]] = player["number"]
    return {"score": world["field"].count(player["number"])}


class Game(BaseHTTPRequestHandler):
    timeout = 30  # seconds for a request, so that slow clients hold no thread

    def do_GET(self) -> None:
        if self.path.endswith("/state"):
            with lock:
                if not world:
                    load()
                places = {each["number"]: each["place"] for each in world["players"].values()}
                said = {"width": WIDTH, "field": world["field"], "players": places}
                self.answer(200, json.dumps(said).encode())
        else:
            self.answer(200, PAGE.read_bytes(), "text/html; charset=utf-8")

    def do_POST(self) -> None:
        try:
            size = int(self.headers.get("Content-Length", "0"))
            sent = json.loads(self.rfile.read(size)) if 0 < size <= 1000 else {}
            with lock:
                if not world:
                    load()
                said = move(sent["key"], sent["to"]) if self.path.endswith("/move") else join()
            self.answer(200, json.dumps(said).encode())
        except (ValueError, KeyError, TypeError) as error:
            self.answer(400, json.dumps({"error": f"{error}; join first, or wait"}).encode())

    def answer(self, code: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def save() -> None:
    with lock:
        text = json.dumps(world)
    if world:
        SAVED.with_suffix(".half").write_text(text)
        SAVED.with_suffix(".half").replace(SAVED)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=float, default=5, help="seconds between two saves")
    options = parser.parse_args()
    SAVED.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if SAVED.parent.stat().st_uid != os.getuid():
        raise SystemExit(f"{SAVED.parent} belongs to another user: set WORLD to another folder")
    stop, start = threading.Event(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "8000"))), Game)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while not stop.wait(options.every):
        save()
    save()
    for number in sorted(set(world.get("field", ())) - {0}):
        print(f"player {number}: {world['field'].count(number)} squares")
    played = max(world["hours"] - world["began"], 1e-9) if world else 1e-9
    spent = float(os.environ.get("CAVVY_PRICE_USD_HR", "nan")) / 3600 * (time.monotonic() - start)
    cost = f"${spent / played:.3g} per player's hour"
    print(f"cost: {cost}, {played:.3g} hours (`cavvy cost` has the bill)")


if __name__ == "__main__":
    main()
