"""Runs a whole Kubernetes cluster below one folder, as the first process of a process namespace of
its own.

    python keeper.py CONFIG.json

Every process, mount and network namespace of the cluster ends with this process, however that ends,
because the kernel ends the namespace. It reads commands from standard input (`kill-node 2`,
`start-node 2`), answers each with a line, and leaves at the end of the input. Nodes have a network
of their own each; the API server's port is handed to the host's loopback by a forwarder.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

CONTROL = "10.77.0.254"
GROUPS = ("cpu", "cpuacct", "cpuset", "memory", "pids", "devices", "freezer", "blkio", "systemd")
TOO_LATE = 75
PRODUCT = "NVIDIA-H100-80GB-HBM3"

CONTAINERD = """
version = 2
root = "{folder}/ctd/root"
state = "{folder}/ctd/state"
disabled_plugins = [{disabled}]
[grpc]
  address = "{folder}/ctd/c.sock"
[ttrpc]
  address = "{folder}/ctd/t.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  disable_apparmor = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/net.d"
"""
KUBELET = """
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 0.0.0.0
readOnlyPort: 0
cgroupDriver: cgroupfs
cgroupRoot: /{group}
enforceNodeAllocatable: []
failSwapOn: false
oomScoreAdj: 0
authentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}
authorization: {{mode: AlwaysAllow}}
nodeStatusUpdateFrequency: 2s
nodeLeaseDurationSeconds: 10
evictionHard: {{memory.available: "50Mi", nodefs.available: "0.1%", imagefs.available: "0.1%"}}
imageGCHighThresholdPercent: 100
makeIPTablesUtilChains: false
"""


class Keeper:
    def __init__(self, config):
        self.root = Path(config["folder"])
        self.bin = config["bin"]
        self.images = config["images"]
        self.python = config["python"]
        self.plugin = config["plugin"]
        self.port = config["fd"]
        self.group = config["group"]
        self.nodes = config["nodes"]
        self.step_s = config["step_s"]
        self.processes = {}
        self.lock = threading.Lock()

    def up(self):
        for name in ("log", "pki", "etcd"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        shell(
            "mount -t tmpfs tmpfs /run && mkdir -p /run/netns && ip netns add cp && ip -n cp link "
            "set lo up"
        )
        shell(f"ip -n cp link add br0 type bridge && ip -n cp addr add {CONTROL}/24 dev br0")
        shell("ip -n cp link set br0 up")
        shell("ip netns exec cp sysctl -qw net.ipv4.ip_forward=1")
        self.make_keys()
        self.start_control()
        threads = [
            threading.Thread(target=self.start_node, args=(number,))
            for number in range(1, self.nodes + 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def make_keys(self):
        key = self.root / "pki/sa.key"
        shell(
            f"openssl genrsa -out {key} 2048 && openssl rsa -in {key} -pubout -out "
            f"{key.with_name('sa.pub')}"
        )
        (self.root / "pki/tokens.csv").write_text(
            "admin-token,admin,1,system:masters\nviewer-token,viewer,2\n"
        )
        server = (
            f"{{name: c, cluster: {{server: 'https://{CONTROL}:6443', "
            f"insecure-skip-tls-verify: true}}}}"
        )
        (self.root / "kubeconfig").write_text(
            f"{{apiVersion: v1, kind: Config, clusters: [{server}], users: [{{name: u, user: "
            f"{{token: admin-token}}}}],"
            " contexts: [{name: x, context: {cluster: c, user: u}}], current-context: x}"
        )

    def start_control(self):
        pki, etcd = self.root / "pki", "http://127.0.0.1:2379"
        self.start(
            "etcd",
            "cp",
            "etcd",
            f"--data-dir={self.root}/etcd",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
        )
        self.start(
            "apiserver",
            "cp",
            f"{self.bin}/kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=0.0.0.0",
            f"--advertise-address={CONTROL}",
            "--secure-port=6443",
            f"--cert-dir={pki}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki}/sa.pub",
            f"--service-account-signing-key-file={pki}/sa.key",
            f"--token-auth-file={pki}/tokens.csv",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
            "--watch-cache=true",
        )
        here = Path(__file__).with_name("forward.py")
        self.start(
            "forward",
            "cp",
            sys.executable,
            str(here),
            str(self.port),
            CONTROL,
            "6443",
            keep=(self.port,),
        )
        self.until(
            lambda: self.run("cp", "curl", "-sk", "https://127.0.0.1:6443/readyz") == "ok",
            "the API server",
        )
        common = (f"--kubeconfig={self.root}/kubeconfig", "--bind-address=127.0.0.1", "--port=0")
        common += ("--leader-elect=false",)
        self.start("scheduler", "cp", f"{self.bin}/kube-scheduler", *common, f"--cert-dir={pki}")
        self.start(
            "controllers",
            "cp",
            f"{self.bin}/kube-controller-manager",
            *common,
            f"--cert-dir={pki}",
            f"--service-account-private-key-file={pki}/sa.key",
            f"--root-ca-file={pki}/apiserver.crt",  # by which pods trust the API server
            "--node-monitor-grace-period=8s",
            "--node-monitor-period=1s",
            "--controllers=*,bootstrapsigner,tokencleaner",
        )

    def start_node(self, number):
        folder, space = self.root / f"n{number}", f"n{number}"
        for name in ("ctd", "net.d", "kubelet", "varlib"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        with self.lock:
            if not os.path.exists(f"/run/netns/{space}"):
                self.make_network(number, space)
            self.make_groups(number)
        disabled = ",".join(
            f'"io.containerd.snapshotter.v1.{name}"'
            for name in ("btrfs", "zfs", "devmapper", "aufs")
        )
        (folder / "ctd/config.toml").write_text(CONTAINERD.format(folder=folder, disabled=disabled))
        network = {
            "cniVersion": "0.3.1",
            "name": space,
            "plugins": [
                {
                    "type": "ptp",
                    "ipMasq": False,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": f"{folder}/ipam",
                        "ranges": [[{"subnet": f"10.244.{number}.0/24"}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
        (folder / "net.d/10.conflist").write_text(json.dumps(network))
        address = f"{folder}/ctd/c.sock"
        for path in (Path(address), folder / "varlib/device-plugins/kubelet.sock"):
            path.unlink(missing_ok=True)
        # What a kubelet mounts its containerd must see, and no other node.
        own = f"mkdir -p /var/lib/kubelet && mount --bind {folder}/varlib /var/lib/kubelet && exec "
        run = f"containerd --config {folder}/ctd/config.toml"
        self.start(
            f"containerd{number}",
            space,
            "unshare",
            "-m",
            "--propagation",
            "slave",
            "sh",
            "-c",
            own + run,
        )
        self.until(lambda: os.path.exists(address), "containerd")
        for image in self.images:
            shell(f"ctr -a {address} -n k8s.io images import {image}", tries=20)
        (folder / "kubelet.yaml").write_text(KUBELET.format(group=f"{self.group}{number}"))
        near = f"--target={self.processes[f'containerd{number}'].pid}"
        self.start(
            f"kubelet{number}",
            space,
            "nsenter",
            near,
            "--mount",
            f"{self.bin}/kubelet",
            f"--config={folder}/kubelet.yaml",
            f"--kubeconfig={self.root}/kubeconfig",
            f"--root-dir={folder}/kubelet",
            f"--cert-dir={folder}/kubelet/pki",
            "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{address}",
            f"--hostname-override=n{number}",
            f"--node-ip=10.77.0.{number}",
            f"--node-labels=nvidia.com/gpu.product={PRODUCT}",
        )
        self.until(
            lambda: os.path.exists(f"{folder}/varlib/device-plugins/kubelet.sock"), "a kubelet"
        )
        self.start(
            f"plugin{number}",
            space,
            self.python,
            self.plugin,
            f"{folder}/varlib/device-plugins",
            "8",
        )

    def make_network(self, number, space):
        shell(
            f"ip netns add {space} && ip -n {space} link set lo up && "
            f"ip link add kv{number} netns cp type veth peer name eth0 netns {space} && "
            f"ip -n cp link set kv{number} master br0 up && ip -n {space} addr add "
            f"10.77.0.{number}/24 dev eth0 && "
            f"ip -n {space} link set eth0 up && ip -n {space} route add default via {CONTROL} && "
            f"ip -n cp route add 10.244.{number}.0/24 via 10.77.0.{number} && "
            f"ip netns exec {space} sysctl -qw net.ipv4.ip_forward=1"
        )

    def make_groups(self, number):
        for group in GROUPS:
            os.makedirs(f"/sys/fs/cgroup/{group}/{self.group}{number}", exist_ok=True)
        for name in ("cpus", "mems"):
            text = Path(f"/sys/fs/cgroup/cpuset/cpuset.{name}").read_text()
            Path(f"/sys/fs/cgroup/cpuset/{self.group}{number}/cpuset.{name}").write_text(text)

    def kill_node(self, number):
        """The death of a node: all of its processes, at once and without a word."""
        for name in ("kubelet", "containerd", "plugin"):
            self.processes.pop(f"{name}{number}").kill()
        words, group = f"{self.root}/n{number}/".encode(), f"/{self.group}{number}/".encode()
        for _ in range(3):
            for entry in os.listdir("/proc"):
                if entry.isdigit() and int(entry) != os.getpid():
                    try:
                        line = Path(f"/proc/{entry}/cmdline").read_bytes()
                        if words in line or group in Path(f"/proc/{entry}/cgroup").read_bytes():
                            os.kill(int(entry), signal.SIGKILL)
                    except OSError:
                        continue

    def start(self, name, space, *command, keep=()):
        with open(self.root / "log" / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{space}", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=keep,
            )

    def run(self, space, *command):
        return subprocess.run(
            ["nsenter", f"--net=/run/netns/{space}", *command],
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout

    def until(self, true, what):
        give_up = time.monotonic() + self.step_s
        while not true():
            if time.monotonic() > give_up:
                print(f"{what} did not come up within {self.step_s:.0f} s", file=sys.stderr)
                os._exit(TOO_LATE)  # from any thread
            time.sleep(0.05)


def shell(command, tries=1):
    for left in range(tries, 0, -1):
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=600)
        if done.returncode == 0:
            return
        if left > 1:
            time.sleep(0.2)
    raise RuntimeError(f"{command}: {done.stderr.strip()}")


def main(path):
    keeper = Keeper(json.loads(Path(path).read_text()))
    keeper.up()
    print("up", flush=True)
    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        {"kill-node": keeper.kill_node, "start-node": keeper.start_node}[word](int(number))
        print("done", flush=True)


def reap(number, frame):
    """Containers' shims are orphans that become ours."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


if __name__ == "__main__":
    main(sys.argv[1])
