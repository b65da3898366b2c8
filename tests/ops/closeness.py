"""Comparisons of arrays whose failures say how far apart the values are, and where."""

import numpy as np


def assert_close(given, expected, atol=0.0, rtol=0.0, label=""):
    """|given - expected| <= atol + rtol |expected| at every element; NaN and infinities must match in place."""
    given, expected = (np.asarray(x).astype(np.float64) for x in (given, expected))
    assert given.shape == expected.shape, f"{label} shape {given.shape}, expected {expected.shape}"
    odd = ~np.isfinite(expected) | ~np.isfinite(given)
    same = (given == expected) | (np.isnan(given) & np.isnan(expected))
    difference = np.abs(np.where(odd, 0, given) - np.where(odd, 0, expected))
    wrong = np.where(odd, ~same, difference > atol + rtol * np.abs(np.where(odd, 0, expected)))
    if wrong.any():
        where = tuple(map(int, np.argwhere(wrong)[0]))
        raise AssertionError(
            f"{label} {wrong.sum()} of {wrong.size} elements differ by more than {atol} + {rtol} |expected|: "
            f"max difference {difference.max():.3e}, mean {difference.mean():.3e}, largest expected "
            f"{np.abs(np.where(odd, 0, expected)).max():.3e}, {(odd & ~same).sum()} not finite; first at "
            f"{where}: given {given[where]!r}, expected {expected[where]!r}"
        )


def assert_same_bits(given, expected, label=""):
    """Equal shape, dtype and bytes: signed zeros and the smallest numbers count."""
    given, expected = np.asarray(given), np.asarray(expected)
    assert given.dtype == expected.dtype, f"{label} dtype {given.dtype}, expected {expected.dtype}"
    if given.shape != expected.shape or given.tobytes() != expected.tobytes():
        assert_close(given, expected, label=label)
        raise AssertionError(f"{label} equal in value, but not in bits (signed zeros, or NaN of other kinds)")
