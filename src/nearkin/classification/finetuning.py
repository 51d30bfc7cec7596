"""Fine-tuning: the last blocks of an encoder, or all of it, learn from labels.

The layer on top starts as the linear probe of the frozen features, so the first steps do not
distort them (Kumar et al. Fine-tuning can distort pretrained features and underperform
out-of-distribution. ICLR 2022, arXiv:2202.10054). Learning rate and epochs are chosen on held-out
training images, the linear probe itself among the choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from nearkin.classification.data import LabeledData
from nearkin.classification.probes import Trained, linear_layer
from nearkin.classifier.layers import trainable_copy
from nearkin.config import ClassifyConfig, TrainConfig
from nearkin.data.augmentations import stored_views, views_of
from nearkin.data.batches import Batches
from nearkin.data.samplers import RandomBatchSampler
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.inference import inference
from nearkin.evaluation.embeddings import encode_images
from nearkin.methods.supervised import Supervised
from nearkin.metrics.probe import (
    LEFT_OUT,
    Choice,
    LinearProbe,
    Validated,
    folds_of,
    log_loss,
    train_probe,
)
from nearkin.pace import count
from nearkin.run.auto import LAYER_DECAY, augment_for, precision_of
from nearkin.run.opening import OpenRun
from nearkin.training.fit import Lead, fit
from nearkin.training.health import feature_health

RATES: Final = (1e-4, 1e-3)  # Peak learning rates to choose from, of AdamW
STEPS: Final = (50, 200)  # Lengths to choose from, in steps, as whole epochs
MAX_EPOCHS: Final = 100
BATCH_SIZE: Final = 64
WEIGHT_DECAY: Final = 0.05

Rows = Int64[np.ndarray, " _"]
Logits = Float32[np.ndarray, "_ classes"]


class Candidate(NamedTuple):
    """How long, and how fast, to fine-tune."""

    lr: float
    epochs: int

    def __str__(self) -> str:
        return f"lr-{self.lr:g}-epochs-{self.epochs}"


Chosen = tuple[Candidate | None, Logits]


@dataclass(frozen=True, eq=False)
class FineTuner:
    """Fine-tunes copies of an encoder on some of the training images."""

    run: OpenRun[ClassifyConfig]
    encoder: Encoder
    features: Float[Tensor, "images dim"]  # Of all images, by the encoder as it is
    data: LabeledData

    def train(self) -> Trained:
        """Choose among the candidates on held-out training images, then train on all of them."""
        config, rows, labels = self.run.config, self.data.train_rows, self.data.images.labels
        layers, groups = config.train_layers, self.data.images.groups[rows]
        folds = folds_of(labels[rows], groups, config.seed, folds=1)
        inside, held_out = rows[folds == LEFT_OUT], rows[folds != LEFT_OUT]
        candidates = self._candidates(len(rows))
        probe = self._probe(rows)
        chosen: Candidate | None = candidates[0]  # the gentlest, where none can be held out
        logits = np.zeros((0, self.data.num_classes), np.float32)
        if len(held_out):
            chosen, logits = self._choose(candidates, inside, held_out)
        given = "auto" not in (config.lr, config.epochs)
        choice = Choice(1.0, 0 if given else len(held_out))
        validated = Validated(choice, held_out, logits, labels[held_out])
        if chosen is None:
            self.run.log.info(
                "none is better than the linear probe on held-out images; it is kept"
            )
            return Trained(
                self.encoder,
                linear_layer(*probe.layer()),
                validated,
                {"epochs": 0},
                f"Fine-tuning ({layers}) was tried on training images and was not better than the "
                f"linear probe on {len(held_out)} held-out ones of them, so that is kept.",
                "linear",
            )
        self.run.log.info(f"fine-tuning {layers} on {len(rows)} images: {chosen}")
        method = self._fitted("all", rows, probe, chosen)
        details = {**self.encoder.details, "fine_tuned": layers}
        how = "the default" if not len(held_out) else f"chosen on {len(held_out)} held-out ones"
        if given:
            how = "as given"
        return Trained(
            Encoder(method.backbone.cpu(), self.encoder.preprocessing, details),
            method.known.cpu(),
            validated,
            chosen._asdict(),
            f"Fine-tuning ({layers}) on {len(rows)} training images from the linear probe on, "
            f"AdamW, learning rate {chosen.lr:g}, {count(chosen.epochs, 'epoch')}: {how}. Each "
            f"layer learns at {self._layer_decay:g} times the rate of the one above.",
            layers,
        )

    @property
    def _layer_decay(self) -> float:
        decay = self.run.config.layer_decay
        return LAYER_DECAY if decay == "auto" else decay

    def _candidates(self, num_images: int) -> list[Candidate]:
        """Return what to choose from: one candidate where rate and epochs are given."""
        config, per_epoch = self.run.config, num_images // self._batch_size(num_images)
        rates = RATES if config.lr == "auto" else (config.lr,)
        lengths = {min(MAX_EPOCHS, ceil(steps / per_epoch)) for steps in STEPS}
        epochs = sorted(lengths) if config.epochs == "auto" else [config.epochs]
        return [Candidate(lr, length) for length in epochs for lr in rates]

    def _batch_size(self, num_images: int) -> int:
        size = self.run.config.batch_size
        return min(num_images, BATCH_SIZE if size == "auto" else size)

    def _choose(self, candidates: Sequence[Candidate], inside: Rows, held_out: Rows) -> Chosen:
        """Return the candidate that is best on held-out images, and its logits of them.

        None is the linear probe, which only what was given in full is not compared with.
        """
        tried, probe = dict[Candidate | None, Logits](), self._probe(inside)
        if "auto" in (self.run.config.lr, self.run.config.epochs):
            weight, bias = probe.layer()
            by_probe = self.features[torch.from_numpy(held_out)] @ weight.T + bias
            tried[None] = by_probe.float().numpy()
        for candidate in candidates:
            method = self._fitted(f"choice-{candidate}", inside, probe, candidate)
            tried[candidate] = self._logits(method, held_out)
        truth, ranks = self.data.images.labels[held_out], dict[Candidate | None, Any]()
        for each, logits in tried.items():
            right, loss = int((logits.argmax(axis=1) == truth).sum()), log_loss(logits, truth)
            name = "linear probe" if each is None else f"fine-tuning, {each}"
            result = f"{right} of {len(truth)} held-out images right, loss {loss:.3f}"
            self.run.log.info(f"{name}: {result}")
            ranks[each] = -right, loss
        best = min(ranks, key=ranks.__getitem__)  # the first of equal ones
        return best, tried[best]

    def _probe(self, rows: Rows) -> LinearProbe:
        images, features = self.data.images, self.features[torch.from_numpy(rows)]
        seed, groups = self.run.config.seed, images.groups[rows]
        return train_probe(features, images.labels[rows], seed=seed, groups=groups)

    def _logits(self, method: Supervised, rows: Rows) -> Logits:
        encoder = Encoder(method.backbone, self.encoder.preprocessing, {})
        by, images = inference(encoder, self.run.device), self.data.images.subset(rows)
        embedded = encode_images(by, images, workers=int(self.run.config.workers))
        with torch.inference_mode():
            logits: Tensor = method.known.cpu()(embedded.tensor)
        return logits.float().numpy()

    def _fitted(
        self, name: str, rows: Rows, probe: LinearProbe, candidate: Candidate
    ) -> Supervised:
        """Train on these images from the newest checkpoint of a stage, to the last step.

        A new stage starts at the `probe` of the same images.
        """
        given, device, size = self.run.config, self.run.device, self.encoder.image_size
        images, workers = self.data.images.subset(rows), int(given.workers)
        batch = self._batch_size(len(rows))
        backbone = trainable_copy(self.encoder.backbone, given.train_layers)
        method = Supervised(backbone, num_known_classes=self.data.num_classes)
        method.known.load_state_dict(linear_layer(*probe.layer()).state_dict())
        method = method.to(device).to(memory_format=torch.channels_last)
        augment = given.augment
        if augment == "auto":
            augment = stored_views(augment_for(Supervised.defaults, self.data.images, size))
        config = TrainConfig(
            method="supervised",
            image_size=size,
            augment=augment,
            epochs=candidate.epochs,
            batch_size=batch,
            optimizer="adamw",
            lr=candidate.lr,
            layer_decay=self._layer_decay,
            weight_decay=WEIGHT_DECAY,
            seed=given.seed,
            evaluate_every=candidate.epochs,
            precision=precision_of(device),
            workers=workers,
            cache=given.cache,
            save_every=given.save_every,
        )
        feed = Batches.of(
            self.encoder.preprocessing.applied(images),
            views_of(config.augment, Supervised.views),
            image_size=size,
            sampler=RandomBatchSampler(len(images), batch, given.seed),
            device=device,
            workers=workers,
            cache=given.cache,
            labels=images.labels,
        )
        stage = self.run.folder.stage(name)
        stage.path.mkdir(parents=True, exist_ok=True)
        fit(config, method, [feed], Lead(stage, self.run.log, feature_health(feed)))
        return method
