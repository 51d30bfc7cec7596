"""Files that are verified when they are read, and errors of reading and writing them."""

import errno
import io
import os
import stat
import zipfile

import numpy as np
import pytest

from nearkin.errors import CheckpointError, OutputError, UsageError
from nearkin.files import (
    SEAL_SIZE,
    check_unpacked,
    read_arrays,
    read_sealed,
    remove_partial,
    usable,
    whole,
    write_sealed,
    write_whole,
    writing,
)
from nearkin.run.folder import check_target


def test_a_sealed_file_is_given_back_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    write_sealed(path, b"content")
    assert read_sealed(path) == b"content"
    sealed = path.read_bytes()
    damaged = [sealed[:place] for place in range(len(sealed))]
    for place, byte in enumerate(sealed):
        damaged += [sealed[:place] + bytes([byte ^ k]) + sealed[place + 1 :] for k in (1, 255)]
    damaged += [bytes(len(sealed)), sealed + b"\n", b"\n" + sealed, sealed[-SEAL_SIZE:]]
    for content in damaged:
        path.write_bytes(content)
        assert read_sealed(path) is None, content
    assert read_sealed(tmp_path / "absent") is None


def test_an_error_becomes_a_line_with_its_reason(tmp_path):
    for error, reason in ((ValueError("two\n  lines"), "two lines"), (KeyError(), "KeyError")):
        says = rf"file cannot be used \({reason}\); mend it"
        with pytest.raises(CheckpointError, match=says), usable(tmp_path / "file", "mend it"):
            raise error
    says = "cannot write .*file: No space left; choose another output"
    with pytest.raises(OutputError, match=says), writing(tmp_path / "file"):
        raise OSError(28, "No space left")


def test_arrays_are_read_without_what_a_pickle_would_run():
    plain, pickled = io.BytesIO(), io.BytesIO()
    np.savez(plain, x=np.arange(3), y=np.ones(2))
    np.savez(pickled, x=np.arange(3), z=np.array([None]))
    assert read_arrays(plain, 10_000)["x"].tolist() == [0, 1, 2]
    assert read_arrays(plain, 0).keys() == {"x", "y"}
    with pytest.raises(ValueError, match="allow_pickle"):
        read_arrays(pickled, 0)


def test_a_zip_may_unpack_to_what_is_free_and_no_more():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("zeros", bytes(3_000_000))
    for most in (0, 3_000_000, 2**40):  # 0 is any number
        check_unpacked(file, most)
    for most in (1, 2_000_000, 2_999_999):
        with pytest.raises(ValueError, match=f"unpacks to 3 MB, and {most / 1e6:.0f} are free"):
            check_unpacked(file, most)


def test_a_file_is_there_whole_or_as_it_was_and_nothing_else_is_left(tmp_path, monkeypatch):
    path = tmp_path / "file"

    def write(content, error=None):
        with whole(path) as partial:
            partial.write_bytes(content)
            if error:
                raise error

    write(b"new")
    write(b"newer")
    with pytest.raises(OSError, match="full"):
        write(b"half", OSError("full"))
    assert path.read_bytes() == b"newer"
    with pytest.raises(OutputError, match="exists"):
        check_target(path, overwrite=False)
    check_target(path, overwrite=True)
    check_target(tmp_path / "other", overwrite=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for read in (path, str(path), "~/file"):
        with pytest.raises(UsageError, match="file, which is read; choose another output"):
            check_target(path, overwrite=True, reads=["~/other", read])
    (tmp_path / ".file.partial.7").write_bytes(b"of a killed process")
    (tmp_path / "file.partial").write_bytes(b"of somebody")
    remove_partial(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "file.partial"]


def test_a_file_is_written_where_folders_cannot_be_synced(tmp_path, monkeypatch):
    """As on some file systems of networks and of user space."""
    fsync = os.fsync

    def of_files(number):
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(number)

    monkeypatch.setattr(os, "fsync", of_files)
    write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
