"""The source of images of the example edge-digits, with odd files and a device that restarts."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

Image = pytest.importorskip("PIL.Image")
SOURCE = Path(__file__).parents[3] / "examples/edge-digits/source.py"


class Device(BaseHTTPRequestHandler):
    """Fails the first request, refuses images whose first pixel is grey, and says 3 to one whose
    first pixel is white, or else 7."""

    asked = 0

    def do_POST(self) -> None:
        type(self).asked += 1
        [pixels] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["instances"]
        self.send_response(503 if Device.asked == 1 else 400 if 0 < pixels[0] < 0.9 else 200)
        self.send_header("Cavvy-Answered-By", "device")
        self.end_headers()
        digit = 3 if pixels[0] > 0.9 else 7
        assert len(pixels) == 64
        self.wfile.write(
            json.dumps({"predictions": [[float(n == digit) for n in range(10)]]}).encode()
        )

    def log_message(self, *_: object) -> None:
        pass


def test_images_of_a_folder_are_sent_and_odd_files_are_told(tmp_path: Path) -> None:
    Image.new("RGB", (32, 20), "white").save(tmp_path / "a.png")
    Image.new("L", (8, 8), 100).save(tmp_path / "aa.png")
    Image.new("L", (8, 8), 0).save(tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\r\n\x1a\nspoilt")
    (tmp_path / "d").mkdir()
    with HTTPServer(("127.0.0.1", 0), Device) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        words = [sys.executable, str(SOURCE), "--folder", str(tmp_path), "--url", url]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        server.shutdown()
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["image"], each["digit"], each["by"]) for each in found] == [
        ("a.png", 3, "device"),
        ("b.png", 7, "device"),
    ]
    for told in ("503", "400", "c.png is no image", "d is no image"):
        assert told in done.stderr
