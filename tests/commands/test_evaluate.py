"""`nearkin evaluate --protocol`: what it stores in a run, and what the page then shows."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import cut_short, fill, normal
from nearkin_command import run as command
from pyarrow import parquet

import nearkin
from nearkin.commands.evaluate import evaluate
from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.errors import CheckpointError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import evaluate_tables
from nearkin.evaluation.metrics import knn
from nearkin.metrics.geometry import effective_rank
from nearkin.run.folder import RunFolder
from nearkin.training.checkpoint import latest


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run, and the data beside it; read, never written."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("data")
    labels = np.arange(72) % 3
    pixels = rng.integers(0, 90, (72, 16, 16, 3)) + 150 * np.eye(3)[labels][:, None, None]
    np.savez(folder / "colors.npz", x=pixels.clip(0, 255).astype(np.uint8), y=labels)
    settings = TrainConfig(
        epochs=1, batch_size=16, val=0.3, backbone="tiny", image_size=16, workers=0, report=False
    )
    return train(str(folder / "colors.npz"), settings, output=folder / "run").folder


@pytest.fixture
def run(trained, tmp_path):
    return RunFolder(shutil.copytree(trained.path.parent, tmp_path / "trained") / "run")


@pytest.fixture(scope="module")
def usual(trained):
    """What `evaluate` measures without options: all of it is in the summary."""
    metrics = evaluate(trained.path).metrics
    assert not trained.evaluation.exists()
    return metrics


def stored(run):
    return run.evaluation.read_bytes() if run.evaluation.exists() else b""


def test_further_measures_are_stored_and_on_the_page(run):
    summary = run.summary.read_bytes()
    first = evaluate(run.path, protocol=["retrieval"])
    second = evaluate(run.path, protocol=["knn", "linear"])
    stored = json.loads(run.evaluation.read_text(encoding="utf-8"))["metrics"]
    names = [m.name for m in (*first.metrics["encoder"], *second.metrics["encoder"])]
    assert list(stored["encoder"]) == names
    assert list(stored) == ["encoder", "untrained", "pixels"]
    assert run.summary.read_bytes() == summary
    shown = run.read_evaluated()["metrics"]["encoder"]
    assert next(iter(shown)) == "kNN top-1"
    assert {"retrieval mAP", "kNN k 10, majority"} <= set(shown)
    evaluate(run.path, protocol=["retrieval"], features="embedding")
    stored = json.loads(run.evaluation.read_text(encoding="utf-8"))["metrics"]
    assert (
        stored["embedding"]["retrieval mAP"]["protocol"]["features"]
        == "embedding of 128 dimensions"
    )
    page = nearkin.explore(run.path, write=True).read_text(encoding="utf-8")
    for said in ("retrieval mAP@R", "Mean average precision: 1 if all", "its embedding"):
        assert said in page
    assert "what the projector makes of the features" in page
    assert page.count("Every paper has its own; none is chosen here.") == 1


def test_measures_of_other_images_are_not_stored(run, tmp_path):
    before = stored(run)
    other = fill(tmp_path / "other", *(f"{number}.png" for number in range(24)))
    evaluate(run.path, other, protocol=["labelfree"])
    assert stored(run) == before


@pytest.fixture
def labeled(tmp_path):
    """A run on a folder whose images have labels in a table elsewhere, and both."""
    names = [f"{number}.png" for number in range(24)]
    folder, table = fill(tmp_path / "images", *names), tmp_path / "tables" / "labels.csv"
    table.parent.mkdir()
    table.write_text("path,label\n" + "".join(f"{x},{int(x[:-4]) % 2}\n" for x in names))
    settings = TrainConfig(
        epochs=1, batch_size=8, val=0.5, backbone="tiny", image_size=8, workers=0, report=False
    )
    labels = str(table)
    run = train(folder, replace(settings, labels=labels), output=tmp_path / "run").folder
    return run, folder, table


def test_other_images_have_labels_of_their_own(labeled, log):
    """Names of images in two folders are often the same."""
    run, folder, table = labeled
    other = shutil.copytree(folder, folder.parent / "other")
    fill(other, "more.png")
    found = [m.name for m in evaluate(run.path, other, verbose=log).metrics["encoder"]]
    assert "kNN top-1" not in found
    assert any(f"--labels {table}" in line for line in log.texts)
    found = [m.name for m in evaluate(run.path, other, labels=str(table)).metrics["encoder"]]
    assert "kNN top-1" in found


def test_metrics_by_other_labels_are_not_stored_or_compared_beside_those_of_the_run(labeled, log):
    run, folder, table = labeled
    evaluate(run.path, protocol=["fewshot"])
    before = stored(run)
    assert before
    table.write_text(table.read_text().replace("3.png,1", "3.png,0"))
    evaluate(run.path, protocol=["retrieval"], verbose=log)
    assert stored(run) == before
    assert sum("had another label" in line for line in log.texts) == 1
    other = train(folder, run.encoder_settings()[0], output=folder.parent / "again")
    kept = run.embeddings.rename(run.embeddings.with_suffix(".kept"))  # as people do for room
    evaluate(run.path, protocol=["retrieval"])
    assert stored(run) != before
    kept.rename(run.embeddings)
    note = "Images had other labels in some runs: metrics by labels do not compare."
    assert note in nearkin.compare([run.path, other.folder.path]).notes


def test_images_of_a_run_that_are_gone_or_others_are_named(labeled, log):
    run, folder, _ = labeled
    (folder / "3.png").unlink()
    (folder / "4.png").write_bytes((folder / "5.png").read_bytes())
    nearkin.explore(run.path, write=True, verbose=log)
    nearkin.export(run.path, output=folder.parent / "atlas.parquet", format="atlas", verbose=log)
    changes = "1 removed ('3.png'), 1 of other contents ('4.png')"
    assert sum(changes in line for line in log.texts) == 2


def test_warnings_and_what_cannot_be_read_are_said_without_progress_too(run, tmp_path, capsys):
    folder = fill(tmp_path / "other", *(f"{n}.png" for n in range(20)), "cut.png")
    cut_short(folder / "cut.png")
    (folder / "text.png").write_text("no image")
    words = ["evaluate", run.path, folder, "--protocol", "labelfree", "--workers", 0]
    for option in ("--json", "-q"):
        assert command(*words, option) == 0
        out, said = capsys.readouterr()
        warning, *left_out = sorted(said.splitlines(), reverse=True)
        assert warning.startswith("warning: these are not the images of ")
        assert [line.partition(" ")[0] for line in left_out] == ["left"] * 2
        assert ("text.png" in out) == (option == "--json")
        if option == "--json":
            assert {*json.loads(out)["bad"]} == {"cut.png", "text.png"}


@pytest.mark.parametrize(("part", "num"), [("train", 12), ("test", 8)])
def test_a_part_of_which_no_image_can_be_read_is_refused(run, tmp_path, refusal, part, num):
    """It would be measured as if nothing were held out, or nothing learned from."""
    for name, count in (("train", 12), ("test", 8)):
        folder = fill(tmp_path / "data" / name / "a", *(f"{n}.png" for n in range(count)))
        if name == part:
            cut_short(*folder.iterdir())
    line = refusal(3, "evaluate", run.path, tmp_path / "data", "--workers", 0)
    assert f"none of the {num} images can be read" in line


def test_the_neighbors_that_there_are_too_few_images_for_are_named(run):
    found = evaluate(run.path, protocol=["knn"])
    num = found.sizes["train"]
    assert 20 < num < 100
    assert found.left_out == {"kNN k 100, 200": f"there are {num} labeled training images"}
    assert f"kNN k 100, 200: not measured, there are {num} labeled" in "\n".join(found.lines())
    pair = (
        Embeddings(normal(5, 4).numpy(), np.zeros(5, np.int64)),
        Embeddings(normal(2, 4).numpy(), np.zeros(2, np.int64)),
    )
    few = evaluate_tables({"encoder": pair}, seed=0, protocol=["knn"])
    assert few.left_out == {"kNN k 10, 20, 100, 200": "there are 5 labeled training images"}
    assert few.metrics["encoder"][0].name == "kNN k 5, t 0.07"


def restated_embedding(encoder, weights, images):
    """The projector of SimCLR on features: linear, batch norm by its statistics, ReLU, linear."""
    with torch.no_grad():
        h = encoder(encoder.transform(images)).double()
    norm = ("1.running_mean", "1.running_var", "1.weight", "1.bias")
    first, mean, var, scale, shift, last, bias = (
        weights[name].double() for name in ("0.weight", *norm, "3.weight", "3.bias")
    )
    hidden = (h @ first.T - mean) / (var + 1e-5).sqrt() * scale + shift
    return (hidden.clamp(min=0) @ last.T + bias).float().numpy()


def test_the_embedding_is_measured_beside_the_features(run, usual, log):
    """From the method in the newest checkpoint, whose projector the file is."""
    evaluation = evaluate(run.path, features="embedding", verbose=log)
    assert list(evaluation.metrics) == ["embedding", "encoder", "untrained", "pixels"]
    assert f"embedding 128 dimensions, by {run.projector}" in log.texts
    assert evaluation.metrics["encoder"] == usual["encoder"]
    compared = evaluation.differences["pixels"][0]  # not of the embedding
    assert (compared.name, compared.first) == ("kNN top-1", usual["encoder"][0].value)
    assert list(evaluation.differences) == ["untrained", "pixels"]
    state = torch.load(latest(run.checkpoints), weights_only=True)["method"]
    of_projector = {
        name.removeprefix("online.projector."): value
        for name, value in state.items()
        if name.startswith("online.projector.")
    }
    splits = parquet.read_table(run.embeddings, columns=["split"])["split"].to_numpy()
    data = np.load(run.path.parent / "colors.npz")
    z = restated_embedding(nearkin.load(run.path), of_projector, list(data["x"]))
    parts = [
        Embeddings(z[splits == part], data["y"][splits == part]) for part in ("train", "test")
    ]
    measured = evaluation.metrics["embedding"][0]
    assert measured.name == "kNN top-1"
    assert measured.value == knn(*parts)[0].value
    assert measured.protocol["features"] == "embedding of 128 dimensions"
    effective = next(m for m in evaluation.metrics["embedding"] if m.name == "effective rank")
    expected = effective_rank(parts[1].tensor)
    assert effective.value == pytest.approx(float(expected), rel=1e-4)


def test_encoders_without_an_embedding_are_refused_in_one_line(run, tmp_path, refusal):
    says = r"encoder.safetensors has no embedding: it keeps no proj"
    with pytest.raises(UsageError, match=says):
        evaluate(run.encoder, run.path.parent / "colors.npz", features="embedding")
    other = RunFolder(shutil.copytree(run.path, tmp_path / "other"))
    other.projector.unlink()
    with pytest.raises(UsageError, match=r"other has no embedding: .* leave out features emb"):
        evaluate(other.path, features="embedding")
    says = "--protocol quick,knm is not a list of "  # before anything is opened
    assert says in refusal(2, "evaluate", tmp_path / "no run", "--protocol", "quick,knm")


def test_measures_of_the_same_name_are_replaced_and_reasons_forgotten(tmp_path):
    folder = RunFolder(tmp_path)
    entry = {"name": "a", "value": 0.5, "low": None, "high": None, "protocol": "p"}
    lacking = ("kNN", "kNN k 200", "kNN of raw pixels", "kNN top-1", "few-shot", "column camera")
    reasons = dict.fromkeys(lacking, "no labels")
    folder.write_summary({"metrics": {}, "left_out": reasons})
    folder.add_metrics({"metrics": {"encoder": {}}, "left_out": reasons}, ["kNN", "few-shot"])
    folder.add_metrics({"metrics": {"encoder": {"a": entry}}, "left_out": {}}, ["few-shot"])
    again = {"metrics": {"encoder": {"a": entry | {"value": 0.7}}}, "left_out": {"kNN k 9": "few"}}
    folder.add_metrics({**again, "column": {"column": "camera"}}, ["kNN"])
    stored = json.loads(folder.evaluation.read_text(encoding="utf-8"))
    assert stored["metrics"]["encoder"]["a"]["value"] == 0.7
    assert stored["left_out"] == {"kNN top-1": "no labels", "kNN k 9": "few"}
    assert folder.read_evaluated()["left_out"] == stored["left_out"]
    folder.evaluation.write_text("[]", encoding="utf-8")  # damaged
    with pytest.raises(CheckpointError, match=r"evaluation\.json.*measures anew"):
        folder.read_evaluated()


def test_measures_that_cannot_be_stored_are_still_returned(run, log):
    before = stored(run)
    with run.locked():
        result = evaluate(run.path, protocol=["fewshot"], verbose=log)
    assert len(result.metrics["encoder"]) == 8
    assert stored(run) == before
    assert log.texts[-1].startswith("warning: the metrics are not stored in ")
    assert "in use by" in log.texts[-1]
    run.evaluation.write_text('{"metrics"', encoding="utf-8")  # cut short
    assert evaluate(run.path, protocol=["fewshot"], verbose=log).metrics == result.metrics
    assert "evaluation.json cannot be used" in log.texts[-1]
    run.evaluation.unlink()
