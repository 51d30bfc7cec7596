"""`nearkin export`: the encoder or the classifier of a run, or its images, for other programs."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args
from uuid import uuid4

from torch import nn
from typing_extensions import override

from nearkin.choices import ExportFormat, GraphFormat, NativeFormat
from nearkin.classifier.classifier import read_classifier
from nearkin.commands.arguments import EncoderLike, PathLike, command, name_of
from nearkin.commands.sources import images_of
from nearkin.data.opening import open_images
from nearkin.data.preprocessing import Preprocessing
from nearkin.encoders.encoder import Encoder, load
from nearkin.errors import NearkinError, OutputError, UsageError
from nearkin.exports.atlas import write_atlas
from nearkin.exports.compare import Sample, compare_graph, compare_native, noise, sample_of
from nearkin.exports.graphs import PixelNetwork, write_graph
from nearkin.exports.model_card import CARD, PREPROCESSING, SETTINGS, Card
from nearkin.exports.native import CONFIG, write_native
from nearkin.files import PARTIAL, writing
from nearkin.result import Result
from nearkin.run.edits import names_by_now
from nearkin.run.folder import RunFolder, check_target
from nearkin.run.reporter import Reporter, reporter_of

FILES: Final[Mapping[ExportFormat, str]] = {
    "onnx": "model.onnx",
    "torch-export": "model.pt2",
    "torchvision": "model.pth",
    "atlas": "atlas.parquet",
}
"""The formats that are one file, by their names and suffixes; the others are folders."""
BY_SUFFIX: Final = {Path(name).suffix: format for format, name in FILES.items()}
FORMATS: Final = (*get_args(GraphFormat), *get_args(NativeFormat), "atlas")
MARKS: Final = (PREPROCESSING, CARD)
"""What tells the folder of an export."""
OWN: Final = (SETTINGS, CONFIG, "preprocessor_config.json")
MODEL: Final = re.compile(
    r"model(\.onnx(\.data)?|\.pt2|\.pth|(-\d+-of-\d+)?\.safetensors(\.index\.json)?)"
)
"""What else exports write into a folder."""
OF_FILES: Final = (*BY_SUFFIX, ".pt", ".safetensors", ".bin")  # Suffixes that no folder has


@dataclass(frozen=True, repr=False)
class Export(Result):
    """What was written, and how it was compared with the run's own."""

    path: Path
    what: str
    checks: tuple[str, ...] = ()

    @override
    def lines(self) -> list[str]:
        return [*(f"check  {line}" for line in self.checks), f"{self.what}: {self.path}"]


@command
def export(
    run: EncoderLike,
    data: Any = None,
    *,
    output: PathLike | None = None,
    format: ExportFormat | None = None,
    dynamic_size: bool = False,
    overwrite: bool = False,
    license: str = "",
    data_license: str = "",
    backbone: nn.Module | None = None,
    allow_partial: bool = False,
    trust_remote_code: bool = False,
    verbose: bool | Reporter = True,
) -> Export:
    """Write the encoder or the classifier of a run, or its images, for another program.

    `onnx` and `torch-export` are one file from images of 8 bits to features or, of a
    classification or discovery, to the probabilities of its classes. `timm`, `torchvision` and
    `huggingface` are the encoder's weights, as that library reads them. A folder has
    preprocessing, settings and a model card as well. What was written is read back and compared
    on images: bit by bit, a graph within 1e-4. If it differs, nothing stays. The file
    encoder.safetensors of a run needs no export.

    Args:
        run: A run, or another encoder that `load` takes.
        output: A folder; or one file, whose suffix is that of its format: .onnx, .pt2
            (torch-export), .pth (torchvision) or .parquet (atlas). If None, `exports/FORMAT` in
            the run folder, or `atlas.parquet`.
        data: The images of the run, if they have moved; or images to compare outputs on.
        format: What to write, if the suffix of `output` does not tell. `atlas` is the table of
            images that Embedding Atlas reads.
        dynamic_size: Whether a graph takes images of any size, not only the encoder's.
        overwrite: Replace the file or the export that is there.
        license: The license that you give these weights, for the model card.
        data_license: The license of the images, for the model card.
        backbone: The run's network, if it was given one from Python; untrained.
        allow_partial: Whether weights may be missing from the encoder's checkpoint, or left over.
        trust_remote_code: Whether to run code that files of the run name.
        verbose: Whether to show progress, or what receives it.

    Raises:
        UsageError: If the format is not named, or cannot hold the network, with the reason.
        DataError: If `data` are no images.
        OutputError: If the output exists or cannot be written.
        CheckpointError: If the run's files are damaged, or what was written differs.
    """
    name, trust, log = name_of(run), trust_remote_code, reporter_of(verbose)
    folder = RunFolder(Path(name))
    format, path, is_file = _destination(folder, output, format)
    _check_held(format, is_file, dynamic_size=dynamic_size, licenses=bool(license or data_license))
    _check_replaceable(path, is_file, overwrite, [run, data])
    if format == "atlas":
        images = images_of(folder, data, trust=trust, log=log)
        return Export(path.resolve(), f"{write_atlas(folder, images, path)} images")
    encoder = load(name, backbone=backbone, allow_partial=allow_partial, trust_remote_code=trust)
    classifier = None
    network = PixelNetwork(encoder)
    if folder.classifier.exists() and format in get_args(GraphFormat):
        classifier = read_classifier(folder.classifier).named(names_by_now(folder))
        network = PixelNetwork(classifier.encoder(encoder), classifier)
    elif folder.classifier.exists():
        log.info(f"without its classifier, which {format} does not hold; onnx and torch-export do")
    if is_file:  # without a card that has it
        log.info(f"images: {encoder.preprocessing}")
    card = Card(
        name=folder.path.resolve().name,
        encoder=encoder,
        format=format,
        classes=classifier.classes if classifier else (),
        folder=folder if folder.config.exists() else None,
        license=license,
        data_license=data_license,
    )
    with _whole(path, is_file) as partial:
        sample = _sample(folder, data, encoder, log, trust)
        file = partial / (path.name if is_file else FILES.get(format, ""))
        if format == "onnx" or format == "torch-export":
            theirs, program = write_graph(
                format,
                file,
                network,
                sample.pixels[:2],
                dynamic_size=dynamic_size,
                description=card.description(),
            )
            checks = compare_graph(theirs, program, network, sample, any_size=dynamic_size)
        else:
            checks = compare_native(write_native(format, file, encoder), network, sample)
        if not is_file:
            card.write(partial, checks)
    what = f"{len(card.classes)} classes" if classifier else f"{encoder.num_features} features"
    return Export(path.resolve(), f"{what} as {format}", tuple(checks))


def _destination(
    folder: RunFolder, output: PathLike | None, format: ExportFormat | None
) -> tuple[ExportFormat, Path, bool]:
    """Return the format, the path to write to, and whether that is one file."""
    named = "" if output is None else os.fspath(output)
    suffix = "" if named.endswith(("/", os.sep)) else Path(named).suffix
    chosen = format or BY_SUFFIX.get(suffix)
    if chosen is None:
        raise UsageError(
            f"give --format, one of {', '.join(FORMATS)}; or a file whose name ends in "
            f"{', '.join(BY_SUFFIX)} as -o"
        )
    is_file = BY_SUFFIX.get(suffix) == chosen
    if output is None:
        if not folder.path.is_dir():
            raise UsageError(f"{folder.path} is no run folder to export into; give -o")
        path = folder.atlas if chosen == "atlas" else folder.exports / chosen
        return chosen, path, chosen == "atlas"
    if not is_file and (suffix in OF_FILES or chosen == "atlas"):
        names = ["a folder"] * (chosen != "atlas")
        names += [f"a name that ends in {end}" for end, of in BY_SUFFIX.items() if of == chosen]
        raise UsageError(f"{output} is no name for {chosen}; give {' or '.join(names)} as -o")
    return chosen, Path(os.path.abspath(output)), is_file  # noqa: PTH100  (keeps links)


def _check_held(
    format: ExportFormat, is_file: bool, *, dynamic_size: bool, licenses: bool
) -> None:
    """Refuse what the format has no place for."""
    is_graph = format in get_args(GraphFormat)
    if dynamic_size and not is_graph:
        raise UsageError(f"--dynamic-size is of graphs; {format} has no size of its own")
    if licenses and (format == "atlas" or (is_file and not is_graph)):
        raise UsageError(
            f"--license and --data-license have no place in {format} as one file; give the name "
            "of a folder, which has a model card, or leave them out"
        )


def _check_replaceable(path: Path, is_file: bool, overwrite: bool, reads: Sequence[Any]) -> None:
    """Refuse to replace what is there, unasked; and ever what is read, or is no export."""
    # A large graph has its weights beside it.
    beside = [path.with_name(f"{path.name}.data")] if is_file and path.suffix == ".onnx" else []
    for each in (path, *beside):
        check_target(each, overwrite=overwrite, reads=reads, is_file=is_file)
    if os.path.lexists(path) and not (path.is_file() if is_file else _is_export(path)):
        kind = "file" if is_file else "folder of an export"
        raise OutputError(f"{path} is no {kind}, which --overwrite replaces; choose another -o")


def _is_export(path: Path) -> bool:
    """Whether a folder is an export: files of these names may be of anybody."""
    with suppress(Exception):
        Preprocessing.from_dict(json.loads((path / PREPROCESSING).read_bytes()))
        return "nearkin" in (path / CARD).read_text(encoding="utf-8")
    return False


@contextmanager
def _whole(path: Path, is_file: bool) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path`, or whose files do; nothing if that fails."""
    place = path if path.is_dir() else path.parent  # on the same disk, and may be written to
    partial = place / f".{path.name}{PARTIAL}{uuid4().int}"
    new = partial / "new"
    with writing(path):
        new.mkdir(parents=True)
    try:
        yield new
        with writing(path):
            if is_file:  # a large graph has its weights beside it, which come first
                for file in sorted(new.iterdir(), reverse=True):
                    file.replace(path.with_name(file.name))
            elif place == path:
                _replace(path, new, partial / "old")
            else:
                new.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(path: Path, new: Path, old: Path) -> None:
    """Put the files of an export in place of those of another; all else in the folder stays there.

    What tells that it is an export is replaced last: after a kill, the same command does the rest,
    and until then the former files are in `old`.
    """
    old.mkdir()
    files = sorted(new.iterdir(), key=lambda each: each.name in MARKS)
    try:
        for file in [*path.iterdir()]:
            if file.is_file() and (file.name in OWN or MODEL.fullmatch(file.name)):
                file.rename(old / file.name)
        for file in files:
            file.replace(path / file.name)
    except BaseException:
        for file in files:
            if not file.exists() and file.name not in MARKS:
                (path / file.name).unlink()
        for file in old.iterdir():
            file.replace(path / file.name)
        raise


def _sample(folder: RunFolder, data: Any, encoder: Encoder, log: Reporter, trust: bool) -> Sample:
    """Return images of the run, or those that were given; noise where it has none any more."""
    if data is not None:
        return sample_of(encoder, open_images(data, labels="none"), "given")
    try:
        if not folder.config.exists():
            raise UsageError(f"{folder.path} is no run; give images")
        return sample_of(encoder, images_of(folder, trust=trust, log=log), "of the run")
    except NearkinError as error:
        log.info(f"warning: outputs are compared on noise, as there are no images: {error}")
        return noise(encoder)
