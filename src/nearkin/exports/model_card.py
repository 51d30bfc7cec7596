"""The model card of an export: what it is, how it is used, and where it comes from."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from nearkin.config import Config
from nearkin.data.decode import CENTER
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.folders import AVERAGE, POOLED, TransformersNetwork, construction
from nearkin.encoders.origin import NOT_STATED, RESTRICTED, RESTRICTION, without_folder
from nearkin.encoders.preprocessing import Preprocessing
from nearkin.evaluation.baselines import TITLES
from nearkin.exports.native import architecture
from nearkin.files import replace_text, usable
from nearkin.metrics.metric import Metric
from nearkin.networks.backbone import SMALL_IMAGE
from nearkin.run.data import versions
from nearkin.run.folder import RunFolder
from nearkin.text import printable
from nearkin.toml import to_toml

CARD: Final = "README.md"
PREPROCESSING: Final = "preprocessing.json"
SETTINGS: Final = "settings.toml"
LIBRARIES: Final = {"timm": "timm", "huggingface": "transformers", "onnx": "onnx"}
"""What the hub of Hugging Face calls the libraries of formats."""
HEADS: Final = ("fc", "classifier", "head", "heads")


@dataclass(frozen=True, eq=False)
class ModelCard:
    """What an export's files say of it."""

    name: str
    encoder: Encoder
    format: str
    classes: Sequence[str]  # Of the classifier on top; none where features come out
    folder: RunFolder | None  # The run; None for an encoder that is of none
    license: str  # That the user gives these weights; '' if none
    data_license: str

    def description(self) -> dict[str, Any]:
        """Return what a file of weights holds beside them, as plain values."""
        return {
            "nearkin": versions()["nearkin"],
            "architecture": str(self.encoder.details["backbone"]),
            "preprocessing": self.encoder.preprocessing.to_dict(),
            "encoder_sha256": self.encoder.digest,
            "license": self.license or self._origin().get("license", NOT_STATED),
            "data_license": self.data_license or NOT_STATED,
            **({"classes": list(self.classes)} if self.classes else {}),
        }

    def write(self, folder: Path, checks: Sequence[str]) -> None:
        """Write the card, the preprocessing and the settings of the run into a folder."""
        view = json.dumps(self.encoder.preprocessing.to_dict(), indent=2) + "\n"
        replace_text(folder / PREPROCESSING, view)
        if self.folder is not None:
            config, data = self.folder.any_settings()
            replace_text(folder / SETTINGS, to_toml(_public(config), without_folder(data)))
        replace_text(folder / CARD, "\n".join(self._lines(checks)) + "\n")

    def _lines(self, checks: Sequence[str]) -> list[str]:
        outputs = f"{self.encoder.num_features} features"
        if self.classes:
            outputs = f"the probabilities of {len(self.classes)} classes"
        return [
            *self._front_matter(),
            f"# {printable(self.name)}",
            "",
            f"From {self._kind()} of {self.encoder.image_size} px to {outputs}, by "
            f"`{self.encoder.details['backbone']}`. Exported as {self.format} by nearkin.",
            "",
            "## Use",
            "",
            *self._usage(),
            "",
            f"Images: {self.encoder.preprocessing}. `{PREPROCESSING}` holds the same.",
            *(["", "Classes, in order: " + _listed(self.classes)] if self.classes else []),
            "",
            "## Check",
            "",
            "What was written was read back and compared with nearkin's own:",
            "",
            *(f"- {line}" for line in checks),
            "",
            *self._made(),
            *self._metrics(),
            "## Licenses",
            "",
            *self._licenses(),
        ]

    def _kind(self) -> str:
        low = self.encoder.preprocessing.low
        return f"an image of {len(low)} channels" if low else "an RGB image"

    def _front_matter(self) -> list[str]:
        license_ = self.license or self._origin().get("license", NOT_STATED)
        stated = [] if license_ == NOT_STATED else [f"license: {json.dumps(license_)}"]
        library = LIBRARIES.get(self.format)
        named = [f"library_name: {library}"] if library else []
        kind = "image-classification" if self.classes else "image-feature-extraction"
        return ["---", *stated, *named, f"pipeline_tag: {kind}", "tags: [nearkin]", "---", ""]

    def _origin(self) -> Mapping[str, str]:
        origin: Mapping[str, str] = self.encoder.details.get("origin", {})
        return origin

    # ------------------------------------------------------------ code

    def _usage(self) -> list[str]:
        code = {
            "timm": self._timm,
            "torchvision": self._torchvision,
            "huggingface": self._huggingface,
            "onnx": self._onnx,
            "torch-export": self._program,
        }[self.format]()
        return ["In this folder:", "", "```python", *code, "```"]

    def _timm(self) -> list[str]:
        if not self.encoder.preprocessing.low:
            return _timm()
        return [
            "import timm",
            "import torch",
            *self._pixels(),
            "",
            'model = timm.create_model("local-dir:.", pretrained=True).eval()',
            *self._normalized(),
        ]

    def _normalized(self) -> list[str]:
        """Return lines from the pixels of a file to the features of a `model`."""
        view = self.encoder.preprocessing
        return [
            f"mean = torch.tensor({list(view.mean)})[:, None, None]",
            f"std = torch.tensor({list(view.std)})[:, None, None]",
            f'images = torch.from_numpy(pixels("photo.jpg"))[None]{"" if view.low else " / 255"}',
            "with torch.inference_mode():",
            "    features = model((images - mean) / std)",
        ]

    def _torchvision(self) -> list[str]:
        name, options = architecture(self.encoder, "torchvision")
        arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
        head = next(head for head in HEADS if hasattr(self.encoder.backbone.body, head))
        return [
            "import torch",
            "import torchvision",
            *self._pixels(),
            "",
            f"model = torchvision.models.{name}({arguments})",
            f"model.{head} = torch.nn.Identity()",
            'model.load_state_dict(torch.load("model.pth", weights_only=True))',
            "model.eval()",
            *self._normalized(),
        ]

    def _huggingface(self) -> list[str]:
        body, arguments, features = self.encoder.backbone.body, "", "pooler_output.flatten(1)"
        if isinstance(body, TransformersNetwork):
            options = construction(type(body.model), body.pooling)
            arguments = "".join(f", {key}={value}" for key, value in options.items())
            tokens = {AVERAGE: "last_hidden_state.mean(1)", POOLED: features}
            features = tokens.get(body.pooling, "last_hidden_state[:, 0]")
        return [
            "import torch",
            "from transformers import AutoImageProcessor, AutoModel",
            "",
            *OPENING,
            "",
            "",
            f'model = AutoModel.from_pretrained("."{arguments}).eval()',
            'processor = AutoImageProcessor.from_pretrained(".")',
            'image = opened("photo.jpg")',
            "with torch.inference_mode():",
            '    outputs = model(processor(images=image, return_tensors="pt")["pixel_values"])',
            f"features = outputs.{features}",
        ]

    def _onnx(self) -> list[str]:
        classes = [
            'metadata = session.get_modelmeta().custom_metadata_map["classes"]',
            "best = json.loads(metadata)[outputs[0].argmax()]",
        ]
        return [
            *(["import json", ""] if self.classes else []),
            "import onnxruntime",
            *self._pixels(),
            "",
            'session = onnxruntime.InferenceSession("model.onnx")',
            'outputs = session.run(None, {"images": pixels("photo.jpg")[None]})[0]',
            *(classes if self.classes else []),
        ]

    def _program(self) -> list[str]:
        load = 'program = torch.export.load("model.pt2").module()'
        classes = []
        if self.classes:
            load = 'program = torch.export.load("model.pt2", extra_files=files).module()'
            classes = [
                'best = json.loads(files["description.json"])["classes"][outputs[0].argmax()]'
            ]
        return [
            *(["import json", ""] if self.classes else []),
            "import torch",
            *self._pixels(),
            "",
            *(['files = {"description.json": ""}'] if self.classes else []),
            load,
            'outputs = program(torch.from_numpy(pixels("photo.jpg"))[None])',
            *classes,
        ]

    def _pixels(self) -> list[str]:
        """Return a function from a file to pixels, the same as `Preprocessing.pixels`."""
        view = self.encoder.preprocessing
        if view.low:
            return [
                "import numpy as np",
                "import tifffile",
                "from PIL import Image",
                "",
                "",
                "def cut(image):",
                *(f"    {line}" for line in _cut(view)),
                "    return np.asarray(image)",
                "",
                "",
                "def pixels(path):",
                "    values = tifffile.imread(path).astype(np.float32)",
                "    values = values.reshape(*values.shape[:2], -1)  # channels last",
                f"    low, high = np.array([{list(view.low)}, {list(view.high)}], np.float32)",
                "    scaled = ((values - low) / (high - low)).clip(0, 1)",
                "    planes = [cut(Image.fromarray(scaled[..., n])) for n in range(len(low))]",
                "    return np.stack(planes).clip(0, 1)",
                "",
            ]
        return [
            *OPENING,
            "",
            "",
            "def pixels(path):",
            "    image = opened(path)",
            *(f"    {line}" for line in _cut(view)),
            "    return np.asarray(image).transpose(2, 0, 1).copy()",
            "",
        ]

    # ------------------------------------------------------------ where it is from

    def _made(self) -> list[str]:
        """Return lines on recipe, data and versions."""
        details, lines = self.encoder.details, ["## Recipe and data", ""]
        known = ("method", "epochs", "init_from", "teacher")
        lines += [f"- {key}: {details[key]}" for key in known if details.get(key)]
        if self.folder is not None:
            lines += [f"- run: {self.folder.kind}, all settings in `{SETTINGS}`"]
            lines += self._data()
        used = ", ".join(f"{name} {version}" for name, version in versions().items())
        return [*lines, f"- encoder: SHA-256 {self.encoder.digest}", f"- exported with {used}", ""]

    def _data(self) -> list[str]:
        assert self.folder is not None
        if not self.folder.data.exists():
            return []
        with usable(self.folder.data, "export the run that it was copied from"):
            noted = json.loads(self.folder.data.read_text(encoding="utf-8"))
            _, data = self.folder.any_settings()
            return [
                f"- images: {printable(without_folder(data))}, {noted['train']} to learn from, "
                f"{noted['test']} held out",
                f"- fingerprint of the images and of what was held out: {noted['fingerprint']}",
            ]

    def _metrics(self) -> list[str]:
        """Return a table of the run's metrics beside their baselines, with intervals."""
        columns = _columns(self.folder.read_evaluated()) if self.folder is not None else {}
        if not any(columns.values()):
            return []
        names = dict.fromkeys(name for column in columns.values() for name in column)
        rows = [
            [name, *(str(of[name]) if name in of else "-" for of in columns.values())]
            for name in names
        ]
        heading = ["metric", *(TITLES.get(title, title) for title in columns)]
        protocols = {
            m.name: m.sentence for column in reversed(columns.values()) for m in column.values()
        }
        return [
            "## Metrics",
            "",
            "With 95 % intervals, beside baselines, on images of this data:",
            "",
            _row(heading),
            _row(["---"] * len(heading)),
            *map(_row, rows),
            "",
            *(f"- {name}: {protocols[name]}" for name in names),
            "",
        ]

    def _licenses(self) -> list[str]:
        origin = self._origin()
        lines = [f"- these weights, as given: {self.license or NOT_STATED}"]
        if origin:
            source, license_ = origin.get("source", ""), origin.get("license", NOT_STATED)
            lines.append(f"- weights that they are or come from, {source}: {license_}")
            if RESTRICTED.search(license_):
                lines.append(f"- {RESTRICTION}")
        return [*lines, f"- images, as given: {self.data_license or NOT_STATED}"]


OPENING: Final = (
    "import numpy as np",
    "from PIL import Image, ImageOps",
    "",
    "",
    "def opened(path):",
    "    # Upright, 16 bits scaled to 8, transparency over white: as what it was trained on.",
    "    image = ImageOps.exif_transpose(Image.open(path))",
    '    if image.mode.startswith("I;16"):',
    "        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))",
    "    if image.has_transparency_data:",
    '        white = Image.new("RGBA", image.size, "white")',
    '        image = Image.alpha_composite(white, image.convert("RGBA"))',
    '    return image.convert("RGB")',
)
"""How the code of a card opens an image, as `nearkin.data.decode.rgb` does."""


def _timm() -> list[str]:
    return [
        "import timm",
        "import torch",
        "",
        *OPENING,
        "",
        "",
        'model = timm.create_model("local-dir:.", pretrained=True).eval()',
        "config = timm.data.resolve_model_data_config(model)",
        "transform = timm.data.create_transform(**config)",
        'image = opened("photo.jpg")',
        "with torch.inference_mode():",
        "    features = model(transform(image)[None])",
    ]


def _cut(view: Preprocessing) -> list[str]:
    """Return the lines that cut the square out of a Pillow image."""
    size, edge = view.image_size, view.resize_to
    if view.crop == "box":
        share = f"(1 if image.size == ({size}, {size}) else {CENTER}) * "
        return [
            f"side = {'' if size < SMALL_IMAGE else share}min(image.size)",
            "left, top = (image.width - side) / 2, (image.height - side) / 2",
            "box = (left, top, left + side, top + side)",
            f"image = image.resize(({size}, {size}), Image.Resampling.BICUBIC, box=box)",
        ]
    resized = f"({edge}, {edge})"
    if view.crop == "center":
        resized = f"({edge} * image.width // short, {edge} * image.height // short)"
    rounding = "round(({}) / 2)" if view.crop_rounding == "even" else "({}) // 2"
    left, top = (rounding.format(f"image.{side} - {size}") for side in ("width", "height"))
    return [
        *(["short = min(image.size)"] if view.crop == "center" else []),
        f"image = image.resize({resized}, Image.Resampling.{view.interpolation.upper()})",
        f"left, top = {left}, {top}",
        f"image = image.crop((left, top, left + {size}, top + {size}))",
    ]


def _columns(summary: Mapping[str, Any]) -> dict[str, dict[str, Metric]]:
    """Return the metrics of each table of a summary, of any kind of run."""
    tables: Mapping[str, Any] = summary.get("metrics", summary.get("scores", {}))
    columns = {}
    for title, column in tables.items():
        entries: Iterable[Any] = column.values() if isinstance(column, Mapping) else column
        columns[title] = {entry["name"]: Metric(**entry) for entry in entries}
    return columns


def _public(config: Config) -> Config:
    """Return settings with names in place of the paths of this computer."""
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    paths: dict[str, Any] = {
        name: without_folder(value)
        for name, value in values.items()
        if isinstance(value, str) and Path(value).is_absolute()
    }
    return replace(config, **paths)


def _listed(classes: Sequence[str]) -> str:
    return ", ".join(f"`{printable(name)}`" for name in classes)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
