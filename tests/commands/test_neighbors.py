"""`nearkin neighbors -o`: the images that are found, as an image."""

from unicodedata import normalize

from nearkin_command import run as call
from PIL import Image

from nearkin.commands.neighbors import neighbors
from nearkin.data.opening import open_images


def test_a_contact_sheet_shows_a_query_and_what_is_nearest(
    trained_run, digits_file, tmp_path, capsys, refusal
):
    query, path = tmp_path / "query.png", tmp_path / "sheet.png"
    Image.fromarray(open_images(digits_file).read(0)).save(query)
    assert call("neighbors", trained_run, query, "--top", "3", "-o", path) == 0
    assert capsys.readouterr().out.startswith(str(query))
    with Image.open(path) as image:
        assert image.size == (4 * 96, 96 + 2 * 15 + 6)  # 8 pixels, with 2 around, are enlarged
    before = path.read_bytes()
    path.unlink()
    assert len(neighbors(trained_run, [query], top=3, output=path, data=digits_file)) == 1
    assert path.read_bytes() == before
    encoder, vectors = (
        trained_run / name for name in ("encoder.safetensors", "embeddings.parquet")
    )
    path.unlink()
    words = ["neighbors", encoder, query, "--vectors", vectors, "--top", "3", "-o", path]
    assert call(*words, "--data", digits_file) == 0
    assert path.read_bytes() == before
    refusal(4, *words, "--data", digits_file)
    path.unlink()
    assert "has no images to show beside others; give --data" in refusal(2, *words)
    gone = ["--vectors", tmp_path / "gone.parquet", "-o", path]  # which would be looked at next
    assert "give --data" in refusal(2, "neighbors", encoder, query, *gone)


def test_images_are_found_however_their_accents_are_written(trained_run, digits_file, tmp_path):
    """As macOS does, in two letters, beside a file of the other form or alone."""
    images, names = open_images(digits_file), ["a.png", normalize("NFD", "é.png")]
    for row, name in enumerate(names):
        Image.fromarray(images.read(row)).save(tmp_path / name)
    files = [tmp_path / name for name in names]
    found = neighbors(trained_run, files[::-1], top=1)
    assert [each.image for each in found] == [str(file) for file in files[::-1]]
    other = tmp_path / normalize("NFC", "é.png")
    Image.fromarray(images.read(2)).save(other)
    again = neighbors(trained_run, [other, *files[::-1]], top=1)
    paths = [each.neighbors[0].path for each in again]
    assert paths == [images.names[row] for row in (2, 1, 0)]
    assert [each.neighbors for each in again[1:]] == [each.neighbors for each in found]
