"""Duplicates across the parts that the data name are counted, and scores are given without them."""

import json

import numpy as np
import pytest
from builders import as_bytes, noise, write_files, write_network
from nearkin_command import run
from PIL import Image

from nearkin.commands.evaluate import evaluate
from nearkin.evaluation.evaluate import Evaluation
from nearkin.evaluation.leaks import find_leaks
from nearkin.metrics.metric import Metric, Outcome

CLASSES = ("bee", "cat")


def picture(seed):
    return noise(seed, (24, 24)).astype(np.uint8)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Forty images to learn from and twelve to score, of which four are known by another name."""
    root = tmp_path_factory.mktemp("leaky")
    for row in range(40):
        file = as_bytes(Image.fromarray(picture(row)))
        write_files(root / "train" / CLASSES[row % 2], {f"{row:02d}.png": file})
    for row in range(12):
        copied = row < 4
        pixels = picture(row if copied else 100 + row) // 2 * 2 + copied
        file = as_bytes(Image.fromarray(pixels.astype(np.uint8)))
        write_files(root / "test" / CLASSES[row % 2], {f"other-{row:02d}.png": file})
    return root


def test_leaks_are_counted_and_scores_are_given_without_them(data, tmp_path):
    encoder = write_network(tmp_path / "encoder.safetensors")
    found = evaluate(encoder, data)
    assert (found.leaks.leaked, found.leaks.test) == (4, 12)
    column = {measure.name: measure for measure in found.metrics["encoder"]}
    assert list(found.leaks.accuracies) == ["kNN top-1", "linear probe"]
    for name, (every, without) in found.leaks.accuracies.items():
        correct = column[name].outcome.correct
        assert every == pytest.approx(column[name].value)
        clean = np.delete(correct, [0, 1, 6, 7])  # bee/other-00 and -02, cat/other-01 and -03
        assert without == pytest.approx(clean.mean())
    said = "warning: 4 of 12 test images have a near-duplicate among the training images; without"
    assert any(line.startswith(said) for line in found.lines())
    again = Evaluation.stored(json.loads(json.dumps(found.to_dict())))
    assert again.lines() == found.lines()


def test_images_of_one_group_are_not_called_near_duplicates(data, tmp_path, capsys):
    table, lines = tmp_path / "t.csv", ["path,label,group,split"]
    for row, path in enumerate(sorted((data / "train").rglob("*.png"))):
        lines.append(
            f"{path},{path.parent.name},p{row // 4},{'test' if row % 4 == 0 else 'train'}"
        )
    table.write_text("\n".join(lines))
    found = evaluate(write_network(tmp_path / "encoder.safetensors"), table)
    said = "10 of 10 test images share a group with training images, or have a near-duplicate"
    assert str(found.leaks) == f"{said} among them"
    again = Evaluation.stored(json.loads(json.dumps(found.to_dict())))
    assert again.lines() == found.lines()
    assert run("check", table) == 0
    assert f"{said} among them" in capsys.readouterr().out


def test_what_is_held_out_by_us_leaks_nothing(data, tmp_path):
    encoder = write_network(tmp_path / "encoder.safetensors")
    found = evaluate(encoder, data / "train", protocol=["labelfree"])
    assert found.leaks is None
    assert "leaks" not in found.to_dict()


def test_only_images_that_are_scored_count_in_the_scores():
    correct = np.array([True, True, False, True])
    outcome = Outcome(np.array([0, 2, 3, 5]), correct)
    measures = [Metric("kNN top-1", 0.75, None, None, 4, None, {}, outcome=outcome)]
    leaked = np.array([True, True, False, False, False, False])
    found = find_leaks(leaked, measures)
    assert found.accuracies == {"kNN top-1": (0.75, 2 / 3)}
    assert find_leaks(~leaked | leaked, measures).accuracies == {}  # nothing is left to score
    assert find_leaks(leaked & ~leaked, measures) is None
