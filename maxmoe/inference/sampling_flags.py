"""The flags of a command that samples, one for each field of `SamplingParams` that can be said in a word."""

from absl import flags

from maxmoe.inference.sampling_params import MAX_SEED, MAX_TEMPERATURE, SamplingParams

_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "thinking_token_budget",
)


def define_flags() -> None:
    """Defines the flags. Defaults of temperature and top_p are the publisher's advice for this family."""
    flags.DEFINE_integer("max_tokens", 128, "Longest answer, in tokens.", lower_bound=1)
    flags.DEFINE_integer("min_tokens", 0, "Tokens that come before the answer may end.", lower_bound=0)
    flags.DEFINE_float(
        "temperature",
        1.0,
        "Divides the logits; 0 always takes the likeliest token. The default, with that of --top_p, is the publisher's "
        "advice for this family.",
        lower_bound=0.0,
        upper_bound=MAX_TEMPERATURE,
    )
    flags.DEFINE_float(
        "top_p",
        0.95,
        "Draws from the likeliest tokens whose probabilities first add up to this; above 0, and 1 means all tokens.",
        lower_bound=0.0,
        upper_bound=1.0,
    )
    flags.DEFINE_integer("top_k", 0, "Draws from so many likeliest tokens; 0 means all.", lower_bound=0)
    flags.DEFINE_float(
        "min_p",
        0.0,
        "Draws from tokens at least this fraction as likely as the likeliest.",
        lower_bound=0.0,
        upper_bound=1.0,
    )
    flags.DEFINE_float(
        "repetition_penalty",
        1.0,
        "Divides positive logits, and multiplies negative ones, of tokens that prompt or answer hold already; above 0, "
        "and more than 1 discourages them.",
        lower_bound=0.0,
        upper_bound=10.0,
    )
    for name, how in (("presence", "once from the logit"), ("frequency", "for each time from the logit")):
        flags.DEFINE_float(
            f"{name}_penalty",
            0.0,
            f"Subtracted {how} of tokens that the answer holds already.",
            lower_bound=-2.0,
            upper_bound=2.0,
        )
    flags.DEFINE_multi_string("stop", [], "Text that ends the answer, and is not part of it. May be given repeatedly.")
    flags.DEFINE_integer(
        "thinking_token_budget",
        None,
        "Most tokens that the answer may think, before thinking is ended for it. Default: no limit.",
        lower_bound=0,
    )
    flags.DEFINE_integer(
        "seed",
        None,
        "Seed of the draws: the same seed gives the same answer. Default: a new one each time; the last line shows it.",
        lower_bound=0,
        upper_bound=MAX_SEED,
    )


def params_from_flags() -> SamplingParams:
    """What the flags of `define_flags` ask for. Raises: what `SamplingParams` raises."""
    return SamplingParams(**{name: getattr(flags.FLAGS, name) for name in _NAMES})
