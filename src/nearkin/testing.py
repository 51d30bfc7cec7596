"""Check that a method keeps the invariants, in a test of one's own: `check_method(MyMethod)`.

Real training steps with a tiny network and 16 images a step; nothing is mocked. It takes a second.
"""

import copy
import gc
import inspect
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from nearkin.data.views import View
from nearkin.distributed import process_group
from nearkin.errors import UsageError
from nearkin.method import Method
from nearkin.methods import checked_class, parameters
from nearkin.networks.batch_norm import normalize_in_groups
from nearkin.networks.branch import Backbone
from nearkin.objectives import unit
from nearkin.schema import MemorySize, as_typed, check_value, from_text, metadata, types_of
from nearkin.training.loop import steps
from nearkin.training.optimizer import build_optimizer, warmup_cosine
from nearkin.types import UNLABELED, Batch, Step

NUM_IMAGES: Final = 64
BATCH: Final = 16
SIDE: Final = 8
NUM_CLASSES: Final = 3
TEACHER_DIM: Final = 10
TOTAL: Final = 6
"""Steps of a training; a memory of 32 keys wraps within three."""
CLOSE: Final = 1e-9
"""Relative difference that double precision allows between one process and two."""

READ: Final = "invariant 1 (forward reads, commit writes)"
RANKS: Final = "invariant 2 (gather, then forget about ranks)"
MEMORY: Final = "invariant 3 (all memory is parameters and buffers)"
CLOCK: Final = "invariant 4 (the step is the only clock)"
SCHEMA: Final = "invariant 5 (the constructor is the only schema)"
LABELS: Final = "invariant 8 (evaluation never peeks)"
STEP: Final = "the contract of a step (a scalar loss, a memo without a graph)"
FORMATS: Final = "the contract of number formats (float64, bfloat16, channels_last)"


Problems = Iterator[tuple[str, str]]
"""The invariants that a method breaks, and how. The first ends a check."""


class InvariantError(AssertionError):
    """A method breaks an invariant; the message names the invariant and what differs."""


def check_method(cls: type[Method[Any]], *, processes: bool = False, **options: Any) -> None:
    """Check that a method keeps every invariant.

    Args:
        cls: The method's class. `num_images`, `num_known_classes` and `teacher_dim` are filled in,
            and memories that `auto` would fit to the data are made small.
        processes: Also train with two processes, which takes some seconds. They import the class,
            so it has to stand in a module.
        options: Options of the constructor, best so small that a step takes milliseconds.

    Raises:
        InvariantError: Naming the invariant that is broken, and what differs.
        TypeError: If `cls` is no subclass of `nearkin.method.Method`.

    >>> from nearkin.methods.simclr import SimCLR
    >>> check_method(SimCLR, dim=8, hidden_dim=16)
    """
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise TypeError(f"{cls!r} is no subclass of nearkin.method.Method")
    with _generators_kept():
        for invariant, problem in _problems(cls, options, processes):
            raise InvariantError(f"{cls.__name__} breaks {invariant}: {problem}")


def _problems(cls: type[Method[Any]], options: Mapping[str, Any], processes: bool) -> Problems:
    yield from _constructor(cls)
    subject = _Subject(cls, options)
    for check in CHECKS:
        yield from check(subject)
    if processes:
        yield from _processes(subject)


class _Subject:
    """A method under test: builds it, shows it batches, trains it."""

    def __init__(self, cls: type[Method[Any]], options: Mapping[str, Any]) -> None:
        self.cls = cls
        facts = {"num_images": NUM_IMAGES, "num_known_classes": NUM_CLASSES}
        facts["teacher_dim"] = TEACHER_DIM
        names = inspect.signature(cls.__init__).parameters
        self.options = {name: value for name, value in facts.items() if name in names}
        for name, kind in types_of(cls.__init__).items():
            if metadata(kind, MemorySize):
                self.options[name] = min(names[name].default, NUM_IMAGES // 2)
        self.options |= options

    def build(self, seed: int = 1) -> Method[Any]:
        """Return the method around a tiny convolutional network."""
        torch.default_generator.manual_seed(seed)
        body = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        return self.cls(Backbone(body, 48), **self.options)

    def batch(self, step: int) -> Batch:
        """Return a batch that depends on the step alone."""
        generator = torch.Generator().manual_seed(step)
        index = torch.randperm(NUM_IMAGES, generator=generator)[:BATCH]
        images = torch.randn(NUM_IMAGES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
        views = []
        for kind in self.cls.views:
            share = kind.size if isinstance(kind, View) else 0.5 if kind == "small" else 1.0
            side = max(2, round(share * SIDE))
            noise = torch.randn(BATCH, 3, side, side, generator=generator)
            views.append(images[index, :, :side, :side] + 0.3 * noise)
        label = torch.full_like(index, UNLABELED)
        if self.cls.uses_labels:  # a half of the classes is known
            label = torch.where(index % 6 < NUM_CLASSES, index % 6, UNLABELED)
        teacher = tuple(map(_taught, views)) if self.cls.uses_teacher else ()
        return Batch(tuple(views), index, label, teacher)

    def forward(self, method: Method[Any], batch: Batch | None = None) -> Step[Any]:
        """Run a forward pass in the middle of a training."""
        normalize_in_groups(method, groups=1)
        torch.default_generator.manual_seed(2)
        step: Step[Any] = method.train()(self.batch(0) if batch is None else batch, 0.5)
        return step

    def train(
        self,
        method: Method[Any],
        *,
        start: int = 0,
        until: int = TOTAL,
        momenta: dict[str, Any] | None = None,
        batches: Callable[[int], Batch] | None = None,
    ) -> tuple[list[float], dict[str, Any]]:
        """Train from step `start` to step `until`; return losses and the optimizer's state."""
        optimizer = build_optimizer(method, name="sgd", lr=0.05, weight_decay=1e-4)
        if momenta is not None:
            optimizer.load_state_dict(momenta)
        data = map(batches or self.batch, range(start, until))
        plan: dict[str, Any] = {"total": TOTAL, "schedule": warmup_cosine(0.1), "seed": 3}
        done = steps(method, optimizer, data, start=start, **plan)
        return [step.loss.item() for _, step in done], copy.deepcopy(optimizer.state_dict())


# Law 5: the constructor is the only schema


def _constructor(cls: type[Method[Any]]) -> Problems:
    try:
        checked_class(cls, cls.__name__)
    except UsageError as error:
        yield SCHEMA, str(error)
    _, first, *others = inspect.signature(cls.__init__).parameters.values()
    if first.name != "backbone" or first.kind is first.KEYWORD_ONLY:
        yield SCHEMA, f"the first argument is {first.name}, not backbone"
    for each in others:
        if each.kind is not each.KEYWORD_ONLY:
            yield SCHEMA, f"{each.name} is not keyword-only"
        if f"\n    {each.name}: " not in (inspect.getdoc(cls) or ""):
            yield SCHEMA, f"the docstring of the class does not explain {each.name} under Args:"
    kinds = types_of(cls.__init__)
    for name, option in parameters(cls).items():
        yield from _option(name, option.default, kinds[name])


def _option(name: str, default: Any, kind: Any) -> Problems:
    """Options arrive as text from the command line."""
    try:
        check_value(name, default, kind)
        read = from_text(as_typed(default), kind)
    except Exception as error:
        yield SCHEMA, f"the default of {name} does not fit its type: {error}"
    if read != default or type(read) is not type(default):
        yield SCHEMA, f"{name} {default!r} comes back as {read!r} from the command line"


# The contract of a step


def _encoding(subject: _Subject) -> Problems:
    method = subject.build()
    if not isinstance(getattr(method, "online", None), nn.Module):
        yield STEP, "it has no attribute online, the branch that is trained"
    for number, rows in enumerate(method.train().encode(subject.batch(0))):
        if len(rows) != BATCH:
            shape = list(rows.shape)
            yield RANKS, f"encode returns {shape} as tensor {number}, not a row per image"


def _norms(subject: _Subject) -> Problems:
    method, batch = subject.build().train(), subject.batch(0)
    encoded, used = tuple(method.encode(batch)), []
    for name, module in method.named_modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(lambda norm, _, name=name: used.append((name, norm)))
    method.compute_loss(encoded, replace(batch, views=()), 0.5)
    for name, norm in used:
        if norm.training:  # one process has the statistics of the whole batch, several do not
            yield RANKS, f"compute_loss runs the batch norm {name}; run it in encode"


def _step(subject: _Subject) -> Problems:
    step = subject.forward(subject.build())
    if step.loss.ndim or not step.loss.isfinite():
        yield STEP, f"the loss is {step.loss.detach()}, not one finite number"
    if not step.loss.requires_grad:
        yield STEP, "the loss has no gradient"
    if missing := set(subject.cls.metrics) - set(step.metrics):
        yield STEP, f"metrics are declared but not in the step: {sorted(missing)}"
    for name, value in step.metrics.items():
        if value.ndim or value.requires_grad:
            yield STEP, f"metric {name} is not a scalar without gradient"
    if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(step.memo)):
        yield STEP, "the memo holds a graph; detach what commit is to write"


def _gradients(subject: _Subject) -> Problems:
    method = subject.build()
    subject.forward(method).loss.backward()
    for name, parameter in method.named_parameters():
        if parameter.requires_grad and name.startswith("target."):
            yield STEP, f"{name} belongs to the target, and requires a gradient"
        if parameter.requires_grad and parameter.grad is None:
            yield STEP, f"no gradient reaches {name}, which requires one"


# Law 1: forward reads, commit writes


def _reading(subject: _Subject) -> Problems:
    method = subject.build()
    with torch.no_grad():  # online and target differ from now on
        for parameter in filter(lambda p: p.requires_grad, method.parameters()):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    before = copy.deepcopy(method.state_dict())
    subject.forward(method)
    if changed := _changed(_without_statistics(method), before):
        yield READ, f"forward changed {changed}"


def _writing(subject: _Subject) -> Problems:
    method = subject.build()
    shapes = {name: tensor.shape for name, tensor in method.state_dict().items()}
    step = subject.forward(method)
    step.loss.backward()
    try:
        result = method.commit(step.memo, 0.5)
    except RuntimeError as error:
        if "in-place" not in str(error):
            raise
        yield READ, "commit needs @torch.no_grad()"
    if result is not None:
        yield READ, f"commit returns {type(result).__name__}, not None"
    state = method.state_dict(keep_vars=True)
    if graphs := [name for name, tensor in state.items() if tensor.grad_fn is not None]:
        yield READ, f"{graphs[0]} holds a graph after commit; it needs @torch.no_grad()"
    for name in shapes.keys() | state.keys():
        if name not in state or name not in shapes or shapes[name] != state[name].shape:
            yield MEMORY, f"commit changed the shape of {name}"


# Law 4: the step is the only clock


def _randomness(subject: _Subject) -> Problems:
    states = []
    for seed in (5, 6):
        method = subject.build()
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        subject.train(method, until=3)
        states.append(method.state_dict())
    if changed := _changed(*states):
        yield CLOCK, f"a draw other than torch's, which the loop seeds, decides {changed}"


# Law 3: all memory is parameters and buffers


def _state(subject: _Subject) -> Problems:
    method = subject.build()
    subject.train(method, until=3)
    saved = {tensor.data_ptr() for tensor in method.state_dict(keep_vars=True).values()}
    for prefix, module in method.named_modules():
        for name, held in vars(module).items():
            if name.startswith("_") and name in vars(nn.Module()):
                continue  # parameters, buffers and submodules
            if any(isinstance(x, Tensor) and x.data_ptr() not in saved for x in tree_leaves(held)):
                place = f"{prefix}.{name}".removeprefix(".")
                yield MEMORY, f"{place} holds a tensor that is in no state_dict"


def _resuming(subject: _Subject) -> Problems:
    whole = subject.build()
    losses, _ = subject.train(whole)
    first = subject.build()
    _, momenta = subject.train(first, until=3)
    second = subject.build(seed=7)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    resumed, _ = subject.train(second, start=3, momenta=momenta)
    for step, (loss, own) in enumerate(zip(resumed, losses[3:], strict=True), start=4):
        if loss != own:
            where = f"it has another loss in step {step}: {loss:.9g}, not {own:.9g}"
            yield MEMORY, f"resumed from its state_dict after step 3, {where}"
    if changed := _changed(second.state_dict(), whole.state_dict()):
        yield MEMORY, f"resumed from its state_dict, it ends with another {changed}"


# Law 8: evaluation never peeks


def _labels(subject: _Subject) -> Problems:
    if subject.cls.uses_labels:
        return
    states = []
    for classes in (2, 3):

        def labeled(step: int, classes: int = classes) -> Batch:
            batch = subject.batch(step)
            return replace(batch, label=batch.index % classes)

        method = subject.build()
        subject.train(method, until=3, batches=labeled)
        states.append(method.state_dict())
    if changed := _changed(*states):
        yield LABELS, f"uses_labels is False, and labels decide {changed}"


# The contract of number formats


def _double(subject: _Subject) -> Problems:
    method = subject.build().double()
    try:
        subject.train(method, until=2, batches=lambda step: _doubled(subject.batch(step)))
        step = subject.forward(method, _doubled(subject.batch(0)))
    except RuntimeError as error:
        yield FORMATS, f"in float64 it fails: {error}"
    single = [name for name, x in method.state_dict().items() if x.dtype == torch.float32]
    if step.loss.dtype != torch.float64 or single:
        yield FORMATS, f"in float64, {single[0] if single else 'the loss'} is float32"


def _bfloat16(subject: _Subject) -> Problems:
    method = subject.build()
    with torch.autocast("cpu", torch.bfloat16):
        step = subject.forward(method)
    results = {"the loss": [step.loss], "the memo": tree_leaves(step.memo)}
    for name, tensors in results.items():
        for x in tensors:
            if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float32:
                yield FORMATS, f"under bfloat16, {name} is {x.dtype}, not torch.float32"


def _channels_last(subject: _Subject) -> Problems:
    plain = subject.forward(subject.build()).loss
    method = subject.build()
    for parameter in method.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    batch = subject.batch(0)
    views = tuple(view.to(memory_format=torch.channels_last) for view in batch.views)
    try:
        loss = subject.forward(method, replace(batch, views=views)).loss
    except RuntimeError as error:
        yield FORMATS, f"with channels_last images it fails: {error}"
    if not torch.isclose(loss, plain, rtol=1e-3, atol=1e-5):
        yield FORMATS, f"the loss of channels_last images is {loss:.6g}, not {plain:.6g}"


CHECKS: Final[Sequence[Callable[[_Subject], Problems]]] = (
    _encoding, _norms, _reading, _step, _gradients, _writing, _randomness, _state, _resuming,
    _labels, _double, _bfloat16, _channels_last,
)  # fmt: skip


# Law 2: gather, then forget about ranks


def _processes(subject: _Subject) -> Problems:
    alone, expected = _trained_share(subject, 0, 1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (subject.cls, subject.options, folder)
        spawn(_train_in_group, arguments, nprocs=2)
        both = [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(2)]
    for losses, state in both:
        for number, (loss, own) in enumerate(zip(losses, alone, strict=True)):
            if not np.isclose(loss, own, rtol=CLOSE, atol=0):
                yield RANKS, f"the loss of step {number} is {loss:.12g}, not {own:.12g}"
        for name, tensor in expected.items():
            if _distance(state[name], tensor) > CLOSE:
                yield RANKS, f"two processes end with another {name}"


def _train_in_group(
    rank: int, cls: type[Method[Any]], options: Mapping[str, Any], folder: str
) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/rendezvous"
    with process_group("gloo", init_method=meeting, rank=rank, world_size=2):
        torch.save(_trained_share(_Subject(cls, options), rank, 2), Path(folder, f"{rank}.pt"))
        gc.collect()  # nothing may be left of the group when the process ends


def _trained_share(
    subject: _Subject, rank: int, world: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on one process's rows of every batch, in double precision."""

    def share(step: int) -> Batch:
        batch = _doubled(subject.batch(step))
        rows = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        return batch.map(lambda x: x[rows])

    method = subject.build().double()
    losses, _ = subject.train(method, batches=share)
    return losses, method.state_dict()


# What the checks share


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave the caller's random generators as they are."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _doubled(batch: Batch) -> Batch:
    return batch.map(lambda x: x.double() if x.is_floating_point() else x)


def _taught(view: Tensor) -> Tensor:
    """Return the features of a view by a teacher: a fixed random network."""
    pixels = view.flatten(1)
    weight = torch.randn(pixels.shape[1], TEACHER_DIM, generator=torch.Generator().manual_seed(0))
    return unit((pixels @ weight).tanh())


def _distance(a: Tensor, b: Tensor) -> float:
    """Relative, or infinite where what is counted differs."""
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def _without_statistics(method: nn.Module) -> dict[str, Tensor]:
    """Return the state without the statistics of batch norms, which forward moves."""
    state = dict(method.state_dict())
    for prefix, module in method.named_modules(remove_duplicate=False):  # branches may be shared
        if isinstance(module, _BatchNorm):
            for name, _ in module.named_buffers(prefix, recurse=False):
                state.pop(name, None)
    return state


def _changed(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Return the first tensor of `state` that is not bit-identical, or an empty text."""
    return next((name for name, x in state.items() if not torch.equal(x, expected[name])), "")
