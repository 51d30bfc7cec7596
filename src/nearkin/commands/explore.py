"""`nearkin explore`: the report of a run, with a server behind it."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from nearkin.commands.vectors import images_of
from nearkin.errors import UsageError
from nearkin.report.server import LOOPBACK, Server
from nearkin.report.site import RunSite
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Reporter, Silent


def explore(
    run: str | Path,
    data: Any = None,
    *,
    port: int = 0,
    host: str = "127.0.0.1",
    i_know: bool = False,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> None:
    """Serve the report of a run to the browsers of this computer, until Ctrl-C or SIGTERM.

    The address holds a secret, new each time; without it nothing is served.

    Args:
        run: A run folder.
        data: Its images, if they have moved.
        port: Port to listen on; 0 is any that is free.
        host: Address to listen on.
        i_know: Allow addresses other than loopback ones, although the traffic, with the secret,
            can then be read by others.
        trust_remote_code: Whether to run code that files of the run name.
        reporter: Receives the address.

    Raises:
        PortError: If the address is not available.
        NearkinError: One line on what failed.
    """
    reporter = reporter or Silent()
    if host in ("", "0.0.0.0"):
        raise UsageError("--host must be the one address that browsers will ask for")
    if host not in LOOPBACK and not i_know:
        raise UsageError(
            f"--host {host} is not encrypted on the way; tunnel the port through SSH "
            "instead, or add --i-know"
        )
    folder = RunFolder(Path(run))
    with Server(host=host, port=port, log=reporter.info) as server:
        images = images_of(folder, data, trust_remote_code=trust_remote_code)
        site = RunSite(folder, images, trust_remote_code=trust_remote_code)
        reporter.info(f"open {server.url}")
        reporter.info("Ctrl-C ends it")
        # The command line turns SIGTERM and SIGHUP into SystemExit.
        with suppress(KeyboardInterrupt, SystemExit):
            server.serve(site)
