"""A network as one file that is a graph of its operations: ONNX, or a program of torch.export.

    onnx           .onnx, which onnxruntime and many others run
    torch-export   .pt2, for `torch.export.load`

Both take images of 8 bits: normalization is part of the graph. Files hold what describes them.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from typing_extensions import override

from nearkin.choices import GraphFormat
from nearkin.classifier.classifier import Classifier, class_probability
from nearkin.encoders.encoder import Encoder
from nearkin.errors import UsageError
from nearkin.exports.native import holding, reason

OPSET: Final = 18
PACKAGES: Final = ("onnx", "onnxscript", "onnxruntime")
INPUT: Final = "images"
DESCRIPTION: Final = "description.json"  # Beside the program, in its file

Run = Callable[[Shaped[Tensor, "batch _ _ _"]], Float[Tensor, "batch _"]]


class PixelNetwork(nn.Module):
    """From images of 8 bits to features or, with a classifier, to calibrated probabilities.

    They are those of `Encoder` and of `nearkin predict`.
    """

    def __init__(self, encoder: Encoder, classifier: Classifier | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.output = "probabilities" if classifier else "features"
        self.layer = classifier.layer if classifier else None
        self.heads = classifier.heads if classifier else None
        calibration = classifier.calibration if classifier else None
        self.temperature = calibration.temperature if calibration else 1.0
        self.eval().requires_grad_(False)

    @override
    def forward(self, images: Shaped[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch _"]:
        features: Tensor = self.encoder(self.encoder.preprocessing.to_input(images))
        if self.layer is None or self.heads is None:
            return features
        probability = class_probability(self.heads, self.layer(features))
        power = probability ** (1 / self.temperature)  # as `calibrated`
        return (power / power.sum(dim=1, keepdim=True)).float()


def write_graph(
    format: GraphFormat,
    path: Path,
    network: PixelNetwork,
    images: Tensor,
    *,
    dynamic_size: bool,
    description: Mapping[str, Any],
) -> tuple[Run, str]:
    """Write a network as a graph, and read it back.

    The graph takes any number of images like these two and, of `dynamic_size`, of other sides. The
    file has the description, too. Returns what runs it, and the name and version of that program.

    Raises:
        UsageError: If a package is missing, or the network cannot be turned into a graph.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None] if format == "onnx" else []
    if missing:
        raise UsageError(f"ONNX needs {', '.join(missing)}; pip install 'nearkin[export]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters, on their own code
        program = _program(network, images, dynamic_size=dynamic_size)
        if format == "onnx":
            return _write_onnx(path, program, description, network.output)
        torch.export.save(program, path, extra_files={DESCRIPTION: json.dumps(description)})
        read: Run = torch.export.load(path).module()
    return read, f"torch {torch.__version__}"


def _program(
    network: PixelNetwork, images: Tensor, *, dynamic_size: bool
) -> torch.export.ExportedProgram:
    """Return the operations of a network on a batch of any size."""
    sizes: dict[int, Any] = {0: torch.export.Dim("batch")}
    if dynamic_size:  # what a network asks of its sizes, such as whole patches, is found out
        sizes |= {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    try:
        with torch.no_grad():
            return torch.export.export(network, (images,), dynamic_shapes=(sizes,))
    except Exception as error:  # of many kinds, by what the network does
        if dynamic_size:
            what, remedy = "a graph for images of any size", "leave out --dynamic-size"
        else:
            others = " or ".join(holding(network.encoder))
            what = "a graph"
            remedy = f"give --format {others}" if others else "no other format holds it either"
        raise UsageError(
            f"the network cannot be turned into {what} ({reason(error)}); {remedy}"
        ) from error


def _write_onnx(
    path: Path,
    program: torch.export.ExportedProgram,
    description: Mapping[str, Any],
    output: str,
) -> tuple[Run, str]:
    import onnxruntime

    try:
        written = torch.onnx.export(
            program,
            input_names=[INPUT],
            output_names=[output],
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    except Exception as error:  # of many kinds: an operation that ONNX does not have
        raise UsageError(
            f"the network cannot be written as ONNX ({reason(error)}); give --format torch-export"
        ) from error
    assert written is not None
    for name, value in description.items():
        text = value if isinstance(value, str) else json.dumps(value)
        written.model.metadata_props[name] = text
    written.save(str(path))  # above 1.5 GB, weights go to a second file, with .data at the end
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {INPUT: images.numpy()})[0])

    return run, f"onnxruntime {onnxruntime.__version__}, opset {OPSET}"
