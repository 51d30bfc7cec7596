"""Images of one source: what is proposed from files, and what chance would do as well."""

from dataclasses import replace

import builders
import numpy as np
import pytest
from PIL import ExifTags, Image

from nearkin.auditing import sources
from nearkin.auditing.data import Audited
from nearkin.auditing.sources import BURST, RUN, _in_a_row, _tested, captures, find_sources
from nearkin.data.opening import open_images
from nearkin.evaluation.embeddings import Embeddings
from nearkin.pace import ignore_progress
from nearkin.types import UNLABELED


def bursts(seed, size=4, *, alike):
    """Features of two classes in groups of `size`, which are alike or merely numbered."""
    rng = np.random.default_rng(seed)
    labels, groups = np.arange(160) // 80, np.arange(160) // size
    centers = rng.normal(size=(2, 12))[labels] + alike * 2 * rng.normal(size=(40, 12))[groups]
    x = centers + rng.normal(size=(160, 12))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    names = [f"IMG_{2 * size * (row // size) + row % size:04}.jpg" for row in range(160)]
    splits = np.where(rng.random(160) < 0.5, "train", "test")
    return Audited(Embeddings(x, labels, paths=names, classes=("a", "b"), splits=splits))


def test_bursts_are_kept_and_mere_numbers_are_not():
    proposals, groups = find_sources(bursts(0, alike=True), 0, ignore_progress)
    (runs,) = (each for each in proposals if each.kind == "file names in a row")
    assert (runs.num_groups, runs.num_images, runs.kept) == (40, 160, True)
    assert runs.share > 2 * runs.chance
    assert (groups == np.arange(160) // 4 * 4).all()
    proposals, groups = find_sources(bursts(0, alike=False), 0, ignore_progress)
    assert not any(each.kept for each in proposals)
    assert (groups == np.arange(160)).all()


def test_a_proposal_says_on_how_many_images_it_was_tested_unless_on_all(monkeypatch):
    def lines(audited):
        return [each.line() for each in find_sources(audited, 0, ignore_progress)[0]]

    audited = bursts(0, alike=True)
    assert not any("tested" in line for line in lines(audited))
    labels = np.where(np.arange(160) % 8 < 4, audited.embeddings.labels, UNLABELED)
    of_some = Audited(replace(audited.embeddings, labels=labels))
    assert all("160 images, tested on 80 images; the nearest" in line for line in lines(of_some))
    monkeypatch.setattr(sources, "MOST", 60)
    assert all("160 images, tested on 60 images; the nearest" in line for line in lines(audited))
    assert lines(audited)


def test_bursts_across_folders_that_name_parts_are_kept_too():
    audited = bursts(0, alike=True)
    own = audited.embeddings
    for place in ("{split}/cats/{name}", "cats/{split}/{name}", "{name}#0,-2,7,9"):
        named = [
            place.format(split=split, name=name)
            for split, name in zip(own.splits, own.paths, strict=True)
        ]
        _, groups = find_sources(Audited(replace(own, paths=named)), 0, ignore_progress)
        assert (groups == np.arange(160) // 4 * 4).all()


def test_groups_that_mean_nothing_are_seldom_kept():
    ps = [_tested(bursts(s, alike=False), np.arange(160) // 4 * 4, s).p for s in range(60)]
    assert np.mean(np.array(ps) <= 0.05) <= 0.1  # 3 of 60 are expected
    assert 0.3 < np.mean(ps) < 0.7


def test_a_group_that_is_its_whole_class_is_not_tested():
    audited = bursts(0, alike=True)
    assert _tested(audited, audited.embeddings.labels * 80, 0) is None


def test_names_in_a_row_are_groups_of_ten_at_most():
    kind = np.repeat([0, 16, 17], [16, 1, 1])  # such as a_.jpg, b_.jpg and c.jpg
    number = np.array([1, 2, 3, 5, *range(10, 22), 4, -1])
    expected = [0, 0, 0, 3, *[4] * 10, 14, 14, 16, 17]
    shuffled = np.random.default_rng(0).permutation(18)
    for order in (np.arange(18), shuffled):
        groups = _in_a_row(number[order] >= 0, kind[order], number[order], 1, RUN)
        first = {name: row for row, name in reversed([*enumerate(np.array(expected)[order])])}
        assert groups.tolist() == [first[name] for name in np.array(expected)[order]]


@pytest.fixture
def photographs(tmp_path):
    """Two bursts of one camera, one image of another at that time, and one without EXIF."""
    taken = ["2024:05:01 10:00:00", "2024:05:01 10:00:40", "2024:05:01 10:01:30"]
    taken += ["2024:05:01 10:30:00", "2024:05:01 10:30:05", "2024:05:01 10:00:00", ""]
    for number, (image, time) in enumerate(zip(builders.photographs(7), taken, strict=True)):
        exif = Image.Exif()
        exif[ExifTags.Base.Model] = "other" if number == 5 else "camera"
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = time
        if number == 1:
            gps = {1: "S", 2: (10.0, 30.0, 0.0), 3: "E", 4: (20.0, 0.0, 36.0)}
            exif.get_ifd(ExifTags.IFD.GPSInfo).update(gps)
        image.save(tmp_path / f"{number}.jpg", **({"exif": exif} if time else {}))
    (tmp_path / "7.jpg").write_bytes((tmp_path / "0.jpg").read_bytes()[:300])
    return tmp_path


def test_bursts_are_of_one_camera_and_each_image_within_a_minute_of_another(photographs):
    images = open_images(photographs, labels="none")
    found = captures(images, ignore_progress)
    camera, time = found["camera"], found["time"]
    assert _in_a_row(time != 0, camera, time, BURST, len(time)).tolist() == [0, 0, 0, 3, 3, 5, 6]
    south, east = found["place"][1].tolist()
    assert (south, east) == (1 + 1_695_000, 1 + 2_000_100)
    assert not found["place"][[0, 2, 3, 4, 5, 6]].any()
    rows = [f"{photographs}/{name},1,1,30,30\n" for name in images.names]
    table = photographs / "boxes.csv"
    table.write_text("path,x0,y0,x1,y1\n" + "".join(rows))
    assert (captures(open_images(table), ignore_progress) == found).all()
