"""`nearkin export`: the encoder or the classifier of a run, or its images, for other programs."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, get_args
from uuid import uuid4

from torch import nn

from nearkin.choices import ExportFormat, GraphFormat
from nearkin.classifier.classifier import (
    read_classifier,
)
from nearkin.commands.vectors import images_of
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import Encoder, load
from nearkin.errors import DataError, NearkinError, OutputError, UsageError
from nearkin.exports.atlas import write_atlas
from nearkin.exports.compare import Sample, compare_graph, compare_native, noise, sample_of
from nearkin.exports.graphs import write_graph
from nearkin.exports.model_card import ModelCard
from nearkin.exports.native import write_native
from nearkin.exports.network import PixelNetwork
from nearkin.files import PARTIAL, writing
from nearkin.run.failures import resource_errors
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Reporter, Silent

SUFFIXES: Final = (".onnx", ".pt", ".pt2", ".pth", ".safetensors")


@dataclass(frozen=True)
class Exported:
    """What was written, and how it was compared with the run's own."""

    path: Path
    what: str
    checks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "path": str(self.path.resolve())}

    def lines(self) -> list[str]:
        """Return lines on the comparison, and where it is."""
        return [*(f"check  {line}" for line in self.checks), f"{self.what}: {self.path.resolve()}"]


def export(
    run: str | Path,
    data: Any = None,
    *,
    output: str | Path | None = None,
    format: ExportFormat = "atlas",
    dynamic_size: bool = False,
    license: str = "",
    data_license: str = "",
    backbone: nn.Module | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Exported:
    """Write the encoder or the classifier of a run, or its images, for another program.

    `onnx` and `torch-export` are one file from images of 8 bits to features or, of a
    classification or discovery, to the probabilities of its classes. `timm`, `torchvision` and
    `huggingface` are the encoder's weights, as that library reads them. All come in a folder, with
    preprocessing, settings and a model card. What was written is read back and compared on
    images: bit by bit, or within 1e-4 for `onnx`. If it differs, nothing stays. The file
    encoder.safetensors of a run needs no export.

    Args:
        run: A run folder, or another encoder that `load` takes.
        output: A folder that does not exist; of a run, `exports/FORMAT` in it if None. For
            `atlas`, a name that ends in .parquet; `atlas.parquet` in the run folder if None.
        data: The images of the run, if they have moved; or images to compare outputs on.
        format: `atlas` is the table of images that Embedding Atlas reads.
        dynamic_size: Whether a graph takes images of any size, not only the encoder's.
        license: The license that you give these weights, for the model card.
        data_license: The license of the images, for the model card.
        backbone: The run's network, if it was given one from Python; untrained.
        trust_remote_code: Whether to run code that files of the run name.
        reporter: Receives progress.

    Raises:
        UsageError: If the format cannot hold the network, with the reason.
        DataError: If `data` are no images.
        OutputError: If the output exists or cannot be written.
        CheckpointError: If the run's files are damaged, or what was written differs.
    """
    folder = RunFolder(Path(run))
    trust = trust_remote_code
    if format == "atlas":
        return _export_table(folder, data, Path(output or folder.atlas), trust)
    if dynamic_size and format not in get_args(GraphFormat):
        raise UsageError(f"--dynamic-size is of graphs; weights as {format} are of no size")
    path = _destination(folder, output, format)
    log = reporter or Silent()
    encoder, classifier = load(run, backbone=backbone, trust_remote_code=trust), None
    if folder.classifier.exists() and format in get_args(GraphFormat):
        classifier = read_classifier(folder.classifier)
        encoder = classifier.encoder(encoder)
    elif folder.classifier.exists():
        log.info(f"without its classifier, which {format} does not hold; onnx and torch-export do")
    with resource_errors(), _whole_folder(path) as partial:
        sample = _sample(folder, data, encoder, log, trust)
        card = ModelCard(
            name=folder.path.resolve().name,
            encoder=encoder,
            format=format,
            classes=classifier.classes if classifier else (),
            folder=folder if folder.config.exists() else None,
            license=license,
            data_license=data_license,
        )
        if format == "onnx" or format == "torch-export":
            network = PixelNetwork(encoder, classifier)
            theirs, program = write_graph(
                format,
                partial,
                network,
                sample.pixels[:2],
                dynamic_size=dynamic_size,
                description=card.description(),
                output=network.output,
            )
            exact = format == "torch-export"
            checks = compare_graph(
                theirs, program, network, sample, exact=exact, any_size=dynamic_size
            )
        else:
            written = write_native(format, partial, encoder)
            checks = compare_native(written, encoder, sample)
        card.write(partial, checks)
    what = f"{len(card.classes)} classes" if classifier else f"{encoder.num_features} features"
    return Exported(path, f"{what} as {format}", tuple(checks))


def _export_table(folder: RunFolder, data: Any, path: Path, trust: bool) -> Exported:
    if _new(path).suffix != ".parquet":
        raise UsageError(f"{path} does not end in .parquet; give such a name")
    images = images_of(folder, data, trust_remote_code=trust)
    return Exported(path, f"{write_atlas(folder, images, path)} images")


def _destination(folder: RunFolder, output: str | Path | None, format: str) -> Path:
    """Return the folder to write, which must not be there."""
    if output is None and not folder.path.is_dir():
        raise UsageError(f"{folder.path} is no run folder to export into; give a folder as -o")
    path = Path(output) if output is not None else folder.exports / format
    if path.suffix in SUFFIXES:
        raise UsageError(
            f"{path} would be one file, and an export is a folder with a model card; give "
            f"-o {path.with_suffix('')}"
        )
    return _new(path)


def _new(path: Path) -> Path:
    """Return a path, unless there is something already."""
    if path.exists():
        raise OutputError(f"{path} exists; remove it, or choose another -o")
    return path


@contextmanager
def _whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to write to, then rename it; it is removed if anything fails."""
    partial = path.with_name(f".{path.name}{PARTIAL}{uuid4().int}")
    with writing(path):
        partial.mkdir(parents=True)
    try:
        yield partial
        with writing(path):
            partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sample(folder: RunFolder, data: Any, encoder: Encoder, log: Reporter, trust: bool) -> Sample:
    """Return images of the run, or those that were given; noise where it has none any more."""
    whose = "of the run" if data is None else "given"
    try:
        return sample_of(encoder, _images(folder, data, trust), whose)
    except NearkinError as error:
        if data is not None:
            raise
        log.info(f"warning: outputs are compared on noise, as there are no images: {error}")
    return noise(encoder)


def _images(folder: RunFolder, data: Any, trust: bool) -> Images:
    if folder.config.exists():
        return images_of(folder, data, trust_remote_code=trust)
    if data is None:
        raise DataError(f"{folder.path} is no run; give images")
    return open_images(data, labels="none")
