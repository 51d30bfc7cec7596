"""The authors' own losses as methods, so that they train on our features, batches and steps.

Each takes the modules of a checkout of the authors' repository, of which nothing is copied here:
zhunzhong07/NCL, DonkeyShot21/UNO and CVMI-Lab/SimGCD. The lines between those modules, which the
repositories have in their training scripts, are restated. Memories are theirs, and written in
`forward`: these methods cannot be resumed.
"""

import importlib.util
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from nearkin.discovery.classifier import heads_of
from nearkin.discovery.data import Mode
from nearkin.discovery.stages import Stage
from nearkin.method import Method
from nearkin.networks.branch import Branch
from nearkin.networks.heads import CosineHead, Heads
from nearkin.types import UNKNOWN, Batch, Encoded, Step

ARMS: Mapping[Mode, Mapping[str, str]] = {
    "ncd": {"NCL, official": "ncl", "UNO, official": "uno"},
    "gcd": {"SimGCD, official": "simgcd"},
}
"""The objective of ours that each stands beside."""


def stage(stage: Stage, checkouts: Path, value: float | None) -> Stage:
    """Put the authors' loss in the place of ours, which has not been trained yet.

    Layer, start, batches, steps and optimizer stay, as do the sizes of heads and queues. The
    authors' heads start where ours do, but for projectors, which are random. `value` is the
    entropy weight of SimGCD.
    """
    task, ours, name = stage.task, stage.method, stage.config.method
    online, heads, options = ours.online, heads_of(ours), stage.config.options
    classes, epochs = (task.num_known, task.num_novel), int(stage.config.epochs)
    sizes = {size: int(options[size]) for size in ("dim", "hidden_dim") if size in options}
    method: Official
    torch.manual_seed(stage.config.seed)
    if name == "ncl":
        assert isinstance(heads, Heads)
        size = int(options["queue_size"])
        method = OfficialNCL(checkouts / "NCL", online, heads, epochs=epochs, queue_size=size)
    elif name == "uno":
        method = OfficialUNO(checkouts / "UNO", online, *classes, **sizes)
        method.heads.known.prototypes.weight.data.copy_(heads.get_parameter("known.weight"))
    else:
        weight = 1.0 if value is None else value
        method = OfficialSimGCD(
            checkouts / "SimGCD", online, *classes, epochs=epochs, entropy_weight=weight, **sizes
        )
        method.heads.head.last_layer.weight_v.data.copy_(heads.get_parameter("weight"))
    return replace(stage, method=method)


@contextmanager
def importing(checkout: Path, **stand_ins: Any) -> Iterator[None]:
    """Import from a checkout within a `with` block; stand-ins replace what it cannot import."""
    before, path = dict(sys.modules), list(sys.path)
    sys.modules.update({name.replace("__", "."): each for name, each in stand_ins.items()})
    sys.path.insert(0, str(checkout))
    try:
        yield
    finally:
        sys.path[:] = path
        for name in sys.modules.keys() - before.keys():
            if not name.startswith(("torch", "numpy")):
                del sys.modules[name]


def module(checkout: Path, file: str, **stand_ins: Any) -> ModuleType:
    """Execute a file of a checkout."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, checkout / file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    with importing(checkout, **stand_ins):
        spec.loader.exec_module(loaded)
    return loaded


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let `.cuda()` do nothing, where there is none."""
    original = Tensor.cuda
    if not torch.cuda.is_available():
        setattr(Tensor, "cuda", lambda self, *_, **__: self)  # noqa: B010
    try:
        yield
    finally:
        setattr(Tensor, "cuda", original)  # noqa: B010


class Official(Method[None]):
    """What the authors' methods share: the layer of ours to train, and heads of their own."""

    heads: Any

    def __init__(self, online: Branch, num_known: int, num_novel: int) -> None:
        super().__init__()
        self.online = online
        self.num_known, self.num_novel = num_known, num_novel


class OfficialNCL(Official):
    """`ncl_cifar.py`: cosine pseudo-labels, the paper's options, no hard negatives."""

    def __init__(
        self, checkout: Path, online: Branch, heads: Heads, *, epochs: int, queue_size: int,
        threshold: float = 0.95,
    ) -> None:  # fmt: skip
        known, novel = heads.known.out_features, heads.novel.out_features
        super().__init__(online, known, novel)
        self.heads, self.epochs, self.threshold = heads, epochs, threshold
        accuracy = SimpleNamespace(cluster_acc=None)
        memory = module(checkout, "models/NCL.py", utils=SimpleNamespace(), utils__util=accuracy)
        dim = online.backbone.feature_dim

        def make() -> Any:
            return memory.NCLMemory(dim, K=queue_size, T=0.05, num_class=novel, knn=-1, w_pos=0.2)

        self.known_memory, self.novel_memory = make(), make()

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        (h1, h2), known = encoded, batch.label != UNKNOWN
        epoch = int(progress * self.epochs)
        p1, p2 = (
            [head(h).softmax(1) for head in (self.heads.known, self.heads.novel)] for h in (h1, h2)
        )
        z = F.normalize(h1[~known].detach(), dim=1)
        target = torch.where(z @ z.T > self.threshold, 1.0, -1.0)
        agree = p1[1][~known] @ p2[1][~known].T
        pairs = -((agree * target + (target < 0)) + 1e-7).log().mean()
        rise = 50 / 200 * self.epochs  # epochs of the 200 in the script
        ramp = 5.0 * math.exp(-5 * (1 - min(epoch, rise) / rise) ** 2)
        loss = F.cross_entropy(self.heads.known(h1[known]), batch.label[known]) + pairs
        loss = loss + ramp * sum(F.mse_loss(a, b) for a, b in zip(p1, p2, strict=True))
        q, k = F.normalize(h1, dim=1), F.normalize(h2, dim=1)
        with on_cpu():
            labeled = self.known_memory.memory.clone().detach()
            views, label = (q[~known], k[~known]), batch.label
            novel = self.novel_memory(*views, label[~known], epoch, False, labeled)
            same = self.known_memory(q[known], k[known], label[known], epoch, True)
        return Step(loss + 0.1 * same + (novel if epoch > 0 else 0.0), None)


class UNOHeads(nn.Module):
    """The authors' heads, of which that of least loss is used."""

    known: Any
    novel: Any
    losses: Tensor

    def __init__(self, known: nn.Module, novel: Any, temperature: float) -> None:
        super().__init__()
        self.known, self.novel, self.temperature = known, novel, temperature
        self.register_buffer("losses", torch.zeros(novel.num_heads))

    @override
    def forward(self, features: Tensor) -> Tensor:
        novel = self.novel(features)[0][int(self.losses.argmin())]
        return torch.cat([self.known(F.normalize(features)), novel], dim=1) / self.temperature


class OfficialUNO(Official):
    """`main_discover.py`, two views, no multi-crop."""

    more: Any

    def __init__(
        self, checkout: Path, online: Branch, num_known: int, num_novel: int, *,
        hidden_dim: int, dim: int, num_heads: int = 4, overclustering: int = 3,
    ) -> None:  # fmt: skip
        super().__init__(online, num_known, num_novel)
        nets = module(checkout, "utils/nets.py")
        self.sinkhorn = module(checkout, "utils/sinkhorn_knopp.py").SinkhornKnopp(3, 0.05)
        features = online.backbone.feature_dim
        sizes = features, hidden_dim, dim
        novel = nets.MultiHead(*sizes, num_novel, num_heads)
        self.heads = UNOHeads(nets.Prototypes(features, num_known), novel, 0.1)
        self.more = nets.MultiHead(*sizes, overclustering * num_novel, num_heads)

    @override
    def encode(self, batch: Batch) -> Encoded:
        with torch.no_grad():  # the script does it first of all in a step
            for part in (self.heads.known, self.heads.novel, self.more):
                part.normalize_prototypes()
        return tuple(super().encode(batch))

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        known = batch.label != UNKNOWN
        losses = list[Tensor]()
        for part in (self.heads.novel, self.more):
            views = [
                torch.cat([self.heads.known(F.normalize(h)).expand(4, -1, -1), part(h)[0]], dim=2)
                for h in encoded
            ]
            targets = [self.targets(view.detach(), batch.label, known) for view in views]
            log_p = [F.log_softmax(view / 0.1, dim=2) for view in views]
            both = [-(targets[i] * log_p[j]).sum(2).mean(1) for i, j in ((0, 1), (1, 0))]
            losses.append(torch.stack(both).mean(dim=0))
        self.heads.losses += losses[0].detach()
        return Step(torch.stack([loss.mean() for loss in losses]).mean(), None)

    def targets(self, cosines: Tensor, label: Tensor, known: Tensor) -> Tensor:
        """Labels, and codes by the authors' Sinkhorn, of every head."""
        targets = torch.zeros_like(cosines)
        targets[:, known, : self.num_known] = F.one_hot(label[known], self.num_known).float()
        for head in range(len(cosines)):
            targets[head, ~known, self.num_known :] = self.sinkhorn(
                cosines[head, ~known, self.num_known :]
            )
        return targets


class SimGCDHeads(nn.Module):
    """The classifier of the authors' head."""

    head: Any

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    @override
    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)[1] / 0.1
        return logits

    def __deepcopy__(self, memo: dict[int, Any]) -> CosineHead:
        """The same classifier: what `weight_norm` keeps cannot be copied."""
        layer = self.head.last_layer
        copied = CosineHead(layer.in_features, layer.out_features, temperature=0.1)
        copied.weight.data.copy_(layer.weight_v)
        return copied


class OfficialSimGCD(Official):
    """`train.py`, with the entropy weight of a script."""

    def __init__(
        self, checkout: Path, online: Branch, num_known: int, num_novel: int, *,
        epochs: int, hidden_dim: int, dim: int, entropy_weight: float,
    ) -> None:  # fmt: skip
        super().__init__(online, num_known, num_novel)
        self.official = module(checkout, "model.py")
        features = online.backbone.feature_dim
        head = self.official.DINOHead(
            features, num_known + num_novel, nlayers=3, hidden_dim=hidden_dim, bottleneck_dim=dim
        )
        self.heads, self.epochs, self.entropy_weight = SimGCDHeads(head), epochs, entropy_weight
        falls = max(1, round(30 / 200 * epochs))
        self.distill = self.official.DistillLoss(falls, epochs, 2, 0.07, 0.04)

    @override
    def encode(self, batch: Batch) -> Encoded:
        return self.online.features(torch.cat(batch.views)).chunk(2)

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        known, label = batch.label != UNKNOWN, batch.label
        z, out = self.heads.head(torch.cat(encoded))
        epoch = min(int(progress * self.epochs), self.epochs - 1)
        cluster = self.distill(out, out.detach(), epoch)
        mean = (out / 0.1).softmax(1).mean(0)
        cluster = cluster + self.entropy_weight * (math.log(len(mean)) + (mean * mean.log()).sum())
        logits, zeros = self.official.info_nce_logits(features=z, device="cpu")
        contrast = F.cross_entropy(logits, zeros)
        views = torch.stack([F.normalize(part[known], dim=-1) for part in z.chunk(2)], dim=1)
        same = self.official.SupConLoss()(views, labels=label[known])
        taught = F.cross_entropy((out / 0.1)[known.repeat(2)], label[known].repeat(2))
        return Step(0.65 * (cluster + contrast) + 0.35 * (taught + same), None)
