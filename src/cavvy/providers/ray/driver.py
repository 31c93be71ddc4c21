"""The driver of a gang's Ray job: reserves all nodes or none, and starts an actor on each node to
supervise the agent.

The cluster's own Python runs this program. The entrypoint in `entry.py` defines `PLAN` and starts
this program. The driver prints one event per line, as `cavvy ` followed by JSON, and the provider
reads these lines from the job's log.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LOOK_S = 0.2
DRAIN_S = 1.0  # interval between checks for nodes that are being drained
BEAT_S = 30.0  # maximum interval between checks of the control plane
# values of NodeDeathInfo.Reason that mean that the node ended in order and was not lost
ENDINGS = {
    1: "the node was shut down",
    3: "the node was preempted",
    4: "the node was removed because it was idle",
}
UNSURE = getattr(ray.exceptions, "ActorUnavailableError", ())


def say(event: str, **more: Any) -> None:
    print(
        "cavvy " + json.dumps(dict(more, event=event, at=time.time()), sort_keys=True), flush=True
    )


def tell_amount(resource: str, amount: float) -> str:
    """Return an amount of a resource for users. Ray counts memory in bytes."""
    return f"memory {amount / 2**30:g} GiB" if resource == "memory" else f"{resource} {amount:g}"


class NodeActor:
    """The Ray actor that starts the agent's supervisor on one node. The supervisor continues if the
    actor's process dies, so that the work can still shut down properly.
    """

    def __init__(self, rank: int, plan: dict[str, Any]) -> None:
        self.rank, self.plan = rank, plan
        self.process: Any = None
        self.told: dict[str, dict[str, Any]] = {}
        self.locks = {"begin": threading.Lock(), "wait": threading.Lock()}

    def call(self, what: str) -> dict[str, Any]:
        """Execute the operation `what`, "begin" or "wait", for the driver, and return the reply. If
        the driver repeats the call because the reply was lost, return the earlier reply.
        """
        with self.locks[what]:
            if what not in self.told:
                self.told[what] = self.begin() if what == "begin" else self.read()
            return self.told[what]

    def begin(self) -> dict[str, Any]:
        """Start the supervisor. Returns once the agent is running."""
        address = ray.util.get_node_ip_address()
        boot = dict(self.plan["boot"], python=sys.executable, rank=self.rank)
        boot["config"] = dict(boot["config"], rank=self.rank, token=self.plan["tokens"][self.rank])
        boot["config"].update(self.devices(), node_address=address)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", self.plan["hold"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.process.stdin.write(json.dumps(boot).encode() + b"\n")
        self.process.stdin.flush()
        told = self.read()
        told.update(node=ray.get_runtime_context().get_node_id(), address=address)
        return told

    def stop(self) -> None:
        """Order the agent to exit."""
        try:
            self.process.stdin.write(b"stop\n")
            self.process.stdin.flush()
        except (AttributeError, OSError):
            return

    def read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        told: dict[str, Any] = (
            json.loads(line) if line else {"failed": "the rank's agent supervisor has exited"}
        )
        return told

    def devices(self) -> dict[str, Any]:
        """Return the agent's settings for the accelerators that Ray has assigned to this
        process."""
        resource = self.plan["resource"]
        if not resource:
            return {"devices": []}
        found = ray.get_runtime_context().get_accelerator_ids().get(resource) or []
        ids = [str(each) for each in found]
        if not ids:
            return {}
        indices = [int(each) for each in ids] if all(each.isdigit() for each in ids) else []
        return {"devices": ids, "device_indices": indices, "vendor": self.plan["vendor"]}


class ControlPlaneProbe:
    """Checks whether the control plane answers. The control plane counts as lost if it has answered
    no request for `patience_s` seconds. `patience_s` is the length of the lease plus a grace period
    and a reserve.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        config = plan["boot"]["config"]
        self.url = urlsplit(config["address"])
        self.pin = config["pin"]
        self.patience_s = config["lease_s"] + config["grace_s"] + plan["reserve_s"]
        self.heard = self.asked = time.monotonic()

    def lost(self) -> bool:
        now = time.monotonic()
        if now - self.asked >= min(BEAT_S, self.patience_s / 4):
            self.asked = now
            if self.answers():
                self.heard = time.monotonic()
        return bool(time.monotonic() - self.heard > self.patience_s)

    def answers(self) -> bool:
        context = ssl.SSLContext(
            ssl.PROTOCOL_TLS_CLIENT
        )  # without CA certificates, because the certificate is checked by its hash
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        try:
            plain = socket.create_connection((self.url.hostname, self.url.port or 443), timeout=5)
            with plain, context.wrap_socket(plain) as line:
                seen = hashlib.sha256(line.getpeercert(True) or b"").hexdigest()
        except OSError:
            return False
        return bool(seen == self.pin)


class RayGang:
    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.control = ControlPlaneProbe(plan)
        self.stopped = False
        self.asked = False  # True: the actors have been asked to end their agents
        self.until = 0.0  # the time when the driver stops waiting for agents
        self.actors: list[Any] = []
        self.nodes: dict[int, str] = {}  # rank -> id of its node
        self.draining: set[str] = set()
        self.looked = 0.0

    def run(self) -> int:
        group = self.reserve()
        if group is None:
            return 0 if self.stopped else 3
        try:
            self.actor(group)
            self.hold()
        finally:
            for actor in self.actors:
                ray.kill(actor)
            remove_placement_group(group)
        return 0

    def reserve(self) -> Any:
        """Reserve all nodes and return the placement group, or return None if the nodes are not
        available.
        """
        options = {}
        if self.plan["selector"]:
            options["bundle_label_selector"] = [self.plan["selector"]] * self.plan["nodes"]
        group = placement_group(
            [self.plan["bundle"]] * self.plan["nodes"],
            strategy=self.plan["strategy"],
            name=self.plan["name"],
            **options,
        )
        until = time.monotonic() + self.plan["wait_s"] if self.plan["wait_s"] is not None else None
        told = False
        while not group.wait(LOOK_S):
            if (
                self.stopped
                or self.control.lost()
                or (until is not None and time.monotonic() > until)
            ):
                remove_placement_group(group)
                if not self.stopped:
                    say("refused", why="the nodes are no longer free")
                return None
            if not told:
                told = True
                needs = ", ".join(tell_amount(*each) for each in self.plan["bundle"].items())
                count = self.plan["nodes"]
                say("waits", why=f"Ray has not placed all {count} nodes yet; each needs {needs}")
        say("placed")
        return group

    def actor(self, group: Any) -> None:
        bundle = dict(self.plan["bundle"])
        options = {
            "num_cpus": bundle.pop("CPU", 0),
            "num_gpus": bundle.pop("GPU", 0),
            "memory": bundle.pop("memory", None),
        }
        kind = ray.remote(NodeActor)
        for rank in range(self.plan["nodes"]):
            self.actors.append(
                kind.options(
                    name=f"{self.plan['name']}/{rank}",
                    resources=bundle,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
                    max_concurrency=3,
                    max_restarts=0,
                    **options,
                ).remote(rank, dict(self.plan, tokens={rank: self.plan["tokens"][rank]}))
            )

    def hold(self) -> None:
        """Wait until all agents have exited, or until the time limit for the agents' exit has
        passed.
        """
        waiting = {
            actor.call.remote("begin"): (rank, "begin") for rank, actor in enumerate(self.actors)
        }
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=LOOK_S)
            for reference in done:
                rank, what = waiting.pop(reference)
                following = self.learn(rank, what, reference)
                if following:
                    waiting[self.actors[rank].call.remote(following)] = (rank, following)
            self.look()
            if self.asked and time.monotonic() > self.until:
                return

    def learn(self, rank: int, what: str, reference: Any) -> str:
        """Handle the result of an actor's call. Return the next call for the actor, or "" if no
        call remains.
        """
        try:
            told = ray.get(reference)
        except UNSURE:  # the connection broke, and Ray does not know yet whether the actor is dead
            time.sleep(LOOK_S)
            return what
        except ray.exceptions.RayError as error:
            self.lose(rank, error)
            return ""
        if "failed" in told:
            say("ended", rank=rank, reason=told["failed"], node=told.get("node", ""))
        elif what == "begin":
            self.nodes[rank] = told["node"]
            say("up", rank=rank, node=told["node"], address=told["address"])
            return "wait"
        else:
            say("ended", rank=rank, code=told["code"], exit=told["exit"], said=told["said"])
        return ""

    def lose(self, rank: int, error: Any) -> None:
        node = self.nodes.get(rank, "")
        found = {each["NodeID"]: each for each in ray.nodes()}.get(node, {})
        how = ENDINGS.get(found.get("DeathReason", 0), "") if not found.get("Alive", True) else ""
        taken = bool(how) or (node in self.draining and not found.get("Alive", True))
        if taken:
            reason = "Ray reclaimed the node: " + (how or "the node was drained")
        elif not found.get("Alive", True):
            reason = "the node is lost: " + (found.get("DeathReasonMessage") or "the node is dead")
        else:
            reason = "the rank's Ray actor died: " + str(error).strip().splitlines()[0][:300]
        say("lost", rank=rank, reason=reason, preempted=taken)

    def look(self) -> None:
        """Check for drained nodes and a lost control plane, and stop the affected agents."""
        if not self.asked and (self.stopped or self.control.lost()):
            lost = "the control plane did not answer for too long"
            say(
                "leaves",
                why="a stop of the job was requested" if self.stopped else lost,
                lost=not self.stopped,
            )
            self.asked = True
            self.until = time.monotonic() + self.plan["grace_s"] + self.plan["reserve_s"]
            for actor in self.actors:
                actor.stop.remote()
        if time.monotonic() - self.looked < DRAIN_S:
            return
        self.looked = time.monotonic()
        for node in find_draining():
            if node in self.nodes.values() and node not in self.draining:
                self.draining.add(node)
                for rank, each in self.nodes.items():
                    if each == node:
                        say("drained", rank=rank)
                        self.actors[rank].stop.remote()


def find_draining() -> list[str]:
    """Return the ids of the nodes that are being drained, or [] if this version of Ray does not
    report them.
    """
    try:
        return list(ray._private.worker.global_worker.gcs_client.get_draining_nodes())
    except (AttributeError, ray.exceptions.RayError):
        return []


def make_plain() -> None:
    """Configure Ray to start actors without the job's runtime environment. Ray keeps idle workers
    only for actors without a runtime environment, so these actors start faster than other actors.
    """
    try:
        config = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    except (KeyError, ValueError):
        return
    os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps(dict(config, runtime_env={}))


def main(plan: dict[str, Any]) -> int:
    gang = RayGang(plan)
    make_plain()
    ray.init(
        address="auto", namespace=plan["namespace"], log_to_driver=False, logging_level="warning"
    )
    signal.signal(signal.SIGTERM, lambda number, frame: setattr(gang, "stopped", True))
    say("began", python=sys.version.split()[0], ray=ray.__version__, pid=os.getpid())
    return gang.run()


if __name__ == "__main__":
    sys.exit(main(globals()["PLAN"]))
