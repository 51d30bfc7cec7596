"""`nearkin export --format atlas`: the images of a run as a table for Embedding Atlas."""

import io

import numpy as np
import pytest
from builders import as_bytes, soft, write_files, write_network
from nearkin_command import run as call
from PIL import Image
from pyarrow import parquet

import nearkin
from nearkin.commands.export import export
from nearkin.config import TrainConfig
from nearkin.data.opening import open_images
from nearkin.errors import OutputError, UsageError
from nearkin.run.folder import RunFolder
from nearkin.tables import write_csv


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run as it is when all is done, on twenty images of which the last is gone by now."""
    data, path = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("runs") / "run"
    names = [f"{('cat', '=dog')[number % 2]}/{number:02}.png" for number in range(20)]
    write_files(data, {name: as_bytes(soft(n, (90, 70))) for n, name in enumerate(names)})
    path.mkdir()
    folder = RunFolder(path)
    folder.write_settings(TrainConfig(), str(data))
    folder.write_summary({"made": True})
    write_network(folder.encoder)
    nearkin.embed(path, data, output=folder.embeddings, workers=0)
    (data / "=dog" / "19.png").unlink()
    return folder


@pytest.fixture(scope="module")
def images(run):
    return open_images(run.settings()[1])


def test_the_table_for_embedding_atlas_has_its_columns(run, images, tmp_path):
    exported = export(run.path, output=tmp_path / "atlas.parquet", format="atlas")
    assert exported.lines() == [f"19 images: {tmp_path / 'atlas.parquet'}"]
    table = parquet.read_table(tmp_path / "atlas.parquet")
    kinds = {name: str(kind) for name, kind in zip(table.schema.names, table.schema.types)}
    assert kinds == {
        "image": "struct<bytes: binary, path: string>", "x": "float", "y": "float",
        "label": "string", "split": "string",
        "neighbors": "struct<ids: list<element: int64>, distances: list<element: float>>",
    }  # fmt: skip
    rows = table.to_pylist()
    assert [row["image"]["path"] for row in rows] == list(images.names)
    assert {row["label"] for row in rows} == {"cat", "=dog"}
    stored = parquet.read_table(run.embeddings).to_pydict()
    order = [stored["path"].index(name) for name in images.names]
    stored = np.array(stored["vector"])[order]
    cosine = stored @ stored.T - 2 * np.eye(19)
    for number, row in enumerate(rows):
        with Image.open(io.BytesIO(row["image"]["bytes"])) as image:
            assert (image.format, image.size) == ("PNG", (48, 48))
        ids, distances = row["neighbors"]["ids"], row["neighbors"]["distances"]
        assert number not in ids
        assert ids[0] == cosine[number].argmax()
        np.testing.assert_allclose(distances, 1 - cosine[number, ids], atol=1e-5)
        assert distances == sorted(distances)


def test_of_more_images_than_landmarks_it_says_how_many_there_are(run, tmp_path, monkeypatch):
    path = tmp_path / "atlas.parquet"
    monkeypatch.setattr(
        "nearkin.exports.atlas.landmark_rows", lambda labels: np.arange(0, len(labels), 2)
    )
    assert export(run.path, output=path).lines() == [f"10 of 19 images: {path}"]
    assert parquet.read_metadata(path).num_rows == 10


def test_of_a_discovery_the_table_has_classes_as_they_are_called(run, images, tmp_path):
    write_csv(run.clusters, ("cluster", "name"), [("new-1", "foxes"), ("new-2", "")])
    rows = [(images.names[3], "new-1", "0.5"), (images.names[4], "new-2", "")]
    write_csv(run.assignments, ("path", "cluster", "score"), rows)
    try:
        export(run.path, output=tmp_path / "atlas.parquet", format="atlas")
    finally:
        run.clusters.unlink()
        run.assignments.unlink()
    table = parquet.read_table(tmp_path / "atlas.parquet").to_pydict()
    assert table["cluster"][2:6] == ["", "foxes", "new-2", ""]
    assert table["score"][2:4] == [None, 0.5]


def test_without_a_name_the_table_is_in_the_run_folder(run, capsys, refusal):
    try:
        assert call("export", run.path, "--format", "atlas") == 0
        assert capsys.readouterr().out == f"19 images: {run.atlas.resolve()}\n"
        assert parquet.read_metadata(run.atlas).num_rows == 19
        refused = refusal(4, "export", run.path, "-o", run.atlas)  # of the same format
        assert f"{run.atlas} exists; choose another -o" in refused
        assert call("export", run.path, "-o", run.atlas, "--overwrite") == 0
        assert parquet.read_metadata(run.atlas).num_rows == 19
    finally:
        run.atlas.unlink()


def test_the_folder_of_the_table_is_made(run, tmp_path):
    assert call("export", run.path, "-o", tmp_path / "new" / "of" / "atlas.parquet") == 0
    assert parquet.read_metadata(tmp_path / "new" / "of" / "atlas.parquet").num_rows == 19


def test_exports_that_cannot_be_written_are_refused(run, tmp_path):
    with pytest.raises(UsageError, match=r"give a name that ends in \.parquet"):
        export(run.path, output=tmp_path / "atlas.csv", format="atlas")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        export(run.path, output=tmp_path / "file" / "atlas.parquet", format="atlas")
    with pytest.raises(UsageError, match="no run folder"):
        export(tmp_path, output=tmp_path / "atlas.parquet", format="atlas")
