"""How each context of a kubeconfig is reached and as whom; the cluster that this process runs in
needs no file.
"""

import asyncio
import base64
import binascii
import hashlib
import json
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import yaml

from cavvy.providers.base import Refused, TryAgain

_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_HERE = " folder"  # where an entry's own file is; no key of a kubeconfig
_PLUGIN_S = 60.0  # plugins of clouds may start a slow SDK
_EARLY = timedelta(minutes=1)  # a credential is renewed so long before it ends
_TOKEN_FILE_AGE = timedelta(minutes=1)  # kubelets renew the tokens of service accounts in place


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


class _Status(msgspec.Struct, rename="camel", kw_only=True):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: datetime | None = None


class _Printed(msgspec.Struct, kw_only=True):
    status: _Status


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeContext:
    """One context: where its API server is, and whatever proves who asks. Relative paths are
    made absolute.
    """

    name: str
    server: str
    namespace: str
    user: str
    ca: str | None = field(default=None, repr=False)  # PEM
    insecure: bool = False
    server_name: str | None = None
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    basic: str | None = field(default=None, repr=False)  # user:password
    certificate: bytes | None = field(default=None, repr=False)  # PEM
    key: bytes | None = field(default=None, repr=False)
    plugin: ExecPlugin | None = None
    impersonate: str | None = None
    proxy: str | None = field(default=None, repr=False)  # http://[user:password@]host:port
    kubeconfig: str = ""  # the setting that it was read by


def read_contexts(setting: str, wanted: Sequence[str]) -> Sequence[KubeContext]:
    """The contexts to use: those wanted, else the current one. Raises Refused."""
    paths = _find(setting)
    if not paths:
        inside = _read_in_cluster()
        if inside is None:
            raise Refused(
                "there is no kubeconfig: set [providers.kubernetes] kubeconfig, or KUBECONFIG, or "
                "write ~/.kube/config"
            )
        return [inside]
    raw = _merge([(path, _read(path)) for path in paths])
    names = list(wanted) or [str(raw.get("current-context") or "")]
    if names == [""]:
        raise Refused(f"{paths[0]} has no current context: set [providers.kubernetes] contexts")
    return [replace(_read_context(raw, name, paths[0]), kubeconfig=setting) for name in names]


def _find(setting: str) -> list[Path]:
    """The files that there are; what the first says holds."""
    texts = [setting] if setting else os.environ.get("KUBECONFIG", "").split(os.pathsep)
    named = [Path(text).expanduser() for text in texts if text]
    if setting:
        return named
    return [path for path in named or [Path("~/.kube/config").expanduser()] if path.exists()]


def _read(path: Path) -> dict[str, object]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise Refused(f"the kubeconfig {path} cannot be read: {error}") from error
    raw = {} if raw is None else raw  # an empty file says nothing, and is no fault beside others
    if not isinstance(raw, dict):
        raise Refused(f"the kubeconfig {path} is not a mapping")
    return raw


def _merge(files: Sequence[tuple[Path, Mapping[str, object]]]) -> Mapping[str, object]:
    """Several files as one: the first to give a name a meaning wins. Each row keeps the folder
    of its file.
    """
    rows: dict[str, list[object]] = {"clusters": [], "users": [], "contexts": []}
    for path, raw in files:
        for table, found in rows.items():
            given = raw.get(table)
            mine = (
                [row for row in given if isinstance(row, dict)] if isinstance(given, list) else []
            )
            found += [{**row, _HERE: path.parent} for row in mine]
    current = next((raw["current-context"] for _, raw in files if raw.get("current-context")), "")
    return {"current-context": current, **rows}


def _read_in_cluster() -> KubeContext | None:
    host, port = (
        os.environ.get("KUBERNETES_SERVICE_HOST"),
        os.environ.get("KUBERNETES_SERVICE_PORT", "443"),
    )
    if not host or not (_IN_CLUSTER / "token").exists():
        return None
    return KubeContext(
        name="in-cluster",
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        namespace=(_IN_CLUSTER / "namespace").read_text().strip() or "default",
        user="service account",
        ca=(_IN_CLUSTER / "ca.crt").read_text(),
        token_file=_IN_CLUSTER / "token",
    )


def _read_context(raw: Mapping[str, object], name: str, path: Path) -> KubeContext:
    context = _entry(raw, "contexts", "context", name, path)
    cluster = _entry(raw, "clusters", "cluster", str(context.get("cluster", "")), path)
    login = str(context.get("user", ""))
    user = _entry(raw, "users", "user", login, path) if login else {}
    if "auth-provider" in user:
        raise Refused(
            f"{path}: the user {login!r} uses `auth-provider`, which Kubernetes gave up in 1.26: "
            "use an exec plugin"
        )
    if strangers := [word for word in ("as-uid", "as-groups", "as-user-extra") if user.get(word)]:
        raise Refused(
            f"{path}: the user {login!r} has `{strangers[0]}`; Cavvy acts as another user by `as` "
            "alone"
        )
    proxy = _text(cluster, "proxy-url")
    if proxy and (urlsplit(proxy).scheme != "http" or not urlsplit(proxy).hostname):
        raise Refused(
            f"{path}: the context {name!r} asks for the proxy {proxy}; Cavvy speaks to "
            "http://HOST:PORT alone"
        )
    server = str(cluster.get("server", ""))
    if urlsplit(server).scheme not in ("http", "https"):
        raise Refused(f"{path}: the context {name!r} has no address of an API server")
    ca = _data(cluster, "certificate-authority", path)
    basic = f"{user['username']}:{user.get('password', '')}" if user.get("username") else None
    return KubeContext(
        name=name,
        server=server.rstrip("/"),
        namespace=str(context.get("namespace") or "default"),
        user=login or "nobody",
        ca=ca.decode() if ca else None,
        insecure=bool(cluster.get("insecure-skip-tls-verify")),
        server_name=_text(cluster, "tls-server-name"),
        token=_text(user, "token"),
        token_file=_here(user) / str(user["tokenFile"]) if user.get("tokenFile") else None,
        basic=basic,
        certificate=_data(user, "client-certificate", path),
        key=_data(user, "client-key", path),
        plugin=_plugin(user.get("exec"), _here(user), path),
        impersonate=_text(user, "as"),
        proxy=proxy,
    )


def _here(table: Mapping[str, object]) -> Path:
    """The folder that relative paths of an entry are of."""
    return Path(str(table.get(_HERE, "")))


def _plugin(raw: object, here: Path, path: Path) -> ExecPlugin | None:
    if raw is None:
        return None
    try:
        plugin = msgspec.convert(raw, ExecPlugin)
    except msgspec.ValidationError as error:
        raise Refused(f"{path}: `exec`: {error}") from error
    if os.sep in plugin.command and not os.path.isabs(plugin.command):
        plugin.command = str(here / plugin.command)
    return plugin


def _entry(
    raw: Mapping[str, object], table: str, inner: str, name: str, path: Path
) -> Mapping[str, object]:
    rows = raw.get(table)
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and row.get("name") == name and isinstance(row.get(inner), dict):
            return {**row[inner], _HERE: row.get(_HERE)}
    known = (
        [str(row.get("name")) for row in rows if isinstance(row, dict)]
        if isinstance(rows, list)
        else []
    )
    raise Refused(f"{path}: no {inner} {name!r}; there are: {', '.join(known) or 'none'}")


def _text(table: Mapping[str, object], name: str) -> str | None:
    value = table.get(name)
    return None if value is None else str(value)


def _data(table: Mapping[str, object], name: str, path: Path) -> bytes | None:
    """What a file holds whose content or path is given."""
    if inline := table.get(f"{name}-data"):
        try:
            return base64.b64decode(str(inline), validate=True)
        except binascii.Error as error:
            raise Refused(f"{path}: `{name}-data` is not base64") from error
    if table.get(name):
        try:
            return (_here(table) / str(table[name])).read_bytes()
        except OSError as error:
            raise Refused(f"{path}: `{name}`: {error}") from error
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginProof:
    """What proves to an API server who asks."""

    headers: Mapping[str, str] = field(repr=False)
    tls: ssl.SSLContext | None = None
    until: datetime | None = None  # None: it does not end


class KubeLogin:
    """Keeps the proof of one context, and renews it in time."""

    def __init__(self, context: KubeContext, home: Path, now: Callable[[], datetime]) -> None:
        self._context = context
        self._home = home
        self._now = now
        self._proof: LoginProof | None = None
        self._asking = asyncio.Lock()

    async def proof(self) -> LoginProof:
        """A proof that is good now. Raises Refused, TryAgain."""
        async with self._asking:
            if self._proof is None or (
                self._proof.until is not None and self._now() >= self._proof.until
            ):
                self._proof = await self._make()
            return self._proof

    def forget(self, shown: LoginProof) -> bool:
        """The API server did not take it; False where asking again would bring the same."""
        if self._proof is not shown:  # another request was denied too, and has looked
            return True
        self._proof = None
        if self._context.plugin is not None or self._context.token_file is not None:
            return True
        known = self._context
        with suppress(
            Refused
        ):  # who logs in anew has the file rewritten, or certificates beside it
            fresh = next(iter(read_contexts(known.kubeconfig, [known.name])))
            proofs = {
                name: getattr(fresh, name)
                for name in ("token", "basic", "certificate", "key", "ca")
            }
            self._context = replace(known, **proofs)
        return self._context != known

    async def _make(self) -> LoginProof:
        context, until = self._context, None
        token, certificate, key = context.token, context.certificate, context.key
        if context.plugin is not None:
            status = await _run_plugin(context.plugin, context)
            token = status.token or token
            if status.client_certificate_data and status.client_key_data:
                certificate, key = (
                    status.client_certificate_data.encode(),
                    status.client_key_data.encode(),
                )
            until = status.expiration_timestamp - _EARLY if status.expiration_timestamp else None
        elif context.token_file is not None:
            try:
                token = context.token_file.read_text().strip()
            except OSError as error:
                raise Refused(
                    f"the token of context {context.name} cannot be read: {error}"
                ) from error
            until = self._now() + _TOKEN_FILE_AGE
        headers = {}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        elif context.basic:
            headers["Authorization"] = "Basic " + base64.b64encode(context.basic.encode()).decode()
        if context.impersonate:
            headers["Impersonate-User"] = context.impersonate
        return LoginProof(headers=headers, tls=self._tls(certificate, key), until=until)

    def _tls(self, certificate: bytes | None, key: bytes | None) -> ssl.SSLContext | None:
        context = self._context
        if not context.server.startswith("https:"):
            return None
        try:
            tls = ssl.create_default_context(cadata=context.ca)
            # Authorities of many clusters leave out what RFC 5280 asks of them; nobody but Python
            # 3.13 minds.
            tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
            if context.insecure:
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
        """Python's TLS reads certificates from files alone."""
        folder = self._home / "certificates"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / hashlib.sha256(pem).hexdigest()[:16]
        if not path.exists():
            fresh = path.with_suffix(f".{os.getpid()}")
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(pem)
            fresh.rename(path)
        return path


async def _run_plugin(plugin: ExecPlugin, context: KubeContext) -> _Status:
    info: dict[str, object] = {"apiVersion": plugin.api_version, "kind": "ExecCredential"}
    spec: dict[str, object] = {"interactive": False}
    if plugin.provide_cluster_info:
        cluster: dict[str, object] = {"server": context.server}
        if context.ca:
            cluster["certificate-authority-data"] = base64.b64encode(context.ca.encode()).decode()
        more = {
            "insecure-skip-tls-verify": context.insecure,
            "tls-server-name": context.server_name,
            "proxy-url": context.proxy,
        }
        cluster |= {name: value for name, value in more.items() if value}
        spec["cluster"] = cluster
    info["spec"] = spec
    env = {
        each["name"]: each["value"] for each in plugin.env or () if {"name", "value"} <= each.keys()
    }
    environ = {**os.environ, **env, "KUBERNETES_EXEC_INFO": json.dumps(info)}
    try:
        process = await asyncio.create_subprocess_exec(
            plugin.command,
            *(plugin.args or ()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environ,
        )
    except OSError as error:
        hint = f"; {plugin.install_hint.strip()}" if plugin.install_hint else ""
        raise Refused(
            f"{plugin.command}, which context {context.name} needs, cannot be started: "
            f"{error}{hint}"
        ) from error
    try:
        async with asyncio.timeout(_PLUGIN_S):
            out, err = await process.communicate()
    except TimeoutError:
        raise TryAgain(f"{plugin.command} said nothing within {_PLUGIN_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        words = err.decode(errors="replace").strip().splitlines()
        raise Refused(
            f"{plugin.command} failed: "
            f"{words[-1][:300] if words else f'exit code {process.returncode}'}"
        )
    try:
        return msgspec.json.decode(out, type=_Printed).status
    except msgspec.MsgspecError as error:
        raise Refused(f"{plugin.command} printed no credential: {error}") from error
