"""Vectors of more images than memory holds: the same numbers as of images in memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import nearkin
from nearkin.errors import CheckpointError, DataError, ResourceError, UsageError
from nearkin.evaluation import metrics
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import evaluate_tables
from nearkin.evaluation.shards import Note, ShardFolder
from nearkin.evaluation.vectors import write_embeddings
from nearkin.metrics import kmeans, probe
from nearkin.metrics.probe import train_probe
from nearkin.run import failures

CLASSES, DIM, SHARD = 4, 70, 100  # More numbers than k-means keeps
PROTOCOL = ["quick", "knn", "fewshot", "retrieval"]


def embeddings(n, seed, spread=2.0, split="", classes=tuple("abcd")):
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=n)
    centers = np.random.default_rng(99).normal(size=(CLASSES, DIM))
    vectors = (centers[labels] + spread * rng.normal(size=(n, DIM))).astype(np.float32)
    paths = [f"{seed}-{row:04}.png" for row in range(n)]
    splits = np.full(n, split)
    return Embeddings(vectors, labels, paths=paths, classes=classes, splits=splits).normalized()


def write_parts(path, of, encoder="e"):
    """As `nearkin embed` writes them."""
    folder = ShardFolder.claim(path, Note(encoder, "synthetic", len(of), SHARD))
    for number, start in enumerate(range(0, len(of), SHARD)):
        folder.write(number, of.subset(np.arange(start, min(start + SHARD, len(of)))))
    return path


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Fewer draws of few-shot classifiers than there are, since each costs the same again."""
    monkeypatch.setattr(metrics, "DRAWS", 2)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    train, test = embeddings(450, 0), embeddings(250, 1)
    return write_parts(folder / "train", train), write_parts(folder / "test", test), train, test


def close(ours, theirs, images=0, logistic=0):
    """The same measures, whose shares may differ by that many images, or few-shot fits by more."""
    assert [m.name for m in ours] == [m.name for m in theirs]
    for a, b in zip(ours, theirs, strict=True):
        most = max(images, logistic) if a.name.endswith("-shot logistic") else images
        assert a.value == pytest.approx(b.value, rel=1e-4, abs=1e-5 + most / 250), a.name
        assert {k: v for k, v in a.protocol.items() if k != "features"} == b.protocol


def test_vectors_have_the_measures_of_the_same_features_in_memory(tables, monkeypatch):
    """And blocks of any size have the same."""
    train, test, *pair = tables
    evaluation = nearkin.evaluate(test, bank=train, protocol=PROTOCOL)
    expected = evaluate_tables({"encoder": tuple(pair)}, seed=0, protocol=PROTOCOL)
    # Few-shot fits end within 1e-3 of the optimum, in logits: in one of two draws, a near tie of
    # two classes may have another answer if features are rounded otherwise.
    close(evaluation.metrics["encoder"], expected.metrics["encoder"], images=0.1, logistic=0.5)
    assert evaluation.sizes == {"train": 450, "test": 250}
    assert evaluation.left_out == expected.left_out == {}
    protocols = [metric.protocol for metric in evaluation.metrics["encoder"]]
    assert all(each["features"] == "vectors of length one" for each in protocols)
    small = (probe, "BLOCK", 37 * DIM), (probe, "HELD", 0), (kmeans, "BLOCK", 23 * DIM)
    for module, name, size in (*small, (metrics, "TALLIED", 2_000)):
        monkeypatch.setattr(module, name, size)
    blocks = nearkin.evaluate(test, bank=train, protocol=PROTOCOL)
    close(blocks.metrics["encoder"], expected.metrics["encoder"], images=1)


def test_a_probe_in_blocks_has_the_same_weights(monkeypatch):
    of = embeddings(300, 3)
    whole = train_probe(of.tensor, of.labels, seed=0)
    monkeypatch.setattr(probe, "BLOCK", 41 * DIM)
    monkeypatch.setattr(probe, "HELD", 0)
    blocks = train_probe(of.tensor, of.labels, seed=0)
    assert blocks.choice == whole.choice
    torch.testing.assert_close((blocks.mean, blocks.std), (whole.mean, whole.std))
    torch.testing.assert_close(blocks.weight, whole.weight, atol=1e-3, rtol=1e-2)


def test_a_run_table_is_divided_by_its_splits(tables, tmp_path):
    *_, train, test = tables
    both = Embeddings(
        np.concatenate([test.vectors, train.vectors]),
        np.concatenate([test.labels, train.labels]),
        paths=[*test.paths, *train.paths],
        classes=train.classes,
        splits=np.repeat(["test", "train"], [len(test), len(train)]),
    )
    expected = evaluate_tables({"encoder": (train, test)}, seed=0, protocol=["linear"])
    write_embeddings(tmp_path / "vectors.parquet", both)
    ours = nearkin.evaluate(tmp_path / "vectors.parquet", protocol=["linear"])
    close(ours.metrics["encoder"], expected.metrics["encoder"], images=0.1)


def test_without_training_vectors_there_are_clusters_for_which_kmeans_starts_on_some(
    tables, monkeypatch
):
    train, *_ = tables
    evaluation = nearkin.evaluate(train)
    names = {measure.name for measure in evaluation.metrics["encoder"]}
    assert {"NMI", "effective rank"} <= names
    assert "needs labeled training images" in evaluation.left_out["kNN top-1"]
    assert evaluation.sizes == {"train": 0, "test": 450}
    *_, test = tables
    every = metrics.clusters(test, seed=0)
    monkeypatch.setattr(metrics, "SAMPLE", 200)
    some = metrics.clusters(test, seed=0)
    assert some[0].protocol["images that its centers are learned from"] == 200
    assert some[0].value == pytest.approx(every[0].value, abs=0.05)
    assert some[0].value > 0.8


def test_images_without_a_label_are_left_out_where_others_have_one(tables, tmp_path):
    *_, train, test = tables
    few = replace(test, labels=np.where(np.arange(len(test)) % 5 == 0, -1, test.labels))
    write_embeddings(tmp_path / "some.parquet", few)
    write_embeddings(tmp_path / "none.parquet", few.unlabeled())
    some = nearkin.evaluate(tmp_path / "some.parquet", bank=tables[0], protocol=["knn"])
    expected = evaluate_tables({"encoder": (train, few)}, seed=0, protocol=["knn"])
    close(some.metrics["encoder"], expected.metrics["encoder"])
    none = nearkin.evaluate(tmp_path / "none.parquet", protocol=["quick"])
    assert next(m.name for m in none.metrics["encoder"]) == "effective rank"
    assert none.sizes["test"] == len(test)


def test_what_does_not_fit_together_is_refused_in_one_line(tables, tmp_path):
    train, test, *pair = tables
    other = write_parts(tmp_path / "other", pair[1], encoder="another")
    narrow, void = tmp_path / "narrow.parquet", tmp_path / "void.parquet"
    write_embeddings(narrow, replace(pair[0], vectors=pair[0].vectors[:, :9]))
    write_embeddings(void, pair[1].subset(np.arange(0)))
    for error, says, given, more in (
        (
            CheckpointError,
            "of different encoders, or of one with a column removed",
            [other],
            {"bank": train},
        ),
        (CheckpointError, "have 70 and 9 features; embed all by one e", [test], {"bank": narrow}),
        (UsageError, "no images are read", [test, "digits"], {"bank": train}),
        (UsageError, "bank is for features", ["dinov2-small", "digits"], {"bank": train}),
        (UsageError, "is .*test itself, whose column split divides it", [test], {"bank": test}),
        (DataError, r"void.parquet has no image", [void], {}),
    ):
        with pytest.raises(error, match=says):
            nearkin.evaluate(*given, **more)


def test_a_step_says_what_it_holds_or_that_it_is_too_much(tables, monkeypatch, log):
    train, test, *_ = tables
    monkeypatch.setattr(failures, "STATED", 1)
    nearkin.evaluate(test, bank=train, protocol=["retrieval"], verbose=log)
    assert f"retrieval of 450 vectors: {8 * 450 * DIM / 1e6:.0f} MB in memory" in log.texts
    monkeypatch.setattr(failures, "free_memory", lambda: 24 * 450 * DIM - 1)
    how = {"bank": train, "protocol": ["knn"], "ignore": "label"}
    with pytest.raises(ResourceError, match="ignore label of 450 vectors: 1 MB in memory"):
        nearkin.evaluate(test, **how)
    monkeypatch.setattr(failures, "free_memory", lambda: 8 * 450 * DIM - 1)
    with pytest.raises(ResourceError, match=r"retrieval of 450 .* MB are free; give fewer images"):
        nearkin.evaluate(test, bank=train, protocol=["retrieval"])


def test_vectors_that_are_learned_from_and_scored_are_warned_of(tables, tmp_path, log):
    train, test, *pair = tables
    nearkin.evaluate(test, bank=train, protocol=["knn"], verbose=log)
    assert not any("warning" in text for text in log.texts)
    some = pair[0].subset(np.arange(0, 450, 10))
    write_embeddings(tmp_path / "some.parquet", some)
    nearkin.evaluate(tmp_path / "some.parquet", bank=train, protocol=["knn"], verbose=log)
    assert sum("45 test vectors of 45 are training vectors" in text for text in log.texts) == 1
