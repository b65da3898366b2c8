"""What stands for an image in a prompt: its size, and one pad id per vision token."""

import math

_PATCH = 14  # pixels; two by two patches become one token
_MAX_PATCHES = 65_536
_MAX_SIDE = 512 * _PATCH  # pixels


def num_vision_tokens(width: int, height: int) -> int:
    """How many tokens an image of this size, in pixels, becomes: up to 16,384 and what padding adds."""
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width} x {height} pixels has no content; both sides must be at least 1")
    patches = max(width // _PATCH, 1) * max(height // _PATCH, 1)
    scale = min(1.0, math.sqrt(_MAX_PATCHES / patches), _MAX_SIDE / width, _MAX_SIDE / height)
    sides = (max(min(int(side * scale), _MAX_SIDE), 1) for side in (width, height))
    columns, rows = (math.ceil(side / (2 * _PATCH)) for side in sides)
    return columns * rows


def image_prompt(width: int, height: int) -> str:
    """The control string for an image, in pixels as it was given; the request's `image_prompts` holds one per image."""
    pads = "<|media_pad|>" * num_vision_tokens(width, height)
    return f"<|media_begin|>image {width}x{height}<|media_content|>{pads}<|media_end|>"
