"""`nearkin export`: the encoder or the classifier of a run, or its images, for other programs."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, get_args
from uuid import uuid4

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from typing_extensions import override

from nearkin.choices import ExportFormat, GraphFormat
from nearkin.commands.atlas import write_atlas
from nearkin.commands.vectors import images_of
from nearkin.data.batches import CenterCrops
from nearkin.data.decode import as_image
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.data.rng import seeded
from nearkin.discovery.classifier import (
    Classifier,
    apply_layer,
    class_probability,
    read_classifier,
)
from nearkin.distributed import available_cpus
from nearkin.encoders.encoder import Encoder, load
from nearkin.encoders.graphs import OPSET, write_graph
from nearkin.encoders.native import Native, write_native
from nearkin.errors import CheckpointError, DataError, NearkinError, OutputError, UsageError
from nearkin.evaluation.embeddings import images_at_once
from nearkin.files import PARTIAL, writing
from nearkin.networks.backbone import SMALL_IMAGE
from nearkin.networks.heads import MultiHead
from nearkin.networks.input_size import patch_size
from nearkin.objectives import unit
from nearkin.report.model_card import ModelCard
from nearkin.run.failures import resource_errors
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Reporter, Silent

TOLERANCE: Final = 1e-4  # Of ONNX: largest difference of a feature, of the largest feature
AGREEMENT: Final = 0.999  # Share of images whose nearest neighbor, or class, is the same
TIE: Final = 1e-6  # Cosines that differ by less are those of one and the same neighbor
MOST_CHECKED, FEWEST_CHECKED = 1000, 64  # Images that outputs are compared on, by their size
TRANSFORMED: Final = 16  # Images that also take a library's own way from file to features
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
    classification or discovery, to the probabilities of its classes. `safetensors`, `timm`,
    `torchvision` and `huggingface` are the encoder's weights, as that library reads them. All
    come in a folder, with preprocessing, settings and a model card. What was written is read back
    and compared on images: bit by bit, or within 1e-4 for `onnx`. If it differs, nothing stays.

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
        table = _new(Path(output or folder.atlas))
        count = write_atlas(folder, table, data, trust_remote_code=trust)
        return Exported(table, f"{count} images")
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
            checks = _write_graph(format, partial, network, sample, card, dynamic_size)
        else:
            written = write_native(format, partial, encoder)
            checks = _compare_native(written, encoder, sample)
        card.write(partial, checks)
    what = f"{len(card.classes)} classes" if classifier else f"{encoder.num_features} features"
    return Exported(path, f"{what} as {format}", tuple(checks))


# ---------------------------------------------------------------- where to


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


# ---------------------------------------------------------------- images to compare outputs on


@dataclass(frozen=True, eq=False)
class _Sample:
    """Images that outputs are compared on."""

    pixels: Shaped[Tensor, "images _ size size"]
    images: Images | None  # The same, as files; None where they are noise
    what: str  # What they are, in words

    def parts(self) -> list[Tensor]:
        """Return them in batches: one of a single image, and larger ones."""
        size = images_at_once(self.pixels.shape[-1], torch.device("cpu"))
        return [self.pixels[:1], *self.pixels[1:].split(size)]


def _sample(folder: RunFolder, data: Any, encoder: Encoder, log: Reporter, trust: bool) -> _Sample:
    """Return images of the run, or those that were given; noise where it has none any more."""
    size = encoder.image_size
    count = max(FEWEST_CHECKED, min(MOST_CHECKED, MOST_CHECKED * SMALL_IMAGE**2 // size**2))
    whose = "of the run" if data is None else "given"
    try:
        images = _images(folder, data, trust)
        chosen = images.spread(count)
        crops = CenterCrops(chosen, encoder.preprocessing, workers=available_cpus())
        pixels = torch.cat(list(crops))
        rows = [row for row in range(len(chosen)) if row not in crops.bad]
        if len(rows) < 2:
            raise DataError("fewer than two images can be read; give others")
        readable = chosen.subset(np.array(rows))
        return _Sample(pixels[rows].contiguous(), readable, f"{len(rows)} images {whose}")
    except NearkinError as error:
        if data is not None:
            raise
        log.info(f"warning: outputs are compared on noise, as there are no images: {error}")
    with seeded(0, torch.device("cpu")):
        shape = FEWEST_CHECKED, len(encoder.preprocessing.mean)
        coarse = F.interpolate(torch.rand(*shape, 4, 4), (size, size), mode="bilinear")
        noise = 0.8 * coarse + 0.2 * torch.rand(*shape, size, size)
        pixels = noise if encoder.preprocessing.low else (255 * noise).to(torch.uint8)
    return _Sample(pixels, None, f"{FEWEST_CHECKED} images of noise")


def _images(folder: RunFolder, data: Any, trust: bool) -> Images:
    if folder.config.exists():
        return images_of(folder, data, trust_remote_code=trust)
    if data is None:
        raise DataError(f"{folder.path} is no run; give images")
    return open_images(data, labels="none")


# ---------------------------------------------------------------- weights


def _compare_native(written: Native, encoder: Encoder, sample: _Sample) -> list[str]:
    """Compare what a library has read with an encoder; return lines on it.

    Raises:
        CheckpointError: If a bit of a feature differs.
    """
    with torch.inference_mode():
        for part in sample.parts():
            images = encoder.preprocessing.to_input(part)
            own = encoder(images)
            theirs = written.network(images).flatten(1)
            if not torch.equal(own, theirs):
                _refuse(written.library, "features", _difference(own, theirs))
    what = f"{encoder.num_features} features of {sample.what}"
    line = f"{what}: equal, bit by bit, by {written.library}"
    return [line, *_compare_transform(written, encoder, sample)]


def _compare_transform(written: Native, encoder: Encoder, sample: _Sample) -> list[str]:
    """Compare a library's own way from an image to features, which need not be to the bit."""
    if written.transform is None or sample.images is None or encoder.preprocessing.low:
        return []
    images = encoder.preprocessing.applied(sample.images.spread(TRANSFORMED))
    rows = [sample.images.names.index(name) for name in images.names]
    # At full scale: other libraries decode no JPEG at a smaller one.
    decoded: list[Any] = [as_image(images.read(row)) for row in range(len(images))]
    with torch.inference_mode():
        theirs = written.network(torch.stack([written.transform(image) for image in decoded]))
        own = encoder(encoder.preprocessing.to_input(sample.pixels[rows]))
        cosine = (unit(own) * unit(theirs.flatten(1))).sum(1).min()
    return [f"from image to features by its own preprocessing: cosine at least {cosine:.4f}"]


# ---------------------------------------------------------------- graphs


class PixelNetwork(nn.Module):
    """From images of 8 bits to features or, with a classifier, to calibrated probabilities.

    They are those of `Encoder` and of `nearkin assign`.
    """

    def __init__(self, encoder: Encoder, classifier: Classifier | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.top = Probabilities(classifier) if classifier else nn.Identity()
        self.output = "probabilities" if classifier else "features"
        self.eval().requires_grad_(False)

    @override
    def forward(self, images: Shaped[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch _"]:
        outputs: Tensor = self.top(self.encoder(self.encoder.preprocessing.to_input(images)))
        return outputs


class Probabilities(nn.Module):
    """From an encoder's features to the calibrated probabilities of a classifier's classes."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        heads = classifier.heads
        self.layer = classifier.layer
        self.heads = heads.best() if isinstance(heads, MultiHead) else heads
        self.num_known = classifier.num_known
        self.disjoint = classifier.disjoint
        self.temperature = classifier.calibration.temperature if classifier.calibration else 1.0

    @override
    def forward(self, features: Float[Tensor, "batch _"]) -> Float[Tensor, "batch classes"]:
        top = apply_layer(self.layer, features)
        probability = class_probability(self.heads, top, self.num_known, self.disjoint)
        power = probability ** (1 / self.temperature)  # as `Calibration.apply`
        return (power / power.sum(dim=1, keepdim=True)).float()


def _write_graph(
    format: GraphFormat,
    folder: Path,
    network: PixelNetwork,
    sample: _Sample,
    card: ModelCard,
    dynamic_size: bool,
) -> list[str]:
    """Write a network as a graph, and compare what it computes; return lines on it."""
    run, program = write_graph(
        format,
        folder,
        network,
        sample.pixels[:2],
        dynamic_size=dynamic_size,
        description=card.description(),
        output=network.output,
    )
    sides, parts = [network.encoder.image_size], [sample.parts()]
    if dynamic_size:
        sides.append(_other_size(network.encoder))
        larger = F.interpolate(sample.pixels[:FEWEST_CHECKED].float(), (sides[1], sides[1]))
        parts.append([larger.to(sample.pixels.dtype)])
    lines = []
    for side, of_side in zip(sides, parts, strict=True):
        with torch.inference_mode():
            own = torch.cat([network(part) for part in of_side])
            theirs = torch.cat([run(part) for part in of_side])
        compared = _equal if format == "torch-export" else _within
        result = compared(own, theirs, program, network.output)
        batches = sorted({len(part) for part in of_side})
        lines.append(
            f"{network.output} of {sample.what}, {side} px, batches of {batches[0]} to "
            f"{batches[-1]}: {result}, by {program}"
        )
    return lines


def _other_size(encoder: Encoder) -> int:
    """Return another side in pixels that an encoder's patches divide."""
    return encoder.image_size + max(32, patch_size(encoder.backbone.body))


def _equal(own: Tensor, theirs: Tensor, program: str, output: str) -> str:
    if not torch.equal(own, theirs):
        _refuse(program, output, _difference(own, theirs))
    return "equal, bit by bit"


def _within(own: Tensor, theirs: Tensor, program: str, output: str) -> str:
    """Refuse what rounding does not explain; return what differs, in words."""
    difference = _difference(own, theirs)
    if output == "features":
        same, what = _same_neighbors(own, theirs), "nearest neighbor"
    else:
        same, what = (own.argmax(1) == theirs.argmax(1)).float().mean().item(), "class"
    if not (difference <= TOLERANCE and same >= AGREEMENT):  # not a number: refused
        _refuse(program, output, difference)
    return (
        f"largest difference {difference:.1e} of the largest value (at most {TOLERANCE:g}), the "
        f"same {what} for {same:.1%}, opset {OPSET}"
    )


def _difference(own: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two outputs, as a share of the largest of the first."""
    if own.shape != theirs.shape:
        return float("nan")
    return float((own - theirs).abs().max() / own.abs().max())


def _same_neighbors(own: Tensor, theirs: Tensor) -> float:
    """Return the share of images whose nearest neighbor, or one as near, is the same."""
    similarity, others = (unit(of) @ unit(of).T for of in (own, theirs))
    nearest = others.fill_diagonal_(-2).argmax(1, keepdim=True)
    best = similarity.fill_diagonal_(-2).max(1, keepdim=True).values
    return float((similarity.gather(1, nearest) >= best - TIE).float().mean())


def _refuse(program: str, output: str, difference: float) -> NoReturn:
    raise CheckpointError(
        f"{program} computes other {output} from what was written, by {difference:.1e} of the "
        "largest; nothing was kept. Give another --format, and report it"
    )
