"""What must also hold on a GPU. `python -m benchmarks gpu` runs it there; elsewhere it is skipped."""

import numpy as np
import pytest
import torch
from builders import pixels, write_network
from nearkin_command import run as nearkin
from small import PARTED, as_double, assert_same_state, batch_for, run, save, small
from torch.nn.functional import conv2d

from nearkin.commands.embed import embed
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.opening import open_images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.distributed import choose_device, to_device
from nearkin.encoders.encoder import load
from nearkin.method import half_cosine
from nearkin.methods import METHODS
from nearkin.metrics.neighbors import nearest
from nearkin.networks.batch_norm import GroupedBatchNorm
from nearkin.run.folder import RunFolder
from nearkin.training.loop import steps
from nearkin.training.optimizer import build_optimizer

pytestmark = pytest.mark.needs("cuda")
every_method = pytest.mark.parametrize("name", METHODS)
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def train(name, device, **options):
    method = small(name).double().to(device)

    batches = lambda name, step: as_double(batch_for(name, step)).to(device)
    losses, optimizer = run(method, name, batches=batches, **options)
    return method, losses, optimizer


def draws(name) -> bool:
    """Whether the method draws, which a GPU does from other generators; NCL from a filled queue."""
    losses = []
    for seed in (0, 1):
        method = small(name).double().train()
        for step in range(2):
            torch.manual_seed(seed)
            taken = method(as_double(batch_for(name, step)), progress=0.5)
            method.commit(taken.memo, 0.5)
        losses.append(taken.loss.item())
    return losses[0] != pytest.approx(losses[1], rel=1e-9)


@every_method
def test_a_gpu_trains_what_a_processor_trains(name):
    ours, losses, _ = train(name, GPU)
    theirs, expected, _ = train(name, CPU)
    assert np.isfinite(losses).all()
    if not draws(name):
        assert losses == pytest.approx(expected, rel=1e-7)
        state = {key: value.cpu() for key, value in ours.state_dict().items()}
        assert_same_state(state, theirs.state_dict(), rtol=1e-6, atol=1e-8)


@every_method
def test_resuming_on_a_gpu_goes_on_from_the_same_step(name, tmp_path):
    whole, losses, _ = train(name, GPU)
    first, early, optimizer = train(name, GPU, until=3)
    save(tmp_path, 3, first, optimizer)
    second, late, _ = train(name, GPU, folder=tmp_path)
    assert early + late == pytest.approx(losses, rel=1e-9)
    assert_same_state(second.state_dict(), whole.state_dict(), rtol=1e-7, atol=1e-9)
    train(name, CPU, folder=tmp_path)  # what a GPU has saved, a processor goes on with


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", [name for name in METHODS if name not in PARTED])
def test_a_step_waits_for_nothing(name):
    batches = [batch_for(name, step).to(GPU) for step in range(6)]
    method = small(name).to(GPU)
    optimizer = build_optimizer(method, name="sgd", lr=0.05, weight_decay=0.0)
    taken = steps(
        method, optimizer, batches, start=0, total=6, schedule=half_cosine(1.0, 1.0), seed=0
    )
    next(taken)  # what is set up once may wait
    try:
        torch.cuda.set_sync_debug_mode("error")
        assert sum(1 for _ in taken) == 5
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("preset", ["simclr", "simclr_cifar", "byol", "moco_v2", "characters"])
def test_views_are_those_of_the_processor(preset):
    images = open_images(pixels(64, 32))
    first_batches = []
    for device in (GPU, CPU):
        order = RandomBatchSampler(len(images), 32, seed=0)
        kinds = views_of(preset)
        batches = Batches.of(images, kinds, image_size=32, sampler=order, device=device)
        first_batches.append(next(iter(batches.load(0, 1))))
    for ours, theirs in zip(first_batches[0].views, first_batches[1].views, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("numbers", [1_000, 10_000_000])
def test_a_copy_to_the_gpu_does_not_wait_for_earlier_work(numbers):
    """CUDA stages small copies from ordinary memory; of larger ones it would wait for all work."""
    to_device(torch.ones(numbers), GPU)  # pins memory, which may wait, for the next one as well
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    slept = torch.cuda.Event()
    slept.record()
    copied = to_device(torch.ones(numbers), GPU)
    assert not slept.query()
    assert copied.sum() == numbers


def test_float32_is_float32_in_convolutions_too():
    """TF32, which cuDNN takes by itself, errs by 3e-4."""
    rng = torch.Generator().manual_seed(0)
    images, weight = torch.randn(8, 64, 16, 16, generator=rng), torch.randn(64, 64, 3, 3)
    ours = conv2d(images.to(choose_device("cuda")), weight.to(GPU)).cpu().double()
    theirs = conv2d(images.double(), weight.double())
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_the_device_that_is_chosen_is_the_current_one():
    last = torch.cuda.device_count() - 1
    choose_device(f"cuda:{last}")
    assert torch.cuda.current_device() == last


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_batch_statistics_are_those_of_the_processor(dtype):
    rng = torch.Generator().manual_seed(0)
    images = 3 + 2 * torch.randn(32, 16, 8, 8, generator=rng)
    results = []
    for device in (GPU, CPU):
        norm = GroupedBatchNorm(torch.nn.BatchNorm2d(16), 8).to(device)
        result = norm(images.to(device, dtype).to(memory_format=torch.channels_last))
        assert result.is_contiguous(memory_format=torch.channels_last)
        results.append((result.cpu(), norm.running_mean.cpu(), norm.running_var.cpu()))
    for ours, theirs in zip(*results, strict=True):
        near = 1e-5 if ours.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near)


def test_neighbors_are_those_of_the_processor():
    rng = torch.Generator().manual_seed(0)
    bank, queries = (torch.randn(n, 64, generator=rng) for n in (5000, 300))
    similarity, index = nearest(bank, queries, k=20)
    ours, rows = nearest(bank.to(GPU), queries.to(GPU), k=20)
    torch.testing.assert_close(ours.cpu(), similarity, rtol=1e-5, atol=1e-5)
    assert (rows.cpu() == index).float().mean() > 0.999  # rounding may swap two


@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16"])
def test_a_run_on_a_gpu_is_stopped_and_goes_on(precision, tmp_path):
    data, out = tmp_path / "images.npz", RunFolder(tmp_path / "run")
    np.savez(data, x=pixels(128), y=np.arange(128) % 4)
    settings = "--epochs 3 --batch-size 32 --backbone tiny --device cuda --save-every 1 -q"
    command = ["train", data, *settings.split(), "--precision", precision, "-o", out.path]
    assert nearkin(*command) == 0
    oldest, *newer = sorted(out.checkpoints.iterdir())
    for path in newer:
        path.unlink()
    assert nearkin(*command, "--resume") == 0
    assert f"resuming after step {int(oldest.stem[5:])}" in out.log.read_text()
    assert "cuda" in out.machine.read_text()


def test_a_command_leaves_what_the_caller_has_set(tmp_path):
    file, images = write_network(tmp_path / "encoder.safetensors"), pixels(4)
    expected = embed(file, images, workers=0, device=GPU, verbose=False)
    torch.backends.cudnn.allow_tf32 = True
    with torch.autocast("cuda", torch.bfloat16), torch.device("cuda"):
        found = embed(load(file).cuda(), images, workers=0, device=GPU, verbose=False)
    assert torch.backends.cudnn.allow_tf32
    np.testing.assert_array_equal(found.vectors, expected.vectors)
