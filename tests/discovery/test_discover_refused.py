"""What `nearkin discover` refuses: in one line, and before anything is trained."""

import itertools
from pathlib import Path

from discoveries import LEAST, once, table
from nearkin_command import run

from nearkin.config import TrainConfig
from nearkin.run.folder import RunFolder

KNOWING = ["--known", "cat,dog"]
NCD = ["--mode", "ncd"]
REFUSED = [
    ([], 2, "either --labeled PATH, or --known A,B"),
    (["--known", "cat,dog", "--labeled", "x"], 2, "either --labeled PATH, or --known A,B"),
    (["--known", "cat"], 2, "at least two classes"),
    (["--known", "cat,cat"], 2, "each once"),
    (["--known", "cat,dgo"], 2, "Did you mean dog?"),
    (["--known", "cat,dog,eel,fox"], 3, "nothing is left to discover"),
    (["--labeled", "missing"], 3, "missing"),
    (["--labeled", "missing.csv"], 3, "missing.csv"),
    ([*KNOWING, "--classes", "-1"], 2, "--classes -1"),
    ([*KNOWING, "--classes", "0", "--mode", "ncd"], 2, "--classes 0 says there are none"),
    ([*KNOWING, "--classes", "many"], 2, "--classes"),
    ([*KNOWING, "--classes", "17"], 3, "to learn from, and --classes 17 takes 17"),
    ([*KNOWING, "--encoder", "missing"], 2, "missing"),
    *(
        ([*KNOWING, by, "missing", *more], 2, f"{' '.join(more)} is of the training of an encoder, and {by} gives one")
        for by in ("--encoder", "--accept")
        for more in (("--max-time", "1h"), ("--method", "moco"), ("--devices", "2"))
    ),
    ([*KNOWING, "--allow-partial"], 2, "--allow-partial is of the encoder that --encoder names"),
    ([*KNOWING, "--allow-partial", "--accept", "missing"], 2, "--allow-partial is of the encoder that --encoder"),
    ([*KNOWING, "--method", "simclrr"], 2, "Did you mean simclr?"),
    ([*KNOWING, "--method", "ncl"], 2, "--method ncl learns from labels"),
    ([*KNOWING, "--mode", "both"], 2, "ncd"),
    ([*KNOWING, "--clases", "3"], 2, "Did you mean classes?"),
    ([*KNOWING, "--hidden-dims", "3"], 2, "Did you mean hidden_dim?"),
    ([*KNOWING, "--dim", "lots"], 2, "--dim lots"),
    ([*KNOWING, "--balance", "1"], 2, "unknown option --balance for simgcd"),
    ([*KNOWING, "--train-layers", "layer4"], 2, "--train-layers layer4 is not top, last:N or all"),
    ([*KNOWING, "--train-layers", "linear"], 2, "--train-layers linear is not top, last:N or all"),
    ([*KNOWING, "--train-layers", "top,top"], 2, "--train-layers top,top is not top, last:N or all"),
    ([*KNOWING, "--train-layers", "last:99", "--classes", "2"], 2, "last:99, but tiny has"),
    ([*KNOWING, *NCD, "--queue-size", "2001", "--classes", "2"], 2, "queue-size 2001 is more than half"),
    ([*KNOWING, *NCD, "--dim", "3"], 2, "unknown option --dim for ncl"),
    ([*KNOWING, *NCD, "--positive-rate", "-1"], 2, "--positive-rate -1"),
    ([*KNOWING, "--positive-rate", "1"], 2, "unknown option --positive-rate for simgcd"),
    ([*KNOWING, "--num-novel-classes", "2"], 2, "give --classes here"),
    ([*KNOWING, "--mode", "ncd", "--entropy-weight", "1"], 2, "unknown option --entropy-weight for ncl"),
    ([*KNOWING, "--epochs", "0"], 2, "--epochs 0"),
    ([*KNOWING, "--batch-size", "1000"], 2, "--batch-size 1000"),
    (["--known", "cat,dog,eel", "--batch-size", "20"], 2, "more than a step can have"),
    ([*KNOWING, "--augment", "smcl"], 2, "smcl"),
    ([*KNOWING, "--device", "abacus"], 2, "device abacus"),
    ([*KNOWING, "--truth", "missing.csv"], 3, "missing.csv"),
    ([*KNOWING, "--accept", "missing"], 2, "missing is no finished discovery"),
    ([*KNOWING, "--accept", "runs/traind"], 2, "wants one. Did you mean runs/trained?"),
    ([*KNOWING, "--accept", "runs/trained"], 2, "runs/trained is no finished discovery; --accept wants one."),
    ([*KNOWING, "--ouput", "x"], 2, "Did you mean output?"),
    *(
        ([*KNOWING, "--copy-to", f"DATA{inside}"], 2, "lies inside")
        for inside in ("", "/sorted", "/cat/sorted")
    ),
    ([*KNOWING, "--copy-to", "copies"], 4, "copies"),
    *(([*KNOWING, "--copy-to", own], 2, "is of the run itself") for own in ("run", "run/plots")),
]  # fmt: skip
"""Arguments, the exit code, and what is said."""


def test_what_cannot_be_carried_out_is_refused_before_anything_is_trained(
    folders, tmp_path, monkeypatch, refusal
):
    """Without an encoder at hand: the first stage would take its time."""
    monkeypatch.chdir(tmp_path)
    Path("copies").mkdir()
    Path("copies", "mine.txt").write_text("mine")
    Path("runs", "trained").mkdir(parents=True)
    RunFolder(Path("runs", "trained")).write_settings(TrainConfig(), "digits")
    before = sorted(folders.rglob("*"))
    for arguments, code, says in REFUSED:
        typed = [word.replace("DATA", str(folders)) for word in arguments]
        line = refusal(code, "discover", folders, "-o", "run", "-q", *typed)
        assert says in line, arguments
        assert not Path("run", "stages").exists(), arguments
    assert sorted(folders.rglob("*")) == before


WRONG = [
    ("--train-layers", "last:99"), ("--classes", "100"), ("--batch-size", "1000"),
    ("--augment", "smcl"), ("--encoder", "missing"), ("--truth", "missing.csv"), ("--dim", "lots"),
]  # fmt: skip


def test_refused_settings_do_not_stand_in_the_way_of_the_right_ones(
    folders, encoder, tmp_path, capsys
):
    given = [*KNOWING, "--encoder", encoder, *LEAST]
    settings = ["discover", folders, "-o", tmp_path / "run", *given]
    for wrong in WRONG:
        assert run(*once(*settings, *wrong)) in (2, 3), wrong
        assert capsys.readouterr().err.startswith("error: "), wrong
    assert run(*settings) == 0


def test_a_share_that_the_run_of_the_encoder_did_not_hold_out_is_refused(
    arrays, encoder, tmp_path, refusal
):
    settings = ["--encoder", encoder, "--known", "0,1,2", "--val", "0.2"]
    line = refusal(2, "discover", arrays, "-o", tmp_path / "run", *LEAST, *settings)
    assert "was made with --val 0.1 of the same images" in line
    assert not (tmp_path / "run").exists()


def test_labels_that_leave_too_little_are_refused_before_anything_is_trained(
    flat, parts, labels, tmp_path, refusal
):
    names, test = parts.images.names, {parts.images.names[row] for row in parts.test_rows}
    learned = [name for name in names if name not in test]
    assert {name[0] for name in test} > {"4"}
    one = [name for name in learned if name[0] == "0"]
    cases = [
        (one, "usable images are labeled as 'digit 0'; give at least two known classes"),
        (names, "images to learn from have a label, so nothing is left to discover"),
        (learned, "images to learn from have a label, so nothing is left to discover"),
        (learned[3:], "3 unlabeled images to learn from, and --classes auto takes 4"),
        (["0-00.png", "1-00.png", "9-00.png"], "'9-00.png'"),
    ]
    stages = tmp_path / "run" / "stages"
    for mode, (labeled, says) in itertools.product(("gcd", "ncd"), cases):
        written = [(name, f"digit {name[0]}") for name in labeled]
        settings = ["--labeled", table(tmp_path / "labels.csv", written), "--mode", mode, "-q"]
        assert says in refusal(3, "discover", flat, "-o", tmp_path / "run", *settings)
        assert not stages.exists()
    # Known classes among the unlabeled images are refused where all are to be novel.
    truth = table(tmp_path / "truth.csv", [(p.name, f"digit {p.name[0]}") for p in flat.iterdir()])
    settings = ["--labeled", labels, "--truth", truth, "--mode", "ncd", "-q"]
    line = refusal(3, "discover", flat, "-o", tmp_path / "run", *settings)
    assert "24 unlabeled images are of known classes" in line
    assert "--mode gcd" in line
    assert not stages.exists()
