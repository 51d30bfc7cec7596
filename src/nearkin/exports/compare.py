"""What was written, read back by its library and compared on images with the encoder it is of."""

import math
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor

from nearkin.data.batches import CenterCrops
from nearkin.data.decode import as_image
from nearkin.data.images import Images
from nearkin.data.rng import seeded
from nearkin.distributed import available_cpus
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.inference import TOLERANCE, images_at_once, neighbors_kept
from nearkin.errors import CheckpointError, DataError
from nearkin.exports.graphs import PixelNetwork, Run
from nearkin.exports.native import Native
from nearkin.networks.backbone import SMALL_IMAGE
from nearkin.networks.input_size import patch_size
from nearkin.objectives import unit

AGREEMENT: Final = 0.999  # Share of images whose nearest neighbor, or class, is the same
MOST_CHECKED, FEWEST_CHECKED = 1000, 64  # Images that outputs are compared on, by their size
SAME: Final = 0.99
"""Least cosine of features by a library's own preprocessing, where nearkin's is that library's:
what is left are decoders and roundings."""
ALIKE: Final = 0.98  # The same for nearkin's own crop, which libraries do not have: a warning
TRANSFORMED: Final = 16  # Images that also take a library's own way from file to features


class Sample(NamedTuple):
    """Images that outputs are compared on."""

    pixels: Shaped[Tensor, "images _ size size"]
    images: Images | None  # The same, as files; None where they are noise
    what: str  # What they are, in words


def sample_of(encoder: Encoder, images: Images, whose: str) -> Sample:
    """Return some of the images, as the encoder takes them."""
    size = encoder.image_size
    count = max(FEWEST_CHECKED, min(MOST_CHECKED, MOST_CHECKED * SMALL_IMAGE**2 // size**2))
    chosen = images.spread(count)
    crops = CenterCrops(chosen, encoder.preprocessing, workers=available_cpus())
    pixels = torch.cat(list(crops))
    rows = [row for row in range(len(chosen)) if row not in crops.bad]
    if len(rows) < 2:
        raise DataError("fewer than two images can be read; give others")
    readable = chosen.subset(np.array(rows))
    return Sample(pixels[rows].contiguous(), readable, f"{len(rows)} images {whose}")


def noise(encoder: Encoder) -> Sample:
    """Return noise, for an encoder without images."""
    size = encoder.image_size
    with seeded(0, torch.device("cpu")):
        shape = FEWEST_CHECKED, len(encoder.preprocessing.mean)
        coarse = F.interpolate(torch.rand(*shape, 4, 4), (size, size), mode="bilinear")
        values = 0.8 * coarse + 0.2 * torch.rand(*shape, size, size)
        pixels = values if encoder.preprocessing.low else (255 * values).to(torch.uint8)
    return Sample(pixels, None, f"{FEWEST_CHECKED} images of noise")


def compare_native(written: Native, network: PixelNetwork, sample: Sample) -> list[str]:
    """Refuse what a library has read where a bit of a feature differs; return lines on it."""
    view = network.encoder.preprocessing

    def run(images: Tensor) -> Tensor:
        features: Tensor = written.network(view.to_input(images))
        return features.flatten(1)

    lines = compare_graph(run, written.library, network, sample, tolerance=0.0)
    return lines + _compare_transform(written, network.encoder, sample)


def compare_graph(
    run: Run,
    program: str,
    network: PixelNetwork,
    sample: Sample,
    *,
    tolerance: float = TOLERANCE,
    any_size: bool = False,
) -> list[str]:
    """Refuse what was written if a program computes something else by it; return lines on it.

    Of a graph for images of `any_size`, those of another size are compared, too.
    """
    own_side, pixels = network.encoder.image_size, sample.pixels
    size = images_at_once(own_side, torch.device("cpu"))
    batches = {own_side: [pixels[:1], *pixels[1:].split(size)]}
    if any_size:  # a larger one that the patches divide
        patch = patch_size(network.encoder.backbone.body)
        side = own_side + patch * math.ceil(32 / patch)
        larger = F.interpolate(pixels[:FEWEST_CHECKED].float(), (side, side))
        batches[side] = [larger.to(pixels.dtype)]
    lines = []
    for side, parts in batches.items():
        with torch.inference_mode():
            own = torch.cat([network(part) for part in parts])
            theirs = torch.cat([run(part) for part in parts])
        same = _same(own, theirs, program, network.output, tolerance)
        sizes = [len(part) for part in parts]
        lines.append(
            f"{network.output} of {sample.what}, {side} px, batches of {min(sizes)} to "
            f"{max(sizes)}: {same}, by {program}"
        )
    return lines


def _same(own: Tensor, theirs: Tensor, program: str, output: str, tolerance: float) -> str:
    """Refuse what rounding does not explain; return what differs, in words.

    torch computes the attention of some networks by other kernels than a program's.
    """
    if torch.equal(own, theirs):
        return "equal, bit by bit"
    difference, share = math.nan, 0.0
    what = "nearest neighbor" if output == "features" else "class"
    if own.shape == theirs.shape:
        difference = float((own - theirs).abs().max() / own.abs().max())
        if output == "features":
            share = neighbors_kept(own, theirs)
        else:
            share = (own.argmax(1) == theirs.argmax(1)).float().mean().item()
    if not (difference <= tolerance and share >= AGREEMENT):  # not a number: refused
        raise CheckpointError(
            f"{program} computes other {output} from what was written, by {difference:.1e} of the "
            "largest; nothing was kept. Give another --format, and report it"
        )
    return (
        f"largest difference {difference:.1e} of the largest value (at most {tolerance:g}), the "
        f"same {what} for {share:.1%}"
    )


def _compare_transform(written: Native, encoder: Encoder, sample: Sample) -> list[str]:
    """Compare a library's own way from an image to features, which need not be to the bit."""
    if written.transform is None or sample.images is None or encoder.preprocessing.low:
        return []
    images = encoder.preprocessing.applied(sample.images.spread(TRANSFORMED))
    rows = [sample.images.names.index(name) for name in images.names]
    # At full scale: other libraries decode no JPEG at a smaller one.
    decoded: list[Any] = [as_image(images.read(row)) for row in range(len(images))]
    with torch.inference_mode():
        theirs = written.network(torch.stack([written.transform(image) for image in decoded]))
        own = encoder(encoder.preprocessing.to_input(sample.pixels[rows]))
        cosine = float((unit(own) * unit(theirs.flatten(1))).sum(1).min())
    if encoder.preprocessing.crop != "box" and cosine < SAME:
        raise CheckpointError(
            f"{written.library} prepares images otherwise than nearkin: a cosine of {cosine:.4f}, "
            f"where {SAME} is asked; nothing was kept. Give another --format, and report it"
        )
    line = f"from image to features by its own preprocessing: cosine at least {cosine:.4f}"
    if cosine >= ALIKE:
        return [line]
    return [f"warning: {line}; it crops otherwise than nearkin: use images of one proportion"]
