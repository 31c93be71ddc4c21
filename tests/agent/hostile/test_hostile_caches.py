"""A joined machine that runs the jobs of projects one after another: a hostile job neither reads
nor changes what another project prepared there. `tests/providers/hosts/system/test_host_caches.py` tries the same
on SSH hosts.
"""

import pytest
from tests.agent.hostile.test_hostile_task import joined
from tests.providers.hosts.system.test_host_caches import LINKS, OWN, POISON, PROGRAMS, hostile, run

pytestmark = pytest.mark.system


def test_no_job_reads_or_changes_what_another_project_prepared_on_a_joined_machine() -> None:
    with joined("") as there:
        user = there.user
        (user.work / "private").mkdir()
        (user.work / "private/code.sh").write_text("echo CODE-OF-A\n")
        for project in ("pa", "pb"):
            user.cli("project", "create", project)
        run(user, "pa", OWN.format(name="first", more="true"))
        for attack in (POISON, PROGRAMS, LINKS):
            assert "found 0" in run(user, "pb", hostile("hostile", attack))
            said = run(user, "pa", OWN.format(name="next", more="ls -a ~ | grep evil || true"))
            assert "skipped the setup" in said
            for word in ("CODE-OF-A", "SETUP-OF-A", "DIR-OF-A"):
                assert word in said
            assert "POISONED" not in said
            assert "evil-ran" not in said
