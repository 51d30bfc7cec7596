"""Vectors of more images than memory holds: the same numbers as of images in memory."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from nearkin_command import run
from processes import SECONDS, environment, free_port
from sklearn.cluster import KMeans
from small import in_group, spawn

import nearkin
from nearkin.distributed import ALONE, Share
from nearkin.errors import CheckpointError, DataError, ResourceError, UsageError
from nearkin.evaluation import metrics
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import evaluate_tables
from nearkin.evaluation.table import Note, PartFolder, write_embeddings
from nearkin.metrics import kmeans, probe
from nearkin.metrics.kmeans import lloyd
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
    folder = PartFolder.claim(path, Note(encoder, "synthetic", len(of), SHARD))
    for number, start in enumerate(range(0, len(of), SHARD)):
        folder.write(number, of.subset(np.arange(start, min(start + SHARD, len(of)))))
    return path


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    train, test = embeddings(450, 0), embeddings(250, 1)
    return write_parts(folder / "train", train), write_parts(folder / "test", test), train, test


def close(ours, theirs, images=0):
    """The same measures, whose shares may differ by that many images."""
    assert [m.name for m in ours] == [m.name for m in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-4, abs=1e-5 + images / 250), a.name
        assert a.protocol.removeprefix("vectors of length one, ") == b.protocol


def test_vectors_have_the_measures_of_the_same_features_in_memory(tables, monkeypatch):
    """And blocks of any size have the same."""
    train, test, *pair = tables
    evaluation = nearkin.evaluate(test, train=train, protocol=PROTOCOL)
    expected = evaluate_tables({"encoder": tuple(pair)}, seed=0, k=20, protocol=PROTOCOL)
    close(evaluation.measures["encoder"], expected.measures["encoder"], images=0.1)
    assert evaluation.sizes == {"train": 450, "test": 250}
    assert evaluation.left_out == expected.left_out == {}
    protocols = [measure.protocol for measure in evaluation.measures["encoder"]]
    assert all(each.startswith("vectors of length one, ") for each in protocols)
    small = (probe, "BLOCK", 37 * DIM), (probe, "HELD", 0), (kmeans, "BLOCK", 23 * DIM)
    for module, name, size in (*small, (measures, "TALLIED", 2_000)):
        monkeypatch.setattr(module, name, size)
    blocks = nearkin.evaluate(test, train=train, protocol=PROTOCOL)
    close(blocks.measures["encoder"], expected.measures["encoder"], images=1)


def test_a_probe_in_blocks_has_the_same_weights(monkeypatch):
    of = embeddings(300, 3)
    whole = train_probe(of.tensor, of.labels, seed=0)
    monkeypatch.setattr(probe, "BLOCK", 41 * DIM)
    monkeypatch.setattr(probe, "HELD", 0)
    blocks = train_probe(of.tensor, of.labels, seed=0)
    assert blocks.strength == whole.strength
    torch.testing.assert_close((blocks.mean, blocks.std), (whole.mean, whole.std))
    torch.testing.assert_close(blocks.weight, whole.weight, atol=1e-3, rtol=1e-2)


def test_kmeans_moves_from_given_centers_as_scikit_learns_does(monkeypatch):
    monkeypatch.setattr(kmeans, "BLOCK", 50)
    x = embeddings(400, 4, spread=3.0).vectors
    start = x[:CLASSES]
    expected = KMeans(CLASSES, init=start, n_init=1, tol=0, max_iter=100).fit(x)
    assert (lloyd(x, start) == expected.labels_).all()
    x = np.array([[0.0, 0], [1, 0], [9, 0]], np.float32)
    far = np.array([[0.0, 0], [9, 0], [0, 99]], np.float32)
    assert lloyd(x, far).tolist() == [0, 0, 1]  # a center without rows stays


def test_a_run_table_is_divided_by_its_splits(tables, tmp_path):
    *_, train, test = tables
    both = Embeddings(
        np.concatenate([test.vectors, train.vectors]),
        np.concatenate([test.labels, train.labels]),
        paths=[*test.paths, *train.paths],
        classes=train.classes,
        splits=np.repeat(["test", "train"], [len(test), len(train)]),
    )
    expected = evaluate_tables({"encoder": (train, test)}, seed=0, k=20, protocol=["linear"])
    for name in ("vectors.npz", "vectors.parquet"):
        write_embeddings(tmp_path / name, both)
        ours = nearkin.evaluate(tmp_path / name, protocol=["linear"])
        close(ours.measures["encoder"], expected.measures["encoder"], images=0.1)


def test_without_training_vectors_there_are_clusters_for_which_kmeans_starts_on_some(
    tables, monkeypatch
):
    train, *_ = tables
    evaluation = nearkin.evaluate(train)
    names = {measure.name for measure in evaluation.measures["encoder"]}
    assert {"NMI", "RankMe"} <= names
    assert "needs labeled training images" in evaluation.left_out["kNN top-1"]
    assert evaluation.sizes == {"train": 0, "test": 450}
    *_, test = tables
    every = measures.clusters(test, seed=0)
    monkeypatch.setattr(measures, "SAMPLE", 200)
    some = measures.clusters(test, seed=0)
    assert "10 starts on 200 of them, the best of which moves on all" in some[0].protocol
    assert some[0].value == pytest.approx(every[0].value, abs=0.05)
    assert some[0].value > 0.8


def test_images_without_a_label_are_left_out_where_others_have_one(tables, tmp_path):
    *_, train, test = tables
    few = replace(test, labels=np.where(np.arange(len(test)) % 5 == 0, -1, test.labels))
    write_embeddings(tmp_path / "some.parquet", few)
    write_embeddings(tmp_path / "none.parquet", few.unlabeled())
    some = nearkin.evaluate(tmp_path / "some.parquet", train=tables[0], protocol=["knn"])
    expected = evaluate_tables({"encoder": (train, few)}, seed=0, k=20, protocol=["knn"])
    close(some.measures["encoder"], expected.measures["encoder"])
    none = nearkin.evaluate(tmp_path / "none.parquet", protocol=["quick"])
    assert next(m.name for m in none.measures["encoder"]) == "RankMe"
    assert none.sizes["test"] == len(test)


def test_what_does_not_fit_together_is_refused_in_one_line(tables, tmp_path):
    train, test, *pair = tables
    other = write_parts(tmp_path / "other", pair[1], encoder="another")
    narrow, void = tmp_path / "narrow.parquet", tmp_path / "void.parquet"
    write_embeddings(narrow, replace(pair[0], vectors=pair[0].vectors[:, :9]))
    write_embeddings(void, pair[1].subset(np.arange(0)))
    for error, says, given, more in (
        (CheckpointError, "of different encoders; embed all by one", [other], {"train": train}),
        (CheckpointError, "have 70 and 9 features; embed all by one e", [test], {"train": narrow}),
        (UsageError, "are vectors, whose images are not read", [test, "digits"], {"train": train}),
        (UsageError, "--train is for vectors", ["dinov2-small", "digits"], {"train": train}),
        (DataError, r"void.parquet has no image", [void], {}),
    ):
        with pytest.raises(error, match=says):
            nearkin.evaluate(*given, **more)


def test_a_step_says_what_it_holds_or_that_it_is_too_much(tables, monkeypatch, log):
    train, test, *_ = tables
    monkeypatch.setattr(failures, "STATED", 1)
    nearkin.evaluate(test, train=train, protocol=["retrieval"], reporter=log)
    assert f"retrieval of 450 vectors: {4 * 450 * DIM / 1e6:.0f} MB in memory" in log.texts
    monkeypatch.setattr(failures, "free_memory", lambda: 4 * 450 * DIM - 1)
    with pytest.raises(ResourceError, match=r"retrieval of 450 .* MB are free; give fewer images"):
        nearkin.evaluate(test, train=train, protocol=["retrieval"])


with_processes = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch knows no processes"
)


def shared(rank, file, folder):
    """Measure as one of two processes; the first writes the values."""
    measures.SAMPLE, kmeans.BLOCK, probe.BLOCK = 200, 23 * DIM, 37 * DIM
    train, test = embeddings(451, 0), embeddings(250, 1)
    with in_group(rank, 2, file):
        values = [m.value for m in taken(train, test, Share.of_rank())]
    (folder / f"{rank}.json").write_text(json.dumps(values))


def taken(train, test, share):
    every = [measures.knn(train, test, k=20, share=share)]
    every += measures.knn_grid(train, test, share)
    every.append(measures.linear_probe(train, test, seed=0, share=share))
    return every + measures.clusters(test, seed=0, share=share)


@with_processes
def test_two_processes_measure_what_one_does(tmp_path, monkeypatch):
    spawn(shared, tmp_path / "meeting", tmp_path)
    monkeypatch.setattr(measures, "SAMPLE", 200)
    alone = [m.value for m in taken(embeddings(451, 0), embeddings(250, 1), ALONE)]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first == pytest.approx(alone, abs=1e-5 + 1 / 250)


@pytest.mark.slow
@with_processes
def test_processes_that_the_command_starts_measure_what_one_does(tables, capsys):
    train, test, *_ = tables
    command = ["evaluate", test, "--train", train, "--json"]
    assert run(*command) == 0
    alone = json.loads(capsys.readouterr().out)
    assert run(*command, "--devices", 2) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["sizes"] == alone["sizes"]
    for name, measure in alone["metrics"]["encoder"].items():
        value = both["metrics"]["encoder"][name]["value"]
        assert value == pytest.approx(measure["value"], abs=1e-5 + 1 / 250), name


@pytest.mark.slow
@with_processes
def test_processes_of_a_launcher_share_the_measures_and_the_first_prints(tables):
    train, test, *_ = tables
    command = [sys.executable, "-m", "nearkin", "evaluate", str(test), "--train", str(train)]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    ranks = [environment(RANK=rank, LOCAL_RANK=rank, **meeting) for rank in "01"]
    processes = [
        subprocess.Popen([*command, "--json"], env=env, stdout=subprocess.PIPE, text=True)
        for env in ranks
    ]
    outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "kNN top-1" in json.loads(outputs[0])["metrics"]["encoder"]
    assert not outputs[1]
