"""Loads Google credentials, and requests access tokens for API calls, with Google's own library.

A service account key that a project has set is checked first: Google's library would send requests
to the addresses in the key, so only the fields that identify the account are used.
"""

import functools
import json
import re
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from cavvy.domain.tasks import Scalar
from cavvy.packages import extra_command
from cavvy.providers.base import KeyFileRefused, Refused
from cavvy.providers.vm.cloud import CloudFault

_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_TIMEOUT_S = 20.0

TOKEN_URI = "https://oauth2.googleapis.com/token"
_HOME = "googleapis.com"
_TAKEN = {
    "project_id": re.compile(r"[a-z0-9.:-]{1,100}"),
    "private_key_id": re.compile(r"[0-9A-Za-z]{1,100}"),
    "client_email": re.compile(r"[A-Za-z0-9._-]+@[A-Za-z0-9.-]+"),
    "private_key": re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[A-Za-z0-9+/=\s]+-----END [^-]+-----\s*"
    ),
}


class GoogleCredentials:
    """The Google credentials that a server uses. All methods block; several threads may use one
    object. `provider` is the name of the provider whose settings are read; error messages contain
    the name.
    """

    def __init__(self, settings: Mapping[str, Scalar], provider: str = "gcp") -> None:
        self._provider = provider
        self._file = str(settings.get("key_file") or "")
        self._project = str(settings.get("project") or "")
        self._lock = threading.Lock()
        self._found: tuple[Any, str] | None = None  # the credentials and their project

    def token(self) -> str:
        """Return an access token that is valid now. Raises Refused, or CloudFault if Google cannot
        be reached.
        """
        with self._lock:
            credentials, _ = self._find()
            if not credentials.valid:
                self._refresh(credentials)
            return str(credentials.token)

    def project(self) -> str:
        """Return the project that the settings name, else the project of the credentials. Raises
        Refused.
        """
        if self._project:
            return self._project
        with self._lock:
            _, project = self._find()
        if not project:
            raise Refused(
                f"[providers.{self._provider}] project: the credentials name no project; set "
                "`project` to the id of your project, which `gcloud projects list` shows"
            )
        return project

    def describe(self) -> str:
        """Return the kind of the credentials, to show to users. Contains no secret."""
        with self._lock:
            credentials, _ = self._find()
        account = getattr(credentials, "service_account_email", "")
        if self._file:
            return f"{account} ({self._file})"
        return account if account and account != "default" else type(credentials).__module__

    def _find(self) -> tuple[Any, str]:
        if self._found is None:
            auth, errors = _import("google.auth"), _import("google.auth.exceptions")
            try:
                if self._file:
                    account = _import("google.oauth2.service_account").Credentials
                    found = account.from_service_account_file(self._file, scopes=_SCOPES)
                    self._found = found, str(found.project_id or "")
                else:
                    found, project = auth.default(scopes=_SCOPES)
                    self._found = found, str(project or "")
            except (OSError, ValueError) as error:
                raise Refused(
                    f"[providers.{self._provider}] key_file: {self._file} is not the key of a "
                    f"service account: {type(error).__name__}"
                ) from error
            except errors.GoogleAuthError as error:
                raise Refused(
                    f"[providers.{self._provider}]: no Google credentials were found; run `gcloud "
                    "auth application-default login`, or name the key of a service account in "
                    "`key_file`"
                ) from error
        return self._found

    def _refresh(self, credentials: Any) -> None:
        errors = _import("google.auth.exceptions")
        request = _import("google.auth.transport.requests").Request()
        try:
            credentials.refresh(functools.partial(request, timeout=_TIMEOUT_S))
        except errors.TransportError as error:
            raise CloudFault(0, "no reply", "Google's token service cannot be reached") from error
        except errors.GoogleAuthError as error:
            if getattr(error, "retryable", False):
                raise CloudFault(503, "no token", str(error)[:300]) from error
            raise Refused(
                f"[providers.{self._provider}]: Google no longer accepts the credentials: "
                f"{str(error)[:300]}; "
                "sign in again with `gcloud auth application-default login`, or replace the key"
            ) from error


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise Refused(
            f"Google's clouds need google-auth, which is not installed: {extra_command('gcp')}"
        ) from error


def clean_key(text: str) -> str:
    """Return the text of a key file that contains only the required fields, with Google's own
    addresses. Raises KeyFileRefused; the error message contains no part of the key.
    """
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        raise KeyFileRefused("the key is not JSON") from None
    if not isinstance(told, dict) or told.get("type") != "service_account":
        raise KeyFileRefused(
            "the key must be the key of a service account (`type: service_account`)"
        )
    if told.get("universe_domain", _HOME) != _HOME:
        raise KeyFileRefused(f"`universe_domain` must be {_HOME}")
    if told.get("token_uri", TOKEN_URI) != TOKEN_URI:
        raise KeyFileRefused(f"`token_uri` must be {TOKEN_URI}")
    for name, form in _TAKEN.items():
        if not isinstance(told.get(name), str) or not form.fullmatch(told[name]):
            raise KeyFileRefused(f"`{name}` is missing, or is not valid for Google")
    taken = {name: told[name] for name in _TAKEN}
    return json.dumps({"type": "service_account", **taken, "token_uri": TOKEN_URI})
