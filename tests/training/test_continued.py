"""A training that starts from an encoder: rates by layer, frozen epochs, options, and its run folder."""

import json
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import pixels as images
from builders import write_network
from kills import AIMS, differences, finish, resumed_steps, set_up, start, unbroken
from small import SIDE, SMALL, batch_for, of_two_processes, shares, tiny_vit
from torch import nn
from torchvision.models import vit_b_16

import nearkin
from nearkin.config import TrainConfig
from nearkin.data.opening import open_images
from nearkin.data.preprocessing import Preprocessing
from nearkin.data.split import split_images
from nearkin.encoders.encoder import Encoder, load, rescaled, resized, untrained_like
from nearkin.errors import NearkinError, ResourceError, UsageError
from nearkin.method import half_cosine
from nearkin.methods import METHODS
from nearkin.networks.backbone import build_backbone
from nearkin.networks.blocks import checkpoint_blocks
from nearkin.networks.branch import as_backbone
from nearkin.networks.drop_path import set_drop_path
from nearkin.networks.lora import add_lora, merged
from nearkin.run.auto import resolve
from nearkin.run.folder import RunFolder
from nearkin.training.anchor import Anchor
from nearkin.training.fit import optimizer_for, sharded, training_steps
from nearkin.training.loop import steps
from nearkin.training.optimizer import (
    build_optimizer,
    main_rate,
    set_learning_rates,
    warmup_cosine,
)
from nearkin.training.session import build, encoders_beside
from nearkin.training.start import check_memory, with_start, write_start

SEPARATE = "moco_end_to_end", "resnet"
"""A method with two backbones that are trained."""


def started(name: str, kind: str, *, adapt: bool = True):
    """A method on a tiny network, whose statistics are no longer those of a new one."""
    torch.manual_seed(1)
    body = build_backbone("tiny", SIDE).body if kind == "resnet" else tiny_vit()
    for tensor in body.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.01 * torch.rand_like(tensor))
    backbone = as_backbone(body, SIDE)
    if adapt:
        set_drop_path(backbone.body, 0.3, "tiny")
    if adapt and kind == "vit":
        checkpoint_blocks(backbone.body, "tiny")
        add_lora(backbone, 2, SIDE)
    own = {"key_encoder": "separate"} if name == SEPARATE[0] else {}
    return METHODS[name](backbone, **SMALL[name] | own)


def train(
    method, name, *, until, start=0, total=4, frozen=0.0, batches=batch_for, divided=False,
    weight=0.0, clip_norm=0.0, **rates
):  # fmt: skip
    anchor = Anchor.at(method, weight)
    options = dict(layer_decay=0.5, separate_backbone=bool(frozen)) | rates
    optimizer = build_optimizer(method, name="adamw", lr=1e-3, weight_decay=0.05, **options)
    if divided:
        method = sharded(TrainConfig(fsdp=True), method, optimizer)
    fed = (batches(name, step) for step in range(start, until))
    how = dict(start=start, total=total, schedule=warmup_cosine(), seed=0, frozen=frozen)
    how |= dict(anchor=anchor, clip_norm=clip_norm)
    return [step.loss.item() for _, step in steps(method, optimizer, fed, **how)]


def copied(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def backbones(method):
    """States of the backbone, and of those of momentum encoders."""
    return {
        name: copied(module.state_dict())
        for name, module in method.named_modules()
        if type(module).__name__ == "Backbone"
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [("simclr", "resnet"), ("ncl", "resnet"), ("moco", "vit"), ("swav", "vit"), SEPARATE],
)
def test_a_frozen_backbone_stays_bit_for_bit_and_learns_afterwards(name, kind):
    method = started(name, kind)
    before, head = backbones(method), copied(method.state_dict())
    train(method, name, until=2, frozen=0.5)
    after = backbones(method)
    assert before.keys() == after.keys()
    for place, state in before.items():
        for entry, tensor in state.items():
            assert torch.equal(tensor, after[place][entry]), f"{place}.{entry}"
    assert any(not torch.equal(x, head[key]) for key, x in method.state_dict().items())
    train(method, name, until=4, start=2, frozen=0.5)
    online = method.backbone.state_dict()
    assert any(not torch.equal(x, online[key]) for key, x in before["online.backbone"].items())


def test_a_frozen_backbone_gives_the_features_of_evaluation_and_keeps_nothing_for_gradients():
    method = started("simclr", "resnet", adapt=False)
    images = torch.randn(8, 3, SIDE, SIDE)
    with torch.no_grad():
        expected = method.backbone.eval()(images)
    seen = []
    method.backbone.register_forward_hook(lambda *given: seen.append(given[2]))

    def batches(name, step):
        batch = batch_for(name, step)
        return type(batch)((images, images), batch.index[:8], batch.label[:8])

    train(method, "simclr", until=1, frozen=0.5, batches=batches)
    assert torch.allclose(seen[0][:8], expected, atol=1e-6)
    assert not seen[0].requires_grad


def statistics(network):
    """Running means and variances, and the number of batches that they are of."""
    kinds = ("running_mean", "running_var", "num_batches_tracked")
    return {key: x.clone() for key, x in network.state_dict().items() if key.endswith(kinds)}


@pytest.mark.parametrize("name", ["simclr", "moco", "byol"])
def test_a_backbone_that_started_from_an_encoder_keeps_its_batch_statistics(
    encoders, name, monkeypatch
):
    """So do momentum encoders; heads, which are new, have those of each batch."""
    monkeypatch.chdir(encoders)
    data, cpu = open_images(images(32)), torch.device("cpu")
    settings = dict(method=name, encoder=TINY, backbone="tiny", image_size=16, batch_size=16)
    config = resolve(TrainConfig(**settings, epochs=2, freeze_epochs=0), data, cpu)
    method, batches = build(config, data, cpu)
    views = next(batches.load(0, 1)).views[0]
    with torch.no_grad():
        evaluated = method.backbone.eval()(views)
    torch.testing.assert_close(method.train().backbone(views), evaluated)
    before, weights = statistics(method), copied(method.backbone.state_dict())
    optimizer = optimizer_for(method, config)
    for _ in training_steps(config, method, optimizer, batches.load(0, 3), start=0, total=4):
        pass
    after = statistics(method)
    assert before.keys() == after.keys()
    for key, value in after.items():
        assert torch.equal(value, before[key]) == ("backbone" in key), key
    moved = method.backbone.state_dict()
    assert any(not torch.equal(moved[key], value) for key, value in weights.items())


def depth_of_resnet(name: str) -> int:
    """Restated: stem 0, the two blocks of each of four stages 1 to 8."""
    if not name.startswith("layer"):
        return 0
    stage, block = int(name[5]), int(name.split(".")[1])
    return 1 + 2 * (stage - 1) + block


def depth_of_vit(name: str, blocks: int, first: str) -> int:
    """Restated: embeddings 0, blocks 1 to n, what follows them n + 1. timm puts it into block n."""
    if first in name:
        return 1 + int(name.split(first)[1].split(".")[0].removeprefix("encoder_layer_"))
    return blocks + 1 if name.startswith(("norm", "encoder.ln")) else 0


DEPTHS = {
    "timm/resnet18": (depth_of_resnet, 8),
    "torchvision/resnet18": (depth_of_resnet, 8),
    "timm/vit_tiny_patch16_224": (lambda name: min(12, depth_of_vit(name, 12, "blocks.")), 12),
    "torchvision:vit_b_16": (lambda name: depth_of_vit(name, 12, "encoder.layers."), 13),
    "tiny": (lambda name: {"0": 0, "2": 0, "4": 1, "6": 2}[name[0]], 2),
}


@pytest.mark.parametrize("architecture", DEPTHS)
def test_each_layer_learns_at_a_share_of_the_rate_of_the_one_above(architecture):
    large = architecture == "torchvision:vit_b_16"
    with torch.device("meta" if large else "cpu"):
        body = vit_b_16() if large else build_backbone(architecture, 32).body
        if large:
            body.heads = nn.Identity()
        method = METHODS["byol"](as_backbone(body, None, 8), dim=4, hidden_dim=4)
    optimizer = build_optimizer(method, name="adamw", lr=1e-2, weight_decay=0.05, layer_decay=0.5)
    set_learning_rates(optimizer, method, half_cosine(1.0, 1.0), 0.3)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    depth, top = DEPTHS[architecture]
    depths = {name: depth(name) for name, _ in body.named_parameters()}
    for name, parameter in body.named_parameters():
        assert rates[id(parameter)] == pytest.approx(1e-2 * 0.5 ** (top - depths[name])), name
    heads = [*method.predictor.parameters(), *method.online.projector.parameters()]
    assert {rates[id(p)] for p in heads} == {1e-2}
    assert main_rate(optimizer) == 1e-2  # which metrics.csv has
    targets = {id(p) for p in method.target.parameters()}
    assert not targets & rates.keys()


def test_frozen_rates_are_zero_and_then_begin_a_schedule_of_their_own():
    method = started("simclr", "resnet", adapt=False)
    optimizer = build_optimizer(
        method, name="sgd", lr=1.0, weight_decay=0.0, layer_decay=1.0, separate_backbone=True
    )
    schedule = warmup_cosine(warmup=0.25)
    for progress in (0.0, 0.1, 0.2, 0.4, 0.9):
        set_learning_rates(optimizer, method, schedule, progress, frozen=0.2)
        head, trunk = (group["lr"] for group in optimizer.param_groups)
        assert head == schedule(progress)
        expected = 0.0 if progress < 0.2 else schedule((progress - 0.2) / 0.8)
        assert trunk == pytest.approx(expected)


TINY, VIT = "tiny.safetensors", "vit2.safetensors"
SHARED = {"swav": "vit", "moco_v3": "resnet", "simgcd": "resnet", SEPARATE[0]: SEPARATE[1]}
DIVIDED = "swav"
FROZEN = dict(frozen=0.25, until=3, weight=3.0)
CLIPPED = "simgcd"


def train_share(rank: int) -> tuple[dict, list[float], list[float]]:
    """By method, what a share of the batch comes to; and losses of a network that is divided.

    Last the losses of a method whose gradients are clipped.
    """
    outcomes = {}
    for name, kind in SHARED.items():
        method = started(name, kind).double()
        losses = train(method, name, batches=shares(rank, 2), **FROZEN)
        outcomes[name] = losses, method.state_dict()
    method = started(DIVIDED, SHARED[DIVIDED]).double()
    divided = train(method, DIVIDED, batches=shares(rank, 2), divided=True, **FROZEN)
    return outcomes, divided, train_clipped(shares(rank, 2))


def train_clipped(batches):
    method = started(CLIPPED, SHARED[CLIPPED]).double()
    return train(method, CLIPPED, batches=batches, clip_norm=0.05, **FROZEN)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return of_two_processes(train_share, tmp_path_factory.mktemp("shares"))


def train_alone(name):
    method = started(name, SHARED[name]).double()
    return train(method, name, batches=shares(), **FROZEN), method.state_dict()


@pytest.mark.parametrize("name", SHARED)
def test_two_processes_drop_paths_and_are_frozen_and_anchored_as_one_is(name, both):
    losses, expected = train_alone(name)
    for outcomes, *_ in both:
        losses_there, state = outcomes[name]
        assert losses_there == pytest.approx(losses, abs=1e-9)
        for key, value in expected.items():
            assert torch.allclose(state[key].double(), value.double(), atol=1e-7), key


def test_two_processes_clip_gradients_by_the_norm_that_one_has(both):
    """Two have gradients of a frozen backbone, which nothing is to follow from."""
    losses = train_clipped(shares())
    for *_, clipped in both:
        assert clipped == pytest.approx(losses, abs=1e-9)


def test_a_divided_network_takes_the_same_options(both):
    """With --fsdp: drop path, LoRA, checkpointing, frozen steps, an anchor and rates by layer."""
    losses, _ = train_alone(DIVIDED)
    assert len(set(losses)) == len(losses)
    for _, divided, _ in both:
        assert divided == pytest.approx(losses, rel=1e-9)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Encoders of a residual network at 16 px and of a vision transformer at 224 px."""
    folder = tmp_path_factory.mktemp("encoders")
    origin = {"source": "a test", "license": "cc-by-nc-4.0", "sha256": "ab" * 32}
    write_network(folder / TINY, origin=origin, fine_tuned="all")
    write_network(folder / VIT, "timm:test_vit2", size=32, origin=origin)
    return folder


def test_the_run_keeps_its_start_and_says_where_the_weights_come_from(encoders, tmp_path, log):
    source = encoders / TINY
    run = nearkin.train(
        images(16),
        output=tmp_path / "run",
        encoder=source,
        batch_size=8,
        epochs=3,
        verbose=log,
        report=True,
    )
    kept, trained = load(RunFolder(run.path).start), load(run.path)
    expected = load(source)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, kept.state_dict()[name])
    assert trained.details["origin"] == expected.details["origin"]
    assert trained.details["start"] == source.name
    assert trained.details["fine_tuned"] == "all"  # of labels, which discoveries warn of
    assert trained.preprocessing == expected.preprocessing
    assert any("cc-by-nc" in line for line in log.texts)
    page = run.folder.report.read_text()
    assert "License cc-by-nc-4.0: these weights are not for every use" in page
    assert all(text in page for text in (str(source), "a test", "ab" * 32))
    settings = RunFolder(run.path).settings()[0]
    assert (settings.layer_decay, settings.freeze_epochs) == (0.75, 1)
    config = TrainConfig(batch_size=8, epochs=2, optimizer="adamw")
    scratch = resolve(config, open_images(images(16)), torch.device("cpu"))
    assert settings.lr == pytest.approx(scratch.lr / 4)
    assert (scratch.layer_decay, scratch.freeze_epochs) == (1.0, 0)


def test_the_untrained_baseline_takes_images_as_the_trained_encoder_does(tmp_path):
    """With the start's weights it gives the start's features: crops, mean and deviation."""
    backbone = build_backbone("timm:test_vit2", 32)
    view = Preprocessing(32, "center", 40, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    start = Encoder(rescaled(backbone, view), view, {"backbone": backbone.name, "image_size": 32})
    folder = RunFolder(tmp_path)
    config = TrainConfig(backbone=backbone.name, image_size=48, encoder="weights", workers=0)
    write_start(folder, start)
    trained = resized(start, 48)
    images = open_images(np.zeros((4, 48, 48, 3), np.uint8))
    split = split_images(images, share=0, seed=0)
    kept = encoders_beside(trained, folder, config, split, torch.device("cpu"), 0, None)
    other = kept["untrained"]
    assert kept["start"].digest == start.digest
    assert other.preprocessing == trained.preprocessing == view.resized(48)
    digests = [untrained_like(trained, seed).digest for seed in (0, 0, 1)]
    assert digests[0] == digests[1]
    assert len({*digests, trained.digest}) == 3
    other.backbone.body.load_state_dict(trained.backbone.body.state_dict())
    pixels = torch.randn(2, 3, 48, 48)
    assert torch.equal(other(pixels), trained(pixels))


def test_a_run_that_is_killed_goes_on_to_the_same_bytes_without_the_source(encoders, tmp_path):
    data, source = tmp_path / "data.npz", tmp_path / "source.safetensors"
    np.savez(data, x=images(24, 32))
    shutil.copy(encoders / "vit2.safetensors", source)
    settings = "--batch-size 8 --epochs 3 --evaluate-every 0 --save-every 2 --device cpu -q "
    settings += "--lora 2 --drop-path 0.2 --grad-checkpointing --layer-decay 0.6 --freeze-epochs 1"
    killed, whole = RunFolder(tmp_path / "killed"), RunFolder(tmp_path / "whole")
    command = ["train", str(data), "--encoder", str(source), *settings.split(), "-o"]
    first = [*command, str(killed.path)]
    shot = start(first, lambda: set_up(AIMS["before pruning"], "simclr", 2))
    assert finish(shot) == -signal.SIGKILL
    assert not killed.encoder.exists()
    unbroken([*command, str(whole.path)], whole.path)
    source.unlink()  # a run that goes on needs it no more
    unbroken([*first, "--resume"], killed.path)
    (step,) = resumed_steps(killed.path)
    assert step > 0
    assert differences(whole.path, killed.path) == []
    assert not any("lora" in name for name in load(whole.path).backbone.body.state_dict())


def test_multi_crop_views_are_whole_patches(encoders, tmp_path):
    how = dict(method="swav", augment="swav", num_prototypes=8, queue_size=8, batch_size=8)
    how |= dict(epochs=1, freeze_epochs=0, evaluate_every=0, output=tmp_path / "run")
    run = nearkin.train(images(16, 32), encoder=encoders / VIT, **how)
    assert json.loads(run.folder.summary.read_text())["epochs"] == 1


REFUSED = [
    (dict(lora=4), r"lora needs an encoder to start from; give encoder"),
    (dict(freeze_epochs=2), r"freeze_epochs needs an encoder"),
    (dict(anchor=0.5), r"anchor needs an encoder to start from; give encoder"),
    (dict(grad_checkpointing=True, compile="on"), r"exclude each other"),
    (dict(backbone="torchvision/resnet18", drop_path=0.1), r"no drop path; leave"),
    (dict(encoder=TINY, freeze_epochs=2, epochs=2), r"2 of 2 epochs leaves none"),
    (dict(encoder=TINY, lora=4), r"tiny has no linear layers for lora"),
    (dict(encoder=TINY, backbone="small"), r"small is not the architecture of .* tiny;"),
    (dict(encoder="dinov2-smal"), r"Did you mean dinov2-small\?"),
]


def test_what_cannot_be_is_refused_in_one_line(encoders, tmp_path, monkeypatch):
    monkeypatch.chdir(encoders)
    for number, (options, message) in enumerate(REFUSED):
        with pytest.raises(UsageError, match=message) as refused:
            nearkin.train(images(16), output=tmp_path / str(number), batch_size=8, **options)
        assert "\n" not in str(refused.value)
    monkeypatch.setattr("nearkin.commands.train.open_logged", None)  # sizes come before images
    with pytest.raises(UsageError, match=r"patches of 16 px .* image_size 32 or 48$"):
        nearkin.train(images(16), output=tmp_path / "size", encoder=VIT, image_size=40)


def test_a_start_larger_than_the_memory_is_refused_before_it_is_read(encoders):
    start = encoders / "tiny.safetensors"
    config, cpu = TrainConfig(encoder=str(start)), torch.device("cpu")
    size = start.stat().st_size
    check_memory(config, cpu, free=5 * size)
    check_memory(replace(config, anchor=0.0), cpu, free=4 * size)
    with pytest.raises(ResourceError, match="MB of memory are free; take a smaller encoder"):
        check_memory(config, cpu, free=5 * size - 1)
    check_memory(TrainConfig(encoder=str(start), lora=4), cpu, free=3 * size)


def test_overwriting_spares_the_run_that_is_started_from(encoders, tmp_path):
    data = images(16)
    how = dict(encoder=encoders / TINY, batch_size=8, epochs=2)
    run = nearkin.train(data, output=tmp_path / "run", **how)
    inside = RunFolder(run.path).encoder
    for source in (run.path, inside, f"timm:test_vit2@{inside}"):
        with pytest.raises(NearkinError, match="would remove"):
            nearkin.train(data, output=run.path, encoder=source, overwrite=True)


def test_small_images_have_the_size_of_the_start(encoders, tmp_path):
    """At another size it is another start, and an average chosen there is often a worse one."""
    vit = load(encoders / "vit2.safetensors")
    run = nearkin.train(
        images(16, 12), output=tmp_path, encoder=encoders / "vit2.safetensors", epochs=1,
        batch_size=8,
    )  # fmt: skip
    assert RunFolder(run.path).any_settings()[0].image_size == vit.image_size == 32
    typed = with_start(TrainConfig(image_size=16), vit)
    assert (typed.image_size, typed.backbone) == (16, vit.details["backbone"])
    assert merged(vit.backbone) is vit.backbone


def test_the_start_of_an_attempt_that_failed_is_not_that_of_the_next_one(tmp_path):
    """Settings that do not fit are found after the start is there, and then corrected."""
    first, second = (write_network(tmp_path / f"{seed}.safetensors", seed=seed) for seed in (1, 2))
    settings = {"backbone": "tiny", "epochs": 1, "batch_size": 16, "optimizer": "sgd"}

    def fail_and_resume(name, **start):
        again = {**settings, "output": tmp_path / name, "report": False}
        with pytest.raises(UsageError, match="chunks of 7"):
            nearkin.train(images(32), encoder=str(first), chunk_size=7, **again)
        return nearkin.train(images(32), **again, **start, resume=True)

    run = fail_and_resume("continued", encoder=str(second))
    assert load(run.folder.start).digest == load(second).digest
    run = fail_and_resume("anew")
    assert set(run.summary["metrics"]) == {"encoder", "untrained", "pixels"}
