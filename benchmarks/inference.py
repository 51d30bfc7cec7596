"""Features on a CPU, beside other programs that run networks: CPU time for the same images.

    python -m benchmarks inference [--networks resnet18 vit_small_patch16_224] [--size 224]
        [--count 32] [--batch 16]

The networks are timm's with random weights. Images are random and in memory: nothing is decoded.
All take as many threads as torch and the same batches, in turns, within one process. A row is the
CPU time of `count` images, which other programs of a shared machine change less than the time on
the clock.

- nearkin: as `nearkin embed` computes features with torch: channels last, batch norms folded.
- torch: the network of timm as it is.
- inductor: nearkin's network by `torch.compile`.
- onnxruntime, openvino: its graph of the network, in float32. `openvino` is what `nearkin embed`
  takes for many images where it is installed.

`difference` is the largest of a feature from nearkin's, relative to the largest feature.
"""

import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import timm
import torch
from torch import Tensor, nn

from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row, compared
from benchmarks.shared.turns import turns
from nearkin.distributed.allocation import keep_freed_memory
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.inference import by_openvino, encode, inference
from nearkin.networks.branch import as_backbone

CPU = torch.device("cpu")
OPTIONS: Final = (
    Option(
        "networks",
        ["resnet18", "vit_small_patch16_224", "efficientnet_lite0"],
        "of timm",
        quick=["resnet18"],
    ),
    Option("size", 224, "side of the images", quick=64),
    Option("count", 32, "images", quick=4),
    Option("batch", 16, "images per pass", quick=2),
)


def build(name: str) -> nn.Module:
    """Build a network with random weights; statistics of batch norms are none that fold away."""
    torch.manual_seed(0)
    body: nn.Module = timm.create_model(name, num_classes=0).eval()
    for module in body.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
    return body


def by_onnxruntime(body: nn.Module, images: Tensor, folder: str) -> Callable[[Tensor], Tensor]:
    """Return a network as ONNX Runtime computes it."""
    import onnxruntime

    path = Path(folder) / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = ({0: torch.export.Dim("batch")},)
        torch.onnx.export(
            body, (images[:2],), path, input_names=["images"], dynamic_shapes=shapes,
            dynamo=True, verbose=False,
        )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    session: Any = onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )
    return lambda batch: torch.from_numpy(session.run(None, {"images": batch.numpy()})[0])


def networks(name: str, images: Tensor, folder: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return each way to compute a network's features, of those that are installed."""
    body = build(name)
    ways: dict[str, Any] = {"torch": build(name)}
    if find_spec("onnxscript") and find_spec("onnxruntime"):
        ways["onnxruntime"] = by_onnxruntime(body, images, folder)
    if find_spec("openvino") and (network := by_openvino(body, images[:3])):
        ways["openvino"] = network
    size = images.shape[-1]
    encoder = Encoder(as_backbone(body, size), size, {"backbone": f"timm:{name}"})
    ways["nearkin"] = inference(encoder, CPU).network
    ways["inductor"] = torch.compile(ways["nearkin"])
    return ways


class _Called(nn.Module):
    """A function as a network."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, images: Tensor) -> Tensor:
        """Call it."""
        return self.function(images)


def features(way: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> Tensor:
    """Compute the features of all images, as `nearkin embed` does."""
    return encode(way if isinstance(way, nn.Module) else _Called(way), batches)


def run(options: Namespace) -> Iterator[Row]:
    """Measure all ways of each network in turns."""
    images = torch.randn(options.count, 3, options.size, options.size)
    batches = images.split(options.batch)
    for name in options.networks:
        with tempfile.TemporaryDirectory() as folder, keep_freed_memory():
            ways = networks(name, images, folder)
            calls = {key: partial(features, way, batches) for key, way in ways.items()}
            laps = turns(calls, options.rounds, time.process_time)
            expected = calls["nearkin"]()
            for key in [key for key in calls if key != "nearkin"]:
                off = (calls[key]() - expected).abs().max() / expected.abs().max()
                yield compared(
                    name, laps["nearkin"], laps[key], against=key, unit="s of CPU",
                    images=options.count, difference=float(off),
                )  # fmt: skip
