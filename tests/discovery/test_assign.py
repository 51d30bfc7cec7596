"""`nearkin predict`: new images get the classes of a discovery, and some are like none of them."""

import json
import shutil
from collections import Counter

import numpy as np
from builders import write_files
from discoveries import FEW, close, discover, names, rows, save
from nearkin_command import run

import nearkin
from nearkin.run.edits import cluster_rows, name_classes
from nearkin.run.folder import RunFolder


def outliers(table):
    return [row["path"] for row in table if row["flag"] == "outlier"]


def cut(path):
    content = path.read_bytes()
    return content[: len(content) * 2 // 3]


def test_images_of_a_discovery_are_assigned_as_they_were(discovery, flat, tmp_path, capsys):
    table, copies = tmp_path / "again.csv", tmp_path / "sorted"
    assert run("predict", discovery, flat, "-o", table, "--copy-to", copies) == 0
    everything = rows(table)
    assert [row["path"] for row in everything] == sorted(path.name for path in flat.iterdir())
    known = rows(discovery / "assignments.csv")
    mine = [row for row in everything if row["path"] in names(discovery)]
    assert mine == known
    printed = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    counts = {name.strip(): int(count) for name, count in printed}
    assert counts == Counter(row["cluster"] for row in everything)
    for row in everything:
        copy = copies / row["cluster"] / row["path"]
        assert copy.read_bytes() == (flat / row["path"]).read_bytes()


def test_images_elsewhere_are_assigned_alike_and_those_that_cannot_be_read_are_listed(
    discovery, flat, tmp_path, capsys
):
    data = tmp_path / "others"
    (data / "deep").mkdir(parents=True)
    for path in sorted(flat.iterdir())[::3]:
        shutil.copy(path, data / "deep" / path.name)
    (data / "cut.png").write_bytes(cut(flat / "4-00.png"))
    (data / "text.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    assert run("predict", discovery, data, "-o", tmp_path / "new.csv") == 0
    out = capsys.readouterr().out
    assert "cut.png" in out
    assert "text.png" in out
    new = rows(tmp_path / "new.csv")
    assert all(row["path"].startswith("deep/") for row in new)
    new = [row | {"path": row["path"].removeprefix("deep/")} for row in new]
    expected = {row["path"]: row for row in rows(discovery / "assignments.csv")}
    mine = [row for row in new if row["path"] in expected]
    assert len(mine) > 10
    close(mine, [expected[row["path"]] for row in mine])


def test_a_single_image_can_be_assigned_and_none_that_can_be_read_is_refused(
    discovery, flat, tmp_path, capsys, refusal
):
    shutil.copy(flat / "3-00.png", tmp_path)
    assert run("predict", discovery, tmp_path, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["images"]
    expected = {each["path"]: each for each in rows(discovery / "assignments.csv")}["3-00.png"]
    shown = {name: "" if value is None else str(value) for name, value in row.items()}
    assert shown == expected  # as among all the others
    broken = write_files(tmp_path / "cut", {"cut.png": cut(flat / "4-00.png")})
    assert "none of the 1 images can be read" in refusal(3, "predict", discovery, broken)


def test_too_little_memory_is_no_bug(discovery, flat, monkeypatch, refusal):
    def too_large(*_):
        raise MemoryError

    monkeypatch.setattr("nearkin.classifier.features.Extraction.compute", too_large)
    monkeypatch.setattr("nearkin.commands.neighbors._nearest", too_large)
    assert "out of memory" in refusal(8, "predict", discovery, flat)
    assert "out of memory" in refusal(8, "neighbors", discovery, flat / "3-00.png")


def test_classes_have_the_names_that_a_person_gives_them(discovery, flat, tmp_path, capsys):
    named = RunFolder(shutil.copytree(discovery, tmp_path / "run"))
    new = [row["cluster"] for row in cluster_rows(named) if row["kind"] == "novel"][:2]
    name_classes(named, new, "violin")
    assert run("predict", named.path, flat, "-o", tmp_path / "new.csv") == 0
    now = {row["path"]: row["cluster"] for row in rows(tmp_path / "new.csv")}
    for row in rows(discovery / "assignments.csv"):
        if row["cluster"] in new or now[row["path"]] != "violin":
            assert now[row["path"]] == ("violin" if row["cluster"] in new else row["cluster"])
    before, one = (
        nearkin.predict(each, flat, workers=0).assignments for each in (discovery, named.path)
    )
    at = [before.classes.index(name) for name in new]
    together = before.predictions.probability[:, at].sum(axis=1)
    merged = one.predictions.probability[:, one.classes.index("violin")]
    np.testing.assert_allclose(merged, together, atol=1e-12)
    np.testing.assert_allclose(one.predictions.probability.sum(axis=1), 1)
    printed = capsys.readouterr().out.splitlines()
    (line,) = (line for line in printed if line.startswith("violin "))
    assert int(line.split()[1]) == [*now.values()].count("violin")
    assert run("export", named.path, "--format", "onnx", "-o", tmp_path / "named.onnx") == 0
    graph = (tmp_path / "named.onnx").read_bytes()
    assert b"violin" in graph


def test_what_is_left_out_of_new_images_is_noted(discovery, flat, tmp_path, capsys):
    shutil.copy(flat / "3-00.png", tmp_path)
    write_files(tmp_path, {"raw.cr2": b"II*"})
    assert run("predict", discovery, tmp_path) == 0
    assert ".cr2" in capsys.readouterr().err


def test_outputs_of_an_export_are_compared_on_images_without_labels(discovery, flat, tmp_path):
    for name in ("3-00.png", "4-00.png"):
        shutil.copy(flat / name, tmp_path)
    assert run("export", discovery, tmp_path, "--format", "onnx", "-o", tmp_path / "x.onnx") == 0


def strangers(folder):
    """Images that are no digits: noise, in which no two neighbors are alike."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    return save(folder, {f"noise-{row:02d}.png": image for row, image in enumerate(noise)})


def test_images_like_no_class_are_flagged(discovery, tmp_path):
    data, table = strangers(tmp_path / "noise"), tmp_path / "new.csv"
    assert run("predict", discovery, data, "-o", table) == 0
    assert len(outliers(rows(table))) > 30
    own = rows(discovery / "assignments.csv")
    assert len(outliers(own)) < len(own) / 10


def test_new_images_of_known_classes_are_found_after_a_discovery_of_novel_ones_alone(
    labels, encoder, pixels, tmp_path
):
    """That unlabeled images are of novel classes is true of the images of the run, not of others."""
    out = tmp_path / "run"
    known = save(tmp_path / "known", {f"{n}-{row}.png": p for n in range(3)
                                      for row, p in enumerate(pixels[n])})  # fmt: skip
    data = save(tmp_path / "data", {**{f"{n}-{row:02d}.png": p for n in (3, 4)
                                       for row, p in enumerate(pixels[n])},
                                    **{f"{n}-{row:02d}.png": p for n in range(3)
                                       for row, p in enumerate(pixels[n][:8])}})  # fmt: skip
    settings = ["--labeled", labels, "--encoder", encoder, "--mode", "ncd"]
    settings += ["--positive-rate", "0.5", "--epochs", "20"]
    assert discover(data, "-o", out, *FEW, *settings) == 0
    assert {row["cluster"] for row in rows(out / "assignments.csv")} <= {"new-1", "new-2"}
    assert run("predict", out, known, "-o", tmp_path / "new.csv") == 0
    right = [row["cluster"] == f"digit {row['path'][0]}" for row in rows(tmp_path / "new.csv")]
    assert np.mean(right) > 0.5


def test_a_damaged_classifier_is_one_line_and_exit_code_5(
    discovery, flat, encoder, tmp_path, refusal
):
    for no_discovery in (encoder, tmp_path, tmp_path / "missing"):
        assert "nearkin discover" in refusal(2, "predict", no_discovery, flat)
    for name in ("config.toml", "encoder.safetensors", "classifier.safetensors"):
        shutil.copy(discovery / name, tmp_path)
    path = tmp_path / "classifier.safetensors"
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"no classifier", bytes(len(whole))):
        path.write_bytes(broken)
        line = refusal(5, "predict", tmp_path, flat)
        assert "classifier.safetensors cannot be used" in line, broken[:20]


def test_assigning_does_not_replace_the_data(discovery, flat, tmp_path, refusal):
    data = shutil.copytree(flat, tmp_path / "images")
    listed = tmp_path / "images.csv"
    listed.write_text("path\n" + "\n".join(f"images/{p.name}" for p in data.iterdir()) + "\n")
    before = listed.read_bytes()
    refusal(2, "predict", discovery, listed, "-o", listed)
    assert listed.read_bytes() == before
    line = refusal(2, "predict", discovery, data, "--copy-to", data / "sorted")
    assert "lies inside" in line
    assert not (data / "sorted").exists()
    new = tmp_path / "new.csv"
    line = refusal(2, "predict", discovery, data, "-o", new, "--copy-to", new)
    assert "-o and --copy-to are both" in line
    assert not new.exists()


def test_the_table_may_lie_in_the_new_folder_of_the_copies(discovery, flat, tmp_path):
    few, out = tmp_path / "few", tmp_path / "sorted"
    few.mkdir()
    for name in ("0-00.png", "3-00.png"):
        shutil.copy(flat / name, few)
    assert run("predict", discovery, few, "-o", out / "new.csv", "--copy-to", out) == 0
    assert {path.name for path in out.rglob("*.*")} == {"new.csv", "0-00.png", "3-00.png"}
    assert [row["path"] for row in rows(out / "new.csv")] == ["0-00.png", "3-00.png"]
