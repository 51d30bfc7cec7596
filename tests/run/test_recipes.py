"""Every method has its published recipes, and each of them trains."""

import copy
import math
import re
from pathlib import Path

import builders
import numpy as np
import pytest
import torch
from nearkin_command import run
from torch import nn

import nearkin
from nearkin.config import TrainConfig
from nearkin.data.augmentations import views_of
from nearkin.data.opening import open_images
from nearkin.methods import METHODS
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import Backbone
from nearkin.objectives import sigreg, unit
from nearkin.run.auto import resolve
from nearkin.run.folder import RunFolder
from nearkin.run.options import checked_options, method_options
from nearkin.toml import read_toml
from nearkin.training.fit import optimizer_for, schedule_for, training_steps
from nearkin.training.optimizer import LARS, LARS_FORMS
from nearkin.training.session import build
from nearkin.training.teacher import open_teacher, parts_of
from nearkin.types import Batch

HOME = Path(nearkin.__file__).parent / "recipes"
RECIPES = sorted(HOME.glob("cifar10/*.toml")) + sorted(HOME.glob("imagenet/*.toml"))
CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
KNOWN = ("airplane", "automobile", "bird", "cat", "deer")
NUM_IMAGES = {"cifar10": 50_000, "imagenet": 1_281_167}
CPU = torch.device("cpu")


def name_of(path):
    """As a message or `--config recipe:NAME` says it."""
    return path.relative_to(HOME).with_suffix("").as_posix()


def test_every_method_has_a_recipe_and_options_are_those_of_the_sources():
    files = [(path.parent.name, read_toml(path)) for path in RECIPES]

    def options(folder, method, key):
        return {
            f["options"][key] for where, f in files if (where, f["method"]) == (folder, method)
        }

    for folder in NUM_IMAGES:
        assert {file["method"] for where, file in files if where == folder} == set(METHODS), folder
    assert options("imagenet", "moco", "projector") == {"linear", "mlp"}
    assert options("cifar10", "instdisc", "loss") == {"nce", "softmax"}
    assert 65_536 in options("cifar10", "nnclr", "support_size")  # though there are fewer images


def head_of(path):
    """The entries of a recipe's head, each on one line."""
    head = path.read_text(encoding="utf-8").split("\n\n")[0]
    joined = re.sub(r"\n# {12}", " ", head)
    return dict(re.findall(r"^# (\w+) +(\S.*)$", joined, re.MULTILINE))


def test_the_head_of_a_recipe_says_where_it_is_from_and_what_came_of_it():
    of_so_many = 0
    for path in RECIPES:
        entries = head_of(path)
        for needed in ("Source", "Published", "Protocol", "Hardware", "Time", "Result", "Commit"):
            assert entries[needed], path
        assert entries["Command"].startswith("nearkin train "), path
        assert f"--config recipe:{name_of(path)}" in entries["Command"]
        published = entries["Published"]
        assert re.search(r"\d %", published) or published.startswith("no"), path
        if match := re.search(r"after ([\d,]+) epochs", published):
            of_so_many += 1
            assert int(match[1]) == read_toml(path)["epochs"], path
    assert of_so_many > len(RECIPES) / 3


def test_the_numbers_of_the_overview_are_those_of_the_heads():
    overview = (HOME / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]*\| (`[^|]*) \| ([^|]*)\|$", overview, re.MULTILINE)
    assert len(rows) == 4
    for names, numbers in rows:
        recipes, values = re.findall(r"`(\w+)`", names), re.findall(r"[\d.]+ %", numbers)
        for name, value in zip(recipes, values, strict=True):
            entries = head_of(HOME / "cifar10" / f"{name}.toml")
            assert f"{value} kNN" in entries["Published"]
            assert read_toml(HOME / "cifar10" / f"{name}.toml")["epochs"] == 200
            assert ("on the embedding" in numbers) == ("on the embedding" in entries["Protocol"])


def test_a_recipe_leaves_nothing_that_matters_to_chance_and_fits_its_data_set():
    decided = ("epochs", "batch_size", "optimizer", "lr", "weight_decay", "augment", "image_size")
    for path in RECIPES:
        settings = read_toml(path)
        config = TrainConfig(**settings)
        assert settings.keys() >= {*decided, "method", "backbone", "warmup"}, path
        assert checked_options(config.method, config.options) == settings["options"], path
        lars = {key for key in settings if key.startswith("lars_")}
        assert config.optimizer == "lars" or not lars, path
        size = NUM_IMAGES[path.parent.name], settings["batch_size"]
        used = method_options(settings["method"], settings["options"], *size)
        assert settings["options"].items() <= used.items(), path
        assert method_options(settings["method"], used, *size) == used, path  # when it is resumed
        of_papers = {"anchor": 0, "layer_decay": 1, "freeze_epochs": 0}
        continued = "--encoder" in head_of(path)["Command"]
        assert (of_papers.items() <= settings.items()) == continued, path


def recipe_method(path, **options):
    """The method of a recipe around a network of 24 features, in double precision."""
    settings = read_toml(HOME / path)
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(48, 24))
    method = METHODS[settings["method"]](Backbone(body, 24), **settings["options"] | options)
    return method.double(), settings


def test_vicreg_on_cifar_adds_the_hinges_of_both_views_as_its_source_does():
    """solo-learn: 25 mse + 25 (hinge + hinge') + covariance, where nearkin's hinge is a mean."""
    method, _ = recipe_method("cifar10/vicreg.toml", dim=8)
    z1, z2 = 0.3 * torch.randn(2, 16, 8, dtype=torch.float64)

    def hinge(z):
        return (1 - (z.var(dim=0) + 1e-4).sqrt()).clamp(min=0).mean()

    def covariance(z):
        matrix = (z - z.mean(dim=0)).T @ (z - z.mean(dim=0)) / 15
        return (matrix - matrix.diagonal().diag()).square().sum() / 8

    expected = 25 * ((z1 - z2).square().mean() + hinge(z1) + hinge(z2))
    expected += covariance(z1) + covariance(z2)
    batch = Batch((), torch.arange(16), torch.full((16,), -1))
    torch.testing.assert_close(method.compute_loss((z1, z2), batch, 0.0).loss, expected)


def test_sigreg_on_cifar_weighs_its_terms_as_its_source_does():
    """eb_jepa: mse + 10 statistic, whose mean over the images is not multiplied by their number."""
    method, settings = recipe_method("cifar10/sigreg.toml", dim=8, num_directions=4)
    batch = Batch((), torch.arange(256), torch.full((256,), -1))
    z1, z2 = 0.7 * torch.randn(2, 256, 8, dtype=torch.float64)
    torch.manual_seed(1)
    loss = method.compute_loss((z1, z2), batch, 0.0).loss
    torch.manual_seed(1)
    directions = unit(torch.randn(4, 8, dtype=torch.float64))
    spread = (sigreg(z1, directions) + sigreg(z2, directions)) / 2 / settings["batch_size"]
    expected = (z1 - z2).square().mean() + 10 * spread
    torch.testing.assert_close(4 * loss / (1 - method.weight), expected, rtol=1e-4, atol=0)


def test_dino_on_cifar_has_no_norms_in_its_head_and_a_constant_temperature_as_its_source():
    method, _ = recipe_method("cifar10/dino.toml", num_prototypes=8)
    assert not any(isinstance(layer, nn.BatchNorm1d) for layer in method.online.projector)
    assert {method.sharpness(progress) for progress in (0.0, 0.1, 1.0)} == {0.07}


def test_the_mean_of_both_directions_takes_the_steps_of_the_symmetric_demonstrations_sum():
    """The demonstration adds both directions, at lr 0.06 with weight decay 5e-4."""
    method, settings = recipe_method("cifar10/moco_symmetric.toml", queue_size=16, bn_groups=1)
    restated = copy.deepcopy(method)
    ours = torch.optim.SGD(
        method.parameters(), settings["lr"], 0.9, weight_decay=settings["weight_decay"]
    )
    theirs = torch.optim.SGD(restated.parameters(), 0.06, 0.9, weight_decay=5e-4)
    for step in range(4):
        views = tuple(torch.randn(2, 8, 3, 4, 4, dtype=torch.float64))
        batch = Batch(views, torch.arange(8) + 8 * step, torch.full((8,), -1))
        for network, optimizer, loss_scale in ((method, ours, 1), (restated, theirs, 2)):
            optimizer.zero_grad()
            result = network(batch, 0.0)
            (loss_scale * result.loss).backward()
            optimizer.step()
            network.commit(result.memo, 0.0)
    torch.testing.assert_close(dict(method.state_dict()), dict(restated.state_dict()))


def test_views_and_lars_have_the_form_of_their_source():
    """Crops of solo-learn are bicubic; brightness is added by the code of BYOL and SimCLR's paper.

    LARS is TensorFlow's for SimCLR; JAX's and torch's for BYOL, Barlow Twins and others; or LARC.
    """
    forms = {"simclr": "simclr", "swav": "swav", "nnclr": "you", "sigreg": "solo-learn"}
    by_lars = 0
    for path in RECIPES:
        settings = read_toml(path)
        from_solo = "Source     solo-learn" in path.read_text(encoding="utf-8")
        views = views_of(settings["augment"], more=True)
        interpolation = "bicubic" if from_solo else "bilinear"
        assert {view.interpolation for view in views} == {interpolation}, path
        additive = path.parent.name == "imagenet" and path.stem in ("byol", "simclr")
        assert {view.additive_brightness for view in views} == {additive}, path
        if settings["optimizer"] == "lars":
            by_lars += 1
            form = "solo-learn" if from_solo else forms.get(settings["method"], "byol")
            assert settings["lars_form"] == form, path
    assert by_lars > 10


STRONG, HALF, BYOL = (0.8, 0.8, 0.8, 0.2), (0.4, 0.4, 0.4, 0.1), (0.4, 0.4, 0.2, 0.1)
VIEWS = {
    # smallest crop, flip, probability and strengths of jitter, gray; blur and solarize of both
    "moco_v1": (0.2, 0.5, 1, (0.4, 0.4, 0.4, 0.4), 0.2, (0, 0), (0, 0)),
    "instdisc_cifar": (0.2, 0, 1, (0.4, 0.4, 0.4, 0.4), 0.2, (0, 0), (0, 0)),
    "moco_v2": (0.2, 0.5, 0.8, HALF, 0.2, (0.5, 0), (0.5, 0)),
    "simsiam": (0.2, 0.5, 0.8, HALF, 0.2, (0.5, 0), (0.5, 0)),
    "simsiam_cifar": (0.2, 0.5, 0.8, HALF, 0.2, (0, 0), (0, 0)),
    "moco_cifar": (0.08, 0.5, 0.8, HALF, 0.2, (0, 0), (0, 0)),
    "simclr_cifar": (0.08, 0.5, 0.8, HALF, 0.2, (0, 0), (0, 0)),
    "swav_cifar": (0.14, 0.5, 0.8, HALF, 0.2, (0, 0), (0, 0)),
    "simclr": (0.08, 0.5, 0.8, STRONG, 0.2, (0.5, 0), (0.5, 0)),
    "simclr_additive": (0.08, 0.5, 0.8, STRONG, 0.2, (0.5, 0), (0.5, 0)),
    "swav": (0.14, 0.5, 0.8, STRONG, 0.2, (0.5, 0), (0.5, 0)),
    "byol_additive": (0.08, 0.5, 0.8, BYOL, 0.2, (1, 0), (0.1, 0.2)),
    "byol": (0.08, 0.5, 0.8, BYOL, 0.2, (1, 0), (0.1, 0.2)),
    "moco_v3": (0.2, 0.5, 0.8, BYOL, 0.2, (1, 0), (0.1, 0.2)),
    "dino": (0.14, 0.5, 0.8, BYOL, 0.2, (1, 0), (0.1, 0.2)),
    "dino_vit": (0.4, 0.5, 0.8, BYOL, 0.2, (1, 0), (0.1, 0.2)),
    "asymmetric_cifar": (0.08, 0.5, 0.8, BYOL, 0.2, (0, 0), (0, 0.2)),
    "solo_cifar": (0.08, 0.5, 0.8, BYOL, 0.2, (0, 0), (0, 0.2)),
    "vicreg_cifar": (0.2, 0.5, 0.8, BYOL, 0.2, (0, 0.1), (0, 0.1)),
    "lejepa": (0.3, 0.5, 0.8, BYOL, 0.2, (0.5, 0.2), (0.5, 0.2)),
    "lejepa_cifar": (0.2, 0.5, 0.8, BYOL, 0.2, (0, 0.1), (0, 0.1)),
    "ncl": (0.5, 0.5, 0, (0, 0, 0, 0), 0, (0, 0), (0, 0)),
    "ncl_cifar": (1, 0.5, 0, (0, 0, 0, 0), 0, (0, 0), (0, 0)),
    "simgcd": (0.765625, 0.5, 0, (0, 0, 0, 0), 0, (0, 0), (0, 0)),
    "uno": (0.5, 0.5, 0.5, (0.3, 0.3, 0.15, 0.1), 0.1, (0.2, 0), (0.2, 0)),
    "uno_cifar": (0.8, 0.5, 0.5, (0.3, 0.3, 0.15, 0.1), 0.1, (0, 0), (0, 0)),
}
"""What the papers and their code say, by the name of the augmentation."""


def drawn(view):
    strengths = view.brightness, view.contrast, view.saturation, view.hue
    return view.scale[0], view.flip, view.jitter, strengths, view.gray


def test_an_augmentation_has_the_numbers_of_its_paper():
    # With brightness as a factor, SimCLR's is that of its code of today.
    assert {read_toml(path)["augment"] for path in RECIPES} == set(VIEWS) - {"simclr"}
    for name, (*expected, first, second) in VIEWS.items():
        views = views_of(name, more=True)
        large, small = views[:2], views[2:]
        assert [[*drawn(view)] for view in large] == [expected] * 2, name
        assert [(view.blur, view.solarize) for view in large] == [first, second], name
        assert {view.size for view in large} == {1}, name
        count = {"swav": 6, "dino": 6, "lejepa": 6, "dino_vit": 8}
        assert len(small) == count.get(name, 0), name
        others = (0.5, 0.2, 98) if name == "lejepa" else (0.5, 0, 96)
        for view in small:
            assert [*drawn(view)] == [0.05, *expected[1:]], name
            assert (view.blur, view.solarize, view.size * 224) == others, name


@pytest.fixture(scope="module")
def images():
    return builders.pixels(64, 32), np.array(CLASSES)[np.arange(64) % len(CLASSES)]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return str(builders.write_network(tmp_path_factory.mktemp("teacher") / "encoder.safetensors"))


def small(path, teacher):
    """A recipe for 64 images: fewer of them at a time, a tiny network, smaller sizes."""
    settings = read_toml(path)
    options = settings.pop("options")
    sizes = {key: min(value, 32) for key, value in options.items() if type(value) is int}
    if METHODS[settings["method"]].uses_labels:
        settings.setdefault("known", KNOWN)  # that of ImageNet is not a file's to say
    if METHODS[settings["method"]].uses_teacher:
        settings["teacher"] = teacher
    few = dict(epochs=1, batch_size=16, image_size=32, backbone="tiny", precision="fp32")
    return TrainConfig(**settings | few, options=options | sizes)


def due(settings, progress):
    """The learning rate of a recipe, restated."""
    warmup, start = settings["warmup"], settings.get("warmup_start", 0)
    if progress < warmup:
        return settings["lr"] * (start + (1 - start) * progress / warmup)
    if "lr_milestones" in settings:
        passed = [drop for drop in settings["lr_milestones"] if progress >= drop]
        return settings["lr"] / 10 ** len(passed)
    end = settings.get("cosine_end", 0)
    fallen = (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2
    return settings["lr"] * (end + (1 - end) * fallen)


QUICK = [path for path in RECIPES if path.parent.name == "cifar10"]
NIGHTLY = [pytest.param(path, marks=pytest.mark.slow) for path in RECIPES if path not in QUICK]


@pytest.mark.parametrize("path", [*QUICK, *NIGHTLY], ids=name_of)
def test_a_recipe_builds_and_trains(path, images, teacher, tmp_path):
    """Four steps, of which the last comes after MoCo v1's first drop."""
    settings = read_toml(path)
    images = open_images(images)
    config = resolve(small(path, teacher), images, CPU)
    assert config.augment == settings["augment"]
    folder = RunFolder(tmp_path)
    encoder = open_teacher(folder, config, images)
    method, batches = build(config, images, CPU, teacher=encoder)
    before = {name: p.detach().clone() for name, p in method.backbone.named_parameters()}
    optimizer = optimizer_for(method, config)
    total = config.epochs * batches.sampler.steps_per_epoch
    rates = []
    fed = parts_of(folder, config, batches, encoder)[0].load(0, total)
    for _, step in training_steps(config, method, optimizer, fed, start=0, total=total):
        assert step.loss.isfinite()
        rates += [group["lr"] for group in optimizer.param_groups if group["name"] == ""][:1]
    assert len(rates) == 4
    short = settings | {"warmup": 0.0}  # less than a step
    assert rates == pytest.approx([due(short, step / total) for step in range(total)])
    schedule, passed = schedule_for(config, 10_000), (0.0, 0.005, 0.05, 0.5)
    whole = [config.lr * schedule(progress) for progress in passed]
    assert whole == pytest.approx([due(settings, progress) for progress in passed])
    after = dict(method.backbone.named_parameters())
    assert all(p.isfinite().all() for p in after.values())
    learned = {name for name, p in after.items() if not torch.equal(p, before[name])}
    assert learned == {name for name, p in after.items() if p.requires_grad}
    if isinstance(optimizer, LARS):
        expected = LARS_FORMS[settings["lars_form"]].items()
        assert all(expected <= group.items() for group in optimizer.param_groups)


def test_the_networks_of_the_recipes_take_images_of_their_size():
    recipes = map(read_toml, RECIPES)
    networks = {(recipe["backbone"], recipe["image_size"]) for recipe in recipes}
    widths = {(*network, build_backbone(*network).feature_dim) for network in networks}
    assert widths == {
        ("torchvision/resnet18", 32, 512),
        ("torchvision/resnet18", 224, 512),
        ("torchvision/resnet50", 224, 2048),
        ("timm/resnet50", 224, 2048),
        ("timm/vit_small_patch16_224", 224, 384),
    }


def test_the_command_of_the_page_runs_a_recipe_and_goes_on(images, tmp_path):
    data, out = tmp_path / "images.npz", tmp_path / "run"
    np.savez(data, x=images[0])
    page = (HOME / "README.md").read_text(encoding="utf-8")
    (typed,) = re.findall(r"timeout .* \\\n +nearkin (train .* --resume)\n", page)
    told = typed.replace("torchvision:CIFAR10", str(data)).replace("runs/moco", str(out))
    small = "--epochs 1 --batch-size 16 --backbone tiny --image-size 16 --queue-size 16 --quiet"
    assert run(*told.split(), *small.split()) == run(*told.split(), *small.split()) == 0
    assert "already complete" in (out / "train.log").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"recipe:(\S+)", typed)
    settings, used = read_toml(HOME / f"{recipe}.toml"), read_toml(out / "config.toml")
    options = settings.pop("options") | {"queue_size": 16}
    assert options.items() <= used.pop("options").items()
    changed = {name for name, value in settings.items() if used[name] != value}
    assert changed == {"epochs", "batch_size", "backbone", "image_size"}
