"""Makes the script that starts the agent on the machine of a managed notebook, which a service
shows in its list of notebooks. The service runs the script when the machine first starts.
"""

import shlex

from cavvy.providers.managed.service import JobRequest

RANK = "CAVVY_CONTAINER_RANK"  # the environment variable with a notebook's rank
_FOLDER = "/tmp/cavvy"  # as in containers


def make_start_script(
    request: JobRequest, programs: str, *, folder: str = _FOLDER, last: str = ""
) -> str:
    """The script that starts the agent as root. It ends at once, since services wait for scripts.
    `programs` are the folders of the service's own Jupyter, as for `PATH`. `folder` is the agent's
    folder, on the disk for the work. `last` is a shell command that runs once the agent has ended.
    """
    values = {**request.entry.environment, RANK: str(request.rank)}
    lines = [f"{name}={shlex.quote(text)}\nexport {name}" for name, text in values.items()]
    command = shlex.join(request.entry.command)
    if last:
        command = shlex.join(["/bin/sh", "-c", f"{command}; {last}"])
    return "\n".join(
        [
            "#!/bin/sh",
            *lines,
            f'CAVVY_FOLDER="${{CAVVY_FOLDER:-{folder}}}"\nexport CAVVY_FOLDER',
            f'PATH="$PATH:{programs}"\nexport PATH',
            f'setsid nohup {command} </dev/null >"$CAVVY_FOLDER.log" 2>&1 &',
            "",
        ]
    )
