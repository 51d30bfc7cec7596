"""Commands that tell what there is."""

from nearkin.cli.app import app


@app.command
def methods(name: str = "", /) -> None:
    """List the methods, or show all about one: equation, options, paper, recipes, results.

    Args:
        name: The one to show.
    """
    from nearkin.commands.methods import method_lines

    print("\n".join(method_lines(name)))


@app.command
def backbones(pattern: str = "", /) -> None:
    """List the networks that can be trained.

    Args:
        pattern: Only names that contain this.
    """
    from nearkin.commands.info import backbone_lines

    print("\n".join(backbone_lines(pattern)))


@app.command
def config(method: str = "simclr", /) -> None:
    """Print every setting of a method with its default, as TOML for `nearkin train --config`.

    Args:
        method: Its name.
    """
    from nearkin.commands.info import config_lines

    print("\n".join(config_lines(method)))


@app.command
def doctor() -> None:
    """Print versions, device, precision, threads and what else helps to help."""
    from nearkin.commands.info import doctor_lines

    print("\n".join(doctor_lines()))
