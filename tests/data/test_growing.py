"""Views that grow during training."""

import numpy as np
import pytest
import torch
from builders import pixels

import nearkin
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches, Growing
from nearkin.data.opening import open_images
from nearkin.data.order import Order
from nearkin.errors import UsageError


def batches(preset="swav", side=96, size=64):
    images, views = open_images(pixels(24, side), cache=False), views_of(preset, more=True)[:3]
    where = {"image_size": size, "order": Order(24, 8, 0), "device": torch.device("cpu")}
    return Batches(images, views, **where)


def sides(feed, start, stop):
    return [tuple(view.shape[-1] for view in batch.views) for batch in feed.between(start, stop)]


def test_each_part_of_training_has_its_size_whichever_step_it_starts_at():
    made = batches()
    feed = Growing([made.resized(side) for side in (32, 48, 64)], total=7)
    whole = [(32, 32, 14)] * 2 + [(48, 48, 21)] * 2 + [(64, 64, 27)] * 3
    assert sides(feed, 0, 7) == whole
    for start in range(7):
        assert sides(feed, start, 7) == whole[start:]
    assert sides(feed, 1, 4) == whole[1:4]
    assert feed.order is made.order


def test_a_smaller_view_shows_what_the_larger_one_shows():
    """Averaged to the same size, the views of both sizes differ by what resampling loses."""
    for side, size in ((48, 48), (96, 64)):
        made = batches("simclr", side, size)
        assert (made.pixels is not None) == (side == 48)  # in memory, and as from files
        half = made.resized(size // 2)
        for large, little in zip(made.between(0, 3), half.between(0, 3), strict=True):
            assert large.index.tolist() == little.index.tolist()
            for a, b in zip(large.views, little.views, strict=True):
                assert 2 * b.shape[-1] == a.shape[-1]
                rows = zip(torch.nn.functional.avg_pool2d(a, 2).flatten(1), b.flatten(1))
                alike = [torch.corrcoef(torch.stack(row))[0, 1].item() for row in rows]
                assert np.median(alike) > 0.8


def test_sizes_of_no_whole_number_of_patches_are_refused(tmp_path):
    settings = {"backbone": "timm:test_vit2", "image_size": 32, "epochs": 1}
    with pytest.raises(UsageError, match=r"images of 20 px .*; give --view-sizes 16 or 32"):
        nearkin.train(pixels(16, 32), out=tmp_path / "run", view_sizes=[32, 20], **settings)


def test_a_run_whose_views_grow_resumes_exactly(tmp_path):
    settings = {"method": "moco", "batch_size": 16, "backbone": "tiny", "view_sizes": [8, 12, 16]}
    settings |= {"epochs": 3, "save_every": 5, "evaluate_every": 0, "val": 0.0}
    made = nearkin.train(pixels(64, 16), out=tmp_path / "run", report=False, **settings)
    assert made.summary["image_size"] == 16
    run = made.folder
    expected = run.encoder.read_bytes()
    for late in (run.checkpoints / "ckpt-00000012.pt", run.summary, run.encoder):
        late.unlink()
    nearkin.train(pixels(64, 16), out=run.path, resume=True, report=False, **settings)
    assert run.encoder.read_bytes() == expected
    log = run.log.read_text()
    assert "resuming after step 10 of 12" in log
    assert "views of 8,12,16 px" in log
