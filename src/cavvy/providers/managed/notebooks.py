"""Makes the script that starts the agent on the machine of a managed notebook, which a service
shows in its list of notebooks. The service runs the script when the machine first starts.
"""

import shlex

from cavvy.providers.managed.service import JobRequest

RANK = "CAVVY_CONTAINER_RANK"  # the environment variable with a notebook's rank
_LOG = '"${CAVVY_FOLDER:-/tmp/cavvy}.log"'  # beside the agent's folder


def make_start_script(request: JobRequest, programs: str) -> str:
    """The script that starts the agent as root. It ends at once, since services wait for scripts.
    `programs` are the folders of the service's own Jupyter, as for `PATH`.
    """
    values = {**request.entry.environment, RANK: str(request.rank)}
    lines = [f"{name}={shlex.quote(text)}\nexport {name}" for name, text in values.items()]
    command = shlex.join(request.entry.command)
    return "\n".join(
        [
            "#!/bin/sh",
            *lines,
            f'PATH="$PATH:{programs}"\nexport PATH',
            f"setsid nohup {command} </dev/null >{_LOG} 2>&1 &",
            "",
        ]
    )
