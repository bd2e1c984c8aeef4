"""Groups of layers by scheme, named by as few targets as tell them apart.

Every layer is matched by one target and no target is a class name, so that all readers agree: vLLM
takes ``Linear`` before it looks for the parts of a merged projection, and compressed-tensors takes
the other order. Block numbers are listed, since ranges cannot be written in a pattern::

    re:model\\.layers\\.(0|1|29)\\.(mlp\\.down_proj|self_attn\\.o_proj)$
"""

import re
from collections.abc import Iterable, Mapping

from quantforge.checkpoint.base import SchemeGroup
from quantforge.schemes import QuantScheme

NUMBERED = re.compile(r"(?P<before>(?:[^.]+\.)*?)(?P<number>\d+)\.(?P<after>.+)")


def scheme_groups(
    layers: Mapping[str, QuantScheme], others: Iterable[str] = ()
) -> list[SchemeGroup]:
    """One group a scheme, in the order of `layers`; `others` are linears that stay as they are.

    A single scheme has the class ``Linear`` as its target; the others are then to be ignored.
    """
    members: dict[QuantScheme, list[str]] = {}
    for name, scheme in layers.items():
        members.setdefault(scheme, []).append(name)
    if len(members) == 1:
        return [SchemeGroup(targets=("Linear",), scheme=next(iter(members)))]
    everywhere = _numbers([*layers, *others])
    return [
        SchemeGroup(targets=tuple(_targets(names, everywhere)), scheme=scheme)
        for scheme, names in members.items()
    ]


def _numbers(names: Iterable[str]) -> dict[tuple[str, str], list[int]]:
    """The block numbers of each (what stands before, what stands after)."""
    found: dict[tuple[str, str], list[int]] = {}
    for name in names:
        if match := NUMBERED.fullmatch(name):
            found.setdefault((match["before"], match["after"]), []).append(int(match["number"]))
    return found


def _targets(names: list[str], everywhere: Mapping[tuple[str, str], list[int]]) -> list[str]:
    """Patterns for numbered layers with the same numbers together, and the other names."""
    joined: dict[tuple[str, str], list[str]] = {}
    for (before, after), numbers in _numbers(names).items():
        is_all = sorted(numbers) == sorted(everywhere[before, after])
        listed = r"\d+" if is_all else f"({'|'.join(map(str, sorted(numbers)))})"
        joined.setdefault((before, listed), []).append(re.escape(after))
    patterns = [
        rf"re:{re.escape(before)}{numbers}\.({'|'.join(parts)})$"
        for (before, numbers), parts in joined.items()
    ]
    return patterns + [name for name in names if not NUMBERED.fullmatch(name)]
