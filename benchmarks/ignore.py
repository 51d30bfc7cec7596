"""What features follow of a planted camera after trainings with `--ignore camera` and without.

    python -m benchmarks ignore --data DATA --sets cifar10 --shares 0.95 --threads 1

The camera (tint, blur, JPEG) has taken odd classes in `shares` of the cases, and even ones in the
others. With `--plant 0` the table says so, and images are as they are: what is ignored then has to
do with classes alone. Both trainings have equal steps.
Features are scored on test images, of which both versions exist, so that classes do not tell the
camera: kNN of classes from training images by the same camera and by the other, and kNN of the
camera, which a coin chooses.
"""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from PIL import Image

from benchmarks.audit import CPU, camera
from benchmarks.shared.options import Option, folder_of
from benchmarks.shared.rows import Row
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches, CenterCrops
from nearkin.data.opening import open_images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.data.views import normalize
from nearkin.evaluation.column import Known
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import knn
from nearkin.methods import method_class
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import Backbone
from nearkin.objectives import unit
from nearkin.training.loop import steps
from nearkin.training.optimizer import build_optimizer, warmup_cosine

OPTIONS: Final = (
    Option("sets", ["cifar10", "fashion_mnist"], "NAME.npz in --data"),
    Option("method", "simclr", "what is trained"),
    Option("shares", [0.95, 0.6], "of odd classes that the camera has taken", [0.95]),
    Option("plant", 1, "whether the camera changes images"),
    Option("seeds", [0, 1, 2], "each draws images, cameras and weights", [0]),
    Option("count", 6_000, "training images; a third of them are neighbors", quick=300),
    Option("tested", 1_000, "test images", quick=100),
    Option("steps", 300, "of each training", quick=3),
    Option("batch-size", 128, "images of a step"),
    Option("view-size", 16, "side of the views in pixels"),
    Option("backbone", "tiny", "network"),
)

Pixels = UInt8[np.ndarray, "n side side 3"]
Labels = Int[np.ndarray, " n"]


def drawn(
    file: Path, seed: int, options: Namespace
) -> tuple[tuple[Pixels, Labels], tuple[Pixels, Labels]]:
    """Return training images, of the second half of them, and test images."""
    rng = np.random.default_rng(100 + seed)
    with np.load(file) as stored:
        half = len(stored["x_train"]) // 2
        train = half + rng.permutation(half)[: options.count]
        test = rng.permutation(len(stored["x_test"]))[: options.tested]
        parts = (stored["x_train"][train], stored["x_test"][test])
        labels = (stored["y_train"].ravel()[train], stored["y_test"].ravel()[test])
    gray = parts[0].ndim == 3
    colored = [np.repeat(each[..., None], 3, -1) if gray else each for each in parts]
    first, second = zip(colored, (each.astype(np.int64) for each in labels), strict=True)
    return first, second


def planted(pixels: Pixels) -> Pixels:
    """Return all images as the camera takes them."""
    return np.stack([np.asarray(camera(Image.fromarray(image))) for image in pixels])


def trained(
    pixels: Pixels, values: Bool[np.ndarray, " n"], seed: int, options: Namespace, *, ignore: bool
) -> Backbone:
    """Return a backbone that has been trained on these images."""
    images, side = open_images(pixels), pixels.shape[1]
    ignored = values.astype(np.int64) if ignore else None
    sampler = RandomBatchSampler(len(images), options.batch_size, seed, values=ignored)
    torch.manual_seed(seed)
    cls = method_class(options.method)
    fitted = {"queue_size": 20 * options.batch_size, "bn_groups": 4}
    more = dict(cls.defaults.options) | (fitted if options.method == "moco" else {})
    method = cls(build_backbone(options.backbone, side), **more)
    method = method.to(memory_format=torch.channels_last)
    batches = Batches.of(
        images, views_of("simsiam_cifar"), image_size=side, sampler=sampler, device=CPU
    ).resized(options.view_size)
    rate = 4e-3 * (options.batch_size / 256) ** 0.5
    optimizer = build_optimizer(method, name="muon", lr=rate, weight_decay=0.05)
    fed, total = batches.load(0, options.steps), options.steps
    for _ in steps(
        method, optimizer, fed, start=0, total=total, schedule=warmup_cosine(0.1), seed=seed
    ):
        pass
    return method.backbone.eval()


@torch.inference_mode()
def features(backbone: Backbone, pixels: Pixels, labels: Labels) -> Embeddings:
    """Return the features of whole images."""
    crops = CenterCrops(open_images(pixels), pixels.shape[1])
    vectors = unit(torch.cat([backbone(normalize(batch)).float() for batch in crops]))
    classes = tuple(map(str, range(10)))
    return Embeddings(vectors.numpy(), labels, classes=classes)


def mixed(two: tuple[Embeddings, Embeddings], by: Bool[np.ndarray, " n"]) -> Embeddings:
    """Return each image's features in one of two versions."""
    old, new = (each.vectors for each in two)
    return Embeddings(np.where(by[:, None], new, old), two[0].labels, classes=two[0].classes)


def scored(
    train: tuple[Embeddings, Embeddings], test: tuple[Embeddings, Embeddings], seed: int
) -> dict[str, float]:
    """Return accuracies by images of the same and of the other camera, and that of the camera."""
    accuracy = {
        (bank, asked): knn(train[bank], test[asked])[0].value
        for bank in (0, 1)
        for asked in (0, 1)
    }
    rng = np.random.default_rng((seed, 1))  # of its own: `seed` decides the camera in training
    coins = [rng.random(len(each)) < 0.5 for each in (train[0], test[0])]
    own, asked = (np.where(coin, "new", "old") for coin in coins)
    both = mixed(train, coins[0]), mixed(test, coins[1])
    of_camera = Known.of("camera", both, (own, asked))
    return {
        "other camera": (accuracy[0, 1] + accuracy[1, 0]) / 2,
        "same camera": (accuracy[0, 0] + accuracy[1, 1]) / 2,
        "original": accuracy[0, 0],
        "camera": of_camera.accuracy.value,
    }


def run(options: Namespace) -> Iterator[Row]:
    """Yield a row for each set, share, seed and training."""
    cases = ((name, share) for name in options.sets for share in options.shares)
    for name, share in cases:
        for seed in options.seeds:
            train, test = drawn(folder_of(options) / f"{name}.npz", seed, options)
            (pixels, labels), num_bank = train, options.count // 3
            new, tested = planted(pixels), (test[0], planted(test[0]))
            odd = labels % 2 == 1
            chance = np.random.default_rng(seed).random(len(labels))
            values = np.where(chance < share, odd, ~odd)
            seen = np.where(values[:, None, None, None], new, pixels) if options.plant else pixels
            for ignore in (False, True):
                backbone = trained(seen, values, seed, options, ignore=ignore)
                bank = [
                    features(backbone, each[:num_bank], labels[:num_bank])
                    for each in (pixels, new)
                ]
                asked = [features(backbone, each, test[1]) for each in tested]
                scores = scored((bank[0], bank[1]), (asked[0], asked[1]), seed)
                words = f"{name} {options.method} {share} seed {seed}"
                case = f"{words} {'ignoring' if ignore else 'plain'}"
                yield Row(case, scores.pop("other camera"), "kNN by the other camera", more=scores)
