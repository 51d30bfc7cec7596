"""The settings of a training and of a discovery: one data class each.

They drive the command line, the Python call and `config.toml`. Options of a method are not among
them: a method's constructor is its configuration, and they travel as `options`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from nearkin.config.values import (
    MAX,
    MAX_IMAGE_SIZE,
    Auto,
    Range,
    Value,
    check_milestones,
    check_settings,
    seconds,
)
from nearkin.errors import UsageError

Count = Annotated[int | Auto, Range(1, MAX)]
CountOrZero = Annotated[int | Auto, Range(0, MAX)]
Rate = Annotated[float | Auto, Range(1e-12, MAX)]
Share = Annotated[float, Range(0, 1)]
HeldOut = Annotated[float, Range(0, 0.9)]
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
    """Run folder or encoder.safetensors whose weights to start from."""
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
    """Side of the views in pixels."""
    epochs: Count = "auto"
    """Number of epochs."""
    max_time: str = ""
    """Length as time, such as 45m or 2h; converted to epochs by a measurement at the start."""
    batch_size: Annotated[int | Auto, Range(2, MAX)] = "auto"
    """Images per step, over all processes."""
    optimizer: Literal["auto", "sgd", "lars", "adamw"] = "auto"
    """Optimizer."""
    lr: Rate = "auto"
    """Peak learning rate, used as it is (not scaled by the batch size)."""
    weight_decay: Annotated[float | Auto, Range(0, MAX)] = "auto"
    """Weight decay."""
    lars_eta: Annotated[float, Range(1e-12, MAX)] = 0.001
    """Trust coefficient of LARS."""
    lars_clip: bool = False
    """Whether LARS limits the rate of each layer to that of SGD."""
    lars_vectors: bool = False
    """Whether LARS adapts and decays biases and norms as well."""
    warmup: Annotated[float, Range(0, 0.99)] = 0.1
    """Fraction of the training over which the learning rate rises; a cosine follows."""
    warmup_start: Share = 0.0
    """Learning rate at the start of the warm-up, as a fraction of its peak."""
    cosine_end: Share = 0.0
    """Learning rate at the end of the cosine, as a fraction of its peak."""
    lr_milestones: str = ""
    """Fractions of the training, separated by commas, at which the rate drops to a tenth."""
    seed: Seed = 0
    """Random seed."""
    evaluate_every: CountOrZero = "auto"
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
    workers: CountOrZero = "auto"
    """Processes that decode image files."""
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    """Where decoded image files are kept, at twice the side of a view."""
    chunk_size: Annotated[int, Range(0, MAX)] = 0
    """Images in one pass through the networks, to save memory; 0: the whole batch."""
    save_every: Count = "auto"
    """Steps between checkpoints; auto: once a minute, less often if saving takes long."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Options of the method, named as in its constructor."""

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
        check_milestones(self.lr_milestones)
        if self.lr_milestones and self.cosine_end:
            raise UsageError("--lr-milestones and --cosine-end exclude each other; give one")
        if self.fsdp and self.chunk_size:
            raise UsageError("--fsdp and --chunk-size exclude each other; give one")
        if self.max_time:
            seconds(self.max_time)


@dataclass(frozen=True, kw_only=True)
class DiscoverConfig:
    """Settings of a discovery. `auto` is replaced by what suits the images."""

    labeled: str = ""
    """Images of known classes: class folders, or a table with columns path and label."""
    known: str = ""
    """Known classes instead: names, separated by commas, of classes whose labels are used."""
    classes: Annotated[int | Auto, Range(2, MAX)] = "auto"
    """Number of novel classes; auto: estimated."""
    mode: Literal["gcd", "ncd"] = "gcd"
    """Whether unlabeled images may be of known classes (gcd), or are all of novel ones (ncd)."""
    accept: str = ""
    """An earlier discovery whose named classes become known ones."""
    val: HeldOut = 0.1
    """Fraction of the images held out for evaluation, where the data have no test part."""
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
    """Run folder whose encoder to use, instead of training one."""
    method: str = "simclr"
    """Method that trains an encoder without labels: a name, FILE.py:NAME or module:NAME."""
    train_layers: str = "top"
    """What learns from labels: `top`, a layer on the frozen encoder; `all`; or named parts."""
    known_epochs: Count = "auto"
    """Epochs over the labeled images, in the second stage."""
    epochs: Count = "auto"
    """Epochs over the unlabeled images, in the third stage."""
    batch_size: Annotated[int | Auto, Range(4, MAX)] = "auto"
    """Images per step, half of them labeled."""
    lr_milestones: str = ""
    """Fractions of the last stage, separated by commas, at which the rate drops to a tenth."""
    start: Literal["clusters", "random"] = "clusters"
    """Initial class weights of the last stage: clusters of the features, or random."""
    pair_rate: Annotated[float | Auto, Range(0, MAX)] = "auto"
    """Mode ncd: positive pairs, relative to those of equally large classes; auto: tuned."""
    entropy_weight: Annotated[float | Auto, Range(0, MAX)] = "auto"
    """Mode gcd: weight of the mean-entropy term; auto: tuned by hiding known classes."""
    num_seeds: Count = "auto"
    """Repetitions of the last stage, to see which classes are found again."""
    seed: Seed = 0
    """Random seed."""
    baselines: bool = True
    """Whether to train the baselines that the result is compared with."""
    device: str = "auto"
    """Device: auto, cpu, cuda, cuda:1, mps."""
    devices: Devices = 1
    """Processes on this machine that share each batch; torchrun starts its own."""
    workers: CountOrZero = "auto"
    """Processes that decode image files."""
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    """Where decoded image files are kept."""
    copy_to: str = ""
    """A new folder to copy the images into, sorted by class."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Options of the last stage's method: of ncl (ncd) or simgcd (gcd)."""

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
        check_milestones(self.lr_milestones)
