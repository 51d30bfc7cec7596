"""What is left to `auto` fits images, device and time."""

import itertools
import math
from dataclasses import replace

import builders
import numpy as np
import pytest
import torch

from nearkin.config import TrainConfig
from nearkin.data.opening import open_images
from nearkin.distributed import free_memory
from nearkin.errors import ResourceError, UsageError
from nearkin.methods import METHODS
from nearkin.run.auto import (
    MOST_EPOCHS,
    check_view_memory,
    length,
    resolve,
    shrunk,
    with_length,
)
from nearkin.training.length import Overhead, planned_epochs
from nearkin.training.session import build
from nearkin.training.teacher import parts_of

CPU = torch.device("cpu")


def test_fewer_images_than_processes_are_refused_and_than_a_batch_or_a_queue_shrink_them():
    images = open_images(np.zeros((20, 8, 8, 3), np.uint8))
    with pytest.raises(UsageError, match="more than the 20 images"):
        resolve(TrainConfig(devices=21), images, CPU)
    config = resolve(TrainConfig(method="moco", epochs=1), images, CPU)
    assert (config.batch_size, config.options["queue_size"]) == (20, 10)
    said = "\n".join(shrunk(config, 20))
    assert "note   --batch-size 20: there are no more images" in said
    assert "note   --queue-size 10 for 65536: at most half of the images" in said
    few = TrainConfig(method="moco", epochs=1, options={"queue_size": 9})
    with pytest.raises(UsageError, match="9 is too small for the batch; give at least 10"):
        resolve(few, images, CPU)
    swav = TrainConfig(method="swav", epochs=1, batch_size=2048)
    enough = open_images(np.zeros((4096, 8, 8, 3), np.uint8))
    chosen = resolve(swav, enough, CPU)
    assert chosen.options["queue_size"] == 1024  # the paper's, below the batch
    assert resolve(chosen, enough, CPU) == chosen  # as a run that is resumed has it
    large = TrainConfig(method="nnclr", epochs=1, options={"support_size": 1000})
    said = shrunk(resolve(large, images, CPU), 20)
    assert "warning: --support-size 1000 is more than half of the 20 images" in said
    many = open_images(np.zeros((200, 8, 8, 3), np.uint8))
    asked = TrainConfig(method="moco", epochs=1, batch_size=20, options={"queue_size": 40})
    assert shrunk(resolve(asked, many, CPU), 200)[0].startswith("note   --bn-groups")
    asked = replace(asked, options={"queue_size": 40, "bn_groups": 2})
    assert shrunk(resolve(asked, many, CPU), 200) == []  # nothing of it was reduced


def test_what_is_left_to_itself_fits_what_is_asked_for():
    images = open_images(np.zeros((64, 8, 8, 3), np.uint8))
    unresolved = TrainConfig(method="moco", batch_size=32, chunk_size=16, epochs=2)
    config = resolve(unresolved, images, CPU)
    assert config.options["bn_groups"] == 2  # one for each chunk
    assert config.compile == "off"  # on a processor
    method, _ = build(config, images, CPU)
    assert {branch.chunk_size for branch in (method.online, method.target)} == {16}


@pytest.mark.parametrize("number", [3, 511, 512])
def test_resolved_settings_are_taken_as_they_are(number):
    """A run stores them, and is resumed and repeated with them."""
    images = open_images(np.zeros((number, 8, 8, 3), np.uint8))
    for (name, cls), further in itertools.product(
        METHODS.items(), ({}, {"encoder": "start"}, {"batch_size": 2})
    ):
        config = TrainConfig(
            method=name,
            epochs=3,
            known=["a", "b"] if cls.uses_labels else [],
            teacher="teacher" if cls.uses_teacher else "",
            **further,
        )
        resolved = resolve(config, images, CPU)
        assert resolve(resolved, images, CPU) == resolved, (name, further)


def test_more_views_are_smaller_and_of_fewer_images_so_that_pixels_stay_the_same():
    images = open_images(np.zeros((512, 32, 32, 3), np.uint8))
    pixels, rates = [], []
    for count, batch in ((0, 256), (2, 256), (4, 177), (8, 110)):
        config = resolve(TrainConfig(num_views=count, epochs=1), images, CPU)
        sizes = parts_of(None, config, build(config, images, CPU)[1], None)[0].sizes
        assert sizes == [24, 24, *[16] * (count - 2)]
        assert config.batch_size == batch
        pixels.append(batch * sum(size**2 for size in sizes))
        rates.append(config.lr)
    assert max(pixels) < 1.01 * min(pixels)
    assert set(rates) == {0.004}  # as many pixels learn at one rate
    halved = resolve(TrainConfig(num_views=8, batch_size=55, epochs=1), images, CPU)
    assert halved.lr == pytest.approx(0.004 / math.sqrt(2))


def test_the_views_of_an_augmentation_are_taken_unless_a_number_is_given():
    images = open_images(np.zeros((64, 32, 32, 3), np.uint8))
    for method, count, sizes in (
        ("swav", 0, [32, 32, *[14] * 6]),
        ("swav", 2, [32, 32]),
        ("simclr", 3, [32, 32, 21]),
        ("moco", 0, [32, 32]),
        ("moco", 2, [32, 32]),
    ):
        config = TrainConfig(
            method=method, num_views=count, augment="swav", view_sizes=[32], epochs=1
        )
        config = resolve(config, images, CPU)
        assert build(config, images, CPU)[1].sizes == sizes, (method, count)


def test_views_that_a_method_cannot_take_or_no_memory_holds_are_refused():
    images = open_images(np.zeros((64, 32, 32, 3), np.uint8))
    for method, count, says in (
        ("moco", 4, "moco takes 2 views of an image, not 4; leave num_views out"),
        ("rotnet", 2, "rotnet takes 1 view of an image, not 2"),
        ("simclr", 1, "simclr takes 2 views of an image or more, not 1; leave num_views out"),
    ):
        with pytest.raises(UsageError, match=says):
            resolve(TrainConfig(method=method, num_views=count, epochs=1), images, CPU)
    config = resolve(TrainConfig(epochs=1), images, CPU)
    side = math.isqrt(free_memory() // (64 * 3 * 4 * 4))  # so that there is room for four
    config = replace(config, view_sizes=(side,), num_views=20)
    with pytest.raises(ResourceError, match=r"give at most [3-9], or a smaller batch_size"):
        check_view_memory(config, images, processes=1)


def test_groups_of_batch_statistics_are_shared_evenly_by_any_number_of_processes():
    images = open_images(np.zeros((512, 8, 8, 3), np.uint8))
    found = {}
    for devices, batch in itertools.product(range(1, 17), ("auto", 96, 240)):
        if batch == "auto" or batch % devices == 0:
            config = TrainConfig(method="moco", devices=devices, batch_size=batch, epochs=1)
            config = resolve(config, images, CPU)
            groups = found[devices, batch] = config.options["bn_groups"]
            assert config.batch_size % groups == 0
            assert groups % devices == 0 or devices % groups == 0, (devices, batch)
    expected = {(1, "auto"): 8, (3, "auto"): 3, (6, "auto"): 6, (12, "auto"): 6, (4, 96): 4}
    assert expected.items() <= found.items()
    given = TrainConfig(method="moco", devices=3, batch_size=240, options={"bn_groups": 4})
    with pytest.raises(UsageError, match="by 3 processes, but by 1, 2, 4, 8; or give a"):
        resolve(given, images, CPU)


@pytest.mark.parametrize("how", [{"devices": 2}, {"chunk_size": 64}])
def test_what_cannot_be_compiled_is_refused_before_it_begins(how):
    images = open_images(np.zeros((512, 8, 8, 3), np.uint8))
    with pytest.raises(UsageError, match="cannot be compiled; give compile off"):
        resolve(TrainConfig(epochs=1, compile="on", **how), images, CPU)


def test_an_optimizer_that_is_not_the_methods_has_rates_of_its_own():
    images = open_images(np.zeros((512, 8, 8, 3), np.uint8))
    for method, optimizer, lr, decay in (
        ("simclr", "auto", 4e-3, 0.05),
        ("simclr", "adamw", 2e-3, 0.05),
        ("simclr", "sgd", 0.03, 1e-4),
        ("byol", "lars", 0.3, 1e-6),
        ("supervised", "muon", 2e-3, 0.05),
    ):
        config = resolve(TrainConfig(method=method, optimizer=optimizer, epochs=1), images, CPU)
        assert (config.lr, config.weight_decay) == (lr, decay), (method, optimizer)
    half = resolve(TrainConfig(optimizer="lars", batch_size=128, epochs=1), images, CPU)
    assert half.lr == pytest.approx(0.15)  # Goyal et al. 2017


def test_the_length_that_auto_plans():
    """Half an hour without a GPU, but no more epochs than few images need; else a number."""
    images = open_images(np.zeros((64, 8, 8, 3), np.uint8))
    planned = resolve(TrainConfig(), images, CPU)
    assert (planned.epochs, planned.max_time) == (MOST_EPOCHS, "30m")
    assert planned_epochs(planned, epoch_seconds=100.0) == 16  # 28 of the 30 minutes
    assert planned_epochs(planned, epoch_seconds=0.1) == MOST_EPOCHS
    timed = resolve(TrainConfig(max_time="2h"), images, CPU)
    assert planned_epochs(timed, epoch_seconds=1.0) == 6720  # whoever gives a time gets all of it
    given = resolve(TrainConfig(epochs=7), images, CPU)
    assert (given.epochs, given.max_time) == (7, "")
    cut, whole = (with_length(planned, epochs, 2, CPU) for epochs in (16, MOST_EPOCHS))
    assert length(planned, cut) == [
        "note   16 epochs, planned for 30m; a longer training learns more: give --max-time "
        "2h, or --epochs"
    ]
    assert not length(planned, whole) + length(timed, cut) + length(given, given)
    assert (cut.evaluate_every, whole.evaluate_every, cut.max_time) == (1, MOST_EPOCHS // 20, "")
    on_gpu = resolve(TrainConfig(image_size=8), images, torch.device("cuda"))
    assert (on_gpu.epochs, on_gpu.max_time) == (200, "")


def test_network_and_sizes_fit_images_and_device(tmp_path):
    for size, device, expected in (
        ((80, 72), "cpu", (64, "small", (48,), "simclr")),  # photographs: what gets far in minutes
        ((80, 72), "cuda", (64, "resnet18", (64,), "simclr")),
        ((160, 240), "cuda", (160, "resnet18", (160,), "simclr")),
        ((32, 32), "cpu", (32, "small", (24,), "simsiam_cifar")),
        ((12, 12), "cpu", (12, "tiny", (12,), "simsiam_cifar")),
    ):
        images = open_images(builders.fill(tmp_path, "0.png", "1.png", "2.png", size=size))
        config = resolve(TrainConfig(epochs=1), images, torch.device(device))
        found = config.image_size, config.backbone, config.view_sizes, config.augment
        assert found == expected, (size, device)


def test_a_time_is_for_the_whole_run():
    """Steps get what start, evaluations and end leave of it; at least a fifteenth is for the end."""
    overhead = Overhead(start=10.0, evaluation=4.0, end=100.0)
    timed = TrainConfig(max_time="15m")
    assert planned_epochs(timed, 70.0, overhead) == (900 - 110) // (70 + 4) == 10
    assert planned_epochs(timed, 0.5, overhead) == (900 - 110 - 20 * 4) / 0.5
    assert planned_epochs(replace(timed, max_time="1m"), 70.0, overhead) == 1
    unmeasured = replace(timed, evaluate_every=0)
    assert planned_epochs(unmeasured, 70.0, overhead) == (900 - 110) // 70
    assert planned_epochs(unmeasured, 70.0, replace(overhead, end=1.0)) == (900 - 10 - 60) // 70
    assert planned_epochs(replace(timed, evaluate_every=2), 1.0, overhead) == (900 - 110) // 3
