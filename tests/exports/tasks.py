"""Tasks for the tests of exports, and the way that the command reads them."""

from pathlib import Path

from click.testing import CliRunner, Result

from cavvy.cli.main import cli

# A task that uses most keys.
FULL = """
name: train-1
setup: echo set up > setup.txt
run: |
  printf '%s\\n' "rank $NODE_RANK of $NNODES" "at $MASTER_ADDR:$MASTER_PORT" "$CAVVY_HOSTS" \\
    "lr ${{ params.lr }} $CAVVY_PARAM_LR" "$NPROC_PER_NODE GPUs" 'a\\b "c" $d' "$GREETING"
  cat setup.txt
params: {lr: 0.1, flag: true}
nodes: 2
image: 000000000000.dkr.ecr.us-east-1.amazonaws.com/pytorch:2
workdir: .
env: {GREETING: "hello 'you'"}
resources: {gpu: "A100:8", spot: auto}
inputs: [{source: "s3://data/imagenet/", target: data}]
outputs: [{source: model, target: "s3://models/run"}]
checkpoint: checkpoints
limits: {duration: 2h, deadline: 5h, budget: 100}
tags: {team: vision}
secrets: [HF_TOKEN]
"""


def export(name: str, text: str, folder: Path) -> Result:
    """The result of `cavvy export` for the text of a task file."""
    file = folder / "task.yaml"
    file.write_text(text)
    return CliRunner().invoke(cli, ["export", name, str(file)])
