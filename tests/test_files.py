"""Files that are verified when they are read, and errors of reading and writing them."""

import pytest

from nearkin.errors import CheckpointError, OutputError
from nearkin.files import SEAL_SIZE, read_sealed, usable, write_sealed, writing


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
    says = "cannot write .*file: No space left; choose another -o"
    with pytest.raises(OutputError, match=says), writing(tmp_path / "file"):
        raise OSError(28, "No space left")
