"""Lists and copies the files in a state folder that a backup or a move must include with the
database, and makes temporary folders inside a state folder for copies of the database with all
secrets.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import file_digest
from pathlib import Path
from tempfile import mkdtemp

# Keys, and the certificate that nodes check. Without them, secrets cannot be decrypted and agents
# are refused.
KEYS = ("agents.key", "tls.pem", "key", "installation", "files.id")
_KEY_FORMS = "key.*"  # former keys of secrets
# Uploaded working folders, logs, checkpoints and results, and files of providers. The data keys of
# files come last, because a new file may have a new key.
_BLOBS = "folders"
FOLDERS = (_BLOBS, "logs", "storage", "providers", "file-keys")
# Processes of this machine, their folders and sockets: these files are useless on another machine.
LEFT_OUT = ("providers/local",)


def list_keys(root: Path) -> Iterator[Path]:
    """Yield the key files of a state folder, relative to that folder."""
    for path in [*(root / name for name in KEYS), *sorted(root.glob(_KEY_FORMS))]:
        if path.is_file() and not path.is_symlink():
            yield path.relative_to(root)


def list_files(root: Path) -> Iterator[Path]:
    """Yield the paths, relative to the state folder, of the files that belong to the database,
    except key files. Sockets, links and unfinished files are left out. A running server
    may replace a blob by chunks in folders that were listed before, so new blobs are listed again.
    """
    before: set[str] = set()
    for name in _list(root, _BLOBS):
        before.add(str(name))
        yield name
    yield from (name for name in _list(root, _BLOBS) if str(name) not in before)
    yield from _list(root, *(each for each in FOLDERS if each != _BLOBS))


def _list(root: Path, *folders: str) -> Iterator[Path]:
    for folder in folders:
        for where, inner, names in os.walk(root / folder):
            here = Path(where).relative_to(root)
            inner[:] = sorted(name for name in inner if str(here / name) not in LEFT_OUT)
            for name in sorted(names):
                path = Path(where) / name
                if path.is_file() and not path.is_symlink() and not name.endswith(".part"):
                    yield here / name


def copy_files(source: Path, target: Path) -> int:
    """Copy a state folder's files to another state folder and compare the copies with the
    originals. Files that already exist in `target` with the same content are not copied. Returns
    the number of copied files. Raises OSError.
    """
    count = 0
    for name in [*list_keys(source), *list_files(source)]:
        if name.name == "files.id":
            continue  # the new folder belongs to another database
        wanted = hash_file(source / name)
        copy = target / name
        if copy.is_file() and hash_file(copy) == wanted:
            continue
        make_private(target, copy.parent)
        part = copy.with_name(copy.name + ".part")
        shutil.copy2(source / name, part)
        if hash_file(part) != wanted:
            raise OSError(f"{part} differs from {source / name} after it was copied")
        os.replace(part, copy)
        count += 1
    return count


def make_private(root: Path, folder: Path) -> None:
    """Create a folder below `root`, and create missing parent folders. Only this user can enter
    these folders."""
    for each in (*reversed(folder.relative_to(root).parents), folder.relative_to(root)):
        (root / each).mkdir(mode=0o700, exist_ok=True)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


@contextmanager
def work_folder(home: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder below `home`, and delete it afterwards. Also delete the folders of earlier
    commands that were killed. Raises OSError.
    """
    for left in home.glob(f"{prefix}-*"):
        _delete_unused(left)
    folder = Path(mkdtemp(prefix=f"{prefix}-", dir=home))
    # the lock shows other commands that this command is running
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _delete_unused(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it is a file or a link, or was deleted meanwhile
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)
