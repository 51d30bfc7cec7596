"""`nearkin select` on vectors alone."""

import numpy as np

import nearkin
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import write_embeddings


def test_images_that_are_held_out_are_not_selected(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    splits = np.array(["train", "test", ""] * 10)
    paths = [f"{split}/{row:02}.png" for row, split in enumerate(splits)]
    table = tmp_path / "vectors.parquet"
    write_embeddings(table, Embeddings(vectors, np.full(30, -1), paths=paths, splits=splits))
    chosen = nearkin.select(table, num=20)
    assert sorted(chosen.paths) == sorted(path for path in paths if not path.startswith("test"))
