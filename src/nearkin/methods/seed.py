"""SEED: a student sees the images of a queue as its teacher does.

Fang, Wang, Wang, Zhang, Yang, Liu. SEED: Self-supervised distillation for visual representation.
ICLR 2021, arXiv:2101.04731.

    p_T = softmax_j(z_T.d_j / t_T)    (eq. 3)
    p_S = softmax_j(z_S.d_j / t_S)    (eq. 4)
    loss = - sum_j p_T_j log p_S_j    (eq. 5)

z_S is the student's embedding of a view and z_T the teacher's features of the same view, unit
vectors. d_j are the teacher's features of the images in the queue, and z_T itself. t_S is
`temperature`, t_T is `teacher_temperature`.

    backbone -> Linear ReLU -> Linear

Queries: online embeddings and the teacher's features of the same view. Keys: the teacher's
features of earlier images, and its features of the view.
"""

from typing import Literal

from torch import nn
from typing_extensions import override

from nearkin.memory import KeyUpdate, Queue
from nearkin.method import Defaults, Method
from nearkin.networks.branch import Branch
from nearkin.objectives import relational_distillation, unit
from nearkin.schema import DimOrZero, QueueSize, Temperature
from nearkin.types import Batch, Encoded, Step


class SEED(Method[KeyUpdate]):
    """The student must find a view as similar to the queue's images as its teacher does.

    The queue holds the teacher's features, which do not age: there is no momentum encoder. It
    starts full of random unit vectors. Older entries of the view's own image stay in it: the
    teacher says how similar they are.

    Args:
        teacher_dim: Dimension of the teacher's features, and so of the embedding.
        projector: `linear` or `mlp`.
        hidden_dim: Hidden dimension of the MLP; 0 is that of the features.
        queue_size: How many of the teacher's features are kept.
        temperature: Softmax temperature of the student.
        teacher_temperature: Softmax temperature of the teacher.
    """

    views = ("strong",)
    uses_teacher = True
    defaults = Defaults(augment="moco_v2", augment_small="moco_cifar")

    def __init__(
        self,
        backbone: nn.Module,
        *,
        teacher_dim: int,
        projector: Literal["linear", "mlp"] = "mlp",
        hidden_dim: DimOrZero = 0,
        queue_size: QueueSize = 65_536,
        temperature: Temperature = 0.2,
        teacher_temperature: Temperature = 0.01,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.teacher_temperature = teacher_temperature
        hidden = (hidden_dim,) if projector == "mlp" else ()
        self.online = Branch(backbone, *hidden, teacher_dim, norm=False)
        self.queue = Queue(queue_size, teacher_dim)

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[KeyUpdate]:
        (student,), (teacher,) = encoded, batch.teacher
        loss = relational_distillation(
            unit(student), teacher, self.queue.keys, self.temperature, self.teacher_temperature
        )
        return Step(loss, KeyUpdate(batch.index, teacher))

    @override
    def commit(self, memo: KeyUpdate, progress: float, /) -> None:
        """The teacher's features enter the queue."""
        self.queue.enqueue(memo.keys, memo.images)
