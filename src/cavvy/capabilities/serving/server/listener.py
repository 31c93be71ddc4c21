"""The address on which the gateway listens and the host names that services may have, from the
settings.
"""

from pathlib import Path

from cavvy.capabilities.serving.gateway.config import MetricsListener, OwnerToken, TlsFiles
from cavvy.capabilities.serving.gateway.haproxy.runtime import HaproxyMissing, find_haproxy
from cavvy.domain.targets import is_loopback_name
from cavvy.domain.units import is_whole
from cavvy.domain.values import Struct, replace
from cavvy.server.state_dir import StateDirError
from cavvy.settings import Settings

_PLANES = ("embedded", "haproxy")
_LOCAL = "127.0.0.1"
_LAST_PORT = 65_535
_LOOPBACK = (_LOCAL, "::1", "localhost")


class ServiceListener(Struct, frozen=True, kw_only=True):
    """The address of the gateway. `port` 0 means the port of the last gateway, or any free port.
    `certificate` "" means no TLS. `folder` contains the certificates of single host names. Services
    may have host names below `domains`.
    """

    host: str = _LOCAL
    port: int = 0
    certificate: str = ""
    key: str = ""
    folder: str = ""
    name: str = ""  # the host name in URLs; "" means the address on which the gateway listens
    domains: tuple[str, ...] = ()
    shared: bool = False  # other servers have gateways for the same services
    # whether other machines can reach the gateway; only then it answers to every host name
    public: bool = False
    owner: OwnerToken | None = None  # how to recognise the owner's token
    # the program in front of the gateway, or None if there is no such program
    haproxy: Path | None = None
    metrics: MetricsListener | None = None  # None: the gateway serves no metrics

    def locate(self, hosts: tuple[str, ...], path: str, port: int) -> str:
        """Return the URL of a service."""
        scheme = "https" if self.certificate else "http"
        usual = 443 if self.certificate else 80
        host = hosts[0] if hosts else self.name or self.host
        place = f"[{host}]" if ":" in host else host
        place += "" if port == usual else f":{port}"
        return f"{scheme}://{place}" if hosts else f"{scheme}://{place}{path}"

    @property
    def of_gateway(self) -> "ServiceListener":
        """The address on which the gateway itself listens."""
        if self.haproxy is None:
            return self
        return replace(self, host=_LOCAL, port=0, certificate="", key="", folder="")

    def permits(self, host: str) -> bool:
        """Return whether a service may have this host name."""
        return any(host.lower().endswith(f".{domain}") for domain in self.domains)


def read_listener(settings: Settings, *, shared: bool = False) -> ServiceListener:
    """Raises StateDirError if the settings contradict each other."""
    host, port = _read_address(settings, "services.listen")
    metrics_host, metrics_port = _read_address(settings, "services.metrics_listen")
    certificate, key = map(_whole, _read_tls(settings, host, metrics_host))
    plane, haproxy = settings.text("services.plane"), None
    if plane not in _PLANES:
        message = f"services.plane is {plane!r}, which is not a gateway"
        hint = f"expected one of {', '.join(_PLANES)}"
        raise StateDirError("settings-invalid", message, hint)
    if plane == "haproxy":
        try:
            haproxy = find_haproxy()
        except HaproxyMissing as error:
            message, hint = f"services.plane: {error}", "or set services.plane to embedded"
            raise StateDirError("settings-invalid", message, hint) from error
    domains = settings.text("services.domains").replace(",", " ").split()
    return ServiceListener(
        host=host,
        port=port,
        certificate=certificate,
        key=key,
        folder=_whole(settings.text("services.tls_folder")),
        name=settings.text("services.name"),
        domains=tuple(each.lower().strip(".") for each in domains),
        shared=shared,
        public=not is_loopback_name(host),
        haproxy=haproxy,
        metrics=_make_metrics(metrics_host, metrics_port, certificate, key),
    )


def _read_address(settings: Settings, name: str) -> tuple[str, int]:
    host, _, port = settings.text(name).rpartition(":")
    if port and not (is_whole(port) and int(port) <= _LAST_PORT):
        message = f"{name} is {settings.text(name)!r}, which is not an address"
        hint = f"write an address and a port up to {_LAST_PORT}, such as 127.0.0.1:8443"
        raise StateDirError("settings-invalid", message, hint)
    return host.strip("[]") or _LOCAL, int(port or 0)


def _make_metrics(host: str, port: int, certificate: str, key: str) -> MetricsListener | None:
    if not port:
        return None
    tls = None if host in _LOOPBACK else TlsFiles(certificate=certificate, key=key)
    return MetricsListener(host=host, port=port, tls=tls)


def _read_tls(settings: Settings, host: str, metrics_host: str) -> tuple[str, str]:
    """Return the files of the certificate and of its key; both are "" without TLS."""
    certificate = settings.text("services.tls_cert") or settings.text("server.tls_cert")
    key = settings.text("services.tls_key") or settings.text("server.tls_key")
    if bool(certificate) != bool(key):
        missing, given = ("key", "cert") if certificate else ("cert", "key")
        owner = "services" if settings.text(f"services.tls_{given}") else "server"
        raise _wrong(f"{owner}.tls_{given} is set, but services.tls_{missing} is not")
    for name, each in (("listen", host), ("metrics_listen", metrics_host)):
        if not certificate and each not in _LOOPBACK:
            raise _wrong(f"services.{name} {each} can be reached from outside, but there is no TLS")
    return certificate, key


def _whole(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _wrong(message: str) -> StateDirError:
    hint = "set services.tls_cert and services.tls_key, or use a loopback address without TLS"
    return StateDirError("settings-invalid", message, hint)
