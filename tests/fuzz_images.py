"""Damage images at random, decode them, and see that nothing crashes and nothing hangs.

    python tests/fuzz_images.py COUNT SEED

Starts from small images of every format and, where they are at hand, from the files that have
crashed decoders in the past. Decodes as a run does, in processes with a limit on memory and time.
Prints a JSON object: images, accepted, refused by reason, crashes, hangs. Of the last two each has
a seed, and COUNT 1 with that SEED repeats it. Imports once and forks for every image.
"""

import json
import os
import random
import resource
import signal
import struct
import sys
import tarfile
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np
from builders import as_bytes, soft
from needs import SHARED
from PIL import Image
from processes import fork

from nearkin.data.decode import FORMATS, BadImage, center, crops, decode, header
from nearkin.data.scan import PREFIX

ODD = SHARED / "odd_images" / "odd_images.tar"
MODES = {
    "AVIF": ("L", "RGB", "RGBA"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "GIF": ("1", "L", "P", "RGB"),
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "PPM": ("L", "RGB", "I"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "LAB", "I;16", "I", "F"),
    "WEBP": ("RGB", "RGBA"),
}
VARIANTS = {
    "GIF": ({"interlace": True},),
    "JPEG": ({"progressive": True}, {"subsampling": 0, "quality": 100}),
    "PNG": ({"compress_level": 0},),
    "TIFF": ({"compression": "tiff_lzw"}, {"compression": "tiff_adobe_deflate"}),
    "WEBP": ({"lossless": True},),
}
MEMORY = 6 << 30
SECONDS = 5.0
"""Of computing, for one image. A machine that is busy elsewhere makes no hang."""
HUNG = "hung"

Judge = Callable[[int], str]
"""What becomes of the image with a seed: 'accepted', or the reason why it is refused."""


def generated() -> Iterator[bytes]:
    """Images of every format and mode that can be written, plain, animated and turned."""
    smooth, exif = soft(0, (54, 40)), Image.Exif()
    exif[0x0112] = 6
    for kind in FORMATS:
        for mode in MODES[kind]:
            for options in ({}, *VARIANTS.get(kind, ())):
                yield as_bytes(converted(smooth, mode), kind, **options)
        if kind not in ("BMP", "JPEG", "PPM"):
            yield as_bytes(smooth, kind, save_all=True, append_images=[smooth.rotate(180)])
        if kind not in ("BMP", "GIF", "PPM"):
            yield as_bytes(smooth, kind, exif=exif)


def converted(image: Image.Image, mode: str) -> Image.Image:
    if mode == "LAB":  # any three bytes are a color of it
        return Image.frombytes("LAB", image.size, image.tobytes())
    if mode == "I;16":
        return image.convert("I").convert(mode)
    return image.convert(mode)


@cache
def corpus() -> list[bytes]:
    """All files to start from; the generated ones as often as the others, together."""
    made, odd = list(generated()), []
    if ODD.exists():
        with tarfile.open(ODD) as tar:
            members = sorted((m for m in tar if m.isfile()), key=lambda member: member.name)
            odd = [tar.extractfile(member).read() for member in members]
    return made * max(1, len(odd) // len(made)) + odd


def damaged(seed: int) -> bytes:
    """The image with this seed."""
    rng = random.Random(seed)
    files = corpus()
    data = bytearray(rng.choice(files))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        damage = rng.choice((flip, overwrite, delete, insert, repeat, cut, splice))
        data = damage(rng, data, files)
    if data[:4] == b"\x89PNG" and rng.random() < 0.8:
        mend(data)
    return bytes(data)


def place(rng: random.Random, data: bytearray) -> int:
    """A position, at times near the beginning, where headers are."""
    end = len(data) if rng.random() < 0.85 else min(len(data), 200)
    return rng.randrange(end + 1)


def flip(rng: random.Random, data: bytearray, _: object) -> bytearray:
    for _ in range(rng.randint(1, 8)):
        at = place(rng, data)
        if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
    return data


def overwrite(rng: random.Random, data: bytearray, _: object) -> bytearray:
    at, length = place(rng, data), rng.choice((1, 2, 4, 64))
    value = rng.choice((b"\0", b"\xff", b"\x7f", b"\x80", rng.randbytes(1)))
    data[at : at + length] = value * min(length, len(data) - at)
    return data


def delete(rng: random.Random, data: bytearray, _: object) -> bytearray:
    at = place(rng, data)
    del data[at : at + rng.choice((1, 2, 4, 100, 1000))]
    return data


def insert(rng: random.Random, data: bytearray, _: object) -> bytearray:
    at = place(rng, data)
    data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 100)))
    return data


def repeat(rng: random.Random, data: bytearray, _: object) -> bytearray:
    at, length = place(rng, data), rng.choice((4, 100, 1000))
    data[at:at] = data[at : at + length] * rng.choice((1, 1, 50))
    return data


def cut(rng: random.Random, data: bytearray, _: object) -> bytearray:
    del data[place(rng, data) :]
    return data


def splice(rng: random.Random, data: bytearray, files: list[bytes]) -> bytearray:
    other = rng.choice(files)
    return data[: place(rng, data)] + other[rng.randrange(len(other) + 1) :]


def mend(data: bytearray) -> None:
    """Write the checksums of a PNG anew, or what is behind them would rarely be decoded."""
    at = 8
    while at + 12 <= len(data):
        end = at + 8 + struct.unpack_from(">I", data, at)[0]
        if end + 4 > len(data):
            return
        struct.pack_into(">I", data, end, zlib.crc32(data[at + 4 : end]))
        at = end + 4


def judge(seed: int) -> str:
    """Take the image with this seed as a run does: its header, all of it, a view, crops of it."""
    data = damaged(seed)
    try:
        try:
            header(data[:PREFIX])
        except BadImage:
            header(data)
        whole = decode(data)
        assert whole.mode == "RGB"
        assert center(data, 32).shape == (32, 32, 3)
        assert len(crops(data, np.array([[0.1, 0.2, 0.5, 0.4]]), [16])) == 1
    except BadImage as error:
        return error.reason
    return "accepted"


def tell(judge: Judge, seed: int, report: int, seconds: float) -> None:
    """In a process of its own: say what becomes of an image."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where decoders complain
    warnings.simplefilter("error")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the limit of the test is not for this process
    signal.setitimer(signal.ITIMER_PROF, seconds)  # whose signal ends the process
    signal.alarm(round(20 * seconds) + 1)  # in case that it waits, and computes nothing
    try:
        verdict = judge(seed)
    except Exception as error:
        verdict = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
    os.write(report, verdict.encode())


def verdict(judge: Judge, seed: int, seconds: float) -> str:
    """What a process tells, or how it ends before."""
    with tempfile.TemporaryFile() as report:
        child = fork(partial(tell, judge, seed, report.fileno(), seconds))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        report.seek(0)
        told = report.read().decode()
    if -code in (signal.SIGPROF, signal.SIGALRM):
        return HUNG
    end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"ended by {end}" if code else told


def fuzz(judge: Judge, seeds: range, seconds: float = SECONDS) -> dict[str, object]:
    """The verdicts on all seeds, counted."""
    results = {seed: verdict(judge, seed, seconds) for seed in seeds}
    hangs = sorted(seed for seed, verdict in results.items() if verdict == HUNG)
    crashes = {s: v for s, v in sorted(results.items()) if v.startswith(("raised", "ended"))}
    usual = Counter(v for s, v in results.items() if s not in hangs and s not in crashes)
    counts = {"images": len(results), "accepted": usual.pop("accepted", 0)}
    return counts | {"refused": dict(usual.most_common()), "crashes": crashes, "hangs": hangs}


if __name__ == "__main__":
    count, seed = map(int, sys.argv[1:])
    corpus()
    sys.stdout.write(json.dumps(fuzz(judge, range(seed, seed + count))) + "\n")
