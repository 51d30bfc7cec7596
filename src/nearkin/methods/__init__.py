"""The methods, one per module. To add one, write its module and name it here."""

from typing import Any

from nearkin.method import Method
from nearkin.methods.moco import MoCo
from nearkin.methods.moco_end_to_end import MoCoEndToEnd
from nearkin.methods.moco_memory_bank import MoCoMemoryBank
from nearkin.methods.simclr import SimCLR

METHODS: dict[str, type[Method[Any]]] = {
    "moco": MoCo,
    "moco_end_to_end": MoCoEndToEnd,
    "moco_memory_bank": MoCoMemoryBank,
    "simclr": SimCLR,
}
