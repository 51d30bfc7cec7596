"""What a training can be told, with its defaults.

One data class drives the command line, the Python call and `config.toml`. The options of a
method are not here: a method's constructor is its configuration, and they travel as `options`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

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
Workers = Annotated[int | Auto, Range(0, MAX)]
Rate = Annotated[float | Auto, Range(1e-12, MAX)]
Share = Annotated[float, Range(0, 1)]
HeldOut = Annotated[float, Range(0, 0.9)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Devices = Annotated[int, Range(1, 1024)]
Augment = str | Sequence[dict[str, Any]]
"""A name, or the views themselves as tables of the fields that differ from their defaults."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run. `auto` is replaced by what the data and machine call for."""

    method: str = "simclr"
    """What to train by; `nearkin methods` lists them."""
    backbone: str = "auto"
    """The network to train; `nearkin backbones` lists them."""
    epochs: Count = "auto"
    """Passes over the images."""
    max_time: str = ""
    """Length as time, such as 45m or 2h: turned into epochs by a measurement at the start."""
    batch_size: Annotated[int | Auto, Range(2, MAX)] = "auto"
    """Images per step, over all processes."""
    optimizer: Literal["auto", "sgd", "lars", "adamw"] = "auto"
    """What turns gradients into steps."""
    lr: Rate = "auto"
    """Peak learning rate, as it is used (not scaled by the batch)."""
    weight_decay: Annotated[float | Auto, Range(0, MAX)] = "auto"
    """Strength of weight decay."""
    lars_eta: Annotated[float, Range(1e-12, MAX)] = 0.001
    """Trust coefficient of LARS: how far a layer moves, as a share of its norm, at rate 1."""
    lars_clip: bool = False
    """Whether LARS moves no layer faster than SGD would."""
    lars_vectors: bool = False
    """Whether LARS adapts and decays biases and norms like all other weights."""
    warmup: Annotated[float, Range(0, 0.99)] = 0.1
    """Share of the training over which the learning rate rises; it then falls along a cosine."""
    warmup_start: Share = 0.0
    """Share of the peak learning rate from which it rises."""
    cosine_end: Share = 0.0
    """Share of the peak learning rate to which it falls."""
    lr_milestones: str = ""
    """Shares of the training, after commas, at which it drops to a tenth, instead of a cosine."""
    augment: Augment = "auto"
    """Augmentation: a name as in the papers, characters, FILE.toml or FILE.py:NAME."""
    image_size: Annotated[int | Auto, Range(8, MAX_IMAGE_SIZE)] = "auto"
    """Side of the views in pixels."""
    labels: str = "auto"
    """For scoring only: auto, none, folders, or a table with the columns path and label."""
    known: str = ""
    """Classes whose labels a method may learn from, by name, after commas."""
    val: HeldOut = 0.1
    """Share of the images held out for scoring, where the data name no test part."""
    evaluate_every: Annotated[int | Auto, Range(0, MAX)] = "auto"
    """Epochs between looks at health and kNN accuracy; 0 means only at the end."""
    on_collapse: Literal["warn", "stop"] = "warn"
    """What to do when three looks in a row show that the embeddings have become alike."""
    save_every: Count = "auto"
    """Steps between checkpoints; auto saves once a minute, less often if that takes long."""
    seed: Seed = 0
    """Decides everything that is drawn."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""
    devices: Devices = 1
    """Processes on this machine that share every batch, one per GPU; torchrun starts its own."""
    fsdp: bool = False
    """Whether weights, gradients and optimizer states are divided among the processes (FSDP2)."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Arithmetic of the networks; auto is bf16 where the processor has it."""
    compile: Literal["auto", "off", "on", "graphs"] = "auto"
    """Whether torch compiles the networks, and graphs them; auto does in long runs on one GPU."""
    workers: Workers = "auto"
    """Processes that decode photographs."""
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    """Where photographs are kept once they are decoded, at twice the side of a view."""
    chunk_size: Annotated[int, Range(0, MAX)] = 0
    """Images that go through the networks at a time, to save memory; 0 means the batch."""
    scan: Literal["headers", "full"] = "headers"
    """What is looked at before training: the header of every file, or every image decoded."""
    max_bad: Share = 0.1
    """Largest share of unreadable images to go on with."""
    init_from: str = ""
    """A run, or its encoder.safetensors, whose weights to start from."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Options of the method, named as in its constructor."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be carried out, before anything is read."""
        check_settings(self)
        check_milestones(self.lr_milestones)
        if self.lr_milestones and self.cosine_end:
            raise UsageError(
                "--lr-milestones and --cosine-end both say how the rate falls; give one"
            )
        if self.fsdp and self.chunk_size:
            raise UsageError("--fsdp divides no networks that run in chunks; leave one out")
        if self.max_time:
            seconds(self.max_time)


@dataclass(frozen=True, kw_only=True)
class DiscoverConfig:
    """Settings of a discovery. `auto` is replaced by what the images call for."""

    labeled: str = ""
    """Images of known classes: class folders, or a table with the columns path and label."""
    known: str = ""
    """Instead: names, after commas, of classes whose labels in the data count."""
    classes: Annotated[int | Auto, Range(2, MAX)] = "auto"
    """Novel classes to find; auto estimates how many there are."""
    mode: Literal["gcd", "ncd"] = "gcd"
    """Whether unlabeled images may be of known classes (gcd), or are all of novel ones (ncd)."""
    from_run: str = ""
    """A run whose encoder to stand on, instead of training one."""
    method: str = "simclr"
    """What to train an encoder by, without labels."""
    train_layers: str = "top"
    """What learns from labels: a layer on `top` of the encoder, `all` of it, or named parts."""
    epochs: Count = "auto"
    """Passes over the unlabeled images in the last stage."""
    known_epochs: Count = "auto"
    """Passes over the labeled images in the stage before it."""
    lr_milestones: str = ""
    """Shares of the last stage, after commas, at which the learning rate drops to a tenth."""
    batch_size: Annotated[int | Auto, Range(4, MAX)] = "auto"
    """Images per step, half of them labeled."""
    start: Literal["clusters", "random"] = "clusters"
    """Where classes start in the last stage: at clusters of the features, or anywhere."""
    pair_rate: Annotated[float | Auto, Range(0, MAX)] = "auto"
    """Mode ncd: positive pairs, as a share of those of equally large classes; auto tunes it."""
    entropy_weight: Annotated[float | Auto, Range(0, MAX)] = "auto"
    """Mode gcd: weight of the mean-entropy term; auto tunes it on hidden known classes."""
    num_seeds: Count = "auto"
    """How often the last stage is trained, to see which classes are found again."""
    baselines: bool = True
    """Whether to train what the result is compared with."""
    augment: Augment = "auto"
    """Augmentation: a name as in the papers, characters, FILE.toml or FILE.py:NAME."""
    num_views: Annotated[int, Range(2, 64)] = 8
    """Views kept of each image, where the encoder stays as it is."""
    truth: str = ""
    """For scoring only: `data` for the data's own labels, or a table or folders."""
    copy_to: str = ""
    """A new folder to sort the images into, by class."""
    accept: str = ""
    """An earlier discovery, whose named classes become known ones."""
    val: HeldOut = 0.1
    """Share of the images held out for scoring, where the data name no test part."""
    seed: Seed = 0
    """Decides everything that is drawn."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""
    devices: Devices = 1
    """Processes on this machine that share the batches of networks; torchrun starts its own."""
    workers: Workers = "auto"
    """Processes that decode photographs."""
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    """Where photographs that a network learns from are kept once they are decoded."""
    scan: Literal["headers", "full"] = "headers"
    """What is looked at before training: the header of every file, or every image decoded."""
    max_bad: Share = 0.1
    """Largest share of unreadable images to go on with."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Options of the last stage's method: of ncl (ncd) or simgcd (gcd)."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be carried out, before anything is read."""
        check_settings(self)
        check_milestones(self.lr_milestones)
