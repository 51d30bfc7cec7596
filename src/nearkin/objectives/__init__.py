"""The objectives, as pure functions of unit vectors.

Nearly all of them are one equation. A query is matched against a dictionary of keys, and the
loss is the cross-entropy between that match and what it should have been:

    loss(q) = - sum_j  target_j  log softmax_j( q . k_j / temperature )

They differ in where the keys come from (the batch, a queue, a memory bank, prototypes) and in
the target (one key, several neighbors, a soft assignment). `look_up` is the shared half.
Nothing here knows about networks, memories or processes, and everything here computes in at
least float32, whatever precision the networks around it use.
"""

from nearkin.objectives.agreement import alignment, barlow_twins, vicreg
from nearkin.objectives.contrast import (
    in_batch,
    info_nce,
    nce,
    nt_xent,
    soft_match,
    sup_con,
    swapped_match,
)
from nearkin.objectives.discovery import (
    class_targets,
    classify,
    close,
    closest,
    consistency,
    mean_entropy,
    mixed_negatives,
    neighborhood_targets,
    pairwise_bce,
    ramp,
    same_ranks,
)
from nearkin.objectives.lookup import look_up
from nearkin.objectives.precision import full_precision, unit
from nearkin.objectives.rows import mean_over_rows
from nearkin.objectives.transport import sinkhorn

__all__ = [
    "alignment",
    "barlow_twins",
    "class_targets",
    "classify",
    "close",
    "closest",
    "consistency",
    "full_precision",
    "in_batch",
    "info_nce",
    "look_up",
    "mean_entropy",
    "mean_over_rows",
    "mixed_negatives",
    "nce",
    "neighborhood_targets",
    "nt_xent",
    "pairwise_bce",
    "ramp",
    "same_ranks",
    "sinkhorn",
    "soft_match",
    "sup_con",
    "swapped_match",
    "unit",
    "vicreg",
]
