"""From Python: encoders, runs and features are taken as objects, and results can be looked at."""

import logging
import shutil
import subprocess
import sys

import builders
import numpy as np
import pytest
import torch
from builders import fill

import nearkin
from nearkin.commands.arguments import name_of
from nearkin.config import EmbedConfig
from nearkin.errors import NearkinError, UsageError, as_typed_words, worded
from nearkin.result import Table
from nearkin.run.data import open_split, stored_split
from nearkin.run.folder import RunFolder

QUIET = {"workers": 0, "verbose": False}


@pytest.fixture(scope="module")
def encoder(trained_run):
    return nearkin.load(trained_run)


@pytest.fixture(scope="module")
def features(encoder, digits_file):
    return nearkin.embed(encoder, digits_file, **QUIET)


@pytest.fixture(scope="module")
def classified(encoder, digits_file, tmp_path_factory):
    where = tmp_path_factory.mktemp("classified") / "run"
    how = {"baselines": False, "report": False, **QUIET}
    return nearkin.classify(encoder, digits_file, output=where, **how)


def test_an_encoder_gives_what_its_name_gives_until_its_weights_change(
    encoder, features, trained_run, digits_file
):
    named = nearkin.embed(trained_run, digits_file, **QUIET)
    np.testing.assert_array_equal(features.vectors, named.vectors)
    assert features.encoder == named.encoder == encoder.digest
    double = nearkin.embed(nearkin.load(trained_run).double(), digits_file, **QUIET)
    np.testing.assert_array_equal(double.vectors, named.vectors)
    assert double.encoder == encoder.digest
    changed = nearkin.load(trained_run)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1.5)
    other = nearkin.embed(changed, digits_file, **QUIET)
    assert np.abs(other.vectors - features.vectors).max() > 1e-3
    with pytest.raises(UsageError, match="encoder is of type Embeddings; give"):
        nearkin.embed(features, digits_file, **QUIET)


def test_features_are_taken_like_the_file_of_them(encoder, features, digits_file, tmp_path):
    file = tmp_path / "features.parquet"
    nearkin.embed(encoder, digits_file, output=file, **QUIET)
    image = fill(tmp_path / "query", "a.png") / "a.png"
    for ask in (
        lambda vectors: nearkin.neighbors(encoder, [image], vectors=vectors, top=3),
        lambda vectors: nearkin.select(vectors, num=3, verbose=False),
        lambda vectors: nearkin.evaluate(vectors, protocol=["knn"], verbose=False).records(),
        lambda vectors: nearkin.duplicates(
            digits_file, vectors=vectors, threshold=0.999, verbose=False
        ),
    ):
        assert ask(features) == ask(file)


def test_a_run_has_its_encoder_its_numbers_and_its_classes(classified, encoder, digits_file):
    assert classified.encoder.digest == encoder.digest
    assert nearkin.load(classified).digest == encoder.digest
    accuracy = next(row for row in classified.metrics.rows if row["metric"] == "accuracy")
    assert accuracy["value"] == classified.summary["metrics"]["classifier"]["accuracy"]["value"]
    assert "accuracy" in str(classified)
    rows = {row["path"]: row["cluster"] for row in classified.assignments.rows}
    drawn = torch.get_rng_state()
    predicted = classified.predict(digits_file, **QUIET)
    assert torch.equal(torch.get_rng_state(), drawn)
    again = {row["path"]: row["cluster"] for row in predicted.records()}
    assert rows.items() <= again.items()
    with pytest.raises(UsageError, match="has no report"):
        classified.show()


def test_a_run_goes_on_with_the_encoder_that_it_began_with(encoder, classified, digits_file):
    how = {"baselines": False, "report": False, "resume": True, **QUIET}
    again = nearkin.classify(encoder, digits_file, output=classified.path, **how)
    assert again.summary == classified.summary
    changed = nearkin.load(classified)
    with torch.no_grad():
        next(changed.parameters()).mul_(2)
    with pytest.raises(UsageError, match=r"encoder object:tiny-[0-9a-f]+ became object:tiny-"):
        nearkin.classify(changed, digits_file, output=classified.path, **how)


def test_what_the_run_of_an_encoder_held_out_is_held_out_again(tmp_path):
    """Also by the encoder itself, whatever became of it; without the folder, a note says so."""
    data = builders.save_digits(tmp_path / "digits.npz", 60)
    weights = builders.write_network(tmp_path / "e.safetensors", size=8)
    nearkin.embed_run(weights, data, output=tmp_path / "run", report=False, val=0.25, **QUIET)
    expected = stored_split(RunFolder(tmp_path / "run"))
    changed = nearkin.load(tmp_path / "run" / "encoder.safetensors")
    with torch.no_grad():
        next(changed.parameters()).mul_(2)
    resized = nearkin.load(tmp_path / "run", image_size=16)

    def split(encoder):
        config = EmbedConfig(encoder=name_of(encoder), seed=5)
        return open_split(str(data), config)

    for encoder in (nearkin.load(tmp_path / "run"), changed, resized):
        assert (split(encoder).held_out == expected.held_out).all()
        assert split(encoder).images.notes == ()
    assert not (split(nearkin.load(weights)).held_out == expected.held_out).all()
    how = {"baselines": False, "report": False, "seed": 5, **QUIET}
    classified = nearkin.classify(changed, data, output=tmp_path / "classified", **how)
    again = stored_split(RunFolder(classified.path))
    assert (again.held_out == expected.held_out).all()
    with pytest.raises(UsageError, match=r"val 0\.1, but .* was made with val 0\.25"):
        nearkin.classify(changed, data, output=tmp_path / "other", val=0.1, **how)
    shutil.rmtree(tmp_path / "run")
    (note,) = split(changed).images.notes
    assert (note.decision, note.count) == ("substituted", 60)
    assert f"{tmp_path}/run, which the encoder was loaded from, is gone" in note.text


def test_results_are_tables_of_text_and_of_html(features):
    table = Table([{"name": "<b>", "value": 0.5}, {"name": "two\nlines", "value": None}])
    assert repr(table).splitlines() == ["name       value", "<b>        0.5", "two lines"]
    page = table._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert repr(features) == f"{len(features)} images, 128 features each"


@pytest.mark.needs("pandas")
def test_results_are_tables_of_pandas(features, classified):
    frame = classified.metrics.to_pandas()
    assert list(frame.columns) == ["metric", "value", "low", "high"]
    assert features.to_pandas()["label"].tolist() == features.class_names.tolist()


def test_progress_goes_to_the_logger_unless_it_is_unwanted(encoder, digits_file, caplog, capfd):
    caplog.set_level(logging.INFO, "nearkin")
    nearkin.embed(encoder, digits_file, workers=0)
    assert any(record.message.startswith("encoder tiny") for record in caplog.records)
    caplog.clear()
    nearkin.embed(encoder, digits_file, workers=0, verbose=False)
    assert caplog.records == []


def test_a_line_comes_once_when_logging_is_configured_later():
    program = (
        "import logging; from nearkin.run.reporter import Logged; Logged().info('one'); "
        "logging.basicConfig(level=logging.INFO); Logged().info('two'); "
        "logging.getLogger('nearkin').setLevel(logging.ERROR); Logged().info('three')"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "one\nINFO:nearkin:two\n"


def test_a_closed_standard_error_takes_lines_and_ends_nothing():
    program = (
        "import sys; from nearkin.run.reporter import Logged; "
        "sys.stderr.close(); Logged().info('one'); sys.stderr = None; Logged().info('two')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_errors_speak_the_language_of_who_asked():
    error = UsageError("--batch-size 1 is too small; `nearkin embed ENCODER DATA` or another -o")
    assert isinstance(error, ValueError)
    expected = "batch_size 1 is too small; `nearkin.embed_run(encoder, data)` or another output"
    assert str(error) == expected
    with as_typed_words():
        assert str(error) == error.args[0]
    assert worded("finish it with --resume") == "finish it with resume=True"
    assert worded("--resume true became false") == "resume true became false"
    assert worded("a/--b c--d e-o") == "a/--b c--d e-o"
    assert worded("or add --i-know") == "or add i_know=True"
    assert worded("`nearkin embed E DATA`") == "`nearkin.embed_run(e, data)`"
    assert worded("`nearkin embed E DATA -o FILE`") == "`nearkin.embed(e, data, output=file)`"
    assert worded("`nearkin list backbones`") == "`nearkin.list_backbones()`"
    assert worded("`nearkin train DATA --lora 4`") == "`nearkin.train(data, lora=4)`"
    assert not isinstance(NearkinError("x"), ValueError)


def test_rows_of_a_classification_hold_numbers(classified):
    row = classified.assignments.rows[0]
    assert all(isinstance(row[name], float) for name in ("score", "margin", "entropy"))
    assert row["view_agreement"] is None
    assert isinstance(row["cluster"], str)
