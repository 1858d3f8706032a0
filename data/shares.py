"""The part of a mixture that each sample comes from: shares are exact at every moment, not only on average.

    weights 5 : 3 : 2      part of sample 0, 1, 2, ...:  0 1 0 2 0 1 0 2 1 0 | 0 1 0 2 ...

After any number of samples, n, each part has given its share n * weight / sum to within one sample: at most
1 - 1 / (2 * parts - 2) off, the best that any sequence can do. The sequence repeats itself after as many samples as the
whole weights add up to, so one period of it is a table, and any sample is found in it without those before.

Grain's `MapDataset.mix` also depends on the position alone, but it rounds weights down to hundredths of the smallest
(0.7 : 0.3 becomes 233 : 100), splits off one part after the other with another rounding each, and ends with the first
part that ends.

Source: Tijdeman, The chairman assignment problem (Discrete Mathematics 32, 1980).
"""

import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from ..mesh.errors import UserError

MAX_PERIOD = 1 << 16


def whole_weights(weights: Sequence[float], key: str) -> tuple[int, ...]:
    """Returns the smallest integers in the ratio of weights.

    Args:
        weights: Each above 0, read as the decimal number that it is written as: 0.7 is seven tenths.
        key: The config key of the weights, for messages.

    Raises:
        UserError: A weight is not positive, or the integers add up to more than 65,536.
    """
    for weight in weights:
        if not 0 < weight < math.inf:
            raise UserError(
                f"{key}: weights must be positive and finite, got {weight}. Leave out parts without a share."
            )
    fractions = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*[fraction.denominator for fraction in fractions])
    integers = [int(fraction * scale) for fraction in fractions]
    divisor = math.gcd(*integers)
    ratio = tuple(integer // divisor for integer in integers)
    if sum(ratio) > MAX_PERIOD:
        percent = ", ".join(f"{100 * weight / sum(ratio):.1f}" for weight in ratio)
        given = ", ".join(map(str, weights))
        raise UserError(
            f"{key}: the shares of the weights {given} are exact only every {sum(ratio):,} samples; the maximum is "
            f"{MAX_PERIOD:,}. Round them, for example to {percent}."
        )
    return ratio


def locate(samples: np.ndarray, weights: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the parts that samples of a mixture come from, and their places in these parts.

    Args:
        samples: int64, (N,), global sample indices, >= 0.
        weights: From `whole_weights`.

    Returns:
        The part of each sample, and the number of samples of that part before it: int64, (N,), both.
    """
    parts, numbers = turns(weights)
    periods, places = np.divmod(samples, len(parts))
    part = parts[places]
    return part, periods * np.array(weights)[part] + numbers[places]


@functools.lru_cache(maxsize=16)
def turns(weights: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns one period of the sequence of parts with these weights.

    Returns:
        The part of each sample, and the number of samples of the same part before it in the period: int64, (period,).
    """
    part = np.fromiter(_sequence(weights), np.int64, sum(weights))
    number = np.empty_like(part)
    for index, count in enumerate(weights):
        number[part == index] = np.arange(count)
    return part, number


def _sequence(weights: tuple[int, ...]) -> list[int]:
    """Returns the parts of one period: next is the most urgent of the parts that are far enough behind their share."""
    if len(weights) == 1:
        return [0] * weights[0]
    period = sum(weights)
    bound = 2 * len(weights) - 2
    behind = [0] * len(weights)  # the deficit before the next sample, times `period`
    chosen = []
    for _ in range(period):
        best = -1
        best_slack = 0
        for part, weight in enumerate(weights):
            behind[part] += weight
            slack = bound * (period - behind[part]) - period  # times `bound * period`
            is_far_enough = bound * behind[part] >= period
            if not is_far_enough:
                continue
            if best < 0 or slack * weights[best] < best_slack * weight:
                best = part
                best_slack = slack
        behind[best] -= period
        chosen.append(best)
    return chosen
