"""`nearkin backbones` and `nearkin doctor`."""

import platform
import sys

import torch

from nearkin.distributed import available_cpus, choose_device, device_name, native_precision
from nearkin.networks.backbone import SMALL, timm_names, torchvision_names
from nearkin.pace import count
from nearkin.version import __version__


def backbone_lines(pattern: str) -> list[str]:
    """Names of networks, as `--backbone` takes them."""
    names = [
        *SMALL,
        *(f"torchvision/{name}" for name in torchvision_names()),
        *(f"timm/{name}" for name in timm_names()),
    ]
    return [name for name in names if pattern in name]


def doctor_lines() -> list[str]:
    """Versions and what this machine can do."""
    from importlib.metadata import version

    device = choose_device("auto")
    packages = ("torch", "torchvision", "timm", "numpy", "Pillow", "scikit-learn")
    return [
        f"nearkin    {__version__}",
        f"python     {sys.version.split()[0]} on {platform.platform()}",
        *(f"{name:10} {version(name)}" for name in packages),
        f"device     {device_name(device)}",
        f"precision  {str(native_precision(device)).removeprefix('torch.')} is native here",
        f"CPUs       {available_cpus()} may be used; "
        f"torch uses {count(torch.get_num_threads(), 'thread')}",
    ]
