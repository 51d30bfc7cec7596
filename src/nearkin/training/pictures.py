"""What augmentations do, as a picture."""

from pathlib import Path

import numpy as np

from nearkin.data.batches import Batches
from nearkin.report.sheets import pixels_of, save_sheet

EXAMPLES = 8
DRAWS = 4
"""Epochs shown: each picture is drawn anew in every one of them."""


def augmentation_sheet(batches: Batches, path: Path) -> Path:
    """Show pictures of the first step beside the views that training will see of them.

    One row per picture: itself, then every view in each of the first epochs. Made before the
    first step, since a wrong augmentation is the commonest silent mistake.
    """
    rows = np.sort(batches.order.rows(0))[:EXAMPLES]
    columns = [pixels_of(batches.images, rows, batches.sizes[0])]
    for epoch in range(DRAWS):
        columns += [view.cpu() for view in batches.views(epoch, rows)]
    return save_sheet(columns, path)
