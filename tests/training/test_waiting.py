"""What keeps a GPU busy: few operations, of which none asks it for a number in the middle.

There is no GPU here, so operations are watched that would ask one, and tensors that would reach it;
others are on the device "meta". `tests/training/test_cuda.py` lets CUDA watch by itself.
"""

from dataclasses import fields

import pytest
import torch
from builders import pixels
from small import PARTED, Observed, batch_for, run, small
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from nearkin.data.augmentations import AUGMENTATIONS, views_of
from nearkin.data.batches import Batches
from nearkin.data.opening import open_images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.data.views import View
from nearkin.methods import METHODS
from nearkin.methods.simclr import SimCLR
from nearkin.metrics.neighbors import nearest
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import Branch
from nearkin.training.loop import gradients, total_norm
from nearkin.training.optimizer import build_optimizer
from nearkin.types import Batch

ASKS_PROCESSORS = ("nnclr",)
"""Whose search for neighbors looks for equals, on a processor only."""

ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
"""Operations whose result, or its shape, is needed before anything can go on."""


def asked_by(method, batch) -> list[str]:
    """Which operations of forward, backward and commit would wait for a GPU."""
    asked = []

    def note(operation, args, *_):
        name = operation.overloadpacket.__name__
        chosen = args[1] if name in ("index", "index_put_", "_index_put_impl_") else ()
        by_mask = any(x is not None and x.dtype == torch.bool for x in chosen)
        if name in ASKING or by_mask:
            asked.append(name)

    method.train()
    with Observed(note):
        step = method(batch, 0.7)
        step.loss.backward()
        method.commit(step.memo, 0.7)
    return asked


@pytest.mark.parametrize("name", [n for n in METHODS if n not in PARTED + ASKS_PROCESSORS])
def test_methods_ask_for_no_number(name):
    method = small(name)
    run(method, name, until=1)  # what is set once, such as InstDisc's normalizer
    assert asked_by(method, batch_for(name, 1)) == []


@pytest.mark.parametrize("name", PARTED)
def test_what_is_asked_for_is_noticed(name):
    assert asked_by(small(name), batch_for(name, 0))


def pretended(method):
    """The same method on a GPU that is not there: its tensors have shapes and no numbers."""
    for module in method.modules():
        module._buffers |= {n: x.to("cuda") for n, x in module._buffers.items() if x is not None}
        for name, x in module._parameters.items():
            if x is not None:
                module._parameters[name] = nn.Parameter(x.to("cuda"), x.requires_grad)
    return method


@pytest.mark.parametrize("name", [name for name in METHODS if name not in PARTED])
def test_what_a_method_does_on_a_gpu_stays_there_and_needs_no_number(name):
    """Tensors of two devices, or a number that is asked for, are an error here."""
    method, batch = small(name).train(), batch_for(name, 0)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        step = pretended(method)(batch.to("cuda"), 0.7)
        method.commit(step.memo, 0.7)
    assert step.loss.device.type == "cuda"
    assert {buffer.device.type for buffer in method.buffers()} <= {"cuda"}


@pytest.mark.parametrize("k", [1, 7])
def test_a_search_for_neighbors_asks_a_gpu_for_nothing(k):
    """Of tensors that only pretend to be there, any number that is asked for is an error."""
    with FakeTensorMode(), torch.device("cuda"):
        own = torch.arange(256)[:, None] == torch.arange(65_536)
        neighbors = nearest(torch.randn(65_536, 128), torch.randn(256, 128), k, ignored=own)
    assert [(x.shape, x.device.type) for x in neighbors] == [((256, k), "cuda")] * 2


PRESETS = ("simclr", "swav", "byol_additive", "solo_cifar", "ncl_cifar", "characters")


def test_presets_here_do_all_that_any_does():
    def done_by(presets):
        views = [view for preset in presets for view in views_of(preset)]
        names = [part.name for part in fields(View)]
        return {
            name
            for view in views
            for name in names
            if getattr(view, name) != getattr(View(), name)
        }

    assert done_by(PRESETS) == done_by(AUGMENTATIONS)


@pytest.mark.parametrize("preset", PRESETS)
def test_views_are_given_to_a_gpu_without_waiting(preset):
    gpu, images, waited = torch.device("cuda:0"), open_images(pixels(16, 32)), []

    def note(operation, args, options, result):
        """Copies between processor and GPU stop one until the other is done, if not told else."""
        if operation.overloadpacket is torch.ops.aten._to_copy:
            crosses = args[0].device.type != result.device.type
            if crosses and not options.get("non_blocking"):
                waited.append(f"{args[0].device} to {result.device}")

    with FakeTensorMode():
        order = RandomBatchSampler(len(images), 8, seed=0)
        batches = Batches.of(images, views_of(preset), image_size=32, sampler=order, device=gpu)
        with Observed(note):
            batch = next(batches.load(0, 1))
    assert {x.device for x in (*batch.views, batch.index, batch.label)} == {gpu}
    assert waited == []


def test_kernels_are_tried_out_for_the_shapes_of_training_alone():
    """Evaluation has others, of its last batches too."""
    method, tried = small("simclr"), []
    method.backbone.register_forward_hook(lambda *_: tried.append(torch.backends.cudnn.benchmark))
    run(method, "simclr", until=1)
    assert tried == [True]
    assert not torch.backends.cudnn.benchmark


MOST_NODES = 2_700  # of a graph, a third of them views of memory; MoCo once had 11,000


@pytest.mark.slow
def test_groups_of_batch_statistics_add_few_nodes_to_what_is_compiled():
    """Forward and backward of the encoder of MoCo's CIFAR-10 recipe, as the compiler gets them."""
    network = Branch(build_backbone("resnet18", 32), 0, 128, bn_groups=8)
    network.to("meta").train()
    parameters, buffers = dict(network.named_parameters()), dict(network.named_buffers())
    images = torch.empty(16, 3, 32, 32, device="meta").to(memory_format=torch.channels_last)

    def gradients(parameters, buffers, images):
        embedding = functional_call(network, {**parameters, **buffers}, (images,))
        return torch.autograd.grad(embedding.square().sum(), list(parameters.values()))

    traced = make_fx(gradients, select_decomp_table(), "fake")(parameters, buffers, images)
    assert 1_000 < len(traced.graph.nodes) <= MOST_NODES


def launched(function) -> int:
    """How many operations a GPU would be given: all but views of memory."""
    given = []

    def note(operation, *_):
        is_view = operation.is_view or operation.overloadpacket.__name__ == "_unsafe_view"
        given.append(operation.namespace == "aten" and not is_view)

    with Observed(note):
        function()
    return sum(given)


MOST_OPERATIONS = 85  # for the two views of a step, the copies from the CPU included


@pytest.mark.parametrize("preset", ["simclr_cifar", "moco_cifar", "asymmetric_cifar"])
def test_views_of_a_step_take_few_operations(preset):
    """On a GPU, those of eight steps are made together; 485 by themselves."""
    images, gpu = open_images(pixels(512, 32)), torch.device("cuda:0")
    order = RandomBatchSampler(len(images), 64, seed=0)
    with FakeTensorMode():
        batches = Batches.of(images, views_of(preset), image_size=32, sampler=order, device=gpu)
        taken = batches.load(0, 16)
        steps = [launched(lambda: next(taken)) for _ in range(16)]
    assert 20 < sum(steps) / 16 <= MOST_OPERATIONS


MOST_OF_AN_OPTIMIZER, MOST_OF_A_STEP = 150, 450


def test_a_step_of_simclr_with_muon_takes_few_operations():
    """ResNet-18, uncompiled. With a matrix at a time, Muon took 1,088, and the step 1,380."""
    method = SimCLR(build_backbone("resnet18", 32), hidden_dim=0).train()
    method.to(memory_format=torch.channels_last)
    views = tuple(torch.randn(2, 4, 3, 32, 32))

    def learn():
        method(Batch(views, torch.arange(4), torch.arange(4)), 0.5).loss.backward()
        total_norm(method, gradients(method).values())

    networks = launched(learn)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for p in pretended(method).parameters():
            p.grad = torch.empty_like(p)
        optimizer = build_optimizer(method, name="muon", lr=0.1, weight_decay=0.1)
        optimizer.step()  # makes its averages
        updates = launched(optimizer.step)
    assert 50 < updates <= MOST_OF_AN_OPTIMIZER
    assert 250 < networks + updates <= MOST_OF_A_STEP
