"""`nearkin neighbors -o`: the images that are found, as an image."""

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
    refusal(2, *words)
