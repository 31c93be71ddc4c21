"""The abilities and a setting of `VmProvider`, for manifests, which must not import modules that
call a cloud.
"""

from cavvy.providers.abilities import CHECKS_TASKS, CLOSEABLE, RELAYS_AGENTS, WHO_AM_I
from cavvy.providers.base import ProviderSetting
from cavvy.providers.settings import flag

ABILITIES = (CHECKS_TASKS, WHO_AM_I, RELAYS_AGENTS, CLOSEABLE)


def reach_setting() -> ProviderSetting:
    """The setting with which the server reaches a cloud's machines by SSH, for clouds with user
    data.
    """
    return flag(
        "reach_by_ssh",
        "The server connects to the machines by SSH and starts the agents, which talk to the "
        "server through these connections. Then machines need not reach the server, and "
        "`server.tls_listen` need not be set. By default, the machines connect to the server.",
    )
