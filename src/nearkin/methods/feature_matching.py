"""Feature matching: a student predicts its teacher's features.

Navaneet, Koohpayegani, Tejankar, Pirsiavash. SimReg: Regression as a simple yet effective tool
for self-supervised knowledge distillation. BMVC 2021, arXiv:2201.05131.

    loss = |z_S - z_T|^2

z_S is the student's embedding of a view and z_T the teacher's features of the same view, unit
vectors.

    backbone -> (Linear BN ReLU) x 3 -> Linear -> unit length

Queries: online embeddings. Keys: the teacher's features of the same view.
"""

from torch import nn
from typing_extensions import override

from nearkin.method import Defaults, HealthBounds, Method
from nearkin.networks.branch import Branch
from nearkin.objectives import alignment, unit
from nearkin.schema import Count, DimOrZero
from nearkin.types import Batch, Encoded, Step


class FeatureMatching(Method[None]):
    """The student's embedding of a view must be the teacher's feature vector of it.

    The loss runs from 0 to 4. Student and teacher see the same weakly augmented view, as in the
    paper, and the projector is left out after the training.

    Args:
        teacher_dim: Dimension of the teacher's features, and so of the embedding.
        num_layers: Layers of the projector; 1 is a linear map.
        hidden_dim: Hidden dimension of the projector; 0 is that of the features.
    """

    views = ("weak",)
    uses_teacher = True
    # Its embeddings are to be the teacher's features, which often lie in a narrow cone.
    health_bounds = HealthBounds(min_rank=0.02, min_std=0.0, max_cosine=1.0)
    defaults = Defaults(augment="moco_v2", augment_small="moco_cifar", options={"num_layers": 2})

    def __init__(
        self,
        backbone: nn.Module,
        *,
        teacher_dim: int,
        num_layers: Count = 4,
        hidden_dim: DimOrZero = 0,
    ) -> None:
        super().__init__()
        self.online = Branch(backbone, *[hidden_dim] * (num_layers - 1), teacher_dim)

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        (student,), (teacher,) = encoded, batch.teacher
        return Step(alignment(unit(student), teacher), memo=None)
