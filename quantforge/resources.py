"""Where the recipes and the calibration text lie: inside the wheel, or in the repository."""

from importlib.resources import files
from pathlib import Path


def resource_folder(kind: str) -> Path:
    """Folder of the shipped files of `kind` (``recipes`` or ``calib_data``).

    A wheel carries them under ``quantforge/_data``; an editable install reads the repository's.
    """
    packaged = Path(str(files("quantforge"))) / "_data" / kind
    if packaged.is_dir():
        return packaged
    return Path(__file__).resolve().parent.parent / kind
