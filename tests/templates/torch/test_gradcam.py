"""The template gradcam: Grad-CAM++ as in its paper, on a network whose maps are known."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import cavvy


@pytest.fixture(scope="module")
def gradcam() -> ModuleType:
    pytest.importorskip("sklearn", reason="the template gradcam needs scikit-learn")
    pytest.importorskip("PIL", reason="the template gradcam needs Pillow")
    path = Path(cavvy.__file__).parent / "capabilities/templates/gradcam/train.py"
    spec = importlib.util.spec_from_file_location("gradcam_template", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Weighted(nn.Module):
    """Two channels of features, and scores that weight each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU())
        self.weights = nn.Parameter(torch.randn(3, 2, 4, 4) / 10)

    def score(self, seen: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bchw,lchw->bl", seen, self.weights)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.score(self.features(images))


def differentiate(model: Weighted, seen: torch.Tensor, label: int) -> list[torch.Tensor]:
    """The first three derivatives of the exponential of a score by each value of the features."""
    found = [torch.zeros_like(seen) for _ in range(3)]
    for at in range(seen.numel()):
        value = seen.reshape(-1)[at].clone().requires_grad_()
        rest = seen.reshape(-1).clone()
        rest[at] = 0
        whole = rest + value * nn.functional.one_hot(torch.tensor(at), seen.numel())
        slope = model.score(whole.view(1, *seen.shape))[0, label].exp()
        for derivative in found:
            (slope,) = torch.autograd.grad(slope, value, create_graph=True)
            derivative.view(-1)[at] = slope.detach()
    return found


def test_grad_cam_plus_plus_weights_gradients_by_the_derivatives_of_its_paper(
    gradcam: ModuleType,
) -> None:
    torch.manual_seed(0)
    model, image = Weighted(), torch.randn(3, 4, 4)
    seen = model.features(image[None])[0].detach()
    first, second, third = differentiate(model, seen, label=1)
    share = second / (2 * second + seen.sum((1, 2), keepdim=True) * third)
    weights = (share * first.relu()).sum((1, 2), keepdim=True)
    expected = (weights * seen).sum(0).relu()
    heat = gradcam.heat_map(model, model.features, image, "grad-cam++", label=1)
    torch.testing.assert_close(heat, expected / expected.max(), rtol=1e-4, atol=1e-5)


def test_a_pixel_without_a_gradient_has_no_share(gradcam: ModuleType) -> None:
    seen, slope = torch.ones(1, 1, 3), torch.tensor([[[0.0, 1.0, -1.0]]])
    # 1 / (2 + 3) and 1 / (2 - 3), because the sum of the channel is 3
    assert gradcam._share_evidence(seen, slope).tolist() == [[[0.0, pytest.approx(0.2), -1.0]]]
