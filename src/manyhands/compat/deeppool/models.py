"""Models: those that DeepPool's examples train, in plain torch. Counts of parameters are published.

    resnet18(1000)              11,689,512
    vgg16(1000)                138,357,544
    wide_resnet101_2(1000)     126,886,696     WRN-101-2: bottlenecks of twice the width
    wide_resnet(16, 2, 10)         691,674     WRN-16-2, for images of 32 x 32
    gpt(GPT2)                  124,439,808

ResNets and VGG name their parameters as torchvision does, so weights of either fit the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.core.errors import UsageError

_VGG16 = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))  # channels, in widths, of each stage


# -- ResNet -------------------------------------------------------------------------------------


class _Basic(nn.Module):
    """Two convolutions of 3 x 3, and what came in is added."""

    expansion = 1

    def __init__(self, inside: int, width: int, stride: int, factor: int) -> None:
        super().__init__()
        self.conv1 = _conv(inside, width * factor, 3, stride)
        self.bn1 = nn.BatchNorm2d(width * factor)
        self.conv2 = _conv(width * factor, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inside, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class _Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1. The stride is that of the 3 x 3; `factor` widens what is inside."""

    expansion = 4

    def __init__(self, inside: int, width: int, stride: int, factor: int) -> None:
        super().__init__()
        wide, outside = width * factor, width * self.expansion
        self.conv1, self.bn1 = _conv(inside, wide, 1), nn.BatchNorm2d(wide)
        self.conv2, self.bn2 = _conv(wide, wide, 3, stride), nn.BatchNorm2d(wide)
        self.conv3, self.bn3 = _conv(wide, outside, 1), nn.BatchNorm2d(outside)
        self.downsample = _shortcut(inside, outside, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """Four stages of blocks; takes images of 3 colours, of 32 pixels a side or more."""

    def __init__(
        self,
        block: type[_Basic | _Bottleneck],
        depths: Sequence[int],
        num_classes: int,
        *,
        width: int = 64,
        factor: int = 1,
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(3, width, 7, 2), nn.BatchNorm2d(width)
        inside = width
        for number, depth in enumerate(depths):
            wide, blocks = width << number, list[nn.Module]()
            for place in range(depth):
                stride = 2 if number and not place else 1
                blocks.append(block(inside, wide, stride, factor))
                inside = wide * block.expansion
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
        self._stages = [f"layer{number + 1}" for number in range(len(depths))]
        self.fc = nn.Linear(inside, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for name in self._stages:
            x = self.get_submodule(name)(x)
        return self.fc(x.mean((2, 3)))


def resnet18(num_classes: int, *, width: int = 64) -> ResNet:
    """He et al. 2015. `width` is the number of channels that it begins with."""
    return ResNet(_Basic, (2, 2, 2, 2), num_classes, width=width)


def wide_resnet101_2(num_classes: int, *, width: int = 64) -> ResNet:
    """ResNet-101 with bottlenecks of twice the width: DeepPool's WRN-101-2."""
    return ResNet(_Bottleneck, (3, 4, 23, 3), num_classes, width=width, factor=2)


def _conv(inside: int, outside: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)


def _shortcut(inside: int, outside: int, stride: int) -> nn.Module:
    if inside == outside and stride == 1:
        return nn.Identity()
    return nn.Sequential(_conv(inside, outside, 1, stride), nn.BatchNorm2d(outside))


# -- WideResNet, as it was published ------------------------------------------------------------


class _Wide(nn.Module):
    """Normalised before each convolution; a shortcut of another size begins after that."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inside), _conv(inside, outside, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(outside), _conv(outside, outside, 3)
        same = inside == outside
        self.shortcut = None if same else _conv(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        ready = F.relu(self.bn1(x))
        y = self.conv2(F.relu(self.bn2(self.conv1(ready))))
        return y + (x if self.shortcut is None else self.shortcut(ready))


def wide_resnet(depth: int, factor: int, num_classes: int) -> nn.Sequential:
    """WRN-depth-factor (Zagoruyko and Komodakis 2016), for images of about 32 x 32."""
    num_blocks, rest = divmod(depth - 4, 6)
    if rest or num_blocks < 1 or factor < 1:
        raise UsageError(f"WRN-{depth}-{factor}", hint="the depth is 6n + 4: 10, 16, 22, 28, 40")
    layers: list[nn.Module] = [_conv(3, 16, 3)]
    inside = 16
    for number in range(3):
        outside = (16 << number) * factor
        for place in range(num_blocks):
            layers.append(_Wide(inside, outside, 2 if number and not place else 1))
            inside = outside
    top = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, num_classes)
    return nn.Sequential(*layers, nn.BatchNorm2d(inside), nn.ReLU(), *top)


# -- VGG ----------------------------------------------------------------------------------------


class VGG(nn.Module):
    """Convolutions of 3 x 3 in five stages; three full layers, that look at pool x pool cells."""

    def __init__(self, num_classes: int, *, width: int, hidden: int, pool: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inside = 3
        for stage in _VGG16:
            for widths in stage:
                layers += nn.Conv2d(inside, widths * width, 3, padding=1), nn.ReLU(inplace=True)
                inside = widths * width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(pool)
        self.classifier = nn.Sequential(
            *(nn.Linear(inside * pool * pool, hidden), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout()),
            nn.Linear(hidden, num_classes),
        )
        for module in self.features.modules():
            if isinstance(module, nn.Conv2d) and module.bias is not None:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes, of images of 32 pixels a side or more."""
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def vgg16(num_classes: int, *, width: int = 64, hidden: int = 4096, pool: int = 7) -> VGG:
    """Simonyan and Zisserman 2014, without batch normalisation."""
    return VGG(num_classes, width=width, hidden=hidden, pool=pool)


# -- GPT ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Of a GPT."""

    vocabulary: int
    length: int
    """Tokens that it can look back on."""
    layers: int
    heads: int
    width: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise UsageError(f"{self.heads} heads of a width of {self.width}", hint="it divides")


GPT2 = Size(vocabulary=50257, length=1024, layers=12, heads=12, width=768)


class _Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.taken = nn.Linear(size.width, 3 * size.width)
        self.given = nn.Linear(size.width, size.width)
        self.wide = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)
        self.dropout = nn.Dropout(size.dropout) if size.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        taken = self.taken(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = taken.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.given(seen.transpose(1, 2).reshape(rows, length, width)))
        y = F.gelu(self.wide(self.norm2(x)), approximate="tanh")
        return x + self.dropout(self.narrow(y))


class GPT(nn.Module):
    """GPT-2's layout (Radford et al. 2019); input and output share their embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(_Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # What is added to the residual stream is smaller, the more there is of it.
                deep = name.endswith(("given.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * size.layers) ** (0.5 * deep))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the token after each: rows x length x vocabulary."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places(places))
        return F.linear(self.norm(x), self.tokens.weight)


def gpt(size: Size) -> GPT:
    """Of any size; `GPT2` is that of the smallest one that was published."""
    return GPT(size)
