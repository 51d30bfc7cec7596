"""Features of images and of their views: functions of seed and image, kept for later runs."""

import os
import shutil
from dataclasses import replace
from itertools import count
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from nearkin.classifier import kept as module
from nearkin.classifier.features import UNTOUCHED, Extraction, ViewSettings
from nearkin.data.batches import ViewDataset
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import CUSTOM, Encoder
from nearkin.encoders.inference import inference
from nearkin.evaluation import embeddings
from nearkin.evaluation.evaluate import second_view
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import as_backbone

CPU = torch.device("cpu")
SHARD = 60
"""Images in a file of features, of which there are usually more."""
BAD = SHARD + 3
"""An unreadable image of the second shard."""


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return Encoder(build_backbone("tiny", 8), 8, {"backbone": "tiny"})


@pytest.fixture(scope="module")
def images():
    return open_images(np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Images of two shards, one of them broken."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number, pixels in enumerate(rng.integers(0, 256, (SHARD + 40, 8, 8, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(folder / f"{number:05d}.png")
    broken = folder / f"{BAD:05d}.png"
    broken.write_bytes(broken.read_bytes()[:60])
    return open_images(folder)


def features(encoder, images, num_views, seed=0):
    extraction = Extraction(encoder, images, ViewSettings("characters", num_views, seed), CPU, 0)
    return extraction.compute().features


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of kept features, which is empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nearkin" / "features"


class Own(nn.Sequential):
    """A network of the user's."""


class Log:
    """Lines and progress of an extraction, which may stop it."""

    def __init__(self, stop_after=None):
        self.lines, self.computed, self.stop_after = [], [], stop_after

    def info(self, line):
        self.lines.append(line)

    def progress(self, done, total, text):
        self.computed.append((done, total, text.partition("  ")[0]))
        if self.stop_after and done > self.stop_after and "views" in text:
            raise KeyboardInterrupt


def test_features_are_a_function_of_the_seed(encoder, images):
    one, same, other = (features(encoder, images, 3, seed) for seed in (0, 0, 1))
    assert one.center.shape == (40, 128)
    assert one.views.shape == (3, 40, 128)
    assert torch.equal(one.views, same.views)
    assert torch.equal(one.center, other.center)
    assert not torch.equal(one.views, other.views)
    assert not torch.equal(one.views[0], one.views[1])
    none = features(encoder, images, 0)  # without views
    assert none.views.shape == (0, 40, 128)
    assert torch.equal(none.center, one.center)


def test_features_are_in_the_order_of_the_images_and_depend_on_no_other(encoder, images):
    every = features(encoder, images, 2)
    rows = np.array([4, 17, 31])
    some = features(encoder, images.subset(rows), 2)
    torch.testing.assert_close(some.center, every.center[rows])
    torch.testing.assert_close(some.views, every.views[:, rows])  # the views are the image's own
    unit = torch.nn.functional.normalize
    own = (unit(every.views, dim=2) * unit(every.center, dim=1)).sum(dim=2)
    others = (unit(every.views, dim=2) * unit(every.center.roll(1, 0), dim=1)).sum(dim=2)
    assert own.mean() > others.mean()


def test_views_of_an_image_are_the_same_among_images_of_any_size(encoder, tmp_path):
    """Small squares alone would be held in memory, and cropped another way."""
    rng = np.random.default_rng(0)
    for number, size in enumerate([(8, 8)] * 4 + [(12, 20)] * 2 + [(80, 100)] * 2):
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    (tmp_path / "0.png").write_bytes((tmp_path / "0.png").read_bytes()[:60])
    images = open_images(tmp_path)
    drawn = ViewSettings("characters", 2, 0)
    every, bad = Extraction(encoder, images, drawn, CPU, 0).compute()
    assert list(bad) == [0]
    for rows in ([1, 2, 3], [4, 5], [6, 7], [3, 4], [2, 7]):
        some = Extraction(encoder, images.subset(np.array(rows)), drawn, CPU, 0).compute()
        torch.testing.assert_close(some.features.views, every.views[:, rows])
        torch.testing.assert_close(some.features.center, every.center[rows])


@pytest.mark.parametrize("of", ["a discovery", "an evaluation"])
def test_views_of_photographs_are_loaded_by_workers(encoder, tmp_path, monkeypatch, of):
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 256, (80, 100, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    images, drawn = open_images(tmp_path), ViewSettings("characters", 2, 0)
    load = ViewDataset.__getitem__

    def noting(self, step):
        with (tmp_path / "loaded.txt").open("a") as file:
            print(os.getpid(), file=file)
        return load(self, step)

    def views(workers):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache{workers}"))  # none are kept
        (tmp_path / "loaded.txt").write_text("")
        if of == "a discovery":
            made = Extraction(encoder, images, drawn, CPU, workers, batch_size=2).compute()
            found = made.features.views
        else:
            how = {"seed": 0, "augment": "characters", "device": CPU, "workers": workers}
            found = second_view(encoder, images, **how).tensor
        return found, set(map(int, (tmp_path / "loaded.txt").read_text().split()))

    monkeypatch.setattr(ViewDataset, "__getitem__", noting)
    alone, here = views(0)
    same, there = views(2)
    assert torch.equal(alone, same)
    assert here == {os.getpid()}
    assert there
    assert os.getpid() not in there


class Flaky:
    """A source of which one image cannot be read while a share is away."""

    def __init__(self, folder):
        self.away, self.names = folder / "away", [f"{number:02}" for number in range(20)]

    def read(self, name):
        if name == "07" and self.away.exists():
            raise OSError("stale file handle")
        return np.random.default_rng(int(name)).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def test_an_image_that_could_not_be_read_is_tried_again(encoder, tmp_path, cache):
    source = Flaky(tmp_path)
    images = open_images(source)
    own = Extraction(encoder, images, ViewSettings("characters", 2, 0), CPU, 0)
    whole = own.compute().features
    shutil.rmtree(cache)
    source.away.touch()
    assert list(replace(own).compute().bad) == [7]
    assert list(replace(own).compute().bad) == [7]
    source.away.unlink()
    for _ in range(2):
        again, bad = replace(own).compute()
        assert bad == {}
        torch.testing.assert_close(again.center, whole.center)
        torch.testing.assert_close(again.views, whole.views)
    assert not computed(own)[0]


def test_a_stopped_extraction_goes_on_with_the_images_that_are_missing(
    encoder, files, cache, monkeypatch
):
    monkeypatch.setattr(embeddings, "SHARD", SHARD)
    given = encoder, files, ViewSettings("characters", 2, 0), CPU, 0
    whole, bad = Extraction(*given).compute()
    assert list(bad) == [BAD]
    shutil.rmtree(cache)
    with pytest.raises(KeyboardInterrupt):  # in the second shard, of which nothing is kept
        Extraction(*given, Log(stop_after=2 * SHARD)).compute()
    written = {path: path.stat().st_mtime_ns for path in cache.glob("*/*")}
    assert len(written) == 3
    log = Log()
    features, same_bad = Extraction(*given, log).compute()
    assert log.computed[-1] == (2 * 40, 2 * 40, "features of views")
    assert {text for _, _, text in log.computed} == {"features of views"}
    assert all(path.stat().st_mtime_ns == time for path, time in written.items())
    assert same_bad == bad
    readable = np.arange(len(files)) != BAD
    assert torch.equal(features.center[readable], whole.center[readable])
    assert torch.equal(features.views[:, readable], whole.views[:, readable])


def computed(extraction):
    """Whether any image is encoded, and which features come out."""
    log = Log()
    features, bad = replace(extraction, log=log).compute()
    return bool(log.computed), features, bad


def test_a_second_question_encodes_no_image_and_says_so(encoder, files, cache):
    with_views = Extraction(encoder, files, ViewSettings("characters", 2, 0), CPU, 0)
    plain = replace(with_views, drawn=UNTOUCHED)
    asked, first, bad = computed(plain)
    assert asked
    log = Log()
    again, same_bad = replace(plain, log=log).compute()
    assert torch.equal(again.center, first.center)
    assert (same_bad, log.computed) == (bad, [])
    assert "features of 100 images were kept in" in log.lines[0]
    log = Log()  # views are asked for, and the images as they are not again
    replace(with_views, log=log).compute()
    assert {text for _, _, text in log.computed} == {"features of views"}
    assert len(list(cache.iterdir())) == 2


def test_what_features_depend_on_is_what_they_are_kept_by(encoder, files, images):
    """No image, encoder, view or size of one may get the features of another."""
    drawn = ViewSettings("characters", 1, 0)
    own = Extraction(encoder, files, drawn, CPU, 0)
    assert computed(own)[0]
    torch.manual_seed(1)
    retrained = Encoder(build_backbone("tiny", 8), 8, {"backbone": "tiny"})
    larger = Encoder(encoder.backbone, 16, {"backbone": "tiny"})
    others = [
        replace(own, encoder=retrained),
        replace(own, encoder=larger),
        replace(own, drawn=replace(drawn, seed=1)),
        replace(own, drawn=replace(drawn, num_views=2)),
        replace(own, drawn=replace(drawn, augment="ncl_cifar")),
        replace(own, precision="bf16"),
        replace(own, images=files.subset(np.arange(99))),
        replace(own, images=files.subset(np.delete(np.arange(100), 50))),
        replace(own, images=images),
    ]
    for number, other in enumerate(others):
        assert computed(other)[0], number
    modified = files.modified.copy()
    modified[7] += 1
    assert computed(replace(own, images=replace(files, modified=modified)))[0]
    assert not computed(own)[0]


def test_pixels_of_the_same_bytes_in_another_shape_or_type_are_other_images(encoder):
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 256, (6, 28, 56), dtype=np.uint8)
    deep = rng.integers(0, 2**15, (6, 28, 28), dtype=np.uint16)
    for arrays in ((wide, wide.reshape(6, 56, 28)), (deep, deep.view(np.int16))):
        asked = [Extraction(encoder, open_images(x), UNTOUCHED, CPU, 0) for x in arrays]
        first, second = (each.images.contents for each in asked)
        assert (first == second).all()
        assert [computed(each)[0] for each in asked * 2] == [True, True, False, False]


def test_views_that_were_edited_are_drawn_again(encoder, files, cache, tmp_path):
    """In a file of the user's, or under a name by another release."""
    path = tmp_path / "views.toml"
    extraction = Extraction(encoder, files, ViewSettings(str(path), 1, 0), CPU, 0)
    for brightness, made in ((0.4, True), (0.8, True), (0.4, False)):
        path.write_text(f"[[views]]\njitter = 1.0\nbrightness = {brightness}\n")
        assert computed(extraction)[0] == made
    code = path.with_suffix(".py")
    code.write_text("import nearkin\nmine = (nearkin.View(jitter=1.0, brightness=0.4),)\n")
    assert not computed(replace(extraction, drawn=ViewSettings(f"{code}:mine", 1, 0)))[0]


def test_what_may_change_unseen_is_not_kept(encoder, files, cache, tmp_path):
    """Code of the user's, and large files of which no time is known; pixels are known by all."""
    extraction, network = Extraction(encoder, files, UNTOUCHED, CPU, 0), encoder.backbone
    coded = Encoder(network, 8, {"backbone": f"{tmp_path / 'mine.py'}:Net"})
    passed = Encoder(network, 8, {"backbone": CUSTOM})  # such as another activation, same weights
    instead = Encoder(as_backbone(Own(network.body), 8, 128), 8, {"backbone": "tiny"})
    unnamed = Encoder(network, 8, {})
    large = replace(files, modified=0 * files.modified, num_bytes=files.num_bytes + 2**16)
    runs = (tmp_path / f"run-{number}" for number in count())
    computed(extraction)
    of_code = [replace(extraction, encoder=each) for each in (coded, passed, instead, unnamed)]
    for other in (*of_code, replace(extraction, images=large)):
        for _ in range(2):
            assert computed(other)[0]
        in_run = replace(other, aside=next(runs))
        assert computed(in_run)[0]
        assert not computed(in_run)[0]  # within a run code is taken to stay what it was
    assert len(list(cache.iterdir())) == 1
    pixels = open_images(np.zeros((2, 160, 160, 3), np.uint8))
    in_memory = Extraction(encoder, pixels, UNTOUCHED, CPU, 0)
    assert [computed(in_memory)[0] for _ in range(2)] == [True, False]


def test_damaged_features_are_computed_again_and_a_folder_that_cannot_be_written_costs_time_only(
    encoder, files, cache, monkeypatch, tmp_path
):
    own = Extraction(encoder, files, UNTOUCHED, CPU, 0)
    _, whole, _ = computed(own)
    [path] = cache.glob("*/*")
    good = path.read_bytes()
    for content in (b"", b"no features", good[: len(good) // 2], bytes(len(good))):
        path.write_bytes(content)
        asked, again, _ = computed(own)
        assert asked
        assert torch.equal(again.center, whole.center)
        assert path.read_bytes() == good
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        log = Log()
        features, _ = replace(own, log=log).compute()
        assert torch.equal(features.center, whole.center)
        assert log.computed
        assert "features are not kept" in log.lines[-1]


def test_what_was_used_longest_ago_makes_room(encoder, files, cache, monkeypatch):
    every = [
        Extraction(encoder, files, ViewSettings("characters", 1, n), CPU, 0) for n in range(3)
    ]
    for extraction in every[:2]:
        computed(extraction)
    folders = sorted(cache.iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
    for age, folder in enumerate(folders):
        os.utime(folder, (1000 + age, 1000 + age))
    size = sum(path.stat().st_size for path in cache.glob("*/*"))
    monkeypatch.setattr(module, "LIMIT", size)
    assert not computed(every[0])[0]  # used again, so the views of the second are the oldest
    assert computed(every[2])[0]
    assert not computed(every[0])[0]
    assert computed(every[1])[0]


def test_a_table_of_features_is_that_of_an_encoding_in_one_go(encoder, files):
    """Those of `nearkin embed` are those of a classification."""
    embedded = embeddings.encode_images(inference(encoder, CPU), files, workers=0)
    own = Extraction(encoder, files, UNTOUCHED, CPU, 0)
    for table in (own.compute().embeddings(files), replace(own).compute().embeddings(files)):
        np.testing.assert_array_equal(table.vectors, embedded.vectors)
        np.testing.assert_array_equal(table.rows, embedded.rows)
        assert table.bad == embedded.bad
        assert table.paths == embedded.paths


def compute_apart(extraction, queue):
    torch.set_num_threads(1)
    queue.put(extraction.compute().features.center.numpy())


def test_processes_may_keep_the_same_at_once(encoder, files):
    own = Extraction(encoder, files, UNTOUCHED, CPU, 0)
    context = get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=compute_apart, args=(own, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    kept = own.compute().features.center.numpy()
    for answer in answers:
        np.testing.assert_array_equal(np.delete(answer, BAD, 0), np.delete(kept, BAD, 0))
