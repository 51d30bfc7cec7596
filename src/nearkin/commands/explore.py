"""`nearkin explore`: the report of a run or of features, in a browser or a file."""

import re
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nearkin.commands.arguments import PathLike, command, name_of, refuse
from nearkin.commands.sources import (
    Vectors,
    VectorsLike,
    check_output,
    images_of,
    is_table,
    table_encoder,
    table_of,
)
from nearkin.data.notes import lines
from nearkin.data.opening import open_images
from nearkin.errors import DataError, UsageError
from nearkin.files import creating
from nearkin.report.image_map import ONE_FILE
from nearkin.report.pages import files_beside, write_page, write_table_page
from nearkin.report.server import LOOPBACK, Server
from nearkin.report.site import RunSite
from nearkin.run.folder import RunFolder, check_target
from nearkin.run.reporter import Reporter, Silent, reporter_of
from nearkin.schema import CountOrZero, Port


@command
def explore(
    run: VectorsLike,
    data: Any = None,
    *,
    write: bool = False,
    output: PathLike | None = None,
    overwrite: bool = False,
    port: Port = 0,
    host: str = "127.0.0.1",
    i_know: bool = False,
    url: str = "",
    one_file: CountOrZero = 50_000,
    trust_remote_code: bool = False,
    verbose: bool | Reporter = True,
) -> Path | None:
    """Serve the report of a run to the browsers of this computer, or write it to a file.

    It is served until Ctrl-C or SIGTERM. The address holds a secret, new each time; without it
    nothing is served. Of features, a map of the images is written, with a block in memory, so that
    a million images have room.

    Args:
        run: A run; or features that `embed` has written, which need `data` and `output`.
        data: The images, if they have moved, or are those of features.
        write: Write report.html of the run again, rather than serve it.
        output: Write the report to this file instead.
        overwrite: Replace that file, and files in the folder beside it.
        port: Port to listen on; 0 is any that is free.
        host: Address to listen on.
        i_know: Allow addresses other than loopback ones, although the traffic, with the secret,
            can then be read by others.
        url: Where browsers reach the server, if a proxy is between them, such as
            https://hub.example.org/user/jane/proxy/8000.
        one_file: Of more images, most of a written report is in a folder beside it, such as
            report_files.
        trust_remote_code: Whether to run code that files of the run name.
        verbose: Whether to show progress, or what receives it; the address is always shown.

    Returns:
        The file that was written; None after serving.

    Raises:
        PortError: If the address is not available.
        NearkinError: One line on what failed.
    """
    log = reporter_of(verbose)
    check_output(output, ".html", overwrite=overwrite, reads=[run, data])
    writes = write or output is not None
    if writes:
        why = "of serving, and here a page is written; leave it out"
        refuse(why, port=port != 0, host=host != "127.0.0.1", url=bool(url), i_know=i_know)
    else:
        why = "of a page that is written; give --write or -o, too"
        refuse(why, overwrite=overwrite, one_file=one_file != ONE_FILE)
    if is_table(run):
        return _write_map(run, data, output, one_file, log, overwrite=overwrite)
    folder = RunFolder(Path(name_of(run)))
    if writes:
        images = images_of(folder, data, trust=trust_remote_code, log=log)
        path = folder.report if output is None else Path(output)
        if output is not None and len(images) > one_file:
            check_target(files_beside(path), overwrite=overwrite, is_file=False)
        with creating(path):
            write_page(folder, images, log.progress, output=path, one_file=one_file)
        return path
    _check_address(host, url, i_know=i_know)
    with Server(host=host, port=port, url=url, log=log.info) as server:
        images = images_of(folder, data, trust=trust_remote_code, log=log)
        of_table = partial(table_encoder, folder)
        site = RunSite(folder, images, of_table=of_table, trust_remote_code=trust_remote_code)
        if isinstance(log, Silent):  # without the address nothing is served
            sys.stderr.write(f"open {server.url}\n")
        log.info(f"open {server.url}")
        log.info("Ctrl-C ends it")
        # The command line turns SIGTERM and SIGHUP into SystemExit.
        with suppress(KeyboardInterrupt, SystemExit):
            server.serve(site)
    return None


def _check_address(host: str, url: str, *, i_know: bool) -> None:
    """Refuse addresses that others can reach, unless the user knows, and what is none."""
    if host in ("", "0.0.0.0", "::"):
        raise UsageError("--host must be the one address that browsers will ask for")
    if host not in LOOPBACK and not i_know:
        raise UsageError(
            f"--host {host} is not encrypted on the way; tunnel the port through SSH "
            "instead, or add --i-know"
        )
    if url and not re.fullmatch(r"(?ai)https?://[\w.-]+(:[0-9]{1,5})?(/[^\s?#]*)?", url):
        raise UsageError(f"--url {url!r} is no address; give one such as https://HOST/PATH")


def _write_map(
    vectors: VectorsLike,
    data: Any,
    output: PathLike | None,
    one_file: int,
    log: Reporter,
    *,
    overwrite: bool,
) -> Path:
    if data is None or output is None:
        raise UsageError("of features, give their images, too, and the page as -o")
    images, path = open_images(data), Path(output)
    for line in lines(images.notes):
        log.info(line)
    with table_of(vectors, log) as table, creating(path):
        rows = Vectors(table).image_rows(images, log)
        if (late := np.flatnonzero(np.diff(rows) <= 0)).size:
            name = table.texts("path")[int(late[0]) + 1]
            raise DataError(
                f"{table.path}: {name!r} is not in the order of the images, or stands twice; "
                "write the features again with `nearkin embed`"
            )
        if len(rows) > one_file:
            check_target(files_beside(path), overwrite=overwrite, is_file=False)
        write_table_page(table, images, rows, path, one_file)
    return path
