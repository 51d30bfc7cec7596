"""Images of many channels, from files to a run, its use, its resumption and its exports."""

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
import torch
from builders import contents, write_network
from cards import computed
from PIL import Image

import nearkin
from nearkin.commands.sources import images_of
from nearkin.data.opening import open_images
from nearkin.data.views import normalize
from nearkin.encoders.encoder import load
from nearkin.errors import DataError, UsageError
from nearkin.report.image_map import thumbnails, tiles
from nearkin.report.site import RunSite
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Silent

SMALL = dict(
    batch_size=8, epochs=2, seed=0, workers=0, save_every=1, evaluate_every=0, report=False
)


def textures(root: Path, channels: int, dtype: str, count: int = 12, side: int = 20) -> Path:
    """Two classes, whose texture is in other channels, in folders."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(("field", "town")):
        (root / name).mkdir(parents=True)
        for image in range(count):
            pixels = rng.gamma(4, 300, (side, side, channels))
            pixels[::2, :, number::2] *= 3
            pixels = pixels[..., 0] if channels == 1 else pixels
            write_tiff(root / name / f"{image:02}.tif", pixels.astype(dtype))
    return root


def write_tiff(path: Path, pixels: np.ndarray) -> None:
    options = {"planarconfig": "contig"} if pixels.ndim == 3 else {}
    tifffile.imwrite(path, pixels, photometric="minisblack", **options)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return textures(tmp_path_factory.mktemp("data") / "bands", 13, "uint16")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """Trained without any option that is of channels."""
    folder = tmp_path_factory.mktemp("runs") / "bands"
    nearkin.train(data, output=folder, **SMALL)
    return folder


def test_channels_and_their_range_are_noted_and_travel_with_the_encoder(run, data):
    noted = json.loads((run / "data.json").read_text())["channels"]
    encoder = load(run)
    assert encoder.details["backbone"].endswith("?in_chans=13")
    view = encoder.preprocessing
    for name in ("low", "high", "mean", "std"):
        assert tuple(noted[name]) == getattr(view, name)
        assert len(noted[name]) == 13
    assert f"mean {view.mean[0]:.3f}" in str(view)


def test_the_page_shows_the_first_three_channels_in_8_bits(data):
    images = open_images(data)
    side = int(images.sizes.max())
    sheets = tiles(images, side)
    with Image.open(io.BytesIO(sheets[0])) as sheet:  # lossless, as it is so small
        shown = np.asarray(sheet.convert("RGB"))[:side, :side]
    assert (shown == np.rint(255 * images.read(0)[..., :3])).all()
    assert len(thumbnails(images, np.arange(3))) == 3


def test_the_network_sees_unit_channels(run, data):
    """As if each channel had been standardized; a training's views are rescaled to the same."""
    encoder = load(run)
    pixels = tifffile.imread(data / "field" / "00.tif")
    seen = encoder.transform(pixels)
    view = encoder.preprocessing
    low, high, mean, std = map(np.array, (view.low, view.high, view.mean, view.std))
    scaled = (((pixels - low) / (high - low)).clip(0, 1) - mean) / std
    expected = torch.from_numpy(scaled).movedim(-1, 0).float()
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-5)
    white = torch.from_numpy(view.pixels(view.channels.scaled(pixels))).movedim(-1, 0)[None]
    torch.testing.assert_close(
        encoder.backbone.scaled(normalize(white))[0], seen, rtol=0, atol=1e-5
    )


def test_the_served_page_compares_images_of_thirteen_channels(run, data):
    maps = nearkin.likeness(
        load(run), *(tifffile.imread(data / "field" / f"0{n}.tif") for n in (0, 1))
    )
    site = RunSite(RunFolder(run), images_of(RunFolder(run)))
    first = site.likeness(0, 1)
    assert first["low"] == pytest.approx(maps.min().item(), abs=1e-5)
    assert first["high"] == pytest.approx(maps.max().item(), abs=1e-5)
    assert len(set(first["images"])) == 2


def test_features_are_those_of_the_range_that_was_learned_whatever_is_embedded(
    run, data, tmp_path
):
    """Of all images, of one alone, and of one that is given from Python."""
    whole = nearkin.embed(run, data, output=tmp_path / "all.npz", workers=0)
    one = tmp_path / "one"
    one.mkdir()
    pixels = tifffile.imread(data / "town" / "03.tif")
    write_tiff(one / "x.tif", pixels)
    alone = nearkin.embed(run, one, output=tmp_path / "one.npz", workers=0)
    row = whole.paths.index("town/03.tif")
    np.testing.assert_allclose(alone.vectors[0], whole.vectors[row], atol=1e-6)
    encoder = load(run)
    with torch.inference_mode():
        vector = encoder(encoder.transform(pixels)[None])[0]
    np.testing.assert_allclose(
        torch.nn.functional.normalize(vector, dim=0), alone.vectors[0], atol=1e-6
    )
    (found,) = nearkin.neighbors(run, [one / "x.tif"], top=1)
    assert found.neighbors[0].path == "town/03.tif"


class Stops(Silent):
    """Ends a training in the middle of its second epoch."""

    def progress(self, done: int, total: int, text: str) -> None:
        if done and total and text.startswith("epoch 2/2"):
            raise InterruptedError


def test_a_resumed_training_is_the_unbroken_one_to_the_bit(run, data, tmp_path):
    """Also where the range is that of the record: a later version might compute another."""
    folder = RunFolder(tmp_path / "broken")
    with pytest.raises(InterruptedError):
        nearkin.train(data, output=folder.path, verbose=Stops(), **SMALL)
    assert not folder.encoder.exists()
    assert [*folder.checkpoints.glob("*.pt")]
    nearkin.train(data, output=folder.path, resume=True, **SMALL)
    whole = RunFolder(run)
    for name in ("encoder", "projector", "metrics"):
        assert getattr(folder, name).read_bytes() == getattr(whole, name).read_bytes(), name


def test_values_that_hardly_fill_the_range_of_an_encoder_are_noted(run, data, tmp_path, log):
    for number in range(3):
        pixels = tifffile.imread(data / "field" / f"{number:02}.tif").astype(np.float32) / 10_000
        write_tiff(tmp_path / f"{number}.tif", pixels)
    nearkin.embed(run, tmp_path, workers=0, verbose=log)
    assert any("images look alike to it; scale them" in line for line in log.texts)
    log.texts.clear()
    nearkin.embed(run, data, workers=0, verbose=log)
    assert not any("look alike" in line for line in log.texts)


def test_gray_images_of_other_types_are_scaled_by_their_own_values(tmp_path, log):
    rng, folder = np.random.default_rng(0), tmp_path / "ct"
    folder.mkdir()
    for number in range(3):
        tifffile.imwrite(folder / f"{number}.tif", rng.integers(-900, 900, (16, 16), np.int32))
    encoder = write_network(tmp_path / "encoder.safetensors")
    nearkin.embed(encoder, folder, workers=0, verbose=log)
    assert any("of int32 are scaled by the values of each, not by" in line for line in log.texts)


def test_other_images_are_refused_in_one_line_with_exit_code_3(run, tmp_path, refusal):
    textures(tmp_path / "four", 4, "uint16", 2)
    refused = refusal(3, "embed", run, tmp_path / "four", "-o", tmp_path / "x.npz")
    assert "4 channels of uint16, and the encoder takes 13 channels" in refused
    options = {key: value for key, value in SMALL.items() if key != "batch_size"}
    with pytest.raises(UsageError, match="backbone torchvision:resnet18 takes 3 channels"):
        nearkin.train(
            tmp_path / "four", output=tmp_path / "run", backbone="torchvision:resnet18", **options
        )
    with pytest.raises(DataError, match="4 channels of uint16, and the encoder takes 13"):
        nearkin.train(tmp_path / "four", output=tmp_path / "more", encoder=run, **options)


@pytest.mark.parametrize(
    "words",
    [
        "embed RUN FOUR",
        "classify RUN FOUR",
        "discover FOUR --encoder RUN --labeled LABELS --classes 2",
        "train FOUR --encoder RUN --batch-size 4",
        "train FOUR --method seed --teacher RUN --batch-size 4 --backbone tiny",
    ],
)
def test_they_are_refused_before_a_run_is_overwritten_or_a_new_one_is_begun(
    words, run, tmp_path, refusal
):
    four, labels, old = textures(tmp_path / "four", 4, "uint16", 6), tmp_path / "l.csv", "old"
    rows = (f"{name}/{n:02}.tif,{name}" for name in ("field", "town") for n in range(2))
    labels.write_text("\n".join(["path,label", *rows]))
    names = {"RUN": run, "FOUR": four, "LABELS": labels}
    typed = [names.get(word, word) for word in words.split()]
    before = contents(shutil.copytree(run, tmp_path / old))
    for out, *more in ((old, "--overwrite"), ("new",), ("new",)):
        assert "4 channels of uint16" in refusal(3, *typed, "-o", tmp_path / out, *more)
    after, changing = contents(tmp_path / old), {"train.log", ".nearkin-run"}
    assert {name for name in before if after.get(name) != before[name]} <= changing


def test_a_cache_of_rgb_is_refused_before_a_run_is_overwritten(run, data, tmp_path, refusal):
    out = shutil.copytree(run, tmp_path / "run")
    for words in (["train", data, "--batch-size", 8], ["classify", run, data]):
        refused = refusal(2, *words, "--cache", "ram", "-o", out, "--overwrite")
        assert "--cache ram holds RGB of 8 bits" in refused
        assert (out / "encoder.safetensors").read_bytes() == (
            run / "encoder.safetensors"
        ).read_bytes()


@pytest.mark.slow
def test_exports_give_the_same_features_by_the_code_of_their_cards(run, data, tmp_path):
    """By programs without nearkin; a timm network in timm."""
    nearkin.train(
        data, output=tmp_path / "timm", backbone="timm/resnet10t", image_size=64, **SMALL
    )
    photo = data / "town" / "01.tif"
    cards = [
        (run, "onnx", "outputs"),
        (run, "torch-export", "outputs"),
        (tmp_path / "timm", "timm", "features"),
    ]
    folders = [tmp_path / str(number) for number in range(len(cards))]
    for folder, (source, format, _) in zip(folders, cards, strict=True):
        nearkin.export(source, output=folder, format=format)
    results = zip(folders, (result for *_, result in cards), strict=True)
    for (source, *_), theirs in zip(cards, computed(results, photo), strict=True):
        encoder = load(source)
        with torch.inference_mode():
            own = encoder(encoder.transform(tifffile.imread(photo))[None])
        np.testing.assert_allclose(theirs, own, atol=1e-4 * float(own.abs().max()))
    for format, reason in (
        ("torchvision", "its networks take RGB only"),
        ("huggingface", "RGB of 8 bits only"),
    ):
        with pytest.raises(UsageError, match=reason):
            nearkin.export(run, output=tmp_path / format, format=format)


@pytest.mark.slow
def test_gray_of_16_bits_is_trained_from_scratch_and_from_an_encoder_of_photographs(tmp_path):
    gray = textures(tmp_path / "gray", 1, "uint16")
    run = tmp_path / "run"
    nearkin.train(gray, output=run, **SMALL)
    view = load(run).preprocessing
    assert len(view.low) == 3
    assert view.high[0] < 20_000, "the range is that of the values, not of their type"
    nearkin.train(gray, output=tmp_path / "more", encoder=run, **SMALL)
    assert load(tmp_path / "more").preprocessing == view


GRAY = {
    "an array": lambda x: x,
    "arrays of several sizes": lambda x: [x[0, :20], *x[1:]],
    "Pillow images": lambda x: [*map(Image.fromarray, x)],
    "a source": lambda x: SimpleNamespace(names=list("012"), read=lambda name: x[int(name)]),
}


@pytest.mark.parametrize("how", GRAY)
@pytest.mark.parametrize("side", [16, 24])  # that of the encoder, and another
def test_gray_arrays_of_16_bits_have_the_features_of_their_files(how, side, tmp_path, log):
    """By an encoder of RGB of 8 bits, which sees each image by its type."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 2**16, (3, side, side), np.uint16)
    given = GRAY[how](pixels)
    first = given[0] if isinstance(given, list) else pixels[0]
    (tmp_path / "files").mkdir()
    for row, image in enumerate([np.asarray(first), *pixels[1:]]):
        Image.fromarray(image).save(tmp_path / "files" / f"{row}.png")
    encoder = write_network(tmp_path / "encoder.safetensors")
    files, arrays = (
        nearkin.embed(encoder, data, workers=0, verbose=log)
        for data in (tmp_path / "files", given)
    )
    np.testing.assert_array_equal(arrays.vectors, files.vectors)
    assert (
        sum("3 gray images of uint16 are scaled by that type" in line for line in log.texts) == 2
    )
