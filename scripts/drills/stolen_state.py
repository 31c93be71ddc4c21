"""Steals a server's state and searches it for what was planted.

    python scripts/drills/stolen_state.py
    python scripts/drills/stolen_state.py --database postgresql:///name --folder /mnt/bucket

A secret, sources, lines of a log and the bytes of a checkpoint are planted by a real job of a real
server. Then its state folder, a dump of its database, its own log and each given folder are
searched: raw, in base64, in hexadecimal, in UTF-16, and inside of gzip and Zstandard. The job runs
twice: without keys of files, where the planted must be found, so that the search is known to work,
and with a key that is outside of the state folder, where nothing may be found. What the machine
holds as a node of the job (`providers/local`) is counted apart. The exit code is 1 if anything is
found, or if the search does not work.
"""

import argparse
import base64
import os
import re
import secrets
import sqlite3
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path

KINDS = ("secret", "source", "log", "checkpoint")
_CAVVY = str(Path(sys.executable).with_name("cavvy"))
_GZIP, _ZSTD = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"
_MOST = 1 << 28  # bytes that are read of one compressed part
TASK = """\
name: planted
resources: {cpu: 1}
secrets: [PLANTED]
workdir: .
checkpoint: {path: checkpoints}
run: python3 source.py
"""
PROGRAM = """\
import os, time
mark = "%s"
print("the log says", open("log.txt").read()[::-1], flush=True)
folder = os.environ["CAVVY_CHECKPOINT_DIR"]
open(os.path.join(folder, "state.part"), "w").write(open("state.txt").read()[::-1] * 99)
os.rename(os.path.join(folder, "state.part"), os.path.join(folder, "state"))
assert os.environ["PLANTED"]
"""


class StolenServer:
    """A server with one finished job, whose state is in `home`."""

    def __init__(self, home: Path, *, encrypted: bool, database: str = "") -> None:
        self.home, self._database = home, database
        # reversed, so that the marks of logs and checkpoints occur only where the job put them
        self.marks = {kind: f"{kind}{secrets.token_hex(12)}" for kind in KINDS}
        self._keys = Path(tempfile.mkdtemp(prefix="cavvy-keys-"))
        lines: list[str] = []
        if encrypted:
            key = self._keys / "key"
            key.write_bytes(secrets.token_bytes(32))
            key.chmod(0o600)
            place = f'"file:{key}"'
            lines += ["[secrets]", f"key = {place}", "[files]", f"key = {place}"]
        if database:
            lines += ["[server]", f'database = "{database}"']
        settings = self._keys / "settings.toml"
        settings.write_text("\n".join(lines) + "\n")
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("CAVVY_")},
            "CAVVY_HOME": str(home),
            "CAVVY_CONFIG": str(settings),
        }

    def use(self) -> None:
        """Plant everything, and stop the server."""
        folder = self._keys / "work"
        folder.mkdir()
        (folder / "source.py").write_text(PROGRAM % self.marks["source"])
        (folder / "log.txt").write_text(self.marks["log"][::-1])
        (folder / "state.txt").write_text(self.marks["checkpoint"][::-1])
        (folder / "task.yaml").write_text(TASK)
        try:
            self._cavvy("secret", "set", "PLANTED", given=self.marks["secret"])
            self._cavvy("run", "task.yaml", "--detach", folder=folder)
            self._cavvy("wait", "planted")
            said = self._cavvy("logs", "planted")
            assert self.marks["log"] in said, f"the log cannot be read back: {said}"
        finally:
            self._cavvy("server", "stop")

    def dump(self) -> bytes:
        """The whole database as text."""
        if self._database:
            return subprocess.run(
                ["pg_dump", self._database], check=True, capture_output=True, timeout=300
            ).stdout
        with sqlite3.connect(self.home / "cavvy.db") as database:
            return "\n".join(database.iterdump()).encode()

    def _cavvy(self, *words: str, folder: Path | None = None, given: str = "") -> str:
        done = subprocess.run(
            [_CAVVY, *words],
            cwd=folder or self._keys,
            env=self._environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            raise SystemExit(f"cavvy {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout


def disguise(mark: str) -> Iterator[bytes]:
    """The forms in which a text may be in a file: parts that do not depend on what surrounds it."""
    raw = mark.encode()
    yield raw
    yield from (raw.hex().encode(), raw.hex().upper().encode())
    yield from (mark.encode("utf-16-le"), mark.encode("utf-16-be"))
    for shift in range(3):
        text = base64.b64encode(b"\0" * shift + raw)
        start, end = -(-shift * 4 // 3), (shift + len(raw)) // 3 * 4
        yield from (text[start:end], text[start:end].translate(bytes.maketrans(b"+/", b"-_")))


def open_layers(data: bytes) -> Iterator[bytes]:
    """The data, and what is compressed in it at any place."""
    yield data
    for found in re.finditer(re.escape(_GZIP), data):
        with suppress(zlib.error):
            yield zlib.decompressobj(31).decompress(data[found.start() :], _MOST)
    for found in re.finditer(re.escape(_ZSTD), data):
        yield _unpack_zstd(data[found.start() :])


def _unpack_zstd(data: bytes) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise SystemExit("the search needs the package zstandard") from None
    with suppress(zstandard.ZstdError):
        return zstandard.ZstdDecompressor().stream_reader(BytesIO(data)).read(_MOST)
    return b""


def search(pieces: Iterator[tuple[str, bytes]], marks: Mapping[str, str]) -> Counter[str]:
    """Count, for each kind, the pieces in which its mark is found."""
    forms = {kind: tuple(disguise(mark)) for kind, mark in marks.items()}
    found: Counter[str] = Counter()
    for name, data in pieces:
        layers = list(open_layers(data))
        for kind, wanted in forms.items():
            if any(form in layer for form in wanted for layer in layers):
                found[kind] += 1
                print(f"  found: {kind} in {name}")
    return found


def read_files(
    folders: Sequence[Path], leave_out: Sequence[Path] = ()
) -> Iterator[tuple[str, bytes]]:
    """The names and contents of all files; the names are searched too."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if any(path.is_relative_to(each) for each in leave_out):
                continue
            yield f"the name of {path}", str(path.relative_to(folder)).encode()
            if path.is_file() and not path.is_symlink():
                yield str(path), path.read_bytes()


def steal(server: StolenServer, folders: Sequence[Path]) -> Counter[str]:
    """Use a server, and search what it leaves."""
    server.use()
    node = server.home / "providers" / "local"
    found = search(read_files([server.home, *folders], [node]), server.marks)
    found += search(iter([("the dump of the database", server.dump())]), server.marks)
    as_node = search(read_files([node]), server.marks)
    print(f"  as a node of the job, this machine holds: {dict(as_node) or 'nothing'}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", default="", help="an empty PostgreSQL database")
    parser.add_argument("--folder", type=Path, action="append", default=[], help="also search it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cavvy-stolen-") as root:
        print("without keys of files:")
        plain = steal(StolenServer(Path(root) / "plain", encrypted=False), [])
        print("with a key of files outside of the state folder:")
        server = StolenServer(Path(root) / "sealed", encrypted=True, database=options.database)
        sealed = steal(server, options.folder)
    unseen = [kind for kind in KINDS if kind != "secret" and not plain[kind]]
    print(f"without keys, found in files: {dict(plain)}; with a key: {sum(sealed.values())}")
    if unseen:
        print(f"the search is blind: it did not find what is not encrypted: {unseen}")
    return 1 if sealed or unseen else 0


if __name__ == "__main__":
    sys.exit(main())
