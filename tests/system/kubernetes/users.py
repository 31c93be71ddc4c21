"""Users whose jobs run on the cluster, and that nothing is left of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.system.kubernetes.cluster import Cluster, shared_or_skip
from tests.system.trust import User, user_at, wait_until

SMALL = "resources: {cpu: 1, memory: 256MiB}"


@contextmanager
def user_on(cluster: Cluster, folder: Path) -> Iterator[User]:
    """A user of the cluster alone; afterwards it is as it was."""
    with user_at(folder) as user:
        configure(user, cluster)
        yield user
    cluster.kubectl(
        "delete",
        "configmaps,pods,secrets",
        "-l",
        "cavvy/gang",
        "--force",
        "--grace-period=0",
        "--wait=false",
    )
    check_gone(cluster)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return shared_or_skip()


@pytest.fixture
def user(cluster: Cluster, tmp_path: Path) -> Iterator[User]:
    with user_on(cluster, tmp_path / "user") as user:
        yield user


def configure(user: User, cluster: Cluster, more: str = "") -> None:
    settings = (
        f'kubeconfig = "{cluster.kubeconfig}"\nimage = '
        f'"localhost/python:1"\nprice_usd_gpu_hr = "3600"\n{more}'
    )
    user.settings(f"[providers.local]\nenabled = false\n[providers.kubernetes]\n{settings}")


def check_gone(cluster: Cluster) -> None:
    """No pod and no token is left; the records say that their gangs have ended."""
    wait_until(lambda: not cluster.pods(), lambda: "a pod is left", pause_s=0.2)
    wait_until(lambda: not _list_secrets(cluster), lambda: "a token is left", pause_s=0.2)


def _list_secrets(cluster: Cluster) -> list[str]:
    """The names of those of gangs."""
    names = [
        each["metadata"]["name"]
        for each in cluster.api("/api/v1/namespaces/default/secrets")["items"]
    ]
    return [name for name in names if "rm-" in name]
