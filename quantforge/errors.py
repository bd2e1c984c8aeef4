"""The errors that a user can act on, each with the exit code that the command line gives it.

::

    QuantForgeError                 1
    +-- QualityGateError            1   a limit of the gate was not met
    +-- UsageError                  2   wrong arguments, or an output that exists already
    |   +-- RecipeError             2   unknown key, impossible scheme, group size that cannot be
    +-- UnsupportedError            3   architecture, scheme or hardware that we do not handle
    +-- CheckpointError             5   missing, corrupt or inconsistent files
    +-- CalibrationError            5   empty or unusable calibration data, NaN in activations
    +-- EvaluationError             5   text too short, vocabularies that differ, NaN logits

A message says what was wrong, the value seen, the values allowed, and where. Exit code 4 (gate
undecided) and 130 (interrupted) belong to outcomes, not to errors. The command line prints a
``QuantForgeError`` as one line; any other exception is a defect of ours and keeps its traceback.
"""

EXIT_OK = 0
EXIT_GATE_FAILED = 1
EXIT_USAGE = 2
EXIT_UNSUPPORTED = 3
EXIT_UNDECIDED = 4
EXIT_BAD_DATA = 5
EXIT_INTERRUPTED = 130


class QuantForgeError(Exception):
    """Root of the errors that are the user's to mend."""

    exit_code = 1


class QualityGateError(QuantForgeError):
    """A checkpoint does not meet the limits of a gate."""

    exit_code = EXIT_GATE_FAILED


class UsageError(QuantForgeError):
    """Arguments that cannot be carried out as given."""

    exit_code = EXIT_USAGE


class RecipeError(UsageError):
    """A recipe or scheme that is malformed or cannot apply to this model."""


class UnsupportedError(QuantForgeError):
    """A model, scheme, format or device that this version does not handle."""

    exit_code = EXIT_UNSUPPORTED


class CheckpointError(QuantForgeError):
    """Files of a model that are missing, corrupt, hostile or inconsistent."""

    exit_code = EXIT_BAD_DATA


class CalibrationError(QuantForgeError):
    """Calibration data that is empty or leads to unusable statistics."""

    exit_code = EXIT_BAD_DATA


class EvaluationError(QuantForgeError):
    """Evaluation data, or results, from which no number can be given."""

    exit_code = EXIT_BAD_DATA
