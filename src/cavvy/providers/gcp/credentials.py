"""Loads Google credentials, and requests access tokens for API calls, with Google's own library."""

import functools
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from cavvy.domain.tasks import Scalar
from cavvy.packages import extra_command
from cavvy.providers.base import Refused
from cavvy.providers.vm.cloud import CloudFault

_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_TIMEOUT_S = 20.0


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
