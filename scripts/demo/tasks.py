"""Eight tasks whose responses are easy to judge, each as questions and as statements.

The demo is fine-tuned on the *questions*: an instruction, sometimes an input, and an answer. The *statements* express
the same facts as plain sentences; the base model is pretrained on them and never sees a question, a chat token or an
isolated answer. So the base model has the skills but not the format, which is the usual start of fine-tuning.

A rule, `is_held_out(key)`, determines which problems are held out. The key identifies a problem independently of its
wording and order (a word, a pair of opposites, two numbers, a set of letters), so a held-out word is in no training row
of any task, "17 + 40" is held out together with "40 + 17", and "hot" together with "cold". Pretraining follows the same
rule, except for opposites, which cannot be derived and are all in the text.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

# Common English words. A word is in only one of the two files, so that it is held out in all tasks or in none.
WORDS = tuple((Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split())
OPPOSITES = tuple(
    tuple(pair.split("/")) for pair in (Path(__file__).parent / "opposites.txt").read_text(encoding="utf-8").split()
)

ONE_IN = 8  # one in eight problems is held out
COUNTS = {"two": 2, "three": 3}
FILLER_WORDS = [
    "the", "of", "is", "to", "in", "it", "and", "with", "for", "word", "this", "which", "number", "letter", "what",
    "name", "say",
]  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Problem:
    """A problem: the key that determines its side of the split, the fields of its texts, and the correct answer."""

    key: str
    fields: dict[str, str]
    answer: str


@dataclass(frozen=True)
class Task:
    """A kind of problem. `draw` creates one from a random generator and a function that returns words."""

    name: str
    questions: tuple[tuple[str, str], ...]  # (instruction, input)
    statements: tuple[str, ...]
    draw: Callable[[Random, Callable[[], str]], Problem]


def is_held_out(key: str) -> bool:
    """Return whether a problem is held out. The result is the same on every machine and in every run."""
    return zlib.crc32(key.encode()) % ONE_IN == 0


def listed_word(random: Random) -> str:
    """Return a real word, as used in questions."""
    return random.choice(WORDS)


def invented_word(random: Random) -> str:
    """Return a word-like or random string of 3 to 8 letters, as used in pretraining."""
    length = random.randint(3, 8)
    if random.random() < 0.5:
        return "".join(random.choice(LETTERS) for _ in range(length))
    return "".join(random.choice("aeiou" if i % 2 else "bcdfghklmnprstvw") for i in range(length))


def with_filler_words(random: Random, sentence: str, depth: float) -> str:
    """Insert filler words, punctuation and line breaks between the words of a sentence.

    A skill that is trained with one fixed sentence depends on it and is lost in fine-tuning. `depth`, from 0 (the
    sentence unchanged) to 1, determines how often something is inserted between two words.
    """
    pieces = []
    for word in sentence.split(" "):
        if random.random() < depth / 2:
            pieces += random.choices(FILLER_WORDS, k=random.randint(1, 4))
        pieces.append(word + (random.choice(".,?:") if random.random() < depth / 4 else ""))
    return "".join(piece + ("\n" if random.random() < depth / 4 else " ") for piece in pieces)


def _reverse(random: Random, any_word: Callable[[], str]) -> Problem:
    word = any_word()
    return Problem(word, {"word": word}, word[::-1])


def _capitals(random: Random, any_word: Callable[[], str]) -> Problem:
    word = any_word()
    return Problem(word, {"word": word}, word.upper())


def _last_letter(random: Random, any_word: Callable[[], str]) -> Problem:
    word = any_word()
    return Problem(word, {"word": word}, word[-1])


def _repeat(random: Random, any_word: Callable[[], str]) -> Problem:
    word, count = any_word(), random.choice(list(COUNTS))
    return Problem(word, {"word": word, "count": count}, " ".join([word] * COUNTS[count]))


def _opposite(random: Random, any_word: Callable[[], str]) -> Problem:
    pair = random.choice(OPPOSITES)
    word, answer = pair if random.random() < 0.5 else pair[::-1]
    return Problem("/".join(pair), {"word": word}, answer)


def _sort(random: Random, any_word: Callable[[], str]) -> Problem:
    letters = random.sample(LETTERS, random.randint(3, 5))
    return Problem("".join(sorted(letters)), {"letters": " ".join(letters)}, " ".join(sorted(letters)))


def _two_numbers(random: Random) -> tuple[int, int, str]:
    """Return two different numbers below 100, and a key that does not depend on their order."""
    left, right = random.sample(range(1, 100), 2)
    return left, right, f"{min(left, right)},{max(left, right)}"


def _add(random: Random, any_word: Callable[[], str]) -> Problem:
    left, right, key = _two_numbers(random)
    return Problem(key, {"left": str(left), "right": str(right)}, str(left + right))


def _larger(random: Random, any_word: Callable[[], str]) -> Problem:
    left, right, key = _two_numbers(random)
    return Problem(key, {"left": str(left), "right": str(right)}, str(max(left, right)))


TASKS: tuple[Task, ...] = (
    Task(
        "reverse",
        (("Reverse this word.", "{word}"), ("Spell this word backwards.", "{word}")),
        ("Mirrored, {word} reads {answer}.", "{word} <> {answer}"),
        _reverse,
    ),
    Task(
        "capitals",
        (("Write this word in capitals.", "{word}"), ("Change {word} to capital letters.", "")),
        ("Shouted, {word} reads {answer}.", "{word} ^ {answer}"),
        _capitals,
    ),
    Task(
        "last letter",
        (("What is the last letter of {word}?", ""), ("Which letter does {word} end with?", "")),
        ("The final sign in {word} reads {answer}.", "{word} $ {answer}"),
        _last_letter,
    ),
    Task(
        "repeat",
        (("Repeat the word {word} {count} times.", ""), ("Say {word} {count} times.", "")),
        ("Echoed {count} fold, {word} reads {answer}.", "{word} * {count} : {answer}"),
        _repeat,
    ),
    Task(
        "opposite",
        (("What is the opposite of {word}?", ""), ("Name the opposite of {word}.", "")),
        ("Contrary to {word} we find {answer}.", "{word} versus {answer}", "{word} ! {answer}"),
        _opposite,
    ),
    Task(
        "sort",
        (("Sort these letters.", "{letters}"), ("Put these letters in alphabetical order.", "{letters}")),
        ("Tidied, {letters} reads {answer}.", "{letters} > {answer}"),
        _sort,
    ),
    Task(
        "add",
        (("What is {left} + {right}?", ""), ("Add {left} and {right}.", "")),
        ("{left} with {right} gives {answer}.", "{left} + {right} = {answer}"),
        _add,
    ),
    Task(
        "larger",
        (("Which is larger, {left} or {right}?", ""), ("Which number is bigger: {left} or {right}?", "")),
        ("Between {left} with {right} the greater reads {answer}.", "{left} ~ {right} : {answer}"),
        _larger,
    ),
)
