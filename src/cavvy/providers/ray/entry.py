"""Builds the Ray job of a gang. The job's entrypoint contains no secret, because the entrypoint
fetches the driver and the driver's plan from the server.
"""

import json
import shlex
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from cavvy.catalog.accelerators import find_accelerator
from cavvy.domain.values import Struct
from cavvy.providers.base import GangSpec, NodeEndpoint
from cavvy.providers.hosts.userdata import make_config
from cavvy.providers.ray.cluster import MARKET, RayNode, make_bundle

_PROGRAMS = Path(__file__).parent
_TAKES = timedelta(seconds=30)  # time limit for reserving the nodes if gangs may not wait in Ray
RESERVE = timedelta(seconds=15)  # time for the agent's last messages, after the work's grace period
INSTALLATION, GANG, NODES = "cavvy_installation", "cavvy_gang", "cavvy_nodes"
# The entrypoint fetches the plan and checks its hash, so that the source of the plan need not be
# trusted. Then it runs the driver in the plan.
_LINE = """
import hashlib, http.client, json, ssl, sys, time, urllib.request as web
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
opener = web.build_opener(web.ProxyHandler({{}}), web.HTTPSHandler(context=context))
for left in range(29, -1, -1):
    try:
        plan = opener.open({url!r}, timeout=60).read()
        if hashlib.sha256(plan).hexdigest() == {digest!r}: break
        why = "the file has another hash"
    except (OSError, http.client.HTTPException) as error: why = error
    left and time.sleep(2)
else:
    sys.exit("cavvy: the driver cannot be fetched from {address}: %s" % why)
PLAN = json.loads(plan)
exec(compile(PLAN["driver"], "driver.py", "exec"))
"""


class RayOptions(Struct, frozen=True, kw_only=True):
    """The settings that affect jobs."""

    namespace: str
    python: str
    folder: str
    spread: bool
    wait: bool


def job_name(mark: str, gang: str) -> str:
    """Return the submission id of a gang's job. Ray accepts each id once, so a gang is never
    launched twice.
    """
    return f"cavvy-{mark}-{gang}"


def make_job(
    gang: GangSpec,
    mark: str,
    plan: Mapping[str, Any],
    node_endpoint: NodeEndpoint,
    python: str,
) -> Mapping[str, Any]:
    """Return the request that submits the gang's job, whose driver carries out the plan."""
    digest = node_endpoint.publish(json.dumps(plan, sort_keys=True).encode())
    line = _LINE.format(
        url=f"{node_endpoint.address}/boot/v1/{digest}",
        digest=digest,
        address=node_endpoint.address,
    )
    leave_s = int((gang.grace + 2 * RESERVE).total_seconds())
    return {
        "submission_id": job_name(mark, gang.name),
        "entrypoint": f"exec {python} -c {shlex.quote(line)}",
        "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(leave_s)}},
        "metadata": {
            INSTALLATION: mark,
            GANG: gang.name,
            NODES: str(gang.nodes),
            **_plain(gang.labels),
        },
    }


def make_plan(
    gang: GangSpec,
    mark: str,
    node: RayNode,
    node_endpoint: NodeEndpoint,
    options: RayOptions,
    *,
    cache: str,
    mixed: bool,
) -> Mapping[str, Any]:
    """Return the driver's plan, including the source of the driver and of the actor supervisor. The
    first call blocks, because it packs the agent.

    `node` is one of the offer's nodes. `cache` is the name of the project's cache. `mixed` is True
    if only some of the cluster's nodes can be preempted.
    """
    offer = gang.offer
    known = find_accelerator(offer.accelerator) if offer.accelerator else None
    spread = "STRICT_SPREAD" if options.spread else "SPREAD"
    return {
        "driver": (_PROGRAMS / "driver.py").read_text("utf-8"),
        "hold": (_PROGRAMS / "actor_supervisor.py").read_text("utf-8"),
        "name": job_name(mark, gang.name),
        "namespace": options.namespace,
        "nodes": gang.nodes,
        "bundle": make_bundle(offer, node),
        "selector": {MARKET: "spot" if node.spot else "!spot"} if mixed else {},
        "strategy": spread if gang.nodes > 1 else "PACK",
        "resource": node.resource if offer.accelerator_count else "",
        "vendor": known.accelerator.vendor.value if known else "",
        "wait_s": None if options.wait else _TAKES.total_seconds(),
        "grace_s": gang.grace.total_seconds(),
        "reserve_s": RESERVE.total_seconds(),
        "tokens": [node_endpoint.claim_token(gang.name, rank) for rank in range(gang.nodes)],
        "boot": _make_boot(gang, node_endpoint, f"{options.folder}/{mark}", cache),
    }


def _make_boot(
    gang: GangSpec, node_endpoint: NodeEndpoint, folder: str, cache: str
) -> Mapping[str, Any]:
    """Return the data that the actor supervisor needs to start an agent on a node."""
    return {
        "agent": node_endpoint.agent(),
        "folder": folder,
        "leave_s": (gang.grace + RESERVE).total_seconds(),
        "config": {
            **make_config(gang, node_endpoint),
            "own_cache": cache,
            "cpus": gang.offer.vcpus,
            "memory_mib": gang.offer.memory_mib,
            "taken": {"seconds": (gang.grace + RESERVE / 3).total_seconds(), "source": "Ray"},
        },
    }


def _plain(labels: Mapping[str, str]) -> dict[str, str]:
    return {f"cavvy.tag/{name}": value for name, value in labels.items()}
