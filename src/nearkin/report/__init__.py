"""Runs as people see them: a page, a map, pictures; made of the files of a run."""
