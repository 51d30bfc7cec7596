"""`nearkin explore`: the page of a run, with a server behind it."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from nearkin.commands.report import images_of
from nearkin.errors import UsageError
from nearkin.report.page.server import LOOPBACK, Server
from nearkin.report.served import RunSite
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Reporter, Silent


def explore(
    run: str | Path,
    data: Any = None,
    *,
    port: int = 0,
    host: str = LOOPBACK[0],
    i_know: bool = False,
    reporter: Reporter | None = None,
) -> None:
    """Serve the page of a run to the browsers of this computer, until Ctrl-C or SIGTERM.

    Only who is told the address can open it: it holds a secret, which is another one every time.

    Args:
        run: A run folder.
        data: Its images, if they are no longer where they were.
        port: Where to listen; 0 is any port that is free.
        host: The address to listen on.
        i_know: Allow other addresses than those of this computer alone. What is sent can then be
            read on the way, with the secret.
        reporter: Who is told the address.

    Raises:
        PortError: If nothing can listen there.
        NearkinError: One line on what cannot be done.
    """
    reporter = reporter or Silent()
    _check_host(host, i_know)
    folder = RunFolder(Path(run))
    with Server(host=host, port=port, log=reporter.line) as server:
        site = RunSite(folder, images_of(folder, data))
        reporter.line(f"open {server.url}")
        reporter.line("Ctrl-C ends it")
        # Of SIGTERM and SIGHUP, the command line makes the latter.
        with suppress(KeyboardInterrupt, SystemExit):
            server.serve(site)


def _check_host(host: str, i_know: bool) -> None:
    if host in ("", "0.0.0.0"):
        raise UsageError("--host is what browsers will ask for; give one address")
    if host not in LOOPBACK and not i_know:
        raise UsageError(
            f"--host {host} lets others read along; tunnel the port through SSH instead, or add "
            "--i-know"
        )
