"""Reads contexts from kubeconfigs, or from the service account of the server's pod, and obtains the
credentials of these contexts.
"""

import asyncio
import hashlib
import json
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
import yaml

from cavvy.domain.values import replace
from cavvy.providers.base import Refused, TryAgain
from cavvy.providers.hosts.records import write_bytes
from cavvy.providers.kubernetes.wire import basic

_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# plugin of a managed cluster -> how to install it, for kubeconfigs that do not state this
_INSTALL = {
    "aws": "install the AWS CLI: "
    "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html",
    "gke-gcloud-auth-plugin": "install the plugin with `gcloud components install "
    "gke-gcloud-auth-plugin`",
    "kubelogin": "install the plugin with `az aks install-cli`",
}
_PLUGIN_S = 60.0  # time limit for an exec credential plugin; a cloud's plugin may load a slow SDK
_EARLY = timedelta(minutes=1)  # credentials are renewed this long before they expire
# the file is read again after this time, because kubelets renew service account tokens in it
_TOKEN_FILE_AGE = timedelta(minutes=1)
_Entry = TypeVar("_Entry")
_Rows = Mapping[str, Sequence[tuple[Path, Mapping[str, object]]]]


class ExecPlugin(msgspec.Struct, rename="camel", kw_only=True):
    """A command that prints a credential, such as `aws eks get-token` or
    `gke-gcloud-auth-plugin`.
    """

    command: str
    args: list[str] | None = None
    env: list[dict[str, str]] | None = None
    api_version: str = "client.authentication.k8s.io/v1beta1"
    install_hint: str = ""
    provide_cluster_info: bool = False


class _CredentialStatus(msgspec.Struct, rename="camel", kw_only=True):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: datetime | None = None


class _Printed(msgspec.Struct, kw_only=True):
    status: _CredentialStatus


class _Context(msgspec.Struct, kw_only=True):
    cluster: str = ""
    user: str = ""
    namespace: str | None = None


class KubeCluster(msgspec.Struct, rename="kebab", kw_only=True):
    """An API server, as described in a kubeconfig."""

    server: str = ""
    certificate_authority: str | None = None
    certificate_authority_data: bytes | None = None
    insecure_skip_tls_verify: bool = False
    tls_server_name: str | None = None
    proxy_url: str | None = None


class KubeUser(msgspec.Struct, rename="kebab", kw_only=True):
    """A user's credentials, as described in a kubeconfig."""

    token: str | None = None
    token_file: str | None = msgspec.field(default=None, name="tokenFile")
    username: str | None = None
    password: str = ""
    client_certificate: str | None = None
    client_certificate_data: bytes | None = None
    client_key: str | None = None
    client_key_data: bytes | None = None
    plugin: ExecPlugin | None = msgspec.field(default=None, name="exec")
    impersonate: str | None = msgspec.field(default=None, name="as")
    auth_provider: object = None
    as_uid: object = None
    as_groups: object = None
    as_user_extra: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeContext:
    """One context: its API server and the user's credentials. The object contains the data of the
    files that the kubeconfig names; all remaining paths are absolute.
    """

    name: str
    namespace: str
    user: str
    cluster: KubeCluster = field(repr=False)
    login: KubeUser = field(repr=False)
    kubeconfig: str = ""  # the provider setting that names the kubeconfig; "" if unset


def read_contexts(setting: str, wanted: Sequence[str]) -> Sequence[KubeContext]:
    """Return the contexts named in the settings, or the current context if none is named. Raises
    Refused.
    """
    paths = _find(setting)
    if not paths:
        inside = _read_in_cluster()
        if inside is None:
            raise Refused(
                "no kubeconfig was found: set `kubeconfig` in [providers.kubernetes] or the "
                "variable KUBECONFIG, or create ~/.kube/config"
            )
        return [inside]
    files = [(path, _read(path)) for path in paths]
    current = next((raw["current-context"] for _, raw in files if raw.get("current-context")), "")
    names = list(wanted) or [str(current)]
    if names == [""]:
        raise Refused(
            f"{paths[0]} has no current context: set `contexts` in [providers.kubernetes]"
        )
    rows = {table: _merge(files, table) for table in ("contexts", "clusters", "users")}
    return [replace(_read_context(rows, name, paths[0]), kubeconfig=setting) for name in names]


def _find(setting: str) -> list[Path]:
    """Return the kubeconfig files that `setting` names, else the files in the variable KUBECONFIG,
    else ~/.kube/config. Earlier files take precedence.
    """
    texts = [setting] if setting else os.environ.get("KUBECONFIG", "").split(os.pathsep)
    named = [Path(text).expanduser() for text in texts if text]
    if setting:
        return named
    return [path for path in named or [Path("~/.kube/config").expanduser()] if path.exists()]


def _read(path: Path) -> Mapping[str, object]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise Refused(f"the kubeconfig {path} cannot be read: {error}") from error
    raw = {} if raw is None else raw  # an empty kubeconfig is valid, because there may be others
    if not isinstance(raw, dict):
        raise Refused(f"the kubeconfig {path} is not a mapping")
    return raw


def _merge(
    files: Sequence[tuple[Path, Mapping[str, object]]], table: str
) -> list[tuple[Path, Mapping[str, object]]]:
    """Return the entries of one list (such as `users`) in all files. Each entry is returned with
    the folder of its file, because the entry's relative paths are relative to this folder.
    """
    lists = ((path.parent, raw.get(table)) for path, raw in files)
    return [
        (folder, row)
        for folder, rows in lists
        if isinstance(rows, list)
        for row in rows
        if isinstance(row, dict)
    ]


def _read_in_cluster() -> KubeContext | None:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (_IN_CLUSTER / "token").exists():
        return None
    cluster = KubeCluster(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        certificate_authority_data=(_IN_CLUSTER / "ca.crt").read_bytes(),
    )
    return KubeContext(
        name="in-cluster",
        namespace=(_IN_CLUSTER / "namespace").read_text().strip() or "default",
        user="service account",
        cluster=cluster,
        login=KubeUser(token_file=str(_IN_CLUSTER / "token")),
    )


def _read_context(rows: _Rows, name: str, path: Path) -> KubeContext:
    _, context = _entry(rows, "context", name, path, _Context)
    folder, cluster = _entry(rows, "cluster", context.cluster, path, KubeCluster)
    home, user = folder, KubeUser()
    if context.user:
        home, user = _entry(rows, "user", context.user, path, KubeUser)
    _check(name, context.user, cluster, user, path)
    cluster.server = cluster.server.rstrip("/")
    cluster.certificate_authority_data = _data(
        cluster.certificate_authority_data, cluster.certificate_authority, folder, path
    )
    cluster.certificate_authority = None
    user.client_certificate_data = _data(
        user.client_certificate_data, user.client_certificate, home, path
    )
    user.client_key_data = _data(user.client_key_data, user.client_key, home, path)
    user.token_file = str(home / user.token_file) if user.token_file else None
    user.plugin = _find_command(user.plugin, home)
    return KubeContext(
        name=name,
        namespace=context.namespace or "default",
        user=context.user or "anonymous",
        cluster=cluster,
        login=user,
    )


def _check(name: str, login: str, cluster: KubeCluster, user: KubeUser, path: Path) -> None:
    """Raise Refused if the context needs a feature that this client lacks."""
    if user.auth_provider is not None:
        raise Refused(
            f"{path}: the user {login!r} uses `auth-provider`, which Kubernetes removed in 1.26: "
            "use an exec credential plugin"
        )
    for field_name in ("as-uid", "as-groups", "as-user-extra"):
        if getattr(user, field_name.replace("-", "_")):
            raise Refused(
                f"{path}: the user {login!r} has `{field_name}`; Cavvy supports impersonation "
                "only with `as`"
            )
    proxy = urlsplit(cluster.proxy_url or "http://none")
    if proxy.scheme != "http" or not proxy.hostname:
        raise Refused(
            f"{path}: the context {name!r} names the proxy {cluster.proxy_url}; Cavvy supports "
            "only proxies of the form http://HOST:PORT"
        )
    if urlsplit(cluster.server).scheme not in ("http", "https"):
        raise Refused(f"{path}: the context {name!r} does not name the address of an API server")


def _find_command(plugin: ExecPlugin | None, folder: Path) -> ExecPlugin | None:
    """Make the plugin's command absolute if it is a relative path. A plain name is not changed."""
    if plugin is not None and os.sep in plugin.command:
        plugin.command = str(folder / plugin.command)
    return plugin


def _entry(
    rows: _Rows, inner: str, name: str, path: Path, kind: type[_Entry]
) -> tuple[Path, _Entry]:
    """Return the named entry and the folder of its file. If several files have an entry with this
    name, the first file is used.
    """
    known = rows[f"{inner}s"]
    for folder, row in known:
        if row.get("name") == name and isinstance(row.get(inner), dict):
            try:
                return folder, msgspec.convert(row[inner], kind)
            except msgspec.ValidationError as error:
                raise Refused(f"{path}: {inner} {name!r}: {error}") from error
    names = ", ".join(str(row.get("name")) for _, row in known)
    raise Refused(f"{path}: there is no {inner} {name!r}; the existing ones are: {names or 'none'}")


def _data(inline: bytes | None, name: str | None, folder: Path, path: Path) -> bytes | None:
    """Return data that is stored in a kubeconfig, or in a file named by the kubeconfig."""
    if inline or not name:
        return inline or None
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise Refused(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginProof:
    """Credentials for an API server."""

    headers: Mapping[str, str] = field(repr=False)
    tls: ssl.SSLContext | None = None
    until: datetime | None = None  # None if the credentials do not expire


class KubeLogin:
    """Stores the credentials of one context, and renews them before they expire."""

    def __init__(self, context: KubeContext, home: Path, now: Callable[[], datetime]) -> None:
        self._context = context
        self._home = home
        self._now = now
        self._proof: LoginProof | None = None
        self._asking = asyncio.Lock()

    async def proof(self) -> LoginProof:
        """Return credentials that are valid now. Raises Refused, TryAgain."""
        async with self._asking:
            known = self._proof
            if known is None or (known.until is not None and self._now() >= known.until):
                known = self._proof = await self._make()
            return known

    def forget(self, rejected: LoginProof) -> bool:
        """Discard credentials that the API server rejected. Return False if the rejected
        credentials cannot be replaced.
        """
        if self._proof is not rejected:  # another request has already replaced these credentials
            return True
        self._proof = None
        known = self._context
        if known.login.plugin is not None or known.login.token_file is not None:
            return True
        # Tools that renew a login rewrite the kubeconfig, or the certificate files next to it.
        with suppress(Refused):
            (fresh,) = read_contexts(known.kubeconfig, [known.name])
            self._context = replace(known, cluster=fresh.cluster, login=fresh.login)
        return self._context != known

    async def _make(self) -> LoginProof:
        context, login, until = self._context, self._context.login, None
        token, certificate, key = login.token, login.client_certificate_data, login.client_key_data
        if login.plugin is not None:
            status = await _run_plugin(login.plugin, context)
            token = status.token or token
            if status.client_certificate_data and status.client_key_data:
                certificate = status.client_certificate_data.encode()
                key = status.client_key_data.encode()
            until = status.expiration_timestamp - _EARLY if status.expiration_timestamp else None
        elif login.token_file is not None:
            try:
                token = Path(login.token_file).read_text().strip()
            except OSError as error:
                raise Refused(
                    f"the token of context {context.name} cannot be read: {error}"
                ) from error
            until = self._now() + _TOKEN_FILE_AGE
        headers = {}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        elif login.username:
            headers["Authorization"] = basic(f"{login.username}:{login.password}")
        if login.impersonate:
            headers["Impersonate-User"] = login.impersonate
        return LoginProof(headers=headers, tls=self._tls(certificate, key), until=until)

    def _tls(self, certificate: bytes | None, key: bytes | None) -> ssl.SSLContext | None:
        context = self._context
        cluster = context.cluster
        if urlsplit(cluster.server).scheme != "https":
            return None
        try:
            ca = cluster.certificate_authority_data
            tls = ssl.create_default_context(cadata=ca.decode() if ca else None)
            # The CA certificates of many clusters violate RFC 5280, which Python enforces since
            # 3.13.
            tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
            if cluster.insecure_skip_tls_verify:
                tls.check_hostname = False
                tls.verify_mode = ssl.CERT_NONE
            if certificate and key:
                tls.load_cert_chain(self._keep(certificate + b"\n" + key))
        except (ssl.SSLError, OSError) as error:
            raise Refused(
                f"the certificates of context {context.name} cannot be used: {error}"
            ) from error
        return tls

    def _keep(self, pem: bytes) -> Path:
        """Write the client certificate to a file, because Python's TLS reads client certificates
        only from files.
        """
        folder = self._home / "certificates"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / hashlib.sha256(pem).hexdigest()[:16]
        if not path.exists():
            write_bytes(path, pem)
        return path


async def _run_plugin(plugin: ExecPlugin, context: KubeContext) -> _CredentialStatus:
    env = {
        each["name"]: each["value"] for each in plugin.env or () if {"name", "value"} <= each.keys()
    }
    try:
        process = await asyncio.create_subprocess_exec(
            plugin.command,
            *(plugin.args or ()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **env, "KUBERNETES_EXEC_INFO": _plugin_input(plugin, context)},
        )
    except OSError as error:
        raise Refused(_explain(plugin, context, error)) from error
    try:
        async with asyncio.timeout(_PLUGIN_S):
            out, err = await process.communicate()
    except TimeoutError:
        raise TryAgain(f"{plugin.command} did not finish within {_PLUGIN_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        problem = lines[-1][:300] if lines else f"exit code {process.returncode}"
        raise Refused(f"{plugin.command} failed: {problem}")
    try:
        return msgspec.json.decode(out, type=_Printed).status
    except msgspec.MsgspecError as error:
        raise Refused(f"{plugin.command} printed no valid credential: {error}") from error


def _explain(plugin: ExecPlugin, context: KubeContext, error: OSError) -> str:
    """Return the reason why a plugin cannot be started, and how to install it."""
    missing = isinstance(error, FileNotFoundError)
    problem = "is not installed on the server's machine" if missing else f"fails: {error}"
    hint = (plugin.install_hint or _INSTALL.get(Path(plugin.command).name, "")).strip()
    told = f"{plugin.command} {problem}, and context {context.name} needs this command to log in"
    return f"{told}; {hint}" if hint else told


def _plugin_input(plugin: ExecPlugin, context: KubeContext) -> str:
    """Return the ExecCredential that a plugin reads from its environment."""
    spec: dict[str, object] = {"interactive": False}
    if plugin.provide_cluster_info:
        cluster = msgspec.to_builtins(context.cluster)
        spec["cluster"] = {name: value for name, value in cluster.items() if value}
    return json.dumps({"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec})
