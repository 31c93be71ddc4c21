"""What a model can reach while `cavvy model publish` converts it."""

import os
from pathlib import Path
from typing import Any

import pytest

from cavvy.cli.model import _copy
from cavvy.cli.reach import conversion
from cavvy.cli.view.failure import CommandFailure
from cavvy.edge import confine


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.skipif(not confine.is_able(), reason="needs Landlock (Linux 5.13)")
def test_a_hostile_model_writes_and_reads_nothing_of_the_user(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    numpy: Any = pytest.importorskip("numpy")
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    home, folder = tmp_path / "home", tmp_path / "model"
    home.mkdir()
    folder.mkdir()
    secret, written = home / "secret", home / "written"
    secret.write_bytes(b"\x00\x00\x80\x3f" * 4)
    samples = tmp_path / "set.npz"
    numpy.savez(samples, x=numpy.ones((4, 3), "float32"))
    body = {
        "write": f'torch.save(x, "{written}")\n        return x * 2',
        "read": f'return x + torch.from_file("{secret}", False, 4).sum()',
        "none": "return x * 2",
    }
    for name, lines in body.items():
        source = tmp_path / f"{name}_model.py"
        source.write_text(
            "import torch\n\n\nclass Model(torch.nn.Module):\n"
            f"    def forward(self, x):\n        {lines}\n"
        )
        space: dict[str, Any] = {"__name__": f"{name}_model", "__file__": str(source)}
        exec(compile(source.read_text(), str(source), "exec"), space)
        torch.jit.script(space["Model"]()).save(str(folder / f"{name}.pt"))
    target = folder / "made.onnx"
    assert conversion.convert_confined(folder / "none.pt", "onnx", target, samples)["compared"] == 4
    assert target.is_file()
    for name in ("write", "read"):
        made = folder / f"{name}.onnx"
        try:
            conversion.convert_confined(folder / f"{name}.pt", "onnx", made, samples)
        except CommandFailure:
            continue
        # ONNX has no operation for what the model asks, so the exporter may leave it out
        assert name == "write"
    assert not written.exists()
    assert sorted(os.listdir(home)) == ["secret"]


def test_a_machine_that_cannot_confine_runs_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confine, "is_able", lambda: False)
    with pytest.raises(CommandFailure, match="cannot confine") as refused:
        conversion.convert_confined(tmp_path / "m.pt", "onnx", tmp_path / "m.onnx", None)
    assert "in a job" in refused.value.hint


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder", "nothing"])
def test_only_a_plain_file_is_taken_from_a_conversion(tmp_path: Path, kind: str) -> None:
    secret, made, target = tmp_path / "secret", tmp_path / "made", tmp_path / "target"
    secret.write_text("secret")
    if kind == "link":
        made.symlink_to(secret)
    elif kind == "hard link":
        made.hardlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(made)
    elif kind == "folder":
        made.mkdir()
    with pytest.raises(CommandFailure):
        conversion._take(made, target)
    assert not target.exists()


@pytest.mark.parametrize("said", ["", "[]", "null", '{"a": "x"}', "[" * 100_000, '{"a": {}}'])
def test_figures_of_a_hostile_model_are_refused(said: str) -> None:
    with pytest.raises(CommandFailure, match="figures"):
        conversion._read_figures(said)


def test_a_published_folder_does_not_follow_links_out_of_it(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (tmp_path / "id_ed25519").write_text("key")
    (source / "weights").write_text("w")
    (source / "inside").symlink_to("weights")
    _copy(source, tmp_path / "good")
    (source / "deep").mkdir()
    (source / "deep" / "data").symlink_to("../../id_ed25519")
    with pytest.raises(CommandFailure, match="leads out of the folder"):
        _copy(source, tmp_path / "bad")
