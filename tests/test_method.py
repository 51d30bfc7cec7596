"""What a method takes."""

from dataclasses import replace

import pytest
from small import batch_at, small


def test_a_view_that_no_loss_uses_is_refused():
    batch = batch_at(0)
    three = replace(batch, views=(*batch.views, batch.views[0]))
    with pytest.raises(ValueError, match="SimCLR takes 2 views, the batch has 3"):
        small("simclr")(three, 0.5)
