"""Images that show little, or stick out."""

import builders
import numpy as np
from PIL import Image, ImageEnhance, ImageFilter

from nearkin.auditing.quality import find_bad
from nearkin.data.opening import open_images
from nearkin.pace import ignore_progress

BAD = {
    "blank": lambda image: Image.new("RGB", image.size, (120, 90, 60)),
    "dark": lambda image: ImageEnhance.Brightness(image).enhance(0.1),
    "bright": lambda image: Image.eval(image, lambda level: 225 + level // 9),
    "blurred": lambda image: image.filter(ImageFilter.GaussianBlur(8)),
    "odd shape": lambda image: image.crop((0, 0, image.width, image.height // 4)),
    "odd size": lambda image: image.resize((image.width // 4, image.height // 4)),
}


def contrasty(crops):
    """Photographs of more than a bright sky or a dark roof."""
    return [image for image in crops if np.asarray(image.convert("L")).std() > 40]


def test_each_kind_is_named_and_photographs_as_they_are_are_not(tmp_path):
    crops = contrasty(builders.photographs(48, 96))
    assert len(crops) > 20
    for number, image in enumerate(crops[6:]):
        image.save(tmp_path / f"{number:02}.png")
    for image, (kind, edit) in zip(crops, BAD.items(), strict=False):
        edit(image).save(tmp_path / f"{kind}.png")
    Image.new("RGB", (96, 96)).save(tmp_path / "black.png")
    images = open_images(tmp_path, labels="none")
    found = {images.names[each.row]: each.kind for each in find_bad(images, ignore_progress)}
    assert found == {f"{kind}.png": kind for kind in BAD} | {"black.png": "blank"}


def test_images_in_memory_and_of_one_channel_are_looked_at_too():
    crops = contrasty(builders.photographs(48, 96))
    pixels = np.stack([np.asarray(image.convert("L")) for image in crops])
    pixels[3] = 7
    (bad,) = find_bad(open_images(pixels), ignore_progress)
    assert (bad.row, bad.kind) == (3, "blank")


def test_new_images_of_16_bits_change_the_range_of_all(tmp_path):
    crops = contrasty(builders.photographs(48, 96))
    for number, image in enumerate(crops[:20]):
        level = np.asarray(image.convert("L")).astype(np.uint16)
        Image.fromarray(level * (200 if number > 9 else 8)).save(tmp_path / f"{number:02}.png")
        if number == 9:
            find_bad(open_images(tmp_path), ignore_progress)
    fresh = find_bad(open_images(tmp_path, cache=False), ignore_progress)
    assert sum(each.row <= 9 for each in fresh) == 10
    assert find_bad(open_images(tmp_path), ignore_progress) == fresh
