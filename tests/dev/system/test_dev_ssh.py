"""A session that goes on at another provider: SSH hosts."""

import pytest
from tests.dev.system.test_dev import terminal
from tests.providers.hosts.system.test_ssh_jobs import lab, user
from tests.system.hosts import Lab
from tests.system.trust import User

__all__ = ["lab", "user"]  # fixtures
pytestmark = pytest.mark.system


def test_a_session_is_resumed_on_another_provider_with_its_home(lab: Lab, user: User) -> None:
    hosts = user.config.read_text()
    user.settings("[providers.ssh]\nenabled = false\n")
    with terminal(user, "dev", "--home") as first:
        first.wait("kept for")
        first.type("mkdir -p ~/notes; echo kept > ~/notes/one")
        assert first.ask("cat ~/notes/one") == "kept"
        assert first.ask("hostname") not in {host.name for host in lab.hosts}
    user.cli("machines", "stop", "dev", "--yes")
    user.settings(hosts)
    user.cli("server", "stop")
    with terminal(user, "dev", "resume") as second:
        second.wait("is resumed")
        second.wait("kept for")
        assert second.ask("cat ~/notes/one") == "kept"
        assert second.ask("hostname") in {host.name for host in lab.hosts}
        told = user.cli("dev", "resume", "--provider", "local", code=1)
        assert "still has its nodes" in told
    user.cli("machines", "stop", "dev", "--yes")
    user.settings(hosts.replace("enabled = false", "enabled = true"))
    user.cli("server", "stop")
    for provider, is_host in (("local", False), ("ssh", True)):
        with terminal(user, "dev", "resume", "--provider", provider) as again:
            again.wait("only the options of its resources apply")
            again.wait("kept for")
            assert again.ask("cat ~/notes/one") == "kept"
            assert (again.ask("hostname") in {host.name for host in lab.hosts}) == is_host
        user.cli("machines", "stop", "dev", "--yes")
    told = user.cli("dev", "resume", "--provider", "none", code=2)
    assert "error: dev: the catalog has no provider 'none'" in told
