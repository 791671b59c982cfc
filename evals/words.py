"""Made-up material: words that stand in no text, noise sentences, keys for hidden facts."""

from __future__ import annotations

import random

_STARTS = (
    "b",
    "br",
    "d",
    "f",
    "g",
    "gl",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "z",
)
_MIDDLES = ("a", "e", "i", "o", "u", "ai", "ea", "oo")
_ENDS = ("b", "ck", "d", "l", "m", "n", "p", "r", "rn", "sk", "st", "t")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
COLOURS = (
    "amber",
    "black",
    "blue",
    "brown",
    "crimson",
    "green",
    "grey",
    "ivory",
    "orange",
    "pink",
    "purple",
    "silver",
)
THINGS = ("anchor", "bakery", "castle", "drum", "engine", "falcon", "guitar", "hammer", "island", "jacket")
MORE_THINGS = (
    "kettle",
    "ladder",
    "mirror",
    "needle",
    "orchid",
    "piano",
    "quarry",
    "ribbon",
    "saddle",
    "tunnel",
)


def words(rng: random.Random, count: int) -> list[str]:
    """Different pronounceable words of two syllables."""
    found: dict[str, None] = {}
    while len(found) < count:
        first = rng.choice(_STARTS) + rng.choice(_MIDDLES)
        found[first + rng.choice(_STARTS) + rng.choice(_MIDDLES) + rng.choice(_ENDS)] = None
    return list(found)


def keys(rng: random.Random, count: int) -> list[str]:
    """Different keys such as `silver anchor`."""
    return rng.sample([f"{colour} {thing}" for colour in COLOURS for thing in THINGS + MORE_THINGS], count)


def numbers(rng: random.Random, count: int) -> list[str]:
    """Different five-digit numbers."""
    return [str(n) for n in rng.sample(range(10_000, 100_000), count)]
