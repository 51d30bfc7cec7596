"""Checkpoints of other code: read without running any of it, and the encoder in them found.

A checkpoint holds an encoder under some prefix, among projection heads, momentum copies and the
state of an optimizer: `state_dict` > `module.encoder_q.conv1.weight` in MoCo's, `teacher` >
`backbone.blocks.0.norm1.weight` in DINO's. The prefix is the one under which most names of the
network stand, whatever it is called.
"""

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

from nearkin.distributed import free_memory
from nearkin.errors import CheckpointError, UsageError
from nearkin.files import check_unpacked, usable
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
    r"position_ids|classes_?\w*|momentum_\w+|target_\w+)(\.|$)"
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


class Inert:
    """Stands for an object of a checkpoint that is not loaded: it accepts all and does nothing."""

    def __init__(self, *_args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a file holds."""

    path: Path
    tensors: Mapping[str, Tensor]
    """All of them, by the names of the dictionaries that they are in, joined by dots."""
    architecture: str
    """What it says of itself; empty if nothing."""


@dataclass(frozen=True, eq=False)
class Match:
    """An encoder in a checkpoint."""

    prefix: str
    state: dict[str, Tensor]  # By the names of the network, with what is not known to be a head
    left: tuple[str, ...]  # Parts that are left out, with the number of their tensors


def read_checkpoint(path: Path) -> Checkpoint:
    """Read all tensors of a file, and nothing else that could act.

    Raises:
        UsageError: If there is no such file, or it holds no tensors.
        CheckpointError: If it is damaged, or names code.
    """
    if not path.is_file():
        raise UsageError(f"{path} is no file; give ARCHITECTURE@FILE")
    if not path.stat().st_size:
        raise CheckpointError(f"{path} is empty; {REMEDY}")
    content = _read(path)
    if isinstance(content, Inert):
        raise UsageError(
            f"{path} holds a network as a Python object, which is not loaded; save its "
            "state_dict() instead"
        )
    tensors = dict(_tensors(content, "", 0))
    if not tensors:
        raise UsageError(f"{path} holds no weights")
    return Checkpoint(path, tensors, _architecture(content))


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
    stand_ins = [argparse.Namespace, *((Inert, name) for name in sorted(stood_in))]
    allowed = torch.serialization.safe_globals(stand_ins)  # type: ignore[arg-type]  # pairs, too
    with allowed, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected pickle protocol")
        return torch.load(path, map_location="cpu", weights_only=True)


def _reason(said: str) -> str:
    """Return why torch does not read a file, without its advice to load it all the same."""
    own = re.search(r"WeightsUnpickler error: (.*?)\s*Check the doc", said, re.S)
    whole = " ".join((own[1] if own else said).split())
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
    named, options = content.get("arch"), content.get("args")
    if isinstance(named, str):
        return named
    values = vars(options) if isinstance(options, argparse.Namespace) else options
    if not isinstance(values, Mapping):
        return ""
    named = values.get("arch", values.get("model"))
    side = values.get("patch_size")
    if isinstance(named, str) and isinstance(side, int) and re.fullmatch(r"vit_[a-z]+", named):
        return f"{named}_patch{side}_224"  # DINO's: the size of patches stands beside the name
    return named if isinstance(named, str) else ""


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
    parts = tuple(f"{part} ({count})" for part, count in left.items())
    return Match(prefix, counters | state, parts)


def _part(key: str, prefix: str) -> str:
    """Return the part of a checkpoint that a tensor belongs to: where it leaves the prefix."""
    words, own = key.split("."), prefix.split(".")
    common = next((place for place, word in enumerate(own) if word != words[place]), len(own))
    return ".".join(words[: common + 1])


def taken(match: Match) -> list[str]:
    """Lines of the log on what was taken of a checkpoint, and what was left out."""
    lines = [f"of {match.prefix.rstrip('.')}"] if match.prefix else []
    left = ", ".join(abridged(match.left, 4))
    return [*lines, f"without {left}"] if left else lines


def has_small_stem(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a residual network was trained on small images: its first convolution is 3x3.

    Other networks have such a convolution at any size of images.
    """
    stems = (STEM.fullmatch(key) for key, t in tensors.items() if t.shape[1:] == (3, 3, 3))
    blocks = {match["prefix"] for key in tensors if (match := FIRST_BLOCK.fullmatch(key))}
    prefixes = blocks & {stem["prefix"] for stem in stems if stem}
    return any(f"{prefix}conv2.weight" not in tensors for prefix in prefixes)  # as HRNets have
