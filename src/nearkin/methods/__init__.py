"""The methods, one per module. To add one, write its module and name it here."""

from typing import Any

from nearkin.method import Method
from nearkin.methods.barlow_twins import BarlowTwins
from nearkin.methods.byol import BYOL
from nearkin.methods.dino import DINO
from nearkin.methods.instdisc import InstDisc
from nearkin.methods.instdisc_parametric import InstDiscParametric
from nearkin.methods.moco import MoCo
from nearkin.methods.moco_end_to_end import MoCoEndToEnd
from nearkin.methods.moco_memory_bank import MoCoMemoryBank
from nearkin.methods.moco_v3 import MoCoV3
from nearkin.methods.ncl import NCL
from nearkin.methods.nnclr import NNCLR
from nearkin.methods.rotnet import RotNet
from nearkin.methods.simclr import SimCLR
from nearkin.methods.simgcd import SimGCD
from nearkin.methods.simsiam import SimSiam
from nearkin.methods.supervised import Supervised
from nearkin.methods.swav import SwAV
from nearkin.methods.vicreg import VICReg

METHODS: dict[str, type[Method[Any]]] = {
    "barlow_twins": BarlowTwins,
    "byol": BYOL,
    "dino": DINO,
    "instdisc": InstDisc,
    "instdisc_parametric": InstDiscParametric,
    "moco": MoCo,
    "moco_end_to_end": MoCoEndToEnd,
    "moco_memory_bank": MoCoMemoryBank,
    "moco_v3": MoCoV3,
    "ncl": NCL,
    "nnclr": NNCLR,
    "rotnet": RotNet,
    "simclr": SimCLR,
    "simgcd": SimGCD,
    "simsiam": SimSiam,
    "supervised": Supervised,
    "swav": SwAV,
    "vicreg": VICReg,
}
