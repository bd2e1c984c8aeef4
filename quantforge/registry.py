"""Finds the modules of a folder by name, so that adding a method or a format edits no list.

A registry is a package folder; an entry is a module in it whose name does not start with an
underscore and is not one of the folder's shared files. Modules are imported on first use.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from types import ModuleType

from quantforge.errors import UnsupportedError


@cache
def entry_names(package: str, shared: tuple[str, ...] = ("base",)) -> tuple[str, ...]:
    """Sorted names of the entries of `package`, without importing any of them."""
    folder = importlib.import_module(package).__path__
    found = (module.name for module in pkgutil.iter_modules(folder))
    return tuple(sorted(n for n in found if not n.startswith("_") and n not in shared))


def load_entry(
    package: str, name: str, kind: str, shared: tuple[str, ...] = ("base",)
) -> ModuleType:
    """The module `name` of `package`; `kind` is the word that the error uses ("method").

    Raises `UnsupportedError` that lists the known names and the nearest one.
    """
    known = entry_names(package, shared)
    if name not in known:
        raise UnsupportedError(
            f"unknown {kind} {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}"
        )
    return importlib.import_module(f"{package}.{name}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'awq'?)"`` for the nearest of `known`, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
