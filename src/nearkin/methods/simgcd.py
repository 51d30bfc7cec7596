"""SimGCD: sort all images into known and novel classes, with one classifier.

Wen, Zhao, Qi. Parametric classification for generalized category discovery: a baseline study.
ICCV 2023, arXiv:2211.11727.

    loss   = (1 - s) (l_self + l_dist - e H) + s (l_same + l_ce)
    P_i    = softmax(W.h_i / t)
    l_dist = -sum_k P'_jk log P_ik, P'_j = stop(softmax(W.h_j / t'))
    H      = -sum_k Q_k log Q_k, Q = mean_i P_i
    l_ce   = -log P_i(class)
    l_self = -log exp(z_i.z_j / u) / sum_{a != i} exp(z_i.z_a / u)
    l_same = -mean_p log exp(z_i.z_p / v) / sum_{a != i} exp(z_i.z_a / v)

h and z are unit features and embeddings of both views of all images, W unit prototypes of known
and novel classes. View j is of the image of view i, and p are all other views of its class; l_ce
and l_same are over views of labeled images alone. s is `sup_weight`, e is `entropy_weight`, t is
`temperature`, t' falls from `first_sharp_temperature` to `sharp_temperature`, u is
`contrast_temperature`, and v is `sup_temperature`.

    projector: backbone -> (Linear GELU) x 2 -> Linear -> unit length
    classifier: backbone -> unit length -> Linear without bias

Queries: unit features and embeddings of all views. Keys: prototypes of all classes, and the
embeddings of all other views.
"""

import torch
from torch import nn
from typing_extensions import override

from nearkin.method import Defaults, HealthBounds, Method, line
from nearkin.networks.branch import Branch
from nearkin.networks.heads import CosineHead
from nearkin.objectives import classify, mean_entropy, nt_xent, sup_con, swapped_match, unit
from nearkin.schema import CountOrZero, Dim, DimOrZero, Fraction, Temperature, Weight
from nearkin.types import Batch, Encoded, Step


class SimGCD(Method[None]):
    """A view's classes must be those that the other view is surest of, and all must be in use.

    A batch holds images of known classes, with a label or without, and images of novel ones. It
    may have no label at all, or nothing but labels.

    Args:
        num_known_classes: Number of known classes, which have labels.
        num_novel_classes: Number of novel classes.
        dim: Embedding dimension.
        hidden_dim: Hidden dimension of the projector; 0 is that of the features.
        sup_weight: Weight of the supervised terms; the others share the rest.
        entropy_weight: Weight of the entropy of the mean prediction. The paper has 2, its scripts
            1 for CIFAR-10 and ImageNet and 4 for CIFAR-100.
        temperature: Softmax temperature of the classifier.
        first_sharp_temperature: Softmax temperature of the targets at the first step.
        sharp_temperature: Softmax temperature of the targets after it has fallen.
        sharp_until: Share of training in which that temperature falls.
        contrast_temperature: Temperature of the self-supervised contrast; 1 in the official code.
        sup_temperature: Temperature of the supervised contrast.
    """

    defaults = Defaults(augment="ncl", augment_small="ncl_cifar")
    health_bounds = HealthBounds(min_rank=0.02, min_std=0.35, max_cosine=0.74)
    uses_labels = True
    metrics = ("distill", "entropy", "classify", "contrast", "class_contrast")

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_known_classes: int,
        num_novel_classes: CountOrZero = 5,
        dim: Dim = 256,
        hidden_dim: DimOrZero = 2048,
        sup_weight: Fraction = 0.35,
        entropy_weight: Weight = 2.0,
        temperature: Temperature = 0.1,
        first_sharp_temperature: Temperature = 0.07,
        sharp_temperature: Temperature = 0.04,
        sharp_until: Fraction = 0.15,
        contrast_temperature: Temperature = 0.07,
        sup_temperature: Temperature = 0.07,
    ) -> None:
        super().__init__()
        self.sup_weight, self.entropy_weight = sup_weight, entropy_weight
        self.temperature = temperature
        self.sharpness = line(first_sharp_temperature, sharp_temperature, sharp_until)
        self.contrast_temperature = contrast_temperature
        self.sup_temperature = sup_temperature
        sizes = hidden_dim, hidden_dim, dim
        self.online = Branch(backbone, *sizes, norm=False, activation=nn.GELU)
        classes = num_known_classes + num_novel_classes
        self.heads = CosineHead(self.backbone.feature_dim, classes, temperature)

    @override
    def encode(self, batch: Batch) -> Encoded:
        return self.online.features_by_size(batch.views)  # in one pass

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        h, label = torch.cat(encoded), batch.label
        z1, z2 = unit(self.online.projector(h)).chunk(2)
        logits = self.heads(h)
        sharper = self.temperature / self.sharpness(progress)
        targets = (logits.detach() * sharper).softmax(dim=1)
        terms = {
            "distill": swapped_match(logits.chunk(2), targets.chunk(2)),
            "entropy": mean_entropy(logits.softmax(dim=1)),
            "classify": classify(logits, label.repeat(2)),
            "contrast": nt_xent(z1, z2, self.contrast_temperature),
            "class_contrast": sup_con(z1, z2, label, self.sup_temperature),
        }
        free = terms["contrast"] + terms["distill"] - self.entropy_weight * terms["entropy"]
        taught = terms["class_contrast"] + terms["classify"]
        loss = (1 - self.sup_weight) * free + self.sup_weight * taught
        return Step(loss, None, {name: term.detach() for name, term in terms.items()})
