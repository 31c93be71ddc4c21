"""Which engine serves the files of a job, and the file of the service."""

import pytest

from cavvy.spec import SpecError
from cavvy.spec.model_files import ServedModel, find_models, write_service
from cavvy.task_files import parse_file

JOB = """\
name: train
params: {lr: 0.1, size: big}
resources: {gpu: L4, spot: only}
nodes: 2
setup: pip install -r ${{params.size}}.txt
env: {PY: 3.10, NO: no}
checkpoint: {path: state, every: 5m}
outputs: [{source: out, target: s3://bucket/out/}]
limits: {duration: 1h}
run: python train.py --lr ${{params.lr}}
"""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["out/config.json", "out/model.safetensors", "log.txt"], [("vllm", "out")]),
        (["config.json", "pytorch_model.bin"], [("vllm", "")]),
        (["config.json", "weights.pt"], []),
        (
            ["a/b/model.onnx", "model.onnx"],
            [
                ("onnxruntime", "model.onnx"),
                ("onnxruntime", "a/b/model.onnx"),
            ],
        ),
        (["q4.gguf"], [("llama.cpp", "q4.gguf")]),
        (["repo/digits/config.pbtxt", "repo/digits/1/model.onnx"], [("triton", "repo")]),
        (["digits/config.pbtxt", "digits/1/model.onnx"], [("triton", "")]),
    ],
)
def test_files_tell_the_engine(files: list[str], expected: list[tuple[str, str]]) -> None:
    assert [(each.engine, each.path) for each in find_models(files)] == expected


def test_a_service_keeps_what_its_program_needs_of_the_job() -> None:
    text = write_service(JOB, "chat", ServedModel(engine="vllm", path="out"))
    (task,) = parse_file(text, params={"size": "small"}).tasks
    assert task.name == "chat"
    assert " vllm serve ./model/out " in task.run
    assert (task.setup, task.env) == ("pip install -r small.txt", {"PY": "3.10", "NO": "no"})
    assert (task.nodes, task.checkpoint, task.outputs, task.limits.duration) == (1, None, (), None)
    assert task.resources.accelerators[0].name == "L4"
    assert task.service is not None
    assert task.service.models == ("chat",)
    assert task.workdir is not None


def test_outputs_of_the_job_are_inputs_of_the_service() -> None:
    model = ServedModel(engine="llama.cpp", path="q4.gguf")
    (task,) = parse_file(write_service(JOB, "chat", model, ["s3://bucket/out/"])).tasks
    assert [(each.source, each.target) for each in task.inputs] == [("s3://bucket/out/", "model")]
    assert "--model ./model/q4.gguf" in task.run


def test_a_text_that_is_no_table_is_refused() -> None:
    with pytest.raises(SpecError):
        write_service("[1", "chat", ServedModel(engine="vllm", path=""))
