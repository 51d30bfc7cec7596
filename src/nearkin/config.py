"""Settings: types and ranges, a data class for each kind of run, and files.

The data classes drive the command line, the Python call and `config.toml`. Options of a method are
not among them: a method's constructor is its configuration, and they travel as `options`.
"""

import ast
import difflib
import inspect
import json
import math
import os
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from nearkin.errors import UsageError, redacted
from nearkin.version import check_format

Auto = Literal["auto"]
Value = str | int | float | bool
Mark = TypeVar("Mark")

MAX: Final = 1e9
"""The largest value of a setting without a bound of its own; sums of such values stay finite."""
VARIABLES: Final = "NEARKIN_"  # How variables of the environment begin that are settings
RECIPE: Final = "recipe:"  # How the name of a recipe begins
OBJECTIVE_METHODS: Final = {"uno": "uno", "joint_ncl": "ncl", "ncl": "ncl", "simgcd": "simgcd"}
"""The method of a discovery's last stage, by objective."""
# What `nearkin evaluate --protocol` measures, by name; `full` is all of it. Each is a tuple of
# `nearkin.evaluation.protocols`, which needs torch.
PROTOCOLS: Final[Mapping[str, str]] = {
    "quick": "kNN, linear probe, clusters, view retrieval, geometry, RankMe and alpha-ReQ",
    "knn": "kNN at k 10, 20, 100 and 200, temperatures .07 and .1, and by majority",
    "linear": "linear probe",
    "attentive": "attentive probe on the tokens before the pooling",
    "fewshot": "classifiers from 1, 2, 5 and 10 images per class, 10 draws each",
    "retrieval": "mAP, mAP@R and recall@1 of test images among training images",
    "labelfree": "what needs no labels: view retrieval, geometry, RankMe, alpha-ReQ and LiDAR",
}
FULL: Final = "full"
Criterion = Literal[
    "effective-rank", "rankme", "agreement", "view-retrieval", "lidar", "alpha-req"
]
"""What encoders are ranked by without labels."""
Rule = Literal["typical", "diverse", "uncertain", "mixture", "random"]
"""What images are selected by."""
Engine = Literal["local", "ray"]
"""What divides the parts of features among processes."""
NativeFormat = Literal["safetensors", "timm", "torchvision", "huggingface"]
"""Formats of `nearkin export` that are an encoder's weights, in the files of a library."""
GraphFormat = Literal["onnx", "torch-export"]
"""Formats that are a network as a graph of its operations."""
ExportFormat = Literal["atlas", NativeFormat, GraphFormat]
"""All formats; `atlas` is a table of images."""
TRACKERS: Final = ("tensorboard", "wandb", "trackio")
"""Functions of `nearkin.run.tracking`."""
MAX_IMAGE_SIZE: Final = 4096  # side in pixels of the largest views a network is built for


@dataclass(frozen=True)
class Range:
    """The smallest and the largest value of a number, in `Annotated[int, Range(1)]`."""

    low: int | float
    high: int | float = math.inf

    def __str__(self) -> str:
        unlimited = self.high in (MAX, math.inf)
        return f"at least {self.low:g}" if unlimited else f"from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class MemorySize:
    """Marks an option that `auto` reduces to a multiple of the batch within half of the images."""

    holds_batch: bool = True
    """Whether every step writes a whole batch, so that less than a batch is refused."""


@dataclass(frozen=True)
class BatchGroups:
    """Marks a number of equal parts of a batch, which `auto` fits to the batch."""


@dataclass(frozen=True)
class EMA:
    """Marks a coefficient of an exponential moving average."""

    unit: str = "steps"  # what its half-life is counted in


Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]  # of things that there may be none of
Dim = Annotated[int, Range(1)]
DimOrZero = Annotated[int, Range(0)]  # a width whose 0 has a meaning of its own
Weight = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Momentum = Annotated[float, Range(0, 1), EMA()]
Temperature = Annotated[float, Range(1e-3)]
QueueSize = Annotated[int, Range(1), MemorySize()]


def metadata(kind: Any, mark: type[Mark]) -> Mark | None:
    """The first annotation of that type in `Annotated[...]`, or None.

    >>> metadata(Temperature, Range), metadata(int, Range)
    (Range(low=0.001, high=inf), None)
    """
    return next(
        (each for each in getattr(kind, "__metadata__", ()) if isinstance(each, mark)), None
    )


def check_value(name: str, value: object, kind: Any) -> None:
    """Refuse a value of the wrong type or out of range."""
    if not fits(value, kind):
        near = suggestion(str(value), choices(kind))
        raise UsageError(f"{option(name)} {value} is not {spelled(kind)}{near and '.' + near}")
    limits = metadata(kind, Range) or Range(-math.inf)
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{option(name)} {value} is not a finite number")
    if isinstance(value, int | float) and not limits.low <= value <= limits.high:
        raise UsageError(f"{option(name)} {value} is not {limits}")


def check_settings(config: "Config") -> None:
    """Refuse the first field that has the wrong type or is out of range."""
    kinds = get_type_hints(type(config), include_extras=True)
    for entry in fields(config):
        value = getattr(config, entry.name)
        check_value(entry.name, value, kinds[entry.name])
        if isinstance(value, str) and redacted(value) != value:
            raise UsageError(
                f"{option(entry.name)} {redacted(value)}: password or signature of the address "
                "would be stored; set credentials in the environment, or copy the file here"
            )
    milestones = getattr(config, "lr_milestones", "")
    if not re.fullmatch(r"(0?\.\d+(, *0?\.\d+)*)?", milestones):
        raise UsageError(f"--lr-milestones {milestones} are not shares; write them as 0.6,0.8")
    view_sizes = getattr(config, "view_sizes", "auto")
    if not re.fullmatch(r"auto|\d{1,4}(, *\d{1,4})*", view_sizes):
        raise UsageError(f"--view-sizes {view_sizes} are not pixels; write them as 16,24,32")
    for side in view_sizes.split(",") if view_sizes != "auto" else ():
        check_value("view_sizes", int(side), ViewSize)


def members(kind: Any) -> tuple[Any, ...]:
    """The types that a setting may have, and its values where they are listed.

    >>> members(Annotated[int | Auto, Range(1)])
    (<class 'int'>, 'auto')
    """
    if get_origin(kind) is Annotated:
        return members(kind.__origin__)
    if get_origin(kind) in (Union, UnionType):
        return tuple(member for each in get_args(kind) for member in members(each))
    return get_args(kind) if get_origin(kind) is Literal else (get_origin(kind) or kind,)


def fits(value: object, kind: Any) -> bool:
    """Whether a value is of the type a setting is annotated with; an int is a float too.

    >>> fits(3, float), fits("auto", int | Auto), fits(True, int), fits("x", Auto)
    (True, True, False, False)
    """
    types = tuple(member for member in members(kind) if isinstance(member, type))
    if isinstance(value, bool):
        return bool in types
    number = (int,) if float in types else ()
    return isinstance(value, (*types, *number)) or value in choices(kind)


def choices(kind: Any) -> tuple[str, ...]:
    """The values of a Literal, alone or in a union; none for other types.

    >>> choices(int | Auto), choices(float)
    (('auto',), ())
    """
    return tuple(member for member in members(kind) if isinstance(member, str))


def spelled(kind: Any) -> str:
    """A type as a person would say it.

    >>> spelled(int | Auto), spelled(Literal["fp32", "bf16"])
    ('a whole number or auto', 'fp32 or bf16')
    """
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return " or ".join(
        member if isinstance(member, str) else names.get(member, "a table")
        for member in members(kind)
    )


def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a data class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    notes = {}
    for entry, note in zip(body.body, body.body[1:], strict=False):
        if isinstance(entry, ast.AnnAssign) and isinstance(note, ast.Expr):
            assert isinstance(entry.target, ast.Name)
            assert isinstance(note.value, ast.Constant)
            notes[entry.target.id] = str(note.value.value)
    return notes


def option(name: str) -> str:
    """A setting's name as it is typed. `from` is a word of Python's, so there it is `from_run`.

    >>> option("batch_size"), option("from_run")
    ('--batch-size', '--from')
    """
    return "--" + name.removesuffix("_run").replace("_", "-")


def seconds(duration: str) -> float:
    """A duration in seconds.

    >>> seconds("45m"), seconds("1.5h"), seconds("90")
    (2700.0, 5400.0, 90.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", duration.strip())
    if not match or float(match[1]) == 0:
        raise UsageError(f"--max-time {duration} is not a duration; write it as 45m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def protocol_names(protocol: str) -> list[str]:
    """Return the names of protocols that are separated by commas, each once; `full` is all.

    Raises:
        UsageError: If there is no such protocol.

    >>> protocol_names("linear, knn")
    ['linear', 'knn']
    """
    names = _listed("--protocol", protocol, [*PROTOCOLS, FULL])
    return list(PROTOCOLS) if FULL in names else names


def tracker_names(trackers: str) -> list[str]:
    """Return the names of trackers that are separated by commas, each once; none if empty.

    Raises:
        UsageError: If there is no such tracker.

    >>> tracker_names("wandb,tensorboard"), tracker_names("")
    (['wandb', 'tensorboard'], [])
    """
    return _listed("--track", trackers, TRACKERS) if trackers else []


def _listed(typed: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names in a text, which are separated by commas, each once."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            listed = ", ".join(known)
            raise UsageError(f"{typed} {name} is none of {listed}.{suggestion(name, known)}")
    return list(dict.fromkeys(names))


def as_given(name: str) -> str:
    """How a user gave an unknown setting: as an option, or as a variable of the environment."""
    variable = f"{VARIABLES}{name.upper()}"
    return variable if variable in os.environ else option(name)


def suggestion(name: str, known: Iterable[str]) -> str:
    """` Did you mean x?`, where something known is close enough; else nothing.

    >>> suggestion("epocs", ["epochs", "seed"])
    ' Did you mean epochs?'
    """
    folded = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(name.casefold(), list(folded), n=1)
    return f" Did you mean {folded[close[0]]}?" if close else ""


def toml_value(value: Value | Sequence[float]) -> str:
    r"""A value as TOML writes it.

    >>> print(toml_value(True), toml_value('a "b"'), toml_value(1e-4))
    true "a \"b\"" 0.0001
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


AutoCount = Annotated[int | Auto, Range(1, MAX)]
AutoCountOrZero = Annotated[int | Auto, Range(0, MAX)]
ViewSize = Annotated[int, Range(8, MAX_IMAGE_SIZE)]
AutoRate = Annotated[float | Auto, Range(1e-12, MAX)]
Share = Annotated[float, Range(0, 1)]
HeldOut = Annotated[float, Range(0, 0.9)]
AutoHeldOut = Annotated[float | Auto, Range(0, 0.9)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Devices = Annotated[int, Range(1, 1024)]
Augment = str | Sequence[dict[str, Any]]
"""A name, or the views themselves as tables of the fields that differ from their defaults."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run. `auto` is replaced by what suits the data and the machine."""

    method: str = "simclr"
    """Method: a name of `nearkin methods`, FILE.py:NAME or module:NAME."""
    backbone: str = "auto"
    """Network: a name of `nearkin backbones`, FILE.py:NAME or module:NAME."""
    init_from: str = ""
    """Encoder to start from: a run, dinov2-small, timm:NAME, torchvision:NAME, or a file."""
    allow_partial: bool = False
    """Whether the encoder to start from, or the teacher, may lack weights or have others left."""
    trust_remote_code: bool = False
    """Whether to run code that files name: of an encoder, or of the run that goes on."""
    lora: Annotated[int, Range(0, 4096)] = 0
    """Rank of the matrices that learn beside frozen linear layers (LoRA); 0: all weights learn."""
    drop_path: Annotated[float | Auto, Range(0, 0.9)] = "auto"
    """Probability of leaving out the top residual branch; auto: as the network is built."""
    teacher: str = ""
    """Encoder to learn from, for a method that has a teacher: a run, a name or a file."""
    teacher_views: AutoCountOrZero = "auto"
    """Epochs after which views repeat, whose features are computed once; 0: never."""
    known: str = ""
    """Classes whose labels a method may learn from: names, separated by commas."""
    labels: str = "auto"
    """Labels, for evaluation only: auto, none, folders, or a table with columns path and label."""
    val: HeldOut = 0.1
    """Fraction of the images held out for evaluation, where the data have no test part."""
    scan: Literal["headers", "full"] = "headers"
    """Check before training: the header of every file, or every image decoded."""
    max_bad: Share = 0.1
    """Largest fraction of unreadable images to continue with."""
    augment: Augment = "auto"
    """Augmentation: a name as in the papers, characters, FILE.toml or FILE.py:NAME."""
    image_size: Annotated[int | Auto, Range(8, MAX_IMAGE_SIZE)] = "auto"
    """Side in pixels of the images that the encoder is for."""
    view_sizes: str = "auto"
    """Sides of the views in pixels, as 16,24,32, each for an equal part of training."""
    epochs: AutoCount = "auto"
    """Number of epochs."""
    max_time: str = ""
    """Length of the whole run, such as 45m or 2h; steps timed at the start give the epochs."""
    batch_size: Annotated[int | Auto, Range(2, MAX)] = "auto"
    """Images per step, over all processes."""
    optimizer: Literal["auto", "sgd", "lars", "adamw", "muon"] = "auto"
    """Optimizer."""
    lr: AutoRate = "auto"
    """Peak learning rate, used as it is (not scaled by the batch size)."""
    weight_decay: Annotated[float | Auto, Range(0, MAX)] = "auto"
    """Weight decay."""
    lars_eta: Annotated[float, Range(1e-12, MAX)] = 0.001
    """Trust coefficient of LARS."""
    lars_clip: bool = False
    """Whether LARS limits the rate of each layer to that of SGD."""
    lars_vectors: bool = False
    """Whether LARS adapts and decays biases and norms as well."""
    lars_joint: bool = False
    """Whether LARS divides by the norm of the decayed gradient, not by the sum of both norms."""
    lars_inside: bool = False
    """Whether LARS keeps the learning rate inside the momentum, as SimCLR's code."""
    warmup: Annotated[float, Range(0, 0.99)] = 0.1
    """Fraction of the training over which the learning rate rises; a cosine follows."""
    warmup_start: Share = 0.0
    """Learning rate at the start of the warm-up, as a fraction of its peak."""
    cosine_end: Share = 0.0
    """Learning rate at the end of the cosine, as a fraction of its peak."""
    lr_milestones: str = ""
    """Fractions of the training, separated by commas, at which the rate drops to a tenth."""
    layer_decay: Annotated[float | Auto, Range(0.01, 1)] = "auto"
    """Rate of a layer as a share of the one above; auto: 0.75 from an encoder, else 1."""
    freeze_epochs: AutoCountOrZero = "auto"
    """First epochs, in which only the heads learn; auto: a twentieth from an encoder, else 0."""
    seed: Seed = 0
    """Random seed."""
    evaluate_every: AutoCountOrZero = "auto"
    """Epochs between evaluations of health and kNN accuracy; 0: only at the end."""
    on_collapse: Literal["warn", "stop"] = "warn"
    """What to do when three evaluations in a row show collapsed embeddings."""
    device: str = "auto"
    """Device: auto, cpu, cuda, cuda:1, mps."""
    devices: Devices = 1
    """Processes on this machine that share each batch, one per GPU; torchrun starts its own."""
    fsdp: bool = False
    """Whether to shard weights, gradients and optimizer states over the processes (FSDP2)."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the networks; auto: bf16 where the device supports it natively."""
    compile: Literal["auto", "off", "on", "graphs"] = "auto"
    """Use of torch.compile, with CUDA graphs if wanted; auto: on in long runs on one GPU."""
    workers: AutoCountOrZero = "auto"
    """Processes that decode image files."""
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    """Where decoded image files are kept, at twice the side of a view."""
    shuffle_window: AutoCountOrZero = "auto"
    """Images mixed at a time; 0: all; auto: fewer for shards in a store that exceed its cache."""
    chunk_size: Annotated[int, Range(0, MAX)] = 0
    """Images in one pass through the networks, to save memory; 0: the whole batch."""
    grad_checkpointing: bool = False
    """Whether blocks compute their activations again for gradients, to save memory."""
    save_every: AutoCount = "auto"
    """Steps between checkpoints; auto: once a minute, less often if saving takes long."""
    report: bool = True
    """Whether to write report.html with its map at the end; `nearkin report` also does."""
    track: str = ""
    """Trackers to report to, separated by commas: tensorboard, wandb, trackio."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Options of the method, named as in its constructor."""

    verb: ClassVar[str] = "train"
    groups: ClassVar[Mapping[str, str]] = {
        "method": "Method",
        "labels": "Data",
        "augment": "Views",
        "epochs": "Optimization",
        "evaluate_every": "Evaluation",
        "device": "Machine",
        "save_every": "Output",
    }
    """Titles of groups of settings, by the first field of each."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be carried out, before anything is read."""
        check_settings(self)
        if self.lr_milestones and self.cosine_end:
            raise UsageError("--lr-milestones and --cosine-end exclude each other; give one")
        if self.fsdp and self.chunk_size:
            raise UsageError("--fsdp and --chunk-size exclude each other; give one")
        if self.fsdp and self.optimizer == "muon":
            raise UsageError("--fsdp divides the matrices that Muon needs whole; give adamw")
        self._check_start()
        tracker_names(self.track)
        if self.max_time:
            seconds(self.max_time)

    def _check_start(self) -> None:
        """Refuse what only makes sense with an encoder to start from."""
        needs = {
            "--lora": self.lora,
            "--allow-partial": self.allow_partial and not self.teacher,
            "--freeze-epochs": self.freeze_epochs not in ("auto", 0),
        }
        for name, is_set in needs.items():
            if is_set and not self.init_from:
                raise UsageError(f"{name} needs an encoder to start from; give --init-from too")
        if self.grad_checkpointing and self.compile in ("on", "graphs"):
            raise UsageError("--grad-checkpointing and --compile exclude each other; give one")


@dataclass(frozen=True, kw_only=True)
class DiscoverConfig:
    """Settings of a discovery. `auto` is replaced by what suits the images."""

    labeled: str = ""
    """Images of known classes: class folders, or a table with columns path and label."""
    known: str = ""
    """Known classes instead: names, separated by commas, of classes whose labels are used."""
    classes: Annotated[int | Auto, Range(0, MAX)] = "auto"
    """Number of novel classes; auto: estimated; 0: every unlabeled image is of a known class."""
    mode: Literal["gcd", "ncd"] = "gcd"
    """Whether unlabeled images may be of known classes (gcd), or are all of novel ones (ncd)."""
    accept: str = ""
    """An earlier discovery whose named classes become known ones."""
    val: AutoHeldOut = "auto"
    """Fraction held out for evaluation, if the data have no test part; auto: .1, or the run's."""
    truth: str = ""
    """True labels, for evaluation only: data, or a table or folders."""
    scan: Literal["headers", "full"] = "headers"
    """Check before training: the header of every file, or every image decoded."""
    max_bad: Share = 0.1
    """Largest fraction of unreadable images to continue with."""
    augment: Augment = "auto"
    """Augmentation: a name as in the papers, characters, FILE.toml or FILE.py:NAME."""
    num_views: Annotated[int, Range(2, 64)] = 8
    """Views of each image whose features are cached, where the encoder is frozen."""
    from_run: str = ""
    """Encoder to use instead of training one: a run, dinov2-small, timm:NAME, or a file."""
    allow_partial: bool = False
    """Whether that encoder may lack some weights, or have others left over."""
    trust_remote_code: bool = False
    """Whether to run code that files name: of an encoder, or of the run that goes on."""
    method: str = "simclr"
    """Method that trains an encoder without labels: a name, FILE.py:NAME or module:NAME."""
    train_layers: str = "auto"
    """What learns from labels: top, a layer on the frozen encoder; all, or a part by its name;
    or that part and the layer, as layer4,top."""
    known_epochs: AutoCount = "auto"
    """Epochs over the labeled images, in the second stage."""
    epochs: AutoCount = "auto"
    """Epochs over the unlabeled images, in the third stage."""
    max_time: str = ""
    """Length of the whole run, such as 45m or 2h; decides what is trained, and how long."""
    batch_size: Annotated[int | Auto, Range(4, MAX)] = "auto"
    """Images per step, half of them labeled."""
    lr_milestones: str = ""
    """Fractions of the last stage, separated by commas, at which the rate drops to a tenth."""
    objective: Literal["auto", "uno", "ncl", "joint_ncl", "simgcd"] = "auto"
    """Objective of the last stage; auto: chosen by hiding known classes."""
    start: Literal["clusters", "random"] = "clusters"
    """Initial class weights of the last stage: clusters of the features, or random."""
    pair_rate: Annotated[float | Auto, Range(0, MAX)] = "auto"
    """NCL: positive pairs, relative to those of equally large classes; auto: tuned."""
    entropy_weight: Annotated[float | Auto, Range(0, MAX)] = "auto"
    """SimGCD: weight of the mean-entropy term; auto: tuned by hiding known classes."""
    balance: Annotated[float | Auto, Range(0, 1)] = "auto"
    """UNO: how equal classes are kept in size, up to 1; auto: tuned by hiding known classes."""
    num_seeds: AutoCount = "auto"
    """Repetitions of the last stage, to see which classes are found again."""
    seed: Seed = 0
    """Random seed."""
    baselines: bool = True
    """Whether to train the baselines that the result is compared with."""
    device: str = "auto"
    """Device: auto, cpu, cuda, cuda:1, mps."""
    devices: Devices = 1
    """Processes on this machine that share each batch; torchrun starts its own."""
    workers: AutoCountOrZero = "auto"
    """Processes that decode image files."""
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    """Where decoded image files are kept."""
    copy_to: str = ""
    """A new folder to copy the images into, sorted by class."""
    report: bool = True
    """Whether to write report.html with its map at the end; `nearkin report` also does."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Options of the method of the objective: of uno, ncl or simgcd."""

    verb: ClassVar[str] = "discover"
    groups: ClassVar[Mapping[str, str]] = {
        "labeled": "Data",
        "augment": "Views",
        "from_run": "Method",
        "known_epochs": "Optimization",
        "baselines": "Evaluation",
        "device": "Machine",
        "copy_to": "Output",
    }
    """Titles of groups of settings, by the first field of each."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be carried out, before anything is read."""
        check_settings(self)
        if self.max_time:
            seconds(self.max_time)


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig:
    """Settings of a classification. `auto` is replaced by what suits the images."""

    labels: str = "auto"
    """Labels, of some images or of all: auto, folders, or a table with columns path and label."""
    labeled: str = ""
    """Labeled images instead: class folders, or a table with columns path and label."""
    val: AutoHeldOut = "auto"
    """Fraction held out for evaluation, if the data have no test part; auto: .1, or the run's."""
    scan: Literal["headers", "full"] = "headers"
    """Check before training: the header of every file, or every image decoded."""
    max_bad: Share = 0.1
    """Largest fraction of unreadable images to continue with."""
    augment: Augment = "auto"
    """Augmentation of fine-tuning: a name, FILE.toml or FILE.py:NAME."""
    from_run: str = ""
    """Encoder: a run folder, a name such as dinov2-small or timm:NAME, or a file."""
    trust_remote_code: bool = False
    """Whether to run code that files name: of an encoder, or of the run that goes on."""
    train_layers: str = "linear"
    """What learns: linear or attentive, a probe on the frozen encoder; last:N, its blocks; all."""
    epochs: AutoCount = "auto"
    """Epochs of fine-tuning; auto: chosen on held-out training images."""
    lr: AutoRate = "auto"
    """Peak learning rate of fine-tuning; auto: chosen on held-out training images."""
    layer_decay: Annotated[float | Auto, Range(0.01, 1)] = "auto"
    """Learning rate of each layer relative to the one above; auto: 0.75, as `nearkin train`."""
    batch_size: Annotated[int | Auto, Range(2, MAX)] = "auto"
    """Images per step of fine-tuning."""
    seed: Seed = 0
    """Random seed."""
    baselines: bool = True
    """Whether to measure the floors: other features, kNN, and fewer labels."""
    device: str = "auto"
    """Device: auto, cpu, cuda, cuda:1, mps."""
    workers: AutoCountOrZero = "auto"
    """Processes that decode image files."""
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    """Where decoded image files are kept."""
    copy_to: str = ""
    """A new folder to copy the images into, sorted by class."""
    report: bool = True
    """Whether to write report.html with its map at the end; `nearkin report` also does."""
    save_every: AutoCount = "auto"
    """Steps between checkpoints of fine-tuning; auto: once a minute."""

    verb: ClassVar[str] = "classify"
    groups: ClassVar[Mapping[str, str]] = {
        "labels": "Data",
        "augment": "Views",
        "from_run": "Method",
        "epochs": "Optimization",
        "baselines": "Evaluation",
        "device": "Machine",
        "copy_to": "Output",
    }
    """Titles of groups of settings, by the first field of each."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be carried out, before anything is read."""
        check_settings(self)
        if not re.fullmatch(r"linear|attentive|all|last:[1-9]\d{0,4}", self.train_layers):
            raise UsageError(
                f"--train-layers {self.train_layers} is not linear, attentive, last:N or all"
            )


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """Settings of a run that embeds images by an encoder as it is, and measures it on them."""

    encoder: str = ""
    """Encoder: a run folder, a file, or a name such as dinov2-small; what `nearkin.load` takes."""
    allow_partial: bool = False
    """Whether weights may be missing from the encoder's checkpoint, or left over."""
    trust_remote_code: bool = False
    """Whether to run code that files name: of an encoder, or of the run that goes on."""
    labels: str = "auto"
    """Labels, for evaluation only: auto, none, folders, or a table with columns path and label."""
    val: HeldOut = 0.1
    """Fraction of the images held out for evaluation, where the data have no test part."""
    scan: Literal["headers", "full"] = "headers"
    """Check before embedding: the header of every file, or every image decoded."""
    max_bad: Share = 0.1
    """Largest fraction of unreadable images to continue with."""
    image_size: Annotated[int | Auto, Range(8, MAX_IMAGE_SIZE)] = "auto"
    """Side of the images in pixels; auto: that of the encoder."""
    augment: Augment = "auto"
    """Augmentation of the second views that alignment is measured by, as of `nearkin train`."""
    seed: Seed = 0
    """Random seed of the images held out, and of the evaluation."""
    device: str = "auto"
    """Device: auto, cpu, cuda, cuda:1, mps."""
    workers: AutoCountOrZero = "auto"
    """Processes that decode image files."""
    report: bool = True
    """Whether to write report.html with its map at the end; `nearkin report` also does."""

    verb: ClassVar[str] = "embed"
    groups: ClassVar[Mapping[str, str]] = {
        "encoder": "Method",
        "labels": "Data",
        "image_size": "Views",
        "seed": "Evaluation",
        "device": "Machine",
        "report": "Output",
    }
    """Titles of groups of settings, by the first field of each."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be carried out, before anything is read."""
        check_settings(self)


Config = TrainConfig | DiscoverConfig | ClassifyConfig | EmbedConfig
Settings = TypeVar("Settings", bound=Config)
MAX_BYTES: Final = 1_000_000  # of a file of settings
TRUST: Final = "trust_remote_code"  # The setting that no file may hold: it would trust itself
FORMATS: Final = (1,)
"""Formats of run folders that are read; the last is written into their config.toml."""


def load_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of a file, which a message calls `what`."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError("it is too large for one")
        content = tomllib.loads(raw.decode("utf-8"))
        str(content)  # or no message could show a value: one too deep, or a number too long
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {what} {path}: {error}") from error
    return content


def recipes() -> dict[str, Path]:
    """The recipes inside the package, settings of papers, by their names without `recipe:`."""
    home = Path(__file__).parent / "recipes"
    files = sorted(home.glob("*/*.toml"))
    return {file.relative_to(home).with_suffix("").as_posix(): file for file in files}


def settings_file(path: Path) -> Path:
    """The file that `--config` names: by its path, or as `recipe:NAME` of one of `recipes`.

    >>> settings_file(Path("recipe:cifar10/moco")).name
    'moco.toml'
    """
    if not str(path).startswith(RECIPE):
        return path
    name, known = path.as_posix().removeprefix(RECIPE), recipes()
    if name not in known:
        within = [each for each in known if name in each]
        near = (within or difflib.get_close_matches(name, known))[:5]
        meant = near and f" Did you mean {', '.join(near)}?"
        raise UsageError(
            f"there is no recipe {name}.{meant or ''} `nearkin config --recipes` lists them"
        )
    return known[name]


def read_toml(path: Path, kind: type[Any] = TrainConfig) -> dict[str, Any]:
    """The settings in a file: names of that kind, `data`, and the tables `options` and `views`.

    A file without a format is of the newest one, without a kind of this: people leave them out.
    """
    settings = load_toml(path, "the configuration")
    try:
        check_format(settings.pop("format", FORMATS[-1]), FORMATS)
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}; take the release that wrote it") from error
    if (verb := settings.pop("kind", kind.verb)) != kind.verb:
        raise UsageError(f"{path} is of `nearkin {verb}`, not of `nearkin {kind.verb}`")
    if "views" in settings:
        if "augment" in settings:
            raise UsageError(f"{path} has both augment and views; give one")
        settings["augment"] = settings.pop("views")
    known = {"data", *(f.name for f in fields(kind))} - {TRUST}
    for key in settings:
        if key not in known:
            raise UsageError(f"{path} has an unknown key {key}.{suggestion(key, known)}")
    if not isinstance(settings.get("options", {}), dict):
        raise UsageError(f"--options {settings['options']} is not a table")
    return settings


def to_toml(config: Config, data: str) -> str:
    """A file that repeats the run, by `--config config.toml`."""
    lines = [f"format = {FORMATS[-1]}", f"kind = {toml_value(config.verb)}"]
    lines += [f"data = {toml_value(data)}"]
    views = () if isinstance(config.augment, str) else config.augment
    tables = {"options", *(["augment"] if views else [])}
    names = [entry.name for entry in fields(config) if entry.name not in {*tables, TRUST}]
    lines += [f"{name} = {toml_value(getattr(config, name))}" for name in names]
    options = [("[options]", getattr(config, "options", {}))] * hasattr(config, "options")
    for title, table in [*options, *(("[[views]]", view) for view in views)]:
        lines += ["", title, *(f"{name} = {toml_value(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


FREE = (
    "save_every", "workers", "max_bad", "on_collapse", "devices", "fsdp", "report", "track",
    "copy_to", TRUST,
)  # fmt: skip
"""Settings that may change when a run is resumed: they do not touch its result."""


def continued(requested: Settings, stored: Settings) -> Settings:
    """The stored settings of a run, if those that are requested now do not contradict them.

    What is left to `auto` is taken from the run, so that the same command continues it.
    """
    differences, free = [], dict[str, Any]()
    for entry in fields(stored):
        name = entry.name
        mine, theirs = getattr(requested, name), getattr(stored, name)
        if mine == "auto" or name == "max_time":
            continue
        if name in FREE:
            free[name] = mine
            continue
        if name == "options":
            theirs = {name: theirs.get(name) for name in mine}
        if mine != theirs:
            differences.append(f"{option(name)} {theirs} became {mine}")
    if differences:
        raise UsageError(
            f"the run was started with other settings ({'; '.join(differences)}); "
            "repeat its own command, or choose another --out"
        )
    return replace(stored, **free)
