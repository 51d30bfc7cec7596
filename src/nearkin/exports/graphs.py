"""A network as one file that is a graph of its operations: ONNX, or a program of torch.export.

    onnx           model.onnx, which onnxruntime and many others run
    torch-export   model.pt2, for `torch.export.load`

Both take images of 8 bits: normalization is part of the graph. Files hold what describes them.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from nearkin.choices import GraphFormat
from nearkin.errors import UsageError

FILES: Final[Mapping[GraphFormat, str]] = {"onnx": "model.onnx", "torch-export": "model.pt2"}
OPSET: Final = 18
PACKAGES: Final = ("onnx", "onnxscript", "onnxruntime")
INPUT: Final = "images"
DESCRIPTION: Final = "description.json"  # Beside the program, in its file

Run = Callable[[Shaped[Tensor, "batch _ _ _"]], Float[Tensor, "batch _"]]


def write_graph(
    format: GraphFormat,
    folder: Path,
    network: nn.Module,
    images: Tensor,
    *,
    dynamic_size: bool,
    description: Mapping[str, Any],
    output: str,
) -> tuple[Run, str]:
    """Write a network as a graph into a folder, and read it back.

    Args:
        format: Of the file.
        folder: Where `FILES` of the format is written.
        network: From images of 8 bits, of shape (batch, 3, height, width), or from channels of 0
            to 1, to one tensor.
        images: Two that it takes. Any number of them may be given at once.
        dynamic_size: Whether images of other sides may be given, too.
        description: Plain values that are kept in the file.
        output: What the network gives: the name of its output.

    Returns:
        What runs the file, and the program that does with its version.

    Raises:
        UsageError: If a package is missing, or the network cannot be turned into a graph.
    """
    path = folder / FILES[format]
    if format == "onnx":
        _require_onnx()
    program = _program(network, images, dynamic_size=dynamic_size)
    if format == "onnx":
        return _write_onnx(path, program, description, output)
    with _own_warnings():
        torch.export.save(program, path, extra_files={DESCRIPTION: json.dumps(description)})
        read: Run = torch.export.load(path).module()
    return read, f"torch {torch.__version__}"


def _require_onnx() -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(f"ONNX needs {', '.join(missing)}; pip install 'nearkin[export]'")


def _program(
    network: nn.Module, images: Tensor, *, dynamic_size: bool
) -> torch.export.ExportedProgram:
    """Return the operations of a network on a batch of any size."""
    sizes: dict[int, Any] = {0: torch.export.Dim("batch")}
    if dynamic_size:  # what a network asks of its sizes, such as whole patches, is found out
        sizes |= {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    try:
        with torch.no_grad(), _own_warnings():
            return torch.export.export(network, (images,), dynamic_shapes=(sizes,))
    except Exception as error:  # of many kinds, by what the network does
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        remedy = "leave out --dynamic-size" if dynamic_size else "give --format timm"
        what = "a graph for images of any size" if dynamic_size else "a graph"
        raise UsageError(
            f"the network cannot be turned into {what} ({reason}); {remedy}"
        ) from error


def _write_onnx(
    path: Path,
    program: torch.export.ExportedProgram,
    description: Mapping[str, Any],
    output: str,
) -> tuple[Run, str]:
    import onnxruntime

    try:
        with _own_warnings():
            written = torch.onnx.export(
                program,
                input_names=[INPUT],
                output_names=[output],
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # of many kinds: an operation that ONNX does not have
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UsageError(
            f"the network cannot be written as ONNX ({reason}); give --format torch-export"
        ) from error
    assert written is not None
    for name, value in description.items():
        text = value if isinstance(value, str) else json.dumps(value)
        written.model.metadata_props[name] = text
    written.save(str(path))  # above 1.5 GB, weights go to model.onnx.data
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {INPUT: images.numpy()})[0])

    return run, f"onnxruntime {onnxruntime.__version__}"


@contextmanager
def _own_warnings() -> Iterator[None]:
    """Keep the exporters' warnings, which concern their own code, to themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
