"""The ``quantforge`` command: collects this folder's commands, turns errors into exit codes.

A command module imports torch and its friends inside its function, so that ``--help`` starts fast.
"""

import errno
import logging
import os
import sys

import typer

import quantforge
from quantforge.errors import EXIT_BAD_DATA, EXIT_INTERRUPTED, QuantForgeError
from quantforge.registry import entry_names, load_entry

PACKAGE = "quantforge.cli"
SHARED = ("allocate", "app", "dry_run", "evidence", "options", "run_summary")


def build_app() -> typer.Typer:
    """The application with every command of this folder."""
    app = typer.Typer(
        name="quantforge",
        help="Quantize a language model, prove that it is still good, and serve it fast.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", help="Print the version and exit.", callback=_version, is_eager=True
        ),
    ) -> None:
        pass

    for name in entry_names(PACKAGE, SHARED):
        load_entry(PACKAGE, name, "command", SHARED).register(app)
    return app


def _version(value: bool) -> None:
    if value:
        typer.echo(f"quantforge {quantforge.__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: runs a command; a `QuantForgeError` becomes one line and its exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    sys.exit(run())


def run(arguments: list[str] | None = None) -> int:
    """Runs one command line and gives its exit code."""
    try:
        code = build_app()(arguments, standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # what Typer makes of Ctrl-C within a command
            return _fail("interrupted", EXIT_INTERRUPTED)
        return code if isinstance(code, int) else 0
    except typer.Abort:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except QuantForgeError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _fail(
                f"no space left on the disk of {error.filename or 'the output'}", EXIT_BAD_DATA
            )
        if error.errno == errno.EPIPE:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        raise
    except Exception as error:
        usage = _usage_error(error)
        if usage is None:
            raise
        return _fail(*usage)


def _usage_error(error: Exception) -> tuple[str, int] | None:
    """(message, exit code) when `error` is the argument parser's, else None.

    Typer may carry its own copy of Click, so the class is known by its method, not by its module.
    """
    format_message = getattr(error, "format_message", None)
    exit_code = getattr(error, "exit_code", None)
    if format_message is None or exit_code is None:
        return None
    return str(format_message()), int(exit_code)


def _fail(message: str, exit_code: int) -> int:
    line = " ".join(message.split())
    sys.stderr.write(f"error: {line}\n" if exit_code != EXIT_INTERRUPTED else f"{line}\n")
    return exit_code
