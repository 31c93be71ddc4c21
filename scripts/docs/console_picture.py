"""Makes docs/img/console.png, a picture of the console's overview with invented jobs and costs.

Run it by hand if the overview looks different: `.venv/bin/python scripts/docs/console_picture.py`.
It needs Chromium. The server's answers are those of the tests; the pages are the real ones.
"""

import shutil
import socket
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qs, urlsplit

import uvicorn

_ROOT = Path(__file__).resolve().parents[2]
_PICTURE = _ROOT / "docs" / "img" / "console.png"
_WIDTH, _HEIGHT = 1200, 906
_COLORS = 64  # of the picture; its file is then a third as large

# name, project, user, phase, minutes since the submission, placement, dollars, reason
_JOBS: list[tuple[str, str, str, str, int, str | None, float, str]] = [
    ("gpt-small-7", "language", "ada", "running", 12, "aws/us-east-1/us-east-1a/p5.48xlarge:8/spot", 9.87, "the work runs"),
    ("segment-31", "vision", "grace", "running", 47, "lambda/us-west-1/gpu_1x_a10:1/on-demand", 0.59, "the work runs"),
    ("gpt-small-6", "language", "ada", "queued", 52, None, 0.0, "waits for spot; the deadline leaves 9h12m"),
    ("eval-nightly", "language", "ci", "done", 160, "slurm/lab/a100:4/on-demand", 0.0, "exit code 0"),
    ("segment-30", "vision", "grace", "failed", 220, "lambda/us-west-1/gpu_1x_a10:1/on-demand", 1.24, "exit code 1 on rank 0"),
    ("digits", "default", "alan", "done", 300, "local/workstation/rtx4090:1/on-demand", 0.0, "exit code 0"),
    ("gpt-small-5", "language", "ada", "done", 1500, "aws/us-east-1/us-east-1a/p5.48xlarge:8/spot", 143.02, "exit code 0, after 2 preemptions"),
]  # fmt: skip
_SPENDING = {"language": 120.0, "vision": 45.0, "default": 6.0}  # dollars on a usual day


def main() -> int:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("console_picture: install Chromium", file=sys.stderr)
        return 1
    with socket.create_server(("127.0.0.1", 0)) as listener, TemporaryDirectory() as profile:
        address = _serve(listener)
        shot = Path(profile, "shot.png")
        arguments = [
            *("--headless", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"),
            *(["--no-sandbox"] if sys.platform == "linux" else []),
            f"--user-data-dir={profile}",
            f"--window-size={_WIDTH},{_HEIGHT}",
            f"--screenshot={shot}",
        ]
        subprocess.run([browser, *arguments, address], check=True, timeout=60, capture_output=True)
        _PICTURE.write_bytes(_reduce(shot))
    print(f"wrote {_PICTURE.relative_to(_ROOT)}")
    return 0


def _serve(listener: socket.socket) -> str:
    """Serve the console from a thread, and return the address that signs in."""
    sys.path.insert(0, str(_ROOT))
    from tests.console_rig import CannedClient

    from cavvy.console.access import OneUser
    from cavvy.console.app import Console

    now = datetime.now(UTC)
    access = OneUser(CannedClient(_make_answers(now)))
    app = Console(access, "cavvy.example.com", lambda: now).app
    server = uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="off", log_level="error"))
    threading.Thread(target=server.run, args=([listener],), daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/sign-in?key={access.secret}"


def _make_answers(now: datetime) -> dict[str, Any]:
    from tests.console.unit.test_console_pages import everything, jobs_by_phase, node_listing
    from tests.console_rig import listing, spent

    dice = Random(7)
    jobs = []
    for name, project, user, phase, minutes, placement, dollars, reason in _JOBS:
        at = now - timedelta(minutes=minutes)
        fields = {"project": project, "user": user, "phase": phase, "placement": placement}
        over = at + timedelta(minutes=40) if phase in ("done", "failed") else None
        fields |= {"submitted_at": at, "since": over or at, "ended_at": over, "reason": reason}
        jobs.append(listing(name, **fields, spent_micros=round(dollars * 1e6)))

    def spending(target: str) -> list[Any]:
        since = parse_qs(urlsplit(target).query)["since"][0]
        share = 0.4 if since.startswith(f"{now:%Y-%m-%d}") else 1.0
        return [
            spent(round(dollars * 1e6 * share * dice.uniform(0.2, 1.6)), project=project)
            for project, dollars in _SPENDING.items()
        ]

    rates = (49_320_000, 750_000)
    return everything() | {
        "/v1/jobs": jobs_by_phase(*jobs),
        "/v1/nodes": [node_listing(rate_micros_per_hour=rate) for rate in rates],
        "/v1/ledger/sums": spending,
    }


def _reduce(shot: Path) -> bytes:
    from io import BytesIO

    from PIL import Image

    reduced = BytesIO()
    with Image.open(shot) as picture:
        picture.convert("RGB").quantize(_COLORS).save(reduced, "PNG", optimize=True)
    return reduced.getvalue()


if __name__ == "__main__":
    sys.exit(main())
