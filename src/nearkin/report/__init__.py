"""The page and the server of a run, from the files of its folder."""
