"""One evaluator for all: the vote of the nearest 200 training images on the test part."""

from typing import Final

import torch
from torch import nn

from nearkin.data.batches import CenterCrops
from nearkin.data.images import Images
from nearkin.data.split import Split
from nearkin.encoders.inference import encode_pixels
from nearkin.evaluation.baselines import pixel_features
from nearkin.evaluation.embeddings import Embeddings, embeddings_of
from nearkin.evaluation.metrics import predict_each
from nearkin.metrics.metric import Metric, Protocol, share

K: Final = 200
TEMPERATURE: Final = 0.1
CPU = torch.device("cpu")


def features(network: nn.Module, images: Images, size: int) -> Embeddings:
    """Encode images in float32, with batch norms in evaluation mode.

    Input is normalized by the means and deviations of ImageNet, which both sides train with.
    """
    network.to(memory_format=torch.channels_last)
    vectors = encode_pixels(network, CenterCrops(images, size), CPU)
    return embeddings_of(images, vectors.numpy())


def accuracy(bank: Embeddings, queries: Embeddings) -> Metric:
    """Return the kNN accuracy, with an interval over the test images."""
    votes = [(K, TEMPERATURE)]
    (winner,) = predict_each(bank.tensor, bank.labels, queries.tensor, votes)
    protocol: Protocol = {
        "method": "weighted kNN by cosine",
        "k": K,
        "temperature": TEMPERATURE,
        "training images": len(bank),
        "of": "test images",
    }
    correct = winner == queries.labels
    return share("kNN top-1", correct, protocol, groups=queries.groups)


def of_network(network: nn.Module, split: Split, size: int) -> Metric:
    """Measure a network; its bank is the training part, its queries the test part."""
    return accuracy(*(features(network, part, size) for part in (split.train, split.test)))


def of_pixels(split: Split) -> Metric:
    """Measure raw pixels, less the mean image of the training part."""
    parts = (split.train, split.test)
    vectors = pixel_features(parts, 0)
    return accuracy(
        *(embeddings_of(part, each.numpy()) for part, each in zip(parts, vectors, strict=True))
    )
