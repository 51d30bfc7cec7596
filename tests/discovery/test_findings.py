"""What the page of a discovery says first; warnings where there is cause, and none elsewhere."""

import re

import numpy as np
import pytest
import torch
from discoveries import build_predictions
from sklearn.datasets import load_digits

from nearkin.discovery import findings as module
from nearkin.discovery.findings import early_findings, late_findings
from nearkin.discovery.report import lead
from nearkin.discovery.task import DiscoveryTask
from nearkin.encoders.encoder import Encoder
from nearkin.networks.backbone import build_backbone
from nearkin.types import UNLABELED


def warning(check):
    """A check that gives its only warning, or None."""
    return lambda *values: next(check(*values), None)


few_images, unlabeled_known = map(warning, (module.few_images, module.unlabeled_known))


def early(features, label, known, num_novel, mode):
    task = DiscoveryTask(label, np.arange(len(label)), len(known), num_novel, mode)
    return list(early_findings(torch.from_numpy(features), task, known))


def spread(n, dim=16, seed=0):
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)


def predicted(sizes, *, num_known, features=None, labeled=40):
    """Unlabeled images, so many in each class, after labeled ones of every known class."""
    cluster = np.repeat(np.arange(len(sizes)), sizes)
    known = np.arange(labeled) % num_known
    number = np.concatenate([known, cluster])
    label = np.concatenate([known, np.full(len(cluster), UNLABELED)])
    features = spread(len(number)) if features is None else features
    return build_predictions(features, np.eye(len(sizes))[number], label, num_known, num_views=2)


def texts(sizes, *, num_known=2, mode="gcd", features=None):
    """The warnings by kind; a kind that came twice would show."""
    table = predicted(sizes, num_known=num_known, features=features)
    pairs = [(f.kind, f.text) for f in late_findings(table, disjoint=mode == "ncd")]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_a_good_discovery_warns_of_nothing():
    for mode, known in (("ncd", [0, 0]), ("gcd", [30, 30]), ("gcd", [0, 0])):
        assert texts([*known, 40, 60, 50], mode=mode) == {}


def test_novel_classes_without_images_are_dead_small_ones_tiny_and_large_ones_may_be_several():
    assert texts([30, 30, 100, 0, 90, 80, 0]) == {
        "dead": "no image is in 2 of 5 novel classes (new-2, new-5), so there may be fewer; "
        "try fewer --classes, or another --seed"
    }
    dead = texts([0, 0, 0, 0, 0, 70, 70, 0, 70])["dead"]
    assert "4 of 7 novel classes (new-1, new-2, new-3, 1 more)" in dead
    assert texts([30, 30, 50, 4, 50, 1]) == {
        "tiny": "fewer than 5 images are in 2 of 4 novel classes (new-2, new-4), too few to "
        "judge these; look at them, or try fewer --classes"
    }
    assert texts([30, 30, 50, 5, 50, 5]) == {}
    assert texts([500, 30, 310, 30, 30, 30]) == {
        "merged": "310 of 400 images in novel classes are in new-1, 3.1 times an even share, so "
        "it may be several classes in one; look at it, or try more --classes"
    }
    assert texts([500, 30, 300, 40, 30, 30]) == {}


def test_a_class_that_takes_nearly_all_is_a_collapse_and_nothing_else():
    assert texts([0, 0, 181, 0, 2, 17], mode="ncd") == {
        "collapse": "181 of 200 unlabeled images are in one class, new-1, so they were not "
        "separated; try another --seed, or train the encoder longer"
    }
    assert list(texts([181, 0, 10, 9])) == ["collapse"]
    assert "collapse" not in texts([0, 0, 180, 0, 3, 17], mode="ncd")
    # A single novel class may take all that must be novel.
    assert texts([0, 0, 200], mode="ncd") == {}
    assert list(texts([0, 0, 200], mode="gcd")) == ["collapse"]


def test_features_that_differ_in_one_direction_only_have_collapsed():
    even, line = [30, 30, 30, 30], spread(160, 1) * np.ones(16, dtype=np.float32)
    assert texts(even, features=line) == {
        "collapse": "the features of the unlabeled images have an effective rank of 1.0, too "
        "low to separate classes; train the encoder longer, or with stronger augmentations"
    }
    constant = np.ones((160, 16), dtype=np.float32)
    assert "rank of 0.0" in texts(even, features=constant)["collapse"]
    assert texts(even, features=np.pad(spread(160, 2), ((0, 0), (0, 14)))) == {}


HUB, TORCH = "https://huggingface.co/timm", "https://download.pytorch.org/models/resnet18-1.pth"


def named(backbone, source="weights.pth"):
    """What an encoder of a library says of itself."""
    return {"backbone": backbone, "origin": {"source": source, "license": "x", "sha256": ""}}


@pytest.mark.parametrize(
    ("labeled", "tags"),
    [
        (True, "in1k a1_in1k augreg_in21k in22k_ft_in22k_in1k in12k fb_inw21k swag_lc_in1k"),
        (True, "mae_in1k_ft_in1k fcmae_ft_in22k_in1k mim_in22k_ft_in1k fb_ssl_yfcc100m_ft_in1k"),
        (True, "openai_ft_in12k fb_dist_in1k ra4_e3600_r224_in1k fb_in22k_ft_in1k_384"),
        (False, "mae fcmae dino fb_dino lvd142m lvd1689m dinov3_lvd1689m mim_in22k in1k_ijepa"),
        (False, "openai webli laion2b clip_laion2b_ft_320 seer indomain_pt apple_pt"),
    ],
)
def test_tags_of_timm_say_whether_weights_learned_from_labels(labeled, tags):
    for tag in tags.split():
        assert module.learned_labels(f"timm:some_net.{tag}") == labeled, tag


def test_an_encoder_that_has_seen_labels_is_told_and_others_are_not():
    for details, says in (
        ({"method": "supervised"}, "it was trained by supervised"),
        ({"method": "simclr", "fine_tuned": "last:1"}, "its layers last:1 were fine-tuned"),
        ({"method": "simclr"}, None),
        ({}, None),
        (named("timm:tf_efficientnet_lite0.in1k"), "its weights are timm:tf_efficientnet_lite0"),
        (named("timm:tf_efficientnet_lite0", f"{HUB}/tf_efficientnet_lite0.in1k"), HUB),
        (named("torchvision:resnet18.IMAGENET1K_V1"), "its weights are torchvision:resnet18"),
        (named("timm:vit_small_patch14_dinov2.lvd142m", f"{HUB}/dinov2.lvd142m"), None),
        (named("torchvision:resnet50", "own.pth"), None),  # the architecture of a file
        ({"method": "simclr", "start": "x", **named("timm:resnet50.a1_in1k")}, "resnet50.a1_in1k"),
        ({"method": "seed", **named("tiny", f"distilled from {HUB}/resnet50.a1_in1k")}, HUB),
        ({"method": "seed", **named("tiny", f"distilled from {TORCH} into {HUB}/v.mae")}, TORCH),
        ({"method": "seed", **named("tiny", f"distilled from {HUB}/vit.mae")}, None),
        # An architecture that begins with random weights, whatever weights its name has elsewhere.
        ({"method": "simclr", "backbone": "timm:resnet50.a1_in1k"}, None),
        ({"method": "seed", **named("timm:resnet50.a1_in1k", "distilled from x.pth")}, None),
    ):
        found = list(module.labels_seen(Encoder(build_backbone("tiny", 8), 8, details)))
        assert [finding.kind for finding in found] == ["labels seen"] * (says is not None)
        assert says is None or says in found[0].text


def test_a_number_at_the_limit_of_what_can_be_counted_is_told():
    assert [f.kind for f in module.number_capped(300, 300)] == ["number capped"]
    assert "show at most 300" in next(module.number_capped(310, 300)).text
    assert not list(module.number_capped(299, 300))
    # Of few images, more classes would have fewer than 4.
    assert not list(module.number_capped(20, 20))


def test_few_images_are_fewer_than_twenty_for_each_novel_class():
    assert few_images(99, 5).text == (
        "99 unlabeled images are 19.8 for each novel class, and under 20 are too few to learn "
        "from; add images, or try fewer --classes"
    )
    assert few_images(100, 5) is None
    assert few_images(0, 1).kind == "few"
    for mode, count, known in (("gcd", 39, []), ("gcd", 0, ["a", "b"]), ("ncd", 0, ["a", "b"])):
        found = early(spread(count, 2), np.full(count, UNLABELED), known, num_novel=2, mode=mode)
        assert [f.kind for f in found] == ["few"]
        assert list(texts([0, 0, 0, 0], mode=mode)) == ["dead"]


SPLITS = [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9), (0, 2, 4, 6, 8), (7, 8, 9), (0, 1, 2, 3, 4, 5, 6, 7)]


def digits(known, seed, hidden_share):
    """Pixels of digits, their labels if known and not hidden, and the true share of hidden ones."""
    images, truth = load_digits(return_X_y=True)
    number = np.full(10, UNLABELED)
    number[list(known)] = range(len(known))
    true = number[truth]
    chosen = np.random.default_rng(seed).random(len(true)) < hidden_share
    label = np.where(chosen, UNLABELED, true)
    names = [f"digit {digit}" for digit in known]
    return images.astype(np.float32), label, names, np.mean(true[label == UNLABELED] != UNLABELED)


@pytest.mark.parametrize("known", SPLITS)
def test_digits_raise_a_warning_if_half_of_the_known_ones_are_hidden_and_none_if_all_are_novel(
    known,
):
    images, label, names, _ = digits(known, 0, hidden_share=0)
    assert unlabeled_known(images, label, names) is None
    for seed in range(3):  # fewer labels, and still no known digit among the others
        mask = (label == UNLABELED) | (np.random.default_rng(seed).random(len(label)) < 0.3)
        assert unlabeled_known(images[mask], label[mask], names) is None
    for seed in range(3):
        images, label, names, truth = digits(known, seed, hidden_share=0.5)
        warning = unlabeled_known(images, label, names)
        match = re.search(r"about (\d+)% .* \(most of all (.*)\), but", warning.text)
        share, likeliest = match.groups()
        assert warning.kind == "unlabeled-known"
        assert int(share) / 100 == pytest.approx(truth, abs=0.15)
        assert set(likeliest.split(", ")) <= set(names)


def test_the_likeliest_class_is_the_one_that_is_hidden_and_all_may_be():
    images, label, names, _ = digits((0, 1, 2, 3, 4), 0, hidden_share=0)
    rows = np.flatnonzero(label == 3)[::2]
    novel = np.flatnonzero(label == UNLABELED)[:300]
    subset = np.union1d(np.flatnonzero(label != UNLABELED), novel)
    label[rows] = UNLABELED
    text = unlabeled_known(images[subset], label[subset], names).text
    assert text.startswith("about 2")
    assert "(most of all digit 3" in text
    assert text.endswith("look at them, and if they are of known classes, use --mode gcd")
    images, label, names, _ = digits((0, 1, 2, 3, 4), 0, hidden_share=0)
    images, label = images[label != UNLABELED], label[label != UNLABELED]
    label[::2] = UNLABELED
    assert re.match("about (9.|100)% ", unlabeled_known(images, label, names).text)


def test_one_known_class_alone_can_be_hidden():
    images, label, _, _ = digits((0,), 0, hidden_share=0.7)
    assert unlabeled_known(images, label, ["digit 0"]) is None
    keep = (label == 0) | (np.random.default_rng(0).random(len(label)) < 0.3)
    keep |= (load_digits().target == 0) & (label == UNLABELED)
    assert unlabeled_known(images[keep], label[keep], ["digit 0"]).kind == "unlabeled-known"


def test_the_length_of_features_does_not_matter_and_many_images_are_thinned_out(monkeypatch):
    images, label, names, _ = digits((0, 1, 2, 3, 4), 0, hidden_share=0.5)
    length = np.geomspace(0.01, 100, len(images), dtype=np.float32)[:, None]
    assert unlabeled_known(images * length, label, names) == unlabeled_known(images, label, names)
    monkeypatch.setattr(module, "MAX_IMAGES", 700)
    thinned = unlabeled_known(images, label, names)
    monkeypatch.undo()
    assert thinned == unlabeled_known(images[::3], label[::3], names)
    assert thinned.kind == "unlabeled-known"


def test_too_few_labels_or_features_that_tell_no_classes_apart_raise_no_warning():
    assert unlabeled_known(spread(600), np.arange(600) % 6 - 1, list("abcde")) is None
    few = [-1] * 30, [0, 1] * 15, [0] + [-1] * 29, [0, 1] + [-1] * 28, [0, -1]
    for label in few:
        assert unlabeled_known(spread(len(label)), np.array(label), ["a", "b"]) is None


def test_only_ncd_warns_of_hidden_classes():
    images, label, _, _ = digits((0, 1, 2, 3, 4), 0, hidden_share=0.5)
    cluster = np.where(label == UNLABELED, 5 + np.arange(len(label)) % 2, label)
    table = build_predictions(images, np.eye(7)[cluster], label, num_known=5, num_views=1)
    inputs = table.features, table.label, table.classes[:5]
    assert [f.kind for f in early(*inputs, num_novel=1, mode="ncd")] == ["unlabeled-known"]
    assert early(*inputs, num_novel=1, mode="gcd") == []


def test_the_first_paragraph_says_what_was_asked_and_found():
    found = [("novel", 700), ("novel", 450), ("known", 30), ("known", 20)]
    clusters = [{"kind": kind, "size": size} for kind, size in found]
    known = [f"k{number}" for number in range(14)]
    summary = {"mode": "gcd", "known": known, "labeled": 1, "clusters": clusters}
    assert lead(summary, "estimated by silhouette; the interval is 2 to 4") == (
        "1 image of 14 known classes (k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, k10, k11 and 2 "
        "more) came with a label; 1,200 came without. Of these, 1,150 were clustered into 2 novel "
        "classes, and 50 were assigned to known classes. The number of novel classes was "
        "estimated by silhouette; the interval is 2 to 4."
    )
    disjoint = {"mode": "ncd", "known": ["dog"], "labeled": 9, "clusters": clusters[:1]}
    disjoint = lead(disjoint, "given")
    assert "All unlabeled images were assumed novel and clustered into 1 novel class." in disjoint
    assert "assigned to known" not in disjoint
