"""The objectives, as pure functions of unit vectors.

Nearly all of them are one equation. A query is matched against a dictionary of keys, and the
loss is the cross-entropy between that match and what it should have been:

    loss(q) = - sum_j  target_j  log softmax_j( q . k_j / temperature )

They differ in where the keys come from (the batch, a queue, a memory bank, prototypes) and in
the target (one key, several neighbors, a soft assignment). `look_up` is the shared half.
Nothing here knows about networks, memories or processes, and everything here computes in at
least float32, whatever precision the networks around it use.

Unless it says otherwise, an objective takes unit vectors as rows, divides similarities by
`temperature`, which is above 0, and returns the mean over the batch.
"""

from nearkin.objectives.agreement import alignment as alignment
from nearkin.objectives.agreement import barlow_twins as barlow_twins
from nearkin.objectives.agreement import gram as gram
from nearkin.objectives.agreement import sigreg as sigreg
from nearkin.objectives.agreement import vicreg as vicreg
from nearkin.objectives.contrast import in_batch as in_batch
from nearkin.objectives.contrast import info_nce as info_nce
from nearkin.objectives.contrast import look_up as look_up
from nearkin.objectives.contrast import nce as nce
from nearkin.objectives.contrast import nt_xent as nt_xent
from nearkin.objectives.contrast import relational_distillation as relational_distillation
from nearkin.objectives.contrast import sinkhorn as sinkhorn
from nearkin.objectives.contrast import soft_match as soft_match
from nearkin.objectives.contrast import sup_con as sup_con
from nearkin.objectives.contrast import swapped_match as swapped_match
from nearkin.objectives.contrast import unit as unit
from nearkin.objectives.discovery import class_targets as class_targets
from nearkin.objectives.discovery import classify as classify
from nearkin.objectives.discovery import close as close
from nearkin.objectives.discovery import closest as closest
from nearkin.objectives.discovery import consistency as consistency
from nearkin.objectives.discovery import mean_entropy as mean_entropy
from nearkin.objectives.discovery import mixed_negatives as mixed_negatives
from nearkin.objectives.discovery import neighborhood_targets as neighborhood_targets
from nearkin.objectives.discovery import pairwise_bce as pairwise_bce
from nearkin.objectives.discovery import ramp as ramp
from nearkin.objectives.discovery import same_ranks as same_ranks
from nearkin.objectives.discovery import separation as separation
from nearkin.objectives.numerics import full_precision as full_precision
from nearkin.objectives.numerics import mean_over_rows as mean_over_rows
