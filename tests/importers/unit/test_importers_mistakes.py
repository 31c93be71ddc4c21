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
    *("--nodes=3-2", "--gpus-per-node=a100:x:y", "--hold", "--input=f", "--export=1A=2", "a.py"),
)
PBS = (
    *("-l walltime=soon", "-l select=0", "-l mem=lots", "-J 5", "-Z", "-l select=1:ncpus=x", "-N"),
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
    *("stop_grace_period: 90", "gpus: [{driver: fpga}]", "network_mode: service:db"),
)
FILES = [
    *(("job.sbatch", f"#!/bin/bash\n#SBATCH {line}\ntrue\n") for line in SLURM),
    *(("job.pbs", f"#!/bin/bash\n#PBS {line}\ntrue\n") for line in PBS),
    *(("job.yaml", JOB % parts) for parts in KUBERNETES),
    *(("compose.yaml", f"services:\n  web:\n    image: nginx\n    {each}\n") for each in COMPOSE),
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
