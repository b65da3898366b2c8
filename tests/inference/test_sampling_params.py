"""What a request may not ask, and how it is told."""

import dataclasses
import math

import numpy as np
import pytest

from maxmoe.inference.sampling import stack_settings
from maxmoe.inference.sampling_params import SamplingParams

BAD = [
    ("temperature", -0.1, "0..100"),
    ("temperature", 100.5, "0..100"),
    ("temperature", math.nan, "0..100"),
    ("temperature", math.inf, "0..100"),
    ("temperature", "1", "0..100"),
    ("top_p", 0.0, "above 0 and up to 1"),
    ("top_p", 1.01, "above 0 and up to 1"),
    ("top_k", -1, ">= 0"),
    ("top_k", 2.0, ">= 0"),
    ("min_p", -0.5, "0..1"),
    ("min_p", 1.5, "0..1"),
    ("seed", -1, "2**63-1"),
    ("seed", 2**63, "2**63-1"),
    ("seed", True, "2**63-1"),
    ("max_tokens", 0, ">= 1"),
    ("stop_ids", (3, -1), ">= 0"),
    ("stop_ids", 3, ">= 0"),
    ("stop_ids", "ab", ">= 0"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_sampling_params_refuse_by_name_value_and_range(name, value, allowed):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message and repr(value) in message and allowed in message


def test_sampling_params_take_numpy_numbers_and_lists():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), stop_ids=[np.int32(4), 5])
    assert params.stop_ids == (4, 5) and hash(params) == hash(dataclasses.replace(params))
    assert stack_settings([params, SamplingParams(top_k=2**40)]).top_k.tolist() == [3, 2**31 - 1]
