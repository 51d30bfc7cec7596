"""Images in a store: read as those of a folder, tried again with limits, never a secret in a file."""

import shutil

import numpy as np
import pytest
from builders import tar, write_files
from nearkin_command import run
from needs import need
from stores import FORMS, IMAGES, Faults, Store, serving

from nearkin.data import remote
from nearkin.data.opening import open_images
from nearkin.data.union import union
from nearkin.errors import DataError, UsageError, redacted
from nearkin.labels.known import recognize

need("aiohttp")


@pytest.fixture(autouse=True)
def cached(cache, monkeypatch):
    """The cache of blocks, empty at first; and little patience."""
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    monkeypatch.setattr(remote, "TIMEOUT", 0.5)
    remote._failed.clear()
    return cache / "remote"


@pytest.mark.parametrize("form", FORMS)
def test_a_store_is_read_as_files_are(form, tmp_path):
    files = FORMS[form]
    with serving(Store(files)) as server:
        images = open_images(f"{server}/{form}")
        expected = open_images(f"{write_files(tmp_path, files)}/{form}")
        for field in ("names", "classes", "labels", "sizes", "bad"):
            assert np.array_equal(getattr(images, field), getattr(expected, field)), field
        assert images.bad == ()
        for row in range(len(images)):
            assert np.array_equal(images.read(row), expected.read(row))


def test_a_name_in_a_store_may_have_marks_that_end_addresses_of_pages():
    assert remote.RemoteFile("s3://bucket/a#1?.parquet", 1, 0).suffix == ".parquet"
    assert remote.RemoteFile("https://host/a.tar?sig=x.png#y", 1, 0).suffix == ".tar"


def test_a_size_of_the_cache_that_is_none_is_said_of_archives_too(refusal, monkeypatch):
    monkeypatch.setenv("NEARKIN_REMOTE_CACHE", "many")
    with serving(Store(FORMS["photos.tar"])) as server:
        says = "error: NEARKIN_REMOTE_CACHE 'many' is no size; say 50G, or 0"
        assert refusal(2, "check", f"{server}/photos.tar").strip() == says


def test_names_over_http_are_those_of_the_files(tmp_path):
    """A page of links spells them percent-encoded; a table does not."""
    names = ("golden retriever/1.jpg", "golden retriever/2.jpg", "100%/a+b.jpg", "100%/ä&#.jpg")
    files = dict(zip(names, IMAGES.values(), strict=False))
    rows = "".join(f"{name},{name[0]}\n" for name in names)
    files |= {"list.csv": f"path,label\n{rows}".encode(), "readme.txt": b"hello"}
    with serving(Store({f"my photos/{name}": content for name, content in files.items()})) as at:
        url = f"{at}/my%20photos/"
        listed, named = open_images(url), open_images(f"{url}list.csv")
        for images in (listed, named):
            assert images.names == tuple(sorted(names))
            read = [images.read(row) for row in range(4)]
            assert read == [files[name] for name in images.names]
        assert listed.classes == ("100%", "golden retriever")
        (note,) = listed.notes
        assert str(note).startswith("left out: 2 files (1 .csv, 1 .txt)")


def test_an_image_is_read_by_its_address_as_it_is():
    """Percent-encoded, and with a signature that the store asks for."""
    name = "my cats/100% ä.jpg"

    class Signed(Store):
        def answer(self, method, path, headers, body):
            if not path.endswith("?sig=a%2Bb"):
                return 403, [], b""
            return super().answer(method, path.removesuffix("?sig=a%2Bb"), headers, body)

    with serving(Signed({name: IMAGES["cat/00.jpg"]})) as server:
        images = open_images(f"{server}/my%20cats/100%25%20%C3%A4.jpg?sig=a%2Bb")
        assert images.names == ("100% ä.jpg",)
        assert images.read(0) == IMAGES["cat/00.jpg"]


def test_a_raw_file_of_a_table_is_not_read():
    files = dict.fromkeys(("a.jpg", "b.nef"), IMAGES["cat/00.jpg"])
    with serving(Store(files | {"t.csv": b"path\na.jpg\nb.nef\n"})) as server:
        images = open_images(f"{server}/t.csv")
    assert images.names == ("a.jpg",)
    assert [file.reason for file in images.bad] == [".nef is not read; convert it first"]


def fetched(store):
    """The files that were asked for, as often as they were."""
    return [path for method, path in store.requests if method == "GET" and path[-1] != "/"]


@pytest.mark.parametrize("form", ["photos/", "shards/"])
def test_blocks_are_fetched_once_and_members_listed_once(form, cached):
    store = Store(FORMS[form])
    with serving(store) as server:
        url = f"{server}/{form}"
        images = open_images(url)
        images.source.warm(range(len(images)))
        assert sorted(fetched(store)) == sorted(f"/{name}" for name in FORMS[form])
        store.requests.clear()
        again = open_images(url)
        assert [again.read(row) for row in range(8)] == [images.read(row) for row in range(8)]
        assert again.fingerprint == images.fingerprint
        assert fetched(store) == []
        shutil.rmtree(cached)
        open_images(url)  # the lists of members and the headers are stored
        assert not cached.exists()


def test_the_images_of_a_store_in_a_union_are_fetched_at_once(tmp_path):
    files = {f"{n}.jpg": IMAGES[name] for n, name in enumerate(IMAGES)}
    store = Store({f"a/{name}": content for name, content in files.items()} | FORMS["photos.tar"])
    with serving(store) as server:
        loose, packed = (open_images(f"{server}/{path}") for path in ("a/", "photos.tar"))
        here = open_images(write_files(tmp_path, files))
        images = union(union(here, loose, "loose/"), packed, "packed/")
        shutil.rmtree(remote.cache_folder("remote"))
        store.requests.clear()
        images.source.warm([row for row in range(24) if row != 9])
        assert len(fetched(store)) == 8  # seven files and the archive
        store.fault = lambda *_: "503"
        assert [images.read(row) for row in range(24) if row != 9]


def test_another_content_of_the_same_size_is_seen():
    store = Store(dict(FORMS["shards/"]))
    with serving(store) as server:
        before = open_images(f"{server}/shards/")
        content = bytearray(store.files["shards/000000.tar"])
        content[600] ^= 1
        store.files["shards/000000.tar"] = bytes(content)
        after = open_images(f"{server}/shards/")
        assert after.names == before.names
        assert after.num_bytes.tolist() == before.num_bytes.tolist()
        assert after.fingerprint != before.fingerprint
        assert after.read(0) != before.read(0)


def test_large_files_are_read_in_blocks_and_the_cache_keeps_to_its_limit(monkeypatch, cached):
    monkeypatch.setattr(remote, "BLOCK", 1000)
    store = Store(FORMS["photos.tar"])
    with serving(store) as server:
        images = open_images(f"{server}/photos.tar")
        expected = [IMAGES[name] for name in images.names]
        assert [images.read(row) for row in range(8)] == expected
        assert 30 < len(list(cached.iterdir())) <= -(-len(store.files["photos.tar"]) // 1000)
        for path in sorted(cached.iterdir())[::3]:
            path.write_bytes(b"half")
        assert [images.read(row) for row in range(8)] == expected
        shutil.rmtree(cached)
        monkeypatch.setenv("NEARKIN_REMOTE_CACHE", "10K")
        for _ in range(3):
            assert [images.read(row) for row in range(8)] == expected
            assert sum(path.stat().st_size for path in cached.iterdir()) <= 12_000
        monkeypatch.setenv("NEARKIN_REMOTE_CACHE", "0")
        shutil.rmtree(cached)
        store.requests.clear()
        assert images.read(3) == expected[3]
        assert len(store.requests) == 1
        assert not cached.exists()
    monkeypatch.setenv("NEARKIN_REMOTE_CACHE", "many")
    with pytest.raises(UsageError, match="say 50G"):
        remote.cache_limit()


@pytest.mark.parametrize(
    ("form", "fault"),
    [*(("photos/", fault) for fault in ("503", "cut", "drop", "wait 0.8")), ("shards/", "cut")],
)
def test_what_fails_at_times_is_tried_again(form, fault):
    store = Store(FORMS[form])
    store.fault = Faults(fault, 2, ".jpg", ".tar")
    with serving(store) as server:
        images = open_images(f"{server}/{form}")
        assert (len(images), images.bad) == (8, ())


def test_what_always_fails_is_bad_and_not_remembered_as_bad(monkeypatch):
    monkeypatch.setattr(remote, "REMEMBERED", 0.0)
    bad, reasons = ("cat/04", "dog/05"), dict.fromkeys(("503", "cut", "wait 2"), "unreachable")
    for fault, reason in (reasons | {"403": "forbidden", "404": "not found"}).items():
        store = Store(FORMS["photos/"])
        store.fault = Faults(fault, 10**9, *bad)
        with serving(store) as server:
            url = f"{server}/photos/"
            images = open_images(url)
            tries = remote.ATTEMPTS if reason == "unreachable" else 1
            assert [fetched(store).count(f"/photos/{path}.jpg") for path in bad] == [tries] * 2
            assert images.reasons == {f"{path}.jpg": reason for path in bad}, fault
            assert len(images) == 6
            store.fault = Faults("", 0)
            assert len(open_images(url)) == 8


def test_credentials_that_expire_end_the_command_in_one_line():
    store = Store(FORMS["photos/"])
    with serving(store) as server:
        images = open_images(f"{server}/photos/")
        shutil.rmtree(remote.cache_folder("remote"))
        images.read(0)
        store.fault = Faults("403", 10**9, "cat", "dog")
        with pytest.raises(DataError, match="access is denied by now"):
            images.read(7)


def test_copies_of_a_file_without_a_tag_are_of_one_start_alone(monkeypatch):
    file = remote._described("https://h/x.tar", {"size": 9})
    assert file.tag == 0  # as of a file without a time
    before = file.path(0)
    assert file.path(0) == before
    monkeypatch.setattr(remote, "STARTED", 1)
    assert file.path(0) != before


def test_what_failed_is_not_asked_for_again_at_once():
    store = Store(FORMS["photos/"])
    with serving(store) as server:
        images = open_images(f"{server}/photos/")
        shutil.rmtree(remote.cache_folder("remote"))
        store.fault = Faults("404", 10**9, "cat/04")
        store.requests.clear()
        for _ in range(3):
            images.source.warm(range(8))
        assert store.requests.count(("GET", "/photos/cat/04.jpg")) == 1


def test_a_store_that_says_no_is_one_line(refusal):
    whole = tar(IMAGES.items())
    more = {"notes/a.txt": b"no image", "cut/0.tar": whole, "cut/1.tar": whole[:9000]}
    silent = "the store does not answer; check the address"
    for path, fault, line in (
        ("/no/such.tar?sig=c0ffee", "", "/no/such.tar: nothing is there; check the spelling"),
        ("/empty/", "", "nothing is there; check the spelling"),
        ("/photos.tar", "403", "access denied; set the credentials"),
        ("/photos.tar", "503", silent),
        ("/notes/", "", "no images (found 1 .txt)"),
        ("/shards/{000000..000002}.tar", "", "000002.tar: nothing is there"),
        ("/cut/", "", "cut/1.tar: not a readable archive (unexpected end of data); pack it again"),
    ):
        store = Store(FORMS["photos.tar"] | FORMS["shards/"] | more)
        store.fault = lambda _method, _path, fault=fault: fault
        with serving(store) as server:
            assert line in refusal(3, "check", f"{server}{path}"), (path, fault)


def test_a_server_that_is_not_there_or_has_no_ranges_is_one_line(refusal, monkeypatch):
    with serving(Store()) as server:
        pass
    assert refusal(3, "check", f"{server}/photos/") == (
        f"error: {server}/photos/: the store does not answer; check the address and the network, "
        "and try again"
    )
    says = "error: gopher://host/: not a kind of store that is known"
    assert refusal(2, "check", "gopher://host/x").startswith(says)
    monkeypatch.setattr(remote, "BLOCK", 1000)
    store = Store(FORMS["photos.tar"])
    store._file = lambda content, _wanted: (200, [], content)
    with serving(store) as server, pytest.raises(DataError, match="HTTP ranges"):
        open_images(f"{server}/photos.tar")


def test_secrets_are_shown_nowhere(tmp_path, cache, cached, capsys, monkeypatch):
    """A password, and the signature of an address, are sent, and written nowhere."""
    monkeypatch.chdir(tmp_path)
    store = Store(FORMS["photos.tar"])
    quick = ("--backbone", "tiny", "--image-size", 16, "--batch-size", 4, "--epochs", 1, "-o")
    with serving(store) as server:
        address = f"{server}/photos.tar"
        url = address.replace("//", "//me:hunter2@") + "?X-Amz-Signature=c0ffee"
        assert run("train", url, *quick, "run", "--report") == 0
        assert all("X-Amz-Signature=c0ffee" in path for _, path in store.requests)
        store.fault = lambda _method, _path: "503"
        shutil.rmtree(cached)
        assert run("train", url, *quick, "run2") == 3
    paths = [path for root in (tmp_path, cache) for path in root.rglob("*")]
    texts = [*capsys.readouterr(), *map(str, paths)]
    assert any(address in text for text in texts)
    contents = [path.read_bytes() for path in paths if path.is_file()]
    for secret in ("hunter2", "c0ffee"):
        assert not [text for text in texts if secret in text]
        assert not [content for content in contents if secret.encode() in content]


def test_labels_lie_in_a_store_too(tmp_path):
    labels = "path,label\n" + "".join(f"{name},{name[-5]}\n" for name in IMAGES)
    with serving(Store({"labels.csv": labels.encode()} | FORMS["photos.tar"])) as server:
        folder = write_files(tmp_path, IMAGES)
        images = open_images(folder, labels=f"{server}/labels.csv")
        assert images.classes == tuple("01234567")
        by_path = recognize(open_images(folder), f"{server}/labels.csv")
        assert by_path.classes == {name: name[-5] for name in IMAGES}
        known = recognize(open_images(folder), f"{server}/photos.tar")
        assert (len(known.outside), known.prefix) == (8, f"{server}/photos.tar/")


def test_an_address_is_redacted_and_settings_that_are_stored_hold_no_secret(refusal):
    for url in ("https://me:pw@host/a?sig=1#x", "https://host/a"):
        assert redacted(url) == "https://host/a"
    assert redacted("photos?/a@b#c") == "photos?/a@b#c"
    said = refusal(2, "train", "digits", "--labels", "https://me:pw@host/t.csv?sig=1")
    assert "--labels https://host/t.csv: password or signature" in said
