"""Encoders of checkpoints of other code, `ARCHITECTURE@FILE`, which are read without running any.

A checkpoint holds an encoder under some prefix, among projection heads, momentum copies and the
state of an optimizer: `state_dict` > `module.encoder_q.conv1.weight` in MoCo's, `teacher` >
`backbone.blocks.0.norm1.weight` in DINO's. The prefix is the one under which most names of the
network stand, whatever it is called.

How its images are prepared is in no checkpoint; docs/pretrained.md says what is assumed.
"""

import argparse
import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

from nearkin.data.preprocessing import Preprocessing
from nearkin.distributed import free_memory
from nearkin.encoders import libraries
from nearkin.encoders.libraries import Pretrained, described, differences
from nearkin.encoders.origin import origin
from nearkin.errors import CheckpointError, UsageError
from nearkin.extensions import absolute, is_reference, names_code
from nearkin.files import check_unpacked, usable
from nearkin.networks import backbone
from nearkin.networks.backbone import NATIVE, SMALL, SMALL_IMAGE, timm_names, torchvision_names
from nearkin.schema import suggestion
from nearkin.text import abridged

REMEDY: Final = "get it again from where it came from"
INERT: Final = re.compile(
    r"(addict|argparse|builtins\.(object|set|frozenset|slice|range|complex)$|collections|copyreg|"
    r"datetime|easydict|enum|functools|lightly|lightly_train|lightning|lightning_fabric|"
    r"lightning_utilities|numpy|omegaconf|pathlib|pytorch_lightning|timm|torch|torchmetrics|"
    r"torchvision|transformers|typing|yacs)(\.|$)"
)
"""Classes whose objects stand beside the weights of training checkpoints. None is imported or
called: an object that does nothing takes the place of each. Other names are refused."""
MOST_GLOBALS: Final = 200  # of those, which a file may name
NESTED: Final = 4  # Levels of dictionaries in which weights are searched
SKIPPED: Final = re.compile(r"optim|sched|scaler|callback|loops", re.I)
"""Parts of a checkpoint that hold tensors, but no networks."""

HEADS: Final = re.compile(
    r"(fc|heads?|head_dist|classifier|linear|proj\w*|prototypes|pred\w*|mlp|dino_head|ibot_head|"
    r"decoder\w*|queue\w*|memory\w*|text\w*|token_embedding|transformer|"
    r"positional_embedding|ln_final|logit_\w+|l_norm|nonlinear|embed_head|"
    r"aux\d|AuxLogits|position_ids|classes_?\w*|momentum_\w+|target_\w+)(\.|$)"
)
"""What belongs to a training and not to the encoder, where the network has no such part."""

TAUGHT: Final = frozenset({"teacher", "ema"})
"""Words of a prefix whose network its authors evaluate: DINO's teacher, an average of weights."""
FOLLOWING: Final = frozenset({"student", "momentum", "target", "k", "key"})
"""Words of a prefix whose network they do not: MoCo's key encoder, BYOL's target network."""
ENOUGH: Final = 0.5  # Share of a network's names that must stand under a prefix
BATCHES: Final = "num_batches_tracked"  # Counters of batch norms; old versions had none
Spelling = Callable[[str], str]
BLOCK: Final = re.compile(r"(^|\.)blocks\.\d+\.(\d+)\.")
"""Blocks in chunks, as DINOv2 saves its training; within a chunk they keep their number."""
DENSE: Final = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
"""Layers of DenseNets as the files of torchvision spell them."""
STEM: Final = re.compile(r"(?P<prefix>(?:.+\.)?)(?:conv1|0)\.weight")
FIRST_BLOCK: Final = re.compile(r"(?P<prefix>(?:.+\.)?)(?:layer1|[2-4])\.0\.conv1\.weight")
"""The first convolution of a residual network and that of its first block, by their names or, in
`nn.Sequential(*network.children())`, by their numbers."""

SIZE: Final = 224
RESIZE: Final = 256
SMALL_SIZE: Final = 32  # of images that networks with a 3x3 stem were trained on
OTHER_RANGE: Final = re.compile(r"torchvision:(googlenet|inception_v3)\.\w+")
"""Weights for another normalization, which torchvision makes up for in the network."""
RESIZED: Final = re.compile(r"pos_emb|rel_pos|relative_|attn_mask|rope|freqs")
"""Weights that belong to a size of images, which the libraries interpolate."""


class Inert:
    """Stands for an object of a checkpoint that is not loaded: it accepts all and does nothing."""

    def __init__(self, *_args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class Match(NamedTuple):
    """An encoder in a checkpoint."""

    prefix: str
    state: dict[str, Tensor]  # By the names of the network, with what is not known to be a head
    taken: list[str]  # Lines of the log on what was taken, and what was left out


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], str]:
    """Read all tensors of a file, and what it says of their architecture; '' if nothing.

    They have the names of the dictionaries that they are in, joined by dots. Nothing is read that
    could act.

    Raises:
        UsageError: If there is no such file, or it holds no tensors.
        CheckpointError: If it is damaged, names code, or holds a network as an object.
    """
    if not path.is_file():
        raise UsageError(f"{path} is no file; give ARCHITECTURE@FILE")
    if not path.stat().st_size:
        raise CheckpointError(f"{path} is empty; {REMEDY}")
    content = _read(path)
    if isinstance(content, Inert):
        raise CheckpointError(
            f"{path} holds a network as a Python object, which is not loaded; save its "
            "state_dict() instead"
        )
    tensors = dict(_tensors(content, "", 0))
    if not tensors:
        raise UsageError(f"{path} holds no weights")
    stated = _architecture(content)
    return tensors, "" if names_code(stated) else stated


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        start = file.read(9)
    if start[4:] == b"\0\0\0\0{":  # the length of a header, whose first byte may be any
        from safetensors.torch import load_file

        with usable(path, REMEDY):
            return load_file(path)
    if start.startswith(b"PK"):
        _check_zip(path)
    stood_in: set[str] = set()
    while True:
        try:
            return _load(path, stood_in)
        except Exception as error:  # of any kind: the file may hold anything
            blocked = re.search(r"GLOBAL ([\w.]+)", str(error))
            if blocked is None:
                reason = _reason(str(error))
                raise CheckpointError(f"{path} cannot be read ({reason}); {REMEDY}") from error
            more = (_globals(path) | {blocked[1]}) - stood_in
            bad = [name for name in sorted(more) if not INERT.match(name)]
            stood_in |= more
            if bad or not more or len(stood_in) > MOST_GLOBALS:
                names = ", ".join(abridged(bad or [blocked[1]], 3))
                raise CheckpointError(
                    f"{path} holds more than weights ({names}), which could run code; it is not "
                    "loaded. Save the state_dict() alone, as safetensors"
                ) from error


def _check_zip(path: Path) -> None:
    """Refuse a zip that is not whole, or unpacks to more than the memory holds."""
    if not is_zipfile(path):  # which ends with its list of contents
        raise CheckpointError(f"{path} is cut off; {REMEDY}")
    with usable(path, REMEDY), path.open("rb") as file:
        check_unpacked(file, free_memory())


def _load(path: Path, stood_in: set[str]) -> Any:
    inert = sorted(stood_in - {"argparse.Namespace"})  # which may say what network it is
    stand_ins = [argparse.Namespace, *((Inert, name) for name in inert)]
    allowed = torch.serialization.safe_globals(stand_ins)  # type: ignore[arg-type]  # pairs, too
    with allowed, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected pickle protocol")
        return torch.load(path, map_location="cpu", weights_only=True)


def _reason(text: str) -> str:
    """Return why torch does not read a file, without its advice to load it all the same."""
    own = re.search(r"WeightsUnpickler error: (.*?)\s*Check the doc", text, re.S)
    whole = " ".join((own[1] if own else text).split())
    reason = whole.partition(". ")[0][:200]  # what follows guesses at causes
    only_place = not reason or reason.isdecimal()  # the byte at which unpickling gives up
    return "it is no checkpoint of PyTorch" if only_place else reason


def _globals(path: Path) -> set[str]:
    """Return all names that a file in today's format would need; empty for older formats."""
    try:
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:  # of any kind, as above; then they are met one after the other
        return set()


def _tensors(content: Any, prefix: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(content, Mapping) or depth > NESTED:
        return
    for key, value in content.items():
        if not isinstance(key, str) or (depth < 2 and SKIPPED.search(key)):
            continue
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        else:
            yield from _tensors(value, f"{prefix}{key}.", depth + 1)


def _architecture(content: Any) -> str:
    """Return the architecture that a training has written beside its weights; or nothing."""
    if not isinstance(content, Mapping):
        return ""
    options = content.get("args")
    values = vars(options) if isinstance(options, argparse.Namespace) else options
    values = values if isinstance(values, Mapping) else {}
    stated = (content.get("arch"), values.get("arch"), values.get("model"))
    named = next((each for each in stated if isinstance(each, str)), "")
    side = values.get("patch_size")
    if isinstance(side, int) and re.fullmatch(r"vit_[a-z]+", named):
        return f"{named}_patch{side}_224"  # DINO's: the size of patches stands beside the name
    return named


# ---------------------------------------------------------------- the encoder among the tensors


def find_encoder(tensors: Mapping[str, Tensor], body: nn.Module) -> Match | None:
    """Return the weights of a network among those of a checkpoint.

    Where several are there, such as a student and its teacher, it is the one that its authors
    evaluate. None if less than half of the network's names stand under any prefix.
    """
    names = {name for name in body.state_dict() if not name.endswith(BATCHES)}
    found = list[tuple[int, str, Spelling]]()
    for spelling in _spellings(body, names):
        counts = Counter(
            key[:start]
            for key in tensors
            for start in (0, *(dot.end() for dot in re.finditer(r"\.", key)))
            if spelling(key[start:]) in names
        )
        most = max(counts.values(), default=0)
        prefixes = [prefix for prefix, count in counts.items() if count >= 0.9 * most]
        prefix = min(prefixes, key=lambda prefix: (_rank(prefix), len(prefix)), default="")
        found.append((most, prefix, spelling))
    most, prefix, spelling = max(found, key=itemgetter(0))  # of equals, the first
    return _match(tensors, body, prefix, spelling) if most >= ENOUGH * len(names) else None


def _rank(prefix: str) -> int:
    words = set(re.split(r"[._]", prefix))
    return 0 if words & TAUGHT else 2 if words & FOLLOWING else 1


def _spellings(body: nn.Module, names: set[str]) -> list[Spelling]:
    """Return how a checkpoint may spell a network's names: as they are, or otherwise."""
    children = {str(number): name for number, (name, _) in enumerate(body.named_children())}

    def numbered(name: str) -> str:
        # `nn.Sequential(*network.children())`, as in lightly's examples.
        first, dot, rest = name.partition(".")
        return f"{children[first]}{dot}{rest}" if first in children else name

    spellings: list[Spelling] = [str]
    if not names & {f"{number}.weight" for number in children}:
        spellings.append(numbered)
    if any("denselayer" in name for name in names):
        spellings.append(partial(DENSE.sub, r"\1\2"))
    if not any(map(BLOCK.search, names)):
        spellings.append(partial(BLOCK.sub, r"\1blocks.\2."))
    return spellings


def _match(
    tensors: Mapping[str, Tensor], body: nn.Module, prefix: str, spelling: Spelling
) -> Match:
    own, state, left = body.state_dict(), dict[str, Tensor](), Counter[str]()
    for key, tensor in tensors.items():
        name = spelling(key.removeprefix(prefix))
        if key.startswith(prefix) and (name in own or not HEADS.match(name)):
            state[name] = tensor
        else:
            left[_part(key, prefix)] += 1
    counters = {name: tensor for name, tensor in own.items() if name.endswith(BATCHES)}
    parts = abridged([f"{part} ({count})" for part, count in left.items()], 4)
    taken = [f"of {prefix.rstrip('.')}"] if prefix else []
    taken += [f"without {', '.join(parts)}"] if parts else []
    return Match(prefix, counters | state, taken)


def _part(key: str, prefix: str) -> str:
    """Return the part of a checkpoint that a tensor belongs to: where it leaves the prefix."""
    words, own = key.split("."), prefix.split(".")
    pairs = enumerate(zip(words, own, strict=False))  # a tensor may have the prefix for a name
    common = next((place for place, (word, other) in pairs if word != other), len(own))
    return ".".join(words[: common + 1])


def has_small_stem(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a residual network was trained on small images: its first convolution is 3x3.

    Other networks have such a convolution at any size of images.
    """
    stems = (STEM.fullmatch(key) for key, t in tensors.items() if t.shape[1:] == (3, 3, 3))
    blocks = {match["prefix"] for key in tensors if (match := FIRST_BLOCK.fullmatch(key))}
    prefixes = blocks & {stem["prefix"] for stem in stems if stem}
    return any(f"{prefix}conv2.weight" not in tensors for prefix in prefixes)  # as HRNets have


# ---------------------------------------------------------------- the encoder with its weights


def load_file(architecture: str, path: Path, image_size: int | None) -> Pretrained:
    """Load the encoder of a checkpoint.

    The architecture is `timm:NAME`, `torchvision:NAME`, or a backbone's name as in `--backbone`;
    empty if the file says it.

    Raises:
        UsageError: If there is no such architecture or file, or one is not that of the other.
        CheckpointError: If the file is damaged, or holds more than tensors.
    """
    if image_size and NATIVE.fullmatch(architecture):
        libraries.check_size(architecture, image_size)
    tensors, stated = read_checkpoint(path)
    small = has_small_stem(tensors)
    size = image_size or (SMALL_SIZE if small else None)
    named = _resolved(architecture or stated, size, path, small=small)
    name, notes = _as_authors(named, tensors)
    view, license_, assumed = _prepared(name, size)
    body = _network(name, view.image_size)
    match = _matching(path, tensors, body, name)
    # Under a prefix, weights are of another training than timm's.
    saved_by_timm = not match.prefix or libraries.OWN_STATISTICS.search(name)
    if assumed and architecture.startswith("timm:") and not small and saved_by_timm:
        view, license_, assumed = _prepared(name, size, as_timms=True)
    body, differing = _filled(body, match.state, name, view.image_size)
    if not all(tensor.isfinite().all() for tensor in body.state_dict().values()):
        raise CheckpointError(f"{path} has weights that are not finite; get another")
    source = origin(str(path.resolve()), license_, path)
    remarks = {"weights": match.taken, "notes": notes, "assumed": assumed}
    return described(body, name, view, source, differing, **remarks)


def _as_authors(name: str, tensors: Mapping[str, Tensor]) -> tuple[str, list[str]]:
    """Return a name as the authors of its weights use them, and what differs from timm."""
    if OTHER_RANGE.fullmatch(name):
        return f"{name}?transform_input=true", []
    if not name.startswith("timm:"):
        return name, []
    is_moco_v3 = any("base_encoder." in key for key in tensors)
    if name.startswith("timm:vit_small") and "?" not in name and is_moco_v3:
        name += "?num_heads=12"  # twice those of others, which the shapes of weights do not show
    return libraries.as_authors(name, libraries.timm_weights(name) if _tag(name) else None)


def _tag(name: str) -> str:
    """Return the tag of weights in the name of an architecture; '' if it has none."""
    return backbone.architecture(name).tag if NATIVE.fullmatch(name) else ""


def _resolved(architecture: str, size: int | None, path: Path, *, small: bool) -> str:
    """Return the full name of an architecture: as its library builds it, from 64 px on.

    With a `small` stem, it is what the name means for small images, at any size.
    """
    if not architecture:
        raise UsageError(
            f"{path} does not say of which architecture it is; give ARCHITECTURE@FILE, "
            "such as resnet50@FILE"
        )
    if re.fullmatch("vit_(tiny|small|base|large)", architecture):  # as MoCo v3 calls them
        architecture += "_patch16_224"
    own = architecture in SMALL or is_reference(architecture)
    if NATIVE.fullmatch(architecture) or own or (size and size < SMALL_IMAGE):
        return absolute(architecture)
    if small:
        return f"{architecture}?built_for={SMALL_SIZE}"
    library, _, bare = architecture.rpartition("/")
    for each, names in (("torchvision", torchvision_names()), ("timm", timm_names())):
        if library in ("", each) and bare.partition(".")[0] in names:
            return f"{each}:{bare}"
    known = [*torchvision_names(), *timm_names()]
    raise UsageError(
        f"unknown architecture {architecture}.{suggestion(bare, known)} `nearkin list backbones` "
        "lists them"
    )


def _prepared(
    name: str, size: int | None, *, as_timms: bool = False
) -> tuple[Preprocessing, str | None, str]:
    """Return how images are prepared, the license, and why the former is assumed, if it is.

    `as_timms` prepares them as for timm's own weights of the architecture, if it has any.
    """
    if _tag(name):
        return *libraries.prepared(name, size), ""
    config: Any = libraries.timm_default(name) if name.startswith("timm:") else None
    # DINOv2's were trained at 518 px in the end, and evaluated at 224 px.
    is_fixed = config and config.fixed_input_size
    usual = config.input_size[-1] if is_fixed and "dinov2" not in name else SIZE
    if config and as_timms:
        side = size or (usual if is_fixed else config.input_size[-1])
        view = libraries.timm_view(config.to_dict(), side)
        return view, None, "as timm's own of this architecture"
    side, is_transformer = size or usual, re.search(r"vit|deit|beit|eva|swin|cait", name)
    view = Preprocessing(
        image_size=side,
        crop="center",
        resize_to=side if side < SMALL_IMAGE else round(side * RESIZE / SIZE),
        interpolation="bicubic" if is_transformer else "bilinear",
    )
    return view, None, "the file does not say"


def _network(name: str, size: int) -> nn.Module:
    if NATIVE.fullmatch(name):
        return backbone.native(name, size)
    return backbone.build_backbone(name, size).body


def _matching(path: Path, tensors: Mapping[str, Tensor], body: nn.Module, name: str) -> Match:
    """Return the weights of a network in a checkpoint; refuse those of another one."""
    match = find_encoder(tensors, body)
    differing = f"its weights are {', '.join(abridged(list(tensors), 3))}"
    if match:
        differing = _other_shape(match.state, body)
    if match is None or differing:
        raise UsageError(
            f"{path} is of another architecture than {name}: {differing}; give the "
            "right ARCHITECTURE@FILE"
        )
    return match


def _other_shape(state: Mapping[str, Tensor], body: nn.Module) -> str:
    """Name the first weight of another shape, which libraries would interpolate; or ''."""
    own = body.state_dict()
    for key, tensor in state.items():
        shapes = tensor.shape, own.get(key, tensor).shape
        if shapes[0] != shapes[1] and tensor.ndim == len(shapes[1]) and not RESIZED.search(key):
            theirs, ours = ("x".join(map(str, shape)) for shape in shapes)
            return f"its {key} is {theirs}, not {ours}"
    return ""


def _filled(
    body: nn.Module, state: dict[str, Tensor], name: str, size: int
) -> tuple[nn.Module, str]:
    """Return the network with weights, and which are missing or left over."""
    own = body.state_dict()
    if own.keys() <= state.keys() and "register_tokens" not in state:
        state.pop("mask_token", None)  # for images that are masked while training
    fits = state.keys() == own.keys() and all(state[k].shape == own[k].shape for k in own)
    if fits or not name.startswith("timm:"):
        return body, _copied(state, body, name, size)
    return libraries.timm_body(name, size, {"state_dict": state})


def _copied(state: Mapping[str, Tensor], body: nn.Module, name: str, size: int) -> str:
    """Copy weights into a network; return which are missing or left over."""
    from torchvision.models import MNASNet
    from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

    if isinstance(body, MNASNet):  # others read files of older versions, which do not say so
        state = backbone.as_current(state, body)
    if isinstance(body, VisionTransformer):
        state = interpolate_embeddings(size, body.patch_size, OrderedDict(state))
    try:
        report = body.load_state_dict(state, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split("\n\t")[1:2]) or str(error)
        raise UsageError(f"the weights do not fit {name}: {reason[:200]}") from error
    return differences(report.missing_keys, report.unexpected_keys)
