"""Runs the command line as ``python -m quantforge``."""

from quantforge.cli.app import main

if __name__ == "__main__":
    main()
