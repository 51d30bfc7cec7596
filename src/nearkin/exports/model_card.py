"""The model card of an export: what it is, how it is used, and where it comes from."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from nearkin.choices import ExportFormat
from nearkin.config import Config
from nearkin.data.decode import CENTER
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.folders import AVERAGE, POOLED, TransformersNetwork, construction
from nearkin.encoders.origin import NOT_STATED, RESTRICTED, RESTRICTION, without_folder
from nearkin.evaluation.baselines import TITLES
from nearkin.exports.native import architecture
from nearkin.files import replace_text, usable
from nearkin.metrics.metric import Metric
from nearkin.networks.backbone import HEADS, SMALL_IMAGE
from nearkin.run.data import versions
from nearkin.run.folder import RunFolder
from nearkin.text import printable
from nearkin.toml import to_toml

CARD: Final = "README.md"
PREPROCESSING: Final = "preprocessing.json"
SETTINGS: Final = "settings.toml"
LIBRARIES: Final = {"timm": "timm", "huggingface": "transformers", "onnx": "onnx"}
"""What the hub of Hugging Face calls the libraries of formats."""
TEMPLATES: Final = Environment(
    loader=PackageLoader(__package__),
    finalize=lambda value: printable(str(value)).replace("\n", r"\n"),  # no line of its own
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,  # It is Markdown, not HTML
)


def code(text: str) -> str:
    """Text as code of Markdown, in more backticks than it has in a row.

    >>> print(code("a"), code("a`b"))
    `a` `` a`b ``
    """
    longest = max(map(len, re.findall("`+", text)), default=0)
    return f"{'`' * (longest + 1)} {text} {'`' * (longest + 1)}" if longest else f"`{text}`"


TEMPLATES.filters["code"] = code


@dataclass(frozen=True, eq=False)
class Card:
    """What an export's files say of it."""

    name: str
    encoder: Encoder
    format: ExportFormat
    classes: Sequence[str]  # Of the classifier on top; none where features come out
    folder: RunFolder | None  # The run; None for an encoder that is of none
    license: str  # That the user gives these weights; '' if none
    data_license: str

    def description(self) -> dict[str, Any]:
        """Return what a file of weights holds beside them, as plain values."""
        return {
            "nearkin": versions()["nearkin"],
            "architecture": without_paths(str(self.encoder.details["backbone"])),
            "preprocessing": self.encoder.preprocessing.to_dict(),
            "encoder_sha256": self.encoder.digest,
            "license": self.license or self._origin.get("license", NOT_STATED),
            "data_license": self.data_license or NOT_STATED,
            **({"classes": list(self.classes)} if self.classes else {}),
        }

    def write(self, folder: Path, checks: Sequence[str]) -> None:
        """Write the card, the preprocessing and the settings of the run into a folder."""
        from huggingface_hub import ModelCard

        description = self.description()
        view = json.dumps(description["preprocessing"], indent=2) + "\n"
        replace_text(folder / PREPROCESSING, view)
        data, columns = "", dict[str, dict[str, Metric]]()
        if self.folder:
            config, path = self.folder.any_settings()
            data, columns = without_folder(path), _columns(self.folder.read_evaluated())
            replace_text(folder / SETTINGS, to_toml(_public(config), data))
        text = TEMPLATES.get_template("card.md").render(
            **vars(self),
            checks=checks,
            description=description,
            data=data,
            noted=self._noted(),
            versions=versions(),
            columns=columns,
            metrics={m.name: m for column in reversed(columns.values()) for m in column.values()},
            origin=self._origin,
            restriction=RESTRICTION if RESTRICTED.search(self._origin.get("license", "")) else "",
            titles=TITLES,
            preprocessing=PREPROCESSING,
            settings=SETTINGS,
            not_stated=NOT_STATED,
            center=CENTER,
            small=SMALL_IMAGE,
            **self._loading(),
        )
        metadata = self._metadata(description["license"], data, columns)
        ModelCard(f"---\n{metadata}\n---\n\n{text}\n").save(folder / CARD)

    @property
    def _origin(self) -> Mapping[str, str]:
        origin: Mapping[str, str] = self.encoder.details.get("origin", {})
        return origin

    def _metadata(
        self, license_: str, data: str, columns: Mapping[str, Mapping[str, Metric]]
    ) -> str:
        """Return what the hub of Hugging Face reads, as YAML: the metrics of the export itself."""
        from huggingface_hub import EvalResult, ModelCardData

        task = "image-classification" if self.classes else "image-feature-extraction"
        name = printable(data)
        own = next(iter(columns.values()), {})
        results = [
            EvalResult(
                task_type=task,
                dataset_type=name,
                dataset_name=name,
                metric_type=metric.name,
                metric_value=str(metric),
                metric_args=dict(metric.protocol),
            )
            for metric in own.values()
        ]
        described = ModelCardData(
            license=None if license_ == NOT_STATED else license_,
            library_name=LIBRARIES.get(self.format),
            model_name=printable(self.name),
            pipeline_tag=task,
            tags=["nearkin"],
            eval_results=results or None,
        )
        return str(described.to_yaml())

    def _loading(self) -> dict[str, Any]:
        """Return what the code of a library needs to build the network."""
        body = self.encoder.backbone.body
        if self.format == "torchvision":
            name, options = architecture(self.encoder, "torchvision")
            head = next(head for head in HEADS if hasattr(body, head))
            return {"architecture": name, "options": options, "head": head}
        pooled = "pooler_output.flatten(1)"
        if not isinstance(body, TransformersNetwork):
            return {"pooling": {}, "pooled": pooled, "interpolated": False}
        tokens = {AVERAGE: "last_hidden_state.mean(1)", POOLED: pooled}
        pooled = tokens.get(body.pooling, "last_hidden_state[:, 0]")
        return {
            "pooling": construction(type(body.model), body.pooling),
            "pooled": pooled,
            "interpolated": bool(body.options),  # needed at other sizes than that of the weights
        }

    def _noted(self) -> dict[str, Any]:
        """Return what a run has noted of its images; nothing if it has not."""
        if self.folder is None or not self.folder.data.exists():
            return {}
        with usable(self.folder.data, "export the run that it was copied from"):
            noted = json.loads(self.folder.data.read_text(encoding="utf-8"))
            return {name: noted[name] for name in ("train", "test", "fingerprint")}


def _columns(summary: Mapping[str, Any]) -> dict[str, dict[str, Metric]]:
    """Return the metrics of each table of a summary, of any kind of run; nothing without any."""
    tables: Mapping[str, Any] = summary.get("metrics", summary.get("scores", {}))
    columns = {}
    for title, column in tables.items():
        entries: Iterable[Any] = column.values() if isinstance(column, Mapping) else column
        columns[title] = {entry["name"]: Metric(**entry) for entry in entries}
    return columns if any(columns.values()) else {}


def _public(config: Config) -> Config:
    """Return settings with names in place of the paths of this computer."""
    values = vars(config).items()
    texts: dict[str, Any] = {k: without_paths(v) for k, v in values if isinstance(v, str)}
    return replace(config, **texts)


def without_paths(text: str) -> str:
    r"""Return a setting with the names of files in place of their absolute paths.

    >>> [without_paths(f"{name}/home/me/nets.py:Net") for name in ("", "resnet50@", "s3:/")]
    ['nets.py:Net', 'resnet50@nets.py:Net', 's3://home/me/nets.py:Net']
    >>> without_paths(r"resnet50@C:\Users\me\weights.pth")
    'resnet50@weights.pth'
    """
    return re.sub(r"(^|[:@=])(/(?!/)([^/]*/)*|[A-Za-z]:\\([^\\]*\\)*)", r"\1", text)
