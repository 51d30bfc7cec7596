"""Published recipes of discoveries are complete, and train what they say for as long as they say."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import nearkin
from nearkin.choices import MODE_METHODS
from nearkin.classifier.features import UNTOUCHED, Extraction
from nearkin.classifier.layers import trained_parts
from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.data.samplers import TwoStreamBatchSampler
from nearkin.discovery.data import open_discovery_data
from nearkin.discovery.features import FinetunedEncoder
from nearkin.discovery.stages import Stages
from nearkin.discovery.trials import Candidate, candidates, folds
from nearkin.encoders.encoder import Encoder
from nearkin.networks.backbone import build_backbone
from nearkin.run.options import checked_options, method_options
from nearkin.toml import read_toml, settings_file
from nearkin.training.fit import optimizer_for, schedule_for
from nearkin.training.loop import steps

HOME = Path(nearkin.__file__).parent / "recipes"
RECIPES = sorted(HOME.glob("discovery/*.toml"))


class Sizes(NamedTuple):
    """Of the data set that a recipe is called after."""

    per_class: int  # Training images of each class
    known: int  # Known classes, where a table of labeled images names them
    labeled: int  # Labeled training images (Vaze et al. 2022, table 1)


SIZES = {
    "cifar10": Sizes(5000, 0, 25_000), "cub": Sizes(30, 100, 1500),
    "stanford_cars": Sizes(41, 98, 2000), "cifar100": Sizes(500, 80, 20_000),
    "imagenet100": Sizes(1300, 50, 31_900), "herbarium19": Sizes(50, 341, 8900),
}  # fmt: skip
SIDE, EACH, CPU = 32, 2, torch.device("cpu")

each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def classes_of(path):
    """Known classes, and how many more there are."""
    settings = read_toml(path, DiscoverConfig)
    numbered = [f"known {number}" for number in range(SIZES[path.stem].known)]
    return numbered or settings["known"], settings["classes"]


def test_the_head_of_a_recipe_says_where_it_is_from_and_what_came_of_it(tmp_path, refusal):
    assert "cifar10" in [path.stem for path in RECIPES]
    for path in RECIPES:
        head = path.read_text(encoding="utf-8").split("\n\n")[0]
        fields = dict(re.findall(r"^# (\w+) +(\S.*)$", head, re.MULTILINE))
        assert {"Source", "Published", "Hardware", "Time", "Result", "Commit"} <= fields.keys()
        assert fields["Command"].startswith("nearkin ")
        commands = re.findall(r"nearkin (\w+) .*--config (\S+)", head)
        assert ("discover", f"recipe:discovery/{path.stem}") in commands
        assert all(settings_file(Path(recipe)).is_file() for _, recipe in commands)
        typed = "--config", f"recipe:discovery/{path.stem}", "--labeled", tmp_path
        line = refusal(3, "discover", tmp_path / "gone", *typed, "-o", tmp_path / "run")
        assert "gone: no such file or folder" in line, "no other name in it is refused"


@each_recipe
def test_a_recipe_leaves_nothing_to_chance_and_fits_its_data_set_also_with_classes_hidden(path):
    settings, (known, _) = read_toml(path, DiscoverConfig), classes_of(path)
    config, options = DiscoverConfig(**settings), settings["options"]
    decided = ["classes", "mode", "train_layers", "epochs", "batch_size", "augment"]
    decided += [] if SIZES[path.stem].known else ["known"]
    assert all(settings[name] != "auto" for name in decided)
    assert candidates(config) == [Candidate(MODE_METHODS[config.mode])], "trials would choose"
    method = MODE_METHODS[config.mode]
    assert checked_options(method, config.options) == options
    hidden = {len(fold) for fold in folds(len(known), settings["classes"], seed=0)}
    for count in {settings["classes"], *hidden}:
        sizes = count * SIZES[path.stem].per_class, settings["batch_size"] // 2
        assert options.items() <= method_options(method, options, *sizes).items()


def small(path):
    """A recipe for a few images: of each batch and queue, as much as they fill."""
    settings = read_toml(path, DiscoverConfig)
    options = settings.pop("options")
    sizes = {key: min(value, 8) for key, value in options.items() if type(value) is int}
    known = classes_of(path)[0]
    few = dict(batch_size=8, val=0.0, known=known)
    return DiscoverConfig(**settings | few, options=options | sizes)


@each_recipe
def test_a_recipe_is_as_long_as_its_source(path):
    """200 epochs of all images, 128 at a time, the last ones of an epoch left out."""
    settings, (known, novel) = read_toml(path, DiscoverConfig), classes_of(path)
    count = (len(known) + novel) * SIZES[path.stem].per_class
    rows = np.split(np.arange(count), [SIZES[path.stem].labeled])
    sampler = TwoStreamBatchSampler(
        rows[0], rows[0] % len(known), rows[1], settings["batch_size"], seed=0
    )
    assert settings["epochs"] * sampler.steps_per_epoch == pytest.approx(
        200 * (count // 128), rel=0.015
    )


@pytest.fixture
def learning(path, tmp_path):
    """The last stage of a recipe, on a few images of noise."""
    config, (known, novel) = small(path), classes_of(path)
    names = [*known, *(f"new {number}" for number in range(novel))]
    pixels = np.random.default_rng(0).integers(0, 256, (len(names) * EACH, SIDE, SIDE, 3))
    np.savez(tmp_path / "data.npz", x=pixels.astype(np.uint8), y=np.repeat(names, EACH))
    dataset = open_discovery_data(str(tmp_path / "data.npz"), config)
    name = "timm:vit_tiny_patch16_224?embed_dim=48"  # as deep as the base model
    if path.stem == "cifar10":
        name = read_toml(HOME / path.stem / "rotnet.toml")["backbone"]
    torch.manual_seed(0)
    pretrained = Encoder(build_backbone(name, SIDE), SIDE, {})
    task = replace(dataset.task(config.mode), num_novel=novel)
    assert (task.num_known, len(task.labeled)) == (len(known), len(known) * EACH)
    shared = ("epochs", "augment", "batch_size", "seed")
    fixed = dict(image_size=SIDE, precision="fp32", workers=0, cache="off")
    base = TrainConfig(**{name: getattr(config, name) for name in shared}, **fixed)
    cached = Extraction(pretrained, dataset.images, UNTOUCHED, CPU, 0).compute().features
    layers = config.train_layers
    encoder = FinetunedEncoder(pretrained, cached, dataset.images, layers, base, CPU)
    stages = Stages(encoder, task, base)
    return stages.classes(stages.start(lambda _: None), config.options)


@each_recipe
def test_a_recipe_trains_the_end_of_its_network_and_slows_down_as_a_cosine(path, learning):
    """Two steps half-way."""
    config, method, feed = learning.config, learning.method, learning.feed
    settings, per_epoch = read_toml(path, DiscoverConfig), feed.sampler.steps_per_epoch
    assert config.epochs == settings["epochs"]
    total, half = config.epochs * per_epoch, config.epochs // 2 * per_epoch
    optimizer, body = optimizer_for(method, config), method.backbone.body
    before = {name: value.clone() for name, value in body.state_dict().items()}
    rates, two = [], feed.load(half - 1, half + 1)
    how = dict(start=half - 1, total=total, seed=config.seed)
    how["schedule"] = schedule_for(config, total)
    for _, output in steps(method, optimizer, two, **how):
        assert output.loss.isfinite()
        rates.append([group["lr"] for group in optimizer.param_groups])
    cosine = [0.05 * (1 + math.cos(math.pi * step / total)) for step in (half - 1, half)]
    for rate, expected in zip(rates, cosine, strict=True):
        assert rate == pytest.approx([expected] * len(rate))
    after = body.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    parts = trained_parts(method.backbone, settings["train_layers"])
    assert parts[0] == ("layer4.0" if path.stem == "cifar10" else "blocks.11")
    learned = {name for name in before if name.startswith(tuple(f"{p}." for p in parts))}
    assert 0 < len(learned) < len(before) / 2
    assert changed == learned
