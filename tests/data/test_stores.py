"""Training on a real S3 server behind a proxy that fails: the same bits, or one line."""

import contextlib
import tomllib

import pytest
from builders import tar, write_files
from nearkin_command import run
from safetensors.torch import load_file
from stores import FORMS, IMAGES, Faults, Store, jpeg, serving

from nearkin.data import remote
from nearkin.data.opening import open_images
from nearkin.tables import read_csv

pytestmark = [pytest.mark.slow, pytest.mark.needs("s3")]
QUICK = ("--backbone", "tiny", "--image-size", 16, "--batch-size", 4, "--epochs", 2, "--val", 0)
GONE = "the store does not answer any more; what is done"


@pytest.fixture(autouse=True)
def patience(cache, monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    remote._failed.clear()


@pytest.fixture(scope="module")
def server():
    from moto.server import ThreadedMotoServer

    started = ThreadedMotoServer(port=0, verbose=False)
    started.start()
    yield started.get_host_and_port()
    started.stop()


@pytest.fixture
def store(server, monkeypatch):
    """A proxy before it; the environment has address and credentials."""
    proxy = Store(upstream=server)
    with serving(proxy) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAHUNTER2")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "c0ffeec0ffee")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setattr(remote, "TIMEOUT", 3.0)
        remote._filesystem.cache_clear()
        yield proxy
        remote._filesystem.cache_clear()


def upload(files, bucket="photos"):
    import s3fs

    client = s3fs.S3FileSystem(skip_instance_cache=True)
    with contextlib.suppress(FileExistsError):
        client.mkdir(bucket)
    for name, content in files.items():
        client.pipe_file(f"{bucket}/{name}", content)


@pytest.mark.parametrize("form", sorted(FORMS.keys() - {"arrays.npz"}))
def test_a_bucket_is_read_as_files_are(store, form, tmp_path):
    upload(FORMS[form], "whole")
    write_files(tmp_path, FORMS[form])
    images, expected = open_images(f"s3://whole/{form}"), open_images(f"{tmp_path}/{form}")
    assert (images.names, images.labels.tolist()) == (expected.names, expected.labels.tolist())
    assert [images.read(row) for row in range(8)] == [expected.read(row) for row in range(8)]


def test_odd_keys(store):
    names = ("a b.jpg", "ä/ü+1%20.jpg", "case.jpg", "Case.jpg", "c#d?e.jpg", ".hidden.jpg")
    odd = dict(zip(names, IMAGES.values(), strict=False))
    upload(odd | {"folder/": b""}, "odd")
    images = open_images("s3://odd")
    read = {name: images.read(row) for row, name in enumerate(images.names)}
    assert read == {name: odd[name] for name in names[:-1]}


@pytest.mark.parametrize("fault", ["503", "cut", "drop", "wait 4"])
def test_requests_that_fail_are_repeated(store, fault):
    upload(FORMS["shards/"])
    store.fault = Faults(fault, 1)
    images = open_images("s3://photos/shards/")
    assert (len(images), images.bad) == (8, ())


def test_a_bucket_that_says_no_is_one_line(store, refusal):
    upload(FORMS["shards/"])
    for name, fault, line in (
        ("photos/nowhere", "", "nothing is there; check the spelling"),
        ("no-such-bucket/x", "", "nothing is there; check the spelling"),
        ("photos/shards/", "403", "access denied; set the credentials"),
        ("photos/shards/", "503", "the store does not answer; check the address"),
        ("photos/shards/", "wait 5", "the store does not answer; check the address"),
    ):
        store.fault = lambda _method, _path, fault=fault: fault
        assert refusal(3, "check", f"s3://{name}").startswith(f"error: s3://{name}: {line}"), fault


def many_shards():
    """64 images in four shards, of more bytes than the cache may hold."""
    files = [(f"{n:03}.jpg", jpeg(n)) for n in range(64)]
    return {f"many/{shard}.tar": tar(files[shard::4]) for shard in range(4)}


def test_a_store_that_goes_away_in_a_training(store, tmp_path, monkeypatch, refusal):
    """One line, exit code 3; --resume ends with the same bits, which are those of local files."""
    monkeypatch.setattr(remote, "BLOCK", 20_000)
    monkeypatch.setenv("NEARKIN_REMOTE_CACHE", "150K")
    write_files(tmp_path, many_shards())
    upload(many_shards())
    monkeypatch.chdir(tmp_path)
    quick = (*QUICK, "--save-every", "1", "--workers", "0", "--cache", "off")
    assert run("train", "s3://photos/many", *quick, "-o", "whole") == 0
    window = tomllib.loads((tmp_path / "whole" / "config.toml").read_text())["shuffle_window"]
    assert 0 < window < 40

    def gone(_method, _path):
        return "503" if len(list((tmp_path / "cut" / "checkpoints").glob("ckpt-*"))) >= 2 else ""

    store.fault = gone
    train = ("train", "s3://photos/many", *quick, "-o", "cut")
    assert f"error: s3://photos/: {GONE}" in refusal(3, *train)
    done = [path.name for path in (tmp_path / "cut" / "checkpoints").glob("ckpt-*")]
    assert "" < max(done) < "ckpt-00000020.pt"  # of 32 steps
    store.fault = lambda _method, _path: ""
    remote._failed.clear()
    assert run(*train, "--resume") == 0
    assert "resuming after step" in (tmp_path / "cut" / "train.log").read_text()
    assert run("train", "many", *quick, "--shuffle-window", window, "-o", "local") == 0
    expected = load_file(tmp_path / "whole" / "encoder.safetensors")
    for name in ("cut", "local"):
        weights = load_file(tmp_path / name / "encoder.safetensors")
        assert all(weights[name].equal(tensor) for name, tensor in expected.items())
    tables = (tmp_path / name / "metrics.csv" for name in ("whole", "cut", "local"))
    whole, *others = ([row["loss"] for row in read_csv(table)] for table in tables)
    assert others == [whole] * 2
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"AKIAHUNTER2" in content or b"c0ffee" in content for content in written)


def test_workers_say_in_one_line_that_a_store_went_away_and_end_with_the_same_bits(
    store, tmp_path, monkeypatch, refusal
):
    monkeypatch.setattr(remote, "BLOCK", 20_000)
    monkeypatch.setenv("NEARKIN_REMOTE_CACHE", "150K")
    upload(many_shards())
    monkeypatch.chdir(tmp_path)
    train = ("train", "s3://photos/many", *QUICK, "--cache", "off", "--workers")
    assert run(*train, 0, "-o", "alone") == 0
    train = (*train, 2, "--save-every", 1, "-o", "helped")
    store.fault = lambda *_: "503" if list(tmp_path.glob("helped/checkpoints/ckpt-*")) else ""
    assert refusal(3, *train) == (
        f"error: s3://photos/: {GONE} is kept: give the same command again, a run's with --resume"
    )
    store.fault = lambda *_: ""
    remote._failed.clear()
    assert run(*train, "--resume") == 0
    first, second = (load_file(f"{name}/encoder.safetensors") for name in ("alone", "helped"))
    assert all(second[name].equal(tensor) for name, tensor in first.items())
