"""Names that several packages share and the command line lists, without torch."""

from typing import Final, Literal

SLEEPING_THREADS: Final = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_THREAD_TIMEOUT": "4"}
"""Variables of the environment by which threads sleep while they wait: those that spin take the
cores of other work. torch and scikit-learn, numpy and scipy (2^4 cycles, the least) read them when
they are loaded."""
MODE_METHODS: Final = {"gcd": "simgcd", "ncd": "ncl"}
"""The method of a discovery's last stage, by its mode."""
Protocol = Literal[
    "quick", "knn", "linear", "attentive", "fewshot", "retrieval", "labelfree", "full"
]
"""What `nearkin evaluate` measures; `nearkin.evaluation.protocols` has how."""
FULL: Final = "full"
"""The name of all protocols together."""
Criterion = Literal["effective-rank", "agreement", "view-retrieval"]
"""What encoders are ranked by without labels."""
Rule = Literal["typical", "random"]
"""What images are selected by."""
Engine = Literal["local", "ray"]
"""What divides the parts of features among processes."""
NativeFormat = Literal["timm", "torchvision", "huggingface"]
"""Formats of `nearkin export` that are an encoder's weights, in the files of a library."""
GraphFormat = Literal["onnx", "torch-export"]
"""Formats that are a network as a graph of its operations."""
ExportFormat = Literal["atlas", NativeFormat, GraphFormat]
"""All formats; `atlas` is a table of images."""
Listed = Literal["methods", "backbones", "pretrained", "recipes", "settings"]
"""What `nearkin list` lists."""
Tracker = Literal["tensorboard", "wandb", "trackio"]
"""Functions of `nearkin.run.tracking`."""
