"""Networks made for one size of images, at another: patches, position embeddings, windows."""

from typing import Any

from torch import nn

from nearkin.errors import UsageError
from nearkin.networks.branch import size_error


def patch_size(body: nn.Module) -> int:
    """Return the side in pixels of the patches that a network cuts images into; or 1."""
    for module in body.modules():
        side = getattr(module, "patch_size", None)
        side = side[0] if isinstance(side, tuple | list) and side else side
        if isinstance(side, int):
            return side
    return 1


def check_patches(
    body: nn.Module, image_size: int, name: str, setting: str = "--image-size"
) -> None:
    """Refuse images that are no whole number of patches; the rest of them would be cut off.

    `setting` is where their size is from.

    Raises:
        UsageError: Naming the two nearest sizes that are.
    """
    patch = patch_size(body)
    if image_size % patch:
        below = image_size // patch * patch
        sizes = " or ".join(f"{size}" for size in (below, below + patch) if size)
        raise UsageError(
            f"images of {image_size} px cannot be divided into the patches of {patch} px that "
            f"{name} takes; give {setting} {sizes}"
        )


def resize_input(body: Any, image_size: int, name: str) -> None:
    """Let a network take images of another size, in place.

    Position embeddings are interpolated, by timm's or torchvision's own function. Networks of
    convolutions need nothing, and neither do those that interpolate by themselves.

    Raises:
        UsageError: If the patches do not divide the size, or the network cannot take it.
    """
    check_patches(body, image_size, name)
    try:
        if hasattr(body, "set_input_size"):
            body.set_input_size(img_size=(image_size, image_size))
        elif hasattr(body, "encoder") and hasattr(body.encoder, "pos_embedding"):
            _resize_torchvision(body, image_size)
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise size_error(name, image_size, error) from error


def _resize_torchvision(body: Any, image_size: int) -> None:
    from torchvision.models.vision_transformer import interpolate_embeddings

    key = "encoder.pos_embedding"
    state = interpolate_embeddings(image_size, body.patch_size, {key: body.encoder.pos_embedding})
    body.encoder.pos_embedding = nn.Parameter(state[key].detach().clone())
    body.image_size = image_size
    body.seq_length = body.encoder.pos_embedding.shape[1]
