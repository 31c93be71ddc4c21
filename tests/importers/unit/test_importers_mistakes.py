"""Mistakes in files of other tools, each of which is named with its line and with what to do."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from cavvy.spec import SpecError
from cavvy.spec.problems import SpecProblem
from cavvy.spec.translation import KeptKey
from cavvy.task_files import load_file

SLURM = (
    *("--time=1:99:00:00:0", "--mem=12X", "--array=", "--array=5-1", "--nodes=0", "--ntasks=-1"),
    *("--gres=gpu:a100:4\n#SBATCH --gpus=2", "--gres=gpu:a100:1\n#SBATCH --gpus=h100:1"),
    *("--signal=BOOM@1", "--cpus-per-task=two", "--gres=gpu:foo9000:1", "--gres=shard:1"),
    *("--mem=4G\n#SBATCH --mem-per-cpu=1G", "--nope=1", "--chdir=/abs", "--dependency=afterok:1"),
    *("--begin=tomorrow", "--mem-per-gpu=1G", "--cpus-per-gpu=2", "-Z 1", "--job-name", "'open"),
    *("--gres=gpu:", "--gres=gpu:4,gpu:2", "--gres=gpu:h100:4:2", "--exclusive=perhaps"),
    *("--open-mode=write", "--signal=B:@60", "--wrap=ls", "--gpu=1", "--ntasks-per-node=0"),
    *("--array=1,1", "--array=0-2000000", "--export=NONE,=a", "--time=2-", "--output"),
    *("--mem-per-cpu=1G\n#SBATCH --mem-per-gpu=2G", "--begin=now+1hour", "--dependency=after"),
    *("--gpus-per-node=4\n#SBATCH --gpus-per-task=2\n#SBATCH --ntasks=4", "--nodes=two"),
    *("--nodes=3-2", "--gpus-per-node=a100:x:y", "--hold", "--input=f", "--export=1A=2", "a.py"),
)
PBS = (
    *("-l walltime=soon", "-l select=0", "-l mem=lots", "-J 5", "-Z", "-l select=1:ncpus=x", "-N"),
    *("-l select=a", "-l select=1:ncpus", "-j oops", "-l select=1:mem=4Q", "-l ncpus=0", "-q"),
    *("-J 1-0", "-J 0-5:0", "-l nodes=2:ppn=two", "-l walltime=1:2:3:4:5"),
    *("-W depend=afterok:1", "-I", "-l nodes=1:ppn=0", "'open"),
)
JOB = """\
apiVersion: batch/v1
kind: Job
metadata:
  name: a
spec:
%s
  template:
    spec:
%s
      containers:
      - name: main
        image: i
        command: [x]
%s
"""
MOUNT = "        volumeMounts: [{name: v, mountPath: /x}]"
KUBERNETES = (
    ("  completions: 2\n  parallelism: 0", "", ""),
    ("  backoffLimit: -1", "", ""),
    ("  suspend: true", "", ""),
    ("  madeUp: 1", "", ""),
    ("  podFailurePolicy: {rules: [1]}", "", ""),
    ("", "      hostNetwork: true", ""),
    ("", "      volumes: [{name: v, configMap: {name: gone}}]", MOUNT),
    ("", "      volumes: [{name: v, csi: {driver: x}}]", MOUNT),
    ("", "", "        lifecycle: {a: 1}"),
    ("", "", "        resources: {limits: {cpu: many}}"),
    ("", "", "        resources: {limits: {example.com/fpga: 1}}"),
    ("", "", "        env: [{name: A, valueFrom: {fieldRef: {fieldPath: x}}}]"),
    ("", "", "        envFrom: [{configMapRef: {name: gone}}]"),
    ("", "", "      - {name: b, image: c}"),
)
COMPOSE = (
    *("privileged: true", "deploy: {replicas: 3}", "mem_limit: lots", "ports: [http]"),
    *("depends_on: [db]", "volumes: [data:/x]", "env_file: none.env", "comand: x"),
    *("extra_hosts: ['a:b']", "configs: [x]", "secrets: [x]", "restart: perhaps"),
    *("gpus: -1", "ports: ['99999:80']", "ports: ['80:http']", "networks: [gone]", "cpus: lots"),
    *("environment: {A: {b: c}}", "volumes: ['a:b:c:d']", "command: {a: b}", "profiles: [x]"),
    *("depends_on: {web: {condition: service_healthy}}", "env_file: [{path: gone.env}]"),
    *("restart: on-failure:x", "extends: {service: x}", "image: twice"),
    *("stop_grace_period: 90", "gpus: [{driver: fpga}]", "network_mode: service:db"),
)
GPUS = "deploy: {resources: {reservations: {devices: [{capabilities: [gpu], %s}]}}}"
# Kinds, and what is replaced in a Job that is right
RIGHT = JOB % ("  backoffLimit: 0", "      restartPolicy: Never", "")
REPLACED = (
    ("backoffLimit: 0", "backoffLimit: lots"),
    ("backoffLimit: 0", "completions: -1"),
    ("backoffLimit: 0", "activeDeadlineSeconds: soon"),
    ("backoffLimit: 0", "completionMode: Numbered"),
    ("kind: Job", "kind: Jobb"),
    ("batch/v1", "apps/v1"),
    ("name: a", "name: [a]"),
    ("[x]", "x"),
    ("[x]", "[x]\n        env: {A: b}"),
    ("[x]", "[x]\n        env: [{name: A, valueFrom: {configMapKeyRef: {name: m, key: k}}}]"),
    ("[x]", "[x]\n        volumeMounts: [{name: gone, mountPath: /x}]"),
    ("[x]", "[x]\n        resources: {limits: {nvidia.com/gpu: 1.5}}"),
    ("[x]", "[x]\n        resources: {limits: {nvidia.com/gpu: 1, amd.com/gpu: 1}}"),
    ("[x]", "[x]\n        resources: {limits: {memory: 4GB}}"),
    (
        "[x]",
        "[x]\n        resources:\n          limits: {nvidia.com/gpu: 1}\n"
        "          requests: {nvidia.com/gpu: 2}",
    ),
    ("image: i", "imagee: i"),
    ("containers:", "container:"),
    ("Never", "Sometimes"),
    ("Never", "Always"),
)
POD = "{spec: {containers: [{name: m, image: i, command: [x], ports: [{containerPort: 80}]}]}}"
KINDS = (
    ("batch/v1", "CronJob", f"{{schedule: every day, jobTemplate: {{spec: {{template: {POD}}}}}}}"),
    (
        "kubeflow.org/v1",
        "PyTorchJob",
        f"{{pytorchReplicaSpecs: {{Master: {{replicas: 2, template: {POD}}}}}}}",
    ),
    ("kubeflow.org/v1", "PyTorchJob", "{}"),
    ("jobset.x-k8s.io/v1alpha2", "JobSet", "{replicatedJobs: []}"),
    ("ray.io/v1", "RayJob", "{entrypoint: x}"),
    (
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        f"{{leaderWorkerTemplate: {{size: 0, workerTemplate: {POD}}}}}",
    ),
)
FILES = [
    *(("job.sbatch", f"#!/bin/bash\n#SBATCH {line}\ntrue\n") for line in SLURM),
    *(("job.pbs", f"#!/bin/bash\n#PBS {line}\ntrue\n") for line in PBS),
    *(("job.yaml", JOB % parts) for parts in KUBERNETES),
    *(("job.yaml", RIGHT.replace(*parts, 1)) for parts in REPLACED),
    *(
        ("job.yaml", f"apiVersion: {group}\nkind: {kind}\nmetadata: {{name: a}}\nspec: {spec}\n")
        for group, kind, spec in KINDS
    ),
    *(("compose.yaml", f"services:\n  web:\n    image: nginx\n    {each}\n") for each in COMPOSE),
    *(
        ("compose.yaml", f"services:\n  web:\n    image: nginx\n    {GPUS % each}\n")
        for each in ("count: some", "count: 1, device_ids: ['0']", "driver: fpga")
    ),
]


@pytest.mark.parametrize(("name", "text"), FILES)
def test_a_mistake_has_its_line_and_says_what_to_do(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    problems: Sequence[SpecProblem] = ()
    refused: list[KeptKey] = []
    try:
        refused = [each for each in load_file(tmp_path / name).kept if each.refused]
    except SpecError as error:
        problems = error.problems
    assert problems or refused, "the mistake was taken"
    assert all(each.line and (each.expected or each.suggestion) for each in problems), problems
    assert all(each.line > 1 and each.reason for each in refused), refused
