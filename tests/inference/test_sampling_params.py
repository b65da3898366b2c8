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
    ("repetition_penalty", 0.0, "above 0 and up to 10"),
    ("repetition_penalty", -1.0, "above 0 and up to 10"),
    ("presence_penalty", 2.1, "-2..2"),
    ("frequency_penalty", math.nan, "-2..2"),
    ("min_tokens", -1, "0..max_tokens"),
    ("min_tokens", 17, "which is 16"),
    ("top_logprobs", 21, "0..20"),
    ("top_logprobs", True, "0..20"),
    ("thinking_token_budget", -1, ">= 0"),
    ("thinking_token_budget", 1.0, ">= 0"),
    ("stop", "ab", "a sequence of strings"),
    ("stop", ["a", ""], "none of them empty"),
    ("logit_bias", {-1: 0.0}, "token ids >= 0"),
    ("logit_bias", {1: 101.0}, "-100..100"),
    ("logit_bias", {"1": 1.0}, "token ids >= 0"),
    ("logit_bias", 3, "a mapping"),
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


def test_sampling_params_settle_biases_and_strings():
    left = SamplingParams(logit_bias={7: 1, np.int64(2): np.float32(0.5)}, stop=["a", "b"])
    right = SamplingParams(logit_bias=((2, 0.5), (7, 1.0)), stop=("a", "b"))
    assert left == right == dataclasses.replace(left) and hash(left) == hash(right)
    with pytest.raises(ValueError, match="logit_bias=.*at most 1024 ids"):
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))
