"""`nearkin check`: what it says of images before any training."""

import json

from builders import fill
from nearkin_command import run


def test_what_was_decided_about_the_data_is_one_block_what_was_left_out_first(tmp_path, capsys):
    names = [f"{name}/{i}.png" for name in ("Cat", "cat") for i in range(4)]
    data = fill(tmp_path / "data", *names)
    table = tmp_path / "labels.csv"
    table.write_text("path,label\n" + "".join(f"{n},{n[:3]}\n" for n in [*names, "gone.png"]))
    assert run("check", data, "--labels", table) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if "case alone" in line or "rows" in line]
    assert lines == [
        f"notes       left out: 1 of 9 rows of {table}, which belong to no usable image, "
        "such as 'gone.png'",
        "            guessed: 2 names of classes that differ by case alone are classes of their own, "
        "such as 'Cat', 'cat'",
    ]
    assert run("check", data, "--labels", table, "--json") == 0
    left_out, guessed = json.loads(capsys.readouterr().out)["notes"]
    assert (left_out["decision"], left_out["count"]) == ("left out", 1)
    assert (guessed["decision"], guessed["examples"]) == ("guessed", ["Cat", "cat"])


def test_the_parts_that_folders_name_are_said_with_what_leaks_from_one_to_the_other(
    tmp_path, capsys
):
    sides = {"Training": 8, "Testing": 4}
    names = [f"{side}/{i % 2}/{i}.png" for side, number in sides.items() for i in range(number)]
    data = fill(tmp_path / "data", *names, size=(40, 40))
    (data / "Testing/0/0.png").write_bytes((data / "Training/0/2.png").read_bytes())
    assert run("check", data) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "labels      2 classes of 6 images, for scoring only" in lines
    assert "parts       8 to train on, 4 to score, by the data's own names" in lines
    leak = "            1 of 4 test images have a near-duplicate among the training images"
    assert leak in lines
    assert run("check", data / "Training") == 0
    assert "parts       none in the data; --val holds some out" in capsys.readouterr().out
