"""What all processes but the first do while it trains: the same steps, and nothing is written."""

from typing import Any

from nearkin.config import TrainConfig
from nearkin.data.batches import Feed
from nearkin.distributed import agreed, collect, is_sharded, whole
from nearkin.errors import DivergedError
from nearkin.method import Method
from nearkin.training import checkpoint
from nearkin.training.fit import end_if_asked, optimizer_for, same_start, steps_of, trained_by
from nearkin.training.signals import Requests
from nearkin.training.watch import look_due


def accompany(config: TrainConfig, method: Method[Any], batches: Feed) -> None:
    """Take the steps that the first process takes in `fit`.

    Where networks are divided, the first needs all parts to look at them, and to save them.
    """
    per_epoch = batches.order.steps_per_epoch
    total, every = int(config.epochs) * per_epoch, int(config.evaluate_every)
    optimizer = optimizer_for(method, config)
    start = done = same_start(optimizer, 0)
    trained = trained_by(config, method, optimizer) if start < total else method
    fed = batches.between(start, total)
    try:
        with Requests() as asked:
            for done, _ in steps_of(config, trained, optimizer, fed, start=start, total=total):
                if look_due(every, done, per_epoch, total):
                    with whole(method, trained):
                        pass
                stop = agreed(asked.stop)
                if is_sharded(trained) and agreed(0):
                    checkpoint.take_part(done, trained, optimizer)
                if stop:
                    asked.end(done, stop)
            end_if_asked(asked, total)
            collect(method, trained)
    except DivergedError:  # which the first keeps for a replay
        checkpoint.take_part(done, trained, optimizer, finite=False)
        raise
