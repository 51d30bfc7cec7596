"""What in a folder, an archive or a store is an image, what is passed over, and that this is said."""

import os
import resource
import sys
import tempfile
import unicodedata
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import builders
import numpy as np
import pyarrow as pa
import pytest
from builders import as_bytes, encoded, fill, soft, tar, write_files, write_network
from nearkin_command import run
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from pyarrow import parquet

from nearkin.data.decode import BadImage, decode
from nearkin.data.opening import open_images
from nearkin.errors import DataError, ResourceError, UsageError
from nearkin.places import cache_folder


def noted(images, decision):
    """The one note of a decision."""
    (note,) = [note for note in images.notes if note.decision == decision]
    return note


PACKED = ("folder", "data.tar", "data.zip")


def pack(files, path):
    """The same files as a folder or an archive."""
    return builders.pack(path, files.items()) if path.suffix else write_files(path, files)


@pytest.mark.parametrize("form", PACKED)
def test_what_systems_leave_behind_is_no_image(tmp_path, form):
    files = {f"{name}/{n}.jpg": encoded(n, kind="JPEG") for name in ("cat", "dog") for n in (1, 2)}
    system = ("@eaDir/1.jpg/SYNO_THUMB_M.jpg", "#recycle/x.jpg", "$RECYCLE.BIN/x.jpg",
              "lost+found/x.jpg", "System Volume Information/x.jpg", ".Trash-1000/x.jpg",
              "__MACOSX/cat/._1.jpg", "Thumbs.db", ".@__thumb/x.jpg", "@Recycle/x.jpg",
              ".thumbnails/x.jpg", "desktop.ini", ".DS_Store")  # fmt: skip
    more = {f"{start}{name}": encoded(9, kind="JPEG") for name in system for start in ("", "cat/")}
    images = open_images(pack(files | more, tmp_path / form))
    assert images.names == tuple(sorted(files))
    assert images.classes == ("cat", "dog")
    assert images.bad == ()
    note = noted(images, "left out")
    assert note.count == 26
    assert "26 files (26 hidden)" in str(note)


@pytest.mark.parametrize("form", PACKED)
def test_the_content_decides_whatever_a_file_is_called(tmp_path, form):
    """Of files whose suffix says nothing, a sample is opened; others are counted by suffix."""
    jpeg = [encoded(n, kind="JPEG") for n in range(8)]
    names = ("a.jpg", "b.jfif", "c.jpe", "d.HEIC", "e.jpg_large", "f", "photo.0001", "g.img")
    files = dict(zip(names, jpeg, strict=True))
    avif = as_bytes(soft(1, (64, 48)), "AVIF")
    files |= {"h.avif": avif, "i.jpg": avif}
    raw = encoded(3, kind="TIFF")  # as camera raw begins
    text = {f"{n}.txt": b"hello" for n in range(60)}
    rest = {"README": b"hello", "x.nef": raw, "j.img": b"no image", "y.part": jpeg[0]}
    images = open_images(pack(files | rest | text, tmp_path / form))
    assert images.names == tuple(sorted(files))
    assert [images.read(images.names.index(name)) for name in files] == list(files.values())
    assert images.format_counts == {"JPEG": 8, "AVIF": 2}
    assert images.bad == ()
    kinds = "60 .txt, 1 without a suffix, 1 .nef, 1 .part, 1 .img"
    assert f"left out: 64 files ({kinds}" in str(noted(images, "left out"))


def test_texts_that_begin_like_images_are_none(tmp_path):
    """Captions of BMWs do not make all captions images, nor themselves bad ones."""
    texts = (b"BMW on a street, seen from the left", b"P2P network", b"P3 is a model", b"II\n", b"MM",
             b"P5\nhello", b"P6: a plan", b"RIFF of a guitar", b"GIF, a format", b"P2")  # fmt: skip
    captions = {f"{n:03}.txt": text for n, text in enumerate(texts * 9)} | {"BM": texts[0]}
    bitmap = as_bytes(soft(0, (9, 8)), "PPM").replace(b"P6\n", b"P6\n# made by a program\n")
    images = {"a.bin": encoded(kind="BMP"), "b": bitmap, "c.jpg": encoded(1)}
    found = open_images(write_files(tmp_path, captions | images | {"d.jpg": texts[0]}))
    assert found.names == tuple(images)
    assert found.reasons == {"d.jpg": "text, not an image"}
    assert "91 files (90 .txt, 1 without a suffix)" in str(noted(found, "left out"))
    alone = write_files(tmp_path / "alone", {"a": b"P2\n2 2\n255\n1 2 3 4\n", "b.txt": b"hello"})
    with pytest.raises(DataError, match=r"no images \(found 1 \.txt, 1 without a suffix\); give"):
        open_images(alone)


def test_a_suffix_of_which_one_in_many_is_an_image_is_not_searched(tmp_path):
    files = {f"{n:05}.dat": b"no image" for n in range(3_000)} | {"00001.dat": encoded()}
    images = open_images(write_files(tmp_path, files | {"a.png": encoded()}))
    assert images.names == ("a.png",)
    assert noted(images, "left out").count == 3_000


@pytest.mark.needs("pillow_heif")
def test_avif_and_heic_are_upright_and_cut_ones_are_truncated(tmp_path):
    import_module("pillow_heif").register_heif_opener()
    exif = Image.Exif()
    exif[0x0112] = 6
    image = soft(0, (64, 48))
    turned = image.transpose(Image.Transpose.ROTATE_270)
    # A HEIC has a box for that, which its library applies; its exif does not count.
    for kind, options, upright in (("AVIF", {"exif": exif}, turned), ("HEIF", {}, image)):
        content = as_bytes(image, kind, quality=95, **options)
        write_files(tmp_path, {f"{kind}.bin": content, f"{kind}.heic": content[:-200]})
        got = np.asarray(decode(content)).astype(int)
        assert got.shape[:2] == upright.size[::-1]
        assert np.abs(got - np.asarray(upright)).mean() < 12
    images = open_images(tmp_path, full=True)
    assert images.sizes.tolist() == [[48, 64], [64, 48]]
    assert {bad.reason for bad in images.bad} == {"truncated"}
    assert len(images.bad) == 2


@pytest.mark.needs("pillow_heif")
def test_without_its_library_a_heic_says_what_to_install(tmp_path, monkeypatch, cache):
    import_module("pillow_heif").register_heif_opener()
    write_files(tmp_path, {"a.png": encoded(), "b.heic": as_bytes(soft(0, (64, 48)), "HEIF")})
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    (bad,) = open_images(tmp_path).bad
    assert (bad.name, bad.reason) == ("b.heic", "HEIC; needs pip install 'nearkin[heif]'")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    assert open_images(tmp_path).names == ("a.png", "b.heic")


def test_what_was_bad_is_tried_again_although_the_file_is_the_same(tmp_path, cache):
    fill(tmp_path, "a.png", "b.png")
    path = tmp_path / "b.png"
    state, good = path.stat(), path.read_bytes()
    path.write_bytes(b"x" * len(good))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert open_images(tmp_path).names == ("a.png",)
    path.write_bytes(good)  # the same name, size and time: as after chmod, or a new decoder
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert open_images(tmp_path).names == ("a.png", "b.png")
    assert list(cache.rglob("*.npz"))


def test_too_few_file_handles_are_no_fault_of_the_images(tmp_path):
    images = open_images(fill(tmp_path, "a.png"))
    images.read(0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open() as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), limits[1]))
        try:
            with pytest.raises(ResourceError, match=r"too many open files; .* `ulimit -n 4096`"):
                images.read(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert images.read(0) == encoded()


def test_of_shards_and_pictures_in_one_folder_the_data_are_whichever_are_more(tmp_path):
    shards = {
        f"data/{shard}.tar": tar((f"{n}.png", encoded(10 * shard + n)) for n in range(5))
        for shard in range(3)
    }
    for beside in ("preview.png", "assets/banner.png"):
        files = {beside: encoded(99), "README.md": b"hello"}
        images = open_images(write_files(tmp_path / beside, shards | files))
        assert len(images) == 15
        assert all(".tar/" in name for name in images.names)
        says = "guessed: 15 images in 3 shards are the data, not 1 file beside them, such as"
        assert str(noted(images, "guessed")) == f"{says} {beside!r}"
        assert "1 file (1 .md)" in str(noted(images, "left out"))
    more = fill(tmp_path / "more", *(f"{n}.png" for n in range(6)))
    write_files(more, {"backup.tar": tar([("0.png", encoded())]), "notes.tar": b"no archive"})
    assert len(open_images(more)) == 6
    (more / "notes.tar").unlink()
    images = open_images(more)
    assert len(images) == 6
    assert "6 files are the data, not the images in 1 shard" in str(noted(images, "guessed"))


def test_shards_beside_images_of_which_one_is_cut_off_are_left_out_and_it_is_said_why(tmp_path):
    packed = tar((f"{n}.png", encoded(10 + n)) for n in range(4))
    shards = {f"{n}.tar": packed for n in range(3)} | {"1.tar": packed[:1500]}
    images = open_images(write_files(fill(tmp_path, "a.png", "b.png"), shards))
    assert images.names == ("a.png", "b.png")
    (note,) = [note for note in images.notes if "beside the images" in note.text]
    assert (note.decision, note.count, note.examples) == ("left out", 3, tuple(sorted(shards)))
    cut = f"{tmp_path}/1.tar: not a readable archive (unexpected end of data)"
    assert note.text.startswith(f"3 shards beside the images ({cut}")


def test_of_the_images_of_one_sample_the_photograph_counts(tmp_path):
    fields = {".jpg": 0, ".mask.png": 100, ".depth.png": 200, ".png": 300}
    files = {f"{n:03}{kind}": encoded(n + k) for n in range(4) for kind, k in fields.items()}
    labels = {f"{n:03}.cls": b"%d" % (n % 2) for n in range(4)}
    for name in ("d.tar", "d.zip"):
        images = open_images(pack(files | labels, tmp_path / name))
        assert images.names == tuple(f"{n:03}.jpg" for n in range(4))
        assert images.labels.tolist() == [0, 1, 0, 1]
        text = "12 images (4 .depth.png, 4 .mask.png, 4 .png) beside the one of their sample"
        assert (noted(images, "left out").count, noted(images, "left out").text) == (12, text)
    fields = {".rgb.jpg": 0, ".depth.png": 100, ".seg.png": 200}  # of fields with names, no masks
    files = {f"{n}{kind}": encoded(n + k) for n in range(3) for kind, k in fields.items()}
    images = open_images(pack(files | {"9.mask.png": encoded(9)}, tmp_path / "names.tar"))
    assert images.names == ("0.rgb.jpg", "1.rgb.jpg", "2.rgb.jpg", "9.mask.png")
    assert noted(images, "left out").count == 6
    names = ("0.left.jpg", "0.right.jpg", "photo.2020.jpg", "photo.2021.jpg", "x.jpg", "x.png",
             "y.jpg", "z.jpg", "z/x.jpg")  # fmt: skip
    files = {name: encoded(row) for row, name in enumerate(names)}
    images = open_images(pack(files, tmp_path / "none.tar"))  # that merely begin alike
    assert images.names == tuple(sorted(names))
    assert images.notes == ()


def test_a_snapshot_of_links_as_the_hub_and_dvc_have_them(tmp_path, monkeypatch):
    blobs = [f"{n:040x}" for n in range(6)]
    fill(tmp_path / "blobs", *(f"{blob}.png" for blob in blobs))
    for row, blob in enumerate(blobs):
        (tmp_path / "blobs" / f"{blob}.png").rename(tmp_path / "blobs" / blob)
        link = tmp_path / "snapshots" / "0abc" / ("cat", "dog")[row % 2] / f"{row}.png"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../../blobs/{blob}")
    with pytest.raises(DataError, match=r"no images .*6 links out of .*; NEARKIN_LINKS=follow"):
        open_images(tmp_path / "snapshots" / "0abc")
    monkeypatch.setenv("NEARKIN_LINKS", "everywhere")
    with pytest.raises(UsageError, match="NEARKIN_LINKS 'everywhere' is not inside or follow"):
        open_images(tmp_path / "snapshots" / "0abc")
    monkeypatch.setenv("NEARKIN_LINKS", "follow")
    for images in (open_images(tmp_path / "snapshots" / "0abc") for _ in range(2)):
        assert images.classes == ("cat", "dog")
        assert [images.read(row) for row in (0, 3)] == [encoded(0), encoded(1)]
        assert images.bad == ()
        assert "6 links out of" in str(noted(images, "guessed"))
    assert open_images(tmp_path / "blobs").names == tuple(blobs)


def test_a_table_may_list_files_anywhere(tmp_path):
    fill(tmp_path / "pool", "a/1.png", "b/2.png")
    fill(tmp_path / "list", "3.png")
    pool = tmp_path / "pool"
    (tmp_path / "list" / "link").symlink_to(pool / "b")  # which a table follows wherever it leads
    rows = f"path,label\n{pool}/a/1.png,x\n../pool/b/2.png,y\n3.png,x\n{tmp_path}/list/./3.png,x\n"
    (tmp_path / "list" / "t.csv").write_text(rows + "link/2.png,y\n")
    images = open_images(tmp_path / "list" / "t.csv")
    assert images.names == ("list/3.png", "list/link/2.png", "pool/a/1.png", "pool/b/2.png")
    assert images.labels.tolist() == [0, 1, 0, 1]
    assert [images.read(row) for row in (1, 2)] == [encoded(1), encoded(0)]
    assert f"renamed: 4 images by their paths below {tmp_path}" in str(noted(images, "renamed"))


def test_raw_files_are_not_read_where_a_table_or_a_list_names_them_either(tmp_path):
    """What a decoder finds in them is a thumbnail."""
    names = ("a.png", "raw.NEF", "half.jpg.part")
    write_files(tmp_path, dict.fromkeys(names, encoded(kind="TIFF")))
    (tmp_path / "t.csv").write_text("path\n" + "\n".join(names) + "\n")
    bad = {f"{name}": f"{end} is not read; convert it first"
           for name, end in (("raw.NEF", ".nef"), ("half.jpg.part", ".part"))}  # fmt: skip
    for data in (tmp_path / "t.csv", [tmp_path / name for name in names]):
        images = open_images(data)
        assert images.names == ("a.png",)
        assert images.reasons == bad


def test_names_are_composed_and_read_by_how_they_are_spelled(tmp_path):
    """A file of a Mac has the name that its user types elsewhere; two that differ stay two."""
    split = unicodedata.normalize("NFD", "café")
    files = {f"{split}/{n}.png": encoded(n) for n in range(3)} | {"tee/1.png": encoded(7)}
    files |= {"tee/2.png": encoded(8)}
    colons = {"12:30:05.png": encoded(), "c:/x.png": encoded(1)}
    for form in PACKED:
        images = open_images(pack(colons, tmp_path / "colons" / form))
        assert (images.names, images.bad) == (tuple(colons), ())
        images = open_images(pack(files, tmp_path / form))
        assert images.classes == ("café", "tee"), form
        assert images.names[:3] == ("café/0.png", "café/1.png", "café/2.png")
        assert images.read(2) == encoded(2)
        assert noted(images, "renamed").count == 3
    both = files | {f"café/{n}.png": encoded(n + 9) for n in range(2)}  # one class of two folders
    images = open_images(pack(both, tmp_path / "both"), cache=False)
    assert (images.classes, np.bincount(images.labels).tolist()) == (("café", "tee"), [5, 2])
    assert "\\u0301" in "".join(noted(images, "merged").examples)
    (tmp_path / "t.csv").write_text(f"path,label\nfolder/café/1.png,a\nfolder/{split}/2.png,b\n")
    images = open_images(tmp_path / "t.csv")
    assert images.names == ("folder/café/1.png", "folder/café/2.png")
    assert (images.read(0), images.labels.tolist()) == (encoded(1), [0, 1])


def test_text_and_profiles_of_any_size_do_not_cost_an_image(tmp_path):
    info, turned = PngInfo(), PngInfo()
    info.add_text("prompt", "x" * 2_000_000, zip=True)
    for key in range(70):
        info.add_itxt(f"k{key}", "y" * 1_000_000, zip=True)
    exif = (
        b"\nexif\n      38\n"
        + (b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0").hex().encode()
    )
    turned.add_text("Raw profile type exif", exif.decode())
    turned.add_text("prompt", "x" * 2_000_000, zip=True)
    image, profile = soft(0, (40, 30)), np.random.default_rng(0).bytes(2_000_000)
    files = {
        "text.png": as_bytes(image, pnginfo=info),
        "profile.png": as_bytes(image, icc_profile=profile),
        "turned.png": as_bytes(image, pnginfo=turned),
        "both.jpg": as_bytes(image, "JPEG", icc_profile=profile[:500_000]),
    }
    images = open_images(write_files(tmp_path, files), full=True)
    assert images.names == tuple(sorted(files))
    assert images.sizes.tolist() == [[40, 30], [40, 30], [40, 30], [30, 40]]
    assert (np.asarray(decode(files["text.png"])) == np.asarray(image)).all()
    assert (np.asarray(decode(files["profile.png"])) == np.asarray(image)).all()


def test_a_large_jpeg_is_halved_and_the_limit_can_be_raised(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARKIN_MAX_PIXELS", "0.01M")
    files = {"a.jpg": encoded(0, (180, 120), "JPEG"), "b.jpg": encoded(1, (300, 200), "JPEG")}
    files |= {"c.png": encoded(2, (120, 90)), "d.png": encoded(3, (100, 90))}
    images = open_images(write_files(tmp_path, files), full=True)
    assert images.names == ("a.jpg", "d.png")
    assert images.sizes.tolist() == [[180, 120], [100, 90]]
    assert decode(images.read(0)).size == (90, 60)
    assert images.reasons["b.jpg"] == "too-large: 300x200 pixels; see NEARKIN_MAX_PIXELS"
    assert images.reasons.keys() == {"b.jpg", "c.png"}
    monkeypatch.setenv("NEARKIN_MAX_PIXELS", "60000")
    assert len(open_images(tmp_path)) == 4
    monkeypatch.setenv("NEARKIN_MAX_PIXELS", "many")
    with pytest.raises(UsageError, match="NEARKIN_MAX_PIXELS 'many' is no number; say 200M"):
        open_images(tmp_path)


@pytest.mark.parametrize("form", PACKED)
def test_a_file_of_too_many_bytes_is_bad(tmp_path, monkeypatch, form):
    for module in ("decode", "scan"):
        monkeypatch.setattr(f"nearkin.data.{module}.MAX_BYTES", 5000)
    deep = as_bytes(Image.fromarray(np.zeros((9, 9), np.uint16)), "TIFF")
    files = {"a.png": encoded(), "b.png": encoded(1) + bytes(5000), "c.tif": deep + bytes(5000)}
    images = open_images(pack(files, tmp_path / form))
    assert images.names == ("a.png",)
    assert images.reasons == dict.fromkeys(("b.png", "c.tif"), "too-large")
    with pytest.raises(BadImage, match="too-large"):
        decode(files["b.png"])


def test_pillows_own_limit_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert len(open_images(fill(tmp_path, "a.png"), full=True)) == 1
    assert Image.MAX_IMAGE_PIXELS == 100


def test_a_file_that_cannot_be_looked_at_costs_no_other(tmp_path, monkeypatch):
    """As one whose path is too long for the system; beside it are files, and a folder."""
    long, path = "x" * 50 + ".png", tmp_path
    while (left := 4080 - len(str(path))) > 1:
        path /= "d" * min(left - 1, 200)
    (path / "e").mkdir(parents=True)
    monkeypatch.chdir(path)
    for name in ("a.png", "e/b.png", long, "z.png"):
        Path(name).write_bytes(encoded())
    images = open_images(tmp_path, cache=False)
    below = path.relative_to(tmp_path)
    assert images.names == tuple(f"{below}/{name}" for name in ("a.png", "e/b.png", "z.png"))
    assert [(file.name, file.reason) for file in images.bad] == [(f"{below}/{long}", "unreadable")]


def test_paths_that_cannot_be_looked_at_are_one_line(tmp_path, refusal, monkeypatch):
    monkeypatch.chdir(tmp_path)
    long = "x" * 300
    for command in (["check", long], ["embed", long, "d", "-o", "x.npz"], ["check", f"{long}/a"],
                    ["train", "digits", "--encoder", long]):  # fmt: skip
        assert "name too long" in refusal(3, *command)
    fill(tmp_path, "~old/a.png", "~old/b.png")
    assert len(open_images("~old")) == 2
    with pytest.raises(DataError, match="~nobody-here: no such file"):
        open_images("~nobody-here")
    assert "data '' is no path; give the one of your images" in refusal(2, "check", "")


@contextmanager
def somebody():
    """As a user who is in no list of users, and has no home."""
    os.setresuid(54321, 54321, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only a superuser can become somebody else")
def test_nobody_without_a_home_checks_images_and_is_told_what_is_locked(monkeypatch, refusal):
    with tempfile.TemporaryDirectory() as path:  # whose parents, unlike tmp_path's, all may enter
        Path(path).chmod(0o777)
        monkeypatch.chdir(path)
        fill(Path(path) / "open", *(f"{n}.png" for n in range(4)))
        fill(Path(path) / "secret" / "photos", "a.png")
        secret = f"{path}/secret/photos"
        commands = (
            *(["check", secret], ["check", "open", "--labels", f"{secret}/t.csv"]),
            *(["embed", secret, "open", "-o", "x.npz"], ["neighbors", secret, "open/0.png"]),
            ["train", "open", "--encoder", secret, "-o", "r"],
        )
        for command in commands:
            run(*command)  # so that all is imported, which somebody else may not read
        (Path(path) / "secret").chmod(0o700)
        (Path(path) / "locked").mkdir(0)
        write_files(Path(path) / "open" / "half", {"x.png": encoded(5)}).chmod(0o644)
        monkeypatch.delenv("HOME")
        with somebody():
            assert cache_folder("index").exists() is False
            images = open_images("open")
            assert images.names == ("0.png", "1.png", "2.png", "3.png")
            assert [(bad.name, bad.reason) for bad in images.bad] == [("half/x.png", "unreadable")]
            for command in commands:
                line = refusal(3, *command)
                assert "ermission denied" in line
                assert secret in line


def test_folders_of_masks_are_images_and_this_is_said(tmp_path):
    fill(tmp_path, *(f"{kind}/{n}.png" for kind in ("images", "Masks") for n in range(3)))
    note = next(note for note in open_images(tmp_path).notes if "masks" in note.text)
    assert (note.decision, note.count, note.examples[0]) == ("guessed", 3, "Masks/0.png")
    assert not any("masks" in n.text for n in open_images(tmp_path / "Masks").notes)
    assert not any("masks" in n.text for n in open_images(tmp_path / "images").notes)


def test_a_table_without_images_is_no_shard(tmp_path):
    """Metadata as Parquet lies beside the shards of many data sets, and beside images."""
    parquet.write_table(pa.table({"file": ["0.png"], "width": [20]}), tmp_path / "info.parquet")
    with pytest.raises(DataError, match=r"info\.parquet: no column of images among: file, width"):
        open_images(tmp_path)
    write_files(tmp_path, {"0.tar": tar([(f"{n}.png", encoded(n)) for n in range(3)])})
    images = open_images(tmp_path)
    assert len(images) == 3
    assert "1 file (1 .parquet)" in str(noted(images, "left out"))
    fill(tmp_path, *(f"{n}.png" for n in range(5)))
    assert len(open_images(tmp_path)) == 5


def test_a_folder_that_two_links_lead_to_is_read_once_and_said_so(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARKIN_LINKS", "follow")
    fill(tmp_path / "pool", "1.png", "2.png")
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "pool")
    images = open_images(tmp_path / "data")
    assert images.names == ("a/1.png", "a/2.png")
    assert noted(images, "left out").examples == ("b",)


def test_commands_take_a_folder_as_people_have_it(tmp_path, capsys):
    """Formats, modes and turns of all kinds by any names, with what systems leave behind."""
    exif, modes = Image.Exif(), ("RGB", "L", "P", "RGBA", "1")
    exif[0x0112] = 6
    kinds = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF")
    files = {f"cat/{n}.jpg": as_bytes(soft(n, (80, 70)), kind) for n, kind in enumerate(kinds)}
    files |= {f"dog/{m}.png": as_bytes(soft(9, (60, 20)).convert(m)) for m in modes}
    files |= {f"dog/{n}.HEIC": as_bytes(soft(n, (80, 70)), "JPEG", exif=exif) for n in (20, 21)}
    odd = ("-d.jpg", "e'\"f.jpg", "\U0001f408.jpg", "%41.jpg", "line\nbreak.jpg", "cafe\u0301.jpg")
    odd += (os.fsdecode(b"\xff.jpg"),)
    files |= {f"cat/{name}": encoded(30 + n) for n, name in enumerate(odd)}
    litter = ("cat/._0.jpg", "dog/Thumbs.db", "desktop.ini", "cat/@eaDir/0.jpg/T_M.jpg")
    files |= {"preview.jpg": encoded(50)} | dict.fromkeys(litter, bytes(80))
    data = write_files(tmp_path / "data", files)
    (data / "latest").symlink_to("/gone")
    (data / "loop").symlink_to(data)
    encoder = write_network(tmp_path / "encoder.safetensors")
    assert run("check", data) == 0
    tiny = "--backbone tiny --image-size 16 --batch-size 2 --epochs 1 -q"
    assert run("train", data, *tiny.split(), "-o", tmp_path / "run") == 0
    assert run("embed", encoder, data, "-o", tmp_path / "features.npz") == 0
    assert len(np.load(tmp_path / "features.npz")["path"]) == len(files) - len(litter)
    assert "a bug in nearkin" not in capsys.readouterr().err
