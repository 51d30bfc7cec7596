"""Which labeled images are held out: none of a class that has too few to spare."""

from dataclasses import replace
from typing import Final

import numpy as np

from nearkin.data.split import Split, has_test_split
from nearkin.types import UNLABELED

FEW: Final = 5  # Labeled images of a class of which none is held out: all are needed to learn it


def keep_few(split: Split) -> Split:
    """Return the labeled images of small classes to training, with their groups.

    Not where the data name a test part: what others have held out stays held out. Images that an
    earlier run has held out return as well, where their class needs them; they are not scored.
    """
    images = split.images
    if has_test_split(images):
        return split
    counts = np.bincount(images.labels[images.labels != UNLABELED], minlength=len(images.classes))
    few = (images.labels != UNLABELED) & (counts[images.labels] < FEW)
    back = split.test_rows[np.isin(images.groups[split.test_rows], images.groups[few])]
    return replace(
        split,
        train_rows=np.union1d(split.train_rows, back),
        test_rows=np.setdiff1d(split.test_rows, back),
    )
