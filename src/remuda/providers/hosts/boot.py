"""The POSIX-shell script that makes a node out of any machine that can reach the control plane; see `Outside`.

The script holds no secret but the claim token in the agent's configuration, which is good for one claim.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from remuda.providers.base import Outside
from remuda.providers.hosts.configs import AgentConfig

_SCRIPT = Path(__file__).with_name("boot.sh")


def make_preamble(outside: Outside, folder: str) -> str:
    """Functions and addresses; blocks for seconds when it packs a Python for the first time.

    `folder` is expanded by the shell within double quotes. Afterwards `remuda_start` has made it and set
    `$REMUDA_PYTHON`, and `remuda_fetch HASH NAME` brings a file into it.
    """
    cases = "".join(f"    {shlex.quote(name)}) echo {digest} ;;\n" for name, digest in outside.pythons().items())
    lines = [
        f"REMUDA_ADDRESS={shlex.quote(outside.address)}",
        f"REMUDA_PIN={outside.pin}",
        f'REMUDA_FOLDER="{folder}"',
        f'remuda_brought() {{ # which Python is for "`uname -s` `uname -m`"\n  case $1 in\n{cases}  esac\n}}',
    ]
    return "\n".join([_SCRIPT.read_text(), *lines, ""])


def make_boot_script(
    outside: Outside, configs: Sequence[AgentConfig], *, rank: str = "echo 0", folder: str = "/var/lib/remuda"
) -> str:
    """A whole script, as user data takes it: it runs one rank's agent to its end and leaves with its exit code.

    `configs` are by rank, as `make_config` gives them; `rank` is shell code that prints which of them is this node's.
    """
    branches = ""
    for config in configs:
        text = msgspec.json.encode(_of_whole_node(config)).decode()
        branches += f"  {config.rank}) cat > \"$config\" <<'REMUDA_CONFIG'\n{text}\nREMUDA_CONFIG\n    ;;\n"
    agent = outside.agent()
    return f"""#!/bin/sh
{make_preamble(outside, folder)}
remuda_start || exit 1
remuda_fetch {agent} {agent}.pyz || exit 1
rank=$({rank})
config=$REMUDA_FOLDER/config-$rank.json
case $rank in
{branches}  *) remuda_say "no rank $rank is wanted here"; exit 1 ;;
esac
exec $REMUDA_PYTHON -I -S "$REMUDA_FOLDER/{agent}.pyz" "$config"
"""


def _of_whole_node(config: AgentConfig) -> dict[str, object]:
    """Without the devices, which means all of the node's."""
    fields: dict[str, object] = msgspec.to_builtins(config)
    return {name: value for name, value in fields.items() if name not in ("devices", "device_indices")}


def make_config(
    outside: Outside, gang: str, rank: int, *, lease_s: float, grace_s: float, folder: str = "/var/lib/remuda"
) -> AgentConfig:
    """The configuration of a node that holds one rank and nothing else; its token is good for one claim."""
    return AgentConfig(
        gang=gang,
        rank=rank,
        address=outside.address,
        pin=outside.pin,
        token=outside.claim_token(gang, rank),
        home=f"{folder}/{gang}/{rank}",
        cache=f"{folder}/cache",
        lease_s=lease_s,
        grace_s=grace_s,
    )
