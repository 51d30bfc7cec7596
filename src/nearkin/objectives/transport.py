"""Soft assignments to prototypes that use all of them."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nearkin.objectives.precision import full_precision


@full_precision
def sinkhorn(
    scores: Float[Tensor, "batch prototypes"],
    epsilon: float,
    iterations: int,
    ignored: Bool[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch prototypes"]:
    """Soft assignments that use every prototype equally (Caron et al. 2020, section 3.1, eq. 3).

    Each iteration gives every prototype the same mass, then every image: images come last, so
    their codes sum to one after any number of iterations. In logarithms, where no score is too
    large for `exp(score / epsilon)`.

    Args:
        scores: Similarity of each image with each prototype.
        epsilon: How soft the assignments are; above 0.
        iterations: At least 1; prototypes get equal mass only in the limit.
        ignored: Images that take no prototype's mass; their codes mean nothing.

    >>> import torch
    >>> sinkhorn(torch.zeros(2, 4), epsilon=0.05, iterations=3)
    tensor([[0.2500, 0.2500, 0.2500, 0.2500],
            [0.2500, 0.2500, 0.2500, 0.2500]])
    """
    log_codes = scores / epsilon
    for _ in range(iterations):
        if ignored is not None:
            log_codes = log_codes.masked_fill(ignored[:, None], torch.finfo(scores.dtype).min / 2)
        log_codes = log_codes.log_softmax(dim=0)
        log_codes = log_codes.log_softmax(dim=1)
    return log_codes.exp()
