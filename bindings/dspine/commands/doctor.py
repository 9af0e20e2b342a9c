"""`dspine doctor`."""

from __future__ import annotations

import json as json_format
from typing import Annotated

import typer


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check that everything is here which serving a pair needs.

    Looks at Python and its packages, the native library, llama-server and whether it knows
    DSpine, devices and drivers, and free disk. Ends with code 1 where something needed is broken.
    """
    from dspine._doctor import Status, examine
    from dspine.cli import SCHEMA_VERSION

    checks = examine()
    healthy = all(check.status is not Status.BROKEN for check in checks)
    if json:
        listed = [{**vars(c), "status": c.status.value} for c in checks]
        document = {"schema_version": SCHEMA_VERSION, "healthy": healthy, "checks": listed}
        typer.echo(json_format.dumps(document, indent=2, ensure_ascii=False))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            typer.echo(f"{check.status.value:<6} {check.name:<{width}}  {check.found}")
            if check.advice:
                typer.echo(f"{'':<6} {'':<{width}}  -> {check.advice}")
    if not healthy:
        raise typer.Exit(1)
