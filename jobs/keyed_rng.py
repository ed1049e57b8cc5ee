"""Uniform numbers that depend on what is drawn, never on who draws it or when.

The hash is a chain of SplitMix64 steps (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014): each part of the key is added to the state times the golden-ratio
increment and mixed by the finaliser. There is no global generator, so a sample has the same
randomness on any worker, in any batch and after any move.
"""

from __future__ import annotations

from shiftbook.jobs.errors import EpisodeError

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """The SplitMix64 finaliser of ``value + golden ratio``, both modulo 2⁶⁴."""
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def hash64(*parts: int) -> int:
    """A 64-bit hash of integers, sensitive to their order and number."""
    state = 0
    for part in parts:
        state = mix64(state ^ mix64(part & _MASK))
    return state


def format_uid(draw: int, member: int) -> str:
    """The uid of group member ``member`` of draw ordinal ``draw``, such as ``000123/5``."""
    return f"{draw:06d}/{member}"


def parse_uid(uid: str) -> tuple[int, int]:
    """Draw ordinal and group member of a uid; raises ``EpisodeError`` when it has another form."""
    draw, slash, member = uid.partition("/")
    if not slash or not draw.isdecimal() or not member.isdecimal():
        raise EpisodeError(
            f"expected a uid such as '000123/5' (draw/member), found {uid!r}; "
            "build uids with format_uid"
        )
    return int(draw), int(member)


def turn_key(seed: int, uid: str, turn: int) -> int:
    """The 64-bit key of one turn of one sample; ``uniform_at`` draws its tokens' numbers."""
    draw, member = parse_uid(uid)
    return hash64(seed, draw, member, turn)


def uniform_at(key: int, position: int) -> float:
    """The uniform number in [0, 1) with 53 bits for token ``position`` under a turn's key."""
    return (mix64(key ^ mix64(position)) >> 11) * 2.0**-53


def uniform(seed: int, uid: str, turn: int, position: int) -> float:
    """The uniform number in [0, 1) of token ``position`` of turn ``turn`` of sample ``uid``."""
    return uniform_at(turn_key(seed, uid, turn), position)
