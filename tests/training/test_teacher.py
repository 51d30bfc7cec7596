"""A student's batches have its teacher's features of exactly the views that they show."""

import html
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import pixels, write_network
from discoveries import bytes_of
from nearkin_command import run
from small import fork_workers

from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.opening import open_images
from nearkin.data.preprocessing import Preprocessing
from nearkin.data.samplers import RandomBatchSampler
from nearkin.data.views import View, normalize
from nearkin.encoders.encoder import load, weight_bytes, write_encoder
from nearkin.errors import DataError, ResourceError, UsageError
from nearkin.files import read_sealed
from nearkin.networks.backbone import build_backbone
from nearkin.objectives import unit
from nearkin.run.folder import RunFolder
from nearkin.training.teacher import (
    HALF,
    HEAD,
    distilled_origin,
    feature_files,
    open_teacher,
    parts_of,
)

CPU = torch.device("cpu")
BATCH = 8
IMAGES = open_images(pixels(24))


@pytest.fixture
def teacher(tmp_path):
    return str(write_network(tmp_path / "teacher.safetensors"))


def student(*views, images=IMAGES, period=0, size=16, **options):
    sampler = RandomBatchSampler(len(images), BATCH, seed=3, view_epochs=period)
    return Batches.of(
        images,
        views_of("moco_cifar", views or ("strong",)),
        image_size=size,
        sampler=sampler,
        device=CPU,
        **options,
    )


def feed(folder, batches, named, views, epochs=3):
    """The batches with the features of a teacher in a run folder."""
    how = dict(teacher=named, teacher_views=views, view_sizes=(batches.dataset.image_size,))
    config = TrainConfig(method="seed", epochs=epochs, seed=3, **how)
    run = RunFolder(folder / "run")
    run.path.mkdir(parents=True, exist_ok=True)
    encoder = open_teacher(run, config, batches.images)
    return parts_of(run, config, batches, encoder)[0], encoder


def expected(encoder, views):
    with torch.no_grad():
        return tuple(unit(encoder.backbone(view)) for view in views)


def close(features, others, tolerance=1e-6):
    for a, b in zip(features, others, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def assert_sees(taught, shown, steps, tolerance=1e-6):
    """Compare what `feed` returns with features of the views in batches of the teacher's size."""
    fed, encoder = taught
    for batch, seen in zip(fed.load(0, steps), shown.load(0, steps), strict=True):
        assert torch.equal(batch.index, seen.index)
        close(batch.teacher, expected(encoder, seen.views), tolerance)


def test_a_teacher_of_the_same_size_sees_the_very_pixels_of_the_student(tmp_path, teacher):
    batches = student("strong", "weak")
    fed, encoder = feed(tmp_path, batches, teacher, views=0)
    for step, batch in enumerate(fed.load(0, 4)):
        assert torch.equal(torch.stack(batch.teacher), torch.stack(expected(encoder, batch.views)))
        assert all(len(rows) == BATCH for rows in batch.teacher)
        epoch = step // batches.sampler.steps_per_epoch
        shown = next(batches.planned([(epoch, batch.index.numpy())]))[0]
        close(batch.teacher, expected(encoder, map(normalize, shown)))


def test_a_teacher_sees_images_in_its_own_mean_and_deviation(tmp_path):
    half, details = Preprocessing(16, mean=(0.5,) * 3, std=(0.5,) * 3), {"backbone": "tiny"}
    file, batches = tmp_path / "half.safetensors", student("strong", "weak")
    write_encoder(file, build_backbone("tiny", 16), details, half)
    for views in (0, 1):  # in every step, and stored
        run, shown = tmp_path / str(views), student("strong", "weak", period=views)
        fed, encoder = feed(run, shown, str(file), views=views)
        batch = next(iter(fed.load(0, 1)))
        pixels = (2 * view - 1 for view in next(batches.planned([(0, batch.index.numpy())]))[0])
        with torch.no_grad():
            own = [unit(encoder.backbone.body(view).flatten(1)) for view in pixels]
        close(batch.teacher, own, 1e-5 if not views else 1e-3)  # in half precision


def test_a_larger_teacher_sees_the_same_crop_at_its_own_size():
    """A view without color changes is a linear map of the image: crops of a ramp show where."""
    across = np.linspace(0, 255, 32).astype(np.uint8)
    ramp = np.stack(np.broadcast_arrays(across[None, :], across[:, None], 128), axis=2)
    images = open_images(np.repeat(ramp[None], 24, axis=0).astype(np.uint8))
    batches = student(View(scale=(0.2, 0.6), flip=0.5), images=images, size=32)
    large = batches.shown_at([64] * len(batches.sizes))
    for small, big in zip(batches.load(0, 3), large.load(0, 3), strict=True):
        assert big.views[0].shape[-1] == 64
        assert torch.equal(small.index, big.index)
        halved = torch.nn.functional.avg_pool2d(big.views[0], 2)
        assert (halved - small.views[0]).abs().mean() < 0.03  # a tenth of what one crop differs


def test_the_blur_of_a_larger_view_is_larger():
    images = open_images(pixels(24, 32))
    batches = student(View(blur=1.0, sigma=(1.0, 1.0)), images=images, size=32)
    large = batches.shown_at([96] * len(batches.sizes))
    rows = np.arange(4)
    assert batches.dataset.sample(0, rows)[0].sigma.tolist() == [1.0] * 4
    assert large.dataset.sample(0, rows)[0].sigma.tolist() == [3.0] * 4


def test_of_photographs_it_sees_the_same_crop_cut_from_the_file(tmp_path, photographs):
    view, images = View(scale=(0.3, 0.6)), open_images(photographs)
    named = str(write_network(tmp_path / "teacher.safetensors", size=48))
    taught = feed(tmp_path, student(view, images=images, size=24), named, views=0)
    assert_sees(taught, student(view, images=images, size=48), 1)


DEEP = open_images(np.random.default_rng(0).integers(0, 1000, (24, 16, 16, 3), np.uint16))


def write_deep_teacher(path, low, high):
    view = Preprocessing(16, low=(low,) * 3, high=(high,) * 3)
    write_encoder(path, build_backbone("tiny", 16), {"backbone": "tiny", "image_size": 16}, view)
    return str(path)


@pytest.mark.parametrize("views", [0, 1])
@pytest.mark.parametrize("size", [16, 8])
def test_a_teacher_sees_pixels_in_its_own_range_of_values(tmp_path, size, views):
    """Its features are those that it has of the same images where it is evaluated."""
    named = write_deep_teacher(tmp_path / "teacher.safetensors", -500.0, 4000.0)
    assert DEEP.channels.high != (4000.0,) * 3
    taught = feed(tmp_path, student(View(), images=DEEP, size=size, period=views), named, views)
    images = taught[1].preprocessing.applied(DEEP)
    shown = student(View(), images=images, size=size, period=views)
    large = shown.shown_at([16] * len(shown.sizes))
    assert_sees(taught, large, 3, tolerance=1e-3)


def test_values_beyond_the_range_of_a_teacher_are_its_ends(tmp_path):
    named = write_deep_teacher(tmp_path / "teacher.safetensors", 300.0, 600.0)
    whole = View(scale=(1, 1), ratio=(1, 1))
    taught = feed(tmp_path, student(whole, images=DEEP), named, views=0)
    images = taught[1].preprocessing.applied(DEEP)
    assert_sees(taught, student(whole, images=images), 3, tolerance=1e-4)


def test_a_teacher_without_a_range_is_compared_in_that_of_the_students_images(tmp_path, teacher):
    out, noise = tmp_path / "run", np.random.default_rng(0)
    np.savez(tmp_path / "deep.npz", x=noise.integers(0, 999, (24, 16, 16, 3), np.uint16))
    settings = "--method feature_matching --backbone tiny --epochs 1 --batch-size 8 -q"
    typed = ["train", tmp_path / "deep.npz", "--teacher", teacher, "-o", out, *settings.split()]
    assert run(*typed) == 0
    taught = load(RunFolder(out).teacher).preprocessing
    assert taught.channels.high == load(out).preprocessing.channels.high
    assert "teacher" in json.loads((out / "summary.json").read_text())["metrics"]


class Counting:
    """A user's source that counts which of its images are read."""

    def __init__(self, folder):
        self.paths = {path.name: path for path in folder.iterdir()}
        self.names, self.read_names = sorted(self.paths), []

    def read(self, name):
        self.read_names.append(name)
        return self.paths[name].read_bytes()


def test_a_photograph_is_read_once_for_the_student_and_its_teacher(tmp_path, photographs):
    source = Counting(photographs)
    images = open_images(source)
    named = str(write_network(tmp_path / "teacher.safetensors", size=48))
    made = student(View(scale=(0.3, 0.6)), View(size=0.5), images=images, size=24, cache="ram")
    fed, _ = feed(tmp_path, made, named, views=0)
    source.read_names.clear()
    (batch,) = fed.load(0, 1)
    assert [view.shape[-1] for view in batch.views] == [24, 12]
    assert sorted(source.read_names) == sorted(images.names[row] for row in batch.index)


def test_small_views_are_seen_at_the_teachers_one_size(tmp_path, teacher):
    batches = student(View(), View(size=0.5))
    assert batches.sizes == [16, 8]
    taught = feed(tmp_path, batches, teacher, views=0)
    assert_sees(taught, batches.shown_at([16] * len(batches.sizes)), 2)


@pytest.mark.parametrize("size", [16, 32])
def test_kept_features_are_those_of_the_epochs_views(tmp_path, size):
    named = str(write_network(tmp_path / "teacher.safetensors", size=size))
    batches = student("strong", "strong", period=2)
    kept, _ = feed(tmp_path / "kept", batches, named, views=2)
    live, _ = feed(tmp_path / "live", batches, named, views=0)
    for batch, other in zip(kept.load(0, 9), live.load(0, 9), strict=True):
        assert all(map(torch.equal, batch.views, other.views))
        close(batch.teacher, other.teacher, tolerance=1e-3)
        cosines = [(a * b).sum(dim=1) for a, b in zip(batch.teacher, other.teacher, strict=True)]
        assert torch.stack(cosines).min() > 1 - 1e-6
        lengths = torch.stack(batch.teacher).norm(dim=2)
        torch.testing.assert_close(lengths, torch.ones_like(lengths))


def test_a_teacher_sees_few_images_at_once(tmp_path, teacher, monkeypatch):
    batches = student("strong", "strong", period=1)
    (whole,) = feed(tmp_path / "whole", batches, teacher, views=0)[0].load(0, 1)
    monkeypatch.setattr("nearkin.training.teacher.images_at_once", lambda *_: 4)
    for views in (0, 1):
        fed, encoder = feed(tmp_path / str(views), batches, teacher, views=views)
        seen = []
        encoder.backbone.register_forward_pre_hook(
            lambda _, images, seen=seen: seen.append(len(*images))
        )
        (batch,) = fed.load(0, 1)
        close(batch.teacher, whole.teacher, tolerance=1e-3)
        assert seen == [4, 4, 4, 4] * (views == 0)


def test_views_repeat_after_their_period_and_batches_do_not():
    batches = student(period=2)
    per_epoch = batches.sampler.steps_per_epoch
    seen, orders = [], []
    for start in range(0, 4 * per_epoch, per_epoch):
        epoch = list(batches.load(start, start + per_epoch))
        orders.append(tuple(torch.cat([batch.index for batch in epoch]).tolist()))
        seen.append(dict(zip(orders[-1], torch.cat([b.views[0] for b in epoch]), strict=True)))
    assert all(torch.equal(seen[0][row], seen[2][row]) for row in seen[0])
    assert not any(torch.equal(seen[0][row], seen[1][row]) for row in seen[0])
    assert len(set(orders)) == 4


def test_a_damaged_file_or_one_of_other_views_is_made_again(tmp_path, teacher):
    batches = student(period=2)
    feed(tmp_path, batches, teacher, views=2)
    folder = RunFolder(tmp_path / "run").teacher_features
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    damaged, other = sorted(folder.iterdir())
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    feed(tmp_path / "stranger", student(period=2, size=8), teacher, views=2)
    foreign = RunFolder(tmp_path / "stranger/run").teacher_features / other.name
    assert read_sealed(foreign) is not None
    shutil.copy(foreign, other)
    changed = lambda: [path.stat().st_mtime_ns for path in (damaged, other)]
    before = changed()
    feed(tmp_path, batches, teacher, views=2)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    after = changed()
    assert all(np.greater(after, before))
    feed(tmp_path, batches, teacher, views=2)
    assert changed() == after


def test_files_hold_parts_of_many_images(tmp_path, teacher):
    batches = student(images=open_images(pixels(1500, side=8)), period=1, size=8)
    kept, encoder = feed(tmp_path, batches, teacher, views=1)
    config = TrainConfig(method="seed", teacher=teacher, teacher_views=1, epochs=1, seed=3)
    files = feature_files(RunFolder(tmp_path / "run"), config, batches, encoder)
    assert [(file.epoch, file.first) for file in files] == [(0, 0), (0, 1024)]
    assert all(len(read_sealed(file.path)) == HEAD + file.num_bytes for file in files)
    assert sum(file.num_bytes for file in files) == 1500 * encoder.num_features * HALF.itemsize
    assert_sees((kept, encoder), batches.shown_at([16] * len(batches.sizes)), 3, tolerance=1e-3)


def test_an_image_that_could_not_be_read_has_no_features_and_its_substitute_has(
    tmp_path, teacher, photographs
):
    folder = tmp_path / "images"
    shutil.copytree(photographs, folder)
    images = open_images(folder)
    (folder / "05.jpg").write_bytes((folder / "05.jpg").read_bytes()[:700])
    batches = student(View(), images=images, period=1)
    kept, encoder = feed(tmp_path, batches, teacher, views=1)
    (bad,) = [row for row in range(len(images)) if images.names[row].endswith("05.jpg")]
    for batch in kept.load(0, 3):
        assert bad not in batch.index
        close(batch.teacher, expected(encoder, batch.views), tolerance=1e-3)
    shutil.copy(photographs / "05.jpg", folder / "05.jpg")
    with pytest.raises(DataError, match="could not be read when it was made; remove it"):
        list(kept.load(0, 6))


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    """A finished run, its data and its settings."""
    folder = tmp_path_factory.mktemp("distilled")
    origin = {"source": "https://example.org/t", "license": "CC-BY-NC-4.0", "sha256": "ab" * 32}
    named = str(write_network(folder / "teacher.safetensors", origin=origin))
    data = folder / "data.npz"
    np.savez(data, x=pixels(64), y=np.arange(64) % 2)
    config = TrainConfig(method="seed", teacher=named, seed=3, backbone="tiny", batch_size=BATCH,
                         epochs=2, val=0.25, device="cpu", report=True, options={"queue_size": 16})  # fmt: skip
    return train(str(data), config, output=folder / "run"), data, config


def test_the_table_has_the_teacher_and_its_share_and_the_settings_the_number_of_views(distilled):
    run, *_ = distilled
    measures, kept = run.summary["metrics"], run.summary["differences"]["teacher"]
    assert list(measures) == ["encoder", "teacher", "untrained", "pixels"]
    for each in kept:
        own, its = (measures[of][each["name"]]["value"] for of in ("encoder", "teacher"))
        assert (each["first"], each["second"]) == (own, its)
        assert each["low"] <= own - its <= each["high"]
    assert kept
    assert "of its teacher's kNN top-1" in "\n".join(run.lines())
    assert "teacher" in run.lines()[0]
    assert "of its teacher's kNN" in html.unescape(run.folder.report.read_text())
    config, _ = run.folder.settings()
    assert config.teacher_views == 2
    assert len(list(run.folder.teacher_features.iterdir())) == 2


def test_a_student_of_restricted_weights_says_so(distilled):
    run, *_ = distilled
    encoder = load(run.path)
    assert encoder.details["origin"]["license"] == "CC-BY-NC-4.0"
    assert encoder.details["origin"]["source"] == "distilled from https://example.org/t"
    assert any("CC-BY-NC-4.0" in line and "warning" in line for line in encoder.lines())
    assert "CC-BY-NC-4.0" in run.folder.log.read_text()
    assert json.loads(json.dumps(encoder.details))["teacher"].endswith("safetensors")


def test_a_student_that_started_from_an_encoder_states_the_licenses_of_both(distilled, tmp_path):
    """Whichever forbids a use: of the teacher's here, and then of the start's."""
    taught, data, config = distilled
    first = {"source": "https://example.org/s", "license": "apache-2.0", "sha256": "cd" * 32}
    start = write_network(tmp_path / "start.safetensors", origin=first)
    settings = replace(config, encoder=str(start), epochs=1, report=True)
    student = train(str(data), settings, output=tmp_path / "run")
    both = load(student.path).details["origin"]
    source = "distilled from https://example.org/t into https://example.org/s"
    assert both == {**first, "source": source, "license": "apache-2.0 and CC-BY-NC-4.0"}
    warned = "license apache-2.0 and CC-BY-NC-4.0: these weights are not for every use"
    assert any(f"warning: {warned}" in line for line in load(student.path).lines())
    page = html.unescape(student.folder.report.read_text())
    assert f"L{warned[1:]}" in page  # at the beginning of a sentence
    assert source in page
    of_teacher = load(taught.folder.teacher).details["origin"]
    same = distilled_origin(of_teacher, {**first, "license": "CC-BY-NC-4.0"})
    assert same["license"] == "CC-BY-NC-4.0"


def test_a_run_goes_on_and_is_measured_where_its_teacher_is_gone(distilled, tmp_path):
    finished, data, config = distilled
    out, moved = tmp_path / "run", tmp_path / "aside"
    shutil.copytree(finished.path, out)
    names = ("encoder.safetensors", "metrics.csv", "embeddings.parquet", "teacher.safetensors")
    before = bytes_of(out, *names)
    for name in ("summary.json", "encoder.safetensors", "report.html"):
        (out / name).unlink()
    gone = replace(config, teacher=str(tmp_path / "gone"))
    with pytest.raises(UsageError, match="teacher"):
        train(str(data), gone, output=out, resume=True)
    shutil.move(config.teacher, moved)
    try:
        train(str(data), replace(config, report=False), output=out, resume=True)
        assert run("evaluate", out, "--protocol", "knn") == 0
    finally:
        shutil.move(moved, config.teacher)
    assert "resuming after step" in RunFolder(out).log.read_text()
    assert bytes_of(out, *names) == before


def test_two_processes_train_the_same_student(distilled, tmp_path, monkeypatch):
    """Each makes some of the features and reads all; sums differ in their last digits."""
    fork_workers(monkeypatch)
    _, data, config = distilled
    config = replace(config, precision="fp32", optimizer="sgd", report=False)
    alone, both = (
        train(str(data), replace(config, devices=devices), output=tmp_path / str(devices)).folder
        for devices in (1, 2)
    )
    for path in alone.teacher_features.iterdir():
        assert (both.teacher_features / path.name).read_bytes() == path.read_bytes()
    losses, expected = (
        np.genfromtxt(folder.metrics, delimiter=",", names=True)["loss"]
        for folder in (both, alone)
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-3)


# What is refused

REFUSED = [
    (["--method", "seed"], "learns from a teacher; name an encoder with --teacher"),
    (["--method", "simclr", "--teacher", "x"], "simclr has no teacher; leave --teacher out"),
    (["--teacher-views", "2"], "simclr has no teacher; leave --teacher-views out"),
    (["--method", "seed", "--teacher", "dinov2-smal"], "dinov2-small"),
]


def test_what_does_not_fit_is_one_line(tmp_path, refusal):
    data, out = tmp_path / "data.npz", tmp_path / "run"
    np.savez(data, x=pixels(24))
    for typed, message in REFUSED:
        assert message in refusal(2, "train", data, "-o", out, "--backbone", "tiny", *typed)
    discovery = ["discover", "digits", "--known", "0,1", "--method", "seed", "-o", out]
    assert "then give its run with --encoder" in refusal(2, *discovery)


def test_a_teacher_that_is_larger_than_memory_is_refused_before_it_is_read(tmp_path):
    """A file of four terabytes that takes no room on the disk."""
    file = tmp_path / "huge.pth"
    with file.open("wb") as sparse:
        sparse.truncate(2**42)
    named = f"timm:vit_tiny_patch16_224@{file}"
    assert weight_bytes(named) == 2**42
    (tmp_path / "me@work").mkdir()
    file.rename(file := tmp_path / "me@work/huge.pth")
    named = f"timm:vit_tiny_patch16_224@{file}"
    assert weight_bytes(named) == weight_bytes(str(file)) == 2**42
    config = TrainConfig(method="seed", teacher=named)
    with pytest.raises(ResourceError, match=r"4,398,047 MB of weights.*give a smaller one"):
        open_teacher(RunFolder(tmp_path / "run"), config, IMAGES)


def test_the_size_of_an_architecture_is_known_without_its_weights():
    network = build_backbone("timm/vit_small_patch14_dinov2", 224)
    small = sum(p.nbytes for p in network.parameters())
    assert weight_bytes("dinov2-small") == pytest.approx(small, rel=0.1)
    assert weight_bytes("dinov2-large") > 10 * small
    assert weight_bytes("no such encoder") == 0


def test_a_folder_is_free_again_after_a_damaged_teacher(tmp_path, teacher, monkeypatch, refusal):
    """The run needs the right one, of a relative path, but once."""
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", x=pixels(24))
    Path("damaged.safetensors").write_bytes(b"\xff" * 1000)
    settings = (
        "--method seed --backbone tiny --epochs 1 --batch-size 8 --queue-size 8 -q --teacher"
    )
    typed = ["train", "data.npz", "-o", "run", *settings.split()]
    assert "damaged.safetensors" in refusal(5, *typed, "damaged.safetensors")
    assert not RunFolder(Path("run")).is_occupied
    assert run(*typed, "teacher.safetensors") == 0
    Path(teacher).unlink()
    assert run(*typed, "teacher.safetensors", "--resume") == 0


def test_the_run_that_teaches_cannot_be_overwritten(distilled):
    run, data, config = distilled
    taught = replace(config, teacher=str(run.path))
    with pytest.raises(UsageError, match="overwrite=True would remove"):
        train(str(data), taught, output=run.path, overwrite=True)
