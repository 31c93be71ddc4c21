"""Recognises local files with credentials. Files with credentials are not uploaded: each single
file becomes a secret, which the job writes into a file on the node.
"""

import re

from cavvy.importers.kept_keys import TranslationNotes
from cavvy.spec.fields.kinds import WrongValue
from cavvy.spec.problems import SourceMark

_FILES = ("netrc", "git-credentials", "pypirc", "npmrc", "pgpass")
_FOLDERS = (
    *("ssh", "aws", "azure", "kube", "gnupg", "docker", "oci", "kaggle", "huggingface"),
    *("config/gcloud", "config/gh", "config/rclone", "cache/huggingface(?=/token)"),
)
_CREDENTIALS = re.compile(
    r"(?:~|/root|/home/[^/]+|/Users/[^/]+)/\."
    rf"(?P<folder>{'|'.join((*_FILES, *_FOLDERS))})(?P<file>/(?!.*\.pub$).*|)"
)


def is_credentials(path: str) -> bool:
    """Return whether a local path is a file or folder with credentials."""
    return _CREDENTIALS.fullmatch(path) is not None


def move_to_secret(
    path: str, target: str, key: str, mark: SourceMark, kept_keys: TranslationNotes
) -> str | None:
    """If the local file at `path` contains credentials, add a note: the job gets the file as a
    secret and writes the secret to `target` on the node. Returns the name of the secret, or None if
    the path contains no credentials. Raises WrongValue for a folder.
    """
    match = _CREDENTIALS.fullmatch(path)
    if match is None:
        return None
    if path.endswith("/") or not (match["file"] or match["folder"] in _FILES):
        raise WrongValue(
            f"{path} contains credentials, which are not uploaded; name its files one by one, so "
            "that each becomes a secret"
        )
    name = re.sub(r"[^A-Za-z0-9]+", "_", path.partition("/.")[2]).strip("_").upper() + "_FILE"
    reason = (
        f"{path} contains credentials, which are not uploaded: save them with `cavvy secret set "
        f"{name} --file {path}`; the job writes them to {target} if the node has no such file"
    )
    kept_keys.note(mark, key, reason)
    kept_keys.place_secret(name, target)
    return name
