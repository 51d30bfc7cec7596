"""Runs as people see them: a page, a map, images; made of the files of a run."""
