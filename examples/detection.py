"""A pretrained ResNet inside torchvision's Faster R-CNN.

python examples/detection.py RUN, where RUN was trained with --backbone resnet18 or another ResNet.
"""

import sys

import torch
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.ops.misc import FrozenBatchNorm2d

import nearkin

STAGES = {f"layer{number}": str(number) for number in range(1, 5)}


def detector(run: str, num_classes: int, **options: int) -> FasterRCNN:
    """Return a detector of that many classes, background included, on top of a run's encoder.

    As torchvision's own, it has a feature pyramid, and batch norms that do not learn. It takes
    images with values from 0 to 1, and normalizes them itself.
    """
    encoder = nearkin.load(run)
    body = encoder.backbone.body
    freeze_norms(body)
    blocks = [getattr(body, name)[-1] for name in STAGES]
    widths = [getattr(block, "conv3", block.conv2).out_channels for block in blocks]
    pyramid = BackboneWithFPN(body, STAGES, widths, out_channels=256)
    return FasterRCNN(pyramid, num_classes, **options)


def freeze_norms(network: nn.Module) -> None:
    """Replace batch norms, in place: batches of a detector are too small for statistics."""
    for name, child in network.named_children():
        if isinstance(child, nn.BatchNorm2d):
            frozen = FrozenBatchNorm2d(child.num_features, child.eps)
            frozen.load_state_dict(child.state_dict())
            setattr(network, name, frozen)
        freeze_norms(child)


if __name__ == "__main__":
    model = detector(sys.argv[1], num_classes=3)
    image, box = torch.rand(3, 240, 320), torch.tensor([[20.0, 30.0, 120.0, 160.0]])
    losses = model([image], [{"boxes": box, "labels": torch.tensor([1])}])
    print({name: round(loss.item(), 3) for name, loss in losses.items()})
