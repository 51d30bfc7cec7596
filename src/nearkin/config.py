"""Settings: a data class for each kind of run, which drives command line, Python and config.toml.

Options of a method are not among them: a method's constructor is its configuration, and they
travel as `options`.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from msgspec import Meta

from nearkin.choices import Tracker
from nearkin.errors import UsageError, redacted
from nearkin.schema import (
    MAX,
    Auto,
    Fraction,
    Value,
    Weight,
    check_value,
    option,
    suggestion,
    types_of,
)

MAX_IMAGE_SIZE: Final = 4096  # side in pixels of the largest views a network is built for
TRUST: Final = "trust_remote_code"  # The setting that no file may hold: it would trust itself

AutoCount = Annotated[int, Meta(ge=1, le=MAX)] | Auto
AutoCountOrZero = Annotated[int, Meta(ge=0, le=MAX)] | Auto
ViewSize = Annotated[int, Meta(ge=8, le=MAX_IMAGE_SIZE)]
AutoImageSize = ViewSize | Auto
AutoRate = Annotated[float, Meta(ge=1e-12, le=MAX)] | Auto
Milestone = Annotated[float, Meta(ge=1e-3, le=0.999)]
HeldOut = Annotated[float, Meta(ge=0, le=0.9)]
AutoHeldOut = HeldOut | Auto
Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Devices = Annotated[int, Meta(ge=1, le=1024)]
Duration = str | float
"""Text such as 45m, or seconds; Python takes a `timedelta`, too."""
Augment = str | Sequence[dict[str, Any]]
"""A name, or the views themselves as tables of the fields that differ from their defaults."""


COMPATIBLE: Final = {"compile": "off", "optimizer": "lars"}
"""Values that exclude nothing, beside defaults."""
OF_TRAINING: Final = ("method", "max_time", "devices")
"""Settings of a discovery that are of the training of an encoder."""


def report_by_default() -> bool:
    """Whether runs write a report unless told otherwise."""
    text = os.environ.get("NEARKIN_REPORT") or "true"
    if text not in ("true", "false"):
        raise UsageError(f"NEARKIN_REPORT {text!r} is not true or false")
    return text == "true"


def seconds(duration: Duration) -> float:
    """A duration in seconds.

    >>> seconds("45m"), seconds("1.5h"), seconds("90"), seconds(90.0)
    (2700.0, 5400.0, 90.0, 90.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", str(duration).strip())
    if not match or float(match[1]) == 0:
        raise UsageError(f"--max-time {duration} is not a duration; write it as 45m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of every kind of run. `auto` is replaced by what suits the data and the machine."""

    augment: Augment = "auto"
    """Augmentation: a name as in the papers, characters, FILE.toml or FILE.py:NAME."""
    scan: Literal["headers", "full"] = "headers"
    """Check of the images at the start: the header of every file, or every image decoded."""
    max_bad: Fraction = 0.1
    """Largest fraction of unreadable images to continue with."""
    seed: Seed = 0
    """Random seed."""
    device: str = "auto"
    """Device: auto, cpu, cuda, cuda:1, mps."""
    workers: AutoCountOrZero = "auto"
    """Processes that decode image files."""
    report: bool = field(default_factory=report_by_default)
    """Whether to write report.html at the end; `nearkin explore RUN --write` also does."""
    trust_remote_code: bool = False
    """Whether to run code that files name: of an encoder, or of the run that goes on."""

    verb: ClassVar[str]
    """The command that takes these settings."""
    exclusive: ClassVar[Sequence[tuple[str, str]]] = ()
    """Pairs of settings that exclude each other, but for defaults and what `COMPATIBLE` has."""

    def __post_init__(self) -> None:
        """Refuse values of the wrong type or out of range, before anything is read."""
        kinds = types_of(type(self))
        for entry in fields(self):
            name, value = entry.name, getattr(self, entry.name)
            object.__setattr__(self, name, check_value(name, value, kinds[name]))
            if isinstance(value, str) and redacted(value) != value:
                raise UsageError(
                    f"{option(name)} {redacted(value)}: password or signature of the address "
                    "would be stored; set credentials in the environment, or copy the file here"
                )
        if (duration := getattr(self, "max_time", "")) != "":
            seconds(duration)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Settings of a training run. `auto` is replaced by what suits the data and the machine."""

    method: str = "simclr"
    """Method: a name of `nearkin list methods`, FILE.py:NAME or module:NAME."""
    backbone: str = "auto"
    """Network: a name of `nearkin list backbones`, FILE.py:NAME or module:NAME."""
    encoder: str = ""
    """Encoder to start from: a run, dinov2-small, timm:NAME, torchvision:NAME, or a file."""
    allow_partial: bool = False
    """Whether the encoder to start from, or the teacher, may lack weights or have others left."""
    anchor: Weight | Auto = "auto"
    """Weight of the loss that holds features near those of the start; auto: 20 from an encoder
    without a teacher, else 0."""
    lora: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Rank of the matrices that learn beside frozen linear layers (LoRA); 0: all weights learn."""
    drop_path: Annotated[float, Meta(ge=0, le=0.9)] | Auto = "auto"
    """Probability of leaving out the top residual branch; auto: as the network is built."""
    teacher: str = ""
    """Encoder to learn from, for a method that has a teacher: a run, a name or a file."""
    teacher_views: AutoCountOrZero = "auto"
    """Epochs after which views repeat, whose features are computed once; 0: never."""
    known: Sequence[str] = ()
    """Names of the classes whose labels a method may learn from."""
    labels: str = "auto"
    """Labels, for evaluation only: auto, none, folders, or a table with columns path and label."""
    ignore: str = ""
    """Column of that table, or of DATA, that features are to ignore, such as camera."""
    val: HeldOut = 0.1
    """Fraction of the images held out for evaluation, where the data have no test part."""
    image_size: AutoImageSize = "auto"
    """Side in pixels of the images that the encoder is for."""
    num_views: Annotated[int, Meta(ge=0, le=64)] = 0
    """Views of each image, from the third on at two thirds of the side; 0: as the augmentation."""
    view_sizes: Sequence[ViewSize] | Auto = "auto"
    """Sides of the views in pixels, such as 16,24,32, each for an equal part of training."""
    epochs: AutoCount = "auto"
    """Number of epochs."""
    max_time: Duration = ""
    """Length of the whole run, such as 45m or 2h; steps timed at the start give the epochs."""
    batch_size: Annotated[int, Meta(ge=2, le=MAX)] | Auto = "auto"
    """Images per step, over all processes."""
    optimizer: Literal["auto", "sgd", "lars", "adamw", "muon"] = "auto"
    """Optimizer."""
    lr: AutoRate = "auto"
    """Peak learning rate, used as it is (not scaled by the batch size)."""
    weight_decay: Weight | Auto = "auto"
    """Weight decay."""
    final_weight_decay: Weight | Auto = "auto"
    """Weight decay at the end, to which it goes along a cosine; auto: it stays as it is."""
    clip_norm: Weight = 0.0
    """Largest norm of all gradients together, to which longer ones are scaled; 0: no limit."""
    lars_form: Literal["you", "simclr", "byol", "swav", "solo-learn"] = "you"
    """Form of LARS: the paper's (You et al. 2017), or that of the code of others."""
    warmup: Annotated[float, Meta(ge=0, le=0.99)] = 0.1
    """Fraction of the training over which the learning rate rises; a cosine follows."""
    warmup_start: Fraction = 0.0
    """Learning rate at the start of the warm-up, as a fraction of its peak."""
    cosine_end: Fraction = 0.0
    """Learning rate at the end of the cosine, as a fraction of its peak."""
    lr_milestones: Sequence[Milestone] = ()
    """Fractions of the training, such as 0.6,0.8, at which the rate drops to a tenth."""
    layer_decay: Annotated[float, Meta(ge=0.01, le=1)] | Auto = "auto"
    """Rate of a layer as a share of the one above; auto: 0.75 from an encoder without --lora,
    else 1."""
    freeze_epochs: AutoCountOrZero = "auto"
    """First epochs, in which only the heads learn; auto: a twentieth from an encoder, else 0."""
    evaluate_every: AutoCountOrZero = "auto"
    """Epochs between evaluations of health and kNN accuracy; 0: only at the end."""
    on_collapse: Literal["warn", "stop"] = "warn"
    """What to do when three evaluations in a row show collapsed embeddings."""
    devices: Devices = 1
    """Processes on this machine that share each batch, one per GPU; torchrun starts its own."""
    fsdp: bool = False
    """Whether to shard weights, gradients and optimizer states over the processes (FSDP2)."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the networks; auto: bf16 where the device supports it natively."""
    compile: Literal["auto", "off", "on", "graphs"] = "auto"
    """Use of torch.compile, with CUDA graphs if wanted; auto: on in long runs on one GPU, but
    for small views with Muon."""
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    """Where decoded image files are kept, at twice the side of a view."""
    shuffle_window: AutoCountOrZero = "auto"
    """Images mixed at a time; 0: all; auto: fewer for shards in a store that exceed its cache."""
    chunk_size: Annotated[int, Meta(ge=0, le=MAX)] = 0
    """Images in one pass through the networks, to save memory; 0: the whole batch."""
    grad_checkpointing: bool = False
    """Whether a ViT of timm computes activations again for gradients, to save memory."""
    save_every: AutoCount = "auto"
    """Steps between checkpoints; auto: once a minute, less often if saving takes long."""
    track: Sequence[Tracker] = ()
    """Trackers to report to: tensorboard, wandb, trackio."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Options of the method, named as in its constructor."""

    verb: ClassVar[str] = "train"
    exclusive: ClassVar[Sequence[tuple[str, str]]] = (
        ("epochs", "max_time"),
        ("encoder", "backbone"),
        ("lr_milestones", "cosine_end"),
        ("fsdp", "chunk_size"),
        ("grad_checkpointing", "compile"),
        ("optimizer", "lars_form"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_milestones and self.cosine_end:
            raise UsageError("--lr-milestones and --cosine-end exclude each other; give one")
        if self.lars_form != "you" and self.optimizer not in ("auto", "lars"):
            raise UsageError(f"--lars-form {self.lars_form} is of --optimizer lars; give that")
        if self.weight_decay == 0 and self.final_weight_decay not in ("auto", 0):
            raise UsageError("--final-weight-decay changes one above 0; give --weight-decay too")
        if self.fsdp and self.chunk_size:
            raise UsageError("--fsdp and --chunk-size exclude each other; give one")
        if self.fsdp and self.optimizer == "muon":
            raise UsageError("--fsdp divides the matrices that Muon needs whole; give adamw")
        self._check_start()

    def _check_start(self) -> None:
        """Refuse what only makes sense with an encoder to start from."""
        needs = {
            "--anchor": self.anchor not in ("auto", 0),
            "--lora": self.lora,
            "--allow-partial": self.allow_partial and not self.teacher,
            "--freeze-epochs": self.freeze_epochs not in ("auto", 0),
        }
        for name, is_set in needs.items():
            if is_set and not self.encoder:
                raise UsageError(f"{name} needs an encoder to start from; give --encoder too")
        if self.grad_checkpointing and self.compile in ("on", "graphs"):
            raise UsageError("--grad-checkpointing and --compile exclude each other; give one")


@dataclass(frozen=True, kw_only=True)
class DiscoverConfig(RunConfig):
    """Settings of a discovery. `auto` is replaced by what suits the images."""

    labeled: str = ""
    """Images of known classes: class folders, or a table with columns path and label."""
    known: Sequence[str] = ()
    """Known classes instead: names of classes of the data whose labels are used."""
    classes: Annotated[int, Meta(ge=0, le=MAX)] | Auto = "auto"
    """Number of novel classes; auto: estimated; 0: every unlabeled image is of a known class."""
    mode: Literal["gcd", "ncd"] = "gcd"
    """Whether unlabeled images may be of known classes (gcd), or are all of novel ones (ncd)."""
    accept: str = ""
    """An earlier discovery whose named classes become known ones."""
    val: AutoHeldOut = "auto"
    """Fraction held out for evaluation, if the data have no test part; auto: .1, or the run's."""
    truth: str = ""
    """True labels, for evaluation only: data, or a table or folders."""
    encoder: str = "auto"
    """Encoder: a run, a name or a file; auto: dinov2-small for images of 64 px and more, unless a
    training is asked for by --method or --max-time; for others one is trained."""
    allow_partial: bool = False
    """Whether that encoder may lack some weights, or have others left over."""
    method: str = "auto"
    """Method that trains an encoder without labels: a name, FILE.py:NAME or module:NAME; auto:
    simclr, where one is trained."""
    train_layers: str = "top"
    """What learns from labels: top, a layer on the frozen encoder; last:N, its blocks, or all;
    or these and the layer, as last:1,top."""
    epochs: AutoCount = "auto"
    """Epochs over the unlabeled images, in the third stage."""
    max_time: Duration = ""
    """Length of the training of an encoder, such as 45m or 2h; as `nearkin train` if empty."""
    batch_size: Annotated[int, Meta(ge=4, le=MAX)] | Auto = "auto"
    """Images per step, half of them labeled."""
    devices: Devices = 1
    """Processes on this machine that train an encoder together; torchrun starts its own."""
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    """Where decoded image files are kept."""
    copy_to: str = ""
    """A new folder to copy the images into, sorted by class."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Options of the method of the last stage: of simgcd, or of ncl in mode ncd."""

    verb: ClassVar[str] = "discover"
    exclusive: ClassVar[Sequence[tuple[str, str]]] = (
        ("known", "labeled"),
        *((taken, trained) for taken in ("encoder", "accept") for trained in OF_TRAINING),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        part = self.train_layers.removesuffix(",top")
        _check_layers(self.train_layers if part == "top" else part, ("top",))


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(RunConfig):
    """Settings of a classification. `auto` is replaced by what suits the images."""

    labels: str = "auto"
    """Labels, of some images or of all: auto, folders, or a table with columns path and label."""
    labeled: str = ""
    """Labeled images instead: class folders, or a table with columns path and label."""
    val: AutoHeldOut = "auto"
    """Fraction held out for evaluation, if the data have no test part; auto: .1, or the run's."""
    encoder: str = ""
    """Encoder: a run folder, a name such as dinov2-small or timm:NAME, or a file."""
    allow_partial: bool = False
    """Whether that encoder may lack some weights, or have others left over."""
    train_layers: str = "linear"
    """What learns: linear or attentive, a probe on the frozen encoder; last:N, its blocks; all."""
    epochs: AutoCount = "auto"
    """Epochs of fine-tuning; auto: chosen on held-out training images."""
    lr: AutoRate = "auto"
    """Peak learning rate of fine-tuning; auto: chosen on held-out training images."""
    layer_decay: Annotated[float, Meta(ge=0.01, le=1)] | Auto = "auto"
    """Learning rate of each layer relative to the one above; auto: 0.75, as `nearkin train`."""
    batch_size: Annotated[int, Meta(ge=2, le=MAX)] | Auto = "auto"
    """Images per step of fine-tuning."""
    baselines: bool = True
    """Whether to measure the baselines: other features and kNN."""
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    """Where decoded image files are kept."""
    copy_to: str = ""
    """A new folder to copy the images into, sorted by class."""
    save_every: AutoCount = "auto"
    """Steps between checkpoints of fine-tuning; auto: once a minute."""

    verb: ClassVar[str] = "classify"
    exclusive: ClassVar[Sequence[tuple[str, str]]] = (("labels", "labeled"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_layers(self.train_layers, ("linear", "attentive"))


def _check_layers(layers: str, frozen: Sequence[str]) -> None:
    """Refuse what is neither a way to learn on a frozen encoder nor a part of the encoder."""
    if layers not in (*frozen, "all") and not re.fullmatch(r"last:[1-9]\d{0,4}", layers):
        raise UsageError(f"--train-layers {layers} is not {', '.join(frozen)}, last:N or all")


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(RunConfig):
    """Settings of a run that embeds images by an encoder as it is, and measures it on them."""

    encoder: str = ""
    """Encoder: a run folder, a file, or a name such as dinov2-small; what `nearkin.load` takes."""
    allow_partial: bool = False
    """Whether weights may be missing from the encoder's checkpoint, or left over."""
    labels: str = "auto"
    """Labels, for evaluation only: auto, none, folders, or a table with columns path and label."""
    ignore: str = ""
    """Column of that table, or of DATA, such as camera, to remove from features that -o names."""
    val: HeldOut = 0.1
    """Fraction of the images held out for evaluation, where the data have no test part."""
    image_size: AutoImageSize = "auto"
    """Side of the images in pixels; auto: that of the encoder."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the encoder; auto: fp32, or bf16 on a CPU that has it and if neighbors stay."""
    batch_size: Annotated[int, Meta(ge=1, le=MAX)] | Auto = "auto"
    """Images in one pass of the encoder; auto: by their size and the device."""

    verb: ClassVar[str] = "embed"


Config = TrainConfig | DiscoverConfig | ClassifyConfig | EmbedConfig
Settings = TypeVar("Settings", bound=RunConfig)

GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "Data": (
        *("labeled", "known", "classes", "mode", "accept", "labels", "ignore"),
        *("val", "truth", "scan", "max_bad", "trust_remote_code"),
    ),
    "Method": (
        *("method", "backbone", "encoder", "teacher", "teacher_views"),
        *("allow_partial", "anchor", "lora", "drop_path", "train_layers"),
    ),
    "Views": ("augment", "num_views", "image_size", "view_sizes"),
    "Optimization": (
        *("epochs", "max_time", "batch_size", "optimizer", "lr", "weight_decay"),
        *("final_weight_decay", "clip_norm", "lars_form", "warmup", "warmup_start"),
        *("cosine_end", "lr_milestones", "layer_decay", "freeze_epochs", "seed"),
    ),
    "Evaluation": ("evaluate_every", "on_collapse", "baselines"),
    "Machine": (
        *("device", "devices", "fsdp", "precision", "compile", "workers", "cache"),
        *("shuffle_window", "chunk_size", "grad_checkpointing"),
    ),
    "Output": ("copy_to", "save_every", "report", "track"),
}
"""The settings of all kinds of runs by subject, each in the order of help and files."""
COMMON: Final = (
    *("labeled", "known", "classes", "mode", "labels", "method", "encoder"),
    *("augment", "image_size", "epochs", "max_time", "batch_size", "lr", "train_layers"),
    *("seed", "device", "devices", "copy_to"),
)
"""The settings that `--help` lists; `--help-all` lists all."""


def settings_from(kind: type[Settings], *layers: Mapping[str, Any]) -> Settings:
    """Settings by name, of which later layers replace those of earlier ones.

    What is no setting is an option of the method.

    Raises:
        UsageError: If there is no such setting, or it has another type.
    """
    names = {entry.name for entry in fields(kind)}
    values, options = dict[str, Any](), dict[str, Any]()
    for layer in layers:
        values |= {name: value for name, value in layer.items() if name in names}
        options |= layer.get("options") or {}
        options |= {name: value for name, value in layer.items() if name not in names}
    if "options" in names:
        values["options"] = options
    elif options:
        name = min(options)
        raise UsageError(f"{kind.__name__} has no {name}.{suggestion(name, names)}")
    return kind(**values)


def excluded(
    kind: type[RunConfig], stored: Mapping[str, Any], typed: Mapping[str, Any]
) -> dict[str, str]:
    """Names of the settings of a file that contradict what is typed, with the name of that.

    Options of a method do where another method is typed.
    """
    usual = vars(kind())

    def set_in(settings: Mapping[str, Any], name: str) -> bool:
        value = settings.get(name)
        return bool(value) and value not in (usual.get(name), COMPATIBLE.get(name))

    found = {
        theirs: mine
        for pair in kind.exclusive
        for mine, theirs in (pair, pair[::-1])
        if set_in(typed, mine) and typed[mine] != stored.get(mine)
        if set_in(stored, theirs) and theirs not in typed
    }
    chosen = "mode" if kind is DiscoverConfig else "method"  # which has these options
    both = chosen in stored and chosen in typed
    if both and stored.get("options") and typed[chosen] != stored[chosen]:
        found["options"] = chosen
    return found
