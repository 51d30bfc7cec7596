"""Probes, linear and attentive, and how they choose their regularization."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from nearkin.metrics import probe as probe_file
from nearkin.metrics.attentive import train_attentive_probe
from nearkin.metrics.probe import (
    LEFT_OUT,
    STRENGTHS,
    Choice,
    choice_folds,
    folds_of,
    held_out_logits,
    train_probe,
)


def marked_tokens(n: int, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Nine tokens of classes at random; that of the marked one is the class of the image."""
    g = torch.Generator().manual_seed(seed)
    y, content = torch.randint(3, (n,), generator=g), torch.randint(3, (n, 9), generator=g)
    images, marked = torch.arange(n), torch.randint(9, (n,), generator=g)
    content[images, marked] = y
    tokens = torch.zeros(n, 9, 5)
    tokens[..., :3] = nn.functional.one_hot(content, 3).float()
    tokens[images, marked, 3] = 1
    return tokens + 0.1 * torch.randn(tokens.shape, generator=g), y.numpy()


def test_attention_learns_what_an_average_cannot_tell():
    tokens, labels = marked_tokens(150, 0)
    test_tokens, test_labels = marked_tokens(300, 1)
    probe, validated = train_attentive_probe(tokens, labels, seed=0)
    linear = train_probe(tokens.mean(dim=1), labels, seed=0)
    assert (probe.predict(test_tokens) == test_labels).mean() > 0.97
    assert (linear.predict(test_tokens.mean(dim=1)) == test_labels).mean() < 0.7
    assert validated.correct.mean() > 0.9
    choice = validated.choice.described()
    assert (choice["C"], choice["at"]) == (10.0, "the end of its grid")  # which is its own


def test_folds_hold_each_image_out_once_and_divide_no_group():
    labels = np.repeat([0, 1, 2, 3], [2, 5, 1, 9])
    groups = np.arange(len(labels))
    groups[8:12] = 8  # the last is alone in its class but for these
    folds = folds_of(labels, groups, seed=0)
    for label in (0, 1, 3):
        held_out = folds[labels == label]
        assert (held_out != LEFT_OUT).all()
        assert len(set(held_out.tolist())) >= 2  # or one fold would know nothing of the class
    assert len(set(folds[groups == 8].tolist())) == 1
    alone = folds_of(np.arange(4), np.arange(4), seed=0)
    assert (alone == LEFT_OUT).all()
    one = folds_of(np.repeat([0, 1], [2, 10]), np.arange(12), seed=0, folds=1)
    assert (one[:2] != LEFT_OUT).sum() == 1
    assert (one[2:] != LEFT_OUT).sum() == 2
    many = choice_folds(np.repeat([0, 1], 1000), np.arange(2000), seed=0)
    assert set(many.tolist()) == {LEFT_OUT, 0, 1}  # 800 images are enough for a choice


@pytest.mark.parametrize("folds", [1, 5])
def test_something_of_each_class_is_left_to_learn_from_though_groups_have_several(folds):
    """Two classes are only in groups that begin with another class: in one, and in two."""
    groups = np.repeat(np.arange(12), 3)
    labels = np.repeat([0, 1], [18, 18])
    labels[1], labels[[4, 20]] = 2, 3
    for seed in range(40):
        held_in = folds_of(labels, groups, seed, folds=folds)
        assert len({*zip(groups.tolist(), held_in.tolist(), strict=True)}) == 12
        assert (held_in != LEFT_OUT).any()
        for fold in set(held_in.tolist()) - {LEFT_OUT}:
            assert {*labels[held_in != fold].tolist()} == {0, 1, 2, 3}


def test_few_images_still_choose_the_regularization():
    """Noise in many dimensions wants the strongest; three images per class once left it at 1."""
    g = torch.Generator().manual_seed(0)
    labels = np.repeat(np.arange(6), 3)
    features = torch.randn(18, 64, generator=g) * 3
    features[:, 0] = torch.from_numpy(labels * 0.5).float()
    probe = train_probe(features, labels, seed=0)
    assert probe.choice.images == 18
    assert probe.choice.strength in STRENGTHS
    assert len(held_out_logits(features, labels, probe.choice, seed=0).rows) == 18
    weight, bias = probe.layer()
    logits = features @ weight.T + bias
    expected = (features - probe.mean) / probe.std @ probe.weight + probe.bias
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert (probe.predict(features) == logits.argmax(dim=1).numpy()).all()


def test_with_an_image_of_each_class_nothing_is_chosen():
    features = torch.eye(4)
    probe = train_probe(features, np.arange(4), seed=0)
    assert not probe.choice.images
    assert not len(held_out_logits(features, np.arange(4), probe.choice, seed=0).rows)
    assert (probe.predict(features) == np.arange(4)).all()


def test_some_of_many_are_held_out_and_all_others_learned_from(monkeypatch):
    """Else the fits of 100 images of 200 classes would know half of the classes at most."""
    monkeypatch.setattr(probe_file, "MOST", 100)
    labels, groups = np.arange(2000) % 200, np.arange(2000) // 400 * 200 + np.arange(2000) % 200
    g = torch.Generator().manual_seed(0)
    centers, noise = torch.randn(200, 32, generator=g), torch.randn(2000, 32, generator=g)
    features = centers[torch.from_numpy(labels)] + 0.3 * noise
    for together in (None, groups):
        held_out = held_out_logits(features, labels, Choice(1.0, 0), seed=0, groups=together)
        assert len(held_out.rows) == 100
        assert held_out.correct.mean() > 0.95
        assert (held_out.target == labels[held_out.rows]).all()
    pairs = np.random.default_rng(0).permutation(1000) % 200  # labels of no meaning, images twice
    pure, labels = noise[:1000].repeat(2, 1), np.concatenate([pairs, pairs])
    groups = np.arange(2000) % 1000
    held_out = held_out_logits(pure, labels, Choice(100.0, 0), seed=0, groups=groups)
    assert held_out.correct.mean() < 0.1


def test_what_is_predicted_while_held_out_knows_nothing_of_the_label():
    """Labels at random: a fit that saw them would be right on all, any other by chance."""
    for per_class in (4, 40):
        features = torch.randn(4 * per_class, 200, generator=torch.Generator().manual_seed(0))
        labels = np.random.default_rng(1).permutation(np.repeat(np.arange(4), per_class))
        probe = train_probe(features, labels, seed=0)
        weak = replace(probe.choice, strength=100.0)
        validated = held_out_logits(features, labels, weak, seed=0)
        assert validated.correct.mean() < 0.6, per_class
        assert (validated.target == labels[validated.rows]).all()
        assert len(validated.rows) == len(labels)
