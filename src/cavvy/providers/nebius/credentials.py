"""Finds the credentials of Nebius: an IAM token, or the key of a service account."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from cavvy.domain.tasks import Scalar
from cavvy.domain.values import Struct
from cavvy.providers.base import Refused

_VARIABLE = "NEBIUS_IAM_TOKEN"
_FILE = "~/.nebius/credentials.json"
_PAGE = "https://docs.nebius.com/iam/service-accounts/authorized-keys"


class NebiusCredentials(Struct, frozen=True, kw_only=True):
    """Credentials, and the file or variable (`source`) from which the credentials were read. Either
    the field `token` or the field `file` is set.
    """

    source: str
    token: str = ""
    file: str = ""  # the credentials of a service account, which Nebius's package reads


def find_credentials(settings: Mapping[str, Scalar]) -> NebiusCredentials:
    """Return the credentials: from the file that the settings name, otherwise from the environment,
    otherwise from the default file `_FILE`. Raises Refused.
    """
    named = str(settings.get("key_file") or "")
    if not named and (token := os.environ.get(_VARIABLE, "").strip()):
        return NebiusCredentials(source=f"${_VARIABLE}", token=token)
    file = named or _FILE
    path = Path(file).expanduser()
    if not path.exists():
        places = f"{file} (`key_file`)" if named else f"${_VARIABLE}, {file}"
        raise _refuse(
            f"no credentials in {places}; create a key of a service account with `nebius iam "
            f"auth-public-key generate` ({_PAGE}), and name its file in `key_file`"
        )
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "the file is not a text file"
        raise _refuse(f"{file} cannot be read: {why}") from error
    if len(text.split()) == 1 and not text.startswith("{"):
        return NebiusCredentials(source=file, token=text)
    if not _is_service_account(text):
        raise _refuse(
            f"{file} contains neither an IAM token nor the credentials of a service account; "
            f"create it with `nebius iam auth-public-key generate` ({_PAGE})"
        )
    return NebiusCredentials(source=file, file=str(path))


def _is_service_account(text: str) -> bool:
    try:
        told = json.loads(text)
    except ValueError:
        return False
    return isinstance(told, dict) and isinstance(told.get("subject-credentials"), dict)


def _refuse(text: str) -> Refused:
    return Refused(f"[providers.nebius]: {text}")
